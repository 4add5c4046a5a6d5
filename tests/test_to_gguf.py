"""to_gguf.py: what a GGUF reader finds in the file is our network, in llama.cpp's order of rows, and our tokenizer."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import to_gguf
from conftest import random_net
from files import Refusal
from smollm2 import INNER, OUTER
from to_gguf import LLAMA3, SPLITS, write_gguf
from tokenizer import PATTERNS, Tokenizer

TINY = Path(to_gguf.__file__).parent / "tiny"
ROWS = 2064  # 16 more than tiny has tokens
SCALED = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
KINDS = {  # changes of conftest's SHAPE (4 heads of 8, 2 kv) -> the architecture in the file
    "llama": (dict(hidden_size=12), "llama"),
    "llama-untied": (dict(tie_word_embeddings=False), "llama"),
    "llama3": (dict(rope_scaling=SCALED), "llama"),
    "qwen2": (dict(model_type="qwen2", hidden_size=32), "qwen2"),  # H = n d
    "qwen2-narrow": (dict(model_type="qwen2", hidden_size=10, tie_word_embeddings=False), "llama"),
    "qwen2-scaled": (dict(model_type="qwen2", hidden_size=32, rope_scaling=SCALED), "llama")}


def net_of(kind):
    return random_net(vocab_size=ROWS, rms_norm_eps=1e-6, rope_theta=50000.0, **KINDS[kind][0])


def opened(file):
    reader = GGUFReader(file)
    return ({key: field.contents() for key, field in reader.fields.items()},
            {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors},
            {t.name: t.tensor_type.name for t in reader.tensors})


def halves(rows, heads):
    """llama.cpp's order of a head's rows, back to HF's: 0, 2, 4, ... then 1, 3, 5, ..."""
    d = rows.shape[0] // heads
    return torch.cat([rows[h * d:(h + 1) * d][start::2] for h in range(heads) for start in (0, 1)])


@pytest.fixture
def folder(tmp_path):
    """A tokenizer folder to change: `set(file, **keys)` writes keys into one of its files."""
    copy = shutil.copytree(TINY, tmp_path / "tokenizer")

    def put(name, **keys):
        (copy / name).write_text(json.dumps(json.loads((copy / name).read_text(encoding="utf-8")) | keys), encoding="utf-8")
    return copy, put


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_in_the_file_bit_for_bit(kind, tmp_path):
    net = net_of(kind)
    meta, weights, types = opened(write_gguf(net, TINY, tmp_path / "a.gguf"))
    arch = meta["general.architecture"]
    assert arch == KINDS[kind][1] and set(types.values()) == {"F32"}
    weights.pop("rope_freqs.weight", None)
    back = {hf: gguf.removesuffix(".weight") for gguf, hf in OUTER.items()} | {"lm_head.weight": "output"}
    expected = {k: v for k, v in net.state_dict().items() if k != "lm_head.weight" or not net.config.tie_word_embeddings}
    for name, ours in expected.items():
        (stem, end), module = name.rsplit(".", 1), ""
        if stem.startswith("layers"):
            _, layer, module = stem.split(".", 2)
            at = f"blk.{layer}.{next(gguf for gguf, hf in INNER.items() if hf == module)}.{end}"
        else:
            at = f"{back[name if name == 'lm_head.weight' else f'model.{name}']}.{end}"
        theirs = weights.pop(at)
        if arch == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            theirs = halves(theirs, 4 if "q_proj" in module else 2)
        assert torch.equal(theirs, ours), name
    assert not weights


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_is_told_in_full_a5_b30(kind, tmp_path):
    net = net_of(kind)
    meta, _, _ = opened(write_gguf(net, TINY, tmp_path / "a.gguf"))
    told = {key.split(".", 1)[1]: value for key, value in meta.items() if key.startswith(KINDS[kind][1])}
    assert told.pop("attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert told == {"vocab_size": ROWS, "context_length": 128, "embedding_length": net.config.hidden_size, "block_count": 2,
                    "feed_forward_length": 60, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8,
                    "attention.value_length": 8, "rope.dimension_count": 8, "rope.freq_base": 50000.0}


