"""The loop: distil a teacher into a narrower student, or pretrain a network from nothing.

    python train.py                                                          # the embedded teacher, mode core
    python train.py --teacher llama3.2-3b --mode core --plan                 # what a run would be; no weights, no network
    torchrun --standalone --nproc_per_node=8 train.py --teacher llama3.2-3b --mode core --data FOLDER
    python train.py --resume --out RUN                                       # go on where RUN stopped

One optimizer step, in order: deploy (coordinates -> the student's weights), all micro-batches on the plain student,
pull back (gradients of the weights -> gradients of the coordinates), clip, AdamW. See lrc.Clone.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import core
import lrc
import merge
import plan
import runs
from data import Tokenizer, Tokens, prepare
from distill import IGNORE, Objective, evaluate, losses
from model import Config, Transformer
from teachers import PRESETS, Refusal, read_json, resolve

# --------------------------------------------------------------------------------------------- flags


def flag(default, help, **more):
    return field(default=default, metadata=dict(help=help, **more))


@dataclass
class Args:
    stage: str = flag("distill", "distill a teacher, or pretrain: random weights in the shape of --teacher, CE only", choices=["distill", "pretrain"])
    teacher: str = flag("tiny", f"preset ({', '.join(PRESETS)}), hub id, or local HF folder")
    revision: str = flag("", "hub revision of the teacher (default: newest; the exact commit is recorded)")
    mode: str = flag("core", "how the student's MLP trains", choices=list(core.MODES))
    width: int = flag(0, "student width r (0: the preset's, else half the teacher's)")
    data: str = flag("", "stdlib, a .txt/.md/.py/.jsonl file, a folder of such, or a prepared folder (default for tiny: stdlib)")
    steps: int = flag(600, "optimizer steps")
    batch_size: int = flag(16, "sequences a micro-batch, a rank")
    seq_len: int = flag(128, "tokens a sequence")
    accum: int = flag(1, "micro-batches a step, a rank")
    lr: float = flag(0.0, "peak learning rate (0: the preset's, else 1e-4)")
    schedule: str = flag("linear", "decay after warm-up", choices=["linear", "cosine", "constant"])
    warmup: float = flag(0.05, "warm-up as a share of the steps (published: 0.005 of 200k steps)")
    weight_decay: float = flag(0.0, "AdamW's, on matrices only")
    clip: float = flag(1.0, "largest gradient norm over all coordinates")
    temperature: float = flag(40.0, "T of the KL")
    w_kl: float = flag(1.0, "weight of the KL (its scale 1.28 T^2 is inside the term)")
    w_ce: float = flag(1.0, "weight of the cross-entropy")
    w_align: float = flag(0.2, "lambda, weight of the alignment")
    attention: str = flag("cosine", "attention alignment", choices=["cosine", "mse"])
    calibration_tokens: int = flag(32768, "training tokens that the calibrated start sees; well above the teacher's width")
    seed: int = flag(1234, "seed of the data order and of random weights; the calibrated start uses none")
    out: str = flag("runs/tiny-core", "run folder")
    resume: bool = flag(False, "go on from the newest checkpoint of --out, with the flags stored there")
    compile: bool = flag(False, "torch.compile the student and the teacher")
    dtype: str = flag("auto", "autocast: auto is bfloat16 where CUDA has it, else float32", choices=["auto", "float32", "bfloat16"])
    eval_every: int = flag(100, "steps between evaluations on held-out text")
    eval_tokens: int = flag(32768, "held-out tokens an evaluation reads, evenly spread")
    save_every: int = flag(200, "steps between checkpoints")
    log_every: int = flag(20, "steps between progress lines; metrics.jsonl gets every step")
    plan: bool = flag(False, "print what this run would be, and stop")


FREE_ON_RESUME = {"resume", "out", "compile", "log_every", "eval_every", "save_every", "plan"}


def parse(argv: list[str] | None) -> Args:
    """Command line -> Args. With --resume the run folder's own flags are the defaults, and contradicting one is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in fields(Args):
        meta, name = dict(f.metadata), "--" + f.name.replace("_", "-")
        meta["help"] += "" if f.default in ("", False, 0) else f" (default: {f.default})"
        kind = dict(action="store_true") if isinstance(f.default, bool) else dict(type=type(f.default), default=f.default)
        parser.add_argument(name, **kind, **meta)
    args = Args(**vars(parser.parse_args(argv)))
    if args.resume:
        stored = read_json(Path(args.out) / "config.json")["args"]
        parser.set_defaults(**stored)
        again = Args(**vars(parser.parse_args(argv)))
        for f in fields(Args):
            if f.name not in FREE_ON_RESUME and getattr(again, f.name) != stored[f.name]:
                raise Refusal(f"--{f.name.replace('_', '-')} {getattr(again, f.name)} contradicts {args.out}/config.json "
                              f"({stored[f.name]}); a resumed run keeps its flags")
        args = again
    preset = PRESETS.get(args.teacher, {})
    args.width = args.width or preset.get("width", 0)
    args.lr = args.lr or preset.get("lr", 1e-4)
    args.data = args.data or ("stdlib" if args.teacher == "tiny" else "")
    for name in ("steps", "batch_size", "seq_len", "accum", "eval_every", "save_every", "log_every"):
        if getattr(args, name) < 1:
            raise Refusal(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if not math.isfinite(args.lr) or args.lr <= 0 or args.clip <= 0 or args.temperature <= 0:
        raise Refusal("--lr, --clip and --temperature must be positive numbers")
    return args


def learning_rate(args: Args, step: int) -> float:
    """lr of the step-th update, counted from 0: a linear warm-up, then a decay that would reach 0 one step after the last."""
    warm = round(args.warmup * args.steps)
    if step < warm:
        return args.lr * (step + 1) / warm
    progress = (step - warm) / max(1, args.steps - warm)  # in [0, 1)
    decay = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}
    return args.lr * decay[args.schedule]


