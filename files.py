"""What every file here shares: an error that a user can mend, JSON read, a file written whole, a foreign exception in one line."""
from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

from safetensors import SafetensorError


class Refusal(ValueError):
    """Something a user can mend. Commands print it as one line and stop, exit code not 0, never a traceback."""

    def __init__(self, text: str):
        text = text if len(text) <= 1000 else f"{text[:600]} ... {text[-300:]}"  # names and values out of a foreign file may hold anything
        super().__init__("".join(c if c.isprintable() else " " for c in text))


def write_whole(path: Path, text: str) -> None:
    """The file appears whole or not at all: it is written beside its place and renamed into it."""
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise OSError(error.errno, f"{path}: cannot be written ({error.strerror or error}); make room, or write to another place") from None
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path, partial: Path | None = None, then: str = "go on with --resume: what was saved before is whole"):
    """Where there is no room (or no right) to write `path`, that is said in one line, and nothing stays of `partial`, the file or
    folder being made."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if partial and partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        elif partial:
            partial.unlink(missing_ok=True)
        reason = os.strerror(error.errno) if getattr(error, "errno", None) else error
        raise Refusal(f"{path}: cannot be written ({reason}); make room, then {then}") from None


def one_line(error: BaseException) -> str:
    """What an exception says, in one line and without secrets: the hub's libraries may put a token, or an address with one, in it."""
    text = " ".join(str(error).split())
    for token in filter(None, map(os.environ.get, ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))):
        text = text.replace(token, "...")
    return re.sub(r"\bhf_\w+|(?<=://)[^\s/@]+@|(?<=\?)[^\s'\")]+|(?<=[Bb]earer )\S+", "...", text)


def any_letter_shows() -> None:
    """A name or a sample that the terminal has no letters for stops nothing. A stream that was closed is None."""
    for screen in (sys.stdout, sys.stderr):
        if screen:
            screen.reconfigure(errors="backslashreplace")


def read_json(path: Path) -> dict:
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({(error.strerror or str(error)).lower()}); is the folder the one you mean?") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of 5,000 digits, brackets without end
        raise Refusal(f"{path}: not valid JSON ({error}); fetch the file again") from None
    if not isinstance(read, dict):
        raise Refusal(f"{path}: holds a JSON {type(read).__name__}, not an object; fetch the file again")
    return read
