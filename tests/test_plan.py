"""plan.py: published figures from the presets alone, and every number against the tensors of a real clone."""
import json
import math
import re
import socket
import weakref

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import core
import plan
import train
from config import Config
from conftest import SHAPE, random_net
from distill import losses
from files import Refusal
from flags import Args, objective_of, parse, teacher_dtypes
from teachers import PRESETS


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a plan needs no network")
    for name in ("create_connection", "getaddrinfo", "socket"):
        monkeypatch.setattr(socket, name, refuse)


def planned(capsys, *flags):
    train.main(["--plan", *flags])
    return capsys.readouterr().out


def row(text, group):
    """The numbers of one line of the table."""
    return tuple(re.search(rf"^{group} +(.+)$", text, re.M).group(1).split())


@pytest.mark.parametrize("preset, unreachable, deployed, mlp", [
    ("llama3.2-3b", "62.5%", "1.606B", ("1.057B", "0.396B", "1.057B")),
    ("llama3.1-8b", "71.4%", "3.011B", ("2.114B", "0.604B", "2.114B")),
    ("qwen2.5-3b", "81.4%", "1.808B", ("1.427B", "0.265B", "1.427B"))])
def test_published_figures(capsys, preset, unreachable, deployed, mlp):
    text = planned(capsys, "--teacher", preset, "--mode", "core", "--batch-size", "3", "--seq-len", "2048", "--accum", "8", "--steps", "203451")
    assert row(text, "mlp") == mlp and row(text, "total")[0] == deployed and f"{deployed} deployed, mode core" in text
    assert f"unreachable for plain LRC: {unreachable} of" in text and "for core: 0.0%" in text
    assert "= 49,152 a step" in text and "= 10.000B" in text
    plain = planned(capsys, "--teacher", preset, "--mode", "lrc")
    assert row(plain, "mlp") == (mlp[0], mlp[1], mlp[1]) and f"for lrc: {unreachable}" in plain
    for mode, left in (("slice", unreachable), ("random", "0.0%"), ("dense", "0.0%"), ("scratch", "0.0%")):
        other = planned(capsys, "--teacher", preset, "--mode", mode)
        assert row(other, "mlp") == mlp and f"for {mode}: {left}" in other
        assert (row(other, "total")[2] == deployed) == (mode == "scratch")


def size(tensors, item=None):
    return sum(t.numel() * (item or t.element_size()) for t in tensors)


@pytest.mark.parametrize("mode, coordinates", [*((mode, "span") for mode in core.MODES), ("lrc", "teacher"), ("dense", "teacher"), ("slice", "teacher"),
                                               ("scratch", "span"), ("implicit", "span"), ("implicit", "teacher"), ("compact", "span")])
@pytest.mark.parametrize("d_ff", [60, 20])  # 20: the MLP narrower than the stream, a span of all d_ff dimensions
def test_numbers_and_memory_are_those_of_a_clone(teacher, mode, coordinates, d_ff, ids):
    mode, bases = ("core", mode) if mode in ("implicit", "compact") else (mode, "explicit")
    teacher = random_net(**teacher.config.raw | dict(intermediate_size=d_ff)).requires_grad_(False)
    place = train.Place(torch.device("cpu"), 0, 1, None)
    clone = train.build(train.Args(mode=mode, coordinates=coordinates, width=12, bases=bases), None, teacher, teacher.config, None, place)
    deployed, trained = dict(clone.student.named_parameters()), clone.coordinates()
    total = plan.numbers(teacher.config, 12, mode, coordinates)
    kinds = {"attention": r"self_attn.*proj\.weight", "mlp": r"mlp\.", "embedding, head": "embed|lm_head", "norm gains": "norm",
             "q/k/v bias (inherited)": "bias", "total": ""}
    for group, pattern in kinds.items():
        real = {k: size((p for n, p in named.items() if re.search(pattern, n)), 1) for k, named in (("deployed", deployed), ("trained", trained))}
        assert total.get(group, dict(deployed=0, trained=0)) == real, group

    optimizer = train.make_optimizer(clone, 1e-4)
    clone.student(ids).square().sum().backward()
    clone.pull_back()
    owned = {id(p): p for p in [*deployed.values(), *trained.values()]}.values()
    real = {
        "teacher (bf16)": size(teacher.parameters(), 2), "student": size(deployed.values()),
        "coordinates": size(p for m in clone.maps.values() for p in m.parameters()),
        "gradients": size(p.grad for p in owned if p.grad is not None),
        "optimizer (AdamW)": size(t for state in optimizer.state.values() for name, t in state.items() if name != "step"),
        "bases T, C": size(b for m in clone.maps.values() for b in m.buffers())}
    assert plan.memory(teacher.config, 12, mode, coordinates, bases=bases) == {part: bytes for part, bytes in real.items() if bytes}


