"""The loop: distil a teacher into a narrower student; or pretrain a network from nothing; or fine-tune one on chats.

    python train.py                                                          # the embedded teacher, mode core
    python train.py --teacher llama3.2-3b --mode core --plan                 # what a run would be; no weights, no network
    torchrun --standalone --nproc_per_node=8 train.py --teacher llama3.2-3b --mode core --data FOLDER
    python train.py --stage sft --init RUN/student --data chats.jsonl        # fine-tune the merged student
    python train.py --resume --out RUN                                       # go on where RUN stopped

One optimizer step, in order: deploy (coordinates -> the student's weights), all micro-batches on the plain student,
pull back (gradients of the weights -> gradients of the coordinates), clip, AdamW. See lrc.Clone.
"""
from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import core
import lrc
import merge
import plan
import runs
import watch
from data import Mixture, Tokens, describe, open_split, place_in_order, prepared
from distill import IGNORE, Objective, evaluate, losses
from config import Config
from model import Transformer
from flags import Args, launched, network, objective_of, parse, teacher_dtypes
from optimizer import gathered, learning_rate, make_optimizer, resume, training_state
from prepare import Choice
from teachers import Refusal, read_json, resolve
from tokenizer import Tokenizer


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

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device, without a wait for what it is at."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def __str__(self) -> str:
        return f"{self.device.type}, {'autocast to bfloat16' if self.autocast else 'float32'}"

    def say(self, text: str) -> None:
        if self.rank == 0:
            watch.tell(text)


