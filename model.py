"""The network: Llama and Qwen2, from a Hugging Face folder and back, in plain PyTorch.

Teacher and student are both instances of the one `Transformer` below; only their `Config` differs.
The module tree carries the names of the HF checkpoints (`layers.3.mlp.gate_proj.weight`), so loading and
saving is a prefix, not a translation table.

    from model import Transformer
    net = Transformer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")   # or a local folder
    logits = net(ids)                                                          # (B, T) -> (B, T, V)
    net.save_pretrained("my-folder")                                           # transformers loads it

Axes: B batch, T positions, V vocabulary, H hidden width, n heads, m key/value heads, d head_dim, F d_ff.
`d` is its own number: H/n for the teacher, but inherited, not derived, for the narrower student.
Sources: Llama (arXiv 2302.13971), GQA (2305.13245), RoPE (2104.09864), Qwen2 (2407.10671).
"""
from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teachers import Refusal, read_json, resolve, write_whole

# --------------------------------------------------------------------------------------------- config


@dataclass(frozen=True)
class Config:
    model_type: str            # "llama" or "qwen2"; only the q/k/v bias differs
    vocab_size: int            # V, padded rows included
    hidden_size: int           # H
    intermediate_size: int     # F
    num_hidden_layers: int
    num_attention_heads: int   # n
    num_key_value_heads: int   # m
    head_dim: int              # d
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None  # None, or the llama3 block
    max_position_embeddings: int
    tie_word_embeddings: bool
    raw: dict = field(default_factory=dict, repr=False, compare=False)  # config.json as read: what we do not use survives export

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2"

    @property
    def dtype(self) -> str:
        """What config.json calls the precision of its files; transformers 4 and 5 have a key each."""
        return self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32"

    @classmethod
    def from_hf(cls, hf: dict, where: str = "config.json") -> Config:
        """Read a config.json, with the older keys or the `rope_parameters` block. Refuses by name what we do not compute."""
        whole = lambda key, high, missing=None, low=1: number(hf, key, where, low, high, missing)
        kind = hf.get("model_type")
        unsupported = {  # key: the values under which our forward pass is theirs
            "model_type": ("llama", "qwen2"), "hidden_act": ("silu", None), "mlp_bias": (False, None),
            "attention_bias": (False, None) if kind == "llama" else (True, False, None),  # Qwen2 always has its q/k/v bias
            "use_sliding_window": (False, None), "quantization_config": (None,), "partial_rotary_factor": (1.0, None),
            "auto_map": (None,), "tie_word_embeddings": (True, False, None)}
        for key, fine in unsupported.items():
            if hf.get(key) not in fine:
                raise Refusal(f"{where}: {key}={hf.get(key)!r} is not supported (only {' or '.join(map(repr, fine))})")

        theta, scaling = read_rope(hf, where)
        hidden, heads, layers = whole("hidden_size", WIDEST), whole("num_attention_heads", WIDEST), whole("num_hidden_layers", 4096)
        config = cls(
            model_type=kind, vocab_size=whole("vocab_size", 1 << 24), hidden_size=hidden, intermediate_size=whole("intermediate_size", WIDEST),
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=whole("num_key_value_heads", WIDEST, missing=heads),
            head_dim=whole("head_dim", WIDEST, missing=0, low=0) or hidden // heads,  # missing, null and 0 all mean "derive"
            rms_norm_eps=number(hf, "rms_norm_eps", where, 1e-30, 1, whole=False), rope_theta=theta, rope_scaling=scaling,
            max_position_embeddings=whole("max_position_embeddings", 1 << 31), tie_word_embeddings=bool(hf.get("tie_word_embeddings")), raw=hf)
        if (types := hf.get("layer_types")) not in (None, [], ["full_attention"] * layers):
            raise Refusal(f"{where}: layer_types={types!r} is not supported (only full_attention, {layers} times)")
        if heads % config.num_key_value_heads:
            raise Refusal(f"{where}: {heads} heads are not a multiple of {config.num_key_value_heads} key/value heads")
        if config.head_dim % 2 or not config.head_dim:
            raise Refusal(f"{where}: head_dim {config.head_dim} is {'odd' if config.head_dim else 'nothing'}; RoPE turns pairs")
        return config

    def to_hf(self, dtype: torch.dtype) -> dict:
        """config.json for both generations of readers: RoPE as one block (v5) and as two keys (v4)."""
        block = self.rope_scaling or {"rope_type": "default"}
        ours = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("raw", "rope_scaling")}
        return self.raw | ours | {
            "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[self.model_type]],
            "hidden_act": "silu", "rope_scaling": self.rope_scaling, "rope_parameters": {"rope_theta": self.rope_theta} | block,
            "dtype": str(dtype).removeprefix("torch."), "torch_dtype": str(dtype).removeprefix("torch.")}

    def at_width(self, width: int) -> Config:
        """The student: width r replaces H, everything else is inherited, head_dim by name."""
        return replace(self, hidden_size=width)