@pytest.mark.parametrize("tied", [True, False])
def test_pretraining_trains_every_weight(capsys, tmp_path, tied):
    shape = dict(SHAPE, tie_word_embeddings=tied)
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    text = planned(capsys, "--stage", "pretrain", "--teacher", str(tmp_path))
    whole = plan.count(sum(p.numel() for p in random_net(**shape).parameters()))
    assert row(text, "total") == (whole, whole)


@pytest.mark.parametrize("flags", [["--plan"], []])
def test_a6_a_width_nothing_could_load_is_refused_first(tmp_path, flags):
    shape = dict(SHAPE, hidden_size=64, head_dim=16)
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")  # no weights, no tokenizer: refused before either
    for width, parts in ((50, ("--width 50", "48", "52", "4 heads")), (65, ("1 to 64",)), (-4, ("--width -4",))):
        with pytest.raises(Refusal) as caught:
            train.main([*flags, "--teacher", str(tmp_path), "--width", str(width)])
        assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)
    for near in (48, 52, 64):
        plan.check_width(Config.from_hf(shape), near)


def test_a6_qwen2_takes_any_width(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(SHAPE, model_type="qwen2", hidden_size=64, head_dim=16)), encoding="utf-8")
    assert "student   r 50," in planned(capsys, "--teacher", str(tmp_path), "--width", "50")


# ------------------------------------------------------------------------------------------- work


def one_micro_batch(teacher, clone, args, ids):
    """Forward and backward of train.py's own objective on a micro-batch."""
    clone.student.checkpointing = args.checkpointing
    writers = [(block.self_attn.o_proj.weight, block.mlp.down_proj.weight) for block in clone.student.layers]
    losses(clone.student, teacher, ids, ids, objective_of(args, teacher.config.vocab_size), clone.frame, clone.student.lm_head.weight, writers)["loss"].backward()


@pytest.mark.parametrize("flags", ["", "--checkpointing", "--recipe gpd", "--recipe clone", "--recipe clone --checkpointing", "--without kl", "--without kl,hidden,q",
                                   "--w-align 0 --checkpointing",
                                   "--mode scratch --without kl", "--mode lrc --coordinates teacher", "--mode dense", "--bases implicit", "--bases compact"])
def test_work_is_what_torch_counts(teacher, ids, flags):
    """FlopCounterMode sees every matrix product of a real forward, backward, deploy and pull-back; attention as plain products, so that
    it counts the pairs of backward once, as the convention has it."""
    args = parse(["--width", "12", "--seq-len", "32", "--batch-size", "12", *([] if "scratch" in flags else ["--init", "random"]), *flags.split()])
    clone = train.build(args, None, teacher, teacher.config, None, train.Place(torch.device("cpu"), 0, 1, None))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        one_micro_batch(teacher, clone, args, ids)
    c, parts = teacher.config, plan.work(teacher.config, 12, args)
    # torch stops the second run of a block at the last number that backward needs: the product by down_proj is not made
    early = 2 * c.intermediate_size * 12 * c.num_hidden_layers * args.checkpointing
    assert counter.get_total_flops() == ids.numel() * (sum(parts.values()) - early), parts
    with FlopCounterMode(display=False) as counter:
        clone.deploy()
        clone.pull_back()
    assert counter.get_total_flops() == plan.map_work(c, 12, args.mode, args.coordinates, args.bases)


