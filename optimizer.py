"""AdamW on the coordinates: its rate, its state made at the start or taken up at a resume, the coordinates shared out over the ranks.

AdamW holds two moments a trained number, 8 bytes in fp32: for a 3B teacher in mode `core` more than the network itself; and the maps
hold their bases. With --shard each rank makes the maps of some of the matrices only: it alone holds their bases, coordinates and
moments, steps them, and sends the weights to the others (ZeRO, stage 1, with the map between coordinates and weights in it). Every
number comes of the same arithmetic, so the run is the same bit for bit, and a checkpoint holds all of it, on whatever ranks it was.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import checkpoints
from files import Refusal
from flags import Args
from lrc import Clone, of_all_ranks


def learning_rate(args: Args, step: int) -> float:
    """lr of the step-th update, counted from 0: a linear warm-up, then a decay that would reach 0 one step after the last."""
    warm = round(args.warmup * args.steps)
    if step < warm:
        return args.lr * (step + 1) / warm
    progress = (step - warm) / max(1, args.steps - warm)  # in [0, 1)
    decay = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}
    return args.lr * decay[args.schedule]


def make_optimizer(clone: Clone, lr: float, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """AdamW with its state made here, not at the first step, so that a checkpoint has a place to go. Weight decay on matrices only."""
    matrices = [p for p in clone.coordinates().values() if p.dim() == 2]
    vectors = [p for p in clone.coordinates().values() if p.dim() != 2]
    groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), fused=True)
    for p in matrices + vectors:
        optimizer.state[p] = dict(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    return optimizer


# ---------------------------------------------------------------------------------------- shared out


def share_out(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """Weight -> the rank that is to train it: the largest first, each to the rank that has least so far."""
    load, owner = [0] * ranks, {}
    for name in sorted(sizes, key=sizes.get, reverse=True):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return {name: owner[name] for name in sizes}


def count_trained(clone: Clone) -> int:
    """Numbers that train, on all ranks together."""
    count = torch.tensor(sum(p.numel() for p in clone.coordinates().values()), device=clone.student.lm_head.weight.device)
    if clone.owner is not None:
        dist.all_reduce(count)
    return int(count)


def gradient_norm(clone: Clone) -> Tensor:
    """Of all coordinates, on whatever ranks they are: the norm of the norms of each."""
    grads = {name: p.grad for name, p in clone.coordinates().items() if p.grad is not None}
    if clone.owner is None:
        return torch.nn.utils.get_total_norm(grads.values(), foreach=False)  # foreach adds up in another order on CUDA than what is below
    nothing = clone.student.lm_head.weight.new_zeros(())
    norms = torch.stack([torch.linalg.vector_norm(grads[name]) if name in grads else nothing for name in clone.order])  # (all coordinates,)
    dist.all_reduce(norms)  # a number and zeros: exact
    return torch.linalg.vector_norm(norms)


# ---------------------------------------------------------------------------------------- checkpoints


def training_state(clone: Clone, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What a resumed run needs of this rank besides the step: coordinates, AdamW's moments, the frame. The data order has no state."""
    tensors = {} if clone.frame is None else {"frame": clone.frame}
    for name, p in clone.coordinates().items():
        tensors |= {f"coordinates/{name}": p} | {f"adamw/{name}/{key}": value for key, value in optimizer.state[p].items()}
    return tensors


def gathered(tensors: dict[str, Tensor], rank: int, device: torch.device) -> dict[str, Tensor]:
    """The training_state of all ranks, called by all -> on the CPU of rank 0 the whole of it, on the others {}. One tensor travels at
    a time, so no device ever holds more than one that is not its own."""
    told = of_all_ranks({name: t.shape for name, t in tensors.items()})
    whole = {name: t.detach().cpu() for name, t in tensors.items()} if rank == 0 else {}
    for source, shapes in enumerate(told[1:], 1):
        for name, shape in shapes.items():
            if name in told[0]:  # the frame is on every rank
                continue
            if rank == source:
                dist.send(tensors[name].detach().contiguous(), 0)
            elif rank == 0:
                t = torch.empty(shape, device=device)
                dist.recv(t, source)
                whole[name] = t.cpu()
    return whole


def resume(run: Path, clone: Clone, optimizer: torch.optim.Optimizer, say: Callable[[str], None]) -> int:
    """Fill clone and optimizer from the newest complete checkpoint -> the step it was taken after."""
    folder, state = checkpoints.find_checkpoint(run, say)
    tensors, wanted = checkpoints.read_tensors(folder / "state.safetensors"), training_state(clone, optimizer)
    if clone.owner is not None:
        elsewhere = {name for names in of_all_ranks(list(wanted)) for name in names} - wanted.keys()
        tensors = {name: t for name, t in tensors.items() if name not in elsewhere}
    checkpoints.restore(f"{run}/checkpoint", wanted, tensors)
    clone.deploy()
    deployed = checkpoints.read_tensors(folder / "student.safetensors")
    checkpoints.match(folder / "student.safetensors", clone.weights, deployed)
    for name, w in clone.weights.items():  # singular vectors of near-equal singular values depend on the LAPACK at hand
        if not torch.allclose(w.cpu(), deployed[name], rtol=0, atol=1e-4 * float(deployed[name].abs().max())):
            raise Refusal(f"{run}: the teacher's span for {name} comes out differently on this machine than where the run "
                          "began; resume there, with the same torch and thread count")
    return state["step"]
