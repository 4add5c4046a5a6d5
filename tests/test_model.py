"""model.py against transformers' own Llama and Qwen2, float64 and closed forms, on 2 layers of random weights.
A5, B9, ... in a test's name: the entry of the pitfall list that it guards against."""
import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from config import Config
from files import Refusal
from model import RMSNorm, Transformer, rope_frequencies, rope_table, rotate, unit_rms

LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(factor=4.0, original_max_position_embeddings=8192)
SHAPE = dict(vocab_size=97, hidden_size=40, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=16384, tie_word_embeddings=False)
V4 = dict(SHAPE, model_type="llama", rope_theta=500000.0, rope_scaling=LLAMA3)  # the keys of transformers 4
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM, dict(LLAMA3, rope_theta=500000.0)),
         "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(rope_type="default", rope_theta=1000000.0))}
MODELS = {"untied": ("llama", {}), "tied": ("llama", dict(tie_word_embeddings=True)), "qwen2": ("qwen2", {})}
IDS = torch.randint(0, 97, (1, 2048), generator=torch.Generator().manual_seed(0))


def reference(kind, changes):
    """A transformers model in which every weight matters: sharp attention, gains away from 1, large q/k/v biases."""
    make_config, make_model, rope = KINDS[kind]
    config = make_config(**copy.deepcopy(SHAPE | dict(rope_parameters=rope, eos_token_id=None) | changes))
    config._attn_implementation = "eager"
    model, generator = make_model(config).eval(), torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.data = (1 + 0.3 * noise if "norm" in name else 2 * noise if "bias" in name else
                  noise if "embed" in name else noise * p.shape[1] ** -0.5)
    return model


def assert_close(ours, theirs):
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 5e-6 * theirs.abs().max()


def assert_same_logits(ours, theirs, ids=IDS):
    with torch.no_grad():
        assert_close(ours(ids), theirs(ids).logits)


