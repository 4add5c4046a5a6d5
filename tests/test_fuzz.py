"""Properties over generated input, its seed fixed: what is read back is what was written, or a Refusal; never something else, never a traceback.

A few examples a property in the default run, 10,000 and more in all with `python -m pytest -m slow -s tests/test_fuzz.py`.
"""
import copy
import functools
import io
import json
import random
import shutil
from collections import Counter
from datetime import datetime
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import SHAPE, random_net
from hypothesis import HealthCheck, example, given, settings
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer as HF, decoders, models, normalizers, pre_tokenizers, trainers

import checkpoints
import core
import merge
import runs
from config import Config
from data import Tokens
from files import Refusal, read_json
from model import Transformer, rope_frequencies
from prepare import prepare
from shards import Choice, ShardWriter
from test_chat import TEMPLATES
from test_core import clone_of
from test_tokenizer import LLAMA3, library
from tokenizer import Tokenizer, byte_alphabet

ROOT = Path(__file__).resolve().parent.parent
DONE = Counter()  # examples that ran to their end, by property
NUMBER = st.one_of(st.integers(-2, 10), st.integers(-10**25, 10**25), st.floats(), st.sampled_from([0, 1, True, False, 1e5, 0.0, -1.0, 1 << 63, 10**400]))
JSON = st.recursive(st.none() | NUMBER | st.text(max_size=8) | st.sampled_from(["4", "llama3", "default", "NaN", "full_attention"]),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6)


def fuzz(few, many, strategy, *explicit):
    """check(place, value) -> a test of it on `few` examples by default and on `many` in the slow run, beside the explicit ones."""
    def wrap(check):
        @pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])
        def test(tmp_path, count):
            def one(value):
                check(tmp_path, value)
                DONE[check.__name__] += 1
            one = given(strategy)(one)
            for value in explicit:
                one = example(value)(one)
            settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))(one)()
        test.__doc__ = check.__doc__
        return test
    return wrap


def refused(call):
    """The Refusal of call(), which must be one line; or None and what it gave."""
    try:
        return None, call()
    except Refusal as refusal:
        assert "\n" not in str(refusal)
        return str(refusal), None


@st.composite
def harm(draw, size):
    """A function from bytes to bytes with one fault: a byte changed, or the end cut off. Places are shares of the length, so that they fit any file."""
    place, change, cut = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(1, 255)), draw(st.integers(0, 3)) == 0
    begin = draw(st.booleans())  # the header is small, and the more delicate part

    def apply(raw):
        at = int(place * (min(size, len(raw)) if begin else len(raw)))
        return raw[:at] if cut else raw[:at] + bytes([raw[at] ^ change]) + raw[at + 1:]
    return apply


# ------------------------------------------------------------------------------------------- token shards


class Numbers:
    fingerprint, separator = "0123456789abcdef", 0

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size


@st.composite
def shard(draw):
    vocab = draw(st.sampled_from([2, 300, 1 << 16, (1 << 16) + 1, 151936, 1 << 31]))
    ids = draw(st.lists(st.integers(0, vocab - 1) | st.just(vocab - 1), min_size=2, max_size=60))
    mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    return vocab, ids, mask, draw(st.integers(1, len(ids) - 1)), draw(st.none() | harm(330)), draw(st.booleans())


def read_back(folder, seq_len, tokenizer):
    tokens = Tokens(folder, "train", seq_len, tokenizer)
    return [(tokens.window(i).tolist(), tokens.pair(i)[1].tolist()) for i in range(len(tokens))]


