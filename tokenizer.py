"""The tokenizer: a Hugging Face `tokenizer.json` of byte-level BPE, run by tiktoken.

    python data.py tokenizer --vocab 2048 --out FOLDER          # a BPE of one's own, as tiny's was made

Text becomes the ids that the `tokenizers` library gives for the same file, or the file is refused by name. By choice:
- a *special* token is never made from text: `<|endoftext|>` written in a document stays ordinary text (the library's
  `encode_special_tokens=True`); an added token that is not special, Qwen's `<tool_call>`, is matched in text, as the library does;
- a byte for which the vocabulary has no token (SmolLM2 lacks 21) is dropped, as the library drops it; a lone surrogate reads as U+FFFD;
- truncation and padding, which a file may also ask for, are not the tokenizer's business here.
"""
from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import regex
import tiktoken

from files import Refusal, read_json, write_whole

# Text is cut into pieces by a pattern, and tokens never span two pieces. tiktoken's regular expressions are not the library's: these
# alternatives, one of each row in this order, mean the same in both, and between them leave no character out
ALTERNATIVES = [[r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|", r"'s|'t|'re|'ve|'m|'ll|'d|", ""], [r"[^\r\n\p{L}\p{N}]?\p{L}+|", r" ?\p{L}+|"],
                [r"\p{N}{1,3}|", r"\p{N}|", r" ?\p{N}+|"], [r" ?[^\s\p{L}\p{N}]+[\r\n]*|", r" ?[^\s\p{L}\p{N}]+|"], [r"\s*[\r\n]+|", ""],
                [r"\s+(?!\S)|\s+"]]
PATTERNS = {"".join(chosen) for chosen in itertools.product(*ALTERNATIVES)}
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits split off singly *before* the GPT-2 pattern (SmolLM2): a space stays behind when a digit follows it. The library's digits are
# Rust's own, which hold thirteen younger than its \p{N}
DIGIT = "\\p{N}\U00011DE0-\U00011DE9\U00016FF4-\U00016FF6"
DIGITS_THEN_GPT2 = rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+|[{DIGIT}]| ?[^\s\p{{L}}{DIGIT}]+|\s+(?=[{DIGIT}])|\s+(?!\S)|\s+"
# The library's NFC is that of Unicode 9. To it the marks and letters of later versions are plain characters, over which nothing composes
# and no mark moves: text is cut there and each part normalised by itself. (The ranges also hold characters to which NFC does nothing.)
YOUNGER = re.compile("([" + "".join("-".join(chr(int(end, 16)) for end in span.split("-")) for span in (
    "5C8-5C9 7FD 897-8D3 9FE C3C D3B-D3C EBA 1715 1ABF-1AF0 1DF6-1DFA A82C 105C0-105FF 10D24-10F85 11070 1133B 11380-113FF 1145E "
    "11839-11A99 11D42-1613F 16D40-16FF1 1D127-1D128 1D250-1D281 1E08F-1E6F5").split()) + "])")
BLANK = 400_000  # characters: tiktoken's engine overflows its stack on a run of a million blanks, so some way before that


class Tokenizer:
    """The byte-level BPE of FOLDER/tokenizer.json. Raises Refusal, naming what cannot be represented exactly or is broken.

    vocab_size: rows of an embedding that are tokens; special: {content: id} of the special tokens;
    bos: the id that the file puts before a text, or None; separator: the id that ends a document;
    begin, end: what tokenizer_config.json names bos_token and eos_token, else bos and separator;
    fingerprint: 16 hex digits, another wherever an id could be another.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        spec = read_json(path)
        config = tokenizer_config(self.folder)
        try:
            self._read(spec, config)
        except Refusal as refusal:
            raise Refusal(f"{path}: {refusal}") from None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise Refusal(f"{path}: not laid out as the tokenizers library writes it ({reason}); fetch the file again") from None

    def _read(self, spec: dict, config: dict) -> None:
        self.pattern, self.normalise = split_pattern(spec.get("pre_tokenizer")), normal_form(spec.get("normalizer"))
        model = spec["model"]
        ids, pairs = read_bpe(model)
        added = added_tokens(spec.get("added_tokens") or [], ids)
        self.special = {name: token["id"] for name, token in added.items() if token["special"]}

        alphabet, raw = byte_alphabet(), {}
        of_merges = {token for pair in pairs for token in (*pair, "".join(pair))} | alphabet.keys() & ids.keys()
        if both := sorted(of_merges & self.special.keys()):
            raise Refusal(f"special token {both[0]!r} is also a token of ordinary text")
        for token in ids:
            if token in of_merges or token not in added:
                if token == "" or not alphabet.keys() >= set(token):
                    raise Refusal(f"token {token!r} is not written in the byte-level alphabet")
                raw[token] = bytes(map(alphabet.__getitem__, token))
        self.no_token = bytes(b for c, b in alphabet.items() if c not in ids)
        if self.no_token and model.get("unk_token") is not None:
            raise Refusal(f"unk_token {model['unk_token']!r} for the {len(self.no_token)} bytes that have no token is not supported")
        whole = bool(model.get("ignore_merges"))  # a piece that is a token is taken whole, whatever its merges
        for token, parts in never_merged(ids, pairs, raw, self.no_token).items():
            if whole and (len(parts) == 2 or raw[token].translate(None, self.no_token) != raw[token]):
                raise Refusal(f"token {token!r} exists only as a whole piece (ignore_merges), which tiktoken would also merge")
            if not whole:
                del raw[token]
        ranks = {raw[token]: ids[token] for token in raw}
        self.encoding = tiktoken.Encoding("bpe", pat_str=self.pattern, mergeable_ranks=ranks, special_tokens={
            name: token["id"] for name, token in added.items() if name not in raw})
        self.bytes = {ids[token]: bytes(map(alphabet.__getitem__, token)) for token in ids if token not in added} \
            | {token["id"]: name.encode() for name, token in added.items()}
        self.vocab_size = 1 + max(self.bytes)

        # the library matches added tokens in two passes, before it normalises the text and after
        self.before = matcher({name: token for name, token in added.items() if not token["normalized"]})
        after = {name: normal(name, self.normalise) for name, token in added.items() if token["normalized"]}
        if len(set(after.values())) < len(after):
            raise Refusal(f"two added tokens are one after {self.normalise}")
        self.after = matcher({normalised: added[name] for name, normalised in after.items()})
        self.bos = first_token(spec.get("post_processor"), self.special)
        self.separator = separator(config, self.special)
        named = {key: self.special.get(text) for key, text in named_tokens(config).items()}
        self.begin = self.bos if named.get("bos_token") is None else named["bos_token"]
        self.end = self.separator if named.get("eos_token") is None else named["eos_token"]
        table = [self.pattern, self.normalise, whole, sorted(added.items()), self.bos, self.separator,
                 sorted((token.hex(), i) for token, i in ranks.items())]
        self.fingerprint = hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Ids of text, without BOS and separator. Any str will do: see the top of the file for special tokens, bytes and surrogates."""
        if not text.isascii() and re.search("[\ud800-\udfff]", text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = []
        for part, token in between(text, *self.before):
            for piece, token in between(normal(part, self.normalise), *self.after) if token is None else [("", token)]:
                ids += self._ordinary(piece) if token is None else [token]
        return ids

    def _ordinary(self, text: str) -> list[int]:
        """Ids of text that holds no added token. tiktoken panics on a byte that has no token and on a run of a million blanks: such a
        text is cut here, and piece by piece the bytes are dropped: the library too cuts first and drops second."""
        holes = self.no_token and len(raw := text.encode()) > len(raw.translate(None, self.no_token))
        if holes or any(text[k:k + BLANK].isspace() for k in range(0, len(text) - BLANK + 1, BLANK)):
            pieces = (piece.encode().translate(None, self.no_token) for piece in splitter(self.pattern).findall(text))
            return [i for piece in pieces if piece for i in self.encoding._encode_single_piece(piece)]
        return self.encoding.encode_ordinary(text)

    def must_fit(self, rows: int, model: str | Path) -> None:
        """Refuse a model whose embedding has fewer rows than there are tokens."""
        if self.vocab_size > rows:
            raise Refusal(f"{model}: the tokenizer has {self.vocab_size} tokens, the embedding only {rows} rows; "
                          "take the tokenizer that belongs to the model")

    def document(self, text: str) -> list[int]:
        """Ids of a pretraining document: BOS where the tokenizer puts one, the text, the separator."""
        return ([self.bos] if self.bos is not None else []) + self.encode(text) + [self.separator]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids. Numbers that are no token (rows of a padded embedding) are left out; bytes that are no UTF-8 read as U+FFFD."""
        return b"".join(self.bytes.get(i, b"") for i in ids).decode("utf-8", "replace")


def read_bpe(model: dict) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """The vocabulary {token: id} and the merges {(left, right): rank} of a tokenizer.json's model, in the file's byte-level alphabet."""
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise Refusal(f"model {model.get('type')} (byte_fallback={model.get('byte_fallback')}) is not byte-level BPE")
    if not {"vocab", "merges"} <= model.keys():
        raise Refusal("no BPE vocabulary and merges in it")
    for option in ("end_of_word_suffix", "continuing_subword_prefix", "dropout"):
        if model.get(option):
            raise Refusal(f"{option}={model[option]!r} is not supported")
    ids, owner, pairs, last = model["vocab"], {}, {}, -1
    for token, i in ids.items():
        if type(i) is not int or not 0 <= i < 1 << 31:
            raise Refusal(f"token {token!r} has the id {i!r}, which is not a row number")
        if owner.setdefault(i, token) != token:
            raise Refusal(f"tokens {owner[i]!r} and {token!r} have the same id {i}")
    for rank, merge in enumerate(model["merges"]):
        pair = tuple(merge.split(" ") if isinstance(merge, str) else merge)
        if len(pair) != 2 or not {*pair, whole := "".join(pair)} <= ids.keys():
            raise Refusal(f"merge {merge!r} is not two tokens that make a third")
        if ids[whole] < last:  # tiktoken merges by id, the library by the order of this list
            raise Refusal(f"merge {merge!r}: token ids are not in merge order; tiktoken cannot run this vocabulary")
        last = ids[whole]
        pairs[pair] = rank
    return ids, pairs


def never_merged(ids: dict[str, int], pairs: dict[tuple[str, str], int], raw: dict[str, bytes], no_token: bytes) -> dict[str, list[str]]:
    """{token: what the library makes of its bytes instead} of the tokens that its merges never make.

    tiktoken knows no merges: it joins any two neighbours that together are a token. Where the merges make every token out of its own bytes,
    the two come to the same: when two neighbours that together are a token t stand in a text, everything between their ends was merged
    there as it would be for t alone, so they are the last pair of t's own merging, and that pair is in the list. A token that is not made
    out of its own bytes is therefore never made in a text either.
    """
    tokens = sorted((token for token in raw if len(token) > 1), key=ids.get)
    table, name, found = {raw[token]: ids[token] for token in raw if len(token) == 1}, {i: token for token, i in ids.items()}, {}
    for begin, end in itertools.pairwise(sorted({0, *(size for size in (1 << 10, 1 << 13, 1 << 16) if size < len(tokens)), len(tokens)})):
        # tiktoken makes the merges of the tokens proved so far, which come first, the library's own rule the rest
        proved = tiktoken.Encoding("proved", pat_str=".", mergeable_ranks=table, special_tokens={})
        for token in tokens[begin:end]:
            parts = [name[i] for i in proved._encode_single_piece(raw[token].translate(None, no_token))]
            while len(parts) > 1:
                # inf and not len(pairs): a merge listed twice has two ranks
                ranks = [pairs.get(pair, math.inf) for pair in itertools.pairwise(parts)]
                if (first := min(ranks)) == math.inf:
                    break
                at = ranks.index(first)
                parts[at:at + 2] = [parts[at] + parts[at + 1]]
            if parts != [token]:
                found[token] = parts
        table = table | {raw[token]: ids[token] for token in tokens[begin:end] if token not in found}
    return found


def added_tokens(entries: list[dict], ids: dict[str, int]) -> dict[str, dict]:
    """{content: entry} of the added tokens. The library gives them the vocabulary's id or the next after it, whatever the file says."""
    added = {}
    for token in entries:
        name, flags = token["content"], [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        expected = ids.get(name, max([len(ids), *(other["id"] + 1 for other in added.values())]))
        if flags:
            raise Refusal(f"added token {name!r}: {flags[0]} is not supported")
        if not name or name in added or token["id"] != expected or name not in ids and expected in ids.values():
            raise Refusal(f"added token {name!r} has the id {token['id']}, where the tokenizers library gives {expected}")
        added[name] = {key: token[key] for key in ("id", "special", "normalized")}
    return added


def matcher(added: dict[str, dict]) -> tuple[re.Pattern | None, dict[str, int]]:
    """(what cuts a text at added tokens, {content: id} of those that become an id: a special one matches, and stays text)."""
    plain = {name: token["id"] for name, token in added.items() if not token["special"]}
    return re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True)))) if plain else None, plain


