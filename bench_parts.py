"""Rows of the bench that measure a part by itself: the loss, the forward pass, the calibrated start, the tasks. bench.py is the command."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import core
import lrc
import peers
import starts
from config import Config
from distill import HeadLoss, Objective
from files import Refusal
from measure import Row, alone, ratio, seconds, side_by_side
from model import Transformer
from teachers import PRESETS

N, V = 2048, 128256  # the loss of one sequence of Llama-3's vocabulary


def streams():
    """x (N, r), weight (V, r), targets, and the teacher's x_t (N, H), weight_t (V, H), for narrow r and H: the logits are what is large."""
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
    r, H = 32, 64
    x, weight = draw(N, r).requires_grad_(), (2 * draw(V, r) / r ** 0.5).requires_grad_()
    return x, weight, torch.arange(N) * 61 % V, draw(N, H), 2 * draw(V, H) / H ** 0.5


def ours_loss(inputs, chunk: int = 512):
    HeadLoss.apply(*inputs, Objective(chunk=chunk))[0].backward()


def naive_loss(inputs):
    sum(peers.naive_loss(*inputs)).backward()


def loss(device) -> list[Row]:
    """KL and CE at (1, 2048, 128256), on the CPU: memory of the chunked form and of the naive one; on 256 of the tokens, four chunks,
    their values and gradients, in fp64 against each other, in fp32 each against the naive one in fp64."""
    memory = [alone(work, streams)[1] for work in (ours_loss, naive_loss)]

    def outcome(work, dtype) -> tuple[float, Tensor]:
        inputs = [x.detach()[:256] if len(x) == N else x.detach() for x in streams()]
        inputs = [x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in inputs]
        inputs[0].requires_grad_(), inputs[1].requires_grad_()
        value = HeadLoss.apply(*inputs, Objective(chunk=64))[0] if work is ours_loss else sum(peers.naive_loss(*inputs))
        value.backward()
        return value.item(), inputs[1].grad.double()
    exact = outcome(naive_loss, torch.float64)
    apart = lambda found: (abs(found[0] / exact[0] - 1), float((found[1] - exact[1]).norm() / exact[1].norm()))
    same = apart(outcome(ours_loss, torch.float64))
    ours, naive = (apart(outcome(work, torch.float32)) for work in (ours_loss, naive_loss))
    return [Row("peak memory of KL + CE at (1, 2048, 128256), chunked / naive", f"{memory[0] / memory[1]:.3f}",
                f"{memory[0] / 1e9:.2f} GB / {memory[1] / 1e9:.2f} GB", "≤ 0.25"),
            Row("their value, chunked from naive, relative", f"{same[0]:.0e}",
                f"fp64; in fp32 from fp64: chunked {ours[0]:.0e}, naive {naive[0]:.0e}", "≤ 1e-6"),
            Row("their gradient at the head, the same, 2-norm", f"{same[1]:.0e}",
                f"fp64; in fp32 from fp64: chunked {ours[1]:.1e}, naive {naive[1]:.1e}", "≤ 1e-5")]


def chunks(device) -> list[Row]:
    """The time of KL + CE, SmolLM2's vocabulary and widths, 1,024 tokens."""
    c, r = Config.from_hf(PRESETS["smollm2-135m"]["config"]), 288
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)
    ours = draw(1024, r), draw(c.vocab_size, r) / r ** 0.5
    theirs = draw(1024, c.hidden_size), draw(c.vocab_size, c.hidden_size) / 24
    inputs = (*(x.requires_grad_() for x in ours), torch.arange(1024, device=device), *theirs)
    works = [lambda: ours_loss(inputs), lambda: naive_loss(inputs), lambda: ours_loss(inputs, 1024)]
    a, b, whole = side_by_side(works, device, 5)
    return [ratio("time of KL + CE, chunks of 512 / naive, whole logits", a, b, "≤ 1.05"),
            ratio("the same / our own form in one chunk", a, whole, "")]


