"""Every command of the README runs, scaled down, and every flag of every command is seen to do something.

A new command in the README runs here by itself, in a folder that holds what its words name (FOLDER, STUDENT, CACHE, my.jsonl, ...), or needs
a reason in NOT_RUN. A new flag needs one line in EXERCISED: the test that runs the command with it and sees its effect.
"""
import argparse
import ast
import contextlib
import functools
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelInfo
from pyarrow import parquet
from safetensors.torch import load_file

import audit
import checkpoints
import core
import data
import distill
import eval as evals
import reproduce
import runs
import sources
import train
from conftest import random_net
from data import Tokens
from eval import AVG9, OUTSIDE
from files import Refusal
from model import Transformer
from test_reproduce import Inline
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CACHE = Path(os.environ.get("LRC_TEST_CACHE", Path.home() / ".cache" / "lrc-tests"))

# ------------------------------------------------------------------------------------- the README's commands

NOT_RUN = {  # how a command begins -> why it is not run here
    "python -m venv": "makes the environment that the tests run in",
    "pip install": "fills the environment that the tests run in",
    "python -m pytest": "this suite",
    "vllm serve": "an engine that lives in a Python of its own; tests/engines.py compares it by hand",
    "llama-server": "an engine that lives outside Python; tests/engines.py compares it by hand",
}
SMALL = {"--steps": "2", "--batch-size": "2", "--seq-len": "16", "--accum": "1", "--calibration-tokens": "256", "--eval-tokens": "64"}


def commands():
    """The command lines of the fenced blocks, cut at &&, and those in the text between backticks; without comments and environments."""
    fenced = "\n".join(re.findall(r"```\n(.*?)```", README, flags=re.S))
    lines = [part for line in fenced.splitlines() for part in re.sub(r"\s+#.*", "", line).split("&&")]
    inline = re.findall(r"`((?:\w+=\S+ )?(?:\S*/)?(?:python3?|torchrun) [^`\n]+)`", re.sub(r"```\n.*?```", "", README, flags=re.S))
    found = [re.sub(r"^(\w+=\S+ )?(\.venv/bin/)?(python3?(?= )|)", lambda m: "python" if m[3] else "", line.strip()) for line in lines + inline]
    return list(dict.fromkeys(line for line in found if re.match(r"(python|torchrun|pip|vllm|llama-server|\w+/\w+\.py) ", line)))


RUN = [line for line in commands() if not line.startswith(tuple(NOT_RUN))]
SLOW = ("torchrun", "python tests/", "python reproduce.py")  # processes of their own, downloads, minutes; ten tasks take seconds, too


def set_flags(words, flags):
    """The command with these flags at these values, replaced where it gives them and else appended."""
    words = list(words)
    for name, value in flags.items():
        if name in words:
            words[words.index(name) + 1] = value
        else:
            words += [name] if value is None else [name, value]
    return words


def scaled(line):
    """(script, its words) of a README command, with small numbers, and placeholders that no file can stand for filled in."""
    for name, value in (("NAME", "llama3.2-3b"), ("PYTHON", sys.executable), ("ENGINE", "transformers"),
                        ("--engine llama.cpp", "--engine transformers")):
        line = line.replace(name, value)
    words = shlex.split(line)
    script = next(word for word in words if word.endswith(".py"))
    words = words[words.index(script) + 1:]
    named = {flag: words[words.index(flag) + 1] for flag in ("--teacher", "--tokenizer", "--tasks") if flag in words}
    if script == "train.py" and not {"--plan", "--resume"} & set(words):
        words = set_flags(words, SMALL | ({"--width": "12"} if "--width" in words else {}) | ({"--teacher": "FOLDER"} if named.get("--teacher") == "llama3.2-3b" else {}))
    if script == "data.py":
        words = set_flags(words, {"--tokenizer": "FOLDER"} if named.get("--tokenizer") == "llama3.2-3b" else {})
    if script == "audit.py" and words[0] in ("remove", "rank"):
        words = set_flags(words, {"--seq-len": "16", "--tokens": "64"})
    if script == "audit.py" and words[0] == "neurons":
        words = set_flags(words, {"--k": "5", "--draws": "2"})
    if script == "eval.py":
        words = set_flags(words, {"--seq-len": "16", "--tokens": "64"} if "--text" in words else {"--local": "TASKS", "--offline": None} if "--local" not in words else {})
    if script == "bench.py":
        words = ["bases"]
    if script == "reproduce.py":
        words = set_flags(words, {"--quick": None, "--processes": "1"})
    if script == "tests/engines.py":
        words = set_flags(words, {"--count": "4"})
    return script, words


