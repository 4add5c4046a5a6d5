"""Preparing: a source becomes a folder of token shards, on all cores; what was interrupted goes on where it stopped.

    python data.py prepare stdlib --tokenizer tiny
    python data.py prepare hub:HuggingFaceFW/fineweb-edu --min-score 4 --tokens 10e9 --tokenizer llama3.2-3b --out tokens/fineweb-edu
    python data.py prepare hub:teknium/OpenHermes-2.5 --tokenizer llama3.2-3b --out tokens/openhermes      # chats, in the model's own template
    python data.py prepare chats.jsonl --chats --tokenizer RUN/student                                      # for train.py --stage sft

Each unit of the source (sources.cut) becomes a shard of the training documents and one of the held-out ones. A document ends with the
tokenizer's separator, which no text can hold, so that a reader of the shards knows where documents end. One in HELD_OUT_EVERY, chosen by the
hash of its name or else of its text, is held out: a document keeps its side when others come and go. With a budget (--tokens) the
units are taken in an order shuffled by the seed, until it is reached: a sample of the whole source, not its beginning.

A shard is a safetensors file: "tokens", and for chats "mask", 1 where the loss falls. The header states dtype and shape, its metadata
FORMAT, the vocabulary and the tokenizer's fingerprint, so that ids of another tokenizer, or 128k ids in 16 bits, are refused, not trained on.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from array import array
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import chat
from sources import Part, Row, cut, read, source_files
from teachers import Refusal, read_json
from tokenizer import Tokenizer

FORMAT = "lrc-tokens 1"  # what the files are, and the version of their layout
HELD_OUT_EVERY = 20


@dataclass(frozen=True)
class Choice:
    """What is taken of a source, and how."""
    chats: bool = False           # chats only, with a loss mask
    column: str = "text"
    min_score: float | None = None
    tokens: int = 0               # training tokens to stop at; 0: all there are
    seed: int = 1234              # of the order in which units are taken, with `tokens`
    skip_bad: bool = False        # leave out rows that cannot be read or rendered


def held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8], 16) % HELD_OUT_EVERY == 0


# ------------------------------------------------------------------------------------- one unit of work


class Scribe:
    """Turns units into shards. Each worker process makes its own, from what can be sent to it."""

    def __init__(self, tokenizer: Tokenizer, making: Path, choice: Choice, now: datetime):
        self.tokenizer, self.making, self.choice = tokenizer, making, choice
        self.render = chat.renderer_of(tokenizer.folder, now)
        self.dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        self.metadata = {"format": FORMAT, "vocab_size": str(tokenizer.vocab_size), "tokenizer": tokenizer.fingerprint}

    def document(self, row: Row) -> tuple[list[int], list[int], int]:
        """Ids of a document, its separator last; for each the loss mask (chats only, else empty); and the bytes of its text."""
        size = lambda text: len(text.encode("utf-8", "replace"))
        if "text" in row.fields and not self.choice.chats:
            return self.tokenizer.document(row.fields["text"]), [], size(row.fields["text"])
        if self.render is None:
            raise Refusal(f"{self.tokenizer.folder}: no chat template (chat_template.jinja, or in tokenizer_config.json); chats need an instruct model")
        try:
            messages = chat.messages_of(row.fields, answered=self.choice.chats)
        except (ValueError, KeyError, TypeError) as error:
            raise Refusal(f'{row.where()}: not {{"messages": [{{"role", "content"}}, ...]}} ({type(error).__name__}: {error}); mend or drop it, or --skip-bad') from None
        try:
            ids, mask = chat.encode(messages, self.render, self.tokenizer)
        except Exception as error:  # a template is a program of somebody else's and may raise anything
            reason = " ".join(str(error).split())
            raise Refusal(f"{row.where()}: the chat template of {self.tokenizer.folder} cannot write this ({reason}); mend or drop it, or --skip-bad") from None
        return [*ids, self.tokenizer.separator], [*mask, 0] if self.choice.chats else [], sum(size(m["content"]) for m in messages)

    def write(self, number: int, unit: list[Part]) -> dict:
        """Unit -> its shards on disk, and what is in them: bytes of text, documents and tokens by side, a digest. Found if done before."""
        done = self.making / f"unit-{number:05d}.json"
        if done.exists():
            return read_json(done)
        tokens, masks = {side: array("I") for side in ("train", "val")}, {side: bytearray() for side in ("train", "val")}
        account = dict(bytes=0, documents=dict(train=0, val=0), tokens=dict(train=0, val=0), assistant=dict(train=0, val=0), skipped=0)
        for part in unit:
            for row in read(part, self.choice.column, self.choice.skip_bad):
                if row is None:
                    account["skipped"] += 1
                    continue
                if self.choice.min_score is not None:
                    if not isinstance(row.fields.get("score"), (int, float)):
                        raise Refusal(f"{row.where()}: --min-score needs a number \"score\" in each row")
                    if row.fields["score"] < self.choice.min_score:
                        continue
                try:
                    ids, mask, size = self.document(row)
                except Refusal:
                    if not self.choice.skip_bad:
                        raise
                    account["skipped"] += 1
                    continue
                side = "val" if held_out(row.name) else "train"
                tokens[side].extend(ids)
                masks[side].extend(mask)
                account["bytes"] += size
                account["documents"][side] += 1
        for side in tokens:
            self.save(number, side, np.frombuffer(tokens[side], np.uint32), np.frombuffer(masks[side], np.uint8), account)
        write_whole(done, json.dumps(account))
        return account

    def save(self, number: int, side: str, tokens: np.ndarray, mask: np.ndarray, account: dict) -> None:
        tensors = {"tokens": tokens.astype(self.dtype)} | ({"mask": mask} if self.choice.chats else {})
        account["tokens"][side], account["assistant"][side] = len(tokens), int(mask.sum())
        account[f"digest_{side}"] = hashlib.sha256(b"".join(t.tobytes() for t in tensors.values())).hexdigest()
        path = self.making / f"{side}-{number:05d}.safetensors"
        if len(tokens):
            save_file(tensors, path.with_suffix(".tmp"), self.metadata)
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
        account["bytes"] = round(account["bytes"] * end / account["tokens"]["train"])  # in proportion: the texts are not at hand
        self.save(number, "train", tensors["tokens"][:end], tensors.get("mask", np.empty(0, np.uint8))[:end], account)
        return True


def write_whole(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text, encoding="utf-8")
    os.replace(path.with_suffix(".tmp"), path)


def hire(folder: Path, making: Path, choice: Choice, now: datetime) -> None:
    """Begin a worker process: it has its own tokenizer, and leaves Ctrl-C to its parent."""
    global scribe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    scribe = Scribe(Tokenizer(folder), making, choice, now)


def toil(job: tuple[int, list[Part]]) -> dict:
    return scribe.write(*job)


# ------------------------------------------------------------------------------------------ the whole


def prepare(source: str, tokenizer: Tokenizer, out: Path | None = None, quiet: bool = False, choice: Choice = Choice(),
            workers: int | None = None) -> Path:
    """Tokenise `source` into a folder of shards, or find the folder where the same was tokenised before.

    A chat template may write the date: tokens.json states which. Raises Refusal: nothing to read, a row that cannot be read (with its
    line), a folder that holds something else. Stopped in any other way, the same call goes on where it was.
    """
    if (Path(source) / "tokens.json").exists():
        if choice.chats and not any(read_json(Path(source) / "tokens.json").get("assistant", {}).values()):
            raise Refusal(f"{source}: holds documents, not chats; prepare the chats with --chats")
        return Path(source)
    files = [file for file in source_files(source) if not choice.chats or file[1].endswith((".jsonl", ".parquet"))]
    if not files:
        raise Refusal(f'data {source!r}: no .jsonl or .parquet file in it; chats are {{"messages": [{{"role", "content"}}, ...]}} a row')
    template = chat.read_template(tokenizer.folder)
    if choice.chats and template is None:
        raise Refusal(f"{tokenizer.folder}: no chat template (chat_template.jinja, or in tokenizer_config.json); chats need an instruct model")
    stamp = json.dumps([FORMAT, tokenizer.fingerprint, [(name, size, changed) for name, _, size, changed in files], template, asdict(choice)])
    stamp = hashlib.sha256(stamp.encode()).hexdigest()[:12]
    name = source.removeprefix("hub:").partition("@")[0].replace("/", "-").replace(":", "-") if source.startswith("hub:") else Path(source).stem
    out = out or Path("tokens") / f"{name}-{stamp}"
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
            shutil.rmtree(making)
            raise
        (making / "begun.json").unlink()
        (making / ".lock").unlink()
        os.rename(making, out)
    return out


def finished(out: Path, stamp: str) -> bool:
    if (out / "tokens.json").exists():
        if read_json(out / "tokens.json").get("stamp") != stamp:
            raise Refusal(f"{out}: holds the tokens of other files, other options or another tokenizer; give another --out or delete it")
        return True
    if out.exists():
        raise Refusal(f"{out}: exists and is not a token folder; give another --out")
    return False


def fill(making: Path, source: str, files: list, tokenizer: Tokenizer, choice: Choice, begun: dict, workers: int | None, quiet: bool, out: Path) -> None:
    """All units of the source, or as many as the budget asks for, then the summary."""
    units = cut(files)
    if choice.tokens:
        units = [units[k] for k in np.random.default_rng(choice.seed).permutation(len(units))]
    sizes = [sum(part.end - part.begin for part in unit) for unit in units]
    now = datetime.fromisoformat(begun["date"])
    own = Scribe(tokenizer, making, choice, now)
    workers = workers or max(1, min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), len(units) // 4))
    accounts: list[dict] = []
    clock = told = time.monotonic()
    with contextlib.ExitStack() as stack:
        if workers > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(workers, hire, (tokenizer.folder, making, choice, now)))
            results = pool.imap(toil, enumerate(units))
        else:
            results = (own.write(k, unit) for k, unit in enumerate(units))
        for account in results:
            accounts.append(account)
            total = sum(a["tokens"]["train"] for a in accounts)
            if choice.tokens and total >= choice.tokens:
                if not own.trim(len(accounts) - 1, account, account["tokens"]["train"] - (total - choice.tokens)):
                    accounts.pop()
                break
            if not quiet and time.monotonic() - told > (1 if sys.stderr.isatty() else 30):
                told = time.monotonic()
                share = total / choice.tokens if choice.tokens else sum(sizes[:len(accounts)]) / sum(sizes)
                print(f"tokenising {source}: {share:.1%}, {total:,} training tokens, {total / (told - clock):,.0f} tokens/s, "
                      f"left {(told - clock) * (1 / share - 1) / 60:.0f} min", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    for path in making.glob("*-*"):
        if path.suffix != ".safetensors" or int(path.stem.partition("-")[2]) >= len(accounts):
            path.unlink()  # the accounts are summed below; shards beyond the budget are not part of it
    both = lambda key: {side: sum(a[key][side] for a in accounts) for side in ("train", "val")}
    summary = dict(source=source, files=len(files), bytes=sum(a["bytes"] for a in accounts), documents=both("documents"), tokens=both("tokens"),
                   fingerprint=hashlib.sha256("".join(a["digest_train"] + a["digest_val"] for a in accounts).encode()).hexdigest()[:16],
                   skipped=sum(a["skipped"] for a in accounts), choice=asdict(choice), **begun, **own.metadata)
    if choice.chats:
        summary["assistant"] = both("assistant")
    if source == "stdlib":
        summary["python"] = sys.version.split()[0]
    write_whole(making / "tokens.json", json.dumps(summary, indent=2) + "\n")
    if not quiet:
        tell(summary, out, time.monotonic() - clock, workers)


def tell(summary: dict, out: Path, seconds: float, workers: int) -> None:
    count, documents = summary["tokens"], summary["documents"]
    total = sum(count.values())
    print(f"data: {summary['source']}: {summary['files']} files, {summary['bytes'] / 1e6:.1f} MB -> {count['train']:,} training and {count['val']:,} "
          f"held-out tokens in {out} (fingerprint {summary['fingerprint']})\n"
          f"      {documents['train']:,} + {documents['val']:,} documents, {summary['bytes'] / max(total, 1):.2f} bytes a token, {total / seconds:,.0f} tokens/s on "
          f"{workers} core{'s' * (workers > 1)}" + (f", {summary['skipped']:,} rows left out" if summary["skipped"] else ""))


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
