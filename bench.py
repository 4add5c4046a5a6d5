"""How fast and how small: ratios of two things, measured side by side in one run on the machine at hand.

    python bench.py                     # all rows but eval and precision: on a CPU about a quarter of an hour, on one thread
    python bench.py step loss           # some of them, by name (--list)
    python bench.py eval --model FOLDER --local TASKS
    python bench.py --markdown FILE     # the table also to FILE

A ratio is the median over repeats, A and B timed in turns, so that what else the machine does meets both; beside it the least and the largest
repeat. On a CPU the clock is the process's own time on one thread (not `ranks`, which waits), on a GPU the wall's after a synchronisation. Random
weights of real shapes. On a CPU they are those of the published Llama-3.2-3B -> 1536 with every width and the length divided by 8 and 4
of its 28 layers; tokens are counted as there, a sequence for 2,048. Its step has 24 sequences: 3 on each of 8 devices, or on one device
4 micro-batches of 6, which is what is run where nothing else is said. On a GPU the widths are whole.
What the two sides do is written in peers.py, where it is not this repository's own code. The aims were set before anything was measured.
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
from torch import Tensor

import core
import lrc
import peers
import plan
import runs
import train
from distill import HeadLoss, Objective
from flags import parse
from measure import Distillation, Row, alone, machine, paper_shape, ratio, seconds, side_by_side, table
from config import Config
from model import Transformer
from teachers import PRESETS, Refusal, write_whole

# ------------------------------------------------------------------------------------------------- rows


def mapped(device) -> list[Row]:
    """What core's map between coordinates and weights adds to a step: core / dense, for the three kinds of bases. The published 1.12 does not state its batch."""
    rows, (c, r, _, length), kinds = [], paper_shape(device), ("compact", "explicit", "implicit")
    for batch, accum, aim in ((6, 1, "≤ 1.10"), (6, 4, "≤ 1.03"), (3, 1, "")):
        dense, *cores = side_by_side([Distillation(c, r, batch, length, accum, f"--mode {flags}").step for flags in ("dense", *(f"core --bases {k}" for k in kinds))],
                                     device, 9 if accum == 1 else 5)
        rows += [ratio(f"step, core with {kind} bases / dense, {accum} micro-batch{'es' * (accum > 1)} of {batch} sequences", core_, dense, aim if kind == "compact" else "")
                 for kind, core_ in zip(kinds, cores)]
        gc.collect()
    return rows


