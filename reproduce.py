"""The paper in miniature: its arms, controls and recipes on the embedded teacher, each with its own learning rate and several seeds.

    python reproduce.py all                # everything; on 2 cores about two hours, then tables and pictures in results/
    python reproduce.py basis recipe       # some of it
    python reproduce.py all --quick        # the same path with budgets too small to mean anything, under 10 minutes

A run is one train.py command, kept as a line of results/runs.jsonl with its flags and figures. A run that has its line is never run
again, so the same command goes on after an interruption, and only draws tables and pictures once all is there. First every arm's
learning rate is swept (seed 0, which no result uses); then the arms run with seeds 1, 2, ... The seed is the data order (and R, A,
and random starts), the same for all arms: differences are taken seed by seed.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

import audit
import runs
import train
from teachers import Refusal, read_json

ARMS = {  # name -> what it changes in train.py's flags
    "lrc": {"mode": "lrc"}, "dense": {"mode": "dense"}, "core": {"mode": "core"}, "random": {"mode": "random"}, "slice": {"mode": "slice"},
    "gpd lrc": {"mode": "lrc", "recipe": "gpd"}, "gpd dense": {"mode": "dense", "recipe": "gpd"},
    "clone lrc": {"mode": "lrc", "recipe": "clone", "coordinates": "teacher"}, "clone dense": {"mode": "dense", "recipe": "clone", "coordinates": "teacher"},
    "clone lrc, random start": {"mode": "lrc", "recipe": "clone", "coordinates": "teacher", "init": "random"},  # LRC as its own code runs it
    "scratch CE": {"mode": "scratch", "without": "kl"}, "scratch CE+KL": {"mode": "scratch"},
    "core, alignment only": {"mode": "core", "without": "kl,ce"},
    "core, gate and up only": {"mode": "core", "without": "kl,ce,q,k,v,o,hidden"},
}


@dataclass(frozen=True)
class Size:
    """How much is run. One budget is `steps` x 1,024 tokens; arms at 2 or 5 budgets run 2 or 5 times as many steps."""
    steps: int = 128
    eval_tokens: int = 16384
    calibration_tokens: int = 16384
    most_seeds: int = 5
    rates: tuple[float, ...] = (5e-3, 1e-2, 2e-2)  # where a sweep begins; doubled or halved while the best is at an edge
    extend: bool = True
    widths: tuple[int, ...] = (16, 32, 48, 64, 96)


QUICK = Size(steps=8, eval_tokens=2048, calibration_tokens=4096, most_seeds=2, rates=(1e-2, 2e-2), extend=False, widths=(32, 64))


@dataclass(frozen=True)
class Line:
    """A row of a table: an arm at a width and a budget over seeds 1 .. seeds, and the (arm, budget) it is compared with, at that width."""
    arm: str
    width: int
    budget: int = 1
    seeds: int = 3
    against: tuple[tuple[str, int], ...] = ()


def experiments(widths: tuple[int, ...]) -> dict[str, tuple[str, list[Line]]]:
    plain = (("lrc", 1),)
    return {
        "main": ("Does training the whole deployed matrix beat plain LRC at the same budget?",
                 [Line(arm, w, 1, 5 if arm in MODES else 3, () if arm == "lrc" else plain) for w in (64, 32) for arm in (*MODES, "scratch CE", "scratch CE+KL")]),
        "basis": ("Is the teacher's own basis privileged?",
                  [Line("lrc", 32, 1, 5), Line("dense", 32, 1, 5, plain), Line("core", 32, 1, 5, (("dense", 1),)), Line("random", 32, 1, 5, (("dense", 1),))]),
        "equal": ("Do as many trained numbers inside the span do the same? The difference against the budget, not at one point.",
                  [Line(arm, 32, b, 5 if b == 1 else 3, {"lrc": (), "slice": (("lrc", b),), "dense": (("lrc", b), ("slice", b))}[arm])
                   for b in (1, 2, 5) for arm in ("lrc", "slice", "dense")]),
        "recipe": ("Is the gain one of the recipe?",
                   [Line("lrc", 32, 1, 3), Line("dense", 32, 1, 3, plain), Line("gpd lrc", 32), Line("gpd dense", 32, 1, 3, (("gpd lrc", 1),)),
                    Line("clone lrc", 32), Line("clone dense", 32, 1, 3, (("clone lrc", 1),)), Line("clone lrc, random start", 32, 1, 3, (("clone lrc", 1),))]),
        "continued": ("Is it only faster? Plain LRC with five budgets against core with one.",
                      [Line("lrc", 32, 1, 3), Line("lrc", 32, 2, 3), Line("lrc", 32, 5, 3), Line("core", 32, 1, 3, (("lrc", 1), ("lrc", 2), ("lrc", 5)))]),
        "width": ("How does the gain go with the student's width?",
                  [Line(arm, w, 1, 3, plain if arm == "core" else ()) for w in widths for arm in ("lrc", "core")]),
        "energy": ("Where is the complement used?",
                   [Line(arm, w, 1, 5) for w in (64, 32) for arm in ("dense", "core")] + [Line("dense", 32, 5, 3)]),
        "alignment": ("Does an alignment loss alone ever ask for the complement?",
                      [Line("core", 32, 1, 3), Line("core, alignment only", 32), Line("core, gate and up only", 32)]),
    }


MODES = ("lrc", "dense", "core")


def swept(arm: str, width: int) -> tuple[str, int]:
    """Whose sweep gives this arm its learning rate. Its own where the arm is compared; else a near relative's, to save hours."""
    if arm.startswith("core,"):
        return "core", 32
    if arm.startswith("scratch"):
        return arm, 32
    return arm, 32 if width < 64 else 64