def assert_refused(call, *parts):
    """`call` is refused in one line that holds every part."""
    with pytest.raises(Refusal) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and [part for part in parts if part not in text] == [], text


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Saved by transformers, once: each of MODELS in one file, and the untied one in shards."""
    root = tmp_path_factory.mktemp("originals")
    for name, model in MODELS.items():
        reference(*model).save_pretrained(root / name)
    reference(*MODELS["untied"]).save_pretrained(root / "sharded", max_shard_size="40KB")
    return root


@pytest.fixture
def copied(originals, tmp_path):
    """A function: name -> a fresh copy that a test may damage."""
    return lambda name: shutil.copytree(originals / name, tmp_path / name)


# --------------------------------------------------------------------------------------------- forward


@pytest.mark.parametrize("shard", ["1GB", "40KB"])
@pytest.mark.parametrize("kind, changes", [
    *MODELS.values(), ("llama", dict(num_key_value_heads=1)), ("llama", dict(num_key_value_heads=4, hidden_size=48)),
    ("llama", dict(head_dim=10)), ("qwen2", dict(tie_word_embeddings=True, hidden_size=50))], ids=str)
def test_A5_A7_logits_match_transformers(tmp_path, kind, changes, shard):
    hf = reference(kind, changes)
    hf.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) == 1) == (shard == "1GB")
    assert_same_logits(Transformer.from_pretrained(tmp_path), hf)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [40, 48])
def test_A5_shapes_follow_head_dim(kind, hidden):
    net = Transformer(Config.from_hf(dict(V4, model_type=kind, hidden_size=hidden)))
    q, k, v, o = (getattr(net.layers[0].self_attn, f"{name}_proj") for name in "qkvo")
    assert [tuple(p.weight.shape) for p in (q, k, v, o)] == [(64, hidden), (32, hidden), (32, hidden), (hidden, 64)]
    assert [p.bias is not None for p in (q, k, v, o)] == [kind == "qwen2"] * 3 + [False] and len(net.rope_freq) == 8


@pytest.mark.parametrize("name", ["untied", "qwen2"])
def test_taps_are_what_hooks_on_transformers_see(originals, name):
    hf, ids = reference(*MODELS[name]), IDS[:, :64]
    seen = [{} for _ in hf.model.layers]
    for layer, into in zip(hf.model.layers, seen):
        attention, mlp = layer.self_attn, layer.mlp
        for key, module in dict(q=attention.q_proj, k=attention.k_proj, v=attention.v_proj, o=attention.o_proj,
                                gate=mlp.gate_proj, up=mlp.up_proj, hidden=layer).items():
            module.register_forward_hook(lambda _, args, out, into=into, key=key: into.update({key: args[0] if key == "o" else out}))
    with torch.no_grad():
        normed = hf.model(ids).last_hidden_state
        ours, taps = Transformer.from_pretrained(originals / name)(ids, taps=True, head=False)
    assert_close(ours, normed)
    assert [tap.keys() for tap in taps] == [expected.keys() for expected in seen]
    for tap, expected in zip(taps, seen):
        for key in tap:
            assert_close(tap[key], expected[key])


@pytest.mark.parametrize("name", ["untied", "qwen2"])
def test_B3_generate_is_greedy_and_stops(originals, name):
    net, prompt = Transformer.from_pretrained(originals / name), IDS[:, :5]
    expected = reference(*MODELS[name]).generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    assert expected.shape == (1, 17) and torch.equal(net.generate(prompt, 12), expected)
    stop = expected[0, 7].item()
    end = 5 + expected[0, 5:].tolist().index(stop) + 1  # the stop token itself is kept
    assert torch.equal(net.generate(prompt, 12, stop={stop}), expected[:, :end])


@pytest.mark.parametrize("name", ["untied", "qwen2"])
def test_B6_bf16_is_judged_by_kl_and_top1(originals, name):
    with torch.no_grad():
        theirs = reference(*MODELS[name]).bfloat16()(IDS).logits
        ours = Transformer.from_pretrained(originals / name, dtype=torch.bfloat16)(IDS)
    assert ours.dtype == torch.bfloat16 and (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.96
    p, q = theirs.float().log_softmax(-1), ours.float().log_softmax(-1)
    assert (p.exp() * (p - q)).sum(-1).mean() < 2e-4


# ---------------------------------------------------------------------------------------- RoPE and norm


def test_A7_llama3_rope_frequencies():
    def frequencies(**changes):
        return rope_frequencies(Config.from_hf(V4 | changes))
    plain, scaled = frequencies(head_dim=64, rope_scaling=None), frequencies(head_dim=64)
    assert torch.equal(scaled[:15], plain[:15])
    assert torch.allclose(scaled[18:], plain[18:] / 32, rtol=2e-7, atol=0)
    assert plain[15:18].tolist() == pytest.approx([0.00213112, 0.00141421, 0.000938474], rel=3e-6)
    assert scaled[15:18].tolist() == pytest.approx([0.00129055, 0.000429557, 0.0000970829], rel=3e-6)
    hf = LlamaRotaryEmbedding(LlamaConfig(**SHAPE | dict(head_dim=64, rope_parameters=dict(LLAMA3, rope_theta=500000.0))))
    assert (scaled - hf.inv_freq).abs().max() < 4e-8

    plain, scaled = frequencies(head_dim=128, rope_scaling=None), frequencies(head_dim=128, rope_scaling=dict(LLAMA3, factor=8.0))
    assert (plain != scaled).nonzero()[0].item() == 29
    assert [plain[29].item(), scaled[29].item()] == pytest.approx([0.00261610, 0.00216657], rel=3e-6)


def test_A8_both_config_generations_give_the_same_frequencies():
    v5 = dict(SHAPE, model_type="llama", rope_parameters=dict(LLAMA3, rope_theta=500000.0))
    older = dict({k: v for k, v in LLAMA3.items() if k != "rope_type"}, type="llama3")
    for config in (v5, dict(V4, rope_scaling=older), dict(V4, rope_scaling=dict(LLAMA3, type="llama3"))):
        assert Config.from_hf(config) == Config.from_hf(V4)
        assert torch.equal(rope_frequencies(Config.from_hf(config)), rope_frequencies(Config.from_hf(V4)))


@pytest.mark.parametrize("rope", [{}, dict(rope_scaling=LLAMA3), dict(rope_parameters=LLAMA3), dict(rope_parameters=dict(rope_type="default"))])
def test_A8_missing_theta_is_refused(rope):
    assert_refused(lambda: Config.from_hf(dict(SHAPE, model_type="llama", **rope)), "config.json", "rope_theta")


def test_A8_rope_blocks_that_disagree_are_refused():
    config = dict(V4, rope_parameters=dict(rope_type="default", rope_theta=500000.0))
    assert_refused(lambda: Config.from_hf(config), "config.json", "rope_scaling", "rope_parameters")


def test_B1_rope_turns_half_split_pairs():
    freq = rope_frequencies(Config.from_hf(dict(V4, head_dim=4, rope_theta=10000.0, rope_scaling=None)))
    cos, sin = rope_table(freq, torch.arange(2))
    turned = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), cos[1], sin[1])
    assert torch.allclose(turned, torch.tensor([-1.984111, 1.959901, 2.462378, 4.019800]), rtol=0, atol=1e-6)


def test_B2_rope_survives_a_cast_of_the_whole_model(originals):
    net = Transformer.from_pretrained(originals / "untied").to(torch.bfloat16)
    angle = torch.arange(2048, dtype=torch.float64)[:, None] * rope_frequencies(net.config).double().repeat(2)
    for table, exact in zip(rope_table(net.rope_freq, torch.arange(2048)), (angle.cos(), angle.sin())):
        assert not torch.equal(table[256].bfloat16(), table[257].bfloat16())
        assert (table - exact).abs().max() < 2e-4 and (table.bfloat16() - exact).abs().max() < 0.004


def test_B4_norm_is_exact_and_leaves_its_input_alone():
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    before, norm = x.clone(), RMSNorm(40, 1e-2)
    norm.weight.data.fill_(2.0)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-2).sqrt()
    assert torch.allclose(norm(x).double(), 2 * exact, rtol=3e-7, atol=0) and torch.equal(x, before)
    assert torch.allclose(unit_rms(x.double(), 1e-2), exact, rtol=1e-15, atol=0)


@pytest.mark.parametrize("weight, stream", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")])
def test_B5_norm_is_bitwise_that_of_transformers(weight, stream):
    generator = torch.Generator().manual_seed(3)
    x, gain = torch.randn(64, 40, generator=generator).to(getattr(torch, stream)), torch.randn(40, generator=generator)
    ours, theirs = RMSNorm(40, 1e-2), LlamaRMSNorm(40, 1e-2)
    for norm in (ours, theirs):
        norm.weight.data = gain.to(getattr(torch, weight))
    assert torch.equal(ours(x), theirs(x)) and ours(x).dtype == ours.weight.dtype  # the dtype of the next linear


# ------------------------------------------------------------------------------------ tied heads, export


def test_A9_tied_head_is_one_storage_after_load_and_cast(originals):
    net = Transformer.from_pretrained(originals / "tied")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert net.to(dtype).lm_head.weight is net.embed_tokens.weight and net.embed_tokens.weight.dtype == dtype
    assert len(list(net.parameters())) == len(list(reference(*MODELS["tied"]).parameters()))


@pytest.mark.parametrize("tie, head, outcome", [
    (True, None, "shared"), (True, "same", "shared"), (True, "other", "differs"), (True, "short", "differs"),
    (False, "same", "apart"), (False, "other", "apart"), (False, None, "missing")])
def test_A9_head_in_the_file_and_tie_in_the_config(copied, tie, head, outcome):
    folder = copied("untied")
    tensors = load_file(folder / "model.safetensors")
    other, embedding = tensors.pop("lm_head.weight"), tensors["model.embed_tokens.weight"]
    heads = dict(same=embedding.clone(), other=other, short=other[:-1].clone())
    save_file(tensors | ({"lm_head.weight": heads[head]} if head else {}), folder / "model.safetensors")
    edit_json(folder / "config.json", tie_word_embeddings=tie)
    if outcome in ("differs", "missing"):
        return assert_refused(lambda: Transformer.from_pretrained(folder), str(folder), "lm_head.weight", outcome)
    net = Transformer.from_pretrained(folder)
    assert (net.lm_head.weight is net.embed_tokens.weight) == (outcome == "shared")
    assert torch.equal(net.lm_head.weight, heads[head or "same"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_A9_B30_export_loads_in_transformers(originals, tmp_path, name, dtype):
    net, tied = Transformer.from_pretrained(originals / name), name == "tied"
    net.save_pretrained(tmp_path, getattr(torch, dtype))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["head_dim"], config["dtype"], config["torch_dtype"]) == (tied, 16, dtype, dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (not tied) and {str(t.dtype) for t in tensors.values()} == {f"torch.{dtype}"}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    hf, report = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")) and str(hf.dtype) == f"torch.{dtype}"
    for key, p in net.named_parameters():  # bf16: one rounding of each weight, and the net itself keeps its fp32
        assert torch.equal(hf.get_parameter(key if key.startswith("lm_head") else f"model.{key}"), p.to(hf.dtype)), key
    if dtype == "float32":
        assert_same_logits(net, hf)


@pytest.mark.parametrize("source", ["v4", "v5"])
def test_A8_exported_rope_reads_the_same_in_both_generations(copied, tmp_path, source):
    folder = copied("untied")
    if source == "v4":
        (folder / "config.json").write_text(json.dumps(V4))
    Transformer.from_pretrained(folder).save_pretrained(tmp_path / "out")
    plain = json.loads((tmp_path / "out" / "config.json").read_text())  # what a reader of the older keys alone sees
    assert plain["rope_theta"] == 500000.0 and plain["rope_scaling"] == LLAMA3
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == plain["rope_parameters"] == dict(LLAMA3, rope_theta=500000.0)


@pytest.mark.parametrize("name", MODELS)
def test_B28_a_student_export_changes_only_the_documented_keys(copied, tmp_path, name):
    folder = copied(name)
    edit_json(folder / "config.json", initializer_range=0.0123, eos_token_id=[2, 5], some_note={"kept": "é"})
    before = json.loads((folder / "config.json").read_text())
    student = Transformer(Transformer.from_pretrained(folder).config.at_width(24))
    student.save_pretrained(tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    differing = {key for key in before | after if (key in before, before.get(key)) != (key in after, after.get(key))}
    assert differing == {"hidden_size", "rope_theta", "rope_scaling", "torch_dtype"}  # the last three: for v4 readers
    assert_same_logits(student, AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager"))


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_B27_transposed_weights_export(originals, tmp_path, name):
    net = Transformer.from_pretrained(originals / name)
    down = net.layers[1].mlp.down_proj.weight
    down.data = down.data.T.contiguous().T
    assert not down.is_contiguous()
    net.save_pretrained(tmp_path)
    for key, value in Transformer.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(value, net.state_dict()[key]), key


def test_what_a_config_leaves_null_is_left_out_of_the_export(tmp_path):
    nulls = dict(attention_bias=None, mlp_bias=None, hidden_act=None, tie_word_embeddings=None, layer_types=[], pad_token_id=None)
    Transformer(Config.from_hf(V4 | nulls)).save_pretrained(tmp_path)
    theirs, written = AutoConfig.from_pretrained(tmp_path), json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (theirs.attention_bias, theirs.mlp_bias, theirs.hidden_act, theirs.tie_word_embeddings) == (False, False, "silu", False) and "pad_token_id" in written


def test_half_a_character_in_a_foreign_config_survives_the_export(tmp_path):
    hf = V4 | dict(note="\ud83d é")
    Transformer(Config.from_hf(hf)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["note"] == hf["note"]


# ---------------------------------------------------------------------------------------------- refusals


def test_B12_the_config_decides_the_class_not_the_path(originals, tmp_path):
    net = Transformer.from_pretrained(shutil.copytree(originals / "qwen2", tmp_path / "llama_runs" / "qwen"))
    assert net.config.model_type == "qwen2" and net.layers[0].self_attn.q_proj.bias is not None


@pytest.mark.parametrize("changes", [dict(is_causal=False), dict(original_max_position_embeddings=4096)], ids=str)
def test_keys_that_are_refused_do_change_what_transformers_computes(copied, changes):
    """is_causal turns its mask off; original_max_position_embeddings overrides the llama3 block's own."""
    folder, logits = copied("untied"), []
    for _ in range(2):
        with torch.no_grad():
            logits.append(AutoModelForCausalLM.from_pretrained(folder)(IDS[:, :64]).logits)
        edit_json(folder / "config.json", **changes)
    assert (logits[0] - logits[1]).abs().max() > 0.01


