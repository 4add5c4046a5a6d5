"""The log of public bug reports, case by case: what no other file tests, and that no case has lost its test.

A4 or B38 in the name of a test, here or elsewhere, is the number of its case.
"""
import ast
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from copy import deepcopy
from decimal import Decimal, getcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoints
import core
import data
import distill
import lrc
import merge
import plan
import runs
import train
from config import Config
from conftest import SHAPE, random_net
from distill import HeadLoss, Objective, evaluate, kl_rows, losses
from files import Refusal
from flags import objective_of
from model import Transformer, rope_frequencies
from teachers import PRESETS
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
CASES = [*(f"A{n}" for n in range(1, 13)), *(f"B{n}" for n in range(1, 46))]  # all touch us, some in part: see each test
LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
SMALL = ["--width", "12", "--batch-size", "2", "--seq-len", "16", "--steps", "3", "--lr", "1e-3", "--calibration-tokens", "256", "--eval-tokens", "64"]


def test_every_case_has_a_test_that_carries_its_number():
    found = set()
    for file in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= {part.upper() for part in node.name.split("_") if re.fullmatch(r"[abAB]\d+", part)}
    assert [case for case in CASES if case not in found] == [] and not found - set(CASES)


# --------------------------------------------------------------------------------------------- what is shared


def tokenizer_into(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ROOT / "tiny" / name, folder / name)
    return folder


@pytest.fixture
def one_rank(tmp_path):
    """A process group of one, in this process: enough for DDP to be itself."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


pytestmark = pytest.mark.usefixtures("elsewhere")
CPU = train.Place(torch.device("cpu"), 0, 1, None)


def built(teacher, *flags):
    """(clone, optimizer, args) of train.py for a teacher in memory."""
    args = train.parse(["--width", "12", *([] if "--mode scratch" in " ".join(flags) or "--init" in flags else ["--init", "orthonormal"]), *flags])
    clone = train.build(args, None, teacher, teacher.config, None, CPU)
    return clone, train.make_optimizer(clone, 1e-2), args


def step(clone, optimizer, args, teacher, ids, net=None, accum=1):
    """One train.take_step over `ids` (B, T) in `accum` micro-batches -> what it logs."""
    micro = [(part, part.roll(-1, 1)) for part in ids.chunk(accum)]
    return train.take_step(clone, optimizer, clone.student if net is None else net, teacher, micro, objective_of(args, teacher.config.vocab_size), 1e-2, 1.0, CPU, [])[0]


def run(folder, out, *more):
    train.main(["--teacher", str(folder), "--data", str(folder / "text.jsonl"), "--out", str(out), *SMALL, *more])
    return Path(out)


def steps_of(out):
    return [row for row in runs.read_metrics(out) if "loss" in row]


class Live(TorchDispatchMode):
    """The largest tensor that any operation makes."""
    largest = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(t.numel() for t in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(t, torch.Tensor))])
        return made


# -------------------------------------------------------------------------------------------------- the losses


def test_A1_the_listed_values_in_forty_decimal_digits():
    """KL(teacher||student) for logits [2,0,-1] and [0,1,0]. The list's 1.011990 at T = 40 is an fp32 sum of p log(p/q): off by 2e-4 of the truth."""
    getcontext().prec = 40
    for T, listed, within in ((1, 0.912983, 1e-6), (2, 1.091222, 1e-6), (40, 1.011990, 2e-4)):
        softmax = lambda logits: [(Decimal(v) / T).exp() / sum((Decimal(w) / T).exp() for w in logits) for v in logits]
        exact = float(T * T * sum(p * (p / q).ln() for p, q in zip(softmax((2, 0, -1)), softmax((0, 1, 0)))))
        assert exact == pytest.approx(listed, rel=within)
        t, z = torch.tensor([[2.0, 0, -1]]), torch.tensor([[0.0, 1, 0]])
        assert T * T * kl_rows(t.double() / T, z.double() / T)[0].item() == pytest.approx(exact, rel=1e-11)
        assert T * T * kl_rows(t / T, z / T)[0].item() == pytest.approx(exact, rel=2e-6)