@fuzz(40, 3000, shard())
def test_a_shard_gives_what_was_written_or_is_refused(place, value):
    vocab, ids, mask, seq_len, damage, known = value
    tokenizer, file = Numbers(vocab), place / "train-00000.safetensors"
    writer = ShardWriter(tokenizer, place, Choice(chats=mask is not None), datetime(2026, 1, 1))
    writer.save(0, "train", np.array(ids, np.uint32), np.array(mask or [], np.uint8), {"tokens": {}, "assistant": {}})
    windows = [range(i * seq_len, (i + 1) * seq_len + 1) for i in range((len(ids) - 1) // seq_len)]
    expected = [([ids[k] for k in w], [ids[k] if mask is None or mask[k] else -100 for k in w[1:]]) for w in windows]
    assert read_back(place, seq_len, tokenizer) == expected
    if damage:
        raw = file.read_bytes()
        file.write_bytes(damage(raw))
        said, found = refused(lambda: read_back(place, seq_len, tokenizer if known else None))
        assert found == expected if said is None else str(file) in said


# ------------------------------------------------------------------------------------------------- sources


MESSAGE = st.dictionaries(st.sampled_from(["role", "from", "content", "value", "tool_calls"]), st.sampled_from(["user", "assistant", "system", "gpt"]) | JSON, max_size=4)
ROW = st.dictionaries(st.sampled_from(["text", "messages", "conversations", "id", "title", "score"]), st.text(max_size=6) | st.lists(MESSAGE | JSON, max_size=4) | JSON, max_size=4)
BYTES = st.binary(max_size=60) | st.lists(st.sampled_from([b"\r", b"\n", b"\xff", b"\0", b"a", b"\xef\xbb\xbf", b'{"text": "a"}', b"["]), max_size=12).map(b"".join)
LINES = st.lists(ROW | JSON, max_size=3).map(lambda rows: b"".join(json.dumps(row).encode() + b"\n" for row in rows))


@fuzz(20, 1000, st.tuples(LINES | BYTES, st.sampled_from(["a.jsonl", "a.jsonl", "a.txt", "a.md", "a.py"]), st.booleans(), st.sampled_from([None, None, 3.0]), st.booleans()),
      (b'{"\\n": null}\n', "a.jsonl", False, None, False))
def test_any_file_is_documents_or_is_refused_by_its_line_and_leaves_nothing_half(place, value):
    raw, name, chats, score, skip = value
    folder = place / "chat"
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tiny" / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATES["chatml"]}), encoding="utf-8")
    shutil.rmtree(place / "out", ignore_errors=True)
    shutil.rmtree(place / "in", ignore_errors=True)
    (place / "in").mkdir()
    (place / "in" / name).write_bytes(raw)
    said, out = refused(lambda: prepare(str(place / "in"), tokenizer(folder), place / "out", quiet=True, choice=Choice(chats=chats, min_score=score, skip_bad=skip)))
    assert not (place / "out.making").exists() and ((place / "out").exists() == (said is None))
    if said is not None:
        assert ", line " in said or "no document in it" in said or chats and "no .jsonl" in said, said
    elif name != "a.jsonl":  # text comes back as Python's own reader of lines would give it
        ids = [load_file(file)["tokens"].tolist() for file in sorted(out.glob("*.safetensors"))]
        assert "".join(tokenizer(folder).decode(i for i in part if i != tokenizer(folder).separator) for part in ids) == io.TextIOWrapper(io.BytesIO(raw), "utf-8").read()


@functools.cache
def tokenizer(folder):
    return Tokenizer(folder)


# --------------------------------------------------------------------------------------------- config.json


KINDS = [SHAPE, SHAPE | dict(model_type="qwen2", rope_parameters=dict(rope_type="default", rope_theta=1e4)),
         SHAPE | dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64))]
KEYS = [*SHAPE, "rope_scaling", "rope_parameters", "layer_types", "hidden_act", "attention_bias", "partial_rotary_factor", "dtype", "torch_dtype", "auto_map"]
INNER = ["rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta", "partial_rotary_factor"]


@st.composite
def configs(draw):
    hf = copy.deepcopy(draw(st.sampled_from(KINDS)))
    for _ in range(draw(st.integers(1, 3))):
        block = draw(st.sampled_from(["", "", "rope_scaling", "rope_parameters"]))
        holder = hf if not isinstance(hf.get(block), dict) else hf[block]
        key = draw(st.sampled_from(KEYS if holder is hf else INNER))
        if draw(st.integers(0, 5)):
            holder[key] = draw(NUMBER | JSON)
        else:
            holder.pop(key, None)
    return hf