# ------------------------------------------------------------------------------------- where it runs


@dataclass(frozen=True)
class Place:
    """Device, ranks and precision, decided once."""
    device: torch.device
    rank: int
    world: int
    autocast: torch.dtype | None

    def precision(self):
        return torch.autocast(self.device.type, self.autocast) if self.autocast else contextlib.nullcontext()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def find_place(args: Args) -> Place:
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    half = args.dtype == "bfloat16" or (args.dtype == "auto" and cuda and torch.cuda.is_bf16_supported())
    return Place(device, rank, world, torch.bfloat16 if half else None)


# ---------------------------------------------------------------------------------------- what trains


def build(args: Args, teacher: Transformer | None, shape: Config, calibration, place: Place) -> lrc.Clone:
    """The clone at step 0. `calibration` is None when a checkpoint will fill it: only its spans are then made."""
    if args.stage == "pretrain":
        student = Transformer(shape)
        student.initialise(args.seed)
        return lrc.Clone(student.to(place.device))
    student = lrc.blank_student(teacher, args.width)
    frame = torch.zeros(shape.hidden_size, args.width, device=place.device)
    if calibration is not None:
        frame = lrc.calibrate(teacher, student, *calibration, place.say)
    return core.open_mlp(lrc.Clone(student, lrc.slices(teacher, student), frame), args.mode)


