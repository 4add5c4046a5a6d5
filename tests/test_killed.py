"""Stopped at any moment: by SIGKILL, by SIGTERM and Ctrl-C, by a full disk; what is left goes on to the same end, bit for bit."""
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
from safetensors.torch import load_file, save_file
from test_resume import same_end, timeless
from test_train import built, command

import checkpoints
import context
import data
import lrc
import merge
import runs
import starts
import train
import watch
from files import Refusal
from model import Transformer
from optimizer import make_optimizer, training_state

pytestmark = pytest.mark.usefixtures("elsewhere")
SIX = ["--steps", "6", "--save-every", "2", "--eval-every", "3"]


def steps_of(out):
    return [row["step"] for row in runs.read_metrics(out) if "loss" in row]


def saved(out):
    return sorted(p.name for p in (out / "checkpoint").iterdir())


# ------------------------------------------------------------------------------------------ SIGKILL


def telling(pipe):
    """In a fork: a letter into the pipe at each event that a kill may aim at."""
    tell = lambda letter: os.write(pipe, letter)

    def before(real, letter):
        return lambda *args, **kwargs: (tell(letter), real(*args, **kwargs))[1]
    runs.append_metrics = before(runs.append_metrics, b"m")
    checkpoints.save_checkpoint = before(checkpoints.save_checkpoint, b"c")
    checkpoints.settle = before(checkpoints.settle, b"f")     # inside a checkpoint: its files are written, not yet under their name
    os.rename = before(os.rename, b"r")
    merge.export = before(merge.export, b"e")
    merge.swap = before(merge.swap, b"s")


def consistent(out, clone, optimizer):
    """The newest complete checkpoint by itself: its step, every tensor of its state, and the student that its coordinates deploy."""
    folder, state = checkpoints.find_checkpoint(out)
    tensors = load_file(folder / "state.safetensors")
    checkpoints.restore(folder, training_state(clone, optimizer), tensors)  # all there, all finite
    assert {t.item() for name, t in tensors.items() if name.endswith("/step")} == {state["step"]}
    clone.deploy()
    deployed = load_file(folder / "student.safetensors")
    assert deployed.keys() == clone.weights.keys() and all(torch.equal(deployed[name], w) for name, w in clone.weights.items())
    return state["step"]


@pytest.mark.slow
@pytest.mark.parametrize("world, times, steps, flags", [(1, 60, 24, []), (2, 16, 10, ["--shard"])])
def test_killed_at_any_moment_a_run_ends_as_if_it_never_was(little, tmp_path, world, times, steps, flags):
    """SIGKILL up to 12 ms after a randomly chosen event: a step's row, a checkpoint's start, its files, its renaming, the merge, the student's folder."""
    rng = random.Random(1)
    more = ["--steps", str(steps), "--save-every", "1", "--eval-every", "10", "--keep", "2", "--mode", "core", *flags]
    straight, out = tmp_path / "straight", tmp_path / "killed"
    codes, screens = ranks.run(command(little, straight, *more), tmp_path / "log", world)
    assert codes == [0] * world, screens
    teacher = Transformer.from_pretrained(little).requires_grad_(False)
    clone = built(teacher, mode="core", init="orthonormal")
    optimizer = make_optimizer(clone, 1e-3)

    kills, inside, at = 0, dict.fromkeys("mcfres", 0), 0
    while True:
        assert kills < 400
        ahead = at == steps
        wanted = rng.choice("es" if ahead else "mcfr").encode()
        begin = ["--resume", "--out", out] if (out / "checkpoint").exists() and checkpoints.newest_checkpoint(out) else command(little, out, *more)
        hear, tell = os.pipe()
        pids = ranks.start(begin, tmp_path / "log", world, lambda rank: telling(tell) if rank == 0 else None)
        os.close(tell)
        finishes = kills >= times and min(inside["e"], inside["s"]) >= 3
        heard = b""
        while finishes or heard != wanted:
            if not (heard := os.read(hear, 1)):
                break
        time.sleep(rng.random() * 0.012)
        for pid in pids if not finishes else []:
            os.kill(pid, signal.SIGKILL)
        codes = [ranks.end(pid) for pid in pids]
        os.close(hear)
        assert codes[0] in (0, -signal.SIGKILL), (tmp_path / "log.0").read_text()
        if codes[0] == -signal.SIGKILL:
            kills += 1
            inside[wanted.decode()] += 1
        if (out / "checkpoint").exists() and checkpoints.newest_checkpoint(out):
            at = consistent(out, clone, optimizer)
        if finishes:
            break
    assert timeless(out) == timeless(straight)
    for file in (f"checkpoint/step-{steps:07d}/state.safetensors", "student/model.safetensors"):
        one, two = load_file(straight / file), load_file(out / file)
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert {p.name for p in out.iterdir()} == {p.name for p in straight.iterdir()} and saved(out) == saved(straight)
    print(f"{kills} kills: {inside}")