@pytest.mark.parametrize("T", [1.0, 2.0, 40.0])
def test_A1_the_loss_of_a_step_does_not_change_with_its_length(T):
    class Says(torch.nn.Module):
        """A network that says the same logits everywhere, through a head of ones."""
        def __init__(self, *logits):
            super().__init__()
            self.logits, self.lm_head = torch.nn.Parameter(torch.tensor(logits)), torch.nn.Linear(3, 3, bias=False)
            self.lm_head.weight.data = torch.eye(3)

        def forward(self, ids, head=True, mask=None):
            return self.logits.expand(*ids.shape, 3)
    found = []
    for length in (5, 50):
        student, teacher, ids = Says(0.0, 1.0, 0.0), Says(2.0, 0.0, -1.0), torch.zeros(2, length, dtype=torch.long)
        sums = losses(student, teacher, ids, ids, Objective(temperature=T, w_align=0), head=student.lm_head.weight)
        (sums["loss"] / ids.numel()).backward()
        found.append([*(sums[name].item() / ids.numel() for name in ("kl", "ce")), *student.logits.grad.tolist()])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][0] / 1.28 == pytest.approx({1: 0.912983, 2: 1.091222, 40: 1.012181}[T], rel=2e-6)


def test_A1_the_gradient_of_the_kl_is_2048_times_that_of_a_token_mean_without_T_squared():
    """Which is what the published code weighs against the CE: at T = 40 a mean without T^2 would be lost beside it."""
    generator = torch.Generator().manual_seed(0)
    t, z = (torch.randn(4, 1000, generator=generator, dtype=torch.float64) for _ in range(2))
    eye, targets, z = torch.eye(1000, dtype=torch.float64), torch.arange(4), z.requires_grad_()
    norms = {}
    for name, weights in (("kl", dict(w_ce=0)), ("ce", dict(w_kl=0))):
        loss = HeadLoss.apply(z, eye, targets, t, eye, Objective(**weights))[0] / 4
        norms[name] = torch.autograd.grad(loss, z)[0].norm().item()
    plain = F.kl_div((z / 40).log_softmax(-1), (t / 40).softmax(-1), reduction="batchmean")
    weak = torch.autograd.grad(plain, z)[0].norm().item()
    assert norms["kl"] == pytest.approx(2048 * weak, rel=1e-9)
    assert weak == pytest.approx(1.4e-5, rel=0.05) and norms["ce"] == pytest.approx(0.50, abs=0.01)


@pytest.mark.parametrize("T, real, every, within", [(1.0, 0.122, 0.124, 0.15), (40.0, 0.125, 0.390, 0.01)])
def test_A3_the_listed_values_with_and_without_padded_rows(T, real, every, within):
    """At T = 1 four tokens drawn anew give 0.117 to 0.138, and 1 to 4 % more with the padded rows; at T = 40 always the same."""
    generator = torch.Generator().manual_seed(0)
    t = 3 * torch.randn(4, 151936, generator=generator)
    z = t + 0.5 * torch.randn(4, 151936, generator=generator)
    t[:, 151665:], z[:, 151665:] = -20, 3 * torch.randn(4, 271, generator=generator)
    eye, targets = torch.eye(4), torch.zeros(4, dtype=torch.long)
    product = lambda n: HeadLoss.apply(eye, z.T, targets, eye, t.T, Objective(temperature=T, w_ce=0, real_vocab=n))[1].item() / 4 / 1.28
    assert product(151665) == pytest.approx(real, rel=within) and product(None) == pytest.approx(every, rel=within)
    assert product(None) / product(151665) == pytest.approx(every / real, rel=0.02)


def test_A3_two_heights_of_embedding_meet_on_the_real_rows_alone(ids):
    """152064 against 151936 in small: the figures are those of the rows that both can say, in training and in evaluation; without a
    real vocabulary the shapes do not fit, and nothing is padded."""
    student, teacher = random_net(1, hidden_size=12, vocab_size=99), random_net(2).requires_grad_(False)  # 99 and 96 rows, 90 of them real
    ids, objective = ids % 90, Objective(w_ce=0, w_align=0, real_vocab=90)
    z, t = student(ids).detach().double()[..., :90].flatten(0, 1), teacher(ids).double()[..., :90].flatten(0, 1)
    at = lambda T: F.kl_div((z / T).log_softmax(-1), (t / T).softmax(-1), reduction="sum").item() * T * T
    assert losses(student, teacher, ids, ids, objective, head=student.lm_head.weight)["kl"].item() == pytest.approx(1.28 * at(40), rel=1e-4)
    assert evaluate(student, teacher, [(ids, ids)], real_vocab=90)["val_kl"] == pytest.approx(at(1) / ids.numel(), rel=1e-5)
    with pytest.raises(RuntimeError, match="99"):
        evaluate(student, teacher, [(ids, ids)])