class Hub:
    """The hub's data sets in memory: every name holds the same tables."""
    def __init__(self):
        buffers = {}
        for name, rows in (("data/a.parquet", [{"text": f"x = {n}\n" * 20, "id": str(n), "score": float(n % 6)} for n in range(400)]),
                           ("chats.parquet", [{"conversations": [{"from": "human", "value": f"say {n}"}, {"from": "gpt", "value": f"{n}, then"}], "id": str(n)} for n in range(200)]
                            + [{"conversations": [{"from": "robot", "value": "no such role"}], "id": "bad"}])):
            buffer = io.BytesIO()
            parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
            buffers[name] = buffer.getvalue()
        self.sets = {"HuggingFaceFW/fineweb-edu": {"data/a.parquet": buffers["data/a.parquet"]}, "teknium/OpenHermes-2.5": {"chats.parquet": buffers["chats.parquet"]}}

    def __call__(self):
        return self

    def dataset_info(self, repo, revision=None, timeout=None, files_metadata=False):
        return SimpleNamespace(sha="commit", siblings=[SimpleNamespace(rfilename=name, size=len(raw)) for name, raw in self.sets[repo].items()])

    def open(self, path, mode):
        _, owner, name, file = path.split("/", 3)
        return io.BytesIO(self.sets[f"{owner}/{name.partition('@')[0]}"][file])


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_model(folder, **changes):
    """A random 2-layer Llama with tiny's tokenizer and a chat template."""
    random_net(vocab_size=2048, **changes).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ROOT / "tiny" / name, folder / name)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                                                "{% if add_generation_prompt %}assistant: {% endif %}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A working folder with everything that the README's commands name, all of it small."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        make_model(Path("FOLDER"))
        write_rows(Path("my.jsonl"), [{"id": f"d{i}", "text": f"def f{i}(x):\n    return x * {i} + {i * i}\n" * 4} for i in range(200)])
        write_rows(Path("chats.jsonl"), [{"id": i, "messages": [{"role": "user", "content": f"say {i} {i * i}"},
                                                                {"role": "assistant", "content": f"so, {i} it is"}]} for i in range(300)])
        Path("stdlib").mkdir()
        for i in range(60):
            Path("stdlib", f"m{i}.py").write_text(f"import os\n\n\ndef f{i}(x):\n    return os.path.join(x, '{i}')\n" * 6, encoding="utf-8")
        for folder, names in (("TASKS", [*AVG9, *OUTSIDE]),):
            Path(folder).mkdir()
            write_rows(Path(folder, "rows.jsonl"), [{"ctx": f"import os\nos.path.{w}(", "choices": ["path", "a very long answer"], "gold": 0} for w in ("join", "exists", "split")])
            for name in names:
                Path(folder, f"local_{name}.yaml").write_text(
                    f"task: local_{name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {home / folder / 'rows.jsonl'}\n"
                    "output_type: multiple_choice\ntest_split: test\n"
                    "doc_to_text: '{{ctx}}'\ndoc_to_choice: choices\ndoc_to_target: gold\nmetric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
                    "  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\nmetadata: {version: 1.0}\n", encoding="utf-8")
        Path("tests").symlink_to(ROOT / "tests")
        Path("CACHE").mkdir()
        for name, what in (("SmolLM2-135M-Instruct", "FOLDER"), ("tasks", "TASKS"), ("wikipedia-leads.jsonl", "my.jsonl"), ("wikipedia-chats.jsonl", "chats.jsonl")):
            Path("CACHE", name).symlink_to(home / what)
        for name in ("mine", "more", "fineweb-edu", "openhermes", "leads"):
            data.main(["prepare", "my.jsonl", "--tokenizer", "FOLDER", "--out", f"tokens/{name}"])
        data.main(["prepare", "chats.jsonl", "--chats", "--tokenizer", "FOLDER", "--out", "tokens/chats"])
        small = [word for pair in SMALL.items() for word in pair]
        train.main(["--teacher", "FOLDER", "--data", "my.jsonl", "--width", "12", "--out", "runs/mine", *small])
        train.main(["--teacher", "tiny", "--data", "stdlib", "--out", "runs/tiny-core", *small])
        for name in ("smollm2-core", "smollm2-core-sft", "smollm2-lrc"):
            shutil.copytree("runs/mine", f"runs/{name}")
        Path("STUDENT").symlink_to(home / "runs/mine/student")
        Path("TEACHER").symlink_to(home / "FOLDER")
    return home


@pytest.fixture
def at_home(home, monkeypatch):
    """In that folder, with a small standard library."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(sources, "sysconfig", SimpleNamespace(get_paths=lambda: {"stdlib": str(home / "stdlib")}))
    return home


def made_by(script, words):
    """What the command is to leave, in the working folder; None where it only speaks."""
    named = lambda flag: Path(words[words.index(flag) + 1]) if flag in words else None
    if script == "train.py" and "--plan" not in words:
        teacher = named("--init") or named("--teacher") or Path("tiny")
        return (named("--out") or Path(f"runs/{teacher.name}-core")) / "student" / "model.safetensors"
    if script == "merge.py":
        return named("--out") or Path(words[0], "student.gguf" if "--gguf" in words else "student")
    if script == "eval.py":
        return Path("results/eval")
    if script == "reproduce.py":
        return Path("runs/quick/tables.md")
    return named("--out") or named("--picture")


def execute(script, words, monkeypatch):
    """As `python SCRIPT WORDS` in this process, or in one of its own for what is under tests/."""
    if script.startswith("tests/"):
        subprocess.run([sys.executable, script, *words], check=True)
    elif script == "reproduce.py":  # in this process, run by run: test_reproduce.py has the worker processes
        monkeypatch.setattr(reproduce, "workers", lambda processes: contextlib.nullcontext(Inline()))
        monkeypatch.setattr(reproduce, "QUICK", replace(reproduce.QUICK, steps=1, eval_tokens=256, calibration_tokens=512, most_seeds=1, rates=(1e-2,), widths=(32,)))
        monkeypatch.setattr(runs, "draw_curves", lambda run: None)
        monkeypatch.setattr(train, "sample", lambda *args: "")
        reproduce.main(words)
    else:
        monkeypatch.setattr(sys, "argv", [script, *words])
        runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.parametrize("line", [pytest.param(line, marks=[pytest.mark.slow] * (line.startswith(SLOW) or "--tasks avg9" in line)) for line in RUN])
def test_a_command_of_the_readme_runs(line, at_home, monkeypatch, capfd):
    script, words = scaled(line)
    made = made_by(script, words)
    if made and made.exists() and "--resume" not in words:
        top = Path(*made.parts[:made.parts.index("student")]) if script == "train.py" else made
        shutil.rmtree(top) if top.is_dir() else top.unlink()
        assert not made.exists()
    if "hub:" in line:
        hub = Hub()
        monkeypatch.setattr(huggingface_hub, "HfApi", hub)
        monkeypatch.setattr(huggingface_hub, "HfFileSystem", hub)
    if line.startswith("torchrun"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / script), *words]
        subprocess.run(command, check=True, timeout=500)
    elif "CACHE" in words and script.startswith("tests/"):
        CACHE.mkdir(parents=True, exist_ok=True)
        execute(script, [str(CACHE) if word == "CACHE" else word for word in words], monkeypatch)
    else:
        execute(script, words, monkeypatch)
    said = capfd.readouterr().out
    assert made.exists() if made else len(said.splitlines()) >= (1 if script.startswith("tests/") else 2), said  # those say which folders they made
    if script == "train.py" and "--plan" not in words:
        out = made.parent.parent
        assert runs.read_metrics(out)[-1]["step"] == 2 and json.loads((out / "config.json").read_text(encoding="utf-8"))["ranks"] == (2 if line.startswith("torchrun") else 1)
    if script == "eval.py":
        assert len(list(made.glob("*.json"))) >= 1 and ("Avg9" in said or "val_ce" in said)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["train.py --data my.jsonl", "merge.py runs/mine --out elsewhere", "audit.py energy runs/tiny-core/student",
                                   "data.py prepare my.jsonl --tokenizer FOLDER --out tokens/again"])
def test_a_command_runs_in_a_process_of_its_own(words, home):
    script, *words = words.split()
    if script == "train.py":
        words = set_flags(words, SMALL | {"--out": "runs/own"})
    done = subprocess.run([sys.executable, str(ROOT / script), *words], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    made = made_by(script, words)
    assert (home / made).exists() if made else "mean" in done.stdout


def test_the_list_of_commands_is_whole():
    """A fenced block with a command in its first line holds nothing else: each of its lines is among them, run or with its reason."""
    blocks = [block.strip().splitlines() for block in re.findall(r"```\n(.*?)```", README, flags=re.S)]
    lines = [line for block in blocks if re.match(r"(\.venv/bin/\S+|python3?|torchrun|pip|vllm|llama-server) ", block[0]) for line in block]
    assert len(lines) >= 36 and len(RUN) >= 30
    for line in lines:
        last = re.sub(r"\s+#.*", "", line).split("&&")[-1].strip().replace(".venv/bin/", "")
        assert last in commands(), line
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in commands())] == []  # no reason for what is not there


# ----------------------------------------------------------------------------------------- flags: what they do


def run(home, out, *more):
    train.main(["--teacher", str(home / "FOLDER"), "--data", str(home / "my.jsonl"), "--width", "12", "--lr", "1e-3", "--out", str(out),
                *(w for p in SMALL.items() for w in p), *more])
    return Path(out)


def steps_of(out):
    return [row for row in runs.read_metrics(out) if "loss" in row]


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Elsewhere, and without curves and samples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "draw_curves", lambda run: None)
    monkeypatch.setattr(train, "sample", lambda *args: "")


@pytest.fixture(scope="module")
def base(home, tmp_path_factory):
    return run(home, tmp_path_factory.mktemp("base") / "run")


def windows_of(home, out, side="train"):
    tokenizer = Tokenizer(home / "FOLDER")
    folder = next(Path(home, "tokens").glob("my-*"), None) or next(Path("tokens").glob("my-*"))
    return Tokens(folder, side, 16, tokenizer, 1234)


def test_the_size_of_a_step_and_of_the_student(home, tmp_path, bare, capsys):
    out = run(home, tmp_path / "run", "--batch-size", "3", "--seq-len", "8", "--accum", "2", "--steps", "3", "--width", "8")
    assert [row["tokens"] for row in steps_of(out)] == [48, 96, 144]
    assert "3 x 8 tokens x 2 micro-batches x 1 ranks = 48 tokens a step, 3 steps" in capsys.readouterr().out
    assert json.loads((out / "student" / "config.json").read_text(encoding="utf-8"))["hidden_size"] == 8


def test_lr_schedule_and_warmup_are_logged_as_they_were_asked(home, tmp_path, bare):
    for schedule, rates in (("cosine", [1e-3, 2e-3, 2e-3, 1e-3]), ("linear", [1e-3, 2e-3, 2e-3, 1e-3]), ("constant", [1e-3, 2e-3, 2e-3, 2e-3])):
        out = run(home, tmp_path / schedule, "--lr", "2e-3", "--schedule", schedule, "--warmup", "0.5", "--steps", "4")
        assert [row["lr"] for row in steps_of(out)] == pytest.approx(rates)
    out = run(home, tmp_path / "eight", "--lr", "2e-3", "--schedule", "cosine", "--warmup", "0", "--steps", "8")
    assert steps_of(out)[6]["lr"] == pytest.approx(1e-3 * (1 + math.cos(0.75 * math.pi)))


def test_a_clip_of_nothing_leaves_the_start_and_weight_decay_shrinks_it(home, tmp_path, bare, base):
    """Gradients clipped to 1e-30 are nothing beside AdamW's epsilon, so only the decay acts: W (1 - lr wd), on matrices, not on gains."""
    still = run(home, tmp_path / "still", "--clip", "1e-30", "--steps", "1")
    half = run(home, tmp_path / "half", "--clip", "1e-30", "--steps", "1", "--weight-decay", "500")
    evals = [[row["val_ce"] for row in runs.read_metrics(out) if "val_ce" in row] for out in (still, base)]
    assert evals[0][0] == evals[0][-1] == evals[1][0] != evals[1][-1]
    assert steps_of(still)[0]["grad_norm"] == steps_of(base)[0]["grad_norm"] > 1e-3
    one, two = (load_file(out / "student" / "model.safetensors") for out in (still, half))
    for name, w in one.items():
        assert torch.allclose(two[name], w * (0.5 if w.dim() == 2 else 1), atol=1e-6), name


