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
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import checkpoints
import core
import lrc
import merge
import plan
import runs
import starts
import watch
from config import Config
from context import Context, Place, find_place
from data import Mixture, Tokens, describe, open_split, prepared
from distill import IGNORE, Objective, losses
from files import Refusal, any_letter_shows, read_json, writing
from flags import Args, network, parse, teacher_dtypes
from model import Transformer, fingerprint
from optimizer import count_trained, gathered, gradient_norm, learning_rate, make_optimizer, resume, share_out, training_state
from shards import Choice
from teachers import resolve
from tokenizer import Tokenizer

# ---------------------------------------------------------------------------------------- what trains


def build(args: Args, folder: Path, teacher: Transformer | None, shape: Config, calibration, place: Place) -> lrc.Clone:
    """The clone at step 0; in a resumed run only its spans are made, the checkpoint fills it. `calibration`: (ids, targets), for a
    calibrated start."""
    shares = lambda net: share_out({name: w.numel() for name, w in net.named_parameters()}, place.world) if args.shard else None
    if args.stage != "distill" or args.mode == "scratch":  # every weight is its own coordinate
        student = Transformer.from_pretrained(folder) if args.stage == "sft" else Transformer(shape.at_width(args.width))
        if args.stage != "sft":
            student.initialise(args.seed)
        return lrc.Clone(student.to(place.device), owner=shares(student))
    student = lrc.blank_student(teacher, args.width)
    if args.resume:
        frame = torch.zeros(shape.hidden_size, args.width, device=place.device)
    elif args.init == "calibrated":
        frame = starts.calibrate(teacher, student, *calibration, place.say)
    else:
        frame = starts.random_start(teacher, student, args.init, args.seed)
    frame = frame.contiguous()  # NCCL sends no other
    owner = shares(teacher)
    for tensor in [frame, *student.parameters()] if owner else []:
        dist.broadcast(tensor.data, 0)  # each makes the maps of its share from rank 0's start
    maps = lrc.plain_maps(teacher, student, args.coordinates, () if args.mode == "lrc" else core.MLP, owner)
    return core.open_mlp(lrc.Clone(student, maps, frame, owner), args.mode, args.seed, args.bases, teacher)


