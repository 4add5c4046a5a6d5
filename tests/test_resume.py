"""N steps straight are k steps, a resume, and the N - k others: every figure, every position in the data, every number of the state, bit for bit."""
import json
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
from teachers import Refusal

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


def test_a_run_folder_in_use_is_refused_to_a_resume_too_and_stays_as_it_is(little, tmp_path, bare):
    out = tmp_path / "run"
    train.main(command(little, out, *EVERY))
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with runs.lock(out):
        codes, (screen,) = ranks.run(["--resume", "--out", out], tmp_path / "log")
    assert codes == [1] and screen.splitlines()[-1].startswith("error: ") and "another process is at work" in screen
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