def test_temperature_attention_and_hidden_by_hand_on_the_first_batch(home, tmp_path, bare):
    """A student that stays at its start (see above), so that its first batch can be run again: each figure from its definition."""
    out = run(home, tmp_path / "run", "--clip", "1e-30", "--steps", "1", "--temperature", "2", "--attention", "mse", "--hidden", "mse", "--w-align", "0.5")
    row, frame = steps_of(out)[0], load_file(next((out / "checkpoint").glob("step-*")) / "state.safetensors")["frame"]
    ids, _ = windows_of(home, out).batch(0, 2)
    with torch.no_grad():
        (z, s), (t, T) = (Transformer.from_pretrained(folder)(ids, taps=True) for folder in (out / "student", home / "FOLDER"))
    kl = F.kl_div((z / 2).double().log_softmax(-1), (t / 2).double().softmax(-1), reduction="sum").item() / ids.numel()
    assert row["kl"] == pytest.approx(1.28 * 4 * kl, rel=1e-3)
    assert row["q"] == pytest.approx(sum((a["q"] - b["q"]).pow(2).mean().item() for a, b in zip(s, T)), rel=1e-4)
    assert row["hidden"] == pytest.approx(sum((a["hidden"] - b["hidden"] @ frame).pow(2).mean().item() for a, b in zip(s, T)), rel=1e-4)
    assert row["loss"] == pytest.approx(row["kl"] + row["ce"] + 0.5 * row["align"], rel=1e-5)


def test_calibration_tokens_seed_and_dtype(home, tmp_path, bare, base, capsys):
    run(home, tmp_path / "calibrated", "--calibration-tokens", "512", "--steps", "1")
    assert "calibrating layer 2/2: 512 tokens" in capsys.readouterr().out
    other = run(home, tmp_path / "seed", "--seed", "7")
    evals = lambda out: next(row["val_ce"] for row in runs.read_metrics(out) if "val_ce" in row)
    assert evals(other) == evals(base) and steps_of(other)[0]["loss"] != steps_of(base)[0]["loss"]  # one start, another order
    capsys.readouterr()
    half = steps_of(run(home, tmp_path / "half", "--dtype", "bfloat16"))
    assert "autocast to bfloat16" in capsys.readouterr().out
    assert half[0]["ce"] != steps_of(base)[0]["ce"] and half[0]["ce"] == pytest.approx(steps_of(base)[0]["ce"], rel=0.02)


