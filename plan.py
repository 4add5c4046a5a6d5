"""What a run will be, from the configs alone: shapes, numbers, what plain LRC could never reach, tokens, work, memory.

    python train.py --teacher llama3.2-3b --mode core --plan                        # no weights, no network, no GPU
    python train.py --teacher llama3.2-3b --preset paper --plan --gpus 8            # the published budget, in GPU-hours
"""
from __future__ import annotations

from dataclasses import replace

from config import Config
from core import chosen_bases
from files import Refusal, read_json
from flags import Args, network, ranks, teacher_dtypes, terms
from optimizer import share_out
from teachers import PAPER_DATA, PRESETS, resolve


FREE = ("scratch", "pretrain")  # nothing inherited


def matrices(c: Config) -> dict[str, tuple[str, int, int, int]]:
    """name -> (group, how many, kept side, inherited side): W_T is kept x inherited (down, o: transposed), the student's kept x r.
    The inherited side is the teacher's width H in every row: the one side that a student narrows."""
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    H, F, V, L = c.hidden_size, c.intermediate_size, c.vocab_size, c.num_hidden_layers
    return {"q": ("attention", L, heads, H), "k": ("attention", L, kv, H), "v": ("attention", L, kv, H), "o": ("attention", L, heads, H),
            "gate": ("mlp", L, F, H), "up": ("mlp", L, F, H), "down": ("mlp", L, F, H),
            "embedding": ("embedding, head", 1 if c.tie_word_embeddings else 2, V, H)}


def shares(c: Config, ranks: int) -> list[dict[str, int]]:
    """How many of each matrix each rank has, shared out by size as the loop does."""
    sizes = {(name, i): kept * inherited for name, (_, many, kept, inherited) in matrices(c).items() for i in range(many)}
    shared = [dict.fromkeys(matrices(c), 0) for _ in range(ranks)]
    for (name, _), rank in share_out(sizes, ranks).items():
        shared[rank][name] += 1
    return shared


def numbers(c: Config, width: int, mode: str, coordinates: str = "span", share: dict[str, int] | None = None) -> dict[str, dict[str, int]]:
    """Group -> {deployed, trained}, for a student of `width` under teacher config `c`, or for a share of its matrices
    (gains and biases whole).
    A span has min(kept, inherited) dimensions, P (coordinates `teacher`) always `inherited`; in modes `scratch` and `pretrain` there is
    no span and every weight trains."""
    groups: dict[str, dict[str, int]] = {}
    for name, (group, many, kept, inherited) in matrices(c).items():
        many = share[name] if share else many
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


# ----------------------------------------------------------------------------------------------- work

H100 = {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12}  # FLOP/s, SXM, dense, by NVIDIA's data sheet


def work(c: Config, width: int, args: Args) -> dict[str, float]:
    """FLOPs a token of a training step, by part. A product of (a, b) by (b, c) is 2abc; softmaxes, norms and the like are left out.
    Attention counts all T x T pairs, as is usual for MFU, though a causal kernel computes half of them."""
    in_layers = [many * kept * inherited for group, many, kept, inherited in matrices(c).values() if group in ("mlp", "attention")]
    block = sum(in_layers) / c.hidden_size  # numbers for each of the stream's
    # q k^T and p v: 2 products of T pairs a token x n heads x d, in each layer
    pairs = 2 * 2 * args.seq_len * c.num_attention_heads * c.head_dim * c.num_hidden_layers
    forward = lambda width: 2 * block * width + pairs
    head = 2 * c.vocab_size
    parts = {}
    named = terms(args) if args.stage == "distill" else ("ce",)
    if set(named) != {"ce"}:
        parts["teacher, forward"] = forward(c.hidden_size) + head * c.hidden_size * ("kl" in named)
    # backward is two products for each of forward: the gradients at its two factors
    parts["student, forward and backward"] = 3 * (forward(width) + head * width)
    heads, layers = c.num_attention_heads * c.head_dim, c.num_hidden_layers
    # hidden: h_T F, without a gradient;  attn_out, ffn_out: W_S times a difference, with one
    frame = 2 * layers * c.hidden_size * width * ("hidden" in named)
    writes = 2 * layers * width * (heads * ("attn_out" in named) + c.intermediate_size * ("ffn_out" in named))
    if frame or writes:
        parts["alignment"] = frame + 3 * writes
    if args.checkpointing:
        parts["once more in backward"] = forward(width) + frame + writes
    return parts