def make_optimizer(clone: lrc.Clone, args: Args) -> torch.optim.AdamW:
    """AdamW with its state made here, not at the first step, so that a checkpoint has a place to go."""
    matrices = [p for p in clone.coordinates().values() if p.dim() == 2]
    vectors = [p for p in clone.coordinates().values() if p.dim() != 2]
    groups = [dict(params=matrices, weight_decay=args.weight_decay), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.999), fused=True)
    for p in matrices + vectors:
        optimizer.state[p] = dict(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    return optimizer


def training_state(clone: lrc.Clone, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """What a resumed run needs besides the step: coordinates, AdamW's moments, the frame. The data order has no state."""
    tensors = {} if clone.frame is None else {"frame": clone.frame}
    for name, p in clone.coordinates().items():
        tensors |= {f"coordinates/{name}": p} | {f"adamw/{name}/{key}": value for key, value in optimizer.state[p].items()}
    return tensors


def resume(args: Args, clone: lrc.Clone, optimizer: torch.optim.AdamW) -> int:
    """Fill clone and optimizer from the newest checkpoint -> the step it was taken after."""
    state, tensors, deployed = runs.load_checkpoint(Path(args.out))
    runs.restore(f"{args.out}/checkpoint", training_state(clone, optimizer), tensors)
    clone.deploy()
    for name, w in clone.weights.items():  # singular vectors of near-equal singular values depend on the LAPACK at hand
        if not torch.allclose(w.cpu(), deployed[name], rtol=0, atol=1e-4 * float(deployed[name].abs().max())):
            raise Refusal(f"{args.out}: the teacher's span for {name} comes out differently on this machine than where the run "
                          "began; resume there, with the same torch and thread count")
    return state["step"]


def sample(net: Transformer, tokenizer: Tokenizer, ids: torch.Tensor) -> str:
    """A greedy continuation of the first 32 tokens of ids (1, T), as text: prompt -> continuation."""
    prompt = ids[:, :32]
    tokens = net.generate(prompt, 48, {tokenizer.separator})[0].tolist()
    return f"{tokenizer.decode(tokens[:32])} -> {tokenizer.decode(tokens[32:])}"


# ------------------------------------------------------------------------------------------- the run


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.plan:
        return plan.show(args)
    place = find_place(args)
    torch.manual_seed(args.seed)
    run = Path(args.out)
    if place.rank == 0 and not args.resume and runs.newest_checkpoint(run):
        raise Refusal(f"{run} already holds a run: add --resume to go on with it, or choose another --out")

    # the teacher, its tokenizer, the data
    folder, origin = resolve(args.teacher, args.revision or None)
    shape = Config.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
    args.width = args.width or shape.hidden_size // 2
    if args.stage == "distill":
        plan.check_width(shape, args.width)
    if not args.data:
        raise Refusal("--data is needed with this teacher: a .txt or .jsonl file, a folder, or stdlib")
    if args.seq_len > shape.max_position_embeddings:
        raise Refusal(f"--seq-len {args.seq_len} is beyond the teacher's {shape.max_position_embeddings} positions")
    tokenizer = Tokenizer(folder)
    if tokenizer.vocab_size > shape.vocab_size:
        raise Refusal(f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {shape.vocab_size} rows")
    shards = prepare(args.data, tokenizer, quiet=place.rank != 0)
    train = Tokens(shards, "train", args.seq_len, tokenizer, args.seed)
    held = Tokens(shards, "val", args.seq_len, tokenizer)
    held_batches = lambda: held.spread(max(1, args.eval_tokens // args.seq_len))
    distil = args.stage == "distill"
    teacher = Transformer.from_pretrained(folder, device=str(place.device)).requires_grad_(False) if distil else None

    # the clone, its optimizer, the objective
    calibration = None if args.resume else [torch.cat(part) for part in zip(*train.spread(max(1, args.calibration_tokens // args.seq_len)))]
    clone = build(args, teacher, shape, calibration, place)
    student, coordinates = clone.student, list(clone.coordinates().values())
    if teacher is not None and place.autocast:
        teacher.to(place.autocast)
    optimizer = make_optimizer(clone, args)
    step = resume(args, clone, optimizer) if args.resume else 0
    if place.world > 1:
        for tensor in training_state(clone, optimizer).values():  # one start for all ranks, whatever their hardware
            dist.broadcast(tensor.data, 0)
        clone.deploy()
    objective = Objective(args.temperature, args.w_kl, args.w_ce, args.w_align, args.attention, tokenizer.vocab_size) if distil \
        else Objective(w_kl=0, w_align=0)
    running = torch.compile(student) if args.compile else student  # saving and evaluation keep the plain handle
    guide = torch.compile(teacher) if args.compile and distil else teacher
    ddp = DDP(running, device_ids=[place.device.index] if place.device.type == "cuda" else None) if place.world > 1 else None
    net = ddp or running

    tokens_a_step = args.batch_size * args.seq_len * args.accum * place.world
    place.say(f"{args.stage}: {origin}, {plan.count(sum(p.numel() for p in student.parameters()))} deployed, "
              f"{plan.count(sum(p.numel() for p in coordinates))} trained; {args.batch_size} x {args.seq_len} tokens x {args.accum} "
              f"micro-batches x {place.world} ranks = {tokens_a_step:,} tokens a step, {args.steps} steps; {place.device}, "
              f"{'autocast to bfloat16' if place.autocast else 'float32'}")

    def score(model) -> dict[str, float]:
        with place.precision():
            return evaluate(model, teacher, held_batches(), real_vocab=tokenizer.vocab_size if distil else None)

    def report(at: int) -> dict[str, float]:
        """Held-out figures of the student to the log and the screen."""
        figures = score(student)
        runs.append_metrics(run, {"step": at, "tokens": at * tokens_a_step} | figures)
        place.say(f"step {at:>6}/{args.steps}  held-out: " + "  ".join(f"{k.removeprefix('val_')} {v:.4f}" for k, v in figures.items()))
        return figures

    def save(at: int) -> None:
        runs.save_checkpoint(run, {"step": at, "tokens": at * tokens_a_step}, training_state(clone, optimizer), clone.weights)

    if place.rank == 0:
        if args.resume:
            runs.cut_metrics(run, step)
        else:
            runs.start(run, asdict(args), origin, folder, read_json(shards / "tokens.json"), student.config.to_hf(torch.float32))
            if distil:
                runs.append_metrics(run, {"step": 0, "teacher": score(teacher)})
            report(0)

    # the loop
    clock, spent = time.perf_counter(), 0.0  # spent: seconds of training alone, for tokens/s
    while step < args.steps:
        micro = [train.batch(((step * args.accum + m) * place.world + place.rank) * args.batch_size, args.batch_size)
                 for m in range(args.accum)]
        valid = torch.tensor(float(sum((y != IGNORE).sum() for _, y in micro)), device=place.device)
        if place.world > 1:
            dist.all_reduce(valid)
        clone.zero_grad()
        clone.deploy()
        logged: dict[str, torch.Tensor] = {}
        for m, (ids, targets) in enumerate(micro):
            ids, targets = ids.to(place.device, non_blocking=True), targets.to(place.device, non_blocking=True)
            # gradients cross ranks with the last micro-batch only; forward must be inside no_sync too
            with ddp.no_sync() if ddp and m + 1 < args.accum else contextlib.nullcontext():
                with place.precision():
                    sums = losses(net, guide, ids, targets, objective, clone.frame, student.lm_head.weight)
                # mean over the valid tokens of all ranks and micro-batches; DDP divides by world, so world is put back
                (sums["loss"] * (place.world / valid)).backward()
            for name, value in sums.items():
                logged[name] = logged.get(name, 0.0) + value.detach() / valid
        clone.pull_back()
        norm = torch.nn.utils.clip_grad_norm_(coordinates, args.clip)
        values = torch.stack([v.float() for v in logged.values()])
        if place.world > 1:
            dist.all_reduce(values)
        terms = dict(zip(logged, values.tolist())) | {"grad_norm": norm.item()}  # the step's one wait for the device
        if not all(math.isfinite(v) for v in terms.values()):
            raise Refusal(f"step {step + 1}: {', '.join(k for k, v in terms.items() if not math.isfinite(v))} not finite; the "
                          f"checkpoint in {run} is from before it: try a smaller --lr or a longer --warmup")
        lr = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        step += 1

        now = time.perf_counter()
        spent, taken, clock = spent + now - clock, now - clock, now
        if place.rank == 0:
            runs.append_metrics(run, {"step": step, "tokens": step * tokens_a_step} | terms
                                | {"lr": lr, "tokens_per_second": round(tokens_a_step / taken, 1)})
            if step % args.log_every == 0 or step == args.steps:
                left = int((args.steps - step) * taken)
                place.say(f"step {step:>6}/{args.steps}  " + "  ".join(f"{k} {v:.4f}" for k, v in terms.items() if k != "grad_norm")
                          + f"  |g| {terms['grad_norm']:.2f}  lr {lr:.2e}  {tokens_a_step / taken:,.0f} tok/s  left {left // 60}:{left % 60:02d}")
            last = step == args.steps
            clone.deploy()
            if step % args.eval_every == 0 or last:
                report(step)
            if step % args.save_every == 0 or last:
                save(step)
            clock = time.perf_counter()
    if place.world > 1:
        dist.barrier()
    if place.rank == 0:
        merge.export(run)
        runs.draw_curves(run)
        trained = {"deployed": sum(p.numel() for p in student.parameters()), "trained": sum(p.numel() for p in coordinates)}
        place.say(f"\n{runs.table(run, trained)}\n\nstudent: {run}/student   curves: {run}/curves.png")
        for who, network in (("teacher", teacher), ("student", student)):
            if network is not None:
                place.say(f"\n{who}: {sample(network, tokenizer, next(held_batches())[0].to(place.device))!r}")
    if place.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Refusal as refusal:
        sys.exit(f"error: {refusal}")
