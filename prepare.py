"""Preparing: a source becomes a folder of token shards, on all cores; what was interrupted goes on where it stopped.

    python data.py prepare stdlib --tokenizer tiny
    python data.py prepare hub:HuggingFaceFW/fineweb-edu:data --min-score 4 --tokens 10e9 --tokenizer llama3.2-3b --out tokens/fineweb-edu
    python data.py prepare hub:teknium/OpenHermes-2.5 --skip-bad --tokenizer llama3.2-3b --out tokens/openhermes    # in its chat template
    python data.py prepare chats.jsonl --chats --tokenizer RUN/student                                              # for train.py --stage sft

Each unit of the source (sources.units_of) becomes a shard of the training documents and one of the held-out ones. A document ends with the
tokenizer's separator, which no text can hold, so that a reader of the shards knows where documents end (a chat template could write it:
tokens.json counts the chats where it does). One in HELD_OUT_EVERY, chosen by the hash of its name or else of its text, is held out: a
document keeps its side when others come and go. With a budget (--tokens) the units are taken in an order shuffled by the seed, until it
is reached: a sample of the whole source, not its beginning.

A shard is a safetensors file: "tokens", and for chats "mask", 1 where the loss falls. The header states dtype and shape, its metadata
FORMAT, the vocabulary, the tokenizer's fingerprint and a digest, so that ids of another tokenizer, 128k ids in 16 bits, or a file that a disk
or a copy has damaged are refused, not trained on.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from array import array
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import chat
from sources import CHAT_COLUMNS, SUFFIXES, TABLES, Bad, Part, Row, read, source_files, units_of, where
from teachers import Refusal, plain, read_json, write_whole
from tokenizer import Tokenizer

FORMAT = "lrc-tokens 2"  # what the files are, and the version of their layout
HELD_OUT_EVERY = 20
SIDES = ("train", "val")


@dataclass(frozen=True)
class Choice:
    """What is taken of a source."""
    chats: bool = False           # chats only, with a loss mask
    column: str = "text"
    min_score: float | None = None
    tokens: int = 0               # training tokens to stop at; 0: all there are
    seed: int = 1234              # of the order in which units are taken, with `tokens`
    skip_bad: bool = False        # leave out rows that cannot be read or rendered


def held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8], 16) % HELD_OUT_EVERY == 0


def digest(tensors: dict[str, np.ndarray]) -> str:
    """Of what a shard holds: another wherever a token or the mask is another."""
    return hashlib.sha256(b"".join(tensors[name].tobytes() for name in ("tokens", "mask") if name in tensors)).hexdigest()


# ------------------------------------------------------------------------------------- one unit of work


class Scribe:
    """Turns units into shards. Each worker process makes its own, from what can be sent to it."""

    def __init__(self, tokenizer: Tokenizer, making: Path, choice: Choice, now: datetime):
        self.tokenizer, self.making, self.choice, self.now = tokenizer, making, choice, now
        self.columns = CHAT_COLUMNS if choice.chats else (choice.column, *CHAT_COLUMNS)
        self.dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        self.metadata = {"format": FORMAT, "vocab_size": str(tokenizer.vocab_size), "tokenizer": tokenizer.fingerprint}

    @functools.cached_property
    def render(self):
        """The model's chat template; read when the first chat comes, for text has no use for it."""
        render = chat.renderer_of(self.tokenizer, self.now)
        if render is None:
            raise Refusal(f"{self.tokenizer.folder}: no chat template (chat_template.jinja, or in tokenizer_config.json); chats need an instruct model")
        return render

    def document(self, row: Row) -> tuple[list[int], list[int], int]:
        """Ids of a document, its separator last; for each the loss mask (chats only, else empty); and the bytes of its text. Raises
        ValueError where the row is none."""
        size = lambda text: len(text.encode("utf-8", "replace"))
        if "text" in row.fields:
            return self.tokenizer.document(row.fields["text"]), [], size(row.fields["text"])
        render = self.render
        try:
            messages = chat.messages_of(row.fields, answered=self.choice.chats)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'not {{"messages": [{{"role", "content"}}, ...]}} ({type(error).__name__}: {error})') from None
        try:
            ids, mask = chat.encode(messages, render, self.tokenizer)
        except Exception as error:  # a template is a program of somebody else's and may raise anything
            raise ValueError(f"the chat template of {self.tokenizer.folder} cannot write this ({plain(error) or type(error).__name__})") from None
        return [*ids, self.tokenizer.separator], [*mask, 0] if self.choice.chats else [], sum(size(m["content"]) for m in messages)

    def taken(self, row: Row) -> bool:
        """Whether the row's score is high enough. Raises ValueError where it has none."""
        score = row.fields.get("score")
        if self.choice.min_score is not None and not isinstance(score, (int, float)):
            raise ValueError('no number "score", which --min-score needs')
        return self.choice.min_score is None or score >= self.choice.min_score  # a NaN is not

    def write(self, number: int, unit: list[Part]) -> dict:
        """Unit -> its shards on disk, and what is in them: bytes of text, documents and tokens by side, a digest. Found if done before."""
        done = self.making / f"unit-{number:05d}.json"
        if done.exists():
            return read_json(done) | {"found": True}
        tokens, masks = {side: array("I") for side in SIDES}, {side: bytearray() for side in SIDES}
        account = {key: dict.fromkeys(SIDES, 0) for key in ("bytes", "documents", "tokens", "assistant")} | dict(skipped=0, inside=0)
        for part in unit:
            for row in read(part, self.columns):
                try:
                    if isinstance(row, Bad):
                        raise ValueError(row.reason)
                    if not self.taken(row):
                        continue
                    ids, mask, size = self.document(row)
                except ValueError as error:
                    if isinstance(error, Refusal):
                        raise
                    if not self.choice.skip_bad:
                        raise Refusal(f"{where(row.part, row.place)}: {error}; mend or drop it, or leave out such rows: data.py prepare --skip-bad") from None
                    account["skipped"] += 1
                    continue
                side = "val" if held_out(row.name) else "train"
                tokens[side].extend(ids)
                masks[side].extend(mask)
                account["bytes"][side] += size
                account["documents"][side] += 1
                account["inside"] += "messages" in row.fields and self.tokenizer.separator in ids[:-1]
        for side in SIDES:
            self.save(number, side, np.frombuffer(tokens[side], np.uint32), np.frombuffer(masks[side], np.uint8), account)
        write_whole(done, json.dumps(account))
        return account

    def save(self, number: int, side: str, tokens: np.ndarray, mask: np.ndarray, account: dict) -> None:
        tensors = {"tokens": tokens.astype(self.dtype)} | ({"mask": mask} if self.choice.chats else {})
        account["tokens"][side], account["assistant"][side] = len(tokens), int(mask.sum())
        account[f"digest_{side}"] = digest(tensors)
        path = self.making / f"{side}-{number:05d}.safetensors"
        if len(tokens):
            try:
                save_file(tensors, path.with_suffix(".tmp"), self.metadata | {"sha256": account[f"digest_{side}"]})
            except SafetensorError as error:
                raise OSError(f"{path}: cannot be written ({error}); is the disk full? The same command goes on from there") from None
            os.replace(path.with_suffix(".tmp"), path)

    def trim(self, number: int, account: dict, room: int) -> bool:
        """Cut the training shard of a unit to the documents that fit in `room` tokens; False where none does."""
        tensors = load_file(self.making / f"train-{number:05d}.safetensors")
        ends = np.flatnonzero(tensors["tokens"] == self.tokenizer.separator) + 1
        fitting = int(np.searchsorted(ends, room, "right"))
        if not fitting:
            return False
        end = int(ends[fitting - 1])
        account["documents"]["train"] = fitting
        account["bytes"]["train"] = round(account["bytes"]["train"] * end / account["tokens"]["train"])  # in proportion: the texts are not at hand
        self.save(number, "train", tensors["tokens"][:end], tensors.get("mask", np.empty(0, np.uint8))[:end], account)
        return True


