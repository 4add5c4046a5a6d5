"""What is watched while a run goes on: losses that jump, numbers that are not finite, ranks that drift apart, signals that ask to stop.

The first two read numbers that the loop has on the CPU anyway, and take a closer look (`blame`) only once a step has failed; the
third reads every coordinate (with --shard every weight and gradient), every --check-ranks steps. What is judged by the past takes it
from metrics.jsonl, so a resumed run judges as the uninterrupted one does.
"""
from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from distill import document_mask
from files import Refusal
from flags import Args
from lrc import Clone, of_all_ranks
from model import Transformer

WINDOW = 50        # steps that a loss is compared with
SPIKE = 10.0       # median absolute deviations above their median: of a normal distribution 6.7 standard deviations
MOST_SKIPPED = 10  # steps in a row

# ------------------------------------------------------------------------------------------- a step


def judge(args: Args, step: int, figures: dict[str, float], recent: deque[float | None],
          look: Callable[[], str], say: Callable[[str], None]) -> dict:
    """A step's figures -> what its row in the metrics holds: `spike` too where the loss jumped; where one is not finite `skipped`,
    why, alone, or the run stops. `recent` takes the loss in; `look` finds where a failed step went wrong."""
    if bad := [name for name, value in figures.items() if not math.isfinite(value)]:
        why = f"{', '.join(bad)} not finite; {look()}"
        before = f"step {step}: {why}. Nothing was updated, the newest checkpoint is from before it"
        anew = "begin anew with a smaller --lr or a longer --warmup"
        if args.non_finite == "stop":
            refuse(f"{before}: --resume --non-finite skip goes on past it; or {anew}")
        if skipped(recent) + 1 >= MOST_SKIPPED:
            refuse(f"{before}: {MOST_SKIPPED} steps in a row are too many; {anew}")
        say(f"step {step:>6}/{args.steps}  skipped: {why}")
        figures = {"skipped": why}
    elif height := spike(recent, figures["loss"]):
        say(f"step {step:>6}/{args.steps}  loss {figures['loss']:.4f} is {height:.0f} median deviations above the median "
            f"of the last {WINDOW} steps")
        figures = figures | {"spike": round(height, 1)}
    recent.append(figures.get("loss"))
    return figures


def recall(rows: Iterable[dict], step: int) -> deque[float | None]:
    """The losses of the last WINDOW training steps up to `step`, None for one that was skipped; out of the rows of metrics.jsonl."""
    return deque((row.get("loss") for row in rows if row["step"] <= step and ("loss" in row or "skipped" in row)), maxlen=WINDOW)


def spike(recent: Iterable[float | None], loss: float) -> float:
    """(loss - median) / median absolute deviation, both of the recent losses, where that is above SPIKE, else 0. Without half a window to
    judge by, or where most of them are one number, nothing is a spike."""
    losses = [value for value in recent if value is not None]
    if len(losses) < WINDOW // 2:
        return 0.0
    middle = statistics.median(losses)
    spread = statistics.median(abs(value - middle) for value in losses)
    return (loss - middle) / spread if loss - middle > SPIKE * spread > 0 else 0.0


def skipped(recent: deque[float | None]) -> int:
    """How many steps in a row, up to the last one, were skipped."""
    return next((k for k, loss in enumerate(reversed(recent)) if loss is not None), len(recent))


# ------------------------------------------------------------------------- numbers that are not finite


def blame(clone: Clone, teacher: Transformer | None, micro: list[tuple[Tensor, Tensor]], separator: int | None) -> str:
    """Where a failed step first went wrong, by a second forward pass of its micro-batches; on all ranks the account of the one that
    knows most."""
    device, found = clone.student.lm_head.weight.device, []
    found += [f"weight {name}" for name, w in clone.weights.items() if not w.isfinite().all()][:1]
    for who, net in (("teacher", teacher), ("student", clone.student)):
        places = [first_tap(net, ids.to(device), separator) for ids, _ in micro] if net is not None else []
        found += [f"{who}'s {place}" for place in places if place][:1]
    found += [f"gradient of {name}" for name, grad in gradients(clone) if not grad.isfinite().all()][:1]
    if dist.is_initialized():
        told = of_all_ranks(found)
        rank = max(range(len(told)), key=lambda r: len(told[r]))
        found = [*told[rank], *([f"seen on rank {rank}"] if told[rank] != told[0] else [])]
    return "first bad: " + ", ".join(found) if found else "each gradient alone is finite, their norm is beyond the range of its dtype"