def test_B13_the_loss_at_llamas_vocabulary_holds_six_chunks_of_logits_and_no_more():
    """(1, 2048, 128256) on tensors without memory: every operation runs, and every allocation is counted. plan.py states the bound, 6 x 512 x V
    in fp32, besides the heads; the logits of both models alone would be 8 x 512 x V."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from test_plan import Live as Counted
    N, V, r = 2048, 128256, 8
    with FakeTensorMode():
        x, weight, x_t, weight_t = (torch.empty(*shape) for shape in ((N, r), (V, r), (N, r), (V, r)))
        x.requires_grad_(), weight.requires_grad_()
        with Counted() as counted, Live() as seen:
            HeadLoss.apply(x, weight, torch.empty(N, dtype=torch.long), x_t, weight_t, Objective())[0].backward()
    assert seen.largest == 512 * V and counted.peak <= 4 * (6 * 512 * V + 4 * V * r) < 4 * 8 * 512 * V


def test_B16_a_dropout_in_the_config_drops_nothing(tmp_path, ids):
    net = random_net()
    net.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | dict(attention_dropout=0.5, hidden_dropout=0.5)), encoding="utf-8")
    teacher = Transformer.from_pretrained(tmp_path)
    assert not teacher.training and torch.equal(teacher(ids), teacher(ids)) and torch.equal(teacher.train()(ids), net(ids))


@pytest.mark.parametrize("accum", [4, 8])
def test_B38_accumulation_changes_neither_what_is_logged_nor_the_gradient(accum):
    """A final gain of 0 makes every logit 0 and the CE log V, whatever the text: a constant loss."""
    teacher = random_net().requires_grad_(False)
    ids = torch.randint(0, 96, (8, 16), generator=torch.Generator().manual_seed(2))
    for flat in (True, False):
        logged = []
        for parts in (1, accum):
            clone, optimizer, args = built(teacher)
            if flat:
                torch.nn.init.zeros_(clone.student.norm.weight)
            logged.append(step(clone, optimizer, args, teacher, ids, accum=parts))
        assert logged[0] == pytest.approx(logged[1], rel=1e-5)
        assert not flat or logged[1]["ce"] == pytest.approx(math.log(96), rel=1e-6)


# --------------------------------------------------------------------------------------------------- the tokens


BIG = [128000, 128001, 128009, 151643, 151645]


def test_A4_the_trainer_refuses_16_bits_for_a_large_vocabulary_and_never_reads_one_width_as_another(teacher_folder, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file
    from test_data import Numbers
    assert (torch.tensor(BIG) % (1 << 16)).tolist() == [62464, 62465, 62473, 20571, 20573]  # what a silent wrap would leave
    (tmp_path / "big.jsonl").write_text("".join(json.dumps({"id": i, "text": " ".join(map(str, BIG * 8))}) + "\n" for i in range(30)), encoding="utf-8")
    wide = data.prepare(str(tmp_path / "big.jsonl"), Numbers(151936), tmp_path / "wide", quiet=True)
    assert data.Tokens(wide, "train", 39).window(0).tolist() == BIG * 8
    half = shutil.copytree(wide, tmp_path / "half")
    for file in half.glob("*.safetensors"):  # ids of 32 bits, said to be of 16
        file.write_bytes(file.read_bytes().replace(b'"U32"', b'"U16"'))
    with pytest.raises(Refusal, match="train-00000.safetensors"):
        data.Tokens(half, "train", 39)

    short = data.prepare(str(teacher_folder / "text.jsonl"), Tokenizer(teacher_folder), tmp_path / "short", quiet=True)
    for file in short.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            meta = opened.metadata()
        save_file(load_file(file), file, meta | {"vocab_size": "128256"})
    (tmp_path / "nano.bin").write_bytes(torch.tensor([5] * 4000).to(torch.uint16).numpy().tobytes())
    for source, word in ((short, "16-bit ids cannot hold a vocabulary of 128256"), (tmp_path / "nano.bin", "nano.bin")):
        with pytest.raises(Refusal, match=word) as refused:
            run(teacher_folder, tmp_path / "run", "--data", str(source))
        assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_B42_another_first_document_changes_no_bit_of_the_second_under_a_document_mask(ids):
    net, rows = random_net(), ids.clone()
    rows[rows == 7] = 8
    rows[:, 9] = 7  # closes the first document
    other = rows.clone()
    other[:, :9] = (other[:, :9] + 11) % 96
    other[other == 7] = 8
    other[:, 9] = 7
    masked, plain = ([net(x, mask=distill.document_mask(x, s)) for x in (rows, other)] for s in (7, None))
    assert torch.equal(masked[0][:, 10:], masked[1][:, 10:]) and not torch.equal(masked[0][:, :9], masked[1][:, :9])
    assert not torch.equal(plain[0][:, 10:], plain[1][:, 10:])


# -------------------------------------------------------------------------------------- the network and its files


KINDS = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM), "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [40, 48])
def test_A5_B6_fp32_logits_of_a_free_head_dim_are_those_of_transformers(tmp_path, kind, hidden):
    """As transformers initialises it: 4 heads of 16, so width / heads would be 10 or 12. And the softmax scale alone: exactly 1/4."""
    make_config, make_model = KINDS[kind]
    config = make_config(vocab_size=96, hidden_size=hidden, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                         max_position_embeddings=128, tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=1e4))
    torch.manual_seed(0)
    theirs = make_model(config).eval()
    theirs.save_pretrained(tmp_path)
    ours, ids = Transformer.from_pretrained(tmp_path, torch.float32), torch.randint(0, 96, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (ours(ids) - theirs(ids).logits).abs().max() < 1e-5
        attention, x = ours.layers[0].self_attn, torch.randn(1, 5, hidden, generator=torch.Generator().manual_seed(1))
        q, k, v, mixed = attention.mix(x, torch.ones(5, 16), torch.zeros(5, 16))  # angle 0: no RoPE
    split = lambda t, heads: t.view(5, heads, 16).transpose(0, 1).double()
    q, k, v = split(q, 4), split(k, 2).repeat_interleave(2, 0), split(v, 2).repeat_interleave(2, 0)
    scores = (q @ k.mT * 0.25).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf)
    assert torch.allclose((scores.softmax(-1) @ v).transpose(0, 1).reshape(1, 5, 64).float(), mixed, atol=1e-6)


def test_A6_what_transformers_refuses_is_refused_before_the_first_step_and_qwen2_goes_through(tmp_path, bare):
    shape = dict(SHAPE, hidden_size=64, head_dim=16, vocab_size=2048, tie_word_embeddings=False)
    with pytest.raises(Exception, match="multiple"):  # transformers' own verdict on width 50 with 4 heads
        transformers.LlamaConfig(**{k: v for k, v in shape.items() if k not in ("model_type", "rope_theta")} | dict(hidden_size=50))
    for kind in KINDS:
        folder = tmp_path / kind
        random_net(**dict(shape, model_type=kind)).save_pretrained(folder)
        (tokenizer_into(folder) / "text.jsonl").write_text("".join(json.dumps({"id": i, "text": f"x = {i}\n" * 20}) + "\n" for i in range(60)), encoding="utf-8")
    with pytest.raises(Refusal, match="--width 50.*4 heads.*48 and 52"):
        run(tmp_path / "llama", tmp_path / "no", "--width", "50")
    assert not (tmp_path / "no").exists()
    student = run(tmp_path / "qwen2", tmp_path / "yes", "--width", "50") / "student"
    theirs, ids = transformers.AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32), torch.arange(40)[None]
    assert theirs.config.hidden_size == 50 and theirs.config.head_dim == 16
    with torch.no_grad():
        ours = Transformer.from_pretrained(student)(ids)
        assert (theirs(ids).logits - ours).abs().max() < 1e-5 * ours.abs().max()


def test_A6_the_widths_of_a_student_of_llama_3b():
    shape = Config.from_hf(PRESETS["llama3.2-3b"]["config"])  # 24 heads
    for width in (1536, 1920):
        plan.check_width(shape, width)
    for width in (1024, 1280, 1600, 2048):
        with pytest.raises(Refusal, match="24 heads"):
            plan.check_width(shape, width)


def test_A7_an_ignored_rope_block_would_turn_a_head_by_two_radians_and_show_in_2048_tokens():
    shape = dict(SHAPE, head_dim=64, rope_theta=5e5, max_position_embeddings=8192)
    scaled, plain = (rope_frequencies(Config.from_hf(dict(shape, rope_scaling=block))) for block in (LLAMA3, None))
    error = (plain.double() - scaled.double()).abs().max().item()
    assert error * 127 == pytest.approx(0.125, abs=5e-4) and error * 2047 == pytest.approx(2.02, abs=5e-3)
    ids = torch.randint(0, 96, (1, 2048), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = (random_net(**dict(shape, rope_scaling=block))(ids) for block in (LLAMA3, None))
    assert (one - other).abs().max() > 1e-3 * one.abs().max()  # what the comparison with transformers allows is 5e-6


def test_A9_an_untied_student_of_a_tied_teacher_says_so(tmp_path, ids):
    tied = random_net()
    untied = Transformer(Config.from_hf(tied.config.to_hf(torch.float32) | dict(tie_word_embeddings=False)))
    untied.load_state_dict(tied.state_dict())
    with torch.no_grad():
        untied.lm_head.weight.mul_(2)
    untied.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(ids).logits - 2 * tied(ids)).abs().max() < 1e-5 * tied(ids).abs().max()


@pytest.mark.parametrize("flags", ["--mode lrc", "--mode core", "--mode random --coordinates teacher"])
def test_A9_B23_what_transformers_loads_is_the_coordinates_product_in_fp32(teacher_folder, tmp_path, bare, monkeypatch, ids, flags):
    """The student as it stood in memory when the run ended, its weights made once more from the coordinates in float64."""
    held, real = [], train.build
    monkeypatch.setattr(train, "build", lambda *args: held.append(real(*args)) or held[0])
    folder = run(teacher_folder, tmp_path / "run", *flags.split()) / "student"
    net, theirs = deepcopy(held[0].student).double(), transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, m in deepcopy(held[0].maps).items():
            net.get_parameter(name).copy_(m.double().weight())
        ours = net(ids)
        assert (theirs(ids).logits - ours).abs().max() < 1e-5 * ours.abs().max()


def test_B7_fp16_is_not_offered_and_a_gpu_without_bf16_computes_in_fp32(monkeypatch, capsys, ids):
    with pytest.raises(SystemExit) as stopped:
        train.parse(["--dtype", "float16"])
    assert stopped.value.code == 2 and "float16" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for has, expected in ((False, None), (True, torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, has=has: has or including_emulation)
        assert train.find_place(train.Args()).autocast == expected
    monkeypatch.undo()
    net = random_net()
    with torch.no_grad():
        net.layers[0].mlp.up_proj.weight.mul_(1e5)
    mix = net.layers[0].mlp.mix(net.layers[0].post_attention_layernorm(net.embed_tokens(ids)))[2]
    assert mix.abs().max() > 1e5 > torch.finfo(torch.float16).max
    assert all(torch.isfinite(net.to(dtype)(ids)).all() for dtype in (torch.float32, torch.bfloat16))


@pytest.mark.parametrize("start", ["calibrated", "orthonormal", "random"])
def test_B8_a_teacher_from_a_file_and_one_from_memory_start_the_same_student(tmp_path, start, ids):
    memory = random_net().requires_grad_(False)
    memory.save_pretrained(tmp_path)
    clones = []
    for teacher in (memory, Transformer.from_pretrained(tmp_path).requires_grad_(False)):
        torch.manual_seed(len(clones))  # the global stream has no part in it
        args = train.parse(["--width", "12", "--init", start])
        clones.append(train.build(args, None, teacher, teacher.config, (ids, ids), CPU))
    one, two = (clone.coordinates() | {"frame": clone.frame} for clone in clones)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) and torch.isfinite(one[name]).all() for name in one)
    assert start != "random" or clones[0].frame.std().item() == pytest.approx(0.02, rel=0.1)


def test_B9_an_export_whose_config_was_changed_by_hand_names_the_tensor_and_both_shapes(teacher_folder, tmp_path, bare):
    out = run(teacher_folder, tmp_path / "run")
    record = json.loads((out / "config.json").read_text(encoding="utf-8"))
    for change, parts in ((dict(hidden_size=16), ("(2048, 12)", "(2048, 16)", "embed_tokens.weight")), (dict(vocab_size=2047), ("(2048, 12)", "(2047, 12)", "embed_tokens.weight")),
                          (dict(intermediate_size=61), ("(60, 12)", "(61, 12)", "gate_proj.weight"))):
        (out / "config.json").write_text(json.dumps(record | {"student": record["student"] | change}), encoding="utf-8")
        with pytest.raises(Refusal) as refused:
            merge.export(out, tmp_path / "export")
        assert all(part in str(refused.value) for part in parts) and "\n" not in str(refused.value)


def test_B10_padded_rows_stay_in_tensor_and_config_and_keep_their_bytes_where_nothing_trains_them(tmp_path, bare):
    """A tokenizer of 2,048 in an embedding of 2,064, untied. The student of a distillation has projected rows, as many; one fine-tuned on text
    that never holds the ids keeps its padded input rows bit for bit."""
    folder = tmp_path / "teacher"
    random_net(vocab_size=2064, tie_word_embeddings=False).save_pretrained(folder)
    (tokenizer_into(folder) / "text.jsonl").write_text("".join(json.dumps({"id": i, "text": f"x = {i}\n" * 20}) + "\n" for i in range(60)), encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}", encoding="utf-8")
    chats = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"so, {i} it is"}] for i in range(200)]
    rows = (json.dumps({"id": i, "messages": messages}) + "\n" for i, messages in enumerate(chats))
    (tmp_path / "chats.jsonl").write_text("".join(rows), encoding="utf-8")
    distilled = run(folder, tmp_path / "distilled") / "student"
    train.main(["--stage", "sft", "--init", str(folder), "--data", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "tuned"), *SMALL[2:]])
    before = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for student, width in ((distilled, 12), (tmp_path / "tuned" / "student", 24)):
        tensors = load_file(student / "model.safetensors")
        assert json.loads((student / "config.json").read_text(encoding="utf-8"))["vocab_size"] == 2064
        assert tensors["model.embed_tokens.weight"].shape == tensors["lm_head.weight"].shape == (2064, width)
    assert torch.equal(tensors["model.embed_tokens.weight"][2048:], before[2048:]) and not torch.equal(tensors["model.embed_tokens.weight"][:2048], before[:2048])
    merge.export(tmp_path / "tuned", tmp_path / "again", torch.bfloat16)
    exported = load_file(tmp_path / "again" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(exported[2048:], before[2048:].bfloat16())


def test_B24_a_nan_in_the_teacher_is_named_and_an_embedding_needs_no_matrix_of_its_height_squared(teacher_folder, tmp_path):
    from safetensors.torch import save_file
    folder = shutil.copytree(teacher_folder, tmp_path / "teacher")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = math.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Refusal, match="model.layers.1.mlp.down_proj.weight holds NaN"):
        run(folder, tmp_path / "run")
    W = torch.randn(3000, 24, generator=torch.Generator().manual_seed(0))
    for T in (W, W.T):
        with Live() as seen:
            lrc.Plain(T, T[:, :12] if T is W else T[:12], dual=T is not W)
        assert seen.largest == 3000 * 24


# ------------------------------------------------------------------------------------------ the loop and the ranks


ALL_TERMS = ("kl", "ce", "q", "k", "v", "o", "gate", "up", "hidden")
SWITCHES = [*(f"--without {term}" for term in ALL_TERMS), "--w-kl 0", "--w-ce 0", "--w-align 0", "--without kl,ce", "--without ce --w-align 0", "--attention mse --hidden mse",
            "--recipe gpd", "--recipe clone", *(f"--recipe clone --without {term}" for term in ("attn_out", "ffn_out", "q,k,v,gate,up")), "--recipe clone --without kl,ce",
            "--mode lrc --coordinates teacher", "--mode dense", "--mode random", "--mode slice", "--mode scratch", "--mode scratch --without kl", "--bases implicit"]


def test_B31_no_switch_of_the_loss_leaves_a_parameter_without_a_gradient_under_ddp(teacher, ids, one_rank):
    """DDP without find_unused_parameters raises in the second step where a parameter got no gradient in the first."""
    for flags in SWITCHES:
        clone, optimizer, args = built(teacher, *flags.split())
        net = DDP(clone.student, gradient_as_bucket_view=True)
        for _ in range(3):
            logged = step(clone, optimizer, args, teacher, ids[:2], net)
        assert math.isfinite(logged["loss"]), flags
        assert all(p.grad is not None for p in clone.student.parameters() if p.requires_grad), flags


def test_B19_one_step_moves_every_coordinate_and_the_optimizer_holds_just_those(teacher, ids):
    for mode in (*core.MODES, "scratch"):
        for flags in ([], ["--coordinates", "teacher"]) if mode != "scratch" else ([],):
            clone, optimizer, args = built(teacher, "--mode", mode, *flags)
            named = clone.coordinates()
            held = [p for group in optimizer.param_groups for p in group["params"]]
            mapped = {id(w) for name, w in clone.weights.items() if name in clone.maps}
            free = [p for p in [*clone.student.parameters(), *(p for m in clone.maps.values() for p in m.parameters())] if p.requires_grad and id(p) not in mapped]
            assert {id(p) for p in held} == {id(p) for p in free} == {id(p) for p in named.values()} and len(held) == len(named)
            before = {name: p.detach().clone() for name, p in named.items()}
            step(clone, optimizer, args, teacher, ids)
            assert [name for name, p in named.items() if torch.equal(before[name], p)] == [], mode


def test_B26_a_tied_pair_is_one_storage_one_entry_and_the_sum_of_both_uses(tmp_path, ids):
    teacher = random_net().requires_grad_(False)

    def tied(net):
        assert net.lm_head.weight is net.embed_tokens.weight and [n for n, _ in net.named_parameters() if "lm_head" in n] == []
        return net
    tied(Transformer.from_pretrained("tiny"))
    clone, optimizer, args = built(teacher)
    student = tied(clone.student)
    tied(torch.compile(deepcopy(student), backend="eager"))
    tied(deepcopy(student).to(torch.bfloat16))
    assert sum("embed" in name or "head" in name for name in clone.coordinates()) == 1
    for _ in range(3):
        step(clone, optimizer, args, teacher, ids, torch.compile(student, backend="eager"))
    tied(student).save_pretrained(tmp_path)
    tied(Transformer.from_pretrained(tmp_path))

    apart = Transformer(Config.from_hf(student.config.to_hf(torch.float32) | dict(tie_word_embeddings=False)))  # the same function, the pair untied
    apart.load_state_dict(student.state_dict())
    for net in (student, apart):
        net.zero_grad()
        losses(net, teacher, ids, ids.roll(-1, 1), objective_of(args, 96), clone.frame, net.lm_head.weight, None)["loss"].backward()
    both = apart.embed_tokens.weight.grad + apart.lm_head.weight.grad
    assert apart.embed_tokens.weight.grad.abs().max() > 0 and (student.embed_tokens.weight.grad - both).abs().max() < 1e-5 * both.abs().max()


WRAPPED = {"plain": lambda net: net, "compiled": lambda net: torch.compile(net, backend="eager"),
           "each block compiled": lambda net: [block.compile(backend="eager") for block in net.layers] and net,
           "ddp": DDP, "ddp of compiled": lambda net: DDP(torch.compile(net, backend="eager"))}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_A11_a_checkpoint_has_the_same_names_however_the_network_ran_and_loads_into_any(tmp_path, ids, one_rank, wrapped):
    teacher = random_net().requires_grad_(False)
    clone, optimizer, args = built(teacher)
    plain_names = set(train.training_state(clone, optimizer)), set(clone.weights)
    step(clone, optimizer, args, teacher, ids, WRAPPED[wrapped](clone.student))
    clone.deploy()
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_text("", encoding="utf-8")
    checkpoints.save_checkpoint(tmp_path, {"step": 1, "tokens": 1}, train.training_state(clone, optimizer), clone.weights)
    files = [load_file(file) for file in sorted((tmp_path / "checkpoint" / "step-0000001").glob("st*.safetensors"))]  # state, student
    assert (set(files[0]), set(files[1])) == plain_names and not any("_orig_mod" in name or "module." in name for file in files for name in file)
    for into in ("plain", "compiled"):
        other, state, args = built(teacher, "--seed", "9")
        net = WRAPPED[into](other.student)
        checkpoints.restore("checkpoint", train.training_state(other, state), files[0])  # strict: a name too many or too few is refused
        other.deploy()
        assert all(torch.equal(p, other.coordinates()[name]) for name, p in clone.coordinates().items())
        assert torch.equal(net(ids), clone.student(ids))


def test_B33_twenty_steps_over_several_epochs_compile_the_student_and_the_teacher_once(teacher_folder, tmp_path, bare, monkeypatch):
    """Windows are all of one length and the last of an epoch is followed by the first of the next, so no batch is short."""
    import torch._dynamo.utils as counters
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net: compiled(net, backend="eager"))
    lines = (teacher_folder / "text.jsonl").read_text(encoding="utf-8").splitlines(True)[:40]
    (tmp_path / "few.jsonl").write_text("".join(lines), encoding="utf-8")
    torch._dynamo.reset()
    counters.counters.clear()
    out = run(teacher_folder, tmp_path / "run", "--compile", "--data", str(tmp_path / "few.jsonl"), "--steps", "20",
              "--batch-size", "9", "--seq-len", "32", "--accum", "2", "--doc-mask")
    windows = len(data.open_split([next(Path("tokens").iterdir())], [1.0], "train", 32))
    assert len(steps_of(out)) == 20 and 20 * 2 * 9 > 2 * windows and windows % 9
    assert counters.counters["stats"]["unique_graphs"] == 2 and not counters.counters["graph_break"]


RANK = """
import hashlib, os, sys
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
torch.manual_seed(1000 + int(os.environ["RANK"]))  # a stream that differs by rank must not matter
import train
digest = lambda tensors: hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
real = train.build
def told(args, folder, teacher, *more):
    clone = real(args, folder, teacher, *more)
    print("teacher", digest(teacher.parameters()), "start", digest(clone.coordinates().values()), file=sys.stderr)
    return clone