def test_gpu_hours_by_hand(capsys):
    """Llama-3.2-3B at r 1536, mode lrc, 49,152 tokens a step on 8 ranks, on paper: a layer's matrices hold 2 (3072 + 1024) + 3 * 8192 = 32,768
    numbers for each of the stream's, 28 layers; 2048 pairs a token; a head of 128,256."""
    blocks, pairs, head = 28 * (2 * (3072 + 1024) + 3 * 8192), 4 * 28 * 3072 * 2048, 128256
    token = (2 * (blocks + head) * 3072 + pairs) + 3 * (2 * (blocks + head) * 1536 + pairs) + 2 * 28 * 3072 * 1536
    bases = 28 * (2 * 3072 * 3072 + 2 * 1024 * 1024 + 3 * 8192 * 3072) + 128256 * 3072  # k, v: T is 1024 x 1024
    each = 49152 / 8 * token / (0.5 * 989e12) + 4 * 1536 * bases / (0.5 * 67e12)
    text = planned(capsys, "--teacher", "llama3.2-3b", "--preset", "paper", "--mode", "lrc", "--mfu", "0.5", "--steps", "1000", "--gpus", "8")
    hours = 8 * each * 1000 / 3600
    assert f"work      {token / 1e9:.3g} GFLOP a token" in text and f"{4 * 1536 * bases / 1e12:.3g} TFLOP" in text
    assert f"time      {hours:.2g} GPU-hours, {hours / 8 / 24:.2g} days on 8 H100, assuming 50%" in text
    more = planned(capsys, "--teacher", "llama3.2-3b", "--preset", "paper", "--mode", "lrc", "--mfu", "0.5", "--steps", "100000", "--gpus", "8")
    assert f"{100 * hours:.0f} GPU-hours" in more


# --------------------------------------------------------------------------------------------- memory


class Live(TorchDispatchMode):
    """Bytes of all tensors that are alive, among those made inside; and the most there ever were."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def gone(self, key, size):
        self.now -= size
        self.known.discard(key)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        storages = lambda tree: {t.untyped_storage()._cdata: t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)}
        made = operation(*args, **(kwargs or {}))
        for key, storage in storages(made).items():
            if key not in self.known and key not in storages((args, kwargs)):
                self.known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, key, storage.nbytes())
        return made


def measured(flags):
    """(what plan.py expects, what every allocation of a real micro-batch comes to at its peak), bytes."""
    args = parse(["--width", "64", "--init", "random", *flags])
    half = args.dtype == "bfloat16"
    teacher = random_net(hidden_size=128, intermediate_size=344, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=16, vocab_size=2048,
                         max_position_embeddings=1024).requires_grad_(False)
    clone = train.build(args, None, teacher, teacher.config, None, train.Place(torch.device("cpu"), 0, 1, None))
    for w in clone.weights.values():
        w.grad = torch.zeros_like(w)  # held, not part of what a micro-batch adds
    teacher.to(torch.bfloat16 if half else torch.float32)
    ids = torch.randint(0, 2048, (args.batch_size, args.seq_len), generator=torch.Generator().manual_seed(0))
    with Live() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            clone.student.checkpointing = args.checkpointing
            sums = losses(clone.student, teacher, ids, ids, objective_of(args, 2048), clone.frame, clone.student.lm_head.weight, None)
        sums["loss"].backward()
    return plan.activations(teacher.config, 64, args, 2 if half else 4), live.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sequences", ["2", "8"])  # with 2 the logits are larger than the alignment's arithmetic, with 8 they are not
def test_activations_are_those_that_are_allocated(dtype, sequences):
    peaks = {}
    for align in ("0.2", "0"):
        for flag in ([], ["--checkpointing"]):
            parts, peak = measured(["--dtype", dtype, "--batch-size", sequences, "--seq-len", "512", "--w-align", align, *flag])
            assert sum(parts.values()) == pytest.approx(peak, rel=0.035), (align, flag, parts, peak)
            peaks[align, bool(flag)] = peak
    print(dtype, {key: f"{peak / 1e6:.1f} MB" for key, peak in peaks.items()})
    assert peaks["0.2", True] < 0.85 * peaks["0.2", False] and peaks["0", True] < 0.7 * peaks["0", False]


def test_what_a_block_keeps_for_backward_is_counted_to_the_byte(ids):
    """Against every tensor that autograd saves, the parameters apart; two depths, so that what is not a block's cancels."""
    kept = {}
    for half in (False, True):
        for layers in (1, 3):
            net, storages = random_net(num_hidden_layers=layers), {}
            own = {p.untyped_storage().data_ptr() for p in net.parameters()}

            def pack(t):
                storages[t.untyped_storage().data_ptr()] = t  # kept alive, so that no address comes twice
                return t
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=half):
                net(ids, head=False)
            kept[layers] = sum(t.untyped_storage().nbytes() for address, t in storages.items() if address not in own)
        c, args = net.config, parse(["--dtype", "bfloat16" if half else "float32", "--w-align", "0", "--batch-size", "12", "--seq-len", "32"])
        block = plan.activations(c, c.hidden_size, args)["student's blocks"] / c.num_hidden_layers
        casts = half * 2 * (sum(p.numel() for p in net.layers[0].parameters() if p.dim() == 2) + 2 * 32 * c.head_dim)  # weights; cos, sin of 32 positions
        assert (kept[3] - kept[1]) / 2 == block + casts


