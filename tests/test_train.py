"""The loop: runs, resume, ranks, schedules, and what it refuses before the first step."""
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import random_net
from safetensors.torch import load_file

import runs
import train
from data import Tokens
from teachers import Refusal

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--width", "12", "--batch-size", "2", "--seq-len", "16", "--steps", "6", "--lr", "1e-3", "--calibration-tokens", "512",
         "--eval-every", "3", "--save-every", "3", "--eval-tokens", "128"]


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """A random 2-layer Llama with tiny's tokenizer, and a text for it."""
    folder = tmp_path_factory.mktemp("teacher")
    random_net(vocab_size=2048).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ROOT / "tiny" / name, folder / name)
    (folder / "text.jsonl").write_text("".join(json.dumps({"id": f"d{i}", "text": f"def f{i}(x):\n    return x * {i} + {i * i}\n" * 4}) + "\n" for i in range(200)))
    return folder


def command(folder, out, *more):
    return ["--teacher", str(folder), "--data", str(folder / "text.jsonl"), "--out", str(out), *SMALL, *more]


def run(folder, out, *more):
    train.main(command(folder, out, *more))
    return Path(out)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_leaves_what_the_readme_promises(teacher_folder, tmp_path, capsys):
    out = run(teacher_folder, tmp_path / "run")
    assert {p.name for p in out.iterdir()} == {"config.json", "metrics.jsonl", "curves.png", "checkpoint", "student", "tokenizer", ".lock"}
    rows = runs.read_metrics(out)
    steps, evals = [r for r in rows if "loss" in r], [r for r in rows if "val_ce" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6] and [r["step"] for r in evals] == [0, 3, 6]
    for row in steps:
        assert {"step", "tokens", "loss", "kl", "ce", "align", "lr", "tokens_per_second"} <= row.keys()
        assert row["tokens"] == row["step"] * 32
        assert row["loss"] == pytest.approx(row["kl"] + row["ce"] + 0.2 * row["align"], rel=1e-5)
    assert all({"val_ce", "val_kl", "val_top1"} <= row.keys() for row in evals)
    screen = capsys.readouterr().out
    for word in ("teacher", "student, step 0", "student, step 6", "deployed", "trained", "tok/s", "left"):
        assert word in screen


