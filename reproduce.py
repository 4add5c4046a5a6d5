"""The paper in miniature: its arms, controls and recipes on the embedded teacher, each with its own learning rate and several seeds.

    python reproduce.py all                # everything; on 2 cores about an hour and three quarters, then tables and pictures in results/
    python reproduce.py basis recipe       # some of it
    python reproduce.py all --quick        # the same path with budgets too small to mean anything, under 10 minutes

A run is one train.py command, kept as a row of results/runs.jsonl with its flags and figures. A run that has its row is never run
again, so the same command goes on after an interruption, and only draws tables and pictures once all is there. First every arm's
learning rate is swept (seed 0, which no result uses); then the arms run with seeds 1, 2, ... The seed is the data order (and R, A,
and random starts), the same for all arms: differences are taken seed by seed.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path

import torch

import audit
import runs
import train
from experiments import QUICK, Case, Run, Size, flags_of, questions, swept
from files import Refusal, read_json, write_whole

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t, 97.5 % point, by degrees of freedom

# ---------------------------------------------------------------------------------------------- running


def work(run: Run, flags: list[str], folder: str) -> dict:
    """One run, in a process of its own -> its row, with an `error` instead of figures where it stops by itself (a learning rate too
    high)."""
    out = Path(folder) / "-".join(map(str, run)).replace(" ", "_").replace(",", "")
    shutil.rmtree(out, ignore_errors=True)  # of an interrupted attempt
    out.parent.mkdir(parents=True, exist_ok=True)
    row, begun = run._asdict() | {"flags": flags}, time.time()
    with open(f"{out}.log", "w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        try:
            train.main([*flags, "--out", str(out)])
        except (Refusal, RuntimeError) as error:
            return row | {"error": f"{type(error).__name__}: {error}"}
    metrics, record = runs.read_metrics(out), read_json(out / "config.json")
    steps, evals = [r for r in metrics if "loss" in r], [r for r in metrics if "val_ce" in r]
    shutil.rmtree(out / "checkpoint")  # the student stays
    return row | {
        "start_ce": evals[0]["val_ce"], **{k: evals[-1][k] for k in ("val_ce", "val_kl", "val_top1")}, "tokens": steps[-1]["tokens"],
        "teacher_ce": next(r["teacher"]["val_ce"] for r in metrics if "teacher" in r), "energy": audit.energy("tiny", str(out / "student")),
        "training_seconds": round(sum(steps[0]["tokens"] / r["tokens_per_second"] for r in steps), 1),
        "seconds": round(time.time() - begun, 1),
        "threads": torch.get_num_threads(), **{k: record[k] for k in ("git_commit", "git_dirty", "torch")}}


def begin(threads: int) -> None:
    """A worker ends with its parent, however the parent ends: an orphan would write into the folders of the next attempt."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us

    def watch():
        connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def workers(processes: int):
    threads = max(1, (os.cpu_count() or 1) // processes)
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), begin, (threads,))
    try:
        yield pool
    except BrokenProcessPool:
        raise Refusal("the process of a run was killed (out of memory?); finished runs are kept, the same command goes on") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


