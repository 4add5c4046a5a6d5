"""Token shards: rows of a source become ids on the disk, a unit at a time, in as many processes as there are cores.

A shard is a safetensors file: "tokens", and for chats "mask", 1 where the loss falls. The header states dtype and shape, its metadata
FORMAT, the vocabulary, the tokenizer's fingerprint and a digest, so that ids of another tokenizer, 128k ids in 16 bits, or a file that a
disk or a copy has damaged are refused, not trained on. A document ends with the tokenizer's separator, which no text can hold, so that a
reader knows where documents end (a chat template could write it: such chats are counted). One in HELD_OUT_EVERY, chosen by the hash of its
name or else of its text, is held out: a document keeps its side when others come and go.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from array import array
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import chat
from files import Refusal, one_line, read_json, write_whole
from sources import CHAT_COLUMNS, Bad, Part, Row, read, where
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


class ShardWriter:
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
            raise Refusal(f"{self.tokenizer.folder}: no chat template (chat_template.jinja, or in tokenizer_config.json); "
                          "chats need an instruct model")
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
            reason = one_line(error) or type(error).__name__
            raise ValueError(f"the chat template of {self.tokenizer.folder} cannot write this ({reason})") from None
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
                        raise Refusal(f"{where(row.part, row.place)}: {error}; mend or drop it, or leave out such rows: "
                                      "data.py prepare --skip-bad") from None
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
        # in proportion: the texts are not at hand
        account["bytes"]["train"] = round(account["bytes"]["train"] * end / account["tokens"]["train"])
        self.save(number, "train", tensors["tokens"][:end], tensors.get("mask", np.empty(0, np.uint8))[:end], account)
        return True


def begin_worker(folder: Path, making: Path, choice: Choice, now: datetime) -> None:
    """Begin a worker process: it has its own tokenizer, and ends with its parent, however that ends."""
    global writer
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    writer = ShardWriter(Tokenizer(folder), making, choice, now)


def write_unit(number: int, unit: list[Part]) -> dict:
    return writer.write(number, unit)


@contextlib.contextmanager
def worker_pool(workers: int, *equipment):
    """A function from units to their accounts, in order, done by that many processes. What they are at when this ends they finish."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), begin_worker, equipment)
    main = threading.current_thread() is threading.main_thread()
    try:
        def accounts(units):
            usual = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None  # inherited by the workers, who begin with the first job
            jobs = [pool.submit(write_unit, k, unit) for k, unit in enumerate(units)]
            if main:
                signal.signal(signal.SIGINT, usual)
            yield from (job.result() for job in jobs)
        yield accounts
    except BrokenProcessPool:
        raise OSError("a worker process was killed (out of memory?); the same command, with fewer --workers, goes on "
                      "where it stopped") from None
    finally:
        pool.shutdown(cancel_futures=True)
