"""What a config.json says of a network: a Hugging Face file, of transformers 4 or 5, becomes one `Config`, and that a file again.

What the network in model.py does not compute is refused here, by name, before anything is loaded.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from files import Refusal


@dataclass(frozen=True)
class Config:
    model_type: str            # "llama" or "qwen2"; only the q/k/v bias differs
    vocab_size: int            # V, padded rows included
    hidden_size: int           # H
    intermediate_size: int     # d_ff
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
        supported = {  # key: the values under which our forward pass is theirs
            "model_type": ("llama", "qwen2"), "hidden_act": ("silu", None), "mlp_bias": (False, None),
            "attention_bias": (False, None) if kind == "llama" else (True, False, None),  # Qwen2 always has its q/k/v bias
            "use_sliding_window": (False, None), "is_causal": (True, None), "quantization_config": (None,),
            "partial_rotary_factor": (1.0, None), "auto_map": (None,), "tie_word_embeddings": (True, False, None)}
        for key, fine in supported.items():
            if hf.get(key) not in fine:
                raise Refusal(f"{where}: {key}={hf.get(key)!r} is not supported (only {' or '.join(map(repr, fine))})")

        theta, scaling = read_rope(hf, where)
        hidden, heads, layers = whole("hidden_size", WIDEST), whole("num_attention_heads", WIDEST), whole("num_hidden_layers", 4096)
        raw = {key: value for key, value in hf.items()
               if value not in (None, []) or key not in (*supported, "layer_types")}  # transformers 5 reads no null there
        config = cls(
            model_type=kind, vocab_size=whole("vocab_size", 1 << 24),
            hidden_size=hidden, intermediate_size=whole("intermediate_size", WIDEST), num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=whole("num_key_value_heads", WIDEST, missing=heads),
            head_dim=whole("head_dim", WIDEST, missing=0, low=0) or hidden // heads,  # missing, null and 0 all mean "derive"
            rms_norm_eps=number(hf, "rms_norm_eps", where, 1e-30, 1, whole=False), rope_theta=theta, rope_scaling=scaling,
            max_position_embeddings=whole("max_position_embeddings", 1 << 31),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings")), raw=raw)
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


# beyond it, or above 4096 layers, no network of this kind was ever built: somebody's slip, or a file made to hang its reader
WIDEST = 1 << 20


def number(holder: dict, key: str, where: str, low: float, high: float, missing: int | None = None, whole: bool = True):
    """holder[key], a number from low to high; `missing` where it is not there or null. To JSON true and "4096" are no numbers."""
    value = missing if holder.get(key) is None else holder[key]
    if value is None:
        raise Refusal(f"{where}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
        kind = "whole number" if whole else "number"
        raise Refusal(f"{where}: {key}={value!r:.60} is not a {kind} from {low:,} to {high:,}; mend it or fetch the file again")
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
        # what else stands in a block without a type, a factor or a block a layer, would be lost
        plain = block.keys() <= {"rope_theta", "partial_rotary_factor"}
        kind = block.get("rope_type") or block.get("type") or ("default" if plain else None)
        if kind not in ("default", "llama3") or block.get("partial_rotary_factor", 1.0) != 1.0:
            raise Refusal(f"{where}: rope type {kind!r} {block} is not supported (only 'default' and 'llama3')")
        if kind == "llama3" and any(key not in block for key in LLAMA3_KEYS):
            raise Refusal(f"{where}: the llama3 rope block needs {', '.join(LLAMA3_KEYS)}; it has {', '.join(block)}")
        if kind == "llama3":
            number(block, "factor", where, 1, 1e6, whole=False)
            low = number(block, "low_freq_factor", where, 1e-3, 1e6, whole=False)
            number(block, "high_freq_factor", where, 1.001 * low, 1e7, whole=False)
            inside = number(block, "original_max_position_embeddings", where, 1, 1 << 31)
            outside = hf.get("original_max_position_embeddings")  # transformers takes this one
            if outside not in (inside, None):
                raise Refusal(f"{where}: original_max_position_embeddings={outside!r:.60} contradicts the llama3 block's {inside}; "
                              "keep one of them")
        read.append(None if kind == "default" else {"rope_type": "llama3"} | {key: block[key] for key in LLAMA3_KEYS})
    holders = [holder for holder in (hf, *blocks) if holder.get("rope_theta") is not None]
    thetas = {float(number(holder, "rope_theta", where, 1, 1e30, whole=False)) for holder in holders}
    if not thetas:
        raise Refusal(f"{where}: rope_theta is missing")
    if len(thetas) > 1 or any(block != read[0] for block in read):
        raise Refusal(f"{where}: rope_parameters contradicts the older keys rope_theta, rope_scaling; keep one of them")
    return thetas.pop(), read[0]
