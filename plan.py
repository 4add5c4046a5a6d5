"""What a run will be, from the configs alone: shapes, numbers, what plain LRC could never reach, tokens, memory.

    python train.py --teacher llama3.2-3b --mode core --plan       # no weights, no network, no GPU
"""
from __future__ import annotations

import os

from model import Config
from teachers import PRESETS, Refusal, read_json, resolve


FREE = ("scratch", "pretrain")  # nothing inherited


def matrices(c: Config) -> dict[str, tuple[str, int, int, int]]:
    """name -> (group, how many, kept side, inherited side): W_T is kept x inherited (down, o: transposed), the student's kept x r."""
    heads, kv, F, H, V, L = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size, c.hidden_size, c.vocab_size, c.num_hidden_layers
    return {"q": ("attention", L, heads, H), "k": ("attention", L, kv, H), "v": ("attention", L, kv, H), "o": ("attention", L, heads, H),
            "gate": ("mlp", L, F, H), "up": ("mlp", L, F, H), "down": ("mlp", L, F, H),
            "embedding": ("embedding, head", 1 if c.tie_word_embeddings else 2, V, H)}


def numbers(c: Config, width: int, mode: str, coordinates: str = "span") -> dict[str, dict[str, int]]:
    """Group -> {deployed, trained}, for a student of `width` under teacher config `c`. A span has min(kept, inherited) dimensions, P
    (coordinates `teacher`) always `inherited`; in modes `scratch` and `pretrain` there is no span and every weight trains."""
    groups: dict[str, dict[str, int]] = {}
    for group, many, kept, inherited in matrices(c).values():
        opened = mode in FREE or group == "mlp" and mode != "lrc"
        row = groups.setdefault(group, dict(deployed=0, trained=0))
        row["deployed"] += many * kept * width
        row["trained"] += many * width * (kept if opened else inherited if coordinates == "teacher" else min(kept, inherited))
    norms = (2 * c.num_hidden_layers + 1) * width
    groups["norm gains"] = dict(deployed=norms, trained=norms)
    if c.qkv_bias:
        biases = c.num_hidden_layers * (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
        groups["q/k/v bias (inherited)"] = dict(deployed=biases, trained=biases if mode in FREE else 0)
    groups["total"] = {k: sum(row[k] for row in groups.values()) for k in ("deployed", "trained")}
    return groups


def unreachable(c: Config) -> float:
    """Share of each gate, up and down that plain LRC deploys and cannot train: 1 - H/d_ff."""
    return 1 - min(c.hidden_size, c.intermediate_size) / c.intermediate_size


def memory(c: Config, width: int, mode: str, coordinates: str = "span") -> dict[str, int]:
    """Bytes that a rank holds all through a run, by part; activations come on top. Teacher in bf16 (CUDA), all else in fp32."""
    n, teacher = numbers(c, width, mode, coordinates), numbers(c, c.hidden_size, "pretrain")["total"]["deployed"]
    deployed, trained = n["total"]["deployed"], n["total"]["trained"]
    if mode in FREE:
        guide = {"teacher (bf16)": 2 * teacher} if mode == "scratch" else {}
        return guide | {"student": 4 * deployed, "gradients": 4 * trained, "optimizer (AdamW)": 8 * trained}
    mapped = {name: m for name, m in matrices(c).items() if not (m[0] == "mlp" and mode == "dense")}
    own = n["mlp"]["trained"] * (mode == "dense") + n["norm gains"]["trained"]  # coordinates that are the deployed weights themselves
    frozen = n.get("q/k/v bias (inherited)", {"deployed": 0})["deployed"]
    whole = lambda group: group == "mlp" and mode != "lrc"  # T, and C for what it leaves
    bases = sum(many * kept * (kept if whole(group) else inherited if coordinates == "teacher" else min(kept, inherited))
                for group, many, kept, inherited in mapped.values())
    return {"teacher (bf16)": 2 * teacher, "student": 4 * deployed, "coordinates": 4 * (trained - own),
            "gradients": 4 * (deployed - frozen + trained - own), "optimizer (AdamW)": 8 * trained, "bases T, C": 4 * bases}


def count(n: float) -> str:
    return f"{n / 1e9:.3f}B" if n >= 1e8 else f"{n / 1e6:.3f}M"


def check_width(c: Config, width: int) -> None:
    """Refuse, before the first step, a width that nothing could load after the last."""
    heads = c.num_attention_heads
    if not 1 <= width <= c.hidden_size:
        raise Refusal(f"--width {width}: the student must be 1 to {c.hidden_size} wide, the teacher's width")
    near = [w for w in (width // heads * heads, (width // heads + 1) * heads) if 0 < w <= c.hidden_size]
    if c.model_type == "llama" and width % heads:
        raise Refusal(f"--width {width}: transformers 5 refuses a Llama whose width is not a multiple of its {heads} heads; "
                      f"nearest that load: {' and '.join(map(str, near))}")


def shape_of(teacher: str, revision: str | None) -> Config:
    """The teacher's config: of a preset from this repository, of a folder from its file, else from the hub."""
    preset = PRESETS.get(teacher, {})
    if preset.get("config"):
        return Config.from_hf(preset["config"], teacher)
    folder, _ = resolve(teacher, revision)
    return Config.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))


def show(args) -> None:
    """Print the account of a run (train.Args) and stop there."""
    c = shape_of(args.teacher, args.revision or None)
    width = args.width or c.hidden_size // 2
    if args.stage != "distill":
        width, mode = c.hidden_size, "pretrain"
    else:
        check_width(c, width)
        mode = args.mode
    plain, ours = (numbers(c, width, m, args.coordinates) for m in ("lrc", mode))
    print(f"teacher   {args.teacher}: {c.model_type}, {c.num_hidden_layers} layers, H {c.hidden_size}, d_ff {c.intermediate_size} (rho "
          f"{c.intermediate_size / c.hidden_size:.3f}), {c.num_attention_heads} heads / {c.num_key_value_heads} kv x {c.head_dim}, vocabulary "
          f"{c.vocab_size}, {'tied' if c.tie_word_embeddings else 'untied'} head, {count(numbers(c, c.hidden_size, 'pretrain')['total']['deployed'])}")
    print(f"student   r {width}, all else inherited, {count(ours['total']['deployed'])} deployed, mode {mode}\n")
    print(f"{'':<24}{'deployed':>12}{'trained: lrc':>15}{'trained: ' + mode:>17}")
    for group, row in ours.items():
        print(f"{group:<24}{count(row['deployed']):>12}{count(plain[group]['trained']):>15}{count(row['trained']):>17}")
    print(f"\nunreachable for plain LRC: {unreachable(c):.1%} of each gate, up and down (1 - H/d_ff = 1 - {c.hidden_size}/{c.intermediate_size})"
          f"; for {mode}: {unreachable(c) if mode in ('lrc', 'slice') else 0:.1%}")
    world = int(os.environ.get("WORLD_SIZE", 1))
    step = args.batch_size * args.seq_len * args.accum * world
    print(f"tokens    {args.batch_size} x {args.seq_len} x {args.accum} micro-batches x {world} ranks = {step:,} a step, x {args.steps:,} steps = {count(step * args.steps)}")
    parts = memory(c, width, mode, args.coordinates)
    print("memory a rank, activations apart: " + ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts.items())
          + f"; in all {sum(parts.values()) / 1e9:.1f} GB")
