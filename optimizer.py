"""AdamW on the coordinates: its rate, its state made at the start, whole on every rank or shared out over them, and whole again in a checkpoint.

AdamW holds two moments a trained number, 8 bytes in fp32: for a 3B teacher in mode `core` more than the network itself. With
--shard-optimizer each rank holds them for some of the coordinates, steps those, and sends the result to the others (ZeRO, stage 1:
PyTorch's own ZeroRedundancyOptimizer). Every number is updated by the same arithmetic, so the run is the same bit for bit. In
`training_state` a moment that another rank holds is a tensor on the meta device: a shape without memory.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

import runs
from flags import Args
from lrc import Clone
from teachers import Refusal


def learning_rate(args: Args, step: int) -> float:
    """lr of the step-th update, counted from 0: a linear warm-up, then a decay that would reach 0 one step after the last."""
    warm = round(args.warmup * args.steps)
    if step < warm:
        return args.lr * (step + 1) / warm
    progress = (step - warm) / max(1, args.steps - warm)  # in [0, 1)
    decay = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}
    return args.lr * decay[args.schedule]


def make_optimizer(clone: Clone, lr: float, weight_decay: float = 0.0, shard: bool = False) -> torch.optim.Optimizer:
    """AdamW with its state made here, not at the first step, so that a checkpoint has a place to go. Weight decay on matrices only."""
    matrices = [p for p in clone.coordinates().values() if p.dim() == 2]
    vectors = [p for p in clone.coordinates().values() if p.dim() != 2]
    groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=vectors, weight_decay=0.0)]
    settings = dict(lr=lr, betas=(0.9, 0.999), fused=True)
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings) if shard else torch.optim.AdamW(groups, **settings)
    adamw = of_this_rank(optimizer)
    for p in [p for group in adamw.param_groups for p in group["params"]]:
        adamw.state[p] = dict(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    return optimizer


def of_this_rank(optimizer: torch.optim.Optimizer) -> torch.optim.AdamW:
    """The AdamW that steps this rank's share of the coordinates: all of them, unless the state is sharded."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def training_state(clone: Clone, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What a resumed run needs besides the step: coordinates, AdamW's moments (this rank's; the others' as shapes on the meta device),
    the frame. The data order has no state."""
    tensors, state = {} if clone.frame is None else {"frame": clone.frame}, of_this_rank(optimizer).state
    for name, p in clone.coordinates().items():
        away = torch.empty_like(p, device="meta")
        moments = state.get(p) or dict(step=away.new_empty(()), exp_avg=away, exp_avg_sq=away)
        tensors |= {f"coordinates/{name}": p} | {f"adamw/{name}/{key}": value for key, value in moments.items()}
    return tensors


def gathered(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """training_state of a sharded run, called by all ranks -> the same with every moment there, on the CPU of rank 0; {} on the others.
    One tensor travels at a time, so no device ever holds more than one moment that is not its own."""
    device = next(iter(tensors.values())).device
    owner = torch.tensor([-1 if t.is_meta else rank for t in tensors.values()], device=device)
    dist.all_reduce(owner, dist.ReduceOp.MAX)  # coordinates and frame are on all ranks: the last one's serve as well
    whole = {}
    for (name, t), source in zip(tensors.items(), owner.tolist()):
        if name.startswith("adamw/"):
            t = torch.empty_like(t, device=device) if t.is_meta else t
            dist.broadcast(t, source)
        if rank == 0:
            whole[name] = t.detach().cpu()
    return whole


def resume(run: Path, clone: Clone, optimizer: torch.optim.Optimizer, say: Callable[[str], None]) -> int:
    """Fill clone and optimizer from the newest complete checkpoint -> the step it was taken after."""
    folder, state = runs.find_checkpoint(run, say)
    tensors = runs.read_tensors(folder / "state.safetensors")
    runs.restore(f"{run}/checkpoint", training_state(clone, optimizer), tensors)
    clone.deploy()
    deployed = runs.read_tensors(folder / "student.safetensors")
    runs.match(folder / "student.safetensors", clone.weights, deployed)
    for name, w in clone.weights.items():  # singular vectors of near-equal singular values depend on the LAPACK at hand
        if not torch.allclose(w.cpu(), deployed[name], rtol=0, atol=1e-4 * float(deployed[name].abs().max())):
            raise Refusal(f"{run}: the teacher's span for {name} comes out differently on this machine than where the run "
                          "began; resume there, with the same torch and thread count")
    return state["step"]
