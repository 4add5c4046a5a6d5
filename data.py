"""Tokens: shards on disk become batches that resume exactly.

    python data.py prepare SOURCE --tokenizer TEACHER [--out FOLDER]        # text or chats -> token shards, on all cores (prepare.py)
    python data.py tokenizer --vocab 2048 --out FOLDER                        # a BPE of one's own, as tiny's was made

Documents lie end to end in the shards, each closed by the tokenizer's separator, and are cut into windows of the sequence length. Every
epoch visits each window once, in an order of its own that follows from the seed and the epoch alone: the n-th read of a run is the same
window on any number of ranks, and a resumed run needs no more state than its step. Several folders are mixed by weight the same way.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distill import IGNORE
from files import Refusal, any_letter_shows
from prepare import prepare, read_summary
from shards import FORMAT, HELD_OUT_EVERY, Choice, digest, held_out
from sources import Bad, read, source_files, units_of, where
from teachers import TOKENIZER, resolve
from tokenizer import Tokenizer, train_tokenizer


def place_in_order(step: int, micro: int, rank: int, accum: int, world: int, batch_size: int) -> int:
    """The first read of a micro-batch: step by step, micro-batch by micro-batch, rank by rank, so that 2 ranks x 1 read what 1 x 2 do."""
    return ((step * accum + micro) * world + rank) * batch_size


class Tokens:
    """Windows of seq_len + 1 tokens over one split of a prepared folder; window i of epoch e is fixed by the seed alone."""

    def __init__(self, folder: Path, split: str, seq_len: int, tokenizer: Tokenizer | None = None, seed: int = 0):
        self.seq_len, self.seed = seq_len, seed
        self.shards, self.total = [], 0  # (first token's place in the stream, the one after the last, file, views)
        folder = Path(folder)
        for file in sorted(folder.glob(f"{split}-*.safetensors")):
            try:
                opened, views = open_shard(file, tokenizer)
            except (SafetensorError, OSError) as error:
                raise Refusal(f"{file}: cannot be read as a token shard ({error}); prepare the data again") from None
            except Refusal as refusal:
                raise Refusal(f"{file}: {refusal}; prepare the data again") from None
            size = views["tokens"].get_shape()[0]
            self.shards.append((self.total, self.total + size, opened, views))  # views read from disk, window by window
            self.total += size
        if len({"mask" in views for *_, views in self.shards}) > 1:
            raise Refusal(f"{folder}: {split} shards with a loss mask and without one; prepare the data again")
        told = read_summary(folder)["tokens"][split] if (folder / "tokens.json").exists() else self.total
        if self.total != told:
            raise Refusal(f"{folder}: its {split} shards hold {self.total:,} tokens, tokens.json says {told:,}; prepare the data again")
        if not len(self):
            raise Refusal(f"{folder}: the {split} split has {self.total} tokens, a window takes {seq_len + 1}; give more documents "
                          f"(every {HELD_OUT_EVERY}th is held out) or a smaller --seq-len")
        self.epoch, self.order = -1, None

    def __len__(self) -> int:
        return max(0, self.total - 1) // self.seq_len

    def window(self, i: int, name: str = "tokens") -> Tensor:
        """(seq_len + 1,) int64: inputs are [:-1], targets [1:]. A window may lie across shards."""
        begin, end = i * self.seq_len, (i + 1) * self.seq_len + 1
        parts = []
        for first, last, _, views in self.shards:
            if first < end and begin < last:
                parts.append(views[name][max(0, begin - first):min(end, last) - first])
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


def open_shard(file: Path, tokenizer: Tokenizer | None) -> tuple[safe_open, dict]:
    """A shard's file and its tensors, not yet in memory: "tokens", and for chats "mask", 1 where the loss falls. All of it is read once, to
    check it. Raises Refusal for what is no shard, was made for something else, or is not as it was written."""
    opened = safe_open(file, framework="np")
    meta, views = opened.metadata() or {}, {name: opened.get_slice(name) for name in opened.keys()}
    kinds = {name: view.get_dtype() for name, view in views.items()}
    if kinds.get("tokens") not in ("U16", "U32") or len(views["tokens"].get_shape()) != 1 or not kinds.keys() <= {"tokens", "mask"} \
            or not meta.keys() >= {"tokenizer", "vocab_size"} or not re.fullmatch("[0-9]{1,10}", meta["vocab_size"]):
        raise Refusal(f"not a token shard (it holds {kinds}, metadata {sorted(meta)})")
    if meta.get("format") != FORMAT:
        raise Refusal(f"its format is {meta.get('format')}, this code reads {FORMAT}")
    if tokenizer is not None and meta["tokenizer"] != tokenizer.fingerprint:
        raise Refusal(f"made with tokenizer {meta['tokenizer']}, the teacher's is {tokenizer.fingerprint}: it takes the teacher's folder")
    if kinds["tokens"] == "U16" and int(meta["vocab_size"]) > 1 << 16:
        raise Refusal(f"16-bit ids cannot hold a vocabulary of {meta['vocab_size']}")
    if tokenizer is not None and int(meta["vocab_size"]) != tokenizer.vocab_size:
        raise Refusal(f"made with {meta['vocab_size']} tokens, the teacher's tokenizer has {tokenizer.vocab_size}")
    size = views["tokens"].get_shape()
    if "mask" in views and (kinds["mask"] != "U8" or views["mask"].get_shape() != size):
        raise Refusal(f"its mask is not one U8 for each of the {size[0]} tokens")
    whole = {name: opened.get_tensor(name) for name in views}
    if digest(whole) != meta.get("sha256"):
        raise Refusal("its tokens are not those that were written: damaged on the disk or on the way")
    if size[0] and (most := int(whole["tokens"].max())) >= int(meta["vocab_size"]):
        raise Refusal(f"it holds the id {most}, its vocabulary only {meta['vocab_size']} tokens")
    return opened, views


class Mixture:
    """Several prepared folders read in fixed proportions: in each PERIOD of reads folder k has its share of the weights, to the nearest
    whole window, at places shuffled by the seed and the period; within the folder its reads follow on, epoch after epoch (Tokens)."""

    PERIOD = 1024

    def __init__(self, parts: list[Tokens], weights: list[float], seed: int = 0):
        self.parts, self.seed, self.period = parts, seed, -1
        shares = np.array(weights) / sum(weights) * self.PERIOD
        self.counts = np.floor(shares).astype(int)
        for k in np.argsort(self.counts - shares, kind="stable")[:self.PERIOD - self.counts.sum()]:  # largest remainders
            self.counts[k] += 1
        if not self.counts.all():
            raise Refusal(f"data weights {weights}: the smallest is less than 1 in {self.PERIOD}; leave that folder out or give it more")

    def find(self, position: int) -> tuple[Tokens, int]:
        """(folder, its own position) of the position-th read of the run."""
        period, place = divmod(position, self.PERIOD)
        if period != self.period:
            order = np.repeat(np.arange(len(self.parts)), self.counts)
            self.period, self.order = period, np.random.default_rng([self.seed, period]).permutation(order)
        k = self.order[place]
        return self.parts[k], period * int(self.counts[k]) + int((self.order[:place] == k).sum())

    def batch(self, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (count, seq_len) of reads position .. position + count - 1."""
        found = (self.find(position + i) for i in range(count))
        inputs, targets = zip(*(part.batch(own, 1) for part, own in found))
        return torch.cat(inputs), torch.cat(targets)

    def spread(self, count: int, together: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """About `count` windows, of each folder its share, evenly spread; at least one of each."""
        for part, share in zip(self.parts, self.counts / self.PERIOD):
            yield from part.spread(max(1, round(count * share)), together)


def prepared(data: str, tokenizer: Tokenizer, quiet: bool = False, choice: Choice = Choice()) -> tuple[list[Path], list[float]]:
    """`--data` -> its folders of shards and their weights. One source of any kind, or prepared folders: "tokens/a=10,tokens/b=0.35"."""
    if "=" not in data or Path(data).exists():
        return [prepare(data, tokenizer, quiet=quiet, choice=choice)], [1.0]
    parts = [item.rpartition("=") for item in data.split(",")]
    for folder, _, weight in parts:
        if not re.fullmatch(r"\d+\.?\d*(e-?\d+)?|\.\d+", weight) or not 0 < float(weight) < math.inf:
            raise Refusal(f"--data {data!r}: {folder}={weight} is not FOLDER=WEIGHT with a positive weight")
    for folder, _, _ in parts:
        if not (Path(folder).exists() or folder == "stdlib" or folder.startswith("hub:")) or [f for f, _, _ in parts].count(folder) > 1:
            raise Refusal(f"--data {data!r}: {folder} {'is there twice' if Path(folder).exists() else 'does not exist'}")
    return [prepare(folder, tokenizer, quiet=quiet, choice=choice) for folder, _, _ in parts], [float(weight) for _, _, weight in parts]


def describe(data: str, folders: list[Path]) -> dict:
    """What the data is, for config.json and the model card: the summary of its folder, or those of a mixture under one fingerprint."""
    parts = [read_summary(folder) for folder in folders]
    if len(parts) == 1:
        return parts[0]
    whole = hashlib.sha256(json.dumps([data, [p["fingerprint"] for p in parts]]).encode())
    return dict(source=data, fingerprint=whole.hexdigest()[:16], parts=parts)


def open_split(folders: list[Path], weights: list[float], split: str, seq_len: int, tokenizer: Tokenizer | None = None,
               seed: int = 0) -> Tokens | Mixture:
    parts = [Tokens(folder, split, seq_len, tokenizer, seed) for folder in folders]
    return parts[0] if len(parts) == 1 else Mixture(parts, weights, seed)


def training_texts(source: str) -> Iterator[str]:
    """The texts of a source, chats and held-out documents left out."""
    for part in (part for unit in units_of(source_files(source, tell=True)) for part in unit):
        for row in read(part):
            if isinstance(row, Bad):
                raise Refusal(f"{where(row.part, row.place)}: {row.reason}; mend or drop it")
            if row.fields.get("text") and not held_out(row.name):
                yield row.fields["text"]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="text or chats -> token shards")
    p.add_argument("source", help="stdlib, a .txt/.md/.py/.jsonl/.parquet file, a folder of such, or hub:OWNER/NAME[@REVISION][:FOLDER]")
    p.add_argument("--tokenizer", default="tiny", help="the teacher: preset, hub id, or folder with its tokenizer.json (default: tiny)")
    p.add_argument("--out", type=Path, help="folder to write (default: tokens/NAME-STAMP)")
    p.add_argument("--chats", action="store_true", help="chats alone, the loss on the assistant's tokens only: for train.py --stage sft")
    p.add_argument("--column", default="text", help="field of a .jsonl or .parquet row that holds the text (default: text)")
    p.add_argument("--min-score", type=float, help="leave out rows whose field `score` is below this (FineWeb-Edu: 4)")
    p.add_argument("--tokens", type=float, help="stop at this many training tokens, of parts in an order shuffled by --seed (default: all)")
    p.add_argument("--seed", type=int, default=1234, help="of that order (default: 1234)")
    p.add_argument("--skip-bad", action="store_true", help="leave out rows that cannot be read, and count them, instead of stopping")
    p.add_argument("--workers", type=int, help="processes (default: one a core, fewer where the source is small)")
    t = commands.add_parser("tokenizer", help="train a byte-level BPE (needs the `tokenizers` package)")
    t.add_argument("--source", default="stdlib")
    t.add_argument("--vocab", type=int, default=2048)
    t.add_argument("--out", type=Path, required=True)
    return parser


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    if args.command == "tokenizer":
        if not 257 <= args.vocab <= 1 << 20:
            raise Refusal(f"--vocab {args.vocab} is out of range: 257, which is every byte and the separator, to {1 << 20:,}")
        if (args.out / "tokenizer.json").exists():
            raise Refusal(f"--out {args.out}: has a tokenizer.json already, which other files may depend on; choose another folder")
        return train_tokenizer(training_texts(args.source), args.vocab, args.out)
    for name, low in (("tokens", 1), ("workers", 1), ("seed", 0), ("min_score", -math.inf)):
        value = getattr(args, name)
        if value is not None and not low <= value < math.inf:
            raise Refusal(f"--{name.replace('_', '-')} {value} is out of range: at least {low}, and finite")
    choice = Choice(args.chats, args.column, args.min_score, int(args.tokens or 0), args.seed, args.skip_bad)
    print(prepare(args.source, Tokenizer(resolve(args.tokenizer, files=TOKENIZER)[0]), args.out, choice=choice, workers=args.workers))


if __name__ == "__main__":
    any_letter_shows()
    try:
        main()
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same `prepare` goes on where it stopped")