@pytest.mark.parametrize("kind", ["llama", "llama-untied", "qwen2"])
@torch.no_grad()
def test_transformers_reads_the_file_as_our_network(kind, tmp_path):
    """transformers has a GGUF reader of its own: names, order of rows, biases, shape and RoPE by somebody else's code."""
    net = net_of(kind)
    write_gguf(net, TINY, tmp_path / "a.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32).eval()
    ids = torch.randint(0, ROWS, (2, 40), generator=torch.Generator().manual_seed(2))
    ours = net(ids)
    assert theirs.config.model_type == net.config.model_type
    assert (theirs(ids).logits - ours).abs().max() < 1e-5 * ours.abs().max()


@torch.no_grad()
def test_a_narrow_qwen2_is_a_llama_with_biases(tmp_path):
    """What the file says under the name `llama`, in transformers' Llama: heads of 8 at width 12 + bias on q, k, v = our Qwen2."""
    net = random_net(model_type="qwen2", vocab_size=ROWS, hidden_size=12)
    meta, weights, _ = opened(write_gguf(net, TINY, tmp_path / "a.gguf"))
    assert meta["general.architecture"] == "llama"
    config = LlamaConfig(vocab_size=ROWS, hidden_size=12, intermediate_size=60, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                         rms_norm_eps=1e-5, rope_parameters=dict(rope_theta=10000.0, rope_type="default"), attention_bias=True, tie_word_embeddings=True)
    state = {OUTER[name]: w for name, w in weights.items() if name in OUTER}
    for name, w in weights.items():
        if name not in OUTER:
            _, layer, module, end = name.split(".")
            w = halves(w, {"attn_q": 4, "attn_k": 2}[module]) if module in ("attn_q", "attn_k") else w
            state[f"model.layers.{layer}.{INNER[module]}.{end}"] = w
    theirs = LlamaForCausalLM(config).eval()
    absent, extra = theirs.load_state_dict(state, strict=False)
    assert not extra and all(name == "lm_head.weight" or name.endswith("o_proj.bias") for name in absent)
    for layer in theirs.model.layers:
        layer.self_attn.o_proj.bias.zero_()
    theirs.tie_weights()
    ids = torch.randint(0, ROWS, (2, 40), generator=torch.Generator().manual_seed(2))
    ours = net(ids)
    assert (theirs(ids).logits - ours).abs().max() < 1e-5 * ours.abs().max()


@pytest.mark.parametrize("kind", ["llama3", "qwen2-scaled"])
def test_llama3_rope_goes_in_as_divisors_of_the_angles_a7(kind, tmp_path):
    _, weights, types = opened(write_gguf(net_of(kind), TINY, tmp_path / "a.gguf", torch.bfloat16))
    assert types["rope_freqs.weight"] == "F32"
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=128, rope_parameters=SCALED | {"rope_theta": 50000.0})
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 50000.0 ** -(torch.arange(0, 8, 2) / 8)
    assert torch.allclose(plain / weights["rope_freqs.weight"], theirs, rtol=1e-6)
    assert not torch.allclose(plain, theirs, rtol=0.1)


@pytest.mark.parametrize("dtype, name, code", [(torch.float16, "F16", 1), (torch.bfloat16, "BF16", 32)])
def test_matrices_are_cast_once_and_vectors_stay_fp32_b23(dtype, name, code, tmp_path):
    net = net_of("qwen2")
    meta, weights, types = opened(write_gguf(net, TINY, tmp_path / "a.gguf", dtype))
    assert meta["general.file_type"] == code and {types[t] for t, w in weights.items() if w.dim() == 2} == {name}
    assert {types[t] for t, w in weights.items() if w.dim() == 1} == {"F32"} and {w.dim() for w in weights.values()} == {1, 2}
    layer = net.layers[1]
    assert torch.equal(weights["blk.1.ffn_down.weight"], layer.mlp.down_proj.weight.to(dtype).float())
    assert torch.equal(weights["blk.1.attn_k.bias"], layer.self_attn.k_proj.bias) and torch.equal(weights["output_norm.weight"], net.norm.weight)


def test_a_weight_beyond_fp16_is_refused_by_name_and_the_old_file_stands_b7(tmp_path):
    net, out = net_of("llama"), tmp_path / "a.gguf"
    write_gguf(net, TINY, out, torch.float16)
    before = out.read_bytes()
    with torch.no_grad():
        net.layers[1].mlp.up_proj.weight[3, 2] = 7e4
    with pytest.raises(Refusal, match=r"layers\.1\.mlp\.up_proj\.weight.*float16"):
        write_gguf(net, TINY, out, torch.float16)
    assert out.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.gguf"]
    write_gguf(net, TINY, out, torch.bfloat16)