def test_the_verdict_follows_the_sum_and_says_what_would_make_it_fit(capsys):
    llama = ("--teacher", "llama3.2-3b", "--preset", "paper", "--bases", "explicit")
    text = planned(capsys, *llama)
    assert re.search(r"verdict   [\d.]+ GB does not fit in 80 GB\n +--checkpointing: [\d.]+ GB\n +--checkpointing --shard: [\d.]+ GB, fits\n$", text)
    fits = planned(capsys, *llama, "--checkpointing", "--shard")
    held, added = (float(re.search(rf"{line}.*; in all ([\d.]+)\n", fits).group(1)) for line in ("held:", "a micro-batch of 1 x 2048 adds:"))
    said = re.search(r"verdict   ([\d.]+) GB fits in 80 GB", fits).group(1)
    assert float(said) == pytest.approx(held + added, abs=0.2) and f"--shard: {said} GB, fits" in text
    assert "fits in 141 GB" in planned(capsys, *llama, "--gpu-memory", "141")
    assert "mode core, compact bases" in planned(capsys, *llama[:-2]) and "mode core, explicit bases" in text
    large = planned(capsys, "--teacher", "qwen2.5-7b", "--preset", "paper")
    assert re.search("--mode dense: [\\d.]+ GB, fits", large) and "--batch-size 1" not in large
    assert "--batch-size 1 --accum 3" in planned(capsys, "--teacher", "qwen2.5-7b", "--preset", "paper", "--batch-size", "3")


@pytest.mark.parametrize("name, width", [("llama3.2-3b", 1536), ("qwen2.5-7b", 2048)])
def test_matrices_are_shared_out_whole_and_about_equally(name, width):
    """Eight ranks have every matrix once between them; the fullest holds little more than an eighth, and nothing else of a rank's memory changes."""
    c = Config.from_hf(PRESETS[name]["config"])
    shares = plan.shares(c, 8)
    assert {matrix: sum(share[matrix] for share in shares) for matrix in shares[0]} == {matrix: many for matrix, (_, many, _, _) in plan.matrices(c).items()}
    trained = [plan.numbers(c, width, "core", share=share)["mlp"]["trained"] for share in shares]
    assert sum(trained) == plan.numbers(c, width, "core")["mlp"]["trained"]
    whole, shared = (plan.memory(c, width, "core", shards=shards, bases="compact") for shards in (1, 8))
    assert {part for part in whole if shared[part] != whole[part]} == {"coordinates", "gradients", "optimizer (AdamW)", "bases T, C"}
    for part in ("coordinates", "optimizer (AdamW)", "bases T, C"):
        assert 0.85 * whole[part] / 8 < shared[part] < 1.2 * whole[part] / 8
    assert whole["gradients"] - shared["gradients"] == whole["coordinates"] - shared["coordinates"]
    work, busiest = (plan.map_work(c, width, "core", bases="compact", shards=shards) for shards in (1, 8))
    assert work / 8 <= busiest < 1.2 * work / 8


def test_the_start(teacher):
    c = teacher.config
    lrc = plan.memory(c, 12, "lrc", teacher_bytes=4)
    assert plan.at_start(c, 12, "dense", "span", 4) == plan.at_start(c, 12, "lrc", "span", 4) == lrc["teacher (fp32)"] + lrc["student"] + lrc["coordinates"] + lrc["bases T, C"]


@pytest.mark.parametrize("flag, file, student, expected", [
    ("auto", "float32", "float32", ("float32", "float32")), ("auto", "float32", "bfloat16", ("float32", "bfloat16")), ("auto", "bfloat16", "bfloat16", ("bfloat16", "bfloat16")),
    ("auto", "bfloat16", "float32", ("float32", "float32")), ("bfloat16", "float32", "float32", ("bfloat16", "bfloat16")),
    ("float32", "bfloat16", "bfloat16", ("float32", "float32"))])