@torch.no_grad()
def first_tap(net: Transformer, ids: Tensor, separator: int | None) -> str | None:
    """The first activation on the way through `net` that is not finite, by layer and name (see model.Block)."""
    out, taps = net(ids, taps=True, head=False, mask=document_mask(ids, separator))
    named = [(f"layers.{i} {name}", tap) for i, layer in enumerate(taps) for name, tap in layer.items()] + [("final norm", out)]
    return next((name for name, tap in named if not tap.isfinite().all()), None)


def gradients(clone: Clone) -> Iterator[tuple[str, Tensor]]:
    """By name, in the order in which backward meets them: the weights' from the head down, then those of the coordinates behind them."""
    for named in (clone.weights, clone.coordinates()):
        yield from ((name, p.grad) for name, p in reversed(named.items()) if p.grad is not None)


def must_be_finite(figures: dict[str, float], step: int, whose: str = "the student's") -> dict[str, float]:
    """The figures of an evaluation, all numbers; else the run stops before they, or a checkpoint of this step, are written."""
    if bad := [name for name, value in figures.items() if not math.isfinite(value)]:
        then = "begin anew with a smaller --lr or a longer --warmup" if step else "is the teacher's checkpoint whole?"
        raise Refusal(f"step {step}: {whose} {', '.join(bad)} on held-out text not finite. The newest checkpoint, if there is one, "
                      f"is from before it; {then}")
    return figures


# --------------------------------------------------------------------------------------------- ranks


def fingerprint(tensor: Tensor) -> Tensor:
    """An integer that changes with any one bit of a vector or matrix: the sum of its numbers' bit patterns, row k taken 2k + 1 times,
    modulo 2^64. Integers add up to the same in any order, so it is exact."""
    bits = tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    rows = bits.long() if bits.dim() == 1 else bits.flatten(1).sum(1)
    return (rows * torch.arange(1, 2 * len(rows), 2, device=rows.device)).sum()


def check_ranks(tensors: dict[str, Tensor], when: str) -> None:
    """Stop where a rank holds other bits than rank 0. Called by all ranks; one small message, and a wait for the device."""
    mine = torch.stack([fingerprint(t) for t in tensors.values()])  # (tensors,)
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(told, mine)
    differs = torch.stack(told).cpu() != told[0].cpu()  # (ranks, tensors)
    if differs.any():
        at = int(differs.any(0).nonzero()[0])
        ranks = differs[:, at].nonzero()[:, 0].tolist()
        refuse(f"{when}: the ranks have drifted apart: {list(tensors)[at]} is another on rank {', '.join(map(str, ranks))} than on rank 0; "
               "look for a faulty device, unlike hardware or files that differ; --resume goes on from the newest checkpoint")


def refuse(text: str) -> None:
    """A refusal on which all ranks agree: rank 0 speaks, the others leave without a word."""
    raise SystemExit(1) if dist.is_initialized() and dist.get_rank() > 0 else Refusal(text)


# ------------------------------------------------------------------------------- signals, the screen


STOPS = [signal.SIGTERM, signal.SIGINT]
if hasattr(signal, "SIGHUP"):  # a hangup: the terminal was closed, the connection lost
    STOPS.append(signal.SIGHUP)


def interruptible() -> None:
    """From here on SIGTERM and a hangup do what Ctrl-C does, except where they are ignored (nohup)."""
    def interrupt(number: int, frame) -> None:
        raise KeyboardInterrupt(number)
    for number in STOPS:
        if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, interrupt)


@contextlib.contextmanager
def stop_requests():
    """A list to which SIGTERM, a hangup and Ctrl-C are added instead of stopping the process, so that the loop can finish its step and
    save; a second Ctrl-C interrupts at once. One that is ignored here (a background job's Ctrl-C) stays ignored."""
    asked: list[int] = []

    def note(number: int, frame) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        asked.append(number)
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # Ctrl-C ends the reader of a pipe as well
                # no print: it must not meet itself within a signal
                os.write(2, b"\nfinishing this step, to save it; Ctrl-C again stops at once\n")
    usual = {}
    if threading.current_thread() is threading.main_thread():
        usual = {number: signal.signal(number, note) for number in STOPS if signal.getsignal(number) not in (signal.SIG_IGN, None)}
    try:
        yield asked
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def tell(text: str, to=None) -> None:
    """A line on the screen, stdout or `to`. One that takes nothing any more (its reader has left, its disk is full) ends no run: the
    others go nowhere."""
    screen = to or sys.stdout
    try:
        print(text, file=screen, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), screen.fileno())
        if screen is not sys.stderr:
            tell(f"stdout takes no more lines ({error.strerror}); the run goes on without them, metrics.jsonl has the figures", sys.stderr)
