"""Tokens: text becomes ids, ids become shards on disk, shards become batches that resume exactly.

    python data.py prepare stdlib --tokenizer tiny            # the standard library of this Python
    python data.py prepare my.jsonl --tokenizer FOLDER --out tokens/mine
    python data.py tokenizer --vocab 2048 --out tiny          # how tiny's own BPE was made

A source is `stdlib`, a .txt, .md, .py or .jsonl file ({"text": ...} a line), or a folder of such files. Every 20th document,
chosen by the hash of its name, is held out: a file keeps its side when others come and go. Documents
are joined end to end with the tokenizer's separator and cut to the sequence length; attention is not
stopped at a document's end (teacher and student see the same stream).

A shard is a safetensors file: its header states dtype and shape, and in its metadata the vocabulary and the
tokenizer's fingerprint, so that ids of another tokenizer, or 128k ids in 16 bits, are refused instead of trained on.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from distill import IGNORE
from teachers import Refusal, read_json
from tokenizer import Tokenizer, train_tokenizer

SHARD_TOKENS = 1 << 26
HELD_OUT_EVERY = 20

# -------------------------------------------------------------------------------------------- sources


def source_files(source: str) -> list[tuple[str, Path]]:
    """(name, path) of every file of a source, sorted by name."""
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        found = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    else:
        root = Path(source)
        if not root.exists():
            raise Refusal(f"data {source!r}: no such file or folder, and not `stdlib`")
        found = [root] if root.is_file() else [p for p in root.rglob("*") if p.is_file()]
        found = [p for p in found if p.suffix in (".txt", ".md", ".py", ".jsonl")]
        root = root.parent if root.is_file() else root
    if not found:
        raise Refusal(f"data {source!r}: no .txt, .md, .py or .jsonl file in it")
    return sorted((p.relative_to(root).as_posix(), p) for p in found)


def documents(source: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each document. A .jsonl line is one, a .py or .md file is one, a .txt file is cut at blank lines every 4 kB."""
    for name, path in source_files(source):
        try:
            with path.open(encoding="utf-8", errors="strict" if path.suffix == ".jsonl" else "replace") as lines:
                if path.suffix == ".jsonl":
                    for number, line in enumerate(lines, 1):
                        row = json.loads(line)
                        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                            raise TypeError(f"line {number}")
                        yield str(row.get("id") or row.get("title") or f"{name}:{number}"), row["text"]
                elif path.suffix == ".txt":
                    piece, size, count = [], 0, 0
                    for line in lines:
                        piece.append(line)
                        size += len(line)
                        if size > 4096 and not line.strip():
                            yield f"{name}:{count}", "".join(piece)
                            piece, size, count = [], 0, count + 1
                    if piece:
                        yield f"{name}:{count}", "".join(piece)
                else:
                    yield name, lines.read()
        except (ValueError, KeyError, TypeError) as error:
            raise Refusal(f'{path}: a .jsonl line must be an object with a "text" ({type(error).__name__}: {error})') from None


def held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8], 16) % HELD_OUT_EVERY == 0


# --------------------------------------------------------------------------------------------- shards


def prepare(source: str, tokenizer: Tokenizer, out: Path | None = None, quiet: bool = False) -> Path:
    """Tokenise `source` into a folder of shards, or find the folder where the same files were tokenised before."""
    if (Path(source) / "tokens.json").exists():
        return Path(source)
    rows = (("val" if held_out(name) else "train", len(text.encode("utf-8", "replace")), {"tokens": tokenizer.document(text)})
            for name, text in documents(source))
    return write_shards(source, source_files(source), rows, tokenizer, out, quiet)


