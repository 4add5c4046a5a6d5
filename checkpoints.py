"""RUN/checkpoint/step-N: written whole, found again, read back tensor by tensor.

A checkpoint is on the disk, with the metrics up to it, before it bears its name; it knows its run; what is not finite
is never in it.
"""
from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from files import Refusal, read_json, write_whole, writing


def save_checkpoint(run: Path, state: dict, tensors: dict[str, Tensor], deployed: dict[str, Tensor], keep: int = 1) -> None:
    """Write step-N whole, then drop all but the newest `keep`. `deployed` are the student's merged weights, for merge.py. What no
    resume would take, numbers that are not finite, is refused, and what was saved before stays."""
    for name, t in (*tensors.items(), *deployed.items()):
        if not t.isfinite().all():
            raise Refusal(f"step {state['step']}: {name} holds NaN or infinity after the update. It is not saved, the newest checkpoint "
                          "is from before it; begin anew with a smaller --lr or a longer --warmup")
    folder = run / "checkpoint" / f"step-{state['step']:07d}"
    making = folder.with_name(f"{folder.name}.tmp")
    with writing(folder, partial=making):
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        for file, named in (("state", tensors), ("student", deployed)):
            save_file({name: t.detach().cpu().contiguous() for name, t in named.items()}, making / f"{file}.safetensors")
        write_whole(making / "state.json", json.dumps(state, indent=2) + "\n")
        # a file system may put the new name on the disk before what is in the files: after a power cut they would be empty under it
        for path in (*making.iterdir(), making, run / "config.json", run / "metrics.jsonl"):
            settle(path)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(making, folder)
        settle(folder.parent)
    keep_newest(folder, keep)


def keep_newest(folder: Path, keep: int) -> None:
    """Remove all but `folder`, the newest checkpoint, and the `keep` - 1 before it. One that claims a later step was passed over at a
    resume."""
    found = sorted(folder.parent.glob("step-*"))
    kept = [p for p in found if p.suffix != ".tmp" and p <= folder][-keep:]
    for old in found:
        if old not in kept:
            remove(old)


def remove(folder: Path) -> None:
    """A folder that nothing needs any more. Where it cannot go (on a network disk, while somebody reads in it), that is told, and
    tried again later."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        print(f"{folder}: cannot be removed yet ({error.strerror})", file=sys.stderr)


def tidy(run: Path, keep: int) -> None:
    """Remove what a kill left half done: older checkpoints half removed, a student half written."""
    keep_newest(find_checkpoint(run)[0], keep)
    for left in run.glob("student.*.tmp"):
        remove(left)


def settle(path: Path) -> None:
    """Wait until the disk holds a file, or the names in a folder."""
    if os.name == "posix":  # Windows opens no folder
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems know no such thing for a folder
                raise
        finally:
            os.close(handle)


def newest_checkpoint(run: Path) -> Path | None:
    found = [p for p in (run / "checkpoint").glob("step-*") if p.suffix != ".tmp"]
    return max(found, default=None)


def find_checkpoint(run: Path, say=lambda text: print(text, file=sys.stderr)) -> tuple[Path, dict]:
    """(folder, state.json) of the newest complete checkpoint. One that is newer and not complete is named, and passed over."""
    for folder in sorted((run / "checkpoint").glob("step-*"), reverse=True):
        try:
            return folder, read_state(folder)
        except Refusal as refusal:
            say(f"passed over, no complete checkpoint of this run: {refusal}")
    left = [f"{run}/checkpoint"] if newest_checkpoint(run) else []
    if (run / "student").exists():
        left.append(f"{run}/student")
    delete = f" and delete {' and '.join(left)}" if left else ""
    raise Refusal(f"{run}: no complete checkpoint/step-* in it; nothing to resume or merge. To begin anew leave --resume out{delete}")


def read_state(folder: Path) -> dict:
    """state.json of a checkpoint; a Refusal says what is missing or torn."""
    if folder.suffix == ".tmp":
        raise Refusal(f"{folder}: its writing was interrupted")
    state = read_json(folder / "state.json")
    if not all(type(state.get(key)) is int for key in ("step", "tokens")) or folder.name != f"step-{state['step']:0>7}":
        raise Refusal(f"{folder / 'state.json'}: step or tokens is missing or no number, or the step is not that of the folder")
    if state.get("run") != (record := read_json(folder.parent.parent / "config.json")).get("run"):
        raise Refusal(f"{folder / 'state.json'}: of run {state.get('run')}, config.json is of run {record.get('run')}")
    for file in ("state", "student"):
        try:
            with safe_open(folder / f"{file}.safetensors", framework="pt"):  # compares the file's length with its header
                pass
        except (SafetensorError, OSError) as error:
            raise Refusal(f"{folder}/{file}.safetensors: cannot be read ({error})") from None
    return state


def read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise Refusal(f"{file}: cannot be read ({error})") from None


def match(where: Path, target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """Refuse a `source` in which a tensor is missing, extra, misshapen or not finite, by name."""
    for name in sorted(target.keys() ^ source.keys()):
        raise Refusal(f"{where}: tensor {name} is {'missing' if name in target else 'not part of this mode and teacher'}")
    for name, tensor in target.items():
        if tensor.shape != source[name].shape:
            raise Refusal(f"{where}: {name} has shape {tuple(source[name].shape)}, this run needs {tuple(tensor.shape)}")
        if not torch.isfinite(source[name]).all():
            raise Refusal(f"{where}: {name} holds NaN or infinity")


@torch.no_grad()
def restore(where: Path, target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """Copy `source` into `target` in place, once they match."""
    match(where, target, source)
    for name, tensor in target.items():
        tensor.copy_(source[name])