def check_config(hf):
    said, config = refused(lambda: Config.from_hf(hf, "somewhere/config.json"))
    if said is not None:
        return "somewhere/config.json" in said or pytest.fail(said)
    assert all(type(getattr(config, key)) is int for key, value in SHAPE.items() if type(value) is int) and type(config.tie_word_embeddings) is bool
    again = json.loads(json.dumps(config.to_hf(torch.float32)))
    assert Config.from_hf(again) == config
    small = Config.from_hf(hf | dict(num_hidden_layers=min(2, config.num_hidden_layers), layer_types=None))
    with torch.device("meta"):
        net = Transformer(small)
    assert net.layers[0].self_attn.q_proj.weight.shape == (config.num_attention_heads * config.head_dim, config.hidden_size)
    assert all(torch.isfinite(freq).all() and (freq >= 0).all() for freq in (net.rope_freq, rope_frequencies(config)))


@fuzz(40, 2500, configs(), SHAPE | dict(num_attention_heads="4"), SHAPE | dict(layer_types=5), SHAPE | dict(rope_scaling="llama3"), SHAPE | dict(hidden_size=1 << 62),
      SHAPE | dict(tie_word_embeddings="false"), SHAPE | dict(rope_theta="x"), SHAPE | dict(num_hidden_layers=True), SHAPE | dict(rms_norm_eps=float("nan")),
      SHAPE | dict(rope_scaling=KINDS[2]["rope_scaling"] | dict(high_freq_factor=1.0)))
def test_any_config_is_one_that_can_be_built_or_is_refused(place, hf):
    check_config(hf)


@fuzz(20, 800, st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), JSON, max_size=8) | JSON)
def test_any_json_at_all_is_a_config_or_is_refused(place, value):
    (place / "config.json").write_text(json.dumps(value), encoding="utf-8")
    said, hf = refused(lambda: read_json(place / "config.json"))
    assert (said is None) == isinstance(value, dict)
    if said is None:
        check_config(hf)


@fuzz(20, 800, st.tuples(st.sampled_from(KINDS), harm(2000)))
def test_a_damaged_config_file_is_read_or_refused(place, value):
    hf, damage = value
    (place / "config.json").write_bytes(damage(json.dumps(hf).encode()))
    said, read = refused(lambda: read_json(place / "config.json"))
    if said is None:
        check_config(read)


# ----------------------------------------------------------------------------------------------- tokenizer


SPECIAL = ["<|endoftext|>", "<|begin|>", "<|im_end|>"]