def test_how_often_is_evaluated_saved_and_told(home, tmp_path, bare, capsys, monkeypatch):
    saved, real = [], checkpoints.save_checkpoint
    monkeypatch.setattr(checkpoints, "save_checkpoint", lambda run, state, *more, **named: saved.append(state["step"]) or real(run, state, *more, **named))
    out = run(home, tmp_path / "run", "--steps", "7", "--eval-every", "3", "--save-every", "2", "--log-every", "5")
    assert [row["step"] for row in runs.read_metrics(out) if "val_ce" in row] == [0, 3, 6, 7] and saved == [2, 4, 6, 7]
    assert re.findall(r"^step +(\d+)/7  kl", capsys.readouterr().out, re.M) == ["5", "7"]


def test_held_out_tokens_and_document_masks_by_hand(home, tmp_path, bare):
    teacher, separator = Transformer.from_pretrained(home / "FOLDER"), Tokenizer(home / "FOLDER").separator
    figures = {}
    for name, flags in (("plain", []), ("masked", ["--doc-mask"])):
        out = run(home, tmp_path / name, "--steps", "1", "--eval-tokens", "128", *flags)
        figures[name] = next(row["teacher"]["val_ce"] for row in runs.read_metrics(out) if "teacher" in row)
    pairs = list(windows_of(home, out, "val").spread(8))
    assert sum(y.numel() for _, y in pairs) == 128 and any((x == separator).any() for x, _ in pairs)
    nats = dict.fromkeys(figures, 0.0)
    with torch.no_grad():
        for x, y in pairs:
            nats["plain"] += F.cross_entropy(teacher(x)[0].double(), y[0], reduction="sum").item()
            cuts = [0, *(x[0] == separator).nonzero()[:, 0].add(1).tolist(), 16]
            nats["masked"] += sum(F.cross_entropy(teacher(x[:, a:b])[0].double(), y[0, a:b], reduction="sum").item() for a, b in zip(cuts, cuts[1:]) if a < b)
    assert figures == pytest.approx({name: value / 128 for name, value in nats.items()}, rel=1e-5) and figures["plain"] != figures["masked"]


@pytest.mark.parametrize("bases", ["compact", "implicit"])
def test_other_bases_are_used_and_train_as_explicit_ones(home, tmp_path, bare, monkeypatch, bases):
    made, real = [], core.Compact.__init__
    monkeypatch.setattr(core.Compact, "__init__", lambda self, plain, W_T=None: made.append("compact" if W_T is None else "implicit") or real(self, plain, W_T))
    rows = [steps_of(run(home, tmp_path / kind, "--bases", kind, "--steps", "4")) for kind in ("explicit", bases)]
    assert made == 6 * [bases] and [row["loss"] for row in rows[0]] == pytest.approx([row["loss"] for row in rows[1]], rel=1e-4)
    run(home, tmp_path / "auto", "--steps", "1")
    assert made == 6 * [bases] and json.loads((tmp_path / "auto/config.json").read_text(encoding="utf-8"))["args"]["bases"] == "explicit"  # the run folder says what was chosen


def test_data_takes_a_mixture_and_a_resumed_run_goes_on_in_it(home, tmp_path, bare, monkeypatch):
    mixture = ["--data", f"{home}/tokens/mine=3,{home}/tokens/more=1", "--save-every", "2", "--steps", "4"]
    whole = run(home, tmp_path / "whole", *mixture)
    assert len(json.loads((whole / "config.json").read_text(encoding="utf-8"))["data"]["parts"]) == 2
    real = data.Mixture.batch

    def broken(self, position, count):
        if position >= 3 * 2:  # in the fourth step
            raise RuntimeError("power cut")
        return real(self, position, count)
    monkeypatch.setattr(data.Mixture, "batch", broken)
    with pytest.raises(RuntimeError, match="power cut"):
        run(home, tmp_path / "half", *mixture)
    monkeypatch.setattr(data.Mixture, "batch", real)
    train.main(["--resume", "--out", str(tmp_path / "half")])
    losses = [[row["loss"] for row in steps_of(tmp_path / name)] for name in ("whole", "half")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_tf32_lets_matrix_products_use_it(home, tmp_path, bare):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        run(home, tmp_path / "run", "--tf32", "--steps", "1")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_revision_is_asked_of_the_hub_and_the_run_keeps_the_commit(home, tmp_path, bare, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo, revision=None, timeout=None: asked.append((repo, revision)) or ModelInfo(id=repo, sha="c0ffee"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, revision=None, allow_patterns=None: asked.append((repo, revision)) or str(home / "FOLDER"))
    out = run(home, tmp_path / "run", "--teacher", "some/model", "--revision", "v2", "--steps", "1")
    record = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert asked == [("some/model", "v2"), ("some/model", "c0ffee")] and record["teacher"] == "some/model@c0ffee"
    newest = run(home, tmp_path / "newest", "--teacher", "some/model", "--steps", "1")
    assert asked[2] == ("some/model", None) and json.loads((newest / "config.json").read_text(encoding="utf-8"))["args"]["revision"] == "c0ffee"  # so that a resume takes the same


def test_the_papers_preset_fills_what_a_run_was_not_given(home, tmp_path, bare):
    out = run(home, tmp_path / "run", "--preset", "paper")
    args = json.loads((out / "config.json").read_text(encoding="utf-8"))["args"]
    assert (args["warmup"], args["hidden"], args["eval_every"], args["save_every"]) == (0.005, "mse", 1000, 2000) and (args["seq_len"], args["steps"]) == (16, 2)


# ------------------------------------------------------------------------------------------ of other commands


def test_a_tokenizer_is_made_of_its_source_with_its_vocabulary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("a.jsonl"), [{"id": n, "text": f"zebra crossing number {n} and "} for n in range(300)])
    data.main(["tokenizer", "--source", "a.jsonl", "--vocab", "300", "--out", "made"])
    tokenizer = Tokenizer(Path("made"))
    assert tokenizer.vocab_size == 300 and tokenizer.separator == 0
    assert len(tokenizer.encode(" crossing")) == 1 and tokenizer.decode(tokenizer.encode("zebra é")) == "zebra é"


def test_a_budget_of_tokens_takes_other_parts_with_another_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "BLOCK", 64)
    monkeypatch.setattr(sources, "PART", (64, 128))
    write_rows(Path("a.jsonl"), [{"id": n, "text": f"x{n} " * 8} for n in range(200)])
    taken = []
    for seed in ("1", "2", "1"):
        data.main(["prepare", "a.jsonl", "--tokens", "300", "--seed", seed, "--workers", "1", "--out", f"out{len(taken)}"])
        taken.append([i for file in sorted(Path(f"out{len(taken)}").glob("train-*")) for i in load_file(file)["tokens"].tolist()])
    assert taken[0] == taken[2] != taken[1] and all(200 < len(ids) <= 300 for ids in taken)


