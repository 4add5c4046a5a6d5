"""The network: Llama and Qwen2, from a Hugging Face folder and back, in plain PyTorch.

Teacher and student are both instances of the one `Transformer` below; only their `Config` differs.
The module tree carries the names of the HF checkpoints (`layers.3.mlp.gate_proj.weight`), so loading and
saving is a prefix, not a translation table.

    from model import Transformer
    net = Transformer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")   # or a local folder
    logits = net(ids)                                                          # (B, T) -> (B, T, V)
    net.save_pretrained("my-folder")                                           # transformers loads it

Axes: B batch, T positions, V vocabulary, H hidden width, n heads, m key/value heads, d head_dim.
`d` is its own number: H/n for the teacher, but inherited, not derived, for the narrower student.
Sources: Llama (arXiv 2302.13971), GQA (2305.13245), RoPE (2104.09864), Qwen2 (2407.10671).
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from config import Config
from files import Refusal, read_json, write_whole
from teachers import resolve


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        # y = g * x / sqrt(mean(x^2) + eps), the mean in fp32 and the gain after the cast back: HF's order of roundings
        return self.weight * unit_rms(x, self.eps)


def widen(x: Tensor) -> Tensor:
    """fp32 from 16 bits; fp32 and fp64 as they are. For means, norms and softmaxes, which 16 bits cannot hold."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """n(x) = x / sqrt(mean(x^2) + eps): RMS normalisation without its gain."""
    wide = widen(x)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope_frequencies(config: Config) -> Tensor:
    """Angles per position, (d/2,) fp32; the llama3 block stretches the slow ones."""
    i = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").float()
    freq = 1.0 / config.rope_theta ** (i / config.head_dim)  # (d/2,)
    if config.rope_scaling is None:
        return freq
    s = config.rope_scaling
    wavelength = 2 * math.pi / freq
    turns = s["original_max_position_embeddings"] / wavelength  # full turns inside the original context
    # smooth = 1: fast, kept; smooth = 0: slow, divided by factor; linear in between
    smooth = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
    return (1 - smooth) * freq / s["factor"] + smooth * freq


def rope_table(freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """positions (..., T) -> cos and sin, (..., T, d) each. Made in fp32 at every call: a stored buffer would be ruined by
    `model.to(bfloat16)`, which cannot tell position 256 from 257."""
    angle = positions[..., None].float() * freq.to(positions.device)  # (..., T, d/2)
    angle = torch.cat([angle, angle], dim=-1)  # (..., T, d)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """HF's half-split pairs: (x_i, x_{i+d/2}) turn together. Meta's own files pair (x_2i, x_2i+1); HF's are permuted."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.n, self.m, self.d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.n * self.d, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, self.m * self.d, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, self.m * self.d, bias=c.qkv_bias)
        self.o_proj = nn.Linear(self.n * self.d, c.hidden_size, bias=False)

    def mix(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (B, T, H) -> q (B, T, n*d), k and v (B, T, m*d) before RoPE, and their attention mix (B, T, n*d) before o_proj.
        mask (B, 1, T, T) bool, True where attention may go; None: causal."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return q, k, v, self.attend(q, k, v, cos, sin, mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """softmax(q k^T / sqrt(d)) v, q and k turned by RoPE, all heads side by side: (B, T, n*d)."""
        B, T, _ = q.shape
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)  # under autocast q is bf16 while the stream is fp32
        heads = lambda t, count: t.view(B, T, count, self.d).transpose(1, 2)  # (B, count, T, d)
        # CUDA's fast kernels take a mask or grouped heads, not both
        shared = lambda t: t if mask is None else t.repeat_interleave(self.n // self.m, 1)
        mixed = F.scaled_dot_product_attention(  # scale 1/sqrt(d): d is head_dim, never H/n
            rotate(heads(q, self.n), cos, sin), shared(rotate(heads(k, self.m), cos, sin)), shared(heads(v, self.m)),
            attn_mask=mask, is_causal=mask is None, enable_gqa=mask is None and self.n != self.m)  # (B, n, T, d)
        return mixed.transpose(1, 2).reshape(B, T, self.n * self.d)


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, H) -> gate and up (B, T, d_ff) before the activation, and silu(gate) * up before down_proj."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return gate, up, F.silu(gate) * up


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """h (B, T, H) -> the stream after this layer, and its taps: what the losses may align."""
        q, k, v, o = self.self_attn.mix(self.input_layernorm(h), cos, sin, mask)
        h = h + self.self_attn.o_proj(o)
        gate, up, product = self.mlp.mix(self.post_attention_layernorm(h))
        h = h + self.mlp.down_proj(product)
        return h, dict(q=q, k=k, v=v, o=o, gate=gate, up=up, hidden=h)


class Transformer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope_freq = rope_frequencies(config)
        self.checkpointing = False  # keep a block's input and taps for backward, compute the rest of it a second time
        self.tie()

    def tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, taps: bool = False, head: bool = True, positions: Tensor | None = None, mask: Tensor | None = None):
        """ids (B, T) int64 -> logits (B, T, V), or with head=False the normed stream (B, T, H) that the head would read.
        With taps=True a pair: that, and one dict of activations a layer (see Block).
        positions (B, T) and mask (B, 1, T, T), True where attention may go, replace 0 .. T-1 and causal attention."""
        h = self.embed_tokens(ids)  # (B, T, H)
        places = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions[:, None]  # (T,) or (B, 1, T)
        cos, sin = rope_table(self.rope_freq, places)  # (.., T, d)
        tapped = []
        for block in self.layers:
            if self.checkpointing and torch.is_grad_enabled():  # nothing in a block is random: no generator state to keep
                h, tap = checkpoint(block, h, cos, sin, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                h, tap = block(h, cos, sin, mask)
            if taps:
                tapped.append(tap)
        out = self.norm(h)
        if head:
            out = self.lm_head(out)
        return (out, tapped) if taps else out

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int, stop: set[int] = frozenset()) -> Tensor:
        """Greedy continuation of ids (1, T) by up to `count` tokens. Without a cache: each token reruns the prefix."""
        for _ in range(count):
            following = self.lm_head(self(ids, head=False)[:, -1:]).argmax(-1)  # (1, 1)
            ids = torch.cat([ids, following], dim=1)
            if following.item() in stop:
                break
        return ids

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Random weights for pretraining: N(0, 0.02), the two writes into the stream scaled by 1/sqrt(2 * layers) (GPT-2)."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                depth = 2 * self.config.num_hidden_layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                p.copy_(torch.randn(p.shape, generator=generator) * 0.02 / math.sqrt(depth))
            else:
                p.fill_(1.0 if "norm" in name else 0.0)

    # ----------------------------------------------------------------------------------------- in and out

    @classmethod
    def from_pretrained(cls, source: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Transformer:
        """A local HF folder, a hub id or a preset -> the network in eval mode. Strict: every tensor by name, shape and
        finiteness, or a Refusal that names it."""
        folder, _ = resolve(str(source))
        config = Config.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
        with torch.device("meta"):
            net = cls(config)
        expected = net.state_dict()
        if config.tie_word_embeddings:
            del expected["lm_head.weight"]
        loaded = {}
        for file, keys in tensor_files(folder).items():
            with opened(file, str(device)) as tensors:
                for name, key in keys.items():
                    loaded[name] = checked(tensors.get_tensor(key), key, expected.get(name), file, config, dtype)
        head = loaded.pop("lm_head.weight", None) if config.tie_word_embeddings else None
        if missing := sorted(expected.keys() - loaded.keys()):
            raise Refusal(f"{folder}: {len(missing)} tensors are missing, first {missing[0]}; the config asks for them")
        if head is not None and not torch.equal(head, loaded["embed_tokens.weight"]):
            raise Refusal(f"{folder}: tie_word_embeddings is true but lm_head.weight differs from embed_tokens.weight; "
                          "engines disagree on such a file: set it to false or drop lm_head.weight")
        if config.tie_word_embeddings:
            loaded["lm_head.weight"] = loaded["embed_tokens.weight"]
        net.load_state_dict(loaded, assign=True)
        net.tie()
        return net.eval()

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write model.safetensors and config.json. A tied head is not written twice; each file appears whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {(key if key.startswith("lm_head") else f"model.{key}"): value.detach().to("cpu", dtype).contiguous()
                   for key, value in self.state_dict().items()
                   if not (key == "lm_head.weight" and self.config.tie_word_embeddings)}
        beside = folder / "model.safetensors.tmp"
        try:
            save_file(tensors, beside, metadata={"format": "pt"})
            beside.chmod(0o644)  # safetensors makes files that only their owner can read
            os.replace(beside, folder / "model.safetensors")
        except SafetensorError as error:
            raise OSError(f"{folder / 'model.safetensors'}: cannot be written ({error}); make room, or write to another place") from None
        finally:
            beside.unlink(missing_ok=True)
        write_whole(folder / "config.json", json.dumps(self.config.to_hf(dtype), indent=2) + "\n")


@contextlib.contextmanager
def opened(file: Path, device: str = "cpu") -> Iterator[safe_open]:
    """A safetensors file; what goes wrong in it is refused by its name."""
    try:
        with safe_open(file, framework="pt", device=device) as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise Refusal(f"{file}: cannot be read as safetensors ({error}); fetch the file again") from None


def tensor_files(folder: Path) -> dict[Path, dict[str, str]]:
    """File -> {name in our network: key in the file}, for a one-file or a sharded checkpoint. Index and shards must agree, each
    name be there once."""
    index, files = folder / "model.safetensors.index.json", {folder / "model.safetensors": None}
    if not (folder / "model.safetensors").is_file():
        if not index.is_file():
            raise Refusal(f"{folder}: neither model.safetensors nor {index.name}; pickled checkpoints (.bin) are not read")
        files = shards(index)
    found, names = {}, set()
    for file, listed in files.items():
        with opened(file) as tensors:
            inside = sorted(tensors.keys())
        for key in sorted({*inside} ^ {*(inside if listed is None else listed)}):
            raise Refusal(f"{file}: tensor {key} is {'' if key in inside else 'not '}in it, against {index.name}; fetch both again")
        kept = [key for key in inside if not key.endswith("rotary_emb.inv_freq")]  # a buffer that old checkpoints carry
        found[file] = {key.removeprefix("model."): key for key in kept}
        for name in (key.removeprefix("model.") for key in inside):
            if name in names:
                raise Refusal(f"{file}: tensor {name} is there twice, with `model.` before it and without; drop one of them")
            names.add(name)
    return found


def shards(index: Path) -> dict[Path, list[str]]:
    """Shard -> the keys that the index says are in it."""
    places = read_json(index).get("weight_map") or {}
    if not isinstance(places, dict):
        raise Refusal(f"{index}: its weight_map is no list of tensors and their shards; fetch the file again")
    files: dict[Path, list[str]] = {}
    for key, name in places.items():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or ":" in name:  # the last two: Windows
            raise Refusal(f"{index}: shard {name!r:.60} lies outside the folder")
        if not (index.parent / name).is_file():
            raise Refusal(f"{index.parent}: shard {name} is missing; the index asks for it")
        files.setdefault(index.parent / name, []).append(key)
    for stray in sorted({*index.parent.glob("model-*.safetensors")} - files.keys()):
        raise Refusal(f"{stray}: is not in {index.name}; fetch the index again, or delete this shard if it belongs to another checkpoint")
    return files


def checked(tensor: Tensor, key: str, expected: Tensor | None, file: Path, config: Config, dtype: torch.dtype) -> Tensor:
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise Refusal(f"{file}: {key} holds {kind}, not fp16, bf16, fp32 or fp64: a quantised checkpoint is not supported")
    if key == "lm_head.weight" and config.tie_word_embeddings:
        return tensor.to(dtype)  # compared with the embedding once both are here
    if expected is None:
        raise Refusal(f"{file}: tensor {key} has no place in a {config.model_type} of this config")
    if tensor.shape != expected.shape:
        raise Refusal(f"{file}: {key} has shape {tuple(tensor.shape)}, the config implies {tuple(expected.shape)}")
    if not torch.isfinite(tensor := tensor.to(dtype)).all():
        raise Refusal(f"{file}: {key} holds NaN or infinity")
    return tensor


def fingerprint(folder: Path) -> str:
    """16 hex digits of a model folder's config and weights, another where any byte of them is, whatever the folder is called."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(tensor_files(folder)):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]