def hire(folder: Path, making: Path, choice: Choice, now: datetime) -> None:
    """Begin a worker process: it has its own tokenizer, and ends with its parent, however that ends."""
    global scribe
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    scribe = Scribe(Tokenizer(folder), making, choice, now)


def toil(number: int, unit: list[Part]) -> dict:
    return scribe.write(number, unit)


@contextlib.contextmanager
def crew(workers: int, *equipment):
    """A function from units to their accounts, in order, done by that many processes. What they are at when this ends they finish."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), hire, equipment)
    main = threading.current_thread() is threading.main_thread()
    try:
        def accounts(units):
            usual = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None  # inherited by the workers, who begin with the first job
            jobs = [pool.submit(toil, k, unit) for k, unit in enumerate(units)]
            if main:
                signal.signal(signal.SIGINT, usual)
            yield from (job.result() for job in jobs)
        yield accounts
    except BrokenProcessPool:
        raise OSError("a worker process was killed (out of memory?); the same command, with fewer --workers, goes on where it stopped") from None
    finally:
        pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------ the whole


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
        raise Refusal(f"{tokenizer.folder}: no chat template (chat_template.jinja, or in tokenizer_config.json); chats need an instruct model")
    hub = source.startswith("hub:")
    stamp = json.dumps([FORMAT, tokenizer.fingerprint, [(path if hub else name, size, changed) for name, path, size, changed in files], template,
                        asdict(replace(choice, skip_bad=False))])  # what was done without --skip-bad had nothing to skip
    stamp = hashlib.sha256(stamp.encode()).hexdigest()[:12]
    name = re.sub(r"[@:].*", "", source.removeprefix("hub:")).replace("/", "-") if hub else Path(source).resolve().stem
    out = out or Path("tokens") / f"{name}-{stamp}"
    if not out.name:
        raise Refusal(f"--out {out}: name a folder that is to be made")
    making = out.with_name(f"{out.name}.making")
    if finished(out, stamp):
        return out
    with alone(making, quiet):
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
    if not (isinstance(summary.get("fingerprint"), str) and isinstance(counts, dict) and isinstance(assistant, dict) and all(type(counts.get(side)) is int for side in SIDES)):
        raise Refusal(f"{folder / 'tokens.json'}: not as `data.py prepare` writes it; prepare the data again")
    return summary


def fill(making: Path, source: str, files: list, tokenizer: Tokenizer, choice: Choice, begun: dict, workers: int | None, quiet: bool, out: Path) -> None:
    """All units of the source, or as many as the budget asks for, then the summary."""
    units = units_of(files)
    if choice.tokens:
        units = [units[k] for k in np.random.default_rng(choice.seed).permutation(len(units))]
    sizes = [sum(part.end - part.begin for part in unit) for unit in units]
    now = datetime.fromisoformat(begun["date"])
    own = Scribe(tokenizer, making, choice, now)
    workers = min(workers or max(1, min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), len(units) // 4)), len(units))
    accounts: list[dict] = []
    clock = told = time.monotonic()
    both = lambda key: {side: sum(a[key][side] for a in accounts) for side in SIDES}
    speed = lambda: sum(sum(a["tokens"].values()) for a in accounts if "found" not in a) / max(time.monotonic() - clock, 1e-9)  # of what was done now
    with crew(workers, tokenizer.folder, making, choice, now) if workers > 1 else contextlib.nullcontext(lambda units: (own.write(*job) for job in enumerate(units))) as write:
        for account in write(units):
            accounts.append(account)
            total = both("tokens")["train"]
            if choice.tokens and total >= choice.tokens:
                if not own.trim(len(accounts) - 1, account, account["tokens"]["train"] - (total - choice.tokens)):
                    accounts.pop()
                break
            if not quiet and time.monotonic() - told > (1 if sys.stderr.isatty() else 30):
                told = time.monotonic()
                share = total / choice.tokens if choice.tokens else sum(sizes[:len(accounts)]) / sum(sizes)
                fresh = sum(size for size, a in zip(sizes, accounts) if "found" not in a) / sum(sizes[:len(accounts)])
                left = f"{(told - clock) / fresh * (1 / share - 1) / 60:.0f} min" if share and fresh else "?"
                print(f"tokenising {source}: {share:.1%}, {total:,} training tokens, {speed():,.0f} tokens/s, left {left}",
                      end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    if not any(both("bytes").values()):
        for path in making.glob("*-*"):  # there is nothing in them to go on from
            path.unlink()
        raise Refusal(f"data {source!r}: {'its first document has more than the --tokens asked for' if choice.tokens else 'no document in it that has text'}")
    summary = dict(source=source, files=len(files), bytes=sum(both("bytes").values()), documents=both("documents"), tokens=both("tokens"),
                   fingerprint=hashlib.sha256("".join(a["digest_train"] + a["digest_val"] for a in accounts).encode()).hexdigest()[:16],
                   skipped=sum(a["skipped"] for a in accounts), separator_inside=sum(a["inside"] for a in accounts), choice=asdict(choice), **begun, **own.metadata)
    if choice.chats:
        summary["assistant"] = both("assistant")
    if source.startswith("hub:"):
        summary["commit"] = re.search(r"@([^/]+)/", files[0][1]).group(1)
    if source == "stdlib":
        summary["python"] = sys.version.split()[0]
    for path in making.glob("*-*"):
        if path.suffix != ".safetensors" or int(path.stem.partition("-")[2]) >= len(accounts):
            path.unlink()  # the accounts are summed up; shards beyond the budget are not part of it
    write_whole(making / "tokens.json", json.dumps(summary, indent=2) + "\n")
    if not quiet:
        tell(summary, out, speed(), workers)


def tell(summary: dict, out: Path, speed: float, workers: int) -> None:
    count, documents = summary["tokens"], summary["documents"]
    print(f"data: {summary['source']}: {summary['files']} files, {summary['bytes'] / 1e6:.1f} MB -> {count['train']:,} training and {count['val']:,} "
          f"held-out tokens in {out} (fingerprint {summary['fingerprint']})\n"
          f"      {documents['train']:,} + {documents['val']:,} documents, {summary['bytes'] / sum(count.values()):.2f} bytes a token, {speed:,.0f} tokens/s on "
          f"{workers} core{'s' * (workers > 1)}" + (f", {summary['skipped']:,} rows left out" if summary["skipped"] else "")
          + (f"\n      less than the {summary['choice']['tokens']:,} asked for: that is all there is" if count["train"] < 0.9 * summary["choice"]["tokens"] else ""))


@contextlib.contextmanager
def alone(making: Path, quiet: bool):
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