@pytest.mark.parametrize("given, expected", [({}, 10), (dict(head_dim=None), 10), (dict(head_dim=0), 10), (dict(head_dim=12), 12)], ids=str)
def test_B30_head_dim_missing_null_or_zero_means_derive(given, expected):
    config = Config.from_hf({k: v for k, v in V4.items() if k != "head_dim"} | given)
    assert config.head_dim == expected and config.to_hf(torch.float32)["head_dim"] == expected


@pytest.mark.parametrize("changes, parts", [
    (dict(model_type="mistral"), ["model_type", "mistral"]), (dict(model_type=None), ["model_type"]),
    (dict(hidden_act="gelu"), ["hidden_act", "gelu"]), (dict(attention_bias=True), ["attention_bias"]), (dict(mlp_bias=True), ["mlp_bias"]),
    (dict(model_type="qwen2", use_sliding_window=True), ["use_sliding_window"]),
    (dict(layer_types=["full_attention", "sliding_attention"]), ["layer_types", "sliding_attention"]),
    (dict(quantization_config=dict(quant_method="awq", bits=4)), ["quantization_config", "awq"]),
    (dict(auto_map={"AutoModelForCausalLM": "modeling.Mine"}), ["auto_map"]),
    (dict(partial_rotary_factor=0.5), ["partial_rotary_factor"]),
    (dict(rope_scaling=None, rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)), ["rope", "partial_rotary_factor"]),
    (dict(rope_scaling=None, rope_parameters=dict(YARN, rope_type="yarn", rope_theta=1e6)), ["rope", "yarn"]),
    *[(dict(rope_scaling=dict(YARN, **{key: kind})), ["rope", kind]) for kind in ("yarn", "linear", "dynamic") for key in ("type", "rope_type")],
    (dict(rope_scaling=dict(LLAMA3, high_freq_factor=1.0)), ["high_freq_factor=1.0", "1.001"]),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), ["llama3", "low_freq_factor", "original_max_position_embeddings"]),
    (dict(rope_scaling=dict(factor=8.0)), ["rope type None", "factor"]),
    (dict(rope_scaling=None, rope_parameters=dict(full_attention=dict(LLAMA3, rope_theta=5e5))), ["rope type None", "full_attention"]),
    (dict(original_max_position_embeddings=4096), ["original_max_position_embeddings=4096", "8192"]), (dict(is_causal=False), ["is_causal"]),
    *[({key: None}, [key, "missing"]) for key in SHAPE if key not in ("head_dim", "num_key_value_heads", "tie_word_embeddings")],
    (dict(num_key_value_heads=3), ["4 heads", "3 key/value"]), (dict(head_dim=15), ["head_dim", "15"])], ids=str)
