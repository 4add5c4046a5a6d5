"""N steps straight are k steps, a resume, and the N - k others: every figure, every position in the data, every number of the state, bit for bit."""
import errno
import fcntl
import json
import os
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import ranks
import torch
from conftest import random_net
from safetensors.torch import load_file
from test_train import command

import data
import runs
import train
from files import Refusal
from model import Transformer

STEPS, ACCUM, BATCH = 6, 2, 2
pytestmark = pytest.mark.usefixtures("elsewhere")
EVERY = ["--accum", str(ACCUM), "--batch-size", str(BATCH), "--steps", str(STEPS), "--save-every", "1", "--keep", str(STEPS), "--eval-every", "2"]


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
    "--mode lrc --weight-decay 0.1", "--mode dense --schedule cosine", "--mode core", "--mode random", "--mode slice", "--mode scratch", "--bases compact", "--bases implicit",
    "--coordinates teacher", "--mode lrc --recipe clone --init random --coordinates teacher", "--recipe gpd", "--doc-mask --data {f}/a=3,{f}/b=1", "--checkpointing",
    "--stage pretrain --width 0", "--stage sft --init {f} --width 0 --data {f}/chats.jsonl"])
def test_resume_is_exact_from_every_kind_of_step(little, tmp_path, flags, bare, monkeypatch):
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
    "--mode lrc", "--mode dense", "--mode random", "--mode slice", "--mode scratch", "--bases implicit", "--coordinates teacher --shard", "--stage pretrain --width 0"))])
def test_resume_is_exact_on_two_ranks(little, tmp_path, flags):
    argv = command(little, tmp_path / "straight", *EVERY, *flags.split(), "--check-ranks", "2")
    codes, screens = ranks.run(argv, tmp_path / "log", 2)
    assert codes == [0, 0], screens
    back_to(3, tmp_path / "straight", tmp_path / "again")
    codes, screens = ranks.run(["--resume", "--out", tmp_path / "again"], tmp_path / "log", 2)
    assert codes == [0, 0], screens
    same_end(tmp_path / "straight", tmp_path / "again")


@pytest.fixture
def hub(little, tmp_path, monkeypatch):
    """A hub with one repository, owner/name, whose main branch moves: commit a is `little`, commit b has other weights. -> the calls it got."""
    asked, main = [], ["a" * 40]
    for commit in ("a", "b"):
        shutil.copytree(little, tmp_path / "cache" / (commit * 40))
    random_net(seed=5, vocab_size=2048).save_pretrained(tmp_path / "cache" / ("b" * 40))

    def model_info(self, repo, revision=None, timeout=None):
        asked.append(revision)
        return SimpleNamespace(sha=revision or main[0])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, revision=None, **more: str(tmp_path / "cache" / revision))
    return SimpleNamespace(asked=asked, main=main)


def test_a_resumed_run_takes_the_commit_that_it_began_with(little, hub, tmp_path, bare):
    out = tmp_path / "run"
    train.main(["--teacher", "owner/name", *command(little, out, *EVERY)[2:]])
    record = json.loads((out / "config.json").read_text())
    assert record["teacher"] == "owner/name@" + "a" * 40 and record["args"]["revision"] == "a" * 40
    back_to(3, out, tmp_path / "again")
    hub.main[0] = "b" * 40
    train.main(["--resume", "--out", str(tmp_path / "again")])
    assert hub.asked == [None, "a" * 40]
    same_end(out, tmp_path / "again")
    with pytest.raises(Refusal, match="--revision main contradicts"):
        train.main(["--resume", "--out", str(out), "--revision", "main"])
    moved = json.dumps(record | {"args": record["args"] | {"revision": "b" * 40}})  # were the flag lost, the identity would tell
    (out / "config.json").write_text(moved)
    with pytest.raises(Refusal, match=f"the run began with teacher owner/name@{'a' * 40}, now it is owner/name@{'b' * 40}"):
        train.main(["--resume", "--out", str(out)])


def test_a_token_is_in_no_file_and_on_no_screen(little, hub, tmp_path, monkeypatch, capfd, bare):
    token = "hf_" + "Secret" * 5
    monkeypatch.setenv("HF_TOKEN", token)
    train.main(["--teacher", "owner/name", *command(little, tmp_path / "run", *EVERY)[2:]])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **more: (_ for _ in ()).throw(ConnectionError(f"Bearer {token}")))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **more: (_ for _ in ()).throw(ConnectionError(f"Bearer {token}")))
    with pytest.raises(Refusal) as refused:
        train.main(["--resume", "--out", str(tmp_path / "run")])
    screen = capfd.readouterr()
    assert token not in str(refused.value) + screen.out + screen.err
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert len(files) > 10 and not any(token.encode() in p.read_bytes() for p in files)