def vocabulary(folder, seed):
    """A small byte-level BPE learnt from random text, in one of four released layouts."""
    rng = random.Random(seed)
    letters = [chr(rng.choice([rng.randrange(32, 127), rng.randrange(32, 127), rng.randrange(0x100), rng.randrange(0x3000), rng.randrange(0x1F300, 0x1F600)])) for _ in range(30)]
    words = ["".join(rng.choices(letters, k=rng.randrange(1, 7))) for _ in range(60)] + ["\n", "  ", "'s", "12", "e\u0301"]
    style = seed % 4
    hf = HF(models.BPE(ignore_merges=seed % 3 == 0))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style < 2)
    split = [[], [pre_tokenizers.Digits(individual_digits=True)], [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
             [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated")]]
    hf.pre_tokenizer = pre_tokenizers.Sequence([*split[style], byte_level]) if style else byte_level
    if style == 3:
        hf.normalizer = normalizers.NFC()
    hf.train_from_iterator([" ".join(rng.choices(words, k=20)) for _ in range(40)], trainers.BpeTrainer(
        vocab_size=rng.randrange(280, 420), show_progress=False, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if seed % 2:
        hf.add_tokens([AddedToken("<tool", normalized=False), AddedToken("<tool>", normalized=False), AddedToken("é<x>", normalized=True)])
    hf.decoder = decoders.ByteLevel()
    folder.mkdir(exist_ok=True)
    hf.save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def both(home, seed):
    folder = vocabulary(home / str(seed), seed) if seed else ROOT / "tiny"
    return Tokenizer(folder), library(folder)


FRAGMENTS = st.sampled_from([*SPECIAL, "<tool>", "é<x>", "e\u0301<x>", "<|endof", " ", "   ", "\n", "\r\n", "\t", "'s", "'LL", "12345", "٣",
                              "\u0301", "각", "\u1100\u1161", "\u00a0", "\u2028", "\x00", "\u0130", "ſ"])
MARKS = st.text(st.characters(categories=["Mn", "Mc"]) | st.sampled_from("aeÅ가\u1100"), max_size=12)
TEXT = st.lists(st.text(st.characters(exclude_categories=()), max_size=12) | st.text(max_size=12) | st.text("ab 1'\n", max_size=12) | MARKS | FRAGMENTS, max_size=8).map("".join)


@fuzz(40, 3000, st.tuples(st.integers(0, 15), TEXT), (0, "\ud83d\ude00 \ud83d"), (3, "e\u0301<x>é<x><tool>"))
def test_ids_are_the_librarys_and_decode_to_the_text(place, value):
    seed, text = value
    ours, theirs = both(place.parent, seed)
    ids, plain = ours.encode(text), text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # what a lone surrogate reads as
    assert ids == theirs(plain)
    assert ours.decode(ids) == (normalizers.NFC().normalize_str(plain) if ours.normalise else plain) or "<x>" in text
    assert all(0 <= i < ours.vocab_size for i in ids) and ours.document(text)[-1] == ours.separator


@st.composite
def change_vocabulary(draw, spec):
    """A deep copy that still looks like a tokenizer, but says something else."""
    spec = copy.deepcopy(spec)
    vocab, merges, added = spec["model"]["vocab"], spec["model"]["merges"], spec["added_tokens"]
    pick = lambda many: draw(st.sampled_from(list(many)))
    act = pick(["ids", "merges", "less", "more", "flag"])
    if act == "ids":
        one, two = pick(vocab), pick(vocab)
        vocab[one], vocab[two] = vocab[two], vocab[one]
    elif act == "merges":
        one, two = (pick(range(len(merges))) for _ in range(2))
        merges[one], merges[two] = merges[two], merges[one]
    elif act == "less":
        merges.pop(pick(range(len(merges))))
    elif act == "more":
        vocab.setdefault(pick(vocab) + pick(vocab), max(*vocab.values(), *(token["id"] for token in added)) + pick([1, 1, 2]))
    else:
        pick(added)[pick(["lstrip", "rstrip", "single_word", "normalized", "special"])] = draw(st.booleans())
    return spec


@st.composite
def change_json(draw, spec):
    """A deep copy with one part, found by a random way down, replaced, dropped or doubled."""
    spec, way = copy.deepcopy(spec), draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6))
    holder, key = spec, draw(st.sampled_from(["model", "model", "added_tokens", "added_tokens", "pre_tokenizer", "normalizer", "post_processor", "version"]))
    for step in way:
        inner = holder[key]
        if not inner or not isinstance(inner, (dict, list)):
            break
        holder, key = inner, list(inner)[int(step * len(inner))] if isinstance(inner, dict) else int(step * len(inner))
    act = draw(st.sampled_from(["replace", "drop", "double", "rename", "swap", "swap", "nudge", "nudge"]))
    others = list(holder) if isinstance(holder, dict) else range(len(holder))
    if act == "replace":
        holder[key] = draw(JSON)
    elif act == "drop":
        del holder[key]
    elif act == "double" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif act == "rename" and isinstance(holder, dict):
        holder[draw(st.text(max_size=4))] = holder.pop(key)
    elif act == "swap":
        other = others[draw(st.integers(0, len(others) - 1))]
        holder[key], holder[other] = holder[other], holder[key]
    elif isinstance(holder[key], bool):
        holder[key] = not holder[key]
    elif isinstance(holder[key], int):
        holder[key] += draw(st.sampled_from([-1, 1, 1 << 32]))
    return spec


@functools.cache
def small_specs():
    import tempfile
    with tempfile.TemporaryDirectory() as home:
        return [json.loads((vocabulary(Path(home, str(seed)), seed) / "tokenizer.json").read_text(encoding="utf-8")) for seed in (4, 5, 6, 7)]


SAMPLES = ["", "a b  c 12 'ss\n\n", "<|endoftext|> <tool> x<tool>é<x>e\u0301<x>", "".join(map(chr, range(32, 400))), "😀 각 \t x"]


def check_tokenizer(folder):
    said, ours = refused(lambda: Tokenizer(folder))
    if said is not None:
        return str(folder) in said or pytest.fail(said)
    try:
        theirs = library(folder)
    except Exception:  # what the library does not read, no model was trained with
        return
    for text in (*SAMPLES, *(b"".join(ours.bytes[i] for i in sorted(ours.bytes)[k::3]).decode("utf-8", "replace") for k in range(3))):
        assert ours.encode(text) == theirs(text), text


@fuzz(15, 1200, st.deferred(lambda: st.sampled_from(small_specs()).flatmap(lambda spec: change_json(spec) | change_vocabulary(spec))))
def test_a_damaged_tokenizer_json_gives_the_librarys_ids_or_is_refused(place, spec):
    (place / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    check_tokenizer(place)


def test_a_merge_that_is_listed_twice_unmakes_no_other(tmp_path):
    spec = copy.deepcopy(small_specs()[0])
    spec["model"]["merges"].insert(0, spec["model"]["merges"][0])
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    last = "".join(spec["model"]["merges"][-1])
    text = bytes(map(byte_alphabet().__getitem__, last)).decode()
    assert Tokenizer(tmp_path).encode(text) == library(tmp_path)(text) == [spec["model"]["vocab"][last]]


@fuzz(15, 800, st.tuples(st.integers(0, 3), harm(4000)))
def test_a_tokenizer_json_with_a_damaged_byte_gives_the_librarys_ids_or_is_refused(place, value):
    which, damage = value
    (place / "tokenizer.json").write_bytes(damage(json.dumps(small_specs()[which], ensure_ascii=False).encode()))
    check_tokenizer(place)


# --------------------------------------------------------------------------------------------- safetensors


LITTLE = dict(vocab_size=12, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4)


@functools.cache
def checkpoint(kind):
    """(config.json, tensors as they lie in the file) of a little network."""
    net = random_net(**LITTLE, model_type="qwen2" if kind == "qwen2" else "llama", tie_word_embeddings=kind == "tied")
    tensors = {(name if name.startswith("lm_head") else f"model.{name}"): t for name, t in net.state_dict().items() if not (kind == "tied" and name.startswith("lm_head"))}
    return json.dumps(net.config.to_hf(torch.float32)), tensors


def write_checkpoint(folder, kind, tensors):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(checkpoint(kind)[0], encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


def loaded(folder):
    return refused(lambda: Transformer.from_pretrained(folder).state_dict())


KIND = st.sampled_from(["tied", "untied", "qwen2"])


@fuzz(40, 1500, st.tuples(KIND, harm(1200)))
def test_a_damaged_safetensors_file_loads_exactly_or_is_refused(place, value):
    """A byte of the weights themselves is protected by nothing: it may change the one number that it is part of."""
    kind, damage = value
    file = write_checkpoint(place / "m", kind, checkpoint(kind)[1])
    raw = file.read_bytes()
    file.write_bytes(harmed := damage(raw))
    said, state = loaded(file.parent)
    if said is not None:
        return str(file.parent) in said or pytest.fail(said)
    header = 8 + int.from_bytes(raw[:8], "little")
    differing = sum(int((t != state[name.removeprefix("model.")]).sum()) for name, t in checkpoint(kind)[1].items())
    assert len(harmed) == len(raw) and differing <= (harmed[:header] == raw[:header])


@st.composite
def other_tensors(draw):
    kind = draw(KIND)
    tensors = dict(checkpoint(kind)[1])
    name, other = (draw(st.sampled_from(sorted(tensors))) for _ in range(2))
    act = draw(st.sampled_from(["drop", "rename", "add", "swap", "dtype", "shape", "twice", "nan", "nothing"]))
    if act == "drop":
        del tensors[name]
    elif act == "rename":
        tensors[draw(st.sampled_from([name.upper(), name[:-1], name.removeprefix("model."), "lm_head.weight", "x." + name, name.replace(".0.", ".1.")]))] = tensors.pop(name)
    elif act == "add":
        tensors[draw(st.text("abc.0", min_size=1, max_size=9))] = torch.ones(2)
    elif act == "swap":
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif act == "dtype":
        tensors[name] = tensors[name].to(draw(st.sampled_from([torch.int8, torch.int32, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn,
                                                               torch.bfloat16, torch.float64, torch.complex64])))
    elif act == "shape":
        tensor = tensors[name]
        tensors[name] = draw(st.sampled_from([tensor[None], tensor.flatten(), tensor[:-1], tensor.repeat(2, *[1] * (tensor.dim() - 1)),
                                              torch.ones(()), torch.ones(0)]))
    elif act == "twice":
        tensors[name.removeprefix("model.")] = tensors[name] + 1
    elif act == "nan":
        tensors[name] = tensors[name] * draw(st.sampled_from([float("nan"), float("inf")]))
    if act == "shape" and tensors[name].shape == checkpoint(kind)[1][name].shape:
        act = "nothing"
    return kind, act, tensors


@fuzz(40, 1200, other_tensors())
def test_other_tensors_than_the_config_asks_for_are_refused(place, value):
    kind, act, tensors = value
    file = write_checkpoint(place / "m", kind, {name: t.clone().contiguous() for name, t in tensors.items()})
    said, state = loaded(file.parent)
    if said is not None:
        return str(file.parent) in said or pytest.fail(said)
    assert act in ("swap", "rename", "nothing", "dtype", "twice"), act
    for name, t in tensors.items():  # what loads is what is in the file under that name, rounded where it was of another precision
        assert torch.equal(state[name.removeprefix("model.")], t.float()) and t.dtype.is_floating_point and t.dtype.itemsize > 1


@st.composite
def indices(draw):
    """Which tensors lie in which of three shards, and an index that may tell something else."""
    names = sorted(checkpoint("untied")[1])
    where = {name: draw(st.integers(1, 3)) for name in names}
    file = "model-0000{}-of-00003.safetensors".format
    told = {name: file(k) for name, k in where.items()}
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(names))
        act = draw(st.sampled_from(["forget", "elsewhere", "invent", "twice", "value"]))
        if act == "forget":
            told.pop(name, None)
        elif act == "elsewhere":
            told[name] = draw(st.sampled_from([file(1), file(2), file(9), "../model.safetensors", "..", "", "/etc/passwd", "a\\b", "c:x", "config.json", "\0"]))
        elif act == "invent":
            told[draw(st.text(max_size=6))] = file(1)
        elif act == "twice":
            where["+" + name] = draw(st.integers(1, 3))
        else:
            told[name] = draw(JSON)
    return where, told


@fuzz(40, 1000, indices())
def test_an_index_and_its_shards_agree_or_are_refused(place, value):
    where, told = value
    folder = write_checkpoint(place / "m", "untied", {}).parent
    (folder / "model.safetensors").unlink()
    tensors = checkpoint("untied")[1]
    for k in set(where.values()):
        save_file({name.removeprefix("+"): tensors[name.removeprefix("+")].clone() for name, j in where.items() if j == k}, folder / f"model-0000{k}-of-00003.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": told}), encoding="utf-8")
    said, state = loaded(folder)
    there = {(name.removeprefix("+"), f"model-0000{k}-of-00003.safetensors") for name, k in where.items()}
    honest = len(there) == len(told) and all((name, file) in there for name, file in told.items() if isinstance(file, str)) and all(isinstance(file, str) for file in told.values())
    assert (said is None) == honest, said
    if honest:
        assert all(torch.equal(state[name.removeprefix("model.")], t) for name, t in tensors.items())


# ------------------------------------------------------------------------------------------------- merging


@st.composite
def clones(draw):
    """(shape of the teacher, width, mode, coordinates, bases, seed)."""
    heads, kv = draw(st.sampled_from([(2, 1), (2, 2), (4, 2)]))
    width, F = draw(st.sampled_from([4, 8, 12])), draw(st.sampled_from([9, 20, 31]))
    shape = dict(vocab_size=2048 if draw(st.integers(0, 9)) == 0 else 11, hidden_size=draw(st.sampled_from([width, width + 4, 16])),
                 intermediate_size=F, num_hidden_layers=draw(st.integers(1, 2)),
                 num_attention_heads=heads, num_key_value_heads=kv, head_dim=draw(st.sampled_from([2, 4, 6])), tie_word_embeddings=draw(st.booleans()),
                 model_type=draw(st.sampled_from(["llama", "qwen2"])))
    mode = draw(st.sampled_from(core.MODES))
    return shape, width, mode, draw(st.sampled_from(["span", "teacher"])), draw(st.sampled_from(core.BASES)), draw(st.integers(0, 1 << 30))


def float64_of(m):
    """The matrix of a map from its coordinates in float64; for compact and implicit bases T and U = [B; 1] - T B written out."""
    Z = m.Z.double()
    if isinstance(m, core.Compact):
        k, T1 = len(m.T1), m.T1.double()
        B = m.B.double() if m.teacher_weight[0] is None else m.N.double() @ m.flip(m.teacher_weight[0]).double()[k:].T
        T = torch.cat([T1, B.T @ (torch.eye(k, dtype=torch.float64) - T1)])
        U = torch.cat([B, torch.eye(B.shape[1], dtype=torch.float64)]) - T @ B
        W = torch.cat([T, U], 1) @ torch.cat([Z * m.sign, m.Zc.double()], 1).T
    else:
        W = m.T.double() @ Z.T + (m.C.double() @ m.Zc.double().T if hasattr(m, "C") else 0)
    return W.T if m.dual else W


@fuzz(8, 300, clones())
@torch.no_grad()
def test_a_merged_clone_is_its_coordinates_and_loads_as_it_was(place, value):
    shape, width, mode, coordinates, bases, seed = value
    teacher = random_net(seed % 1000, **shape)
    clone = clone_of(teacher, mode, width, seed % 997, coordinates, seed, bases)
    generator = torch.Generator().manual_seed(seed)
    for p in clone.coordinates().values():
        p.add_(torch.randn(p.shape, generator=generator))
    clone.deploy()
    run = place / "run"
    shutil.rmtree(run, ignore_errors=True)
    args = dict(stage="distill", mode=mode)
    runs.start(run, args, dict(teacher="t", data=dict(source="s", fingerprint="f"), ranks=1), ROOT / "tiny", clone.student.config.to_hf(torch.float32))
    checkpoints.save_checkpoint(run, {"step": 1, "tokens": 1, "run": runs.read_record(run)["run"]}, {}, clone.weights)
    net, bf16 = (Transformer.from_pretrained(merge.export(run, place / f"out{k}", dtype)) for k, dtype in enumerate((torch.float32, torch.bfloat16)))
    assert net.config == clone.student.config
    for name, w in net.named_parameters():
        exact = float64_of(clone.maps[name]) if name in clone.maps else clone.weights[name].double()
        size = max(1.0, exact.abs().max(), (clone.maps[name].Z.abs().max() if name in clone.maps else 0))
        assert torch.equal(w, clone.weights[name]) and (w - exact).abs().max() <= 4e-6 * size, name
        assert torch.equal(bf16.get_parameter(name), w.bfloat16().float())
    stored = load_file(place / "out1" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16} and ("lm_head.weight" in stored) != shape["tie_word_embeddings"]


# ---------------------------------------------------------------------------------------------------- count


@pytest.mark.slow
def test_ten_thousand_examples_were_run():
    print("\n" + "\n".join(f"{count:>6} {name}" for name, count in DONE.items()) + f"\n{sum(DONE.values()):>6} examples")
    if len(DONE) < 12:
        pytest.skip("only some of the properties ran")
    assert sum(DONE.values()) >= 10_000
