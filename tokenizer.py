"""The tokenizer: a Hugging Face `tokenizer.json` of byte-level BPE, run by tiktoken.

    python data.py tokenizer --vocab 2048 --out tiny          # how tiny's own BPE was made

Text becomes the ids that the `tokenizers` library gives for the same file, or the file is refused by name.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import regex
import tiktoken

from teachers import Refusal, read_json

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# digits split off singly *before* the GPT-2 pattern (SmolLM2): a space stays behind when a digit follows it
DIGITS_THEN_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"


class Tokenizer:
    """The byte-level BPE of a HF `tokenizer.json`, run by tiktoken. What it cannot represent exactly is refused by name."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        spec = read_json(path)
        model = spec.get("model") or {}
        if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
            raise Refusal(f"{path}: model {model.get('type')} (byte_fallback={model.get('byte_fallback')}) is not byte-level BPE")
        if not {"vocab", "merges"} <= model.keys():
            raise Refusal(f"{path}: no BPE vocabulary and merges in it")
        for option in ("end_of_word_suffix", "continuing_subword_prefix", "dropout"):
            if model.get(option):
                raise Refusal(f"{path}: {option}={model[option]!r} is not supported")
        self.pattern, self.normalise = split_pattern(spec, path)
        # tiktoken merges by rank, HF by the order of its merge list: one table serves both when ids rise in merge order
        ids, to_byte = model["vocab"], byte_alphabet()
        merged = [ids["".join(m) if isinstance(m, list) else m.replace(" ", "")] for m in model["merges"]]
        if merged != sorted(merged):
            raise Refusal(f"{path}: token ids are not in merge order; tiktoken cannot run this vocabulary")
        self.special = {t["content"]: t["id"] for t in spec.get("added_tokens", [])}
        ranks = {bytes(to_byte[c] for c in token): i for token, i in ids.items() if token not in self.special}
        self.encoding = tiktoken.Encoding(path.parent.name, pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=self.special)
        self.known = {*ranks.values(), *self.special.values()}
        self.no_token = bytes(b for b in range(256) if bytes([b]) not in ranks)  # tiktoken panics on these, HF drops them
        self.vocab_size = 1 + max(max(ranks.values()), *self.special.values(), 0)  # real rows: padding rows come after
        self.bos, self.separator = self._document_tokens(spec, path)
        table = json.dumps([self.pattern, sorted(self.special.items()), sorted((t.hex(), i) for t, i in ranks.items())])
        self.fingerprint = hashlib.sha256(table.encode()).hexdigest()[:16]

    def _document_tokens(self, spec: dict, path: Path) -> tuple[int | None, int]:
        """BOS if the tokenizer's own post-processor puts one, and the token that ends a pretraining document."""
        config = path.with_name("tokenizer_config.json")
        eos = read_json(config).get("eos_token") if config.exists() else None
        names = ["<|endoftext|>", "<|end_of_text|>", eos["content"] if isinstance(eos, dict) else eos]
        separator = next((self.special[n] for n in names if n in self.special), None)
        if separator is None:
            raise Refusal(f"{path}: no separator token (looked for {names})")
        post = spec.get("post_processor") or {}
        for step in post.get("processors", [post]):
            first = (step.get("single") or [{}])[0] if step.get("type") == "TemplateProcessing" else {}
            if "SpecialToken" in first:
                return self.special[first["SpecialToken"]["id"]], separator
        return None, separator

    def encode(self, text: str) -> list[int]:
        """Text as ordinary text: `<|endoftext|>` written in a document never becomes the control token."""
        if self.normalise:
            import unicodedata
            text = unicodedata.normalize(self.normalise, text)
        if self.no_token:
            raw = text.encode("utf-8", "replace")
            if len(raw.translate(None, self.no_token)) < len(raw):  # HF splits first and drops second
                pieces = [p.encode().translate(None, self.no_token).decode("utf-8", "ignore") for p in regex.findall(self.pattern, raw.decode())]
                return [i for piece in pieces for i in self.encoding.encode_ordinary(piece)]
        return self.encoding.encode_ordinary(text)

    def document(self, text: str) -> list[int]:
        return ([self.bos] if self.bos is not None else []) + self.encode(text) + [self.separator]

    def decode(self, ids: list[int]) -> str:
        """Text of ids; rows of a padded embedding that are no token are left out."""
        return self.encoding.decode([i for i in ids if i in self.known])


def split_pattern(spec: dict, path: Path) -> tuple[str, str | None]:
    """(regular expression, unicode normal form or None) of a tokenizer.json, for the pre-tokenizers of Llama-3, Qwen2, SmolLM2, GPT-2."""
    norm = spec.get("normalizer")
    if norm is not None and norm["type"] not in ("NFC", "NFKC"):
        raise Refusal(f"{path}: normalizer {norm['type']} is not supported")
    pre = spec.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    kinds = [s.get("type") for s in steps]
    last = steps[-1]
    if kinds[-1] == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return GPT2, norm and norm["type"]
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and last.get("use_regex", True):
            return DIGITS_THEN_GPT2, norm and norm["type"]
        if kinds == ["Split", "ByteLevel"] and "Regex" in steps[0]["pattern"] and not last.get("use_regex", True) \
                and steps[0]["behavior"] == "Isolated" and not steps[0].get("invert"):
            return steps[0]["pattern"]["Regex"], norm and norm["type"]
    raise Refusal(f"{path}: pre-tokenizer {' + '.join(map(str, kinds))} is not supported")


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE files write for the 256 bytes (GPT-2): printable Latin-1 stands for itself,
    the other 68 bytes for the code points from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(256 + k): b for k, b in enumerate(rest)}


def train_tokenizer(texts: Iterable[str], vocab: int, out: Path) -> None:
    """A byte-level BPE of `vocab` tokens, learnt from `texts`, as a HF tokenizer.json."""
    from tokenizers import Tokenizer as HF, decoders, models, pre_tokenizers, trainers
    hf = HF(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|endoftext|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    hf.train_from_iterator(texts, trainer)
    out.mkdir(parents=True, exist_ok=True)
    hf.save(str(out / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