def find_place(args: Args) -> Place:
    told = launched()
    rank, world, local = (told.get(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    cuda = torch.cuda.is_available()
    if cuda and 0 < (gpus := torch.cuda.device_count()) <= local:
        raise Refusal(f"rank {rank}: this machine has {gpus} GPU{'s' * (gpus > 1)}, too few for LOCAL_RANK={local}; give torchrun --nproc_per_node={gpus}")
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        try:
            dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(hours=6))  # ranks wait while rank 0 tokenises or evaluates
        except ValueError as error:  # an environment variable is missing or no number
            raise Refusal(f"WORLD_SIZE={world}, but {error}; start several ranks with torchrun, or unset WORLD_SIZE for one") from None
    half = args.dtype == "bfloat16" or (args.dtype == "auto" and cuda and torch.cuda.is_bf16_supported(including_emulation=False))
    return Place(device, rank, world, torch.bfloat16 if half else None)


# ---------------------------------------------------------------------------------------- what trains


def build(args: Args, folder: Path, teacher: Transformer | None, shape: Config, calibration, place: Place) -> lrc.Clone:
    """The clone at step 0; in a resumed run only its spans are made, the checkpoint fills it. `calibration`: (ids, targets), for a calibrated start."""
    if args.stage != "distill" or args.mode == "scratch":  # every weight is its own coordinate
        student = Transformer.from_pretrained(folder) if args.stage == "sft" else Transformer(shape.at_width(args.width))
        if args.stage != "sft":
            student.initialise(args.seed)
        return lrc.Clone(student.to(place.device))
    student = lrc.blank_student(teacher, args.width)
    frame = torch.zeros(shape.hidden_size, args.width, device=place.device)
    if not args.resume:
        frame = lrc.calibrate(teacher, student, *calibration, place.say) if args.init == "calibrated" else lrc.random_start(teacher, student, args.init, args.seed)
    maps = lrc.plain_maps(teacher, student, args.coordinates, opened=() if args.mode == "lrc" else core.MLP)
    return core.open_mlp(lrc.Clone(student, maps, frame), args.mode, args.seed, args.bases, teacher)


def share_start(clone: lrc.Clone, teacher: Transformer | None) -> None:
    """One start for all ranks, whatever their hardware: rank 0's. AdamW's moments are zeros, or out of one file; so is the teacher."""
    bases = {f"{name}'s {kind}": basis for name, m in clone.maps.items() for kind, basis in m.named_buffers()}
    start = clone.coordinates() | ({} if clone.frame is None else {"the frame": clone.frame}) | bases
    for tensor in start.values():
        dist.broadcast(tensor.data, 0)
    clone.deploy()
    theirs = {} if teacher is None else {f"the teacher's {name}": w for name, w in teacher.named_parameters()}
    watch.check_ranks(start | theirs | dict(clone.student.named_parameters()), "at the start")


def sample(net: Transformer, tokenizer: Tokenizer, ids: torch.Tensor) -> str:
    """The first 32 tokens of ids (1, T) as text, and after `>>>` the network's own greedy continuation."""
    prompt = ids[:, :32]
    tokens = net.generate(prompt, 48, {tokenizer.separator})[0].tolist()
    return f"{tokenizer.decode(tokens[:32])}>>>{tokenizer.decode(tokens[32:])}"


# ------------------------------------------------------------------------------------------- the run


def take_step(clone: lrc.Clone, optimizer, net, teacher, micro: list, objective: Objective, lr: float, clip: float, place: Place,
              asked: list[int]) -> tuple[dict[str, float], bool]:
    """One optimizer step over this rank's micro-batches [(ids, targets)] -> the loss terms, means over the step's valid tokens, with the
    gradient norm; and whether any rank was `asked` to stop. Where a figure is not finite, nothing is updated. `net` is the student as
    it runs: plain, compiled, or wrapped by DDP."""
    valid = torch.full((), float(sum((targets != IGNORE).sum() for _, targets in micro)), device=place.device)
    if place.world > 1:
        dist.all_reduce(valid)
    valid.clamp_(min=1)  # a step of chats may hold no assistant token at all: its loss is 0, not 0/0
    clone.zero_grad()
    clone.deploy()
    writers = [(block.self_attn.o_proj.weight, block.mlp.down_proj.weight) for block in clone.student.layers]
    logged: dict[str, torch.Tensor] = {}
    for m, (ids, targets) in enumerate(micro):
        ids, targets = place.put(ids), place.put(targets)
        # gradients cross ranks with the last micro-batch only; the forward, too, must be inside no_sync
        with net.no_sync() if place.world > 1 and m + 1 < len(micro) else contextlib.nullcontext():
            with place.precision():
                sums = losses(net, teacher, ids, targets, objective, clone.frame, clone.student.lm_head.weight, writers)
            # mean over the valid tokens of all ranks and micro-batches; DDP divides by world, so world is put back
            (sums["loss"] * (place.world / valid)).backward()
        for name, value in sums.items():
            logged[name] = logged.get(name, 0.0) + value.detach() / valid
    clone.pull_back()
    coordinates = list(clone.coordinates().values())
    norm = torch.nn.utils.get_total_norm([p.grad for p in coordinates if p.grad is not None])
    logged["grad_norm"] = norm / place.world  # the same on each rank: its sum is itself
    logged["stop"] = torch.full_like(valid, bool(asked))
    values = torch.stack([v.float() for v in logged.values()])
    if place.world > 1:
        dist.all_reduce(values)
    figures = dict(zip(logged, values.tolist()))  # the step's one wait for the device
    stop = figures.pop("stop") > 0
    if all(map(math.isfinite, figures.values())):
        torch.nn.utils.clip_grads_with_norm_(coordinates, clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return figures, stop


def tokens_of(args: Args, folder: Path, shape: Config, place: Place) -> tuple[Tokenizer, dict, Tokens | Mixture, Tokens | Mixture]:
    """(tokenizer, what the data is, training split, held-out split), checked against the network."""
    if not args.data:
        raise Refusal("--data is needed: " + ("a .jsonl of chats" if args.stage == "sft" else "a .txt or .jsonl file, a folder, hub:OWNER/NAME, or stdlib"))
    if args.seq_len > shape.max_position_embeddings:
        raise Refusal(f"--seq-len {args.seq_len} is beyond the model's {shape.max_position_embeddings} positions")
    tokenizer = Tokenizer(folder)
    tokenizer.must_fit(shape.vocab_size, folder)
    choice = Choice(chats=args.stage == "sft")
    found = runs.shards_of(Path(args.out)) if args.resume else None
    if place.rank == 0 and not found:
        prepared(args.data, tokenizer, choice=choice)
    if place.world > 1:
        dist.barrier()  # the others find what rank 0 prepared
    folders, weights = found or prepared(args.data, tokenizer, quiet=True, choice=choice)
    source = describe(args.data, folders) | dict(folders=list(map(str, folders)), weights=weights)
    if args.doc_mask and any(part.get("separator_inside") for part in source.get("parts", [source])):
        raise Refusal(f"--doc-mask: the chat template writes the separator inside the chats of {args.data}, so where one ends cannot be told; leave --doc-mask out")
    return (tokenizer, source, open_split(folders, weights, "train", args.seq_len, tokenizer, args.seed),
            open_split(folders, weights, "val", args.seq_len, tokenizer))


def main(argv: list[str] | None = None) -> None:
    args = parse(argv, __doc__)
    if args.plan:
        return plan.show(args)
    run, distil = Path(args.out), args.stage == "distill"
    runs.check_folder(run, args.resume)
    place = find_place(args)

    folder, origin = resolve(network(args), args.revision or None)
    if not Path(network(args)).is_dir():
        args.revision = args.revision or origin.partition("@")[2]  # a resumed run takes the same commit
    shape = Config.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
    args.width = (args.width or shape.hidden_size // 2) if distil else shape.hidden_size
    if distil:
        plan.check_width(shape, args.width)
    tokenizer, source, train, held = tokens_of(args, folder, shape, place)
    start, loop = (getattr(torch, name) for name in teacher_dtypes(args, shape.dtype, "bfloat16" if place.autocast else "float32"))
    if args.bases == "implicit" and start != loop:
        raise Refusal(f"--bases implicit reads the teacher's weights at every step, and in {str(loop).removeprefix('torch.')} those of {folder} would be others: "
                      "give --teacher-dtype float32, or --bases compact")
    teacher = Transformer.from_pretrained(folder, start, str(place.device)).requires_grad_(False) if distil else None
    identity = dict(teacher=origin, **({"teacher_weights": runs.weights_of(folder)} if distil else {}), data=source, ranks=place.world)
    if args.resume:
        runs.same(run, identity)
        if told := runs.elsewhere(run, str(place)):
            place.say(told)

    with runs.lock(run) if place.rank == 0 else contextlib.nullcontext():
        if place.rank == 0:
            runs.check_folder(run, args.resume)  # another process may have had the folder meanwhile
        calibrated = distil and args.mode != "scratch" and args.init == "calibrated" and not args.resume
        calibration = [torch.cat(part) for part in zip(*train.spread(max(1, args.calibration_tokens // args.seq_len)))] if calibrated else None
        clone = build(args, folder, teacher, shape, calibration, place)
        if distil:
            teacher.to(loop)
        if place.rank == 0 and not args.resume:
            runs.start(run, asdict(args), identity, folder, clone.student.config.to_hf(torch.float32), str(place))
        stopped = carry_out(args, run, place, clone, teacher, tokenizer, train,
                            lambda: held.spread(max(1, args.eval_tokens // args.seq_len), max(1, 2048 // args.seq_len)))
    if place.world > 1:
        dist.destroy_process_group()
    if stopped:
        sys.exit(128 + stopped)


def carry_out(args: Args, run: Path, place: Place, clone: lrc.Clone, teacher: Transformer | None, tokenizer: Tokenizer, train: Tokens | Mixture,
              held_batches) -> int:
    """From step 0, or from the newest checkpoint, to --steps, and what that leaves in the run folder -> 0, or the signal that stopped it before."""
    student, distil = clone.student, args.stage == "distill"
    student.checkpointing = args.checkpointing
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    optimizer = make_optimizer(clone, args.lr, args.weight_decay, args.shard_optimizer)
    begun = resume(run, clone, optimizer, place.say) if args.resume else 0
    if place.world > 1:
        share_start(clone, teacher)
    objective = objective_of(args, tokenizer.vocab_size, tokenizer.separator)
    net = torch.compile(student) if args.compile else student  # saving and evaluation keep the plain handle
    guide = torch.compile(teacher) if args.compile and distil else teacher
    if place.world > 1:
        net = DDP(net, device_ids=[place.device.index] if place.device.type == "cuda" else None, gradient_as_bucket_view=True)

    step_tokens = args.batch_size * args.seq_len * args.accum * place.world
    size = {"deployed": sum(p.numel() for p in student.parameters()), "trained": sum(p.numel() for p in clone.coordinates().values())}
    place.say(f"{args.stage}: {network(args)}, {plan.count(size['deployed'])} deployed, {plan.count(size['trained'])} trained; {args.batch_size} x "
              f"{args.seq_len} tokens x {args.accum} micro-batches x {place.world} ranks = {step_tokens:,} tokens a step, {args.steps} steps; "
              f"{place}")

    def score(model: Transformer) -> dict[str, float]:
        with place.precision():
            return evaluate(model, teacher, held_batches(), real_vocab=tokenizer.vocab_size if distil else None, separator=objective.separator)

    def report(step: int) -> None:
        figures = watch.must_be_finite(score(student), step)
        runs.append_metrics(run, {"step": step, "tokens": step * step_tokens} | figures)
        place.say(f"step {step:>6}/{args.steps}  held-out: " + "  ".join(f"{k.removeprefix('val_')} {v:.4f}" for k, v in figures.items()))

    if place.rank == 0 and args.resume:
        runs.cut_metrics(run, begun, place.say)
    elif place.rank == 0:
        if distil:
            runs.append_metrics(run, {"step": 0, "teacher": watch.must_be_finite(score(teacher), 0, "the teacher's")})
        report(0)

    with watch.stop_requests() as asked:
        step, stop = loop(args, run, place, clone, optimizer, net, guide, objective, train, begun, report, asked)
    if place.world > 1:
        dist.barrier()
    if stop or asked and place.rank == 0:
        if place.rank == 0:
            watch.tell(f"stopped after step {step} of {args.steps}; it is saved in {runs.newest_checkpoint(run)}, and train.py --resume --out {run} goes on", sys.stderr)
        return asked[0] if asked else signal.SIGTERM
    if place.rank == 0:
        finish(run, args.keep, place, size, tokenizer, {"teacher": teacher, "student": student}, next(held_batches())[0][:1])
    return 0


def loop(args: Args, run: Path, place: Place, clone: lrc.Clone, optimizer, net, guide, objective: Objective, train: Tokens | Mixture, step: int,
         report, asked: list[int]) -> tuple[int, bool]:
    """From `step` to --steps, with metrics, evaluations and checkpoints, which rank 0 alone writes -> the last step, which is saved, and whether it was the
    last because a rank was `asked` to stop."""
    begun, step_tokens, stop = step, args.batch_size * args.seq_len * args.accum * place.world, False
    spent = 0.0  # seconds of training alone
    recent = watch.recall(runs.read_metrics(run), step)
    stamp = runs.read_record(run).get("run") if place.rank == 0 else None
    while step < args.steps and not stop:
        clock = time.perf_counter()
        micro = [train.batch(place_in_order(step, m, place.rank, args.accum, place.world, args.batch_size), args.batch_size)
                 for m in range(args.accum)]
        lr = learning_rate(args, step)
        figures, stop = take_step(clone, optimizer, net, guide, micro, objective, lr, args.clip, place, asked)
        step += 1
        taken = time.perf_counter() - clock
        spent += taken
        with place.precision():
            figures = watch.judge(args, step, figures, recent, lambda: watch.blame(clone, guide, micro, objective.separator), place.say)
        if place.world > 1 and step % args.check_ranks == 0:
            watch.check_ranks(clone.coordinates(), f"after step {step}")
        last = step == args.steps
        evaluates = last or step % args.eval_every == 0
        saves = last or stop or step % args.save_every == 0
        state = training_state(clone, optimizer) if saves else {}
        if saves and args.shard_optimizer:
            state = gathered(state, place.rank)
        if place.rank != 0:
            continue
        runs.append_metrics(run, {"step": step, "tokens": step * step_tokens} | figures | {"lr": lr, "tokens_per_second": round(step_tokens / taken, 1)})
        if "loss" in figures and (step % args.log_every == 0 or last):
            left = int((args.steps - step) * spent / (step - begun))
            place.say(f"step {step:>6}/{args.steps}  " + "  ".join(f"{k} {figures[k]:.4f}" for k in ("kl", "ce", "align", "loss") if k in figures)
                      + f"  |g| {figures['grad_norm']:.2f}  lr {lr:.2e}  {step_tokens / taken:,.0f} tok/s  left {left // 60}:{left % 60:02d}")
        if evaluates or saves:
            clone.deploy()  # the student still holds the weights from before this step's update
        if evaluates:
            report(step)
        if saves:
            runs.save_checkpoint(run, {"step": step, "tokens": step * step_tokens, "run": stamp}, state, clone.weights, args.keep)
    return step, stop


def finish(run: Path, keep: int, place: Place, size: dict[str, int], tokenizer: Tokenizer, models: dict[str, Transformer | None],
           prompt: torch.Tensor) -> None:
    """The student's folder, the curves, the table, and what both models make of a held-out beginning."""
    with runs.writing(run / "student"):
        merge.export(run)
    runs.tidy(run, keep)
    runs.draw_curves(run)
    place.say(f"\n{runs.table(run, size)}\n\nstudent: {run}/student   curves: {run}/curves.png")
    for who, model in models.items():
        if model is not None:
            place.say(f"\n--- {who}, on from a held-out beginning\n{sample(model, tokenizer, prompt.to(place.device))}")


if __name__ == "__main__":
    watch.interruptible()
    for screen in (sys.stdout, sys.stderr):
        if screen:  # None where it was closed
            screen.reconfigure(errors="backslashreplace")  # a sample holds what this screen may have no letters for
    try:
        main()
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            sys.exit(f"error: out of memory ({' '.join(str(error).split())[:200] or 'the host has no more'}); begin anew with a smaller --batch-size and more --accum; --checkpointing and "
                     "--shard-optimizer, which a --resume may add, take less and give the same numbers")
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        sys.exit(f"error: rank {os.environ['RANK']} lost the other ranks; the first to fail says why, --resume goes on from the newest checkpoint ({str(error).splitlines()[0]})")
    except KeyboardInterrupt as interrupted:
        if os.environ.get("RANK", "0") == "0":
            watch.tell("interrupted, nothing more was saved; the same command with --resume goes on from the newest checkpoint, without it begins anew if "
                       "there is none", sys.stderr)
        sys.exit(128 + (interrupted.args or (signal.SIGINT,))[0])