def test_a_teacher_whose_weights_were_changed_in_place_is_refused(little, tmp_path, bare):
    """Weights times 1.5 span what they did, so that no coordinate would tell."""
    teacher, out = tmp_path / "little", tmp_path / "run"
    shutil.copytree(little, teacher)
    train.main(command(teacher, out, *EVERY))
    back_to(3, out, tmp_path / "again")
    net = Transformer.from_pretrained(teacher)
    with torch.no_grad():
        net.layers[1].mlp.up_proj.weight.mul_(1.5)
    net.save_pretrained(teacher)
    with pytest.raises(Refusal, match="the run began with teacher weights [0-9a-f]{16}, now it is [0-9a-f]{16}"):
        train.main(["--resume", "--out", str(tmp_path / "again")])


def test_a_source_that_is_gone_is_not_needed_again(little, tmp_path, bare):
    """The shards that the run began with are still there; a hub's set may have moved on in the same way."""
    text, out = tmp_path / "text.jsonl", tmp_path / "run"
    shutil.copy(little / "text.jsonl", text)
    argv = command(little, out, *EVERY)
    argv[argv.index("--data") + 1] = str(text)
    train.main(argv)
    text.unlink()
    back_to(3, out, tmp_path / "again")
    train.main(["--resume", "--out", str(tmp_path / "again")])
    same_end(out, tmp_path / "again")
    back_to(3, out, tmp_path / "last")
    shutil.rmtree(tmp_path / "tokens")  # now it is needed
    with pytest.raises(Refusal, match="no such file or folder"):
        train.main(["--resume", "--out", str(tmp_path / "last")])


def test_what_may_change_the_last_bits_is_told(little, tmp_path, bare, capsys):
    out = tmp_path / "run"
    train.main(command(little, out, *EVERY, "--steps", "1"))
    train.main(["--resume", "--out", str(out)])
    assert "resumed with" not in capsys.readouterr().out
    record = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(record | {"threads": 64, "torch": "1.0", "device": "cuda, float32"}))
    train.main(["--resume", "--out", str(out)])
    assert f"resumed with torch {torch.__version__} (was 1.0), device cpu, float32 (was cuda, float32), threads 1 (was 64): " in capsys.readouterr().out


def test_a_local_teacher_has_no_revision(little, tmp_path, bare):
    teacher, out = tmp_path / "little@v2", tmp_path / "run"
    shutil.copytree(little, teacher)
    train.main(command(teacher, out, *EVERY, "--steps", "1"))
    assert json.loads((out / "config.json").read_text())["args"]["revision"] == ""


def test_a_folder_that_was_filled_while_a_run_prepared_is_refused(little, tmp_path, bare, monkeypatch):
    """Two starts of one command, the first done before the second came to the lock."""
    out, argv, real = tmp_path / "run", command(little, tmp_path / "run", *EVERY, "--steps", "1"), train.tokens_of

    def slow(*args):
        monkeypatch.setattr(train, "tokens_of", real)
        train.main(argv)
        return real(*args)
    monkeypatch.setattr(train, "tokens_of", slow)
    with pytest.raises(Refusal, match="already holds a run"):
        train.main(argv)
    assert [row["step"] for row in timeless(out)] == [0, 0, 1, 1]


def test_a_file_system_without_locks_is_told_and_a_held_lock_is_refused(tmp_path, monkeypatch, capsys):
    def flock(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")
    with monkeypatch.context() as without:
        without.setattr(fcntl, "flock", flock)
        runs.lock(tmp_path / "run").close()
    assert "this file system locks no files (Function not implemented)" in capsys.readouterr().err
    with runs.lock(tmp_path / "run"), pytest.raises(Refusal, match="another process"):
        runs.lock(tmp_path / "run")


def test_a_run_folder_that_safetensors_could_not_read_again_is_refused():
    with pytest.raises(Refusal, match="must be UTF-8"):
        train.main(["--out", os.fsdecode(b"runs/x\xff")])


def test_a_run_folder_in_use_is_refused_to_a_resume_too_and_stays_as_it_is(little, tmp_path, bare):
    out = tmp_path / "run"
    train.main(command(little, out, *EVERY))
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with runs.lock(out):
        codes, (screen,) = ranks.run(["--resume", "--out", out], tmp_path / "log")
    assert codes == [1] and screen.splitlines()[-1].startswith("error: ") and "another process is at work" in screen
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