def between(text: str, pattern: re.Pattern | None, plain: dict[str, int]) -> Iterator[tuple[str, int | None]]:
    """(text between added tokens, None) and ("", id of an added token), in order."""
    place = 0
    for found in pattern.finditer(text) if pattern else ():
        if found.group() in plain:
            yield text[place:found.start()], None
            yield "", plain[found.group()]
            place = found.end()
    yield text[place:], None


def normal_form(norm: dict | None) -> str | None:
    """"NFC" or None."""
    steps = norm["normalizers"] if norm and norm["type"] == "Sequence" else [norm] if norm else []
    if steps and [step["type"] for step in steps] != ["NFC"]:
        raise Refusal(f"normalizer {' + '.join(step['type'] for step in steps)} is not supported")
    return "NFC" if steps else None


def normal(text: str, form: str | None) -> str:
    if form is None or text.isascii():
        return text
    return "".join(unicodedata.normalize(form, part) for part in YOUNGER.split(text))


def split_pattern(pre: dict | None) -> str:
    """The regular expression that a tokenizer.json's pre-tokenizer comes to."""
    steps = (pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]) if pre else []
    kinds = [step["type"] for step in steps]
    if kinds and kinds[-1] == "ByteLevel" and not steps[-1]["add_prefix_space"]:
        first, use_regex = steps[0], steps[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and use_regex:
            return GPT2
        if kinds == ["Digits", "ByteLevel"] and first["individual_digits"] and use_regex:
            return DIGITS_THEN_GPT2
        if kinds == ["Split", "ByteLevel"] and not use_regex and first["behavior"] == "Isolated" and not first["invert"]:
            if first["pattern"].get("Regex") in PATTERNS:
                return first["pattern"]["Regex"]
            raise Refusal(f"pre-tokenizer Split on {first['pattern']} is not supported")
    raise Refusal(f"pre-tokenizer {' + '.join(kinds) or None} is not supported in this form: {json.dumps(pre)}")


@functools.cache
def splitter(pattern: str) -> regex.Pattern:
    """The pattern for the `regex` module, with letters and numbers as tiktoken's engine knows them: `regex` knows younger ones too."""
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
    for kind in (r"\p{L}", r"\p{N}"):
        engine = tiktoken.Encoding(kind, pat_str=kind, mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={})
        runs = itertools.groupby(enumerate(map(ord, engine.decode(engine.encode_ordinary(every)))), key=lambda item: item[1] - item[0])
        spans = [[code for _, code in run] for _, run in runs]
        pattern = pattern.replace(kind, "[" + "".join(rf"\U{span[0]:08x}-\U{span[-1]:08x}" for span in spans) + "]")
    return regex.compile("(?V1)" + pattern)  # V1: a set may hold sets


def first_token(post: dict | None, special: dict[str, int]) -> int | None:
    """BOS, if the file's post-processor puts one before a text; any other addition is refused."""
    steps, bos = (post["processors"] if post["type"] == "Sequence" else [post]) if post else [], None
    for step in steps:
        if step["type"] == "TemplateProcessing" and bos is None:
            *before, text = [[*item.items()][0] for item in step["single"]]
            names = [value["id"] for kind, value in before if kind == "SpecialToken"]
            if text[0] != "Sequence" or len(before) != len(names) or len(names) > 1:
                raise Refusal("post_processor TemplateProcessing adds more than one token before the text")
            for name in names:
                (bos,) = step["special_tokens"][name]["ids"]
                if bos not in special.values():
                    raise Refusal(f"post_processor TemplateProcessing adds {name!r}, which is no special token")
        elif step["type"] != "ByteLevel":  # which only moves offsets
            raise Refusal(f"post_processor {step['type']} is not supported")
    return bos


def separator(config: dict, special: dict[str, int]) -> int:
    """The token that ends a pretraining document."""
    names = ["<|endoftext|>", "<|end_of_text|>", named_tokens(config).get("eos_token")]
    found = next((special[name] for name in names if name in special), None)
    if found is None:
        raise Refusal(f"no separator token (looked for {names})")
    return found


def tokenizer_config(folder: Path) -> dict:
    """tokenizer_config.json, or {}. Before it listed its added tokens, special_tokens_map.json stood above it, and transformers still reads
    such a folder so."""
    files = (folder / "tokenizer_config.json", folder / "special_tokens_map.json")
    config, older = (read_json(file) if file.exists() else {} for file in files)
    return config if "added_tokens_decoder" in config else config | older


def named_tokens(config: dict) -> dict[str, str]:
    """{"eos_token": "</s>", ...} of a tokenizer_config.json, which writes a token as its text or as a block that holds it."""
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE files write for the 256 bytes (GPT-2): printable Latin-1 stands for itself,
    the other 68 bytes for the code points from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(256 + k): b for k, b in enumerate(rest)}


def train_tokenizer(texts: Iterable[str], vocab: int, out: Path) -> None:
    """A byte-level BPE of `vocab` tokens, learnt from `texts`, as a HF tokenizer.json."""
    from tokenizers import Tokenizer as HF, decoders, models, pre_tokenizers, trainers
    first = next(texts := iter(texts), None)
    if first is None:
        raise Refusal("no text to learn a vocabulary from")
    hf = HF(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|endoftext|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    hf.train_from_iterator(itertools.chain([first], texts), trainer)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "tokenizer.json", hf.to_str(pretty=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}
    write_whole(out / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
