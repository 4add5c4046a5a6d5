"""What the paper in miniature consists of: its arms, its experiments, and each run as a train.py command. reproduce.py runs them."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ARMS = {  # name -> what it changes in train.py's flags
    "lrc": {"mode": "lrc"}, "dense": {"mode": "dense"}, "core": {"mode": "core"}, "random": {"mode": "random"}, "slice": {"mode": "slice"},
    "gpd lrc": {"mode": "lrc", "recipe": "gpd"}, "gpd dense": {"mode": "dense", "recipe": "gpd"},
    "clone lrc": {"mode": "lrc", "recipe": "clone", "coordinates": "teacher"},
    "clone dense": {"mode": "dense", "recipe": "clone", "coordinates": "teacher"},
    # LRC as its own code runs it
    "clone lrc, random start": {"mode": "lrc", "recipe": "clone", "coordinates": "teacher", "init": "random"},
    "scratch CE": {"mode": "scratch", "without": "kl"}, "scratch CE+KL": {"mode": "scratch"},
    "core, alignment only": {"mode": "core", "without": "kl,ce"},
    "core, gate and up only": {"mode": "core", "without": "kl,ce,q,k,v,o,hidden"},
}
MAIN = ("lrc", "dense", "core")


@dataclass(frozen=True)
class Size:
    """How much is run. One budget is `steps` x 1,024 tokens; at 2 or 5 budgets a run has 2 or 5 times as many steps."""
    steps: int = 128
    eval_tokens: int = 16384
    calibration_tokens: int = 16384
    most_seeds: int = 5
    rates: tuple[float, ...] = (5e-3, 1e-2, 2e-2)  # where a sweep begins; doubled or halved while the best is at an edge
    extend: bool = True
    widths: tuple[int, ...] = (16, 32, 48, 64, 96)


QUICK = Size(steps=8, eval_tokens=2048, calibration_tokens=4096, most_seeds=2, rates=(1e-2, 2e-2), extend=False, widths=(32, 64))


class Run(NamedTuple):
    """One training run."""
    arm: str
    width: int
    budget: int
    seed: int
    lr: float


@dataclass(frozen=True)
class Case:
    """A row of a table: an arm at a width and a budget over seeds 1 .. seeds, and the (arm, budget) it is compared with, at that width."""
    arm: str
    width: int
    budget: int = 1
    seeds: int = 3
    against: tuple[tuple[str, int], ...] = ()


def questions(widths: tuple[int, ...]) -> dict[str, tuple[str, list[Case]]]:
    """Name of an experiment -> (what it asks, the rows of its table)."""
    plain, dense = (("lrc", 1),), (("dense", 1),)
    equal = []
    for b in (1, 2, 5):
        seeds = 5 if b == 1 else 3
        equal += [Case("lrc", 32, b, seeds),
                  Case("slice", 32, b, seeds, (("lrc", b),)),
                  Case("dense", 32, b, seeds, (("lrc", b), ("slice", b)))]
    return {
        "main": ("Does training the whole deployed matrix beat plain LRC at the same budget?",
                 [Case(arm, w, 1, 5 if arm in MAIN else 3, () if arm == "lrc" else plain)
                  for w in (64, 32) for arm in (*MAIN, "scratch CE", "scratch CE+KL")]),
        "basis": ("Is the teacher's own basis privileged?",
                  [Case("lrc", 32, 1, 5), Case("dense", 32, 1, 5, plain),
                   Case("core", 32, 1, 5, dense), Case("random", 32, 1, 5, dense + plain)]),
        "equal": ("Do as many trained numbers inside the span do the same? The difference against the budget, not at one point.",
                  equal),
        "recipe": ("Is the gain one of the recipe?",
                   [Case("lrc", 32), Case("dense", 32, against=plain),
                    Case("gpd lrc", 32), Case("gpd dense", 32, against=(("gpd lrc", 1),)),
                    Case("clone lrc", 32), Case("clone dense", 32, against=(("clone lrc", 1),)),
                    Case("clone lrc, random start", 32, against=(("clone lrc", 1),))]),
        "continued": ("Is it only faster? Plain LRC with five budgets against core with one.",
                      [Case("lrc", 32), Case("lrc", 32, 2), Case("lrc", 32, 5),
                       Case("core", 32, against=(("lrc", 1), ("lrc", 2), ("lrc", 5)))]),
        "width": ("How does the gain go with the student's width?",
                  [Case(arm, w, against=plain if arm == "core" else ()) for w in widths for arm in ("lrc", "core")]),
        "energy": ("Where is the complement used?",
                   [Case(arm, w, 1, 5) for w in (64, 32) for arm in ("dense", "core")] + [Case("dense", 32, 5)]),
        "alignment": ("Does an alignment loss alone ever ask for the complement?",
                      [Case("core", 32), Case("core, alignment only", 32), Case("core, gate and up only", 32)]),
    }


def swept(arm: str, width: int) -> tuple[str, int]:
    """Whose sweep gives this arm its learning rate. Its own where the arm is compared; else a near relative's, to save hours."""
    if arm.startswith("core,"):
        return "core", 32
    if arm.startswith("scratch"):
        return arm, 32
    return arm, 32 if width == 48 else width


def flags_of(size: Size, run: Run) -> list[str]:
    steps = run.budget * size.steps
    values = ARMS[run.arm] | dict(width=run.width, seed=run.seed, lr=run.lr, steps=steps, batch_size=8, seq_len=128,
                                  eval_tokens=size.eval_tokens, calibration_tokens=size.calibration_tokens,
                                  eval_every=steps, save_every=steps)
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