def bases(device) -> list[Row]:
    """Bytes of frozen bases of all gate, up and down of Qwen2.5-3B in fp32, from one matrix as it is allocated, of a quarter of its sides."""
    c = Config.from_hf(PRESETS["qwen2.5-3b"]["config"])
    W_T = torch.randn(c.intermediate_size // 4, c.hidden_size // 4, generator=torch.Generator().manual_seed(0))
    plain = lrc.Plain(W_T, W_T[:, :8], False)
    maps = {"explicit": core.Opened(plain, core.complement(plain.T)), "compact": core.Compact(plain), "implicit": core.Compact(plain, W_T)}
    aims = {"explicit": "U_perp alone in bf16: 21.3 GB (published: 7 to 28)", "implicit": "≤ 6 GB"}
    size = lambda m: sum(b.numel() * b.element_size() for b in m.buffers()) * 16 * 3 * c.num_hidden_layers
    return [Row(f"frozen bases of core, Qwen2.5-3B, fp32, {kind}", f"{size(m) / 1e9:.1f} GB", "", aims.get(kind, "")) for kind, m in maps.items()]


def step(device) -> list[Row]:
    """A whole step, all losses, map, clipping and AdamW included, over the least that distilling with logits costs: the teacher's forward pass
    and plain training of the student without an optimizer."""
    rows = []
    for mode in ("core --bases compact", "core", "dense"):
        ours = Distillation(*paper_shape(device), 4, f"--mode {mode}")
        a, b = side_by_side([ours.step, ours.plain], device, 5)
        rows.append(ratio(f"our step, {mode.replace('--bases ', '')} / teacher's forward pass + plain training", a, b, "≤ 1.15"))
        del ours
        gc.collect()
    return rows


def official(device) -> list[Row]:
    """Our step over LRC's own (peers.official_step), its coordinates clipped and stepped by the same AdamW: in mode core with all our losses, and as plain LRC
    with the terms and the coordinates that LRC has. LRC's code repeats its products with W_T in each micro-batch, so it matters how many a step has."""
    rows, (c, r, _, length) = [], paper_shape(device)
    kinds = {"core": "--mode core --bases compact", "plain LRC, its own recipe": "--mode lrc --recipe clone --coordinates teacher"}
    for batch, accum in ((1, 24), (6, 4), (3, 1)):
        for kind, flags in kinds.items():
            a, b = side_by_side(both_steps(Distillation(c, r, batch, length, accum, flags)), device, 9 if accum == 1 else 3)
            rows.append(ratio(f"our step, {kind} / LRC's own code, {accum} micro-batch{'es' * (accum > 1)} of {batch} sequence{'s' * (batch > 1)}", a, b,
                              "≤ 0.7" if (accum, kind) == (24, "core") else ""))
            gc.collect()
    return rows


def both_steps(ours: Distillation) -> list:
    P = peers.projections(ours.teacher, ours.r)
    adam = torch.optim.AdamW(P.values(), lr=1e-4, fused=True)

    def theirs():
        adam.zero_grad()
        with ours.place.precision():
            for ids, targets in ours.micro:
                peers.official_step(ours.teacher, P, ids.to(ours.place.device), targets.to(ours.place.device))
        torch.nn.utils.clip_grad_norm_(P.values(), 1.0)
        adam.step()
    return [ours.step, theirs]


N, V = 2048, 128256  # the loss of one sequence of Llama-3's vocabulary


def streams():
    """x (N, r), weight (V, r), targets, and the teacher's x_t (N, H), weight_t (V, H), for narrow r and H: the logits are what is large."""
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
    r, H = 32, 64
    return draw(N, r).requires_grad_(), (2 * draw(V, r) / r ** 0.5).requires_grad_(), torch.arange(N) * 61 % V, draw(N, H), 2 * draw(V, H) / H ** 0.5


def ours_loss(inputs, chunk: int = 512):
    HeadLoss.apply(*inputs, Objective(chunk=chunk))[0].backward()


def naive_loss(inputs):
    sum(peers.naive_loss(*inputs)).backward()


def loss(device) -> list[Row]:
    """KL and CE at (1, 2048, 128256), on the CPU: memory of the chunked form and of the naive one; on 256 of the tokens, four chunks, their values and
    gradients, in fp64 against each other, in fp32 each against the naive one in fp64."""
    memory = [alone(work, streams)[1] for work in (ours_loss, naive_loss)]

    def outcome(work, dtype) -> tuple[float, Tensor]:
        inputs = [x.detach()[:256] if len(x) == N else x.detach() for x in streams()]
        inputs = [x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in inputs]
        inputs[0].requires_grad_(), inputs[1].requires_grad_()
        value = HeadLoss.apply(*inputs, Objective(chunk=64))[0] if work is ours_loss else sum(peers.naive_loss(*inputs))
        value.backward()
        return value.item(), inputs[1].grad.double()
    exact = outcome(naive_loss, torch.float64)
    apart = lambda found: (abs(found[0] / exact[0] - 1), float((found[1] - exact[1]).norm() / exact[1].norm()))
    same, ours, naive = (apart(outcome(*how)) for how in ((ours_loss, torch.float64), (ours_loss, torch.float32), (naive_loss, torch.float32)))
    return [Row("peak memory of KL + CE at (1, 2048, 128256), chunked / naive", f"{memory[0] / memory[1]:.3f}", f"{memory[0] / 1e9:.2f} GB / {memory[1] / 1e9:.2f} GB", "≤ 0.25"),
            Row("their value, chunked from naive, relative", f"{same[0]:.0e}", f"fp64; in fp32 from fp64: chunked {ours[0]:.0e}, naive {naive[0]:.0e}", "≤ 1e-6"),
            Row("their gradient at the head, the same, 2-norm", f"{same[1]:.0e}", f"fp64; in fp32 from fp64: chunked {ours[1]:.1e}, naive {naive[1]:.1e}", "≤ 1e-5")]


def chunks(device) -> list[Row]:
    """The time of KL + CE, SmolLM2's vocabulary and widths, 1,024 tokens."""
    c, r = Config.from_hf(PRESETS["smollm2-135m"]["config"]), 288
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
    ours, theirs = (draw(1024, r), draw(c.vocab_size, r) / r ** 0.5), (draw(1024, c.hidden_size), draw(c.vocab_size, c.hidden_size) / 24)
    inputs = (*(x.requires_grad_() for x in ours), torch.arange(1024, device=device), *theirs)
    works = [lambda: ours_loss(inputs), lambda: naive_loss(inputs), lambda: ours_loss(inputs, 1024)]
    a, b, whole = side_by_side(works, device, 5)
    return [ratio("time of KL + CE, chunks of 512 / naive, whole logits", a, b, "≤ 1.05"), ratio("the same / our own form in one chunk", a, whole, "")]


def forward(device) -> list[Row]:
    """SmolLM2-135M (6 of 30 layers and of its vocabulary on a CPU): our forward pass over that of transformers with its sdpa attention."""
    from transformers import LlamaConfig, LlamaForCausalLM
    layers = 30 if device.type != "cpu" else 6
    config = PRESETS["smollm2-135m"]["config"] | dict(num_hidden_layers=layers, vocab_size=49152 * layers // 30)
    net = Transformer(Config.from_hf(config)).eval().requires_grad_(False)
    net.initialise(0)
    theirs = LlamaForCausalLM._from_config(LlamaConfig(**{k: v for k, v in config.items() if k not in ("model_type", "torch_dtype")}), attn_implementation="sdpa").eval()
    theirs.load_state_dict({name if name.startswith("lm_head") else f"model.{name}": w for name, w in net.state_dict().items()})
    ids, rows = torch.randint(0, config["vocab_size"], (4, 256), generator=torch.Generator().manual_seed(0)).to(device), []
    for dtype in (torch.float32, torch.bfloat16):
        net.to(device, dtype), theirs.to(device, dtype)
        with torch.no_grad():
            a, b = side_by_side([lambda: net(ids), lambda: theirs(ids, use_cache=False)], device, 15)
        rows.append(ratio(f"forward pass / transformers (sdpa), SmolLM2, {str(dtype).removeprefix('torch.')}", a, b, "≤ 1.0"))
    return rows


def qwen_layer():
    """(teacher, calibration ids) of one layer of Qwen2.5-3B with a small vocabulary: 4,096 tokens."""
    teacher = Transformer(replace(Config.from_hf(PRESETS["qwen2.5-3b"]["config"]), num_hidden_layers=1, vocab_size=256)).requires_grad_(False)
    teacher.initialise(0)
    return teacher, torch.randint(0, 256, (8, 512), generator=torch.Generator().manual_seed(0))


def calibrated_layer(made):
    teacher, ids = made
    student = lrc.blank_student(teacher, PRESETS["qwen2.5-3b"]["width"])
    frame = lrc.calibrate(teacher, student, ids, ids, say=lambda text: None)
    core.open_mlp(lrc.Clone(student, lrc.plain_maps(teacher, student, opened=core.MLP), frame), "core", bases="compact")


def frame_of_gate(made):
    """T and what stands for U_perp, of one matrix."""
    W = made[0].layers[0].mlp.gate_proj.weight
    core.Compact(lrc.Plain(W, W[:, :8], False))


def full_svd_of_gate(made):
    """T and U_perp in one (d_ff, d_ff) matrix, as `full_matrices` gives them."""
    torch.linalg.svd(made[0].layers[0].mlp.gate_proj.weight, full_matrices=True)


def start(device) -> list[Row]:
    """The frame [T U_perp] of one matrix of Qwen2.5-3B (11008 x 2048) over its full SVD; and the calibrated start of a whole layer, seven matrices fitted
    and their frames, over the full SVD of its three MLP matrices alone, one timed. On the CPU, once each."""
    frame, svd, whole = (alone(work, qwen_layer) for work in (frame_of_gate, full_svd_of_gate, calibrated_layer))
    return [Row("[T U_perp] of one 11008 x 2048 matrix / its full SVD, time", f"{frame[0] / svd[0]:.3f}", f"{frame[0]:.3g} s / {svd[0]:.3g} s", ""),
            Row("the same, peak memory", f"{frame[1] / svd[1]:.3f}", f"{frame[1] / 1e9:.2f} GB / {svd[1] / 1e9:.2f} GB, 0.48 GB of it d_ff x d_ff", "no d_ff x d_ff"),
            Row("calibrated start of a Qwen2.5-3B layer, 4,096 tokens / 3 full SVDs, time", f"{whole[0] / (3 * svd[0]):.3f}", f"{whole[0]:.3g} s / {3 * svd[0]:.3g} s", "≤ 0.2"),
            Row("its peak memory", f"{whole[1] / 1e9:.2f} GB", "", "")]


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
            Row("graph breaks, and compiled graphs (student and teacher), in 50 steps", f"{breaks}, {graphs}", f"the first step took {first:.0f} s", "0, and ≤ 2")]


def ranks(device) -> list[Row]:
    """train.py on the embedded teacher, one thread a rank: tokens/s of a rank of two, over those of two runs of one rank at the same time, so that both sides
    keep two cores busy and the ranks' waiting for each other is what differs. Wall time."""
    def launched(folder: str, count: int) -> subprocess.Popen:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
        flags = f"--init orthonormal --steps 24 --eval-tokens 128 --save-every 100 --out {folder}".split()
        return subprocess.Popen([sys.executable, *launch, "train.py", *flags], cwd=Path(__file__).parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                env=os.environ | {"OMP_NUM_THREADS": "1"})

    def throughput(count: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            outs = [f"{folder}/{i}" for i in range(2 // count)]
            for running in [launched(out, count) for out in outs]:
                if running.wait():
                    raise Refusal(f"train.py on {count} ranks failed; run it by hand to see why")
            return statistics.median(row["tokens_per_second"] / count for out in outs for row in runs.read_metrics(Path(out)) if row["step"] > 4 and "loss" in row)
    if device.type != "cpu" and torch.get_device_module(device).device_count() < 2:
        raise Refusal("two ranks need two devices")
    pairs = [(throughput(2), throughput(1)) for _ in range(3)]
    each = [two / one for two, one in pairs]
    return [Row("tokens/s of a rank, 2 ranks / 2 runs of 1 rank, one thread each", f"{statistics.median(each):.3f}",
                f"{min(each):.3f} to {max(each):.3f}; {statistics.median(p[0] for p in pairs):,.0f} / {statistics.median(p[1] for p in pairs):,.0f}", "≥ 0.9")]


def exponent(factor: float, values: list[float]) -> float:
    """Of values at n, factor n, factor^2 n, each a constant and a power of the size: b = log((v3 - v2) / (v2 - v1)) / log(factor); nan where they fall."""
    first, second, third = values
    return math.log((third - second) / (second - first)) / math.log(factor) if first < second < third else math.nan


def growth(device) -> list[Row]:
    """How a step's time grows along each size, the others fixed, beside how its FLOPs do (plan.py, whose count tests hold against torch's own). The
    exponent is that of what the size adds: what does not depend on it is subtracted."""
    c, r, _, length = paper_shape(device, layers=2)
    rows = []
    for name, factor in {"layers": 2, "width H and r": 2, "d_ff": 2, "vocabulary": 4, "length": 2}.items():
        made, flops = [], []
        for f in (1, factor, factor ** 2):
            size = {"layers": "num_hidden_layers", "width H and r": "hidden_size", "d_ff": "intermediate_size", "vocabulary": "vocab_size"}.get(name)
            shape = replace(c, **{size: getattr(c, size) * f}) if size else c
            step = Distillation(shape, r * f if size == "hidden_size" else r, 2, length if size else length * f, 1, "--mode core --bases compact")
            made.append(step)
            flops.append(2 * step.length * sum(plan.work(step.c, step.r, step.args).values()) + plan.map_work(step.c, step.r, "core", bases="compact"))
        times = [statistics.median(each) for each in side_by_side([m.step for m in made], device, 7)]
        del made
        gc.collect()
        rows.append(Row(f"exponent of a step's time in {name}, to {factor ** 2} times", f"{exponent(factor, times):.2f}", ", ".join(f"{t:.3g} s" for t in times),
                        f"{exponent(factor, flops):.2f}, that of its FLOPs"))
    return rows


def speed(device) -> list[Row]:
    """Tokens/s of whole runs' steps, and the share of the matrix rate this machine reaches on one large product in the same precision."""
    rows, usual = [], torch.get_float32_matmul_precision()
    shapes = {"SmolLM2-135M -> 288": ("smollm2-135m", 4, 256, "--mode core --bases compact")} if device.type == "cpu" else {
        "SmolLM2-135M -> 288": ("smollm2-135m", 16, 2048, "--mode core --bases compact --tf32"),
        "Llama-3.2-3B -> 1536": ("llama3.2-3b", 1, 2048, "--mode core --bases compact --checkpointing --tf32")}
    side = 1024 if device.type == "cpu" else 8192
    for name, (preset, batch, length, flags) in shapes.items():
        made = Distillation(Config.from_hf(PRESETS[preset]["config"]), PRESETS[preset]["width"], batch, length, 1, flags, compile=device.type != "cpu")
        torch.set_float32_matmul_precision("high" if made.args.tf32 else "highest")
        x = torch.randn(side, side, device=device, dtype=made.place.autocast or torch.float32)
        if device.type != "cpu":
            torch.get_device_module(device).reset_peak_memory_stats()
        taken, product = side_by_side([made.step, lambda: x @ x], device, 3 if device.type == "cpu" else 10)
        tokens, rate = batch * length, 2 * side ** 3 / statistics.median(product)
        flops = tokens * sum(plan.work(made.c, made.r, made.args).values()) + plan.map_work(made.c, made.r, "core", bases=made.args.bases)
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
            command = [sys.executable, "train.py", *f"--init orthonormal --steps 200 --eval-every 200 --save-every 200 --dtype {dtype} --out {folder}/{dtype}".split()]
            subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            curves[dtype] = runs.read_metrics(Path(folder) / dtype)
    loss = {dtype: {row["step"]: row["loss"] for row in rows if "loss" in row} for dtype, rows in curves.items()}
    ends = {dtype: rows[-1]["val_ce"] for dtype, rows in curves.items()}
    apart = max(abs(loss["bfloat16"][s] / loss["float32"][s] - 1) for s in loss["float32"])
    listed = "; ".join(f"{s}: {loss['float32'][s]:.3f}, {loss['bfloat16'][s]:.3f}" for s in (1, 50, 100, 150, 200))
    return [Row("training loss, bf16 from fp32, largest difference in 200 steps", f"{apart:.1%}", f"step: fp32, bf16 {listed}"),
            Row("held-out CE after them, bf16 - fp32", f"{ends['bfloat16'] - ends['float32']:+.4f}", f"{ends['float32']:.4f}, {ends['bfloat16']:.4f}")]


def evaluation(device, model: str, local: str, limit: int = 40) -> list[Row]:
    """eval.py over lm-eval's hf backend (batch 8) on the same tasks, fp32, each task once, the two in turns first; refused where an accuracy differs."""
    import eval as evals
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    names = ["arc_easy", "piqa", "winogrande", "sciq", "boolq", "commonsense_qa"]
    loaded, _, missing, manager = evals.find_tasks(names, Path(local))
    if missing:
        raise Refusal(f"--local {local}: {', '.join(missing)} cannot be loaded; `python tests/tasks.py CACHE` makes such a folder")
    backends = [evals.harness(evals.Model(model, device=str(device), dtype="float32")), HFLM(pretrained=model, device=str(device), dtype="float32", batch_size=8)]
    taken, scores = [[], []], [[], []]
    def accuracies(i: int, name: str) -> list[float]:
        found = simple_evaluate(model=backends[i], tasks=loaded[name], num_fewshot=0, limit=limit, verbosity="ERROR", task_manager=manager)["results"]
        return [figures["acc,none"] for figures in found.values()]
    for turn, name in enumerate(names):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            taken[i].append(seconds(lambda: scores[i].append(accuracies(i, name)), device))
    if scores[0] != scores[1]:
        raise Refusal(f"the two backends disagree: {scores}")
    each = [a / b for a, b in zip(*taken)]
    return [Row(f"eval.py / lm-eval's hf backend, {len(names)} tasks, {limit} documents each, the same accuracies", f"{sum(taken[0]) / sum(taken[1]):.3f}",
                f"by task {min(each):.3f} to {max(each):.3f}; {sum(taken[0]):.3g} s / {sum(taken[1]):.3g} s", "≤ 0.8")]


ROWS = dict(map=mapped, bases=bases, step=step, official=official, loss=loss, chunks=chunks, forward=forward, start=start, compile=compiled, ranks=ranks, growth=growth,
            speed=speed, precision=precision, eval=evaluation)


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
        raise Refusal("eval needs --model FOLDER and --local TASKS; `python tests/smollm2.py CACHE` and `python tests/tasks.py CACHE` make both")
    torch.set_num_threads(1)
    device = train.find_place(parse([])).device
    rows, failed = [], False
    for name in args.rows or [name for name in ROWS if name not in ("eval", "precision")]:
        begun = time.perf_counter()
        try:
            new = ROWS[name](device, args.model, args.local) if name == "eval" else ROWS[name](device)
        except (Refusal, OSError, subprocess.CalledProcessError) as error:  # the other rows still count
            failed, new = True, [Row(name, "not measured", str(error))]
        rows += new
        print(f"{name}, {time.perf_counter() - begun:.0f} s: " + "; ".join(f"{row.what} {row.value} ({row.spread})" for row in new), file=sys.stderr, flush=True)
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