# ---------------------------------------------------------------------------------------------- running


def flags_of(size: Size, arm: str, width: int, budget: int, seed: int, lr: float) -> list[str]:
    steps = budget * size.steps
    values = ARMS[arm] | dict(width=width, seed=seed, lr=lr, steps=steps, batch_size=8, seq_len=128, eval_tokens=size.eval_tokens,
                              calibration_tokens=size.calibration_tokens, eval_every=steps, save_every=steps)
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def work(job: tuple[str, int, int, int, float], flags: list[str], folder: str) -> dict:
    """One run, in a process of its own -> its line. A run that stops by itself (a learning rate too high) has an `error` instead of figures."""
    run = Path(folder) / "-".join(map(str, job)).replace(" ", "_").replace(",", "")
    shutil.rmtree(run, ignore_errors=True)  # of an interrupted attempt
    run.parent.mkdir(parents=True, exist_ok=True)
    row, begun = dict(zip(("arm", "width", "budget", "seed", "lr"), job)) | {"flags": flags}, time.time()
    with open(f"{run}.log", "w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        try:
            train.main([*flags, "--out", str(run)])
        except Refusal as refusal:
            return row | {"error": str(refusal)}
    lines = runs.read_metrics(run)
    steps, evals = [r for r in lines if "loss" in r], [r for r in lines if "val_ce" in r]
    record = read_json(run / "config.json")
    row |= {"start_ce": evals[0]["val_ce"], **{k: evals[-1][k] for k in ("val_ce", "val_kl", "val_top1")}, "tokens": steps[-1]["tokens"],
            "teacher_ce": next(r["teacher"]["val_ce"] for r in lines if "teacher" in r), "energy": audit.energy("tiny", str(run / "student")),
            "training_seconds": round(sum(steps[0]["tokens"] / r["tokens_per_second"] for r in steps), 1), "seconds": round(time.time() - begun, 1),
            "git_commit": record["git_commit"], "torch": record["torch"]}
    shutil.rmtree(run / "checkpoint")  # the student stays
    return row


class Book:
    """The lines of runs.jsonl, and the processes that add to them."""

    def __init__(self, size: Size, out: Path, folder: Path, processes: int):
        self.size, self.file, self.folder, self.processes = size, out / "runs.jsonl", folder, processes
        out.mkdir(parents=True, exist_ok=True)
        text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        self.rows = {tuple(row["flags"]): row for row in map(json.loads, text.splitlines())}
        self.begun, self.steps_done = time.time(), 0

    def row(self, arm: str, width: int, budget: int, seed: int, lr: float) -> dict | None:
        return self.rows.get(tuple(flags_of(self.size, arm, width, budget, seed, lr)))

    def run(self, jobs: list[tuple[str, int, int, int, float]], pool: ProcessPoolExecutor, steps_after: int) -> None:
        """Run those of `jobs` that have no line yet; `steps_after` is what comes after them, for the time left."""
        jobs = [job for job in dict.fromkeys(jobs) if self.row(*job) is None]
        waiting = {pool.submit(work, job, flags_of(self.size, *job), str(self.folder)): job for job in jobs}
        left = sum(job[2] for job in jobs) * self.size.steps + steps_after
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                job, row = waiting.pop(future), future.result()
                self.rows[tuple(row["flags"])] = row
                with self.file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(row) + "\n")
                self.steps_done, left = self.steps_done + job[2] * self.size.steps, left - job[2] * self.size.steps
                eta = (time.time() - self.begun) / self.steps_done * left / 60
                arm, width, budget, seed, lr = job
                print(f"{arm}, r {width}, {budget} budget{'s' * (budget > 1)}, seed {seed}, lr {lr:g}: "
                      + (row.get("error") or f"CE {row['start_ce']:.4f} -> {row['val_ce']:.4f} in {row['seconds']:.0f} s")
                      + f"; {len(waiting)} of these runs left, in all about {eta:.0f} min", flush=True)

    def sweep(self, arm: str, width: int) -> dict[float, float]:
        """lr -> held-out CE (infinite where the run stopped), of what has been run."""
        found = {lr: self.row(arm, width, 1, 0, lr) for lr in (1e-2 * 2.0 ** k for k in range(-6, 7))}
        return {lr: row.get("val_ce", math.inf) for lr, row in found.items() if row}

    def wanted(self, arm: str, width: int) -> list[float]:
        """The learning rates to try next: the first three, then one further while the best is at an edge."""
        done = self.sweep(arm, width)
        if missing := [lr for lr in self.size.rates if lr not in done]:
            return missing
        best = min(done, key=done.get)
        return [best * 2 if best == max(done) else best / 2] if self.size.extend and best in (min(done), max(done)) and len(done) < 7 else []

    def rate(self, arm: str, width: int) -> float:
        done = self.sweep(*swept(arm, width))
        return min(done, key=done.get)

    def lines(self, line: Line) -> dict[int, dict]:
        """seed -> row."""
        found = {seed: self.row(line.arm, line.width, line.budget, seed, self.rate(line.arm, line.width))
                 for seed in range(1, min(line.seeds, self.size.most_seeds) + 1)}
        return {seed: row for seed, row in found.items() if row and "error" not in row}


