"""Preparing: a source becomes a folder of token shards, on all cores; what was interrupted goes on where it stopped.

    python data.py prepare stdlib --tokenizer tiny
    python data.py prepare hub:HuggingFaceFW/fineweb-edu:data --min-score 4 --tokens 10e9 --tokenizer llama3.2-3b --out tokens/fineweb-edu
    python data.py prepare hub:teknium/OpenHermes-2.5 --skip-bad --tokenizer llama3.2-3b --out tokens/openhermes  # in its chat template
    python data.py prepare chats.jsonl --chats --tokenizer RUN/student                                            # for train.py --stage sft

Each unit of the source (sources.units_of) becomes a shard of the training documents and one of the held-out ones (shards.py). With a
budget (--tokens) the units are taken in an order shuffled by the seed, until it is reached: a sample of the whole source, not its
beginning. What is in the shards is summed up in tokens.json.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import numpy as np

import chat
from files import Refusal, read_json, write_whole
from shards import FORMAT, SIDES, Choice, ShardWriter, worker_pool
from sources import SUFFIXES, TABLES, Part, source_files, units_of
from tokenizer import Tokenizer


def prepare(source: str, tokenizer: Tokenizer, out: Path | None = None, quiet: bool = False, choice: Choice = Choice(),
            workers: int | None = None) -> Path:
    """Tokenise `source` into a folder of shards, or find the folder where the same was tokenised before.

    A chat template may write the date: tokens.json states which. Raises Refusal: nothing to read, a row that cannot be read (with its
    line), a folder that holds something else. However it was stopped, the same call goes on with the units that are still to do.
    """
    if source and (Path(source) / "tokens.json").exists():
        chats = any(read_summary(Path(source)).get("assistant", {}).values())
        if out is not None or replace(choice, chats=False) != Choice():
            raise Refusal(f"{source}: is prepared already; give its own source, or leave --out and what is to be taken of it out")
        if choice.chats and not chats:
            raise Refusal(f"{source}: holds documents, not chats with a mask; prepare their .jsonl with `data.py prepare --chats`")
        return Path(source)
    files = source_files(source, TABLES if choice.chats else SUFFIXES, tell=not quiet)
    template = chat.read_template(tokenizer.folder)
    if choice.chats and template is None:
        raise Refusal(f"{tokenizer.folder}: no chat template (chat_template.jinja, or in tokenizer_config.json); "
                      "chats need an instruct model")
    hub = source.startswith("hub:")
    stamp = stamp_of(files, hub, tokenizer, template, choice)
    name = re.sub(r"[@:].*", "", source.removeprefix("hub:")).replace("/", "-") if hub else Path(source).resolve().stem
    out = out or Path("tokens") / f"{name}-{stamp}"
    if not out.name:
        raise Refusal(f"--out {out}: name a folder that is to be made")
    making = out.with_name(f"{out.name}.making")
    if finished(out, stamp):
        return out
    with folder_lock(making, quiet):
        if finished(out, stamp):
            return out
        begun = read_json(making / "begun.json") if (making / "begun.json").exists() else {}
        if begun.get("stamp") != stamp:
            for old in making.glob("*-*"):
                old.unlink()
            begun = dict(stamp=stamp, date=datetime.now().isoformat(timespec="seconds"))
            write_whole(making / "begun.json", json.dumps(begun))
        try:
            fill(making, source, files, tokenizer, choice, begun, workers, quiet, out)
        except Refusal:
            if not any(making.glob("unit-*.json")):
                shutil.rmtree(making)  # nothing is lost with it
            raise
        (making / "begun.json").unlink()
        (making / ".lock").unlink()
        os.rename(making, out)
    return out


def stamp_of(files: list, hub: bool, tokenizer: Tokenizer, template: tuple | None, choice: Choice) -> str:
    """12 hex digits, others wherever the shards could be others: by them the same source is found again."""
    found = [(path if hub else name, size, changed) for name, path, size, changed in files]
    options = asdict(replace(choice, skip_bad=False))  # what was done without --skip-bad had nothing to skip
    text = json.dumps([FORMAT, tokenizer.fingerprint, found, template, options])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def finished(out: Path, stamp: str) -> bool:
    if (out / "tokens.json").exists():
        if read_summary(out).get("stamp") != stamp:
            raise Refusal(f"{out}: holds the tokens of other files, other options or another tokenizer; give another --out or delete it")
        return True
    if out.exists():
        raise Refusal(f"{out}: exists and is not a token folder; give another --out")
    return False


def read_summary(folder: Path) -> dict:
    """tokens.json of a prepared folder."""
    summary = read_json(folder / "tokens.json")
    counts, assistant = summary.get("tokens"), summary.get("assistant", {})
    sound = isinstance(summary.get("fingerprint"), str) and isinstance(counts, dict) and isinstance(assistant, dict)
    if not sound or not all(type(counts.get(side)) is int for side in SIDES):
        raise Refusal(f"{folder / 'tokens.json'}: not as `data.py prepare` writes it; prepare the data again")
    return summary


def fill(making: Path, source: str, files: list, tokenizer: Tokenizer, choice: Choice, begun: dict, workers: int | None, quiet: bool,
         out: Path) -> None:
    """All units of the source, or as many as the budget asks for, then the summary."""
    units = units_of(files)
    if choice.tokens:
        units = [units[k] for k in np.random.default_rng(choice.seed).permutation(len(units))]
    now = datetime.fromisoformat(begun["date"])
    own = ShardWriter(tokenizer, making, choice, now)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(workers or max(1, min(cores, len(units) // 4)), len(units))
    here = contextlib.nullcontext(lambda units: (own.write(k, unit) for k, unit in enumerate(units)))
    progress = Progress(source, units, choice.tokens, quiet)
    accounts: list[dict] = []
    with worker_pool(workers, tokenizer.folder, making, choice, now) if workers > 1 else here as write:
        for account in write(units):
            accounts.append(account)
            total = summed(accounts, "tokens")["train"]
            if choice.tokens and total >= choice.tokens:
                if not own.trim(len(accounts) - 1, account, account["tokens"]["train"] - (total - choice.tokens)):
                    accounts.pop()
                break
            progress.show(accounts)
    if not any(summed(accounts, "bytes").values()):
        for path in making.glob("*-*"):  # there is nothing in them to go on from
            path.unlink()
        why = "its first document has more than the --tokens asked for" if choice.tokens else "no document in it that has text"
        raise Refusal(f"data {source!r}: {why}")
    summary = summary_of(accounts, source, files, choice) | begun | own.metadata
    for path in making.glob("*-*"):
        if path.suffix != ".safetensors" or int(path.stem.partition("-")[2]) >= len(accounts):
            path.unlink()  # the accounts are summed up; shards beyond the budget are not part of it
    write_whole(making / "tokens.json", json.dumps(summary, indent=2) + "\n")
    if not quiet:
        tell(summary, out, progress.speed(accounts), workers)


def summed(accounts: list[dict], key: str) -> dict[str, int]:
    return {side: sum(account[key][side] for account in accounts) for side in SIDES}


def summary_of(accounts: list[dict], source: str, files: list, choice: Choice) -> dict:
    """What tokens.json says of the data; the rest of it is how they were made."""
    whole = hashlib.sha256("".join(a["digest_train"] + a["digest_val"] for a in accounts).encode())
    summary = dict(source=source, files=len(files), bytes=sum(summed(accounts, "bytes").values()), documents=summed(accounts, "documents"),
                   tokens=summed(accounts, "tokens"), fingerprint=whole.hexdigest()[:16], skipped=sum(a["skipped"] for a in accounts),
                   separator_inside=sum(a["inside"] for a in accounts), choice=asdict(choice))
    if choice.chats:
        summary["assistant"] = summed(accounts, "assistant")
    if source.startswith("hub:"):
        summary["commit"] = re.search(r"@([^/]+)/", files[0][1]).group(1)
    if source == "stdlib":
        summary["python"] = sys.version.split()[0]
    return summary


class Progress:
    """A line on stderr while units are done: once a second on a terminal, twice a minute in a log."""

    def __init__(self, source: str, units: list[list[Part]], budget: int, quiet: bool):
        self.source, self.budget, self.quiet = source, budget, quiet
        self.sizes = [sum(part.end - part.begin for part in unit) for unit in units]
        self.begun = self.told = time.monotonic()

    def speed(self, accounts: list[dict]) -> float:
        """Tokens a second, of what was done now and not found."""
        return sum(sum(a["tokens"].values()) for a in accounts if "found" not in a) / max(time.monotonic() - self.begun, 1e-9)

    def show(self, accounts: list[dict]) -> None:
        terminal = sys.stderr.isatty()
        if self.quiet or time.monotonic() - self.told <= (1 if terminal else 30):
            return
        self.told = time.monotonic()
        total, done = summed(accounts, "tokens")["train"], self.sizes[:len(accounts)]
        share = total / self.budget if self.budget else sum(done) / sum(self.sizes)
        fresh = sum(size for size, a in zip(done, accounts) if "found" not in a) / sum(done)
        left = f"{(self.told - self.begun) / fresh * (1 / share - 1) / 60:.0f} min" if share and fresh else "?"
        print(f"tokenising {self.source}: {share:.1%}, {total:,} training tokens, {self.speed(accounts):,.0f} tokens/s, left {left}",
              end="\r" if terminal else "\n", file=sys.stderr, flush=True)


def tell(summary: dict, out: Path, speed: float, workers: int) -> None:
    count, documents, asked = summary["tokens"], summary["documents"], summary["choice"]["tokens"]
    text = (f"data: {summary['source']}: {summary['files']} files, {summary['bytes'] / 1e6:.1f} MB -> {count['train']:,} training and "
            f"{count['val']:,} held-out tokens in {out} (fingerprint {summary['fingerprint']})\n"
            f"      {documents['train']:,} + {documents['val']:,} documents, {summary['bytes'] / sum(count.values()):.2f} bytes a token, "
            f"{speed:,.0f} tokens/s on {workers} core{'s' * (workers > 1)}")
    if summary["skipped"]:
        text += f", {summary['skipped']:,} rows left out"
    if count["train"] < 0.9 * asked:
        text += f"\n      less than the {asked:,} asked for: that is all there is"
    print(text)


@contextlib.contextmanager
def folder_lock(making: Path, quiet: bool):
    """Hold the folder in the making; a second process waits, and then finds what the first has done. A folder with nothing in it goes."""
    while True:
        making.mkdir(parents=True, exist_ok=True)
        with (making / ".lock").open("w") as lock:
            try:
                import fcntl
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not quiet:
                        print(f"{making}: another process is at it; waiting", file=sys.stderr)
                    fcntl.flock(lock, fcntl.LOCK_EX)
            except ImportError:  # Windows has no flock
                pass
            if not (making / ".lock").exists() or os.fstat(lock.fileno()).st_ino != (making / ".lock").stat().st_ino:
                continue  # the folder was finished or removed while this process waited
            try:
                yield
            finally:
                if making.exists() and [p.name for p in making.iterdir()] == [".lock"]:
                    shutil.rmtree(making)
            return
