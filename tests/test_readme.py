"""The README tells the truth: its lines, files, commands and presets are checked against the code."""
import re
import shlex
from pathlib import Path

import pytest

import plan
import train
from config import Config
from teachers import PRESETS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_line_of_the_equation_map_holds_what_it_says():
    rows = re.findall(r"\[`(.+?)`\]\((\w+\.py)#L(\d+)\)", README)
    assert len(rows) >= 15
    for code, file, line in rows:
        assert code in (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1], f"{file}:{line} does not hold {code}"


def test_every_file_is_in_the_reading_order_and_every_link_leads_somewhere():
    assert {p.name for p in ROOT.glob("*.py")} == set(re.findall(r"\[(\w+\.py)\]\(\w+\.py\)", README))
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_the_picture_of_the_modes_writes_what_the_table_of_modes_writes():
    text = "".join(re.findall(r">([^<]*)<", (ROOT / "figures" / "reach.svg").read_text(encoding="utf-8"))).replace("U⊥", "U_perp")
    for mode in ("lrc", "core"):
        assert re.search(rf"^\| `{mode}` \| `(.+?)`", README, re.M)[1] in text, mode


def commands():
    blocks = "\n".join(re.findall(r"```\n(.*?)```", README, flags=re.S)).replace("\\\n", " ")
    return [line.strip() for line in blocks.splitlines() if re.match(r"\s*(torchrun|python3?|\.venv)", line)]


@pytest.mark.parametrize("line", [c for c in commands() if "train.py" in c])
def test_every_training_command_has_flags_that_exist(line, monkeypatch, tmp_path):
    if ranks := re.search(r"--nproc_per_node=(\d+)", line):
        monkeypatch.setenv("WORLD_SIZE", ranks[1])
    line = line[line.index("train.py") + len("train.py"):].split(";")[0]
    argv = shlex.split(line)
    if "--resume" not in argv:  # that one needs the run folder; test_train.py resumes
        assert train.parse(argv).steps > 0


@pytest.mark.parametrize("line", [c for c in commands() if re.search(r"(audit|eval|reproduce|data)\.py", c)])
def test_every_other_command_has_flags_that_exist(line):
    name, _, rest = re.search(r"(audit|eval|reproduce|data)\.py (.*)", line).group(0).partition(".py ")
    __import__(name).arguments().parse_args(shlex.split(rest))


def test_ci_runs_the_readmes_own_test_command():
    pattern = re.search(r"grep -m1 '(.+?)'", (ROOT / ".ci" / "run").read_text()).group(1)
    assert len([line for line in README.splitlines() if re.match(pattern, line)]) == 1


def test_the_table_of_presets_is_what_plan_counts():
    for name, preset in PRESETS.items():
        if preset["config"]:
            c = Config.from_hf(preset["config"])
            row = next(line for line in README.splitlines() if line.startswith(f"| `{name}`"))
            assert f"| {preset['width']} |" in row and preset["hub"] in row
            assert f"| {plan.unreachable(c):.1%} |" in row
            assert f"| {plan.count(plan.numbers(c, preset['width'], 'core')['total']['deployed'])} |" in row


def test_the_table_of_the_published_recipe_is_what_plan_prints(capsys):
    rows = re.findall(r"^\| (\S+), (core|dense) \| (\S+) \| (\S+) \| (\S+) GB \| (yes|no) \|$", README, re.M)
    assert len(rows) == 8
    for teacher, mode, hours, faster, memory, fits in rows:
        for tf32, expected in (([], hours), (["--tf32"], faster)):
            train.main(["--teacher", teacher, "--mode", mode, "--preset", "paper", "--plan", "--checkpointing", "--shard", *tf32])
            text = capsys.readouterr().out
            assert f"time      {expected} GPU-hours" in text and f"verdict   {memory} GB {'fits' if fits == 'yes' else 'does not fit'} in 80 GB" in text