def carry_out(book: Book, wanted: list[Line]) -> None:
    """Sweeps, then results. Longest first within an experiment, so that no core waits for one."""
    size, total = book.size, sum(line.budget * min(line.seeds, book.size.most_seeds) * book.size.steps for line in wanted)
    threads = max(1, (os.cpu_count() or 1) // book.processes)
    with ProcessPoolExecutor(book.processes, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        try:
            families = list(dict.fromkeys(swept(line.arm, line.width) for line in wanted))
            while jobs := [(*family, 1, 0, lr) for family in families for lr in book.wanted(*family)]:
                book.run(jobs, pool, total)
            book.run([(line.arm, line.width, line.budget, seed, book.rate(line.arm, line.width)) for line in wanted
                      for seed in range(1, min(line.seeds, size.most_seeds) + 1)], pool, 0)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# --------------------------------------------------------------------------------------------- reporting

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t, 97.5 % point, by degrees of freedom


def spread(values: list[float], digits: int = 4) -> str:
    """mean ± standard deviation."""
    return f"{statistics.mean(values):.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def paired(ours: dict[int, dict], theirs: dict[int, dict]) -> tuple[float, float, int]:
    """Mean of CE - CE seed by seed, half its 95 % interval (Student's t), and the number of pairs."""
    differences = [ours[seed]["val_ce"] - theirs[seed]["val_ce"] for seed in ours.keys() & theirs.keys()]
    n = len(differences)
    return statistics.mean(differences), T_95[n - 1] * statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.nan, n


def difference(book: Book, line: Line, arm: str, budget: int) -> tuple[float, float, int]:
    return paired(book.lines(line), book.lines(Line(arm, line.width, budget, line.seeds)))


def table(book: Book, lines: list[Line]) -> str:
    text = ["| arm | r | tokens | lr | seeds | CE | KL to teacher | top-1 | outside the span, gate / up / down, % | CE − CE(other), paired, 95 % | s |",
            "|---|---|---|---|---|---|---|---|---|---|---|"]
    for line in lines:
        rows = list(book.lines(line).values())
        against = "<br>".join(f"{line.arm} − {arm}{f' × {budget}' if budget != line.budget else ''}: {mean:+.4f} ± {half:.4f} ({n})"
                              for arm, budget in line.against for mean, half, n in [difference(book, line, arm, budget)])
        energies = " / ".join(f"{100 * statistics.mean(statistics.mean(row['energy'][kind]) for row in rows):.2f}" for kind in rows[0]["energy"])
        cells = [line.arm, line.width, f"{rows[0]['tokens']:,}", f"{rows[0]['lr']:g}", len(rows), *(spread([row[key] for row in rows]) for key in ("val_ce", "val_kl", "val_top1")),
                 energies, against, f"{statistics.mean(row['seconds'] for row in rows):.0f}"]
        text.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(text)


def sweep_table(book: Book, families: list[tuple[str, int]]) -> str:
    sweeps = {family: book.sweep(*family) for family in families}
    rates = sorted({lr for done in sweeps.values() for lr in done})
    text = ["| arm | r | " + " | ".join(f"{lr:g}" for lr in rates) + " |", "|---|---|" + "---|" * len(rates)]
    for (arm, width), done in sweeps.items():
        cell = lambda lr: "" if lr not in done else f"**{done[lr]:.4f}**" if done[lr] == min(done.values()) else f"{done[lr]:.4f}"
        text.append(f"| {arm} | {width} | " + " | ".join(map(cell, rates)) + " |")
    return "\n".join(text)


def energy_table(book: Book, lines: list[Line]) -> str:
    text = ["| arm | r | tokens | matrix | " + " | ".join(f"layer {i}" for i in range(6)) + " |", "|---|---|---|---|" + "---|" * 6]
    for line in lines:
        rows = list(book.lines(line).values())
        for kind in rows[0]["energy"]:
            layers = zip(*(row["energy"][kind] for row in rows))
            text.append(f"| {line.arm} | {line.width} | {rows[0]['tokens']:,} | {kind} | " + " | ".join(f"{100 * statistics.mean(x):.2f}" for x in layers) + " |")
    return "\n".join(text)


def draw(book: Book, names: list[str], out: Path) -> None:
    """budget.png, width.png and energy.png, each if its experiment ran. Error bars are standard deviations over seeds."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    colours = {"lrc": "black", "slice": "tab:orange", "dense": "tab:blue", "core": "tab:green"}

    def curve(axes, arm, points):
        """points: [(x, Line)]"""
        values = [[row["val_ce"] for row in book.lines(line).values()] for _, line in points]
        axes.errorbar([x for x, _ in points], [statistics.mean(v) for v in values], [statistics.stdev(v) for v in values], label=arm, color=colours[arm], marker="o", capsize=3)

    def finish(figure, axes, name):
        axes.legend()
        figure.savefig(out / f"{name}.png", dpi=100)
        plt.close(figure)

    tokens = 1024 * book.size.steps
    if "equal" in names:
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for arm in ("lrc", "slice", "dense"):
            curve(axes, arm, [(b * tokens, Line(arm, 32, b, 5 if b == 1 else 3)) for b in (1, 2, 5)])
        if "continued" in names:
            curve(axes, "core", [(tokens, Line("core", 32, 1, 5))])
        axes.set(xscale="log", xlabel="training tokens", ylabel="held-out CE, nats a token", title="r 32: more numbers in the span, or the whole matrix")
        finish(figure, axes, "budget")
    if "width" in names:
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for arm in ("lrc", "core"):
            curve(axes, arm, [(w, Line(arm, w)) for w in book.size.widths])
        axes.axhline(next(iter(book.rows.values()))["teacher_ce"], color="grey", linestyle="--", label="teacher (r = H = 128)")
        axes.set(xlabel="student width r", ylabel="held-out CE, nats a token", title=f"{tokens:,} training tokens at every width")
        finish(figure, axes, "width")
    if "energy" in names:
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for arm, style in (("core", "-"), ("dense", "--")):
            rows = list(book.lines(Line(arm, 32, 1, 5)).values())
            for kind, marker in zip(("gate", "up", "down"), "os^"):
                axes.plot([100 * statistics.mean(x) for x in zip(*(row["energy"][kind] for row in rows))], style, marker=marker, color=colours[arm], label=f"{arm}, {kind}")
        axes.set(xlabel="layer", ylabel="energy outside the teacher's span, %", title="r 32: where the complement is used (lrc, slice: 0)", ylim=(0, None))
        finish(figure, axes, "energy")


def report(book: Book, names: list[str], out: Path) -> None:
    chosen = {name: part for name, part in experiments(book.size.widths).items() if name in names}
    families = list(dict.fromkeys(swept(line.arm, line.width) for _, lines in chosen.values() for line in lines))
    text = ["# The paper in miniature", f"From `python reproduce.py`, torch {torch.__version__}, one thread a run. Teacher: `tiny`, H 128, d_ff 688, held-out CE "
            f"{next(row['teacher_ce'] for row in book.rows.values() if 'teacher_ce' in row):.4f} on the {book.size.eval_tokens:,} tokens that all rows here are judged on. "
            "CE and KL in nats a token; mean ± standard deviation over seeds; paired differences with their 95 % interval (number of pairs). s: seconds a run took, start to end.",
            "## Learning rates\n", "Held-out CE at one budget, seed 0; the best goes to the arm. Widths below 64 take the rates of 32, 96 that of 64; scratch at 64 that of 32; "
            "the alignment-only arms core's; 2 and 5 budgets the rate of one.\n", sweep_table(book, families)]
    for name, (question, lines) in chosen.items():
        text += [f"## {name}\n", question + "\n", table(book, lines)]
        text += [energy_table(book, lines)] if name in ("energy", "alignment") else []
        text += [f"\n![{name}]({picture}.png)" for picture in {"equal": ["budget"], "width": ["width"], "energy": ["energy"]}.get(name, [])]
    runs.write_whole(out / "tables.md", "\n\n".join(text).replace("\n\n\n", "\n\n") + "\n")
    draw(book, names, out)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=["all", *experiments(())], metavar="NAME", help=f"all, or some of: {', '.join(experiments(()))}")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time, sharing the cores (default: one a core)")
    parser.add_argument("--quick", action="store_true", help="tiny budgets and two seeds: to see it work, not to conclude from")
    parser.add_argument("--out", type=Path, help="folder of runs.jsonl, tables.md and pictures (default: results, with --quick runs/quick)")
    args = parser.parse_args(argv)
    if args.processes < 1:
        raise Refusal(f"--processes {args.processes} is out of range: at least 1")
    size, out = (QUICK, args.out or Path("runs/quick")) if args.quick else (Size(), args.out or Path("results"))
    parts = experiments(size.widths)
    names = list(parts) if "all" in args.names else list(dict.fromkeys(args.names))
    book = Book(size, out, Path("runs/reproduce-quick" if args.quick else "runs/reproduce"), args.processes)
    carry_out(book, [line for name in names for line in parts[name][1]])
    report(book, names, out)
    print(f"tables: {out}/tables.md")
    if failed := [row for row in book.rows.values() if "error" in row and row["seed"]]:
        raise Refusal(f"{len(failed)} runs stopped by themselves and are missing in the tables, first {failed[0]['arm']}, seed {failed[0]['seed']}: {failed[0]['error']}")


if __name__ == "__main__":
    try:
        main()
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; finished runs are kept, the same command goes on")