def test_the_teachers_dtype_at_the_start_and_in_the_loop(flag, file, student, expected):
    assert teacher_dtypes(Args(teacher_dtype=flag), file, student) == expected


# --------------------------------------------------------------------------------- the published recipe


@pytest.mark.parametrize("teacher, lr", [("llama3.2-3b", 1e-4), ("llama3.1-8b", 1e-4), ("qwen2.5-3b", 6.7e-5), ("qwen2.5-7b", 1e-4)])
@pytest.mark.parametrize("world", [1, 2, 8, 24])
def test_the_papers_recipe_for_each_teacher(monkeypatch, teacher, lr, world):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    args = parse(["--preset", "paper", "--teacher", teacher, "--data", "tokens"])
    assert (args.seq_len, args.schedule, args.warmup, args.clip, args.temperature, args.w_align, args.hidden, args.lr, args.weight_decay) == \
        (2048, "linear", 0.005, 1.0, 40.0, 0.2, "mse", lr, 0.0)
    assert args.batch_size * args.accum * args.seq_len * world == 49152
    assert math.isclose(49152 * args.steps, 10.35e9, rel_tol=1e-5) and args.width == PRESETS[teacher]["width"]


def test_the_paper_fills_only_what_was_not_given(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    taken = lambda *flags: parse(["--preset", "paper", "--teacher", "llama3.2-3b", "--data", "tokens", *flags])
    given = taken("--seq-len", "1024", "--lr", "3e-5", "--hidden", "relative", "--warmup", "0.05", "--batch-size", "4")  # warm-up and hidden at the value of their default
    assert (given.lr, given.hidden, given.warmup, given.batch_size, given.accum) == (3e-5, "relative", 0.05, 4, 6)
    assert taken("--accum", "3").batch_size == 4
    assert (taken("--batch-size", "5", "--accum", "1").steps, taken("--steps", "7").steps) == (round(10.35e9 / (5 * 2048 * 2)), 7)
    sft = parse(["--preset", "paper", "--stage", "sft", "--init", "runs/llama/student", "--data", "tokens"])
    assert (sft.lr, sft.steps, sft.accum) == (1e-5, round(0.62e9 / 49152), 12)
    assert taken("--recipe", "gpd").steps == taken("--mode", "scratch").steps == 210571
    plain = parse([])
    assert (plain.steps, plain.batch_size, plain.seq_len, plain.accum, plain.warmup, plain.hidden) == (400, 16, 128, 1, 0.05, "mse")


@pytest.mark.parametrize("world, flags, words", [
    (5, "--data tokens", ("49,152", "5 ranks", "--batch-size")), (1, "--data tokens --batch-size 5", ("49,152", "5 x 2048")), (1, "--data tokens --stage pretrain", ("pretrain",)),
    (1, "--teacher tiny", ("embedded",)), (1, "--stage sft --init F", ("--data", "0.62B", "chats.jsonl")), (1, "--data tokens --shard", ("one rank",)),
    (1, "", ("--data", "--min-score 4 --tokenizer llama3.2-3b --tokens 10e9 --out tokens/fineweb-edu", "teknium/OpenHermes-2.5", "tokens/fineweb-edu=10,tokens/openhermes=0.35"))])
def test_the_papers_recipe_refuses_in_one_line(monkeypatch, world, flags, words):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(Refusal) as refused:
        parse(["--preset", "paper", *([] if "sft" in flags else ["--teacher", "llama3.2-3b"]), *flags.split()])
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


@pytest.mark.parametrize("teacher", ["llama3.2-3b", "llama3.1-8b", "qwen2.5-3b", "qwen2.5-7b"])
def test_the_papers_plan_is_one_screen_with_its_data(capsys, teacher):
    text = planned(capsys, "--teacher", teacher, "--preset", "paper")
    assert len(text.splitlines()) < 35
    for words in (f"--tokenizer {teacher} --tokens 10e9", "--data tokens/fineweb-edu=10,tokens/openhermes=0.35", "= 10.350B", "GPU-hours",
                  "days on 8 H100", "assuming 40%", "verdict"):
        assert words in text


@pytest.mark.parametrize("flags", [["--gpus", "4"], ["--mfu", "0.3"], ["--gpu-memory", "141"]])
def test_what_only_a_plan_reads_is_refused_without_one(flags):
    with pytest.raises(Refusal, match="only --plan reads it"):
        parse(flags)