def map_work(c: Config, width: int, mode: str, coordinates: str = "span", bases: str = "explicit", shards: int = 1) -> float:
    """FLOPs a step between coordinates and weights, on every rank, or on the busiest of `shards` that share them out. W = T Z^T (+ C Zc^T)
    and back Z.grad = G^T T: for each number of the bases 2r there and 2r back. core.Compact meets B twice and T_1 once, there and back;
    for B its implicit form meets W_T without H rows, and N."""
    if mode in FREE:
        return 0
    each = {}
    for name, (group, _, kept, H) in matrices(c).items():
        met = basis(group, kept, H, mode, coordinates)
        if group == "mlp" and kept > H and bases in ("compact", "implicit"):
            met = 2 * (kept - H) * H + (1 if bases == "compact" else 3) * H * H  # T_1; implicit: and N twice
        each[name] = 4 * width * met
    return max(sum(many * each[name] for name, many in share.items()) for share in shares(c, shards))


def seconds(c: Config, width: int, mode: str, args: Args) -> tuple[float, float]:
    """Of one step, at --mfu of an H100's peak: (network: bf16 autocast unless --dtype float32, map: fp32, both TF32 with --tf32)."""
    wide = H100["tf32" if args.tf32 else "fp32"]
    tokens = args.batch_size * args.seq_len * args.accum  # a rank
    return (tokens * sum(work(c, width, args).values()) / (args.mfu * (wide if args.dtype == "float32" else H100["bf16"])),
            map_work(c, width, mode, args.coordinates, args.bases, ranks(args) if args.shard else 1) / (args.mfu * wide))


# --------------------------------------------------------------------------------------------- memory


def basis(group: str, kept: int, inherited: int, mode: str, coordinates: str = "span", bases: str = "explicit") -> int:
    """Numbers in the T and C of one matrix: of an opened one kept x kept, or T_1 and B, or T_1 and N, and signs; else kept x its span."""
    if group == "mlp" and mode == "dense":
        return 0
    if group == "mlp" and bases != "explicit" and kept > inherited:
        return inherited ** 2 + inherited * (kept - inherited if bases == "compact" else inherited) + inherited
    if group == "mlp" and mode != "lrc":
        return kept * kept
    return kept * (inherited if coordinates == "teacher" else min(kept, inherited))


def memory(c: Config, width: int, mode: str, coordinates: str = "span", teacher_bytes: int = 2, shards: int = 1,
           bases: str = "explicit") -> dict[str, int]:
    """Bytes that a rank holds all through a run, by part; activations come on top. `teacher_bytes`: a number of the teacher (bf16 on CUDA);
    all else is fp32. `shards`: ranks that share the matrices out; what the fullest of them holds."""
    n, teacher = numbers(c, width, mode, coordinates), numbers(c, c.hidden_size, "pretrain")["total"]["deployed"]
    deployed, frozen = n["total"]["deployed"], n.get("q/k/v bias (inherited)", {"deployed": 0})["deployed"]
    guide = {"teacher (bf16)" if teacher_bytes == 2 else "teacher (fp32)": teacher_bytes * teacher}

    def of_rank(share: dict[str, int]) -> dict[str, int]:
        n = numbers(c, width, mode, coordinates, share)
        trained = n["total"]["trained"]
        if mode in FREE:
            student = {"student": 4 * deployed, "gradients": 4 * deployed, "optimizer (AdamW)": 8 * trained}
            return guide | student if mode == "scratch" else student
        own = n["mlp"]["trained"] * (mode == "dense") + n["norm gains"]["trained"]  # coordinates that are the deployed weights themselves
        frozen_bases = 0
        for name, (group, _, kept, inherited) in matrices(c).items():
            frozen_bases += share[name] * basis(group, kept, inherited, mode, coordinates, bases)
        return guide | {"student": 4 * deployed, "coordinates": 4 * (trained - own), "gradients": 4 * (deployed - frozen + trained - own),
                        "optimizer (AdamW)": 8 * trained, "bases T, C": 4 * frozen_bases}
    return max(map(of_rank, shares(c, shards)), key=lambda parts: sum(parts.values()))