class Book:
    """The rows of runs.jsonl, and the processes that add to them."""

    def __init__(self, size: Size, out: Path, folder: Path):
        self.size, self.file, self.folder = size, out / "runs.jsonl", folder
        out.mkdir(parents=True, exist_ok=True)
        text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        whole = text[:text.rfind("\n") + 1]
        if whole != text:  # torn by a kill: that run comes again
            write_whole(self.file, whole)
        self.rows = {tuple(row["flags"]): row for row in map(json.loads, whole.splitlines())}
        self.begun, self.steps_done = time.time(), 0

    def row(self, run: Run) -> dict | None:
        return self.rows.get(tuple(flags_of(self.size, run)))

    def run(self, wanted: list[Run], pool, budgets_after: int = 0) -> None:
        """Run those of `wanted` that have no row yet; `budgets_after` is what comes after them, for the time left."""
        todo = [run for run in dict.fromkeys(wanted) if self.row(run) is None]
        todo.sort(key=lambda run: -run.budget)  # no core waits for a long last one
        waiting = {pool.submit(work, run, flags_of(self.size, run), str(self.folder)): run for run in todo}
        left = (sum(run.budget for run in todo) + budgets_after) * self.size.steps
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                run, row = waiting.pop(future), future.result()
                self.rows[tuple(row["flags"])] = row
                with self.file.open("a", encoding="utf-8") as rows:
                    rows.write(json.dumps(row) + "\n")
                steps = run.budget * self.size.steps
                self.steps_done, left = self.steps_done + steps, left - steps
                minutes = (time.time() - self.begun) / self.steps_done * left / 60
                print(f"{run.arm}, r {run.width}, {run.budget} budget{'s' * (run.budget > 1)}, seed {run.seed}, lr {run.lr:g}: "
                      + (row.get("error") or f"CE {row['start_ce']:.4f} -> {row['val_ce']:.4f} in {row['seconds']:.0f} s")
                      + f"; {len(waiting)} of these runs left, in all about {minutes:.0f} min", flush=True)

    def sweep(self, arm: str, width: int) -> dict[float, float]:
        """lr -> held-out CE (infinite where the run stopped), of what has been run."""
        found = {lr: self.row(Run(arm, width, 1, 0, lr)) for lr in (1e-2 * 2.0 ** k for k in range(-6, 7))}
        return {lr: row.get("val_ce", math.inf) for lr, row in found.items() if row}

    def to_try(self, arm: str, width: int) -> list[float]:
        """The learning rates to try next: the first three, then one further while the best is at an edge."""
        done = self.sweep(arm, width)
        if missing := [lr for lr in self.size.rates if lr not in done]:
            return missing
        best = min(done, key=done.get)
        if not self.size.extend or best not in (min(done), max(done)) or len(done) >= 7:
            return []
        return [best * 2 if best == max(done) else best / 2]

    def rate(self, arm: str, width: int) -> float:
        done = self.sweep(*swept(arm, width))
        return min(done, key=done.get)

    def runs_of(self, case: Case) -> list[Run]:
        lr, seeds = self.rate(case.arm, case.width), min(case.seeds, self.size.most_seeds)
        return [Run(case.arm, case.width, case.budget, seed, lr) for seed in range(1, seeds + 1)]

    def seeds(self, case: Case) -> dict[int, dict]:
        """seed -> row, of the runs that came to an end."""
        found = {run.seed: self.row(run) for run in self.runs_of(case)}
        return {seed: row for seed, row in found.items() if row and "error" not in row}


def carry_out(book: Book, cases: list[Case], processes: int) -> None:
    """Sweeps, then results."""
    families = list(dict.fromkeys(swept(case.arm, case.width) for case in cases))
    after = sum(b for _, _, b, _ in {(c.arm, c.width, c.budget, seed) for c in cases for seed in range(min(c.seeds, book.size.most_seeds))})
    with workers(processes) as pool:
        while sweeps := [Run(*family, 1, 0, lr) for family in families for lr in book.to_try(*family)]:
            book.run(sweeps, pool, after)
        book.run([run for case in cases for run in book.runs_of(case)], pool)


# --------------------------------------------------------------------------------------------- reporting


def spread(values: list[float], digits: int = 4) -> str:
    """mean ± standard deviation."""
    return f"{statistics.mean(values):.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def paired(ours: dict[int, dict], theirs: dict[int, dict]) -> tuple[float, float, int]:
    """Mean of CE - CE seed by seed, half its 95 % interval (Student's t), and the number of pairs."""
    differences = [ours[seed]["val_ce"] - theirs[seed]["val_ce"] for seed in ours.keys() & theirs.keys()]
    n = len(differences)
    mean = statistics.mean(differences) if n else math.nan
    half = T_95[n - 1] * statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.nan
    return mean, half, n


def table(book: Book, cases: list[Case]) -> str:
    columns = ["arm", "r", "tokens", "lr", "seeds", "CE", "KL to teacher", "top-1", "outside the span, gate / up / down, %",
               "CE − CE(other), paired, 95 %", "s"]
    text = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for case in cases:
        rows = list(book.seeds(case).values())
        if not rows:
            text.append(f"| {case.arm} | {case.width} | failed |" + " |" * 8)
            continue
        energies = [statistics.mean(statistics.mean(row["energy"][kind]) for row in rows) for kind in rows[0]["energy"]]
        against = []
        for arm, budget in case.against:
            mean, half, n = paired(book.seeds(case), book.seeds(Case(arm, case.width, budget, case.seeds)))
            times = f" × {budget}" if budget != case.budget else ""
            against.append(f"{case.arm} − {arm}{times}: {mean:+.4f} ± {half:.4f} ({n})")
        cells = [case.arm, case.width, f"{rows[0]['tokens']:,}", f"{rows[0]['lr']:g}", len(rows),
                 *(spread([row[key] for row in rows]) for key in ("val_ce", "val_kl", "val_top1")),
                 " / ".join(f"{100 * energy:.2f}" for energy in energies), "<br>".join(against),
                 f"{statistics.mean(row['seconds'] for row in rows):.0f}"]
        text.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(text)