def test_rank_reads_as_much_text_in_as_long_windows_as_asked(at_home, monkeypatch, capsys):
    seen, real = [], audit.effective_ranks
    monkeypatch.setattr(audit, "effective_ranks", lambda net, batches: seen.append([x.shape for x, _ in batches]) or [(1.0, 1.0)] * 2)
    for length, tokens in ((8, 64), (16, 32)):
        audit.main(["rank", "STUDENT", "--teacher", "TEACHER", "--text", "my.jsonl", "--seq-len", str(length), "--tokens", str(tokens)])
        assert {shape[1] for shape in seen[-1]} == {length} and sum(shape[0] * shape[1] for shape in seen[-1]) == tokens
    monkeypatch.setattr(audit, "effective_ranks", real)
    audit.main(["rank", "STUDENT", "--teacher", "TEACHER", "--text", "my.jsonl", "--seq-len", "8", "--tokens", "64"])
    cells = [[float(cell) for cell in line.split()[1:]] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert all(1 < row[0] <= 24 and 1 < row[2] <= 12 for row in cells)  # at most the width


def test_remove_takes_the_matrices_it_is_told(at_home, tmp_path, capsys):
    text = ["--teacher", "TEACHER", "--text", "my.jsonl", "--seq-len", "16", "--tokens", "64"]
    audit.main(["remove", "STUDENT", *text, "--matrices", "gate,down", "--out", str(tmp_path / "cut")])
    assert "gate+down, layers all" in capsys.readouterr().out
    shares = audit.energy("TEACHER", str(tmp_path / "cut"))
    assert max(shares["gate"] + shares["down"]) < 1e-10 < 1e-9 < min(shares["up"]) and shares["up"] == pytest.approx(audit.energy("TEACHER", "STUDENT")["up"])
    windows = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "evaluate", lambda net, teacher, batches, real_vocab: windows.append([x.shape for x, _ in batches]) or dict(val_ce=1.0, val_kl=1.0, val_top1=1.0))
        audit.main(["remove", "STUDENT", *text[:-4], "--seq-len", "8", "--tokens", "32"])
    assert {shape[1] for shape in windows[0]} == {8} and sum(shape[0] for shape in windows[0]) == 4