def at_start(c: Config, width: int, mode: str, coordinates: str, teacher_bytes: int, bases: str = "explicit", shards: int = 1) -> int:
    """Bytes held once the clone is built: no gradient and no moment yet, but the teacher as it was loaded, and for `dense` and bases
    that are not explicit too the spans of the MLP, from which they start."""
    if mode in FREE:
        held = memory(c, width, mode, coordinates, teacher_bytes)
        return sum(size for part, size in held.items() if part.startswith(("teacher", "student")))
    begun = memory(c, width, "lrc" if mode == "dense" or bases != "explicit" else mode, coordinates, teacher_bytes, shards)
    return sum(size for part, size in begun.items() if not part.startswith(("gradients", "optimizer")))


def activations(c: Config, width: int, args: Args, teacher_bytes: int = 2) -> dict[str, int]:
    """Bytes that one micro-batch adds at its fullest, at the end of its forward, by part; b bytes a number in what the matrices compute
    (bf16 autocast: 2), the stream in fp32. Counted for recipe lrc; tests measure every allocation of small models and agree to 3 %."""
    tokens, L, n = args.batch_size * args.seq_len, c.num_hidden_layers, c.num_attention_heads
    r, H, F, V = width, c.hidden_size, c.intermediate_size, c.vocab_size
    half = args.dtype != "float32"
    b, heads = 2 if half else 4, 2 * (n + c.num_key_value_heads) * c.head_dim  # q, k, v, o: numbers a token
    # kept for backward in a block, bytes a token
    stream = 4 * 4 * r  # before each of the two norms, and the same at RMS 1
    scales = 2 * 4  # 1 / RMS of each norm
    inputs = 5 * 2 * r if half else 2 * 4 * r  # what the matrices read: autocast casts it for each of the five, fp32 keeps one a norm
    attention = b * heads  # rotated q and k, v, the mix
    log_sums = 4 * n  # of each head's softmax
    mlp = 4 * b * F  # gate, silu(gate), up, their product
    block = stream + scales + inputs + attention + log_sums + mlp
    parts = {"student's blocks": tokens * L * (4 * r if args.checkpointing else block)}
    # of these one at a time. logits: 512 rows of z, t, dz and two logarithms of softmaxes, and one of the 512 before
    passing = {"logits": (5 if tokens <= 512 else 6) * min(512, tokens) * V * 4, "a block once more": tokens * block * args.checkpointing}
    if args.stage == "distill" and set(terms(args)) - {"kl", "ce"}:
        ours = b * (heads + 2 * F) if args.checkpointing else b * heads // 2  # without it v, o, gate and up are kept already
        parts["taps of both models"] = tokens * L * (teacher_bytes * (heads + 2 * F + H) + ours)
        if not args.checkpointing:  # of each distance the gradient at the student's tap; in 16 bits one gate's or up's arithmetic in fp32
            passing["alignment's gradients"] = tokens * (L * (b * (heads + 2 * F) + 4 * r) + half * 3 * 4 * F)
    elif args.stage == "distill" and "kl" in terms(args):
        # gate and up, also of the block before, silu(gate), the product; q, k, v, o; the stream
        passing["a teacher's block"] = tokens * teacher_bytes * (6 * F + heads + 5 * H)
    largest = max(passing, key=passing.get)
    parts[largest] = passing[largest]
    parts["heads"] = 4 * V * r + tokens * (3 * 4 * r + teacher_bytes * H)  # dW in fp32; the streams that they read, and dx
    if half:  # autocast keeps a cast of each weight until the forward ends; the head is cast by hand
        parts["bf16 copies of the weights"] = 2 * numbers(c, width, "pretrain")["total"]["deployed"]
    return parts


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