def test_a_name_that_is_no_utf8_is_written_with_a_mark_in_its_place(tmp_path):
    meta, _, _ = opened(write_gguf(net_of("llama"), TINY, tmp_path / "a\udcff.gguf"))
    assert meta["general.name"] == "a?"


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")
    monkeypatch.setattr(to_gguf.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_gguf(net_of("llama"), TINY, tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


def test_without_the_package_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(Refusal, match="pip install gguf"):
        write_gguf(net_of("llama"), TINY, tmp_path / "a.gguf")


def test_tokens_kinds_and_merges(folder, tmp_path):
    copy, put = folder
    spec = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    put("tokenizer.json", added_tokens=spec["added_tokens"] + [dict(spec["added_tokens"][0], id=2048, content="<tool>", special=False)])
    meta, _, _ = opened(write_gguf(net_of("llama"), copy, tmp_path / "a.gguf"))
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    theirs = AutoTokenizer.from_pretrained(copy)
    assert tokens[:2049] == theirs.convert_ids_to_tokens(range(2049)) and len(tokens) == len(set(tokens)) == ROWS  # llama.cpp wants distinct ones
    assert kinds == [3] + [1] * 2047 + [4] + [5] * 15  # control, normal, user-defined, unused
    ranks = {tuple(pair): rank for rank, pair in enumerate(spec["model"]["merges"])}
    assert [ranks[tuple(merge.split(" "))] for merge in meta["tokenizer.ggml.merges"]] == list(range(len(ranks)))
    assert meta["tokenizer.ggml.model"] == "gpt2"


def split(regex):
    return dict(type="Sequence", pretokenizers=[dict(type="Split", pattern=dict(Regex=regex), behavior="Isolated", invert=False),
                                                dict(type="ByteLevel", add_prefix_space=False, use_regex=False)])


DIGITS = dict(type="Sequence", pretokenizers=[dict(type="Digits", individual_digits=True), dict(type="ByteLevel", add_prefix_space=False, use_regex=True)])
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("pre, name", [(None, "gpt-2"), (DIGITS, "smollm"), (split(LLAMA3), "llama-bpe"), (split(QWEN2), "qwen2")])
def test_the_split_pattern_goes_by_name(folder, tmp_path, pre, name):
    copy, put = folder
    if pre:
        put("tokenizer.json", pre_tokenizer=pre)
    meta, _, _ = opened(write_gguf(net_of("llama"), copy, tmp_path / "a.gguf"))
    assert meta["tokenizer.ggml.pre"] == name


def test_a_split_without_a_name_and_tokens_without_a_row_are_refused(folder, tmp_path):
    copy, put = folder
    with pytest.raises(Refusal, match="token id 2047, but the embedding has 2040 rows"):
        write_gguf(random_net(vocab_size=2040), copy, tmp_path / "a.gguf")
    put("tokenizer.json", pre_tokenizer=split(sorted(PATTERNS - SPLITS.keys())[0]))
    with pytest.raises(Refusal, match=r"no name for the split pattern .*llama-bpe"):
        write_gguf(net_of("llama"), copy, tmp_path / "a.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer"]


def test_ends_and_chat_template(folder, tmp_path):
    copy, put = folder
    meta, _, _ = opened(write_gguf(net_of("llama"), copy, tmp_path / "a.gguf"))
    assert meta["tokenizer.ggml.eos_token_id"] == 0 and meta["tokenizer.ggml.add_bos_token"] is False
    assert "tokenizer.ggml.bos_token_id" not in meta and "tokenizer.chat_template" not in meta
    special = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    put("tokenizer.json", added_tokens=[dict(special, id=i, content=c) for i, c in ((0, "<|endoftext|>"), (2048, "<s>"), (2049, "<|eot|>"))],
        post_processor=dict(type="TemplateProcessing", single=[{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                            pair=[{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                            special_tokens={"<s>": {"id": "<s>", "ids": [2048], "tokens": ["<s>"]}}))
    put("tokenizer_config.json", bos_token="<s>", eos_token={"__type": "AddedToken", "content": "<|eot|>"}, chat_template="{{ messages }}")
    meta, _, _ = opened(write_gguf(net_of("llama"), copy, tmp_path / "a.gguf"))
    assert (meta["tokenizer.ggml.bos_token_id"], meta["tokenizer.ggml.eos_token_id"]) == (2048, 2049)
    assert meta["tokenizer.ggml.add_bos_token"] is True and AutoTokenizer.from_pretrained(copy)("a")["input_ids"][0] == 2048 == Tokenizer(copy).bos
    assert meta["tokenizer.chat_template"] == "{{ messages }}"
    (copy / "chat_template.jinja").write_text("{{ 'jinja é' }}", encoding="utf-8")
    meta, _, _ = opened(write_gguf(net_of("llama"), copy, tmp_path / "a.gguf"))
    assert meta["tokenizer.chat_template"] == "{{ 'jinja é' }}"