def test_neurons_masks_as_many_as_asked_in_as_many_draws(at_home, capsys):
    audit.main(["neurons", "STUDENT", "--teacher", "TEACHER", "--cloze", "tests/capitals.jsonl", "--k", "7", "--draws", "3"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert "top 7" in head and "least active 7" in head and "random 7, 3 draws" in head and [row.split()[0] for row in rows] == ["teacher", "student"]
    questions = len((ROOT / "tests" / "capitals.jsonl").read_text(encoding="utf-8").splitlines())
    assert all(0 <= float(row.split()[1]) * questions == pytest.approx(round(float(row.split()[1]) * questions), abs=0.1) for row in rows)


def test_eval_runs_in_the_batches_and_the_precision_it_is_told(at_home, tmp_path, monkeypatch):
    sizes, halves, real = [], set(), Transformer.forward

    def watched(self, ids, *more, **named):
        sizes.append(ids.numel())
        halves.add(torch.is_autocast_enabled("cpu"))
        return real(self, ids, *more, **named)
    monkeypatch.setattr(Transformer, "forward", watched)
    reports = {}
    for name, flags in (("small", ["--batch-tokens", "40"]), ("large", ["--batch-tokens", "4000"]), ("half", ["--dtype", "bfloat16"])):
        sizes.clear(), halves.clear()
        evals.main(["FOLDER", "--tasks", "piqa,sciq", "--local", "TASKS", "--offline", "--out", str(tmp_path / name), *flags])
        assert halves == {name == "half"}
        (file,) = (tmp_path / name).glob("*.json")
        reports[name] = json.loads(file.read_text(encoding="utf-8"))
        assert ("bfloat16" in file.name) == (name == "half") == (reports[name]["dtype"] == "bfloat16")
        assert name != "small" or max(sizes) <= 40
        assert name != "large" or len(sizes) == 2  # a task, a batch
    assert (reports["small"]["batch_tokens"], reports["large"]["batch_tokens"]) == (40, 4000)
    assert reports["small"]["tasks"]["piqa"]["all"] == reports["large"]["tasks"]["piqa"]["all"]
    halves.clear()
    evals.main(["FOLDER", "--text", "my.jsonl", "--seq-len", "16", "--tokens", "64", "--dtype", "bfloat16", "--out", str(tmp_path / "text")])
    assert halves == {True}


def test_reproduce_writes_where_it_is_told_with_as_many_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    @contextlib.contextmanager
    def workers(processes):
        asked.append(processes)
        yield Inline()
    row = lambda run, flags, folder: run._asdict() | dict(
        flags=flags, start_ce=5.0, val_ce=3.0 + run.seed, val_kl=1.0, val_top1=0.5, teacher_ce=2.0, tokens=1024, seconds=1.0,
        energy={"gate": [0.1], "up": [0.1], "down": [0.1]})
    monkeypatch.setattr(reproduce, "workers", workers)
    monkeypatch.setattr(reproduce, "work", row)
    reproduce.main(["basis", "--quick", "--processes", "3", "--out", "there"])
    assert asked == [3] and "## basis" in Path("there/tables.md").read_text(encoding="utf-8") and not Path("runs/quick").exists()
    rows = [json.loads(line) for line in Path("there/runs.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = {word for row in rows for name, word in zip(row["flags"], row["flags"][1:]) if name == "--steps"}
    assert steps == {"8"}  # those of --quick


# ------------------------------------------------------------------ what a user is told, and no other test asks for


def refused(match, call, *args, **kwargs):
    with pytest.raises(Refusal) as caught:
        call(*args, **kwargs)
    assert match in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_a_teacher_of_huge_weights_and_a_held_out_text_without_targets_are_refused(home, tmp_path, bare):
    net, blank = random_net(vocab_size=2048), torch.full((1, 4), distill.IGNORE)
    refused("hold no target for the loss", distill.evaluate, net, None, [(torch.zeros(1, 4, dtype=torch.long), blank)])
    with torch.no_grad():
        net.layers[1].mlp.down_proj.weight.mul_(1e38)
    net.save_pretrained(make_model(tmp_path / "huge"))
    refused("not finite", run, home, tmp_path / "run", "--teacher", str(tmp_path / "huge"))


def test_flags_that_cannot_go_together_say_so(home, tmp_path, bare):
    refused("--stage sft needs --init", train.parse, ["--stage", "sft"])
    refused("give --teacher-dtype float32, or --bases compact", run, home, tmp_path / "run", "--bases", "implicit", "--dtype", "bfloat16")
    refused("--processes 0 is out of range", reproduce.main, ["basis", "--processes", "0"])
    assert not (tmp_path / "run").exists()


def test_another_teacher_under_the_same_name_is_not_resumed_with(home, tmp_path, bare):
    """Same folder, same shape, other weights: the spans that the checkpoint's coordinates belong to are gone."""
    teacher = shutil.copytree(home / "FOLDER", tmp_path / "teacher")
    out = run(home, tmp_path / "run", "--teacher", str(teacher))
    random_net(5, vocab_size=2048).save_pretrained(teacher)
    refused("the run began with teacher weights", train.main, ["--resume", "--out", str(out)])
    record = json.loads((out / "config.json").read_text(encoding="utf-8"))
    del record["teacher_weights"]  # a run from before that was recorded
    (out / "config.json").write_text(json.dumps(record), encoding="utf-8")
    refused("comes out differently", train.main, ["--resume", "--out", str(out)])


def test_a_torn_line_inside_the_metrics_is_named_and_one_at_the_end_forgiven(base, tmp_path):
    out = shutil.copytree(base, tmp_path / "run")
    rows, text = runs.read_metrics(out), (out / "metrics.jsonl").read_text(encoding="utf-8")
    (out / "metrics.jsonl").write_text(text + '{"step": 3, "lo', encoding="utf-8")
    assert runs.read_metrics(out) == rows
    (out / "metrics.jsonl").write_text('{"step"\n' + text, encoding="utf-8")
    refused("metrics.jsonl, line 1", runs.read_metrics, out)


def test_a_run_outside_of_git_and_without_git_still_begins(monkeypatch):
    def none(*args, **kwargs):
        raise FileNotFoundError("git")
    monkeypatch.setattr(runs.subprocess, "run", none)
    assert runs.surroundings()["git_commit"] is None and runs.surroundings()["torch"] == torch.__version__


def test_a_hub_that_breaks_off_names_the_file_and_what_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Broken(Hub):
        def open(self, path, mode):
            raise ConnectionError("reset by peer")
    monkeypatch.setattr(huggingface_hub, "HfApi", Broken())
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Broken())
    with pytest.raises(OSError, match="fineweb-edu@commit/data/a.parquet: reading stopped .ConnectionError.*goes on from there"):
        data.main(["prepare", "hub:HuggingFaceFW/fineweb-edu:data", "--out", "out"])


def test_eval_refuses_two_tokenizers_and_a_task_without_its_metric(at_home, tmp_path, capsys):
    other = shutil.copytree(at_home / "FOLDER", tmp_path / "other")
    spec = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    spec["added_tokens"].append(dict(spec["added_tokens"][0], id=2048, content="<more>"))
    (other / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    refused("different tokenizers", evals.main, ["FOLDER", "--text", "my.jsonl", "--teacher", str(other)])
    tasks = shutil.copytree("TASKS", tmp_path / "tasks")
    file = tasks / "local_piqa.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("  - {metric: acc, aggregation: mean, higher_is_better: true}\n", ""), encoding="utf-8")
    refused("without piqa", evals.main, ["FOLDER", "--tasks", "piqa", "--local", str(tasks), "--offline", "--out", str(tmp_path / "out")])
    assert "piqa: no acc among" in capsys.readouterr().out


def test_runs_that_stop_by_themselves_are_counted_at_the_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = dict(start_ce=5.0, val_kl=1.0, val_top1=0.5, teacher_ce=2.0, tokens=1024, seconds=1.0, energy={"gate": [0.1], "up": [0.1], "down": [0.1]})
    monkeypatch.setattr(reproduce, "workers", lambda processes: contextlib.nullcontext(Inline()))

    def work(run, flags, folder):
        stopped = (run.arm, run.seed) == ("random", 2)
        return run._asdict() | dict(flags=flags) | (dict(error="Refusal: loss not finite") if stopped else good | dict(val_ce=3.0))
    monkeypatch.setattr(reproduce, "work", work)
    refused("1 runs stopped by themselves and are missing in the tables, first random, seed 2: Refusal: loss not finite", reproduce.main, ["basis", "--quick"])
    assert "| random | 32 |" in Path("runs/quick/tables.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------- flags: that none is without a test

EXERCISED = {  # command, flag -> the test that runs it so and sees the effect
    "bench.py --list": "test_bench.py::test_bad_rows_are_refused_by_name_and_all_are_listed",
    "bench.py --markdown": "test_bench.py::test_bytes_of_bases_are_those_of_the_whole_model",
    "bench.py --model": "test_bench.py::test_both_backends_answer_alike",
    "bench.py --local": "test_bench.py::test_both_backends_answer_alike",
    "train.py --stage": "test_train.py::test_pretraining_uses_the_shape_of_the_folder_and_no_teacher",
    "train.py --teacher": "test_train.py::test_a_run_leaves_what_the_readme_promises",
    "train.py --preset": "test_commands.py::test_the_papers_preset_fills_what_a_run_was_not_given",
    "train.py --revision": "test_commands.py::test_a_revision_is_asked_of_the_hub_and_the_run_keeps_the_commit",
    "train.py --mode": "test_train.py::test_every_arm_recipe_and_start_runs_to_a_student_of_the_plain_shape",
    "train.py --recipe": "test_train.py::test_every_arm_recipe_and_start_runs_to_a_student_of_the_plain_shape",
    "train.py --without": "test_train.py::test_B20_without_takes_exactly_its_term_out_of_the_log_and_the_total",
    "train.py --init": "test_train.py::test_every_arm_recipe_and_start_runs_to_a_student_of_the_plain_shape",
    "train.py --coordinates": "test_train.py::test_every_arm_recipe_and_start_runs_to_a_student_of_the_plain_shape",
    "train.py --bases": "test_commands.py::test_other_bases_are_used_and_train_as_explicit_ones",
    "train.py --width": "test_commands.py::test_the_size_of_a_step_and_of_the_student",
    "train.py --data": "test_commands.py::test_data_takes_a_mixture_and_a_resumed_run_goes_on_in_it",
    "train.py --doc-mask": "test_commands.py::test_held_out_tokens_and_document_masks_by_hand",
    "train.py --steps": "test_commands.py::test_the_size_of_a_step_and_of_the_student",
    "train.py --batch-size": "test_commands.py::test_the_size_of_a_step_and_of_the_student",
    "train.py --seq-len": "test_commands.py::test_the_size_of_a_step_and_of_the_student",
    "train.py --accum": "test_commands.py::test_the_size_of_a_step_and_of_the_student",
    "train.py --lr": "test_commands.py::test_lr_schedule_and_warmup_are_logged_as_they_were_asked",
    "train.py --schedule": "test_commands.py::test_lr_schedule_and_warmup_are_logged_as_they_were_asked",
    "train.py --warmup": "test_commands.py::test_lr_schedule_and_warmup_are_logged_as_they_were_asked",
    "train.py --weight-decay": "test_commands.py::test_a_clip_of_nothing_leaves_the_start_and_weight_decay_shrinks_it",
    "train.py --clip": "test_commands.py::test_a_clip_of_nothing_leaves_the_start_and_weight_decay_shrinks_it",
    "train.py --temperature": "test_commands.py::test_temperature_attention_and_hidden_by_hand_on_the_first_batch",
    "train.py --w-kl": "test_train.py::test_B20_without_takes_exactly_its_term_out_of_the_log_and_the_total",
    "train.py --w-ce": "test_train.py::test_B20_without_takes_exactly_its_term_out_of_the_log_and_the_total",
    "train.py --w-align": "test_commands.py::test_temperature_attention_and_hidden_by_hand_on_the_first_batch",
    "train.py --attention": "test_commands.py::test_temperature_attention_and_hidden_by_hand_on_the_first_batch",
    "train.py --hidden": "test_commands.py::test_temperature_attention_and_hidden_by_hand_on_the_first_batch",
    "train.py --calibration-tokens": "test_commands.py::test_calibration_tokens_seed_and_dtype",
    "train.py --seed": "test_commands.py::test_calibration_tokens_seed_and_dtype",
    "train.py --out": "test_train.py::test_a_run_leaves_what_the_readme_promises",
    "train.py --resume": "test_commands.py::test_data_takes_a_mixture_and_a_resumed_run_goes_on_in_it",
    "train.py --compile": "test_pitfalls.py::test_B33_twenty_steps_over_several_epochs_compile_the_student_and_the_teacher_once",
    "train.py --dtype": "test_commands.py::test_calibration_tokens_seed_and_dtype",
    "train.py --checkpointing": "test_train.py::test_checkpointing_changes_no_bit",
    "train.py --teacher-dtype": "test_train.py::test_a_bf16_teacher_guides_an_fp32_student",
    "train.py --shard": "test_train.py::test_sharing_changes_no_bit_and_checkpoints_are_whole",
    "train.py --tf32": "test_commands.py::test_tf32_lets_matrix_products_use_it",
    "train.py --eval-every": "test_commands.py::test_how_often_is_evaluated_saved_and_told",
    "train.py --eval-tokens": "test_commands.py::test_held_out_tokens_and_document_masks_by_hand",
    "train.py --save-every": "test_commands.py::test_how_often_is_evaluated_saved_and_told",
    "train.py --log-every": "test_commands.py::test_how_often_is_evaluated_saved_and_told",
    "train.py --keep": "test_killed.py::test_the_newest_checkpoints_are_kept",
    "train.py --non-finite": "test_watch.py::test_a_skipped_step_leaves_every_bit_and_is_logged",
    "train.py --check-ranks": "test_watch.py::test_ranks_that_differ_stop_by_name",
    "train.py --plan": "test_plan.py::test_published_figures",
    "train.py --gpus": "test_plan.py::test_gpu_hours_by_hand",
    "train.py --mfu": "test_plan.py::test_gpu_hours_by_hand",
    "train.py --gpu-memory": "test_plan.py::test_the_verdict_follows_the_sum_and_says_what_would_make_it_fit",
    "data.py prepare --tokenizer": "test_prepare.py::test_what_a_killed_process_finished_is_not_done_again",
    "data.py prepare --out": "test_prepare.py::test_the_command_prepares_and_says_what_it_made",
    "data.py prepare --chats": "test_commands.py::home",
    "data.py prepare --column": "test_prepare.py::test_the_command_prepares_and_says_what_it_made",
    "data.py prepare --min-score": "test_prepare.py::test_the_command_prepares_and_says_what_it_made",
    "data.py prepare --tokens": "test_commands.py::test_a_budget_of_tokens_takes_other_parts_with_another_seed",
    "data.py prepare --seed": "test_commands.py::test_a_budget_of_tokens_takes_other_parts_with_another_seed",
    "data.py prepare --skip-bad": "test_prepare.py::test_the_command_prepares_and_says_what_it_made",
    "data.py prepare --workers": "test_prepare.py::test_a_killed_process_hangs_nobody",
    "data.py tokenizer --source": "test_commands.py::test_a_tokenizer_is_made_of_its_source_with_its_vocabulary",
    "data.py tokenizer --vocab": "test_commands.py::test_a_tokenizer_is_made_of_its_source_with_its_vocabulary",
    "data.py tokenizer --out": "test_commands.py::test_a_tokenizer_is_made_of_its_source_with_its_vocabulary",
    "merge.py --out": "test_merge.py::test_gguf_command_writes_beside_the_student_in_a_folder_or_where_it_is_told",
    "merge.py --gguf": "test_merge.py::test_gguf_command_writes_beside_the_student_in_a_folder_or_where_it_is_told",
    "merge.py --dtype": "test_merge.py::test_gguf_command_writes_beside_the_student_in_a_folder_or_where_it_is_told",
    "audit.py reach --teacher": "test_audit.py::test_reach_of_the_published_teachers",
    "audit.py reach --width": "test_audit.py::test_reach_of_the_published_teachers",
    "audit.py energy --teacher": "test_audit.py::test_energy_reads_a_sharded_bf16_folder_and_prints_a_table",
    "audit.py energy --picture": "test_audit.py::test_energy_reads_a_sharded_bf16_folder_and_prints_a_table",
    "audit.py remove --teacher": "test_audit.py::test_the_remove_command_scores_and_writes_a_folder",
    "audit.py remove --text": "test_audit.py::test_the_remove_command_scores_and_writes_a_folder",
    "audit.py remove --seq-len": "test_commands.py::test_remove_takes_the_matrices_it_is_told",
    "audit.py remove --tokens": "test_commands.py::test_remove_takes_the_matrices_it_is_told",
    "audit.py remove --layers": "test_audit.py::test_the_remove_command_scores_and_writes_a_folder",
    "audit.py remove --matrices": "test_commands.py::test_remove_takes_the_matrices_it_is_told",
    "audit.py remove --scale": "test_audit.py::test_the_remove_command_scores_and_writes_a_folder",
    "audit.py remove --out": "test_audit.py::test_the_remove_command_scores_and_writes_a_folder",
    "audit.py rank --teacher": "test_commands.py::test_rank_reads_as_much_text_in_as_long_windows_as_asked",
    "audit.py rank --text": "test_commands.py::test_rank_reads_as_much_text_in_as_long_windows_as_asked",
    "audit.py rank --seq-len": "test_commands.py::test_rank_reads_as_much_text_in_as_long_windows_as_asked",
    "audit.py rank --tokens": "test_commands.py::test_rank_reads_as_much_text_in_as_long_windows_as_asked",
    "audit.py spectrum --teacher": "test_audit.py::test_spectrum_and_rank_commands",
    "audit.py spectrum --layer": "test_audit.py::test_spectrum_and_rank_commands",
    "audit.py spectrum --picture": "test_audit.py::test_spectrum_and_rank_commands",
    "audit.py neurons --teacher": "test_commands.py::test_neurons_masks_as_many_as_asked_in_as_many_draws",
    "audit.py neurons --cloze": "test_commands.py::test_neurons_masks_as_many_as_asked_in_as_many_draws",
    "audit.py neurons --k": "test_commands.py::test_neurons_masks_as_many_as_asked_in_as_many_draws",
    "audit.py neurons --draws": "test_commands.py::test_neurons_masks_as_many_as_asked_in_as_many_draws",
    "eval.py --tasks": "test_eval.py::test_A12_B44_a_task_that_fails_is_named_and_the_others_finish",
    "eval.py --local": "test_eval.py::test_A12_B44_a_task_that_fails_is_named_and_the_others_finish",
    "eval.py --limit": "test_eval.py::test_A12_B44_a_task_that_fails_is_named_and_the_others_finish",
    "eval.py --text": "test_eval.py::test_text_figures_against_plain_forward_passes",
    "eval.py --teacher": "test_eval.py::test_text_figures_against_plain_forward_passes",
    "eval.py --whole": "test_eval.py::test_text_figures_against_plain_forward_passes",
    "eval.py --seq-len": "test_eval.py::test_text_figures_against_plain_forward_passes",
    "eval.py --tokens": "test_eval.py::test_text_figures_against_plain_forward_passes",
    "eval.py --batch-tokens": "test_commands.py::test_eval_runs_in_the_batches_and_the_precision_it_is_told",
    "eval.py --dtype": "test_commands.py::test_eval_runs_in_the_batches_and_the_precision_it_is_told",
    "eval.py --offline": "test_eval.py::test_B45_offline_fails_at_once_where_nothing_is_local",
    "eval.py --out": "test_eval.py::test_text_figures_against_plain_forward_passes",
    "reproduce.py --processes": "test_commands.py::test_reproduce_writes_where_it_is_told_with_as_many_processes",
    "reproduce.py --quick": "test_commands.py::test_reproduce_writes_where_it_is_told_with_as_many_processes",
    "reproduce.py --out": "test_commands.py::test_reproduce_writes_where_it_is_told_with_as_many_processes",
    "tests/engines.py --engine": "test_commands.py::test_engines_compares_the_engine_it_is_told_in_the_python_it_is_told",
    "tests/engines.py --python": "test_commands.py::test_engines_compares_the_engine_it_is_told_in_the_python_it_is_told",
    "tests/engines.py --count": "test_commands.py::test_engines_compares_the_engine_it_is_told_in_the_python_it_is_told",
}


@pytest.mark.slow
def test_engines_compares_the_engine_it_is_told_in_the_python_it_is_told(home, tmp_path):
    engines = lambda *words: subprocess.run([sys.executable, str(ROOT / "tests" / "engines.py"), str(ROOT / "tiny"), *words], capture_output=True, text=True, cwd=tmp_path)
    fine = engines("--engine", "transformers", "--count", "2")
    assert fine.returncode == 0 and "14 greedy tokens in all" in fine.stdout and re.search(r"^transformers +\d.*same tokens 7/7", fine.stdout, re.M), fine.stdout + fine.stderr
    (tmp_path / "python").write_text("#!/bin/sh\necho 'ImportError: none here' >&2\nexit 1\n", encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    other = engines("--engine", "vllm", "transformers", "--python", str(tmp_path / "python"), "--count", "1")
    assert other.returncode == 1 and re.findall(r"^(\S+) +cannot: ImportError: none here", other.stdout, re.M) == ["vllm", "transformers"]


def flags_of(parser, command):
    """"data.py prepare --out" for each flag of a command and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from flags_of(sub, f"{command} {name}")
        yield from (f"{command} {option}" for option in action.option_strings if option.startswith("--") and option != "--help")


def parser_of(script):
    """The parser that a script makes for its command line, caught as it is about to read it; None where it has none."""
    class Caught(Exception):
        pass

    def caught(self, *args, **kwargs):
        raise Caught(self)
    usual = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", caught)
        patch.setattr(sys, "argv", [str(script)])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Caught as found:
            return found.args[0]
        except SystemExit:
            return None
        finally:
            signal.signal(signal.SIGTERM, usual)


def test_every_flag_of_every_command_is_exercised_by_a_test():
    files = [path for folder in (ROOT, ROOT / "tests") for path in sorted(folder.glob("*.py")) if not path.name.startswith("test_")]
    scripts = [path for path in files if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")]
    parsers = {path.relative_to(ROOT).as_posix(): parser_of(path) for path in scripts}
    assert {name for name, parser in parsers.items() if parser} >= {"train.py", "data.py", "merge.py", "audit.py", "eval.py", "reproduce.py", "tests/engines.py"}
    flags = [flag for name, parser in parsers.items() if parser for flag in flags_of(parser, name)]
    assert [flag for flag in flags if flag not in EXERCISED] == [], "a flag without a test: give it one, and a line in EXERCISED"
    assert [flag for flag in EXERCISED if flag not in flags] == [], "a flag that is gone"


@functools.cache
def parts_of(file):
    """name at the top of a test file -> (the names that it uses, the flags that it writes)."""
    text, parts = (ROOT / "tests" / file).read_text(encoding="utf-8"), {}
    lines = text.splitlines()
    for node in ast.parse(text).body:
        begin = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        flags = set(re.findall(r"--[a-z][a-z0-9-]*", "\n".join(lines[begin - 1:node.end_lineno])))
        for name in [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]:
            parts[name] = used, flags
    return parts


@pytest.mark.parametrize("flag", EXERCISED)
def test_the_test_of_a_flag_is_there_and_names_it(flag):
    """In its own source, or in that of what it calls or takes in the same file."""
    file, _, name = EXERCISED[flag].partition("::")
    parts, seen, todo, words = parts_of(file), {"EXERCISED"}, [name], set()
    assert name in parts, f"{EXERCISED[flag]} is not there"
    while todo:
        key = todo.pop()
        if key in parts and key not in seen:
            used, flags = parts[key]
            seen.add(key)
            todo += used
            words |= flags
    assert flag.split()[-1] in words