def show(args: Args) -> None:
    """Print the account of a run and stop there."""
    c = shape_of(network(args), args.revision or None)
    if args.seq_len > c.max_position_embeddings:
        raise Refusal(f"--seq-len {args.seq_len} is beyond the model's {c.max_position_embeddings} positions")
    width = args.width or c.hidden_size // 2
    if args.stage != "distill":
        width, mode = c.hidden_size, "pretrain"
    else:
        check_width(c, width)
        mode = args.mode
    args = replace(args, bases=chosen_bases(args.bases, mode, c.intermediate_size))
    show_numbers(c, width, mode, args)
    if args.preset == "paper":
        of_distillation = ""
        if args.stage == "distill":
            of_distillation = (f", T {args.temperature:g}, lambda {args.w_align:g}, hidden {args.hidden}, "
                               f"attention {args.attention} [sources differ: cosine or mse]")
        print(f"\nrecipe    paper: lr {args.lr:g}, {args.schedule} to 0 after {args.warmup:.1%} warm-up, AdamW (0.9, 0.999), "
              f"clip {args.clip:g}{of_distillation}")
        what, commands = PAPER_DATA[args.stage]
        print(f"data      {what}", *(command.format(teacher=args.teacher) for command in commands), sep="\n          ")
    world = ranks(args)
    step = args.batch_size * args.seq_len * args.accum * world
    print(f"tokens    {args.batch_size} x {args.seq_len} x {args.accum} micro-batches x {world} ranks = {step:,} a step, "
          f"x {args.steps:,} steps = {count(step * args.steps)}")
    show_work(c, width, mode, args, world, step)
    show_memory(c, width, mode, args, world)


def show_numbers(c: Config, width: int, mode: str, args: Args) -> None:
    """Shapes, numbers by group, and for a student what plain LRC could never reach."""
    distil = args.stage == "distill"
    plain, ours = (numbers(c, width, m, args.coordinates) for m in ("lrc", mode))
    whole = numbers(c, c.hidden_size, "pretrain")["total"]["deployed"]
    print(f"{'teacher' if distil else 'model':<10}{network(args)}: {c.model_type}, {c.num_hidden_layers} layers, "
          f"H {c.hidden_size}, d_ff {c.intermediate_size} (rho {c.intermediate_size / c.hidden_size:.3f}), "
          f"{c.num_attention_heads} heads / {c.num_key_value_heads} kv x {c.head_dim}, "
          f"vocabulary {c.vocab_size}, {'tied' if c.tie_word_embeddings else 'untied'} head, {count(whole)}")
    if not distil:
        print(f"\n{'':<24}{'deployed':>12}{'trained':>12}")
        for group, row in ours.items():
            print(f"{group:<24}{count(row['deployed']):>12}{count(row['trained']):>12}")
        return
    bases = f", {args.bases} bases" if mode == "core" else ""
    print(f"student   r {width}, all else inherited, {count(ours['total']['deployed'])} deployed, mode {mode}{bases}")
    print(f"\n{'':<24}{'deployed':>12}{'trained: lrc':>15}{'trained: ' + mode:>17}")
    for group, row in ours.items():
        print(f"{group:<24}{count(row['deployed']):>12}{count(plain[group]['trained']):>15}{count(row['trained']):>17}")
    print(f"\nunreachable for plain LRC: {unreachable(c):.1%} of each gate, up and down "
          f"(1 - H/d_ff = 1 - {c.hidden_size}/{c.intermediate_size}); "
          f"for {mode}: {unreachable(c) if mode in ('lrc', 'slice') else 0:.1%}")


