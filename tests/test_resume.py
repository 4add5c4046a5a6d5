"""N steps straight are k steps, a resume, and the N - k others: every figure, every position in the data, every number of the state, bit for bit."""
import json
import shutil

import pytest
import ranks
import torch
from safetensors.torch import load_file
from test_train import SMALL, bare, command, elsewhere, teacher_folder  # noqa: F401 (fixtures)

import data
import runs
import train
from prepare import held_out

STEPS, ACCUM, BATCH = 6, 2, 2
EVERY = ["--accum", str(ACCUM), "--batch-size", str(BATCH), "--steps", str(STEPS), "--save-every", "1", "--keep", str(STEPS), "--eval-every", "2"]


@pytest.fixture(scope="module")
def little(teacher_folder, tmp_path_factory):  # noqa: F811
    """The teacher with a text so short that 6 steps on one rank go through it more than twice; chats; and a mixture of two texts."""
    folder = tmp_path_factory.mktemp("little")
    for file in teacher_folder.iterdir():
        if file.name != "text.jsonl":
            shutil.copy(file, folder)
    rows = [json.dumps({"id": f"d{i}", "text": f"def f{i}(x):\n    return x * {i}\n" * 2}) + "\n" for i in range(40)]
    seen, kept = ([row for i, row in enumerate(rows) if held_out(f"d{i}") == held] for held in (False, True))
    (folder / "text.jsonl").write_text("".join(seen[:12] + kept))
    chat = [json.dumps({"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} {i * i}"}]}) + "\n" for i in range(20)]
    (folder / "chats.jsonl").write_text("".join(chat))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    for name, part in (("a", seen[:6] + kept), ("b", seen[6:] + kept)):
        (folder / f"{name}.jsonl").write_text("".join(part))
        data.main(["prepare", str(folder / f"{name}.jsonl"), "--tokenizer", str(folder), "--out", str(folder / name)])
    return folder


def timeless(out):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in runs.read_metrics(out)]


def back_to(step, straight, out):
    """The straight run's folder as a crash some time after step `step` would have left it: metrics run ahead of the newest checkpoint."""
    shutil.copytree(straight, out)
    shutil.rmtree(out / "student", ignore_errors=True)
    for folder in (out / "checkpoint").iterdir():
        if folder.name > f"step-{step:07d}":
            shutil.rmtree(folder)


def same_end(one, two):
    assert timeless(one) == timeless(two)
    for file in (f"checkpoint/step-{STEPS:07d}/state.safetensors", f"checkpoint/step-{STEPS:07d}/student.safetensors", "student/model.safetensors"):
        a, b = load_file(one / file), load_file(two / file)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), file


@pytest.mark.parametrize("flags", [
    "--mode lrc --weight-decay 0.1", "--mode dense --schedule cosine", "--mode core", "--mode random", "--mode slice", "--mode scratch", "--bases implicit",
    "--coordinates teacher", "--mode lrc --recipe clone --init random --coordinates teacher", "--recipe gpd", "--doc-mask --data {f}/a=3,{f}/b=1", "--checkpointing",
    "--stage pretrain --width 0", "--stage sft --init {f} --width 0 --data {f}/chats.jsonl"])
def test_resume_is_exact_from_every_kind_of_step(little, tmp_path, flags, bare, monkeypatch):  # noqa: F811
    """From a step with an evaluation and from one without, over the end of an epoch."""
    flags = flags.format(f=little).split()
    argv = command(little, tmp_path / "straight", *EVERY, *flags)
    if "sft" in flags:
        at = argv.index("--teacher")
        del argv[at:at + 2]
    reads, real = [], (data.Tokens.batch, data.Mixture.batch)
    monkeypatch.setattr(data.Tokens, "batch", lambda self, position, count: (reads.append((len(self), position)), real[0](self, position, count))[1])
    train.main(argv)
    straight, all_reads = tmp_path / "straight", list(reads)
    windows = all_reads[0][0]
    assert all_reads[-1][1] >= windows or "=" in flags[-1]  # an epoch ends on the way
    assert {row["step"] for row in runs.read_metrics(straight) if "val_ce" in row} == {0, 2, 4, 6}
    for k in (1, 4):
        out = tmp_path / f"from{k}"
        back_to(k, straight, out)
        reads.clear()
        train.main(["--resume", "--out", str(out)])
        assert reads == all_reads[len(all_reads) * k // STEPS:]
        same_end(straight, out)


@pytest.mark.parametrize("flags", ["--mode core", *(pytest.param(f, marks=pytest.mark.slow) for f in (
    "--mode lrc", "--mode dense", "--mode random", "--mode slice", "--mode scratch", "--bases implicit", "--coordinates teacher --shard-optimizer", "--stage pretrain --width 0"))])
def test_resume_is_exact_on_two_ranks(little, tmp_path, flags):
    argv = command(little, tmp_path / "straight", *EVERY, *flags.split(), "--check-ranks", "2")
    codes, screens = ranks.run(argv, tmp_path / "log", 2)
    assert codes == [0, 0], screens
    back_to(3, tmp_path / "straight", tmp_path / "again")
    codes, screens = ranks.run(["--resume", "--out", tmp_path / "again"], tmp_path / "log", 2)
    assert codes == [0, 0], screens
    same_end(tmp_path / "straight", tmp_path / "again")