WIDEST = 1 << 20  # beyond it, or above 4096 layers, no network of this kind was ever built: somebody's slip, or a file made to hang its reader


def number(holder: dict, key: str, where: str, low: float, high: float, missing: int | None = None, whole: bool = True):
    """holder[key], a number from low to high; `missing` where it is not there or null. To JSON true and "4096" are no numbers."""
    value = missing if holder.get(key) is None else holder[key]
    if value is None:
        raise Refusal(f"{where}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
        raise Refusal(f"{where}: {key}={value!r:.60} is not a {'whole ' * whole}number from {low:,} to {high:,}; mend it or fetch the file again")
    return value


LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_rope(hf: dict, where: str) -> tuple[float, dict | None]:
    """(theta, llama3 block or None) of a config.json. transformers 5 writes one `rope_parameters` block, 4 wrote `rope_theta` and
    `rope_scaling`; our exports carry both. A default theta would load without a word and degrade with length: it is an error."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(hf.get(key) or {}, dict):
            raise Refusal(f"{where}: {key}={hf[key]!r:.60} is not a block of keys")
    blocks = [hf[key] or {} for key in ("rope_parameters", "rope_scaling") if hf.get(key) or key == "rope_scaling" and key in hf]
    read = []
    for block in blocks or [{}]:
        kind = block.get("rope_type") or block.get("type") or "default"
        if kind not in ("default", "llama3") or block.get("partial_rotary_factor", 1.0) != 1.0:
            raise Refusal(f"{where}: rope type {kind!r} {block} is not supported (only 'default' and 'llama3')")
        if kind == "llama3" and any(key not in block for key in LLAMA3_KEYS):
            raise Refusal(f"{where}: the llama3 rope block needs {', '.join(LLAMA3_KEYS)}; it has {', '.join(block)}")
        if kind == "llama3":
            number(block, "factor", where, 1, 1e6, whole=False)
            low = number(block, "low_freq_factor", where, 1e-3, 1e6, whole=False)
            number(block, "high_freq_factor", where, 1.001 * low, 1e7, whole=False)
            number(block, "original_max_position_embeddings", where, 1, 1 << 31)
        read.append(None if kind == "default" else {"rope_type": "llama3"} | {key: block[key] for key in LLAMA3_KEYS})
    thetas = {float(number(holder, "rope_theta", where, 1, 1e30, whole=False)) for holder in (hf, *blocks) if holder.get("rope_theta") is not None}
    if not thetas:
        raise Refusal(f"{where}: rope_theta is missing")
    if len(thetas) > 1 or any(block != read[0] for block in read):
        raise Refusal(f"{where}: rope_parameters contradicts the older keys rope_theta, rope_scaling; keep one of them")
    return thetas.pop(), read[0]


# --------------------------------------------------------------------------------------------- network


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
        shared = lambda t: t if mask is None else t.repeat_interleave(self.n // self.m, 1)  # CUDA's fast kernels take a mask or grouped heads, not both
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
        """x (B, T, H) -> gate and up (B, T, F) before the activation, and silu(gate) * up before down_proj."""
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
        cos, sin = rope_table(self.rope_freq, torch.arange(ids.shape[1], device=ids.device) if positions is None else positions[:, None])  # (.., T, d)
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
        write_whole(folder / "config.json", json.dumps(self.config.to_hf(dtype), indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def opened(file: Path, device: str = "cpu") -> Iterator[safe_open]:
    """A safetensors file; what goes wrong in it is refused by its name."""
    try:
        with safe_open(file, framework="pt", device=device) as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise Refusal(f"{file}: cannot be read as safetensors ({error}); fetch the file again") from None


def tensor_files(folder: Path) -> dict[Path, dict[str, str]]:
    """File -> {name in our network: key in the file}, for a one-file or a sharded checkpoint. Index and shards must agree, each name be there once."""
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
        found[file] = {key.removeprefix("model."): key for key in inside if not key.endswith("rotary_emb.inv_freq")}  # a buffer that old checkpoints carry
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
        raise Refusal(f"{file}: {key} holds {str(tensor.dtype).removeprefix('torch.')}, not fp16, bf16, fp32 or fp64: a quantised checkpoint is not supported")
    if key == "lm_head.weight" and config.tie_word_embeddings:
        return tensor.to(dtype)  # compared with the embedding once both are here
    if expected is None:
        raise Refusal(f"{file}: tensor {key} has no place in a {config.model_type} of this config")
    if tensor.shape != expected.shape:
        raise Refusal(f"{file}: {key} has shape {tuple(tensor.shape)}, the config implies {tuple(expected.shape)}")
    if not torch.isfinite(tensor := tensor.to(dtype)).all():
        raise Refusal(f"{file}: {key} holds NaN or infinity")
    return tensor
