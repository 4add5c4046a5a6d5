"""How fast and how small: ratios of two things, measured side by side in one run on the machine at hand.

    python bench.py                     # all rows but eval and precision: on a CPU about a quarter of an hour, on one thread
    python bench.py step loss           # some of them, by name (--list)
    python bench.py eval --model FOLDER --local TASKS
    python bench.py --markdown FILE     # the table also to FILE

A ratio is the median over repeats, A and B timed in turns, so that what else the machine does meets both; beside it the least and the
largest repeat. On a CPU the clock is the process's own time on one thread (not `ranks`, which waits), on a GPU the wall's after a
synchronisation. Random weights of real shapes. On a CPU they are those of the published Llama-3.2-3B -> 1536 with every width and the
length divided by 8 and 4 of its 28 layers; tokens are counted as there, a sequence for 2,048. Its step has 24 sequences: 3 on each of
8 devices, or on one device 4 micro-batches of 6, which is what is run where nothing else is said. On a GPU the widths are whole.
Rows that take whole steps are below, those of a part by itself in bench_parts.py. What the two sides do is written in peers.py, where it
is not this repository's own code. The aims were set before anything was measured.
"""
from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import core
import lrc
import peers
import plan
import runs
from bench_parts import chunks, evaluation, forward, loss, start
from config import Config
from context import find_place
from files import Refusal, write_whole
from flags import parse
from measure import Distillation, Row, machine, paper_shape, ratio, side_by_side, table
from teachers import PRESETS

# ------------------------------------------------------------------------------- rows that take whole steps


def mapped(device) -> list[Row]:
    """What core's map between coordinates and weights adds to a step: core / dense, for the three kinds of bases. The published 1.12 does
    not state its batch."""
    rows, (c, r, _, length) = [], paper_shape(device)
    kinds = ("compact", "explicit", "implicit")
    modes = ("dense", *(f"core --bases {kind}" for kind in kinds))
    for batch, accum, aim in ((6, 1, "≤ 1.10"), (6, 4, "≤ 1.03"), (3, 1, "")):
        dense, *cores = side_by_side([Distillation(c, r, batch, length, accum, f"--mode {mode}").step for mode in modes],
                                     device, 9 if accum == 1 else 5)
        size = f"{accum} micro-batch{'es' * (accum > 1)} of {batch} sequences"
        for kind, core_ in zip(kinds, cores):
            rows.append(ratio(f"step, core with {kind} bases / dense, {size}", core_, dense, aim if kind == "compact" else ""))
        gc.collect()
    return rows