def sweep_table(book: Book, families: list[tuple[str, int]]) -> str:
    sweeps = {family: book.sweep(*family) for family in families}
    rates = sorted({lr for done in sweeps.values() for lr in done})
    text = ["| arm | r | " + " | ".join(f"{lr:g}" for lr in rates) + " |", "|---|---|" + "---|" * len(rates)]
    for (arm, width), done in sweeps.items():
        best = min(done.values(), default=None)
        cells = {lr: f"**{ce:.4f}**" if ce == best else f"{ce:.4f}" for lr, ce in done.items()}
        text.append(f"| {arm} | {width} | " + " | ".join(cells.get(lr, "") for lr in rates) + " |")
    return "\n".join(text)


def energy_table(book: Book, cases: list[Case]) -> str:
    """Energy outside the teacher's span, in %, by layer: the mean over seeds."""
    body = []
    for case in cases:
        rows = list(book.seeds(case).values())
        for kind in rows[0]["energy"] if rows else ():
            layers = [f"{100 * statistics.mean(x):.2f}" for x in zip(*(row["energy"][kind] for row in rows))]
            body.append(f"| {case.arm} | {case.width} | {rows[0]['tokens']:,} | {kind} | " + " | ".join(layers) + " |")
    layers = body[0].count("|") - 5 if body else 0
    head = "| arm | r | tokens | outside the span, % | " + " | ".join(f"layer {i}" for i in range(layers)) + " |"
    return "\n".join([head, "|---|---|---|---|" + "---|" * layers, *body])


COLOURS = {"lrc": "black", "slice": "tab:orange", "dense": "tab:blue", "core": "tab:green"}


def curve(axes, book: Book, arm: str, points: list[tuple[float, Case]]) -> None:
    """Held-out CE of an arm, at each x of a case that has results."""
    found = [(x, [row["val_ce"] for row in book.seeds(case).values()]) for x, case in points if book.seeds(case)]
    means = [statistics.mean(ces) for _, ces in found]
    deviations = [statistics.stdev(ces) if len(ces) > 1 else 0 for _, ces in found]
    axes.errorbar([x for x, _ in found], means, deviations, label=arm, color=COLOURS[arm], marker="o", capsize=3)


def draw(book: Book, names: list[str], out: Path) -> None:
    """budget.png, width.png and energy.png, each if its experiment ran. Error bars are standard deviations over seeds."""
    plt = runs.pictures()
    tokens = 1024 * book.size.steps

    def picture(name, fill, **labels):
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        fill(axes)
        axes.set(**labels)
        axes.legend()
        runs.save_picture(figure, out / f"{name}.png", dpi=100)

    def budgets(axes):
        for arm in ("lrc", "slice", "dense"):
            curve(axes, book, arm, [(b * tokens, Case(arm, 32, b, 5 if b == 1 else 3)) for b in (1, 2, 5)])
        if "continued" in names:
            curve(axes, book, "core", [(tokens, Case("core", 32, 1, 5))])
        axes.set_xscale("log")
        axes.set_xticks([b * tokens for b in (1, 2, 5)], [f"{b * tokens:,}" for b in (1, 2, 5)])
        axes.minorticks_off()

    def widths(axes):
        for arm in ("lrc", "core"):
            curve(axes, book, arm, [(w, Case(arm, w)) for w in book.size.widths])
        teacher_ce = next(row["teacher_ce"] for row in book.rows.values() if "teacher_ce" in row)
        axes.axhline(teacher_ce, color="grey", linestyle="--", label="teacher (r = H = 128)")

    def energies(axes):
        for arm, style in (("core", "-"), ("dense", "--")):
            rows = list(book.seeds(Case(arm, 32, 1, 5)).values())
            for kind, marker in zip(audit.KINDS, "os^"):
                layers = [100 * statistics.mean(x) for x in zip(*(row["energy"][kind] for row in rows))]
                axes.plot(layers, style, marker=marker, color=COLOURS[arm], label=f"{arm}, {kind}")
    ce = "held-out CE, nats a token"
    if "equal" in names:
        picture("budget", budgets, xlabel="training tokens", ylabel=ce, title="r 32: more numbers in the span, or the whole matrix")
    if "width" in names:
        picture("width", widths, xlabel="student width r", ylabel=ce, title=f"{tokens:,} training tokens at every width")
    if "energy" in names:
        picture("energy", energies, xlabel="layer", ylabel="energy outside the teacher's span, %",
                title="r 32: where the complement is used", ylim=(0, None))