@pytest.mark.parametrize("mode", ["lrc", "dense", "core"])
def test_resume_is_exact(teacher_folder, tmp_path, mode, monkeypatch):
    """6 steps straight = 3, a crash, and a resume: every logged figure and the student, bit for bit; 2 epochs go by on the way."""
    more = ["--mode", mode, "--accum", "2"]
    straight = run(teacher_folder, tmp_path / "straight", *more)
    real = Tokens.batch

    def crash(self, position, count):
        if position >= 4 * 2 * 2:
            raise KeyboardInterrupt
        return real(self, position, count)
    monkeypatch.setattr(Tokens, "batch", crash)
    with pytest.raises(KeyboardInterrupt):
        run(teacher_folder, tmp_path / "broken", *more)
    monkeypatch.setattr(Tokens, "batch", real)
    train.main(["--resume", "--out", str(tmp_path / "broken")])
    timeless = lambda out: [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in runs.read_metrics(out)]
    assert timeless(tmp_path / "broken") == timeless(straight)
    one, two = (load_file(tmp_path / name / "student" / "model.safetensors") for name in ("straight", "broken"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_finished_run_resumed_says_so_and_changes_nothing(teacher_folder, tmp_path):
    out = run(teacher_folder, tmp_path / "run")
    before = (out / "metrics.jsonl").read_text(), (out / "student" / "model.safetensors").read_bytes()
    train.main(["--resume", "--out", str(out)])
    assert ((out / "metrics.jsonl").read_text(), (out / "student" / "model.safetensors").read_bytes()) == before


def figures(row):
    return {k: v for k, v in row.items() if k not in ("tokens_per_second", "val_top1", "grad_norm", "teacher")}


RANKS = """
import sys, os
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
import train, lrc, data
from distill import IGNORE
real = data.Tokens.batch
def uneven(self, position, count):
    ids, targets = real(self, position, count)
    targets = targets.clone()
    for row in range(count):  # how many targets a sequence keeps depends on the sequence alone
        targets[row, : int(ids[row].sum()) % ids.shape[1]] = IGNORE
    return ids, targets
data.Tokens.batch = uneven
pull, seen = lrc.Clone.pull_back, []
def watched(self):
    pull(self)
    seen.append({{name: p.detach().clone() for name, p in self.coordinates().items()}})
    torch.save(seen, {out!r} + ".rank" + os.environ.get("RANK", "0"))
lrc.Clone.pull_back = watched
train.main({argv!r})
"""


def launch(tmp_path, name, argv, ranks):
    """Run train.main in `ranks` processes with uneven valid tokens; returns the student's weights and each rank's coordinates a step."""
    out = tmp_path / name
    script = tmp_path / f"{name}.py"
    script.write_text(RANKS.format(root=str(ROOT), out=str(out), argv=[*argv, "--out", str(out)]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else [sys.executable]
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, load_file(out / "student" / "model.safetensors"), [torch.load(f"{out}.rank{r}", weights_only=True) for r in range(ranks)], done.stdout


def test_A10_two_ranks_with_accumulation_2_equal_one_with_4(teacher_folder, tmp_path):
    """Uneven valid tokens, 5 steps; and on both ranks the coordinates are the same bits at every step."""
    base = command(teacher_folder, "x", "--steps", "5", "--mode", "core", "--lr", "1e-3")
    base = base[:base.index("--out")] + base[base.index("--out") + 2:]
    out1, one, _, _ = launch(tmp_path, "one", [*base, "--accum", "4"], 1)
    out2, two, ranks, screen = launch(tmp_path, "two", [*base, "--accum", "2"], 2)
    for key in one:
        assert (one[key] - two[key]).abs().max() < 2e-5 * one[key].abs().max(), key
    for a, b in zip(*(runs.read_metrics(out) for out in (out1, out2))):
        assert figures(a) == pytest.approx(figures(b), rel=1e-4)
    assert len(ranks[0]) == 5
    assert all(torch.equal(a[name], b[name]) for a, b in zip(*ranks) for name in a)
    assert screen.count("step      5/5  kl") == 1  # B36: one rank speaks


@pytest.mark.slow
@pytest.mark.parametrize("weights", [("--w-kl", "0"), ("--w-ce", "0"), ("--w-align", "0"), ("--attention", "mse")])
def test_B31_every_loss_switch_runs_on_two_ranks(teacher_folder, tmp_path, weights):
    base = command(teacher_folder, "x", "--steps", "3", *weights)
    base = base[:base.index("--out")] + base[base.index("--out") + 2:]
    out, _, _, _ = launch(tmp_path, "run", base, 2)
    last = runs.read_metrics(out)[-2]
    if weights[1] == "0":
        assert weights[0][4:] not in last


@pytest.mark.slow
def test_B32_compiled_equals_eager_without_graph_breaks(teacher_folder, tmp_path):
    import torch._dynamo.utils as counters
    eager = runs.read_metrics(run(teacher_folder, tmp_path / "eager"))
    counters.counters.clear()
    compiled = runs.read_metrics(run(teacher_folder, tmp_path / "compiled", "--compile"))
    for a, b in zip(eager, compiled):
        assert figures(a) == pytest.approx(figures(b), rel=1e-5)
    assert not counters.counters["graph_break"]
    assert counters.counters["stats"]["unique_graphs"] <= 2  # B33: the student and the teacher, once each
    keys = load_file(next((tmp_path / "compiled" / "checkpoint").glob("step-*")) / "student.safetensors").keys()
    assert not any("_orig_mod" in key for key in keys)  # A11


def test_learning_rate_follows_its_closed_form():
    args = train.Args(lr=1.0, steps=100, warmup=0.1, schedule="linear")
    rates = [train.learning_rate(args, step) for step in range(100)]
    assert rates[:11] == pytest.approx([0.1 * k for k in range(1, 11)] + [1.0])
    assert rates[55] == pytest.approx(0.5) and rates[99] == pytest.approx(1 / 90)
    args.schedule = "cosine"
    assert train.learning_rate(args, 55) == pytest.approx(0.5) and train.learning_rate(args, 99) == pytest.approx(0.5 * (1 - torch.cos(torch.tensor(torch.pi / 90)).item()), abs=1e-6)


def test_pretraining_uses_the_shape_of_the_folder_and_no_teacher(teacher_folder, tmp_path):
    out = run(teacher_folder, tmp_path / "run", "--stage", "pretrain")
    last = [r for r in runs.read_metrics(out) if "loss" in r][-1]
    assert last["loss"] == last["ce"] and "kl" not in last
    assert json.loads((out / "student" / "config.json").read_text())["hidden_size"] == 24


def test_sft_tunes_a_model_on_the_assistants_words_alone(teacher_folder, tmp_path):
    """From a distilled student, as the README has it; the loss falls on 'ok' and the end of its turn, which are soon learnt."""
    student = run(teacher_folder, tmp_path / "run") / "student"
    (student / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"say {i} {i * i}"}, {"role": "assistant", "content": "ok"}]}) + "\n" for i in range(300)))
    before = load_file(student / "model.safetensors")
    train.main(["--stage", "sft", "--teacher", str(student), "--data", str(chats), "--out", str(tmp_path / "sft"), *SMALL[2:], "--lr", "3e-2", "--steps", "60", "--schedule", "constant"])
    rows = [r for r in runs.read_metrics(tmp_path / "sft") if "loss" in r]
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"] and "kl" not in rows[0]
    after = load_file(tmp_path / "sft" / "student" / "model.safetensors")
    assert before.keys() == after.keys() and all(before[k].shape == after[k].shape and not torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("more, word", [
    (["--width", "13"], "12 and 16"), (["--width", "99"], "24"), (["--seq-len", "500"], "128 positions"), (["--steps", "0"], "--steps"),
    (["--data", "nowhere"], "nowhere"), (["--data", ""], "--data"), (["--teacher", "no-such"], "no-such"), (["--lr", "nan"], "--lr")])
def test_bad_input_stops_before_the_first_step(teacher_folder, tmp_path, more, word):
    with pytest.raises(Refusal) as refused:
        train.main(command(teacher_folder, tmp_path / "run", *more))
    assert word in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_in_use_or_contradicted_is_refused(teacher_folder, tmp_path):
    out = run(teacher_folder, tmp_path / "run")
    with pytest.raises(Refusal, match="--resume"):
        run(teacher_folder, out)
    with pytest.raises(Refusal, match="--mode lrc contradicts"):
        train.main(["--resume", "--out", str(out), "--mode", "lrc"])
    with pytest.raises(Refusal, match="no such file"):
        train.main(["--resume", "--out", str(tmp_path / "nowhere")])


def test_a_damaged_checkpoint_is_refused_by_name(teacher_folder, tmp_path):
    from safetensors.torch import save_file
    out = run(teacher_folder, tmp_path / "run")
    file = next((out / "checkpoint").glob("step-*")) / "state.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if k != "coordinates/norm.weight"}, file)
    with pytest.raises(Refusal, match="coordinates/norm.weight is missing"):
        train.main(["--resume", "--out", str(out)])


def test_a_non_finite_step_stops_by_name_and_keeps_the_checkpoint(teacher_folder, tmp_path, monkeypatch):
    real, calls = train.losses, []

    def poisoned(*args):
        calls.append(1)
        sums = real(*args)
        return sums | {"loss": sums["loss"] * float("nan")} if len(calls) == 4 else sums
    monkeypatch.setattr(train, "losses", poisoned)
    with pytest.raises(Refusal, match="step 4: .*not finite"):
        run(teacher_folder, tmp_path / "run")
    assert runs.newest_checkpoint(tmp_path / "run").name == "step-0000003"


def test_an_error_is_one_line_and_a_nonzero_exit(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--teacher", "no/such model"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_resume_refuses_other_data_another_teacher_and_another_number_of_ranks(teacher_folder, tmp_path):
    out = run(teacher_folder, tmp_path / "run")
    record = json.loads((out / "config.json").read_text())
    for change, word in ((dict(ranks=2), "ranks 2"), (dict(teacher="other"), "teacher other"), (dict(data=record["data"] | {"fingerprint": "0"}), "data 0")):
        (out / "config.json").write_text(json.dumps(record | change))
        with pytest.raises(Refusal, match=word):
            train.main(["--resume", "--out", str(out)])


def test_a_folder_that_is_no_run_or_that_another_process_trains_in_is_refused(teacher_folder, tmp_path):
    with pytest.raises(Refusal, match="not a run folder"):
        run(teacher_folder, teacher_folder)  # a teacher's own folder must survive a slip of --out
    with runs.lock(tmp_path / "run"), pytest.raises(Refusal, match="another process"):
        run(teacher_folder, tmp_path / "run")
    run(teacher_folder, tmp_path / "run")  # the lock alone does not make it a run


@pytest.mark.parametrize("flags", [["--warmup", "2"], ["--warmup", "nan"], ["--seed", "-1"], ["--w-kl", "-1"], ["--w-align", "-0.5"], ["--clip", "nan"],
                                   ["--temperature", "0"], ["--eval-tokens", "0"], ["--w-kl", "0", "--w-ce", "0", "--w-align", "0"]])
def test_numbers_that_cannot_be_meant_are_refused_by_flag(flags):
    with pytest.raises(Refusal, match=flags[0]):
        train.parse(flags)


@pytest.mark.parametrize("zero", ["mlp.gate_proj", "self_attn.o_proj", "self_attn.q_proj"])
def test_a_teacher_with_a_zero_matrix_still_distils(teacher_folder, tmp_path, zero):
    folder = tmp_path / "teacher"
    shutil.copytree(teacher_folder, folder)
    net = random_net(vocab_size=2048)
    with torch.no_grad():
        net.get_parameter(f"layers.0.{zero}.weight").zero_()
    net.save_pretrained(folder)
    assert all(torch.isfinite(w).all() for w in load_file(run(folder, tmp_path / "run") / "student" / "model.safetensors").values())


def test_compare_pairs_seeds_and_refuses_what_is_unlike(teacher_folder, tmp_path):
    folders = [run(teacher_folder, tmp_path / f"{mode}{seed}", "--mode", mode, "--seed", str(seed)) for mode in ("lrc", "core") for seed in (1, 2)]
    end = {f.name: runs.read_metrics(f)[-1]["val_ce"] for f in folders}
    paired = [end["core1"] - end["lrc1"], end["core2"] - end["lrc2"]]
    row = runs.compare(folders).splitlines()[-1]
    assert f"| {sum(paired) / 2:.4f} ± {abs(paired[0] - paired[1]) / 2 ** 0.5:.4f} |" in row
    with pytest.raises(Refusal, match="differ in lr"):
        runs.compare([folders[0], run(teacher_folder, tmp_path / "other", "--lr", "2e-3")])
    with pytest.raises(Refusal, match="second run"):
        runs.compare([folders[0], folders[0]])