def bases(device) -> list[Row]:
    """Bytes of frozen bases of all gate, up and down of Qwen2.5-3B in fp32, from one matrix as it is allocated, of a quarter of its
    sides."""
    c = Config.from_hf(PRESETS["qwen2.5-3b"]["config"])
    W_T = torch.randn(c.intermediate_size // 4, c.hidden_size // 4, generator=torch.Generator().manual_seed(0))
    plain = lrc.Plain(W_T, W_T[:, :8], False)
    maps = {"explicit": core.Opened(plain, core.complement(plain.T)),
            "compact": core.Compact(plain),
            "implicit": core.Compact(plain, W_T)}
    aims = {"explicit": "U_perp alone in bf16: 21.3 GB (published: 7 to 28)", "implicit": "≤ 6 GB"}
    size = lambda m: sum(b.numel() * b.element_size() for b in m.buffers()) * 16 * 3 * c.num_hidden_layers
    return [Row(f"frozen bases of core, Qwen2.5-3B, fp32, {kind}", f"{size(m) / 1e9:.1f} GB", "", aims.get(kind, ""))
            for kind, m in maps.items()]


def step(device) -> list[Row]:
    """A whole step, all losses, map, clipping and AdamW included, over the least that distilling with logits costs: the teacher's forward
    pass and plain training of the student without an optimizer."""
    rows = []
    for mode in ("core --bases compact", "core --bases explicit", "dense"):
        ours = Distillation(*paper_shape(device), 4, f"--mode {mode}")
        a, b = side_by_side([ours.step, ours.plain], device, 5)
        rows.append(ratio(f"our step, {mode.replace('--bases ', '')} / teacher's forward pass + plain training", a, b, "≤ 1.15"))
        del ours
        gc.collect()
    return rows


def beside_lrc(device) -> list[Row]:
    """Our step over LRC's, written anew from its description (peers.lrc_step), its coordinates clipped and stepped by the same AdamW: in
    mode core with all our losses, and as plain LRC with the terms and the coordinates that LRC has. LRC's code repeats its products with
    W_T in each micro-batch, so it matters how many a step has."""
    rows, (c, r, _, length) = [], paper_shape(device)
    kinds = {"core": "--mode core --bases compact", "plain LRC, its own recipe": "--mode lrc --recipe clone --coordinates teacher"}
    for batch, accum in ((1, 24), (6, 4), (3, 1)):
        for kind, flags in kinds.items():
            a, b = side_by_side(both_steps(Distillation(c, r, batch, length, accum, flags)), device, 9 if accum == 1 else 3)
            size = f"{accum} micro-batch{'es' * (accum > 1)} of {batch} sequence{'s' * (batch > 1)}"
            aim = "≤ 0.7" if (accum, kind) == (24, "core") else ""
            rows.append(ratio(f"our step, {kind} / LRC's step rewritten, {size}", a, b, aim))
            gc.collect()
    return rows


def both_steps(ours: Distillation) -> list:
    P = peers.projections(ours.teacher, ours.r)
    adam = torch.optim.AdamW(P.values(), lr=1e-4, fused=True)

    def theirs():
        adam.zero_grad()
        with ours.place.precision():
            for ids, targets in ours.micro:
                peers.lrc_step(ours.teacher, P, ids.to(ours.place.device), targets.to(ours.place.device))
        torch.nn.utils.clip_grad_norm_(P.values(), 1.0)
        adam.step()
    return [ours.step, theirs]


def compiled(device) -> list[Row]:
    """`--compile`: a step over the eager one, and how often 50 steps compiled."""
    from torch._dynamo.utils import counters
    shape = paper_shape(device)
    torch._dynamo.reset()
    counters.clear()
    eager, inductor = (Distillation(*shape, 1, "--mode dense", compile=on) for on in (False, True))
    begun = time.perf_counter()
    inductor.step()
    first = time.perf_counter() - begun
    a, b = side_by_side([inductor.step, eager.step], device, 7)
    for _ in range(50 - 1 - 8):
        inductor.step()
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return [ratio("step, `--compile` / eager", a, b, "≤ 0.9 on CUDA"),
            Row("graph breaks, and compiled graphs (student and teacher), in 50 steps", f"{breaks}, {graphs}",
                f"the first step took {first:.0f} s", "0, and ≤ 2")]


def ranks(device) -> list[Row]:
    """train.py on the embedded teacher, one thread a rank: tokens/s of a rank of two, over those of two runs of one rank at the same time,
    so that both sides keep two cores busy and the ranks' waiting for each other is what differs. Wall time."""
    def launched(folder: str, count: int) -> subprocess.Popen:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
        flags = f"--init orthonormal --steps 24 --eval-tokens 128 --save-every 100 --out {folder}".split()
        return subprocess.Popen([sys.executable, *launch, "train.py", *flags], cwd=Path(__file__).parent,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def throughput(count: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            outs = [f"{folder}/{i}" for i in range(2 // count)]
            for running in [launched(out, count) for out in outs]:
                if running.wait():
                    raise Refusal(f"train.py on {count} ranks failed; run it by hand to see why")
            rows = [row for out in outs for row in runs.read_metrics(Path(out))]
            return statistics.median(row["tokens_per_second"] / count for row in rows if row["step"] > 4 and "loss" in row)
    if device.type != "cpu" and torch.get_device_module(device).device_count() < 2:
        raise Refusal("two ranks need two devices")
    pairs = [(throughput(2), throughput(1)) for _ in range(3)]
    each = [two / one for two, one in pairs]
    two, one = (statistics.median(side) for side in zip(*pairs))
    return [Row("tokens/s of a rank, 2 ranks / 2 runs of 1 rank, one thread each", f"{statistics.median(each):.3f}",
                f"{min(each):.3f} to {max(each):.3f}; {two:,.0f} / {one:,.0f}", "≥ 0.9")]


def exponent(factor: float, values: list[float]) -> float:
    """Of values at n, factor n, factor^2 n, each a constant and a power of the size; nan where they fall:
    b = log((v3 - v2) / (v2 - v1)) / log(factor)."""
    first, second, third = values
    return math.log((third - second) / (second - first)) / math.log(factor) if first < second < third else math.nan


def growth(device) -> list[Row]:
    """How a step's time grows along each size, the others fixed, beside how its FLOPs do (plan.py, whose count tests hold against torch's
    own). The exponent is that of what the size adds: what does not depend on it is subtracted."""
    c, r, _, length = paper_shape(device, layers=2)
    fields = {"layers": "num_hidden_layers", "width H and r": "hidden_size", "d_ff": "intermediate_size", "vocabulary": "vocab_size"}
    rows = []
    for name, factor in {"layers": 2, "width H and r": 2, "d_ff": 2, "vocabulary": 4, "length": 2}.items():
        size, made, flops = fields.get(name), [], []
        for f in (1, factor, factor ** 2):
            shape = replace(c, **{size: getattr(c, size) * f}) if size else c
            width = r * f if size == "hidden_size" else r
            step = Distillation(shape, width, 2, length if size else length * f, 1, "--mode core --bases compact")
            made.append(step)
            networks = 2 * step.length * sum(plan.work(step.c, step.r, step.args).values())
            flops.append(networks + plan.map_work(step.c, step.r, "core", bases="compact"))
        times = [statistics.median(each) for each in side_by_side([m.step for m in made], device, 7)]
        del made
        gc.collect()
        rows.append(Row(f"exponent of a step's time in {name}, to {factor ** 2} times", f"{exponent(factor, times):.2f}",
                        ", ".join(f"{t:.3g} s" for t in times), f"{exponent(factor, flops):.2f}, that of its FLOPs"))
    return rows


def speed(device) -> list[Row]:
    """Tokens/s of whole runs' steps, and the share of the matrix rate this machine reaches on one large product in the same precision."""
    rows, usual = [], torch.get_float32_matmul_precision()
    side, shapes = 8192, {"SmolLM2-135M -> 288": ("smollm2-135m", 16, 2048, "--mode core --bases compact --tf32"),
                          "Llama-3.2-3B -> 1536": ("llama3.2-3b", 1, 2048, "--mode core --bases compact --checkpointing --tf32")}
    if device.type == "cpu":
        side, shapes = 1024, {"SmolLM2-135M -> 288": ("smollm2-135m", 4, 256, "--mode core --bases compact")}
    for name, (preset, batch, length, flags) in shapes.items():
        c, r = Config.from_hf(PRESETS[preset]["config"]), PRESETS[preset]["width"]
        made = Distillation(c, r, batch, length, 1, flags, compile=device.type != "cpu")
        torch.set_float32_matmul_precision("high" if made.args.tf32 else "highest")
        x = torch.randn(side, side, device=device, dtype=made.place.autocast or torch.float32)
        if device.type != "cpu":
            torch.get_device_module(device).reset_peak_memory_stats()
        taken, product = side_by_side([made.step, lambda: x @ x], device, 3 if device.type == "cpu" else 10)
        tokens, rate = batch * length, 2 * side ** 3 / statistics.median(product)
        flops = tokens * sum(plan.work(c, r, made.args).values()) + plan.map_work(c, r, "core", bases=made.args.bases)
        spent = statistics.median(taken)
        held = "" if device.type == "cpu" else f", peak {torch.get_device_module(device).max_memory_allocated() / 1e9:.1f} GB"
        rows.append(Row(f"{name}, core, {batch} x {length} tokens a step", f"{tokens / spent:,.0f} tokens/s",
                        f"{flops / spent / 1e9:,.0f} GFLOP/s, {flops / spent / rate:.0%} of {rate / 1e9:,.0f} in one product{held}"))
        torch.set_float32_matmul_precision(usual)
        del made
        gc.collect()
    return rows


def precision(device) -> list[Row]:
    """200 steps of train.py on the embedded teacher in fp32 and under autocast to bf16, the same batches."""
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("float32", "bfloat16"):
            flags = f"--init orthonormal --steps 200 --eval-every 200 --save-every 200 --dtype {dtype} --out {folder}/{dtype}".split()
            subprocess.run([sys.executable, "train.py", *flags], cwd=Path(__file__).parent, check=True, capture_output=True,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})
            curves[dtype] = runs.read_metrics(Path(folder) / dtype)
    loss = {dtype: {row["step"]: row["loss"] for row in rows if "loss" in row} for dtype, rows in curves.items()}
    ends = {dtype: rows[-1]["val_ce"] for dtype, rows in curves.items()}
    apart = max(abs(loss["bfloat16"][s] / loss["float32"][s] - 1) for s in loss["float32"])
    listed = "; ".join(f"{s}: {loss['float32'][s]:.3f}, {loss['bfloat16'][s]:.3f}" for s in (1, 50, 100, 150, 200))
    return [Row("training loss, bf16 from fp32, largest difference in 200 steps", f"{apart:.1%}", f"step: fp32, bf16 {listed}"),
            Row("held-out CE after them, bf16 - fp32", f"{ends['bfloat16'] - ends['float32']:+.4f}",
                f"{ends['float32']:.4f}, {ends['bfloat16']:.4f}")]


ROWS = dict(map=mapped, bases=bases, step=step, lrc=beside_lrc, loss=loss, chunks=chunks, forward=forward, start=start,
            compile=compiled, ranks=ranks, growth=growth, speed=speed, precision=precision, eval=evaluation)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)} (default: all but eval and precision)")
    parser.add_argument("--list", action="store_true", help="say what each row measures, and stop")
    parser.add_argument("--model", help="eval: the folder of a model")
    parser.add_argument("--local", help="eval: a folder of tasks, as eval.py takes it")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    if args.list:
        return print("\n".join(f"{name:<10}{' '.join(row.__doc__.split())}" for name, row in ROWS.items()))
    for name in args.rows:
        if name not in ROWS:
            raise Refusal(f"no row {name!r}; there are {', '.join(ROWS)}")
    if "eval" in args.rows and not (args.model and args.local):
        raise Refusal("eval needs --model FOLDER and --local TASKS; "
                      "`python tests/smollm2.py CACHE` and `python tests/tasks.py CACHE` make both")
    torch.set_num_threads(1)
    device = find_place(parse([])).device
    rows, failed = [], False
    for name in args.rows or [name for name in ROWS if name not in ("eval", "precision")]:
        begun = time.perf_counter()
        try:
            new = ROWS[name](device, args.model, args.local) if name == "eval" else ROWS[name](device)
        except (Refusal, OSError, subprocess.CalledProcessError) as error:  # the other rows still count
            failed, new = True, [Row(name, "not measured", str(error))]
        rows += new
        measured = "; ".join(f"{row.what} {row.value} ({row.spread})" for row in new)
        print(f"{name}, {time.perf_counter() - begun:.0f} s: {measured}", file=sys.stderr, flush=True)
    text = f"{table(rows)}\n\n({machine(device)}; `{' '.join(['python bench.py', *args.rows])}`)\n"
    print(text)
    if args.markdown:
        write_whole(args.markdown, text)
    if failed:
        raise Refusal("not every row could be measured; the table says why")


if __name__ == "__main__":
    try:
        main()
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