def forward(device) -> list[Row]:
    """SmolLM2-135M (6 of 30 layers and of its vocabulary on a CPU): our forward pass over that of transformers with its sdpa attention."""
    from transformers import LlamaConfig, LlamaForCausalLM
    layers = 30 if device.type != "cpu" else 6
    config = PRESETS["smollm2-135m"]["config"] | dict(num_hidden_layers=layers, vocab_size=49152 * layers // 30)
    net = Transformer(Config.from_hf(config)).eval().requires_grad_(False)
    net.initialise(0)
    shape = {k: v for k, v in config.items() if k not in ("model_type", "torch_dtype")}
    theirs = LlamaForCausalLM._from_config(LlamaConfig(**shape), attn_implementation="sdpa").eval()
    theirs.load_state_dict({name if name.startswith("lm_head") else f"model.{name}": w for name, w in net.state_dict().items()})
    ids = torch.randint(0, config["vocab_size"], (4, 256), generator=torch.Generator().manual_seed(0)).to(device)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        net.to(device, dtype), theirs.to(device, dtype)
        with torch.no_grad():
            a, b = side_by_side([lambda: net(ids), lambda: theirs(ids, use_cache=False)], device, 15)
        rows.append(ratio(f"forward pass / transformers (sdpa), SmolLM2, {str(dtype).removeprefix('torch.')}", a, b, "≤ 1.0"))
    return rows


def qwen_layer():
    """(teacher, calibration ids) of one layer of Qwen2.5-3B with a small vocabulary: 4,096 tokens."""
    c = replace(Config.from_hf(PRESETS["qwen2.5-3b"]["config"]), num_hidden_layers=1, vocab_size=256)
    teacher = Transformer(c).requires_grad_(False)
    teacher.initialise(0)
    return teacher, torch.randint(0, 256, (8, 512), generator=torch.Generator().manual_seed(0))


def calibrated_layer(made):
    teacher, ids = made
    student = lrc.blank_student(teacher, PRESETS["qwen2.5-3b"]["width"])
    frame = starts.calibrate(teacher, student, ids, ids, say=lambda text: None)
    core.open_mlp(lrc.Clone(student, lrc.plain_maps(teacher, student, opened=core.MLP), frame), "core", bases="compact")


def frame_of_gate(made):
    """T and what stands for U_perp, of one matrix."""
    W = made[0].layers[0].mlp.gate_proj.weight
    core.Compact(lrc.Plain(W, W[:, :8], False))


def full_svd_of_gate(made):
    """T and U_perp in one (d_ff, d_ff) matrix, as `full_matrices` gives them."""
    torch.linalg.svd(made[0].layers[0].mlp.gate_proj.weight, full_matrices=True)


def start(device) -> list[Row]:
    """The frame [T U_perp] of one matrix of Qwen2.5-3B (11008 x 2048) over its full SVD; and the calibrated start of a whole layer, seven
    matrices fitted and their frames, over the full SVD of its three MLP matrices alone, one timed. On the CPU, once each."""
    frame, svd, whole = (alone(work, qwen_layer) for work in (frame_of_gate, full_svd_of_gate, calibrated_layer))
    return [Row("[T U_perp] of one 11008 x 2048 matrix / its full SVD, time", f"{frame[0] / svd[0]:.3f}",
                f"{frame[0]:.3g} s / {svd[0]:.3g} s", ""),
            Row("the same, peak memory", f"{frame[1] / svd[1]:.3f}",
                f"{frame[1] / 1e9:.2f} GB / {svd[1] / 1e9:.2f} GB, 0.48 GB of it d_ff x d_ff", "no d_ff x d_ff"),
            Row("calibrated start of a Qwen2.5-3B layer, 4,096 tokens / 3 full SVDs, time", f"{whole[0] / (3 * svd[0]):.3f}",
                f"{whole[0]:.3g} s / {3 * svd[0]:.3g} s", "≤ 0.2"),
            Row("its peak memory", f"{whole[1] / 1e9:.2f} GB", "", "")]


def evaluation(device, model: str, local: str, limit: int = 40) -> list[Row]:
    """eval.py over lm-eval's hf backend (batch 8) on the same tasks, fp32, each task once, the two in turns first; refused where an
    accuracy differs."""
    from eval import find_tasks
    from likelihood import Model, harness
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    names = ["arc_easy", "piqa", "winogrande", "sciq", "boolq", "commonsense_qa"]
    loaded, _, missing, manager = find_tasks(names, Path(local))
    if missing:
        raise Refusal(f"--local {local}: {', '.join(missing)} cannot be loaded; `python tests/tasks.py CACHE` makes such a folder")
    backends = [harness(Model(model, device=str(device), dtype="float32")),
                HFLM(pretrained=model, device=str(device), dtype="float32", batch_size=8)]
    taken, scores = [[], []], [[], []]

    def accuracies(i: int, name: str) -> list[float]:
        found = simple_evaluate(model=backends[i], tasks=loaded[name], num_fewshot=0, limit=limit, verbosity="ERROR", task_manager=manager)
        return [figures["acc,none"] for figures in found["results"].values()]
    for turn, name in enumerate(names):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            taken[i].append(seconds(lambda: scores[i].append(accuracies(i, name)), device))
    if scores[0] != scores[1]:
        raise Refusal(f"the two backends disagree: {scores}")
    each = [a / b for a, b in zip(*taken)]
    a, b = map(sum, taken)
    return [Row(f"eval.py / lm-eval's hf backend, {len(names)} tasks, {limit} documents each, the same accuracies", f"{a / b:.3f}",
                f"by task {min(each):.3f} to {max(each):.3f}; {a:.3g} s / {b:.3g} s", "≤ 0.8")]