def share_start(clone: lrc.Clone, teacher: Transformer | None) -> None:
    """One start for all ranks, whatever their hardware: rank 0's. AdamW's moments are zeros, or out of one file; so is the teacher.
    What one rank alone holds (--shard) is in the student's weights, which it sends to the others."""
    start = {} if clone.frame is None else {"the frame": clone.frame}
    if clone.owner is None:
        start |= clone.coordinates() | {f"{name}'s {kind}": basis for name, m in clone.maps.items() for kind, basis in m.named_buffers()}
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
              asked: list[int], compared: str = "") -> tuple[dict[str, float], bool]:
    """One optimizer step over this rank's micro-batches [(ids, targets)] -> the loss terms, means over the step's valid tokens, with the
    gradient norm; and whether any rank was `asked` to stop. Where a figure is not finite, nothing is updated. `net` is the student as
    it runs: plain, compiled, or wrapped by DDP. `compared`: when, if ranks are to compare the weights and gradients that
    all of them hold."""
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
    if compared:  # the ranks hold the same weights and gradients only until each goes on with its own share
        grads = {f"the gradient of {name}": w.grad for name, w in clone.weights.items() if w.grad is not None}
        watch.check_ranks(clone.weights | grads, compared)
    clone.pull_back()
    norm = gradient_norm(clone)
    logged["grad_norm"] = norm / place.world  # the same on each rank: its sum is itself
    logged["stop"] = torch.full_like(valid, bool(asked))  # travels with the losses, so that all ranks stop after the same step
    values = torch.stack([v.float() for v in logged.values()])
    if place.world > 1:
        dist.all_reduce(values)
    figures = dict(zip(logged, values.tolist()))  # the step's one wait for the device
    stop = figures.pop("stop") > 0
    if all(map(math.isfinite, figures.values())):
        torch.nn.utils.clip_grads_with_norm_(clone.coordinates().values(), clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return figures, stop


def tokens_of(args: Args, folder: Path, shape: Config, place: Place) -> tuple[Tokenizer, dict, Tokens | Mixture, Tokens | Mixture]:
    """(tokenizer, what the data is, training split, held-out split), checked against the network."""
    if not args.data:
        what = "a .jsonl of chats" if args.stage == "sft" else "a .txt or .jsonl file, a folder, hub:OWNER/NAME, or stdlib"
        raise Refusal(f"--data is needed: {what}")
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
        raise Refusal(f"--doc-mask: the chat template writes the separator inside the chats of {args.data}, so where one ends cannot be "
                      "told; leave --doc-mask out")
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
        args.bases = core.chosen_bases(args.bases, args.mode, shape.intermediate_size)
    tokenizer, source, train, held = tokens_of(args, folder, shape, place)
    fitted, running = (getattr(torch, name) for name in teacher_dtypes(args, shape.dtype, "bfloat16" if place.autocast else "float32"))
    if args.bases == "implicit" and fitted != running:
        raise Refusal(f"--bases implicit reads the teacher's weights at every step, and in {str(running).removeprefix('torch.')} those of "
                      f"{folder} would be others: give --teacher-dtype float32, or --bases compact")
    teacher = Transformer.from_pretrained(folder, fitted, str(place.device)).requires_grad_(False) if distil else None
    identity = dict(teacher=origin, **({"teacher_weights": fingerprint(folder)} if distil else {}), data=source, ranks=place.world)
    if args.resume:
        runs.same(run, identity)
        if told := runs.elsewhere(run, str(place)):
            place.say(told)

    with runs.lock(run) if place.rank == 0 else contextlib.nullcontext():
        if place.rank == 0:
            runs.check_folder(run, args.resume)  # another process may have had the folder meanwhile
        calibration = None
        if distil and args.mode != "scratch" and args.init == "calibrated" and not args.resume:
            windows = train.spread(max(1, args.calibration_tokens // args.seq_len))
            calibration = [torch.cat(part) for part in zip(*windows)]  # ids, targets
        clone = build(args, folder, teacher, shape, calibration, place)
        if distil:
            teacher.to(running)
        if place.rank == 0 and not args.resume:
            runs.start(run, asdict(args), identity, folder, clone.student.config.to_hf(torch.float32), str(place))
        stopped = carry_out(Context(args, run, place, clone, teacher, tokenizer, train, held))
    if place.world > 1:
        dist.destroy_process_group()
    if stopped:
        sys.exit(128 + stopped)


def carry_out(ctx: Context) -> int:
    """From step 0, or from the newest checkpoint, to --steps, and what that leaves in the run folder -> 0, or the signal that stopped
    it before."""
    args, place, student = ctx.args, ctx.place, ctx.clone.student
    student.checkpointing = args.checkpointing
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    optimizer = make_optimizer(ctx.clone, args.lr, args.weight_decay)
    begun = resume(ctx.run, ctx.clone, optimizer, place.say) if args.resume else 0
    if place.world > 1:
        share_start(ctx.clone, ctx.teacher)
    size = {"deployed": sum(p.numel() for p in student.parameters()), "trained": count_trained(ctx.clone)}
    place.say(f"{args.stage}: {network(args)}, {plan.count(size['deployed'])} deployed, {plan.count(size['trained'])} trained; "
              f"{args.batch_size} x {args.seq_len} tokens x {args.accum} micro-batches x {place.world} ranks = {ctx.step_tokens:,} tokens "
              f"a step, {args.steps} steps; {place}")

    if place.rank == 0 and args.resume:
        runs.cut_metrics(ctx.run, begun, place.say)
    elif place.rank == 0:
        if ctx.teacher is not None:
            runs.append_metrics(ctx.run, {"step": 0, "teacher": ctx.score(ctx.teacher, 0, "the teacher's")})
        ctx.evaluate(0)

    with watch.stop_requests() as asked:
        step, stop = loop(ctx, optimizer, begun, asked)
    if place.world > 1:
        dist.barrier()
    if stop or (asked and place.rank == 0):  # the second: asked after the last step, while it was saved
        if place.rank == 0:
            watch.tell(f"stopped after step {step} of {args.steps}; it is saved in {checkpoints.newest_checkpoint(ctx.run)}, "
                       f"and train.py --resume --out {ctx.run} goes on", sys.stderr)
        return asked[0] if asked else signal.SIGTERM
    if place.rank == 0:
        finish(ctx, size)
    return 0


def loop(ctx: Context, optimizer: torch.optim.Optimizer, step: int, asked: list[int]) -> tuple[int, bool]:
    """From `step` to --steps, with metrics, evaluations and checkpoints, which rank 0 alone writes -> the last step, which is saved,
    and whether it was the last because a rank was `asked` to stop."""
    args, place, clone = ctx.args, ctx.place, ctx.clone
    net = torch.compile(clone.student) if args.compile else clone.student  # saving and evaluation keep the plain handle
    guide = torch.compile(ctx.teacher) if args.compile and ctx.teacher is not None else ctx.teacher
    if place.world > 1:
        net = DDP(net, device_ids=place.device_ids(), gradient_as_bucket_view=True)
    begun, spent, stop = step, 0.0, False  # seconds of training alone
    recent = watch.recall(runs.read_metrics(ctx.run), step)
    stamp = runs.read_record(ctx.run).get("run") if place.rank == 0 else None
    while step < args.steps and not stop:
        clock = time.perf_counter()
        micro, lr = ctx.micro_batches(step), learning_rate(args, step)
        checks = (step + 1) % args.check_ranks == 0 and place.world > 1
        compared = f"in step {step + 1}" if checks and clone.owner is not None else ""
        figures, stop = take_step(clone, optimizer, net, guide, micro, ctx.objective, lr, args.clip, place, asked, compared)
        step += 1
        taken = time.perf_counter() - clock
        spent += taken
        with place.precision():
            figures = watch.judge(args, step, figures, recent, lambda: watch.blame(clone, guide, micro, ctx.objective.separator), place.say)

        evaluates = step % args.eval_every == 0 or step == args.steps
        saves = step % args.save_every == 0 or step == args.steps or stop
        if checks and clone.owner is None:
            watch.check_ranks(clone.coordinates(), f"after step {step}")
        if evaluates or saves:
            clone.deploy()  # the student still holds the weights from before this step's update
        state = training_state(clone, optimizer) if saves else {}
        if saves and clone.owner is not None:
            state = gathered(state, place.rank, place.device)
        if place.rank == 0:
            ctx.log(step, figures, lr, taken, spent / (step - begun) * (args.steps - step))
            if evaluates:
                ctx.evaluate(step)
            if saves:
                where = {"step": step, "tokens": step * ctx.step_tokens, "run": stamp}
                checkpoints.save_checkpoint(ctx.run, where, state, clone.weights, args.keep)
    return step, stop


def finish(ctx: Context, size: dict[str, int]) -> None:
    """The student's folder, the curves, the table, and what both models make of a held-out beginning."""
    with writing(ctx.run / "student"):
        merge.export(ctx.run)
    checkpoints.tidy(ctx.run, ctx.args.keep)
    runs.draw_curves(ctx.run)
    ctx.place.say(f"\n{runs.table(ctx.run, size)}\n\nstudent: {ctx.run}/student   curves: {ctx.run}/curves.png")
    prompt = next(ctx.held_batches())[0][:1].to(ctx.place.device)
    for who, model in (("teacher", ctx.teacher), ("student", ctx.clone.student)):
        if model is not None:
            ctx.place.say(f"\n--- {who}, on from a held-out beginning\n{sample(model, ctx.tokenizer, prompt)}")


if __name__ == "__main__":
    watch.interruptible()
    any_letter_shows()
    try:
        main()
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            told = " ".join(str(error).split())[:200] or "the host has no more"
            shard = " and --shard" if dist.is_initialized() else ""
            sys.exit(f"error: out of memory ({told}); begin anew with a smaller --batch-size and more --accum; --checkpointing{shard}, "
                     "which a --resume may add, takes less and gives the same numbers")
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        sys.exit(f"error: rank {os.environ['RANK']} lost the other ranks; the first to fail says why, --resume goes on from the newest "
                 f"checkpoint ({' '.join(str(error).split())[:200]})")
    except KeyboardInterrupt as interrupted:
        if os.environ.get("RANK", "0") == "0":
            watch.tell("interrupted, nothing more was saved; the same command with --resume goes on from the newest checkpoint, "
                       "without it begins anew if there is none", sys.stderr)
        sys.exit(128 + (interrupted.args or (signal.SIGINT,))[0])
