"""A model as one GGUF file, for llama.cpp and what is built on it.

    python merge.py RUN --gguf                        # -> RUN/student.gguf
    python merge.py FOLDER --gguf --dtype bfloat16    # any Llama or Qwen2 folder -> FOLDER.gguf

The matrices are ours, cast to --dtype; gains and biases stay fp32, as llama.cpp adds and multiplies them. Two things differ from a
Hugging Face folder:

- RoPE turns neighbours there, (x_2i, x_2i+1), where HF's checkpoints turn halves, (x_i, x_i+d/2): the rows of q and k change places.
- llama.cpp's `qwen2` graph fixes d = H/n, which no narrower student keeps. Its `llama` graph takes d as a number, a bias on q, k and v
  where the file holds one, and llama3's stretch of the slow angles. That is Qwen2's function too, so a student of Qwen2 is written as
  `llama` with biases; only a Qwen2 of H = n d, such as the teacher itself, as `qwen2`.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import chat
from files import Refusal, read_json
from model import Transformer, rope_frequencies
from tokenizer import DIGITS_THEN_GPT2, GPT2, Tokenizer

FILE_TYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}  # general.file_type

# llama.cpp carries the split patterns in its code and the file only names one: what has no name there cannot be exported
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {GPT2: "gpt-2", DIGITS_THEN_GPT2: "smollm", LLAMA3: "llama-bpe", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}


def write_gguf(net: Transformer, tokenizer: Path, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write `net` and the tokenizer files of folder `tokenizer` as the GGUF file `out`, which appears whole or not at all.

    Raises Refusal, in one line, for a tokenizer that llama.cpp has no name for and for a weight too large for fp16.
    """
    try:
        import gguf
    except ImportError:
        raise Refusal("GGUF needs the package gguf: pip install gguf") from None
    c = net.config
    arch = "qwen2" if c.qkv_bias and c.hidden_size == c.num_attention_heads * c.head_dim and c.rope_scaling is None else "llama"
    making = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    writer = gguf.GGUFWriter(making, arch)
    writer.add_type("model")
    writer.add_name(out.stem.encode("utf-8", "replace").decode())
    writer.add_file_type(FILE_TYPE[dtype])
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)  # without these three a reader takes H/n
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    add_tokenizer(writer, tokenizer, c.vocab_size)

    if c.rope_scaling is not None:  # llama.cpp divides its angles by these (d/2,)
        writer.add_tensor("rope_freqs.weight", (rope_frequencies(replace(c, rope_scaling=None)) / rope_frequencies(c)).numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)  # `qwen2` has the same
    kinds = {torch.float32: gguf.GGMLQuantizationType.F32, torch.float16: gguf.GGMLQuantizationType.F16,
             torch.bfloat16: gguf.GGMLQuantizationType.BF16}
    try:
        for name, tensor in tensors(net, arch, dtype):
            raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # numpy knows no bfloat16
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), raw.numpy(), raw_dtype=kinds[tensor.dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(making, out)
    finally:
        writer.close()
        making.unlink(missing_ok=True)
    return out


def tensors(net: Transformer, arch: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name in a HF checkpoint, contiguous tensor as llama.cpp wants it). A tied head is left out: readers take the embedding."""
    c = net.config
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    for name, tensor in net.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if arch == "llama" and (module := name.split(".")[-2]) in heads:
            tensor = neighbours(tensor, heads[module])
        tensor = tensor.to("cpu", dtype if tensor.dim() == 2 else torch.float32).contiguous()
        if not torch.isfinite(tensor).all():
            raise Refusal(f"{name}: a weight is too large for float16; export as float32 or bfloat16")
        yield name if name.startswith("lm_head") else f"model.{name}", tensor


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """(heads * d, ...) -> the same rows, i and i + d/2 of each head side by side: 2i and 2i + 1."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def add_tokenizer(writer, folder: Path, rows: int) -> None:
    """The byte-level BPE of `folder` under the name that llama.cpp has for its split pattern; `rows`: height of the embedding.

    llama.cpp normalises no text: where the tokenizer asks for NFC (Qwen2), text in another form gets other ids there.
    """
    from gguf import TokenType
    tokenizer, spec = Tokenizer(folder), read_json(folder / "tokenizer.json")
    if tokenizer.pattern not in SPLITS:
        raise Refusal(f"{folder / 'tokenizer.json'}: llama.cpp has no name for the split pattern {tokenizer.pattern!r}; "
                      f"exported are {', '.join(SPLITS.values())}")
    if tokenizer.vocab_size > rows:
        raise Refusal(f"{folder / 'tokenizer.json'}: token id {tokenizer.vocab_size - 1}, but the embedding has {rows} rows")
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [TokenType.UNUSED] * rows  # rows of a padded embedding are no token
    for token, i in spec["model"]["vocab"].items():
        tokens[i], kinds[i] = token, TokenType.NORMAL
    for token in spec.get("added_tokens", []):
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")  # llama.cpp's name for every byte-level BPE
    writer.add_tokenizer_pre(SPLITS[tokenizer.pattern])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]])

    template = chat.read_template(folder)
    if tokenizer.begin is not None:
        writer.add_bos_token_id(tokenizer.begin if tokenizer.bos is None else tokenizer.bos)
    writer.add_eos_token_id(tokenizer.end)
    writer.add_add_bos_token(tokenizer.bos is not None)  # only where the tokenizer itself begins a text with it
    if template:
        writer.add_chat_template(template[0])