def write_shards(source: str, files: list[tuple[str, Path]], rows: Iterator[tuple[str, int, dict[str, list[int]]]], tokenizer: Tokenizer,
                 out: Path | None = None, quiet: bool = False, also: tuple = (), facts: dict | None = None) -> Path:
    """Rows of (split, bytes of text, tensors) -> their folder of shards, found if it exists and then no row is read.

    The tensors of a row are equally long: "tokens", and for chat a "mask" of 0 and 1. `also` is what the rows depend on besides
    the files and the tokenizer; `facts` join the summary when the last row has been read, so that rows may count into them.
    """
    stamp = json.dumps([tokenizer.fingerprint, [(n, p.stat().st_size, p.stat().st_mtime_ns) for n, p in files], *also])
    stamp = hashlib.sha256(stamp.encode()).hexdigest()[:12]
    out = out or Path("tokens") / f"{Path(source).stem}-{stamp}"
    if (out / "tokens.json").exists():
        if read_json(out / "tokens.json").get("stamp") != stamp:
            raise Refusal(f"{out}: holds the tokens of other files or another tokenizer; give another --out or delete it")
        return out
    making = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    buffers, counts, digest = {"train": [], "val": []}, {"train": 0, "val": 0}, hashlib.sha256()
    metadata = {"vocab_size": str(tokenizer.vocab_size), "tokenizer": tokenizer.fingerprint}
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    bytes_read, waiting = 0, {"train": 0, "val": 0}

    def flush(split):
        if buffers[split]:
            tensors = {name: np.concatenate([row[name] for row in buffers[split]]) for name in buffers[split][0]}
            for tensor in tensors.values():
                digest.update(tensor.tobytes())
            save_file(tensors, making / f"{split}-{counts[split] // SHARD_TOKENS:05d}.safetensors", metadata)
            counts[split], buffers[split], waiting[split] = counts[split] + waiting[split], [], 0

    try:
        for split, size, tensors in rows:
            buffers[split].append({name: np.array(row, dtype if name == "tokens" else np.uint8) for name, row in tensors.items()})
            waiting[split] += len(tensors["tokens"])
            bytes_read += size
            if waiting[split] >= SHARD_TOKENS:
                flush(split)
            if not quiet and sys.stderr.isatty():
                print(f"\rtokenising {source}: {bytes_read / 1e6:.1f} MB", end="", file=sys.stderr)
        for split in buffers:
            flush(split)
        summary = dict(source=source, stamp=stamp, files=len(files), bytes=bytes_read, tokens=counts,
                       fingerprint=digest.hexdigest()[:16], **metadata, **(facts or {}),
                       python=sys.version.split()[0] if source == "stdlib" else None)
        (making / "tokens.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        try:
            os.rename(making, out)
        except OSError:  # another process finished the same work first
            if not (out / "tokens.json").exists():
                raise Refusal(f"{out}: exists and is not a token folder; give another --out") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    if not quiet:
        print(f"\rdata: {source}: {len(files)} files, {bytes_read / 1e6:.1f} MB -> {counts['train']:,} training and "
              f"{counts['val']:,} held-out tokens in {out} (fingerprint {summary['fingerprint']})")
    return out


def place_in_order(step: int, micro: int, rank: int, accum: int, world: int, batch_size: int) -> int:
    """The first read of a micro-batch: step by step, micro-batch by micro-batch, rank by rank, so that 2 ranks x 1 read what 1 x 2 do."""
    return ((step * accum + micro) * world + rank) * batch_size


class Tokens:
    """Windows of seq_len + 1 tokens over one split of a prepared folder; window i of epoch e is fixed by the seed alone."""

    def __init__(self, folder: Path, split: str, seq_len: int, tokenizer: Tokenizer | None = None, seed: int = 0):
        self.seq_len, self.seed = seq_len, seed
        self.shards, self.total = [], 0  # (first token's place in the stream, the one after the last, file, views)
        for file in sorted(Path(folder).glob(f"{split}-*.safetensors")):
            try:
                opened = safe_open(file, framework="np")
                names = {"tokens"} | ({"mask"} & set(opened.keys()))  # chat has a mask: 1 where the loss falls
                meta, views = opened.metadata() or {}, {name: opened.get_slice(name) for name in names}
                view = views["tokens"]
            except (SafetensorError, OSError) as error:
                raise Refusal(f"{file}: cannot be read as a token shard ({error}); prepare the data again") from None
            if view.get_dtype() not in ("U16", "U32") or not meta.keys() >= {"tokenizer", "vocab_size"}:
                raise Refusal(f"{file}: not a token shard (dtype {view.get_dtype()}, metadata {sorted(meta)}); prepare the data again")
            if tokenizer is not None and meta["tokenizer"] != tokenizer.fingerprint:
                raise Refusal(f"{file}: made with tokenizer {meta['tokenizer']}, the teacher's is {tokenizer.fingerprint}; "
                              "prepare the data again with the teacher's folder")
            if view.get_dtype() == "U16" and int(meta["vocab_size"]) > 1 << 16:
                raise Refusal(f"{file}: 16-bit ids cannot hold a vocabulary of {meta['vocab_size']}; prepare the data again")
            size = view.get_shape()[0]
            if "mask" in views and (views["mask"].get_dtype() != "U8" or views["mask"].get_shape() != [size]):
                raise Refusal(f"{file}: its mask is not one U8 for each of the {size} tokens; prepare the data again")
            self.shards.append((self.total, self.total + size, opened, views))  # views read from disk, window by window
            self.total += size
        if len({"mask" in views for *_, views in self.shards}) > 1:
            raise Refusal(f"{folder}: {split} shards with a loss mask and without one; prepare the data again")
        if not len(self):
            raise Refusal(f"{folder}: the {split} split has {self.total} tokens, a window takes {seq_len + 1}; give more documents "
                          f"(every {HELD_OUT_EVERY}th is held out) or a smaller --seq-len")
        self.epoch, self.order = -1, None

    def __len__(self) -> int:
        return max(0, self.total - 1) // self.seq_len

    def window(self, i: int, name: str = "tokens") -> Tensor:
        """(seq_len + 1,) int64: inputs are [:-1], targets [1:]. A window may lie across shards."""
        begin, end = i * self.seq_len, (i + 1) * self.seq_len + 1
        parts = [views[name][max(0, begin - first):min(end, last) - first] for first, last, _, views in self.shards if first < end and begin < last]
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def pair(self, i: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (seq_len,) of window i. In chat a target that is not the assistant's is IGNORE."""
        ids = self.window(i)
        targets = ids[1:] if "mask" not in self.shards[0][3] else ids[1:].where(self.window(i, "mask")[1:] == 1, IGNORE)
        return ids[:-1], targets

    def shuffled(self, position: int) -> int:
        """The window that the position-th read of the run takes: a fresh permutation an epoch, no state to save."""
        epoch, place = divmod(position, len(self))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self))
        return int(self.order[place])

    def batch(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (count, seq_len) of reads position .. position + count - 1."""
        inputs, targets = zip(*(self.pair(self.shuffled(position + k)) for k in range(count)))
        return torch.stack(inputs), torch.stack(targets)

    def spread(self, count: int, together: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Up to `count` windows evenly spread over the split, in order, `together` at a time: for evaluation and calibration."""
        chosen = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(int))
        for k in range(0, len(chosen), together):
            inputs, targets = zip(*(self.pair(int(i)) for i in chosen[k:k + together]))
            yield torch.stack(inputs), torch.stack(targets)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="text -> token shards")
    p.add_argument("source", help="stdlib, a .txt/.md/.py/.jsonl file, or a folder of such files")
    p.add_argument("--tokenizer", default="tiny", help="folder with the teacher's tokenizer.json (default: tiny)")
    p.add_argument("--out", type=Path, help="folder to write (default: tokens/NAME-STAMP)")
    t = commands.add_parser("tokenizer", help="train a byte-level BPE (needs the `tokenizers` package)")
    t.add_argument("--source", default="stdlib")
    t.add_argument("--vocab", type=int, default=2048)
    t.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        if args.command == "prepare":
            print(prepare(args.source, Tokenizer(args.tokenizer), args.out))
        else:
            train_tokenizer((text for name, text in documents(args.source) if not held_out(name)), args.vocab, args.out)
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