train.build = told
train.main({argv!r})
"""


def two_ranks(folder, out, *more):
    """Two processes with ranks 0 and 1 and, as on two machines, the same LOCAL_RANK 0 -> [(stdout, stderr)]."""
    argv = ["--teacher", str(folder), "--data", str(folder / "text.jsonl"), "--out", str(out), *SMALL, *more]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = dict(os.environ, WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = [subprocess.Popen([sys.executable, "-c", RANK.format(root=str(ROOT), argv=argv)], env=where | {"RANK": str(rank)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
             for rank in (0, 1)]
    said = [process.communicate(timeout=500) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    return said


@pytest.mark.slow
def test_B25_B35_B36_two_ranks_hold_one_teacher_and_one_start_and_one_of_them_writes(teacher_folder, tmp_path):
    said = two_ranks(teacher_folder, tmp_path / "run", "--log-every", "1", "--mode", "random")
    sums = [re.search(r"teacher (\w+) start (\w+)", errors).groups() for _, errors in said]
    assert sums[0] == sums[1]  # before any broadcast
    assert [len(re.findall(r"^step +\d+/3  kl", screen, re.M)) for screen, _ in said] == [3, 0] and said[1][0] == ""
    assert [row["step"] for row in steps_of(tmp_path / "run")] == [1, 2, 3]
    assert [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-0000003"] and not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_B32_two_compiled_ranks_lose_what_two_eager_ones_do(teacher_folder, tmp_path):
    for name, more in (("eager", []), ("compiled", ["--compile"])):
        two_ranks(teacher_folder, tmp_path / name, "--steps", "5", "--accum", "2", *more)
    for a, b in zip(steps_of(tmp_path / "eager"), steps_of(tmp_path / "compiled"), strict=True):
        assert [a[name] for name in ("loss", "kl", "ce", "align")] == pytest.approx([b[name] for name in ("loss", "kl", "ce", "align")], rel=1e-5)
    assert len(steps_of(tmp_path / "eager")) == 5


# ------------------------------------------------------------------------------------------------- the machines


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda p: p.name)
def test_B39_nothing_needs_a_unix(path):
    """Spawned workers import the script again, so it has a guard; what a Unix alone has is asked for with care; paths are pathlib's."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if "sys.argv" in text or any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
        assert re.search(r'^if __name__ == "__main__":$', text, re.M)
    assert not re.search(r"\bos\.(fork|path\.join)\b|get_context\(\"fork", text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(a.name in ("fcntl", "resource", "pwd") for a in node.names):
            around = [part for part in ast.walk(tree) if isinstance(part, (ast.Try, ast.If)) and any(n is node for n in ast.walk(part))]
            tried = any(getattr(handler.type, "id", "") == "ImportError" for part in around if isinstance(part, ast.Try) for handler in part.handlers)
            asked = any(re.search(r"/proc/|hasattr|platform", ast.unparse(part.test)) for part in around if isinstance(part, ast.If))
            assert tried or asked, f"{path.name}:{node.lineno}"
    assert text.count("os.sched_getaffinity(") <= text.count('hasattr(os, "sched_getaffinity")')


@pytest.mark.parametrize("cuda, backend", [(True, "nccl"), (False, "gloo")])
def test_B39_the_backend_goes_by_what_is_there(monkeypatch, cuda, backend):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(train.dist, "init_process_group", lambda name, **_: asked.append(name))
    monkeypatch.setenv("WORLD_SIZE", "2")
    if cuda:
        with pytest.raises(Refusal, match="LOCAL_RANK is not set"):
            train.find_place(train.Args())
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert train.find_place(train.Args()).device.type == ("cuda" if cuda else "cpu") and asked == [backend]


def test_B40_three_steps_on_a_cpu_call_no_gpu(teacher_folder, tmp_path, bare, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a GPU was called")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("init", "_lazy_init", "set_device", "synchronize", "mem_get_info", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, never)
    for name in ("svd", "svdvals"):  # of a device's own library, which differs and fails in sizes: spans are eigenproblems and QRs
        monkeypatch.setattr(torch.linalg, name, never)
    assert len(steps_of(run(teacher_folder, tmp_path / "run"))) == 3