def show_work(c: Config, width: int, mode: str, args: Args, world: int, step: int) -> None:
    """FLOPs, and the hours they take under the stated assumption."""
    parts, mapped = work(c, width, args), map_work(c, width, mode, args.coordinates, args.bases)
    total = (step * sum(parts.values()) + (1 if args.shard else world) * mapped) * args.steps

    def hours(args: Args) -> str:
        each = sum(seconds(c, width, mode, args)) * args.steps / 3600
        brief = lambda number: f"{number:,.0f}" if number >= 100 else f"{number:.2g}"
        return f"{brief(world * each)} GPU-hours, {brief(each / 24)} days on {world} H100"

    nets, between = seconds(c, width, mode, args)
    listed = ", ".join(f"{name} {flops / 1e9:.3g}" for name, flops in parts.items())
    peaks = f"{H100['bf16'] / 1e12:.0f} TFLOP/s in bf16"
    taken = f"{nets:.3g} s for the network"
    if mapped:
        where, slow = "shared out over the ranks" if args.shard else "on every rank", "tf32" if args.tf32 else "fp32"
        listed += f"\n          and between coordinates and weights, once a step {where}, {mapped / 1e12:.3g} TFLOP"
        peaks += f", {H100[slow] / 1e12:.0f} in {slow}"
        taken += f", {between:.3g} s for the map"
    print(f"work      {sum(parts.values()) / 1e9:.3g} GFLOP a token: {listed}; in all {total:.3g} FLOP")
    print(f"time      {hours(args)}, assuming {args.mfu:.0%} of its peak: {peaks}")
    print(f"          a step: {taken}")
    if between > nets / 4 and not args.tf32:
        print(f"          with --tf32, the map at {H100['tf32'] / 1e12:.0f} TFLOP/s: {hours(replace(args, tf32=True))}")


def show_memory(c: Config, width: int, mode: str, args: Args, world: int) -> None:
    """Memory a rank, the verdict, and where it does not fit what would make it."""
    of_student = "float32" if args.dtype == "float32" else "bfloat16"
    loaded, running = (4 if dtype == "float32" else 2 for dtype in teacher_dtypes(args, c.dtype, of_student))

    def peak(mode: str, args: Args) -> tuple[dict, dict, float, float]:
        shards = world if args.shard else 1
        held = memory(c, width, mode, args.coordinates, running, shards, args.bases)
        added, start = activations(c, width, args, running), at_start(c, width, mode, args.coordinates, loaded, args.bases, shards)
        return held, added, start, max(sum(held.values()) + sum(added.values()), start) / 1e9

    held, added, start, most = peak(mode, args)
    gb = lambda parts: ", ".join(f"{name} {size / 1e9:.3g}" for name, size in parts.items()) + f"; in all {sum(parts.values()) / 1e9:.3g}"
    print(f"memory    GB a rank, held: {gb(held)}")
    print(f"          a micro-batch of {args.batch_size} x {args.seq_len} adds: {gb(added)}")
    print(f"          before the first step: {start / 1e9:.3g}")
    if most <= args.gpu_memory:
        return print(f"verdict   {most:.3g} GB fits in {args.gpu_memory:g} GB")
    print(f"verdict   {most:.3g} GB does not fit in {args.gpu_memory:g} GB")
    single = dict(batch_size=1, accum=args.accum * args.batch_size)
    remedies = [("--checkpointing", mode, dict(checkpointing=True)),
                ("--shard", mode, dict(shard=world > 1)),
                ("--bases implicit", mode, dict(bases="implicit") if mode == "core" else {}),
                (f"--batch-size 1 --accum {single['accum']}", mode, single),
                ("--mode dense", "dense", dict(bases="explicit"))]
    tried = []
    for name, mode_then, flags_then in remedies:
        changed = replace(args, **flags_then)
        if changed == args and mode_then == mode or mode in FREE and mode_then == "dense":
            continue
        tried, args, mode = [*tried, name], changed, mode_then
        most = peak(mode, args)[3]
        print(f"          {' '.join(tried)}: {most:.3g} GB" + (", fits" if most <= args.gpu_memory else ""))
        if most <= args.gpu_memory:
            return
    print("          the rest: a smaller --seq-len, a narrower --width, or a GPU with more memory")