def report(book: Book, names: list[str], out: Path) -> None:
    chosen = {name: part for name, part in questions(book.size.widths).items() if name in names}
    families = list(dict.fromkeys(swept(case.arm, case.width) for _, cases in chosen.values() for case in cases))
    done = [row for row in book.rows.values() if "error" not in row]
    of = lambda key: ", ".join(sorted({str(row.get(key)) for row in done}))
    text = ["# The paper in miniature",
            f"From `python reproduce.py`: torch {of('torch')}, {of('threads')} thread a run. Teacher: `tiny`, H 128, d_ff 688, "
            f"held-out CE {done[0]['teacher_ce']:.4f} on the {book.size.eval_tokens:,} tokens that all rows here are judged on. "
            "CE and KL in nats a token; mean ± standard deviation over seeds; paired differences with their 95 % interval "
            "(number of pairs). s: seconds a run took, start to end. The interval is over data order alone: not over teachers, "
            "not over held-out text, and not over the learning rate, which is known to a factor of two from one seed; "
            "a parabola through a sweep puts an arm's own best up to 0.01 below its grid point.",
            "## Learning rates\n",
            "Held-out CE at one budget, seed 0; the best goes to the arm. Width 48 takes the rates of 32, scratch at 64 those of 32; "
            "the alignment-only arms core's; 2 and 5 budgets the rate of one, which is less likely to be the best there.\n",
            sweep_table(book, families)]
    for name, (question, cases) in chosen.items():
        text += [f"## {name}\n", question + "\n", table(book, cases)]
        text += [energy_table(book, cases)] if name in ("energy", "alignment") else []
        text += [f"![{name}]({picture}.png)" for picture in {"equal": ["budget"], "width": ["width"], "energy": ["energy"]}.get(name, [])]
    write_whole(out / "tables.md", "\n\n".join(text).replace("\n\n\n", "\n\n") + "\n")
    draw(book, names, out)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(questions(()))
    parser.add_argument("names", nargs="+", choices=["all", *names], metavar="NAME", help=f"all, or some of: {', '.join(names)}")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time, sharing the cores (default: one a core)")
    parser.add_argument("--quick", action="store_true", help="tiny budgets and two seeds: to see it work, not to conclude from")
    parser.add_argument("--out", type=Path, help="folder of runs.jsonl, tables.md and pictures (default: results, with --quick runs/quick)")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    if args.processes < 1:
        raise Refusal(f"--processes {args.processes} is out of range: at least 1")
    size, out, folder = Size(), args.out or Path("results"), Path("runs/reproduce")
    if args.quick:
        size, out, folder = QUICK, args.out or Path("runs/quick"), Path("runs/reproduce-quick")
    parts = questions(size.widths)
    names = list(parts) if "all" in args.names else list(dict.fromkeys(args.names))
    cases = [case for name in names for case in parts[name][1]]
    with runs.lock(folder):  # two at once would write into each other's runs
        book = Book(size, out, folder)
        carry_out(book, cases, args.processes)
        report(book, names, out)
    print(f"tables: {out}/tables.md")
    if failed := [run for case in cases for run in book.runs_of(case) if "error" in book.row(run)]:
        raise Refusal(f"{len(failed)} runs stopped by themselves and are missing in the tables, "
                      f"first {failed[0].arm}, seed {failed[0].seed}: {book.row(failed[0])['error']}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; finished runs are kept, the same command goes on"))
    try:
        main()
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; finished runs are kept, the same command goes on")