# ---------------------------------------------------------------------------------- SIGTERM, Ctrl-C


def at(count, module, name, act):
    """In a fork: `act` at the count-th call of a function, before it does anything."""
    real, calls = getattr(module, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            act()
        return real(*args, **kwargs)
    setattr(module, name, wrapped)


def send(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def straight(little, tmp_path_factory):
    """Six steps that nothing stopped."""
    folder = tmp_path_factory.mktemp("straight")
    codes, screens = ranks.run(command(little, folder / "run", *SIX), folder / "log")
    assert codes == [0], screens
    return folder / "run"


def said(screen):
    """What a stopped run says on the way out: one line."""
    assert "Traceback" not in screen
    return [line for line in screen.splitlines() if "--resume" in line]


@pytest.mark.parametrize("number, module, name, count, last", [
    (signal.SIGTERM, data.Tokens, "batch", 3, 3), (signal.SIGINT, data.Tokens, "batch", 3, 3),
    (signal.SIGTERM, data.Tokens, "batch", 1, 1), (signal.SIGHUP, data.Tokens, "batch", 3, 3),
    (signal.SIGTERM, context, "evaluate", 3, 4),        # that of step 3; the first two are the teacher's and that of step 0
    (signal.SIGTERM, checkpoints, "save_checkpoint", 1, 3),    # that of step 2
    (signal.SIGTERM, checkpoints, "save_checkpoint", 3, 6)])   # that of the last step: no step is left to carry the request
def test_a_signal_lets_the_step_finish_and_saves_it(little, straight, tmp_path, number, module, name, count, last):
    out = tmp_path / "run"
    codes, (screen,) = ranks.run(command(little, out, *SIX), tmp_path / "log", before=lambda rank: at(count, module, name, send(number)))
    assert codes == [128 + number]
    assert steps_of(out) == list(range(1, last + 1)) and saved(out) == [f"step-{last:07d}"] and not (out / "student").exists()
    assert said(screen) == [f"stopped after step {last} of 6; it is saved in {out}/checkpoint/step-{last:07d}, and train.py --resume --out {out} goes on"]
    assert ("Ctrl-C again stops at once" in screen) == (number == signal.SIGINT)
    train.main(["--resume", "--out", str(out)])
    same_end(straight, out)


@pytest.mark.parametrize("number, hooks, last", [
    (signal.SIGINT, [(data.Tokens, "batch", 3), (lrc.Clone, "pull_back", 3)], 2),   # the second Ctrl-C comes within the step
    (signal.SIGTERM, [(starts, "calibrate", 1)], None), (signal.SIGINT, [(context, "evaluate", 2)], None),
    (signal.SIGTERM, [(merge, "swap", 1)], 6)])
def test_before_the_first_step_and_after_the_last_and_at_a_second_ctrl_c_it_stops_at_once(little, straight, tmp_path, number, hooks, last):
    out = tmp_path / "run"
    codes, (screen,) = ranks.run(command(little, out, *SIX), tmp_path / "log", before=lambda rank: [at(count, module, name, send(number)) for module, name, count in hooks])
    assert codes == [128 + number] and not (out / "student").exists()
    assert len(said(screen)) == 1 and said(screen)[0].startswith("interrupted")
    if last is None:
        with pytest.raises(Refusal, match="To begin anew leave --resume out$|config.json"):
            train.main(["--resume", "--out", str(out)])
        train.main(command(little, out, *SIX))
    else:
        assert checkpoints.newest_checkpoint(out).name == f"step-{last:07d}"
        train.main(["--resume", "--out", str(out)])
    same_end(straight, out)
    assert {p.name for p in out.iterdir()} == {p.name for p in straight.iterdir()}


def test_a_signal_to_one_rank_stops_both_after_the_same_step(little, tmp_path):
    out = tmp_path / "run"
    codes, screens = ranks.run(command(little, out, *SIX), tmp_path / "log", 2, lambda rank: at(3, data.Tokens, "batch", send(signal.SIGTERM)) if rank else None)
    assert codes == [143, 143], screens
    assert steps_of(out) == [1, 2, 3] and saved(out) == ["step-0000003"]
    assert len(said(screens[0])) == 1 and screens[1] == ""


def test_a_rank_that_is_gone_is_one_line_of_the_others(little, tmp_path):
    out = tmp_path / "run"
    codes, screens = ranks.run(command(little, out, *SIX), tmp_path / "log", 2, lambda rank: at(4, data.Tokens, "batch", send(signal.SIGKILL)) if rank else None)
    assert codes == [1, -signal.SIGKILL] and saved(out) == ["step-0000002"]
    assert len(said(screens[0])) == 1 and screens[0].splitlines()[-1].startswith("error: rank 0 lost the other ranks")


def test_a_signal_that_is_ignored_stays_ignored(little, tmp_path):
    """A shell's background job, or a worker of reproduce.py: Ctrl-C is for somebody else."""
    def deaf(rank):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        at(3, data.Tokens, "batch", send(signal.SIGINT))
    codes, screens = ranks.run(command(little, tmp_path / "run", *SIX), tmp_path / "log", before=deaf)
    assert codes == [0], screens
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with watch.stop_requests():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_source_whose_name_is_no_text_does_not_keep_the_student_from_being_written(straight, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    record = json.loads((out / "config.json").read_text())
    record["data"]["source"] = os.fsdecode(b"text-\xff.jsonl")
    (out / "config.json").write_text(json.dumps(record))
    assert "text-\\udcff.jsonl" in (merge.export(out) / "README.md").read_text(encoding="utf-8")


def test_sigterm_ends_a_merge_in_one_line_with_nothing_half(straight, tmp_path):
    def work():
        sys.argv = ["merge.py", str(straight), "--out", str(tmp_path / "out")]
        at(3, shutil, "copyfile", send(signal.SIGTERM))
        runpy.run_path(str(ranks.ROOT / "merge.py"), run_name="__main__")
    assert ranks.end(ranks.fork(work, tmp_path / "log")) == 1 and (tmp_path / "log").read_text() == "interrupted; nothing was written\n"
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


def test_a_hangup_is_a_request_to_stop_unless_it_is_ignored():
    usual = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
    try:
        for ignored in (False, True):  # True: under nohup
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            watch.interruptible()
            with watch.stop_requests() as asked:
                os.kill(os.getpid(), signal.SIGHUP)
            assert asked == [signal.SIGHUP] * (not ignored)
            if not ignored:  # outside the loop, at once
                with pytest.raises(KeyboardInterrupt) as interrupted:
                    os.kill(os.getpid(), signal.SIGHUP)
                assert interrupted.value.args == (signal.SIGHUP,)
    finally:
        signal.signal(signal.SIGHUP, usual[0]), signal.signal(signal.SIGTERM, usual[1])


def test_ctrl_c_that_also_ends_the_reader_of_the_screen_still_lets_the_step_finish():
    """`train.py 2>&1 | tee log`: tee is gone before the word about Ctrl-C can be written."""
    reader, writer = os.pipe()
    os.close(reader)
    screen, usual = os.dup(2), signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell began the tests in the background
    os.dup2(writer, 2)
    try:
        with watch.stop_requests() as asked:
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, usual)
        os.dup2(screen, 2)
        os.close(screen), os.close(writer)
    assert asked == [signal.SIGINT]


def test_a_screen_that_takes_no_more_lines_ends_no_run(monkeypatch, capsys):
    with open("/dev/full", "w", encoding="utf-8") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        for line in ("one", "two"):
            watch.tell(line)
    assert capsys.readouterr().err == "stdout takes no more lines (No space left on device); the run goes on without them, metrics.jsonl has the figures\n"


@pytest.mark.slow
def test_torchrun_hands_sigterm_on_and_the_run_goes_on_from_where_it_was(little, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ranks.ROOT / "train.py")]
    more = ["--steps", "400", "--save-every", "400", "--eval-every", "400"]
    codes, screens = ranks.run(command(little, tmp_path / "straight", *more), tmp_path / "log", 2)
    assert codes == [0, 0], screens
    out = tmp_path / "run"
    process = subprocess.Popen([*torchrun, *command(little, out, *more)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not ((out / "metrics.jsonl").exists() and len(steps_of(out)) > 3) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, screen = process.communicate(timeout=60)
    assert process.returncode != 0 and 3 < (last := steps_of(out)[-1]) < 400 and saved(out) == [f"step-{last:07d}"]
    assert f"stopped after step {last} of 400" in screen
    subprocess.run([*torchrun, "--resume", "--out", str(out)], check=True, capture_output=True, timeout=200)
    assert timeless(out) == timeless(tmp_path / "straight")


# ----------------------------------------------------------------------------------------- full disk


def full(limit):
    """From here on no file of this process (its screen, too, is one) grows beyond `limit` bytes: what a full disk does, for a test without the right to mount."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.parametrize("module, name, count, limit, what, left", [
    (checkpoints, "save_checkpoint", 2, 4096, "checkpoint/step-0000004", ["step-0000002"]),
    (runs, "append_metrics", 6, -1, "metrics.jsonl", ["step-0000002"]),     # a row that is torn
    (merge, "export", 1, 4096, "student", ["step-0000006"]),
    (runs, "draw_curves", 1, 20_000, "curves.png", ["step-0000006"])])
def test_a_full_disk_is_one_line_and_what_was_saved_goes_on(little, straight, tmp_path, module, name, count, limit, what, left):
    out = tmp_path / "run"
    act = lambda: full(limit if limit > 0 else (out / "metrics.jsonl").stat().st_size + 30)
    codes, (screen,) = ranks.run(command(little, out, *SIX), tmp_path / "log", before=lambda rank: at(count, module, name, act))
    assert codes == [1] and len(said(screen)) == 1 and said(screen)[0].startswith(f"error: {out}/{what}: cannot be written (")
    assert saved(out) == left and not [p for p in out.rglob("*") if ".tmp" in p.name]
    train.main(["--resume", "--out", str(out)])
    same_end(straight, out)
    assert {p.name for p in out.iterdir()} == {p.name for p in straight.iterdir()}


def test_a_full_disk_at_the_start_leaves_a_folder_that_can_begin_again(little, straight, tmp_path):
    out = tmp_path / "run"
    codes, (screen,) = ranks.run(command(little, out, *SIX), tmp_path / "log", before=lambda rank: at(1, runs, "start", lambda: full(20_000)))
    assert codes == [1] and screen.splitlines()[-1].startswith(f"error: {out}: cannot be written (") and "Traceback" not in screen
    train.main(command(little, out, *SIX))
    same_end(straight, out)


def test_a_file_system_without_room_for_a_second_checkpoint(little, straight, tmp_path):
    """The real thing, ENOSPC: a mount with room for one and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(p.stat().st_size for p in (straight / "checkpoint").rglob("*.*")) * 3 // 2 + 200_000
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        out = disk / "run"
        codes, (screen,) = ranks.run(command(little, out, *SIX), tmp_path / "log")
        assert codes == [1] and len(said(screen)) == 1 and "No space left on device" in said(screen)[0] and "step-0000004" in said(screen)[0]
        assert saved(out) == ["step-0000002"]
        subprocess.run(["mount", "-o", f"remount,size={4 * size}", str(disk)], check=True)
        train.main(["--resume", "--out", str(out)])
        same_end(straight, out)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_calibration_takes_the_room_of_both_streams_before_it_writes_in_one(tmp_path):
    """A mapped file that finds no room is a SIGBUS: each of two fits, both do not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        first = starts.mapped(disk / "one", 800, 200)
        with pytest.raises(Refusal, match="set TMPDIR to another place"):
            starts.mapped(disk / "two", 800, 200)
        first.fill_(1.0)
        assert not (disk / "one").exists()  # so that a kill leaves nothing
        del first
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# ------------------------------------------------------------------------------ incomplete checkpoints


@pytest.fixture(scope="module")
def all_kept(little, tmp_path_factory):
    out = tmp_path_factory.mktemp("kept") / "run"
    codes, screens = ranks.run(command(little, out, *SIX, "--save-every", "1", "--keep", "9"), out.parent / "log")
    assert codes == [0], screens
    return out


def cut(file):
    os.truncate(file, file.stat().st_size - 10)


def blank(file):
    """What a power cut can make of a file that was renamed before its bytes were on the disk."""
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("file", ["state.safetensors", "student.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [Path.unlink, cut, blank])
def test_an_incomplete_checkpoint_is_named_and_the_one_before_it_taken(all_kept, tmp_path, bare, capsys, damage, file):
    out = tmp_path / "run"
    shutil.copytree(all_kept, out)
    for folder in ("step-0000006", "step-0000005"):
        damage(out / "checkpoint" / folder / file)
    os.rename(out / "checkpoint" / "step-0000004", out / "checkpoint" / "step-0000004.tmp")
    train.main(["--resume", "--out", str(out), "--keep", "2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("passed over")]
    assert [re.search(r"step-000000\S+?(?=[/:])", line)[0] for line in lines] == ["step-0000006", "step-0000005", "step-0000004.tmp"]
    assert all(file in line for line in lines[:2])
    same_end(all_kept, out)
    assert saved(out) == ["step-0000005", "step-0000006"]


def test_a_checkpoint_under_anothers_name_is_not_taken(all_kept, tmp_path, bare, capsys):
    out = tmp_path / "run"
    shutil.copytree(all_kept, out)
    shutil.rmtree(out / "checkpoint" / "step-0000006")
    os.rename(out / "checkpoint" / "step-0000003", out / "checkpoint" / "step-0000006")
    train.main(["--resume", "--out", str(out)])
    assert "step-0000006/state.json" in capsys.readouterr().out
    same_end(all_kept, out)


def test_the_checkpoint_of_another_run_is_named_and_not_taken(little, all_kept, tmp_path, bare, capsys):
    """The same shapes, the same teacher and text, another seed: nothing but its run tells it apart."""
    other, out = tmp_path / "other", tmp_path / "run"
    train.main(command(little, other, *SIX, "--seed", "7"))
    shutil.copytree(all_kept, out)
    shutil.rmtree(out / "checkpoint" / "step-0000006")
    shutil.copytree(other / "checkpoint" / "step-0000006", out / "checkpoint" / "step-0000006")
    capsys.readouterr()
    train.main(["--resume", "--out", str(out)])
    assert "passed over, no complete checkpoint of this run: " in (screen := capsys.readouterr().out) and "step-0000006/state.json: of run" in screen
    same_end(all_kept, out)


@pytest.mark.parametrize("change, words", [(lambda t: t.pop("norm.weight"), "tensor norm.weight is missing"),
                                           (lambda t: t.update({"norm.weight": torch.ones(5)}), r"norm.weight has shape \(5,\)")])
def test_a_checkpoint_whose_student_is_not_that_of_its_state_is_refused_by_name(all_kept, tmp_path, change, words):
    out = tmp_path / "run"
    shutil.copytree(all_kept, out)
    file = out / "checkpoint" / "step-0000006" / "student.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(Refusal, match=f"student.safetensors: {words}"):
        train.main(["--resume", "--out", str(out)])


@pytest.mark.parametrize("step, lost, left", [(6, 6, []), (4, 4, [5, 6])])
def test_metrics_that_are_gone_are_told_and_the_run_goes_on(all_kept, tmp_path, capsys, monkeypatch, step, lost, left):
    out = tmp_path / "run"
    if left:
        monkeypatch.setattr(runs, "draw_curves", lambda run: None)  # without a point they are drawn too
    shutil.copytree(all_kept, out)
    for k in range(step + 1, 7):
        shutil.rmtree(out / "checkpoint" / f"step-{k:07d}")
    (out / "metrics.jsonl").unlink()
    train.main(["--resume", "--out", str(out)])
    screen = capsys.readouterr().out
    assert f"metrics.jsonl: {lost} of the {step} steps up to the checkpoint are not in it" in screen and "student, step 0" not in screen
    assert steps_of(out) == left


def test_where_no_checkpoint_is_complete_it_is_said_what_to_delete(little, straight, tmp_path, bare):
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    cut(out / "checkpoint" / "step-0000006" / "state.safetensors")
    with pytest.raises(Refusal, match=f"leave --resume out and delete {out}/checkpoint and {out}/student$"):
        train.main(["--resume", "--out", str(out)])
    with pytest.raises(Refusal, match="already holds a run"):
        train.main(command(little, out, *SIX))
    shutil.rmtree(out / "checkpoint")
    with pytest.raises(Refusal, match="holds a finished student whose checkpoints are gone"):
        train.main(command(little, out, *SIX))
    shutil.rmtree(out / "student")
    train.main(command(little, out, *SIX))
    same_end(straight, out)


@pytest.mark.parametrize("keep, left", [(1, [6]), (2, [4, 6]), (9, [2, 4, 6])])
def test_the_newest_checkpoints_are_kept(little, tmp_path, bare, keep, left):
    train.main(command(little, tmp_path / "run", *SIX, "--keep", str(keep)))
    assert saved(tmp_path / "run") == [f"step-{k:07d}" for k in left] and checkpoints.newest_checkpoint(tmp_path / "run").name == "step-0000006"


def test_what_claims_a_later_step_than_the_one_written_never_crowds_it_out(tmp_path):
    """After a resume from step 2, with a damaged step 9 beside it, the checkpoint of step 4 stays and step 9 goes."""
    (tmp_path / "config.json").write_text("{}"), (tmp_path / "metrics.jsonl").write_text("")
    for step in (2, 9, 4):
        checkpoints.save_checkpoint(tmp_path, dict(step=step, tokens=0), {"a": torch.zeros(1)}, {"a": torch.zeros(1)}, keep=2)
    assert saved(tmp_path) == ["step-0000002", "step-0000004"]


def test_numbers_that_no_resume_would_take_are_not_saved(tmp_path):
    (tmp_path / "config.json").write_text("{}"), (tmp_path / "metrics.jsonl").write_text("")
    good = {"a": torch.zeros(2)}
    checkpoints.save_checkpoint(tmp_path, dict(step=1, tokens=0), good, good)
    for bad in (float("inf"), float("nan")):
        for pair in (({"b": torch.tensor([0, bad])}, good), (good, {"b": torch.tensor([0, bad])})):
            with pytest.raises(Refusal, match="^step 2: b holds NaN or infinity"):
                checkpoints.save_checkpoint(tmp_path, dict(step=2, tokens=0), *pair)
    assert saved(tmp_path) == ["step-0000001"]


def test_an_old_checkpoint_that_cannot_be_removed_yet_is_told_and_goes_later(tmp_path, monkeypatch, capsys):
    """As on a network disk, while somebody reads in it."""
    (tmp_path / "config.json").write_text("{}"), (tmp_path / "metrics.jsonl").write_text("")
    save = lambda step: checkpoints.save_checkpoint(tmp_path, dict(step=step, tokens=0), {"a": torch.zeros(1)}, {"a": torch.zeros(1)})
    save(1)
    real = shutil.rmtree
    with monkeypatch.context() as held:
        held.setattr(shutil, "rmtree", lambda path, *more, **named: real(path, *more, **named) if Path(path).name != "step-0000001" else os.rmdir(path))
        save(2)
    assert capsys.readouterr().err == f"{tmp_path}/checkpoint/step-0000001: cannot be removed yet (Directory not empty)\n"
    assert checkpoints.newest_checkpoint(tmp_path).name == "step-0000002"
    save(3)
    assert saved(tmp_path) == ["step-0000003"]


# --------------------------------------------------------------------------------------- who may write


def test_rank_1_writes_nothing_and_says_nothing(little, tmp_path):
    """Python's own audit events: every opening for writing, making, renaming and removing of a file in the process of rank 1."""
    out = tmp_path / "run"

    def guard(rank):
        def hook(event, args):
            inside = [a for a in args if isinstance(a, (str, os.PathLike)) and str(a).startswith(str(out))]
            written = event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if inside and (written or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")):
                os.write(2, f"{event} {args}\n".encode())
        if rank:
            sys.addaudithook(hook)
    codes, screens = ranks.run(command(little, out, *SIX), tmp_path / "log", 2, guard)
    assert codes == [0, 0] and screens[1] == "" and "step      6/6" in screens[0], screens
    codes, screens = ranks.run(["--resume", "--out", out], tmp_path / "log", 2, lambda rank: guard(rank + 1))  # and the guard sees what rank 0 does
    assert "os.rename" in screens[0] and screens[1] == ""