def test_B12_unsupported_config_is_refused_by_name(changes, parts):
    Config.from_hf(V4)  # fine as it is: the refusal is about the change
    assert_refused(lambda: Config.from_hf(dict(V4, **changes), "some/config.json"), "some/config.json", *parts)


KEY = "model.layers.1.self_attn.k_proj.weight"
SHARD = "model-00002-of-"


def config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def tensors(change):
    return lambda folder: edit_tensors(folder, change)


def first(pattern, act):
    return lambda folder: act(sorted(folder.glob(pattern))[0])


def index(shard):
    def point(file):
        edit_json(file, weight_map=json.loads(file.read_text())["weight_map"] | {KEY: shard})
    return first("*.index.json", point)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("name, damage, parts", [
    pytest.param(name, damage, parts, id=label) for label, name, damage, parts in [
        ("B9-vocabulary", "untied", config(vocab_size=96), ["lm_head.weight", "(97, 40)", "(96, 40)"]),
        ("B9-hidden", "untied", config(hidden_size=44), ["lm_head.weight", "(97, 40)", "(97, 44)"]),
        ("B9-d_ff", "untied", config(intermediate_size=80), ["mlp.down_proj.weight", "(40, 72)", "(40, 80)"]),
        ("B9-head_dim", "untied", config(head_dim=8), ["self_attn.k_proj.weight", "(32, 40)", "(16, 40)"]),
        ("B9-kv-heads", "untied", config(num_key_value_heads=1), ["self_attn.k_proj.weight", "(32, 40)", "(16, 40)"]),
        ("B9-a-layer-more", "untied", config(num_hidden_layers=3), ["missing", "layers.2."]),
        ("B9-a-layer-less", "untied", config(num_hidden_layers=1), ["model.layers.1.", "no place"]),
        ("B9-no-biases", "untied", config(model_type="qwen2"), ["missing", "_proj.bias"]),
        ("B9-biases", "qwen2", config(model_type="llama"), ["_proj.bias", "no place"]),
        ("B24-nan", "untied", tensors(lambda t: t[KEY][3, 5:6].fill_(float("nan"))), [KEY, "NaN"]),
        ("B24-inf", "untied", tensors(lambda t: t["model.norm.weight"][3:4].fill_(float("inf"))), ["model.norm.weight", "infinity"]),
        ("B24-tied", "tied", tensors(lambda t: t["model.embed_tokens.weight"][3, 5:6].fill_(float("nan"))), ["embed_tokens", "NaN"]),
        ("missing-tensor", "untied", tensors(lambda t: t.pop(KEY)), [KEY.removeprefix("model."), "missing"]),
        ("extra-tensor", "untied", tensors(lambda t: t.update({KEY + "_extra": torch.ones(2)})), [KEY + "_extra", "no place"]),
        ("misshapen", "untied", tensors(lambda t: t.update({KEY: t[KEY].T.contiguous()})), [KEY, "(40, 32)", "(32, 40)"]),
        ("truncated", "untied", first("*.safetensors", truncate), ["model.safetensors", "fetch the file again"]),
        ("empty-file", "untied", first("*.safetensors", lambda f: f.write_bytes(b"")), ["model.safetensors", "fetch the file again"]),
        ("truncated-shard", "sharded", first(SHARD + "*", truncate), [SHARD, "fetch the file again"]),
        ("missing-shard", "sharded", first(SHARD + "*", lambda f: f.unlink()), [SHARD, "missing"]),
        ("outside", "sharded", index("../x.safetensors"), ["../x.safetensors", "outside"]),
        ("absolute", "sharded", index("/x.safetensors"), ["/x.safetensors", "outside"]),
        ("parent", "sharded", index(".."), ["shard ..", "missing"]),
        ("unknown-shard", "sharded", index("model-9.safetensors"), ["model-9.safetensors", "missing"]),
        ("wrong-shard", "sharded", lambda f: index(sorted(f.glob("*.safetensors"))[0].name)(f), ["model-00001-of-", KEY]),
        ("index-is-empty", "sharded", first("*.index.json", lambda f: f.write_text("{}")), ["model-00001-of-", "is not in model.safetensors.index.json"]),
        ("index-is-a-list", "sharded", first("*.index.json", lambda f: f.write_text("[]")), ["index.json"]),
        ("only-bin", "untied", first("*.safetensors", lambda f: f.rename(f.with_name("pytorch_model.bin"))), ["model.safetensors", ".bin"]),
        ("no-config", "untied", first("config.json", lambda f: f.unlink()), ["config.json", "no such file"]),
        ("broken-config", "untied", first("config.json", lambda f: f.write_text("{")), ["config.json", "not valid JSON"]),
        ("config-is-a-list", "untied", first("config.json", lambda f: f.write_text("[]")), ["config.json"])]])
def test_B9_B24_damaged_folder_is_refused_in_one_line(copied, name, damage, parts):
    folder = copied(name)
    damage(folder)
    assert_refused(lambda: Transformer.from_pretrained(folder), str(folder), *parts)
