"""The miniature: its flags exist, a finished run is not run again, sweeps end between two worse neighbours, statistics by hand."""
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

import reproduce
import train
from experiments import ARMS, Case, Run, Size, flags_of, questions, swept
from reproduce import Book, paired

ROOT = Path(__file__).resolve().parent.parent


class Inline:
    """A pool of no processes: what is submitted runs at once, and is counted."""
    def __init__(self):
        self.jobs = []

    def submit(self, function, job, *more):
        self.jobs.append(job)
        future = Future()
        future.set_result(function(job, *more))
        return future


def bowl(lr, best=2e-2):
    return 3 + math.log2(lr / best) ** 2


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book whose runs cost nothing: CE = a bowl in lr, lower for core, plus a part of the seed."""
    def work(run, flags, folder):
        arm, width, budget, seed, lr = run
        ce = bowl(lr) + seed / 10 - (arm == "core") * (0.5 + seed / 100)
        return dict(arm=arm, width=width, budget=budget, seed=seed, lr=lr, flags=flags, start_ce=5.0, val_ce=ce, val_kl=1.0, val_top1=0.5, teacher_ce=2.0,
                    tokens=1024 * budget, seconds=1.0, energy={"gate": [0.01, 0.03], "up": [0.0, 0.0], "down": [0.5, 0.5]})
    monkeypatch.setattr(reproduce, "work", work)
    return Book(Size(), tmp_path / "results", tmp_path / "runs")


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_command_of_train(arm):
    args = train.parse(flags_of(Size(), Run(arm, 32, 2, 3, 0.02)))
    assert (args.width, args.seed, args.lr, args.steps, args.mode) == (32, 3, 0.02, 256, ARMS[arm]["mode"])


def test_every_experiment_holds_what_it_compares_with():
    for name, (question, cases) in questions(Size().widths).items():
        assert question.endswith((".", "?"))
        there = {(case.arm, case.width, case.budget) for case in cases}
        assert all((arm, case.width, budget) in there for case in cases for arm, budget in case.against), name
        assert all(case.arm in ARMS and swept(case.arm, case.width)[0] in ARMS for case in cases)


def test_a_sweep_goes_on_until_the_best_has_two_worse_neighbours(book):
    pool = Inline()
    while lrs := book.to_try("lrc", 32):
        book.run([Run("lrc", 32, 1, 0, lr) for lr in lrs], pool)
    assert [job[4] for job in pool.jobs] == [5e-3, 1e-2, 2e-2, 4e-2]
    assert book.rate("lrc", 32) == 2e-2 and book.rate("lrc", 48) == 2e-2


def test_a_finished_run_is_never_run_twice(book):
    wanted = [Run("lrc", 32, 1, 1, 0.01), Run("lrc", 32, 1, 1, 0.01), Run("core", 32, 5, 1, 0.01)]
    first, second = Inline(), Inline()
    book.run(wanted, first)
    again = Book(book.size, book.file.parent, book.folder)  # as after an interruption
    again.run(wanted, second)
    assert first.jobs == [wanted[2], wanted[0]] and second.jobs == [] and again.rows == book.rows  # the long one first
    bigger = Book(replace(book.size, steps=256), book.file.parent, book.folder)
    assert bigger.row(wanted[0]) is None  # other flags, another run


def test_a_torn_last_row_is_dropped_and_run_again(book):
    book.run([Run("lrc", 32, 1, seed, 0.01) for seed in (1, 2)], Inline())
    whole = book.file.read_text(encoding="utf-8")
    book.file.write_text(whole[:-20], encoding="utf-8")
    again = Book(book.size, book.file.parent, book.folder)
    assert len(again.rows) == 1
    again.run([Run("lrc", 32, 1, seed, 0.01) for seed in (1, 2)], Inline())
    assert again.file.read_text(encoding="utf-8") == whole


def test_paired_interval_by_hand():
    ours, theirs = ({seed: {"val_ce": ce} for seed, ce in enumerate(values)} for values in ((2.0, 4.0, 6.0, 9.0), (1.0, 2.0, 3.0)))
    mean, half, n = paired(ours, theirs)  # differences 1, 2, 3: standard deviation 1, t(2) = 4.303
    assert (mean, n) == (2.0, 3) and half == pytest.approx(4.303 / 3 ** 0.5)
    assert math.isnan(paired({1: {"val_ce": 1.0}}, {1: {"val_ce": 0.5}})[1])


def test_t_quantiles_are_students():
    """The density of Student's t, integrated numerically, holds 95 % between -t and t."""
    for n, t in reproduce.T_95.items():
        density = lambda x: math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2)) * (1 + x * x / n) ** (-(n + 1) / 2)
        step = t / 20000
        assert 2 * step * sum(density((k + 0.5) * step) for k in range(20000)) == pytest.approx(0.95, abs=5e-5)  # three decimals of t


def test_tables_hold_means_spreads_and_paired_differences(book):
    cases = [Case("lrc", 32), Case("core", 32, against=(("lrc", 1),))]
    for arm in ("lrc", "core"):
        while lrs := book.to_try(arm, 32):
            book.run([Run(arm, 32, 1, 0, lr) for lr in lrs], Inline())
        book.run([Run(arm, 32, 1, seed, 2e-2) for seed in (1, 2, 3)], Inline())
    plain, ours = reproduce.table(book, cases).splitlines()[2:]
    assert "| lrc | 32 | 1,024 | 0.02 | 3 | 3.2000 ± 0.1000 |" in plain  # CE 3.1, 3.2, 3.3
    assert "| 2.00 / 0.00 / 50.00 |" in plain
    assert f"core − lrc: -0.5200 ± {4.303 * 0.01 / 3 ** 0.5:.4f} (3)" in ours  # -0.51, -0.52, -0.53
    assert "| 0.005 | 0.01 | 0.02 | 0.04 |" in reproduce.sweep_table(book, [("lrc", 32)]) and "**3.0000**" in reproduce.sweep_table(book, [("lrc", 32)])


def test_a_run_that_stops_by_itself_is_the_worst_of_its_sweep_and_named(book, monkeypatch):
    real = reproduce.work
    monkeypatch.setattr(reproduce, "work", lambda run, flags, folder: run._asdict() | dict(flags=flags, error="step 3: loss not finite")
                        if run.lr > 0.015 else real(run, flags, folder))
    while lrs := book.to_try("lrc", 32):
        book.run([Run("lrc", 32, 1, 0, lr) for lr in lrs], Inline())
    assert book.sweep("lrc", 32)[2e-2] == math.inf and book.rate("lrc", 32) == 1e-2
    book.run([Run(arm, 32, 1, seed, 2e-2) for arm in ("lrc", "core") for seed in (1, 2, 3)], Inline())
    monkeypatch.setattr(book, "rate", lambda arm, width: 2e-2)  # as if all the seeds of an arm had failed
    assert "| lrc | 32 | failed |" in reproduce.table(book, [Case("lrc", 32), Case("core", 32, against=(("lrc", 1),))])
    assert math.isnan(paired({}, {1: {"val_ce": 1.0}})[0]) and reproduce.energy_table(book, [Case("lrc", 32)]).count("\n") == 1


def test_a_real_run_leaves_its_line_its_student_and_its_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = Size(steps=2, eval_tokens=256, calibration_tokens=512)
    run = Run("slice", 32, 1, 1, 0.01)
    row = reproduce.work(run, flags_of(size, run), str(tmp_path / "runs"))
    assert json.loads(json.dumps(row)) == row
    assert row["val_ce"] > row["teacher_ce"] > 1 and row["tokens"] == 2048 and max(sum(row["energy"].values(), [])) < 1e-10
    run = next(p for p in (tmp_path / "runs").iterdir() if p.is_dir())
    assert (run / "student" / "model.safetensors").exists() and not (run / "checkpoint").exists()
    assert "held-out" in run.with_name(run.name + ".log").read_text(encoding="utf-8")


def test_the_committed_results_are_those_of_the_committed_code():
    """Every row of the full set is there, under the flags that the code would give it now, and tables.md is made from them."""
    book = Book(Size(), ROOT / "results", Path("unused"))
    text = (ROOT / "results" / "tables.md").read_text(encoding="utf-8")
    for _, cases in questions(Size().widths).values():
        assert reproduce.table(book, cases) in text
        for case in cases:
            assert len(book.seeds(case)) == case.seeds and book.to_try(*swept(case.arm, case.width)) == []


ENDLESS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are begun with Ctrl-C ignored
sys.path.insert(0, {root!r})
import reproduce
def endless(run, flags, folder):
    os.write(1, b"begun\\n")  # in one piece: print may write a line and its end apart
    time.sleep(600)
if __name__ == "__main__":
    reproduce.work = endless
    reproduce.main(["basis", "--quick", "--processes", "2"])
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_worker_outlives_its_parent(tmp_path, how):
    """However the parent ends, nothing is left that could write into the folders of the next attempt."""
    (tmp_path / "endless.py").write_text(ENDLESS.format(root=str(ROOT)))
    parent = subprocess.Popen([sys.executable, "endless.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

    def group():  # the parent's session: /proc/PID/stat is "pid (name) state ppid pgrp session ..."
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # gone meanwhile
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
                found += [stat.parent.name] if int(session) == parent.pid and state != "Z" else []
        return found
    assert parent.stdout.readline() == b"begun\n" == parent.stdout.readline()
    assert len(group()) >= 3
    (os.killpg if how == "SIGINT" else os.kill)(parent.pid, getattr(signal, how))
    parent.wait(60)
    end = time.time() + 30
    while group() and time.time() < end:
        time.sleep(0.1)
    assert group() == []


@pytest.mark.slow
def test_quick_runs_an_experiment_from_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "QUICK", replace(reproduce.QUICK, steps=2, eval_tokens=512, calibration_tokens=1024))
    reproduce.main(["basis", "--quick", "--processes", "2"])
    assert capsys.readouterr().out.count(" -> ") == 4 * 2 + 4 * 2  # two rates and two seeds for four arms
    before = (tmp_path / "runs/quick/runs.jsonl").read_text(encoding="utf-8")
    reproduce.main(["basis", "energy", "--quick", "--processes", "2"])
    assert (tmp_path / "runs/quick/runs.jsonl").read_text(encoding="utf-8").startswith(before)
    assert (tmp_path / "runs/quick/energy.png").stat().st_size > 10_000 and "## basis" in (tmp_path / "runs/quick/tables.md").read_text(encoding="utf-8")
