"""distill.py against independent oracles: the textbook form with full logits in float64, hand numbers, plain loops."""
import itertools
import math
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import distill
from conftest import random_net
from data import Tokens
from distill import IGNORE, RECIPES, HeadLoss, Objective, align_sums, evaluate, kl_rows, losses
from prepare import prepare
from tokenizer import Tokenizer

RANDOM = torch.Generator()
ALL = ("q", "k", "v", "o", "gate", "up", "hidden", "attn_out", "ffn_out")
TEACHER, STUDENT = [2.0, 0.0, -1.0], [0.0, 1.0, 0.0]  # logits of one token
# T -> T^2 KL(teacher || student), from 50 decimal digits. At T = 40 a sum of p log(p/q) in fp32 gives 1.01199, off by 2e-4
BY_HAND = {1: 0.91298289782, 2: 1.09122225651, 40: 1.01218071531}


def randn(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return torch.randn(*shape, generator=RANDOM.manual_seed(seed)).mul(scale).to(dtype)


def naive(x, weight, targets, x_t, weight_t, T=40.0, w_kl=1.0, w_ce=1.0, real=None):
    """The textbook form: all logits of the valid rows at once, float64, torch's own losses and autograd."""
    valid = targets != IGNORE
    z, t = (x.double() @ weight.double().T)[valid], (x_t.double() @ weight_t.double().T)[valid]
    ce = F.cross_entropy(z, targets[valid], reduction="sum")
    kl = 1.28 * T ** 2 * F.kl_div(F.log_softmax(z[:, :real] / T, -1), F.softmax(t[:, :real] / T, -1), reduction="sum")
    return w_kl * kl + w_ce * ce, kl, ce


def problem(N=21, V=50, r=6, H=9, dtype=torch.float32):
    """x, weight, targets (every fourth masked), x_t, weight_t; teacher and student far apart."""
    targets = torch.randint(0, V, (N,), generator=RANDOM.manual_seed(5))
    targets[::4] = IGNORE
    return (randn(N, r, seed=1, dtype=dtype, scale=3), randn(V, r, seed=2, dtype=dtype), targets,
            randn(N, H, seed=3, dtype=dtype, scale=3), randn(V, H, seed=4, dtype=dtype))


def close(a, b, relative):
    """Largest difference against the largest entry."""
    a, b = a.double(), b.double()
    return float((a - b).abs().max()) <= relative * float(b.abs().max())


# ------------------------------------------------------------------------------------------ KL and CE


@pytest.mark.parametrize("T", [1, 2, 40])
@pytest.mark.parametrize("length", [1, 5, 50])
@pytest.mark.parametrize("dtype, close_to", [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_a1_scale_and_length(T, length, dtype, close_to):
    t, z = torch.tensor([TEACHER] * length, dtype=dtype), torch.tensor([STUDENT] * length, dtype=dtype)
    targets, eye = torch.zeros(length, dtype=torch.long), torch.eye(3, dtype=dtype)
    _, kl, ce = HeadLoss.apply(z, eye, targets, t, eye, Objective(temperature=T, chunk=7))
    assert kl.item() / length == pytest.approx(1.28 * BY_HAND[T], rel=close_to)
    assert ce.item() / length == pytest.approx(math.log(2 + math.e), rel=close_to)
    assert (kl_rows(t / T, z / T)[0] * T ** 2).tolist() == pytest.approx([BY_HAND[T]] * length, rel=close_to)


def test_a2_bf16_logits_at_a_real_vocabulary():
    t = randn(4, 128256, scale=3)
    z = (t + randn(4, 128256, seed=1)).bfloat16()
    t = t.bfloat16()
    truth = F.kl_div(F.log_softmax(z.double() / 40, -1), F.softmax(t.double() / 40, -1), reduction="none").sum(-1)
    assert truth.mean() == pytest.approx(3.1e-4, rel=0.02)
    each = kl_rows(t.float() / 40, z.float() / 40)[0]
    assert ((each - truth).abs() <= 1e-5 * truth).all() and (kl_rows(t.float() / 40, t.float() / 40)[0] == 0).all()


@pytest.mark.parametrize("V", [3, 2048, 128256])
def test_a2_a_student_close_to_its_teacher(V):
    """Logits 0.01 apart: a KL of 3e-8 among probabilities whose own rounding may be larger."""
    t = randn(8, V, scale=3)
    z = t + randn(8, V, seed=1, scale=0.01)
    truth = F.kl_div((z.double() / 40).log_softmax(-1), (t.double() / 40).softmax(-1), reduction="none").sum(-1)
    each = kl_rows(t / 40, z / 40)[0]
    assert (each >= 0).all() and ((each - truth).abs() <= 0.02 * truth).all()


def test_a2_head_loss_under_autocast():
    """Logits are rounded to bf16 here (|logit| ~ 4: 0.008 at most); that is 1e-4 of their variance, and 1 % of a gradient."""
    x, weight, targets, x_t, weight_t = problem(6, 128256, 16, 16)
    x, weight, x_t, weight_t = (p.bfloat16().float() for p in (x / 4, weight, x_t / 4, weight_t))  # only the matmul's rounding is left
    weight.requires_grad_(), x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, kl, ce = HeadLoss.apply(x, weight, targets, x_t, weight_t, Objective(w_ce=0.5, chunk=4))
    assert loss.dtype == kl.dtype == torch.float32
    ours = torch.autograd.grad(loss, (x, weight))
    total, kl64, ce64 = naive(x, weight, targets, x_t, weight_t, w_ce=0.5)
    assert kl.item() == pytest.approx(kl64.item(), rel=1e-3) and ce.item() == pytest.approx(ce64.item(), rel=1e-3)
    for a, b in zip(ours, torch.autograd.grad(total, (x, weight))):
        assert a.dtype == torch.float32 and (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("T", [1.0, 40.0])
def test_a3_padded_vocabulary_rows_stay_out_of_the_kl(T):
    V, real = 151936, 151665
    t = randn(4, V, scale=3)
    z = t + 0.5 * randn(4, V, seed=1)
    t[:, real:], z[:, real:] = -20.0, randn(4, V - real, seed=2, scale=3)
    eye, targets = torch.eye(4), torch.tensor([0, 7, real - 1, 3])
    weight = z.T.contiguous().requires_grad_()
    kl, wrong = (HeadLoss.apply(eye, weight, targets, eye, t.T.contiguous(), Objective(temperature=T, w_ce=0, real_vocab=n)) for n in (real, None))
    truth, counted = (naive(eye, z.T, targets, eye, t.T, T, real=n)[1].item() for n in (real, None))
    assert kl[1].item() == pytest.approx(truth, rel=1e-5) and wrong[1].item() == pytest.approx(counted, rel=1e-5)
    if T == 40:
        assert truth / 4 / 1.28 == pytest.approx(0.125, rel=0.01) and counted / truth == pytest.approx(3.1, rel=0.02)
    kl[0].backward()
    assert (weight.grad[real:] == 0).all() and (weight.grad[:real] != 0).any()


@pytest.mark.parametrize("chunk", [1, 7, 21])
@pytest.mark.parametrize("dtype, value, gradient", [(torch.float32, 1e-6, 1e-5), (torch.float64, 1e-12, 1e-12)])
@pytest.mark.parametrize("T", [1.0, 40.0])
@pytest.mark.parametrize("tied", [False, True])
def test_b13_b18_chunked_equals_naive(chunk, dtype, value, gradient, T, tied):
    x, weight, targets, x_t, weight_t = problem(dtype=dtype)
    rows = torch.arange(len(x)) % len(weight)
    for w_kl, w_ce in ((1, 1), (0.7, 1.3), (1, 0), (0, 1), (0, 0)):
        leaves = [p.clone().requires_grad_() for p in (x, weight)]
        stream = lambda x, w: x + 2 * w[rows].tanh() if tied else x  # tied: the weight is embedding and head at once
        o = Objective(temperature=T, w_kl=w_kl, w_ce=w_ce, chunk=chunk)
        ours = HeadLoss.apply(stream(*leaves), leaves[1], targets, x_t, weight_t if w_kl else None, o)
        wide = [p.detach().double().requires_grad_() for p in leaves]
        theirs = naive(stream(*wide), wide[1], targets, x_t, weight_t, T, w_kl, w_ce)
        for a, b, on in zip(ours, theirs, (1, w_kl, w_ce)):
            assert a.item() == pytest.approx(b.item() if on else 0, rel=value)
        for a, b in zip(torch.autograd.grad(ours[0] * 0.37, leaves), torch.autograd.grad(theirs[0] * 0.37, wide)):
            assert close(a, b, gradient), (w_kl, w_ce)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("chunk", [2, 16])
def test_b13_all_logits_are_never_alive(chunk):
    N, V, r, H = 64, 1000, 8, 8
    x, weight, *rest = problem(N, V, r, H)
    x.requires_grad_(), weight.requires_grad_()
    with Largest() as seen:
        HeadLoss.apply(x, weight, *rest, Objective(chunk=chunk))[0].backward()
    assert seen.numel == max(chunk * V, V * r)


def test_b15_infinite_teacher_logits_on_masked_rows():
    x, weight, targets, x_t, weight_t = problem()
    weight_t[:, 0] = weight_t[:, 0].abs()
    x.requires_grad_(), weight.requires_grad_()

    def run(x_t):
        out = HeadLoss.apply(x, weight, targets, x_t, weight_t, Objective(chunk=4))
        return *out, *torch.autograd.grad(out[0], (x, weight))
    clean = run(x_t)
    for bad, columns in ((-math.inf, 0), (math.inf, slice(None)), (math.nan, 0)):
        dirty = x_t.clone()
        dirty[targets == IGNORE, columns] = bad
        assert not torch.isfinite(dirty @ weight_t.T).all()
        assert all(torch.equal(a, b) for a, b in zip(run(dirty), clean))


@pytest.mark.parametrize("gap", [0.0, 5.0, 60.0, 85.0, 110.0, math.inf])
def test_the_gradient_of_the_kl_is_a_difference_of_softmaxes_however_far_apart_they_are(gap):
    """At T = 1, from float64; a token that the teacher rules out (-inf) is one that the student is still pushed off."""
    t, z = randn(3, 7, seed=1), randn(3, 7, seed=2)
    t[:, 2] -= gap
    z[:, 2] += min(gap, 110.0) / 2
    exact = z.double().softmax(-1) - t.double().softmax(-1)
    log_t, log_z = t.double().log_softmax(-1), z.double().log_softmax(-1)
    value = torch.where(log_t > -math.inf, log_t.exp() * (log_t - log_z), 0).sum(-1)
    kl, gradient = kl_rows(t.clone(), z.clone())
    assert torch.allclose(gradient.double(), exact, rtol=1e-5, atol=1e-7) and torch.allclose(kl.double(), value, rtol=1e-5 if gap < 80 else 0.05)


DISTANCES = [("attention", "cosine", "q"), ("attention", "mse", "q"), ("hidden", "relative", "hidden"), ("hidden", "mse", "hidden")]


@pytest.mark.parametrize("switch, kind, tap", DISTANCES)
def test_a2_distances_are_taken_in_fp32_under_autocast(switch, kind, tap):
    """Taps of 16 bits that are close: value and gradient from float64. A dot product in 16 bits would be 5 % off here."""
    t = randn(2, 64, 128, seed=1).bfloat16()
    s = (t.float() + 0.03 * randn(2, 64, 128, seed=2)).bfloat16().requires_grad_()
    frame, valid = torch.eye(128), torch.ones(2, 64, dtype=torch.bool)
    objective = Objective(align=(tap,), **{switch: kind})
    with torch.autocast("cpu", torch.bfloat16):
        value = align_sums([{tap: s}], [{tap: t}], frame, valid, objective)[tap]
    value.backward()
    wide = s.detach().double().requires_grad_()
    exact = {"cosine": lambda a, b: 1 - F.cosine_similarity(a, b, dim=-1), "mse": lambda a, b: (a - b).pow(2).mean(-1),
             "relative": lambda a, b: (a - b).pow(2).sum(-1) / b.pow(2).sum(-1)}[kind](wide, t.double()).sum()
    exact.backward()
    assert value.dtype == torch.float32 and value.item() == pytest.approx(exact.item(), rel=1e-4)
    assert s.grad.dtype == torch.bfloat16 and float((s.grad.double() - wide.grad).norm() / wide.grad.norm()) < 4e-3  # bf16 itself


@pytest.mark.parametrize("switch, kind, tap", DISTANCES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_b15_a_tap_that_no_loss_may_see_leaves_no_trace(switch, kind, tap, bad):
    s, t, valid = randn(2, 5, 6, seed=1), randn(2, 5, 6, seed=2), torch.ones(2, 5, dtype=torch.bool)
    valid[0, 3] = False
    objective, found = Objective(align=(tap,), **{switch: kind}), []
    for value in (0.0, bad):
        t[0, 3], leaf = value, s.clone().requires_grad_()
        total = align_sums([{tap: leaf}], [{tap: t}], torch.eye(6), valid, objective)[tap]
        total.backward()
        found.append((total.detach(), leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found)) and torch.isfinite(found[0][1]).all() and (found[0][1][0, 3] == 0).all()


def test_zero_vectors_have_distances_and_finite_gradients():
    zero, other, valid = torch.zeros(1, 1, 4, requires_grad=True), randn(1, 1, 4, seed=3), torch.ones(1, 1, dtype=torch.bool)
    for kind, pair in (("attention", "cosine"), ("hidden", "relative")):
        tap = "q" if kind == "attention" else "hidden"
        for s, t in ((zero, other), (zero, torch.zeros(1, 1, 4))):
            total = align_sums([{tap: s}], [{tap: t}], torch.eye(4), valid, Objective(align=(tap,), **{kind: pair}))[tap]
            assert torch.isfinite(total) and torch.isfinite(torch.autograd.grad(total, zero)[0]).all()


def test_b17_direction_of_the_kl():
    p, q = (torch.tensor(v).softmax(0).tolist() for v in (TEACHER, STUDENT))
    forward, reverse = (sum(a * math.log(a / b) for a, b in zip(*pair)) for pair in ((p, q), (q, p)))
    rows = lambda t, z: kl_rows(torch.tensor([t]), torch.tensor([z]))[0].item()
    assert rows(TEACHER, STUDENT) == pytest.approx(forward, rel=1e-6) and rows(STUDENT, TEACHER) == pytest.approx(reverse, rel=1e-6)
    assert abs(forward - reverse) > 0.05


# ------------------------------------------------------------------------------------------ alignment


def taps(seed, r, B=2, T=3, layers=2):
    return [{name: randn(B, T, width, seed=100 * seed + 10 * i + j) for j, (name, width) in
             enumerate(dict(q=4, k=2, v=2, o=4, gate=5, up=5, hidden=r).items())} for i in range(layers)]


def writers_of(seed, layers=2):
    """For each layer and each of (o_proj, down_proj): the teacher's W_T (6, n), a projection P (6, 3), and the student's P^T W_T."""
    made = [[(randn(6, n, seed=seed + 10 * i + j), randn(6, 3, seed=seed + 10 * i + j + 5)) for j, n in enumerate((4, 5))] for i in range(layers)]
    return made, [tuple(P.T @ W_T for W_T, P in layer) for layer in made]


@pytest.mark.parametrize("terms, attention, hidden", [
    (RECIPES["lrc"][2:], "cosine", "relative"), (RECIPES["lrc"][2:], "mse", "mse"), (RECIPES["clone"][2:], "mse", "relative"),
    (("ffn_out", "o"), "cosine", "mse"), ((), "cosine", "mse")])
def test_align_equals_a_hand_written_loop(terms, attention, hidden):
    """attn_out and ffn_out from their definition: what the student writes, o_S, against the teacher's write through P, o_T P."""
    student, teacher, frame = taps(1, 3), taps(2, 6), randn(6, 3, seed=9)
    made, writers = writers_of(300)
    valid = torch.tensor([[True, False, True], [True, True, False]])
    mse = lambda a, b: sum((x - y) ** 2 for x, y in zip(a, b)) / len(a)
    dot = lambda a, b: sum(x * y for x, y in zip(a, b))
    through = lambda rows, x: [dot(row, x) for row in rows]
    silu = lambda x: x / (1 + math.exp(-x))
    attend = mse if attention == "mse" else lambda a, b: 1 - dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))
    hand = dict.fromkeys(terms, 0.0)
    for layer, (b, t) in itertools.product(range(2), valid.nonzero().tolist()):
        s, th = ({name: tap[b, t].tolist() for name, tap in side[layer].items()} for side in (student, teacher))
        target = [dot(th["hidden"], column) for column in frame.T.tolist()]
        each = {name: attend(s[name], th[name]) for name in "qkvo"} | {name: mse(s[name], th[name]) for name in ("gate", "up")}
        each["hidden"] = mse(s["hidden"], target) / (dot(target, target) / len(target) if hidden == "relative" else 1)
        mixes = [(side["o"], [silu(g) * u for g, u in zip(side["gate"], side["up"])]) for side in (s, th)]
        for j, name in enumerate(("attn_out", "ffn_out")):
            W_T, P = made[layer][j]
            o_S, o_T = through(writers[layer][j].tolist(), mixes[0][j]), through(W_T.tolist(), mixes[1][j])
            each[name] = mse(o_S, through(P.T.tolist(), o_T))
        for name in terms:
            hand[name] += each[name]
    ours = align_sums(student, teacher, frame, valid, Objective(align=terms, attention=attention, hidden=hidden), writers)
    assert list(ours) == list(terms) and {name: float(value) for name, value in ours.items()} == pytest.approx(hand, rel=2e-6)


@pytest.mark.parametrize("attention, hidden", [("cosine", "relative"), ("mse", "mse")])
def test_b22_repeated_features_change_nothing(attention, hidden):
    student, teacher, frame, valid = taps(1, 3), taps(2, 6), randn(6, 3, seed=9), torch.ones(2, 3, dtype=torch.bool)
    kind, (_, writers) = dict(attention=attention, hidden=hidden), writers_of(300)
    once = align_sums(student, teacher, frame, valid, Objective(align=ALL, **kind), writers)
    twice = lambda side: [{name: tap.repeat(1, 1, 2) for name, tap in layer.items()} for layer in side]
    for layer, plain in zip(again := twice(teacher), teacher):
        layer["hidden"] = plain["hidden"]  # the frame doubles this one
    wide = [tuple(w.repeat(2, 2) / 2 for w in layer) for layer in writers]  # twice the rows, and twice the columns as they read a doubled mix
    doubled = align_sums(twice(student), again, frame.repeat(1, 2), valid, Objective(align=ALL, **kind), wide)
    assert all(doubled[name].item() == pytest.approx(value.item(), rel=1e-6) for name, value in once.items())


# ------------------------------------------------------------------------------------- the whole loss

OBJECTIVE = Objective(w_kl=0.7, w_ce=1.3, w_align=0.3, align=ALL, real_vocab=90, chunk=5)
LENGTHS = (6, 10, 3, 8)


@pytest.fixture
def pair():
    """A student of width 12 and its teacher of width 24, the frame, and documents of unequal length padded to 10."""
    student, teacher = random_net(1, hidden_size=12), random_net(2).requires_grad_(False)
    ids = torch.randint(0, 96, (4, 11), generator=RANDOM.manual_seed(7))
    targets = torch.where(torch.arange(10) < torch.tensor(LENGTHS)[:, None], ids[:, 1:], IGNORE)
    return SimpleNamespace(student=student, teacher=teacher, ids=ids[:, :-1], targets=targets, frame=randn(24, 12, seed=8, scale=0.2))


def writers(student):
    return [(block.self_attn.o_proj.weight, block.mlp.down_proj.weight) for block in student.layers]


def run(pair, objective=OBJECTIVE, rows=slice(None), until=None, **changes):
    """The sums, and the gradient of the loss at every weight of the student. The student goes in as a bare function."""
    p = SimpleNamespace(**vars(pair) | changes)
    net = lambda *args, **kwargs: p.student(*args, **kwargs)
    sums = losses(net, p.teacher, p.ids[rows, :until], p.targets[rows, :until], objective, p.frame, p.student.lm_head.weight, writers(p.student))
    gradients = torch.autograd.grad(sums["loss"], list(p.student.parameters()))
    return {name: value.item() for name, value in sums.items()}, gradients


@pytest.mark.parametrize("attention", ["cosine", "mse"])
def test_b14_padding_counts_in_no_term(pair, attention):
    objective = Objective(w_kl=0.7, w_ce=1.3, w_align=0.3, align=ALL, attention=attention, chunk=4)
    alone = [run(pair, objective, slice(i, i + 1), n) for i, n in enumerate(LENGTHS)]
    padded, gradients = run(pair, objective)
    assert set(padded) == {"kl", "ce", *ALL, "align", "loss"}
    for name, value in padded.items():
        assert value == pytest.approx(sum(sums[name] for sums, _ in alone), rel=1e-6), name
    masked = pair.targets == IGNORE

    def shouting(*args, **kwargs):
        x, layers = pair.teacher(*args, **kwargs)
        shout = lambda t: torch.where(masked[..., None], 1e4, t)
        return shout(x), [{name: shout(tap) for name, tap in layer.items()} for layer in layers]
    shouting.lm_head = pair.teacher.lm_head
    ids = torch.where(masked, (pair.ids + 31) % 96, pair.ids)
    garbage, same = run(pair, objective, ids=ids, teacher=shouting)
    assert garbage == pytest.approx(padded, rel=1e-6) and all(close(a, b, 1e-6) for a, b in zip(same, gradients))


def test_b16_student_and_teacher_in_their_places(pair):
    teacher = deepcopy(pair.teacher).requires_grad_()
    eye, count = torch.eye(24), int((pair.targets != IGNORE).sum())
    copy = run(pair, student=deepcopy(teacher), teacher=teacher, frame=eye)[0]
    assert copy["kl"] / count < 1e-6 and abs(copy["align"]) / count < 1e-6 and copy["ce"] / count > 1
    assert all(p.grad is None for p in teacher.parameters())
    plain = run(pair)[0]
    other_student = run(pair, student=random_net(3, hidden_size=12))[0]
    other_teacher = run(pair, teacher=random_net(4))[0]
    for name in ("kl", *ALL):
        assert len({plain[name], other_student[name], other_teacher[name]}) == 3
    assert other_teacher["ce"] == plain["ce"] != other_student["ce"]

    teacher.requires_grad_()
    losses(pair.student, teacher, pair.ids, pair.targets, OBJECTIVE, pair.frame, pair.student.lm_head.weight, writers(pair.student))["loss"].backward()
    assert all(p.grad is None for p in teacher.parameters()) and all(p.grad is not None for p in pair.student.parameters())


def test_losses_equal_the_naive_form(pair):
    sums, _ = run(pair)
    x, x_t = (net(pair.ids, head=False).flatten(0, 1) for net in (pair.student, pair.teacher))
    _, kl, ce = naive(x, pair.student.lm_head.weight, pair.targets.flatten(), x_t, pair.teacher.lm_head.weight, real=90)
    assert sums["kl"] == pytest.approx(kl.item(), rel=2e-6) and sums["ce"] == pytest.approx(ce.item(), rel=1e-6)
    assert sums["align"] == pytest.approx(sum(sums[name] for name in ALL), rel=1e-6)
    assert sums["loss"] == pytest.approx(0.7 * sums["kl"] + 1.3 * sums["ce"] + 0.3 * sums["align"], rel=1e-6)


@pytest.mark.parametrize("term", ["kl", "ce", "align", *ALL])
def test_b20_a_term_off_is_gone_and_costs_its_weight(pair, term):
    """float64, so that no term hides in the rounding of a larger one."""
    wide = dict(student=deepcopy(pair.student).double(), teacher=deepcopy(pair.teacher).double(), frame=pair.frame.double())
    off = dict(align=tuple(name for name in ALL if name != term)) if term in ALL else {f"w_{term}": 0.0}
    full, gradients = run(pair, **wide)
    rest, without = run(pair, Objective(**vars(OBJECTIVE) | off), **wide)
    assert full.keys() - rest.keys() == ({"align", *ALL} if term == "align" else {term}) and rest.keys() <= full.keys()
    assert all(rest[name] == full[name] for name in rest.keys() - {"loss", "align"})
    assert term not in ALL or full["align"] - rest["align"] == pytest.approx(full[term], rel=1e-10)
    assert full["loss"] - rest["loss"] == pytest.approx((0.3 if term in ALL else getattr(OBJECTIVE, f"w_{term}")) * full[term], rel=1e-10)
    assert not all(close(a, b, 1e-4) for a, b in zip(without, gradients))


def heard(net, weights, ids):
    """The stream that a tied head reads, and module name -> (its input, its output), overheard by hooks: nothing of it goes through the taps."""
    seen, hooks = {}, []
    for name, module in net.named_modules():
        keep = lambda _, into, out, name=name: seen.update({name: (into[0], out[0] if isinstance(out, tuple) else out)})
        hooks.append(module.register_forward_hook(keep))
    out = functional_call(net, weights | {"lm_head.weight": weights["embed_tokens.weight"]}, (ids,), dict(head=False), tie_weights=False)
    for hook in hooks:
        hook.remove()
    return out, seen


@pytest.mark.parametrize("recipe, attention, hidden", [("lrc", "cosine", "relative"), ("lrc", "mse", "mse"), ("clone", "mse", "relative"), ("gpd", "cosine", "mse")])
def test_a_recipe_through_a_network_equals_its_naive_form_in_value_and_gradient(pair, recipe, attention, hidden):
    """float64. The student's writers are P^T W_T with P the leaf: attn_out and ffn_out compare the student's write with the teacher's
    times that P, which autograd differentiates in both places."""
    student, teacher, frame = pair.student.double(), pair.teacher.double(), pair.frame.double()
    theirs, own = dict(teacher.named_parameters()), dict(student.named_parameters())
    names = [f"layers.{i}.{part}" for i in range(2) for part in ("self_attn.o_proj", "mlp.down_proj")]
    P = {name: randn(24, 12, seed=j, dtype=torch.float64, scale=0.3).requires_grad_() for j, name in enumerate(names)}
    with torch.no_grad():
        for name in names:
            own[f"{name}.weight"].copy_(P[name].T @ theirs[f"{name}.weight"])
    align, w_ce = tuple(t for t in RECIPES[recipe] if t not in ("kl", "ce")), 0.0 if recipe == "gpd" else 1.3
    objective = Objective(w_kl=0.7, w_ce=w_ce, w_align=0.3, align=align, attention=attention, hidden=hidden, chunk=5)
    sums = losses(student, teacher, pair.ids, pair.targets, objective, frame, student.lm_head.weight, writers(student))
    ours = dict(zip(own, torch.autograd.grad(sums["loss"], list(own.values()), retain_graph=True)))

    weights = own | {f"{name}.weight": P[name].T @ theirs[f"{name}.weight"] for name in names}
    (x, s), (x_t, t) = heard(student, weights, pair.ids), heard(teacher, theirs, pair.ids)
    valid = pair.targets != IGNORE
    mse = lambda a, b: ((a - b) ** 2).mean(-1)[valid].sum()
    cosine = lambda a, b: (1 - (a * b).sum(-1) / (a.pow(2).sum(-1) * b.pow(2).sum(-1)).sqrt())[valid].sum()
    relative = lambda a, b: (((a - b) ** 2).sum(-1) / (b ** 2).sum(-1))[valid].sum()
    terms = dict.fromkeys(objective.align, 0.0)
    for name in terms:
        for layer in ("layers.0", "layers.1"):
            of = lambda part, end: (s[f"{layer}{part}"][end], t[f"{layer}{part}"][end])
            if name == "hidden":
                terms[name] += (relative if hidden == "relative" else mse)(of("", 1)[0], of("", 1)[1] @ frame)
            elif name.endswith("_out"):
                part = {"attn_out": ".self_attn.o_proj", "ffn_out": ".mlp.down_proj"}[name]
                terms[name] += mse(of(part, 1)[0], of(part, 1)[1] @ P[layer + part])
            elif name in ("gate", "up"):
                terms[name] += mse(*of(f".mlp.{name}_proj", 1))
            else:
                terms[name] += (cosine if attention == "cosine" else mse)(*of(f".self_attn.{name}_proj", 0 if name == "o" else 1))
    head, kl, ce = naive(x.flatten(0, 1), weights["embed_tokens.weight"], pair.targets.flatten(), x_t.flatten(0, 1), theirs["embed_tokens.weight"],
                         w_kl=0.7, w_ce=w_ce)
    loss = head + 0.3 * sum(terms.values())
    expected = terms | {"kl": kl, "loss": loss} | ({"ce": ce} if recipe != "gpd" else {}) | ({"align": sum(terms.values())} if terms else {})
    assert {k: v.item() for k, v in sums.items()} == pytest.approx({k: v.item() for k, v in expected.items()}, rel=1e-9)

    leaves = {name: w for name, w in own.items() if name.removesuffix(".weight") not in names}
    oracle = dict(zip([*leaves, *names], torch.autograd.grad(loss, [*leaves.values(), *P.values()])))
    for name, g in oracle.items():
        mine = theirs[f"{name}.weight"] @ ours[f"{name}.weight"].T if name in names else ours[name]  # W_S = P^T W_T: dL/dP = W_T (dL/dW_S)^T
        assert g.abs().max() > 0 and close(mine, g, 1e-9), name


def test_b21_targets_are_shifted_once(tmp_path):
    """Targets straight from the loader; a network that says the next token, which it takes from its inputs alone."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog 0123456789\n" * 40, encoding="utf-8")
    tokenizer = Tokenizer(Path(distill.__file__).parent / "tiny")
    ids, targets = Tokens(prepare(str(tmp_path), tokenizer, tmp_path / "tokens", quiet=True), "train", 16, tokenizer).batch(0, 4)
    targets = torch.cat([targets[:, :-1], torch.full((4, 1), IGNORE)], 1)  # the last one is not among the inputs
    says = lambda shift: lambda ids, head, mask: 30 * F.one_hot(ids.roll(-shift, 1), 2048).float()
    ce = [losses(says(shift), None, ids, targets, Objective(w_kl=0), head=torch.eye(2048))["ce"].item() / 60 for shift in (1, 0, 2)]
    assert ce[0] < 1e-6 and min(ce[1:]) > 1


def test_b38_accumulation_changes_no_loss_and_no_gradient(pair):
    flat = deepcopy(pair.student)
    torch.nn.init.zeros_(flat.norm.weight)  # every logit 0: a constant CE of log V
    whole = (pair.targets != IGNORE).sum().item()
    steps = []
    for accumulation in (1, 2, 4):
        parts = [slice(i, i + 4 // accumulation) for i in range(0, 4, 4 // accumulation)]
        assert sum(run(pair, rows=rows, student=flat)[0]["ce"] / whole for rows in parts) == pytest.approx(math.log(96), rel=1e-6)
        done = [run(pair, rows=rows) for rows in parts]
        steps.append((sum(sums["loss"] / whole for sums, _ in done), [sum(g) / whole for g in zip(*(gradients for _, gradients in done))]))
    for loss, gradients in steps[1:]:
        assert loss == pytest.approx(steps[0][0], rel=1e-6) and all(close(a, b, 2e-6) for a, b in zip(gradients, steps[0][1]))


# -------------------------------------------------------------------------------- documents in a window


SEPARATOR = 7
DOCUMENTS = [[[3, 4, 5, 7], [8, 9, 7], [7], [10, 11, 12, 13]], [[20, 7], [21, 22, 23, 24, 25, 26, 7], [7], [27, 28]]]  # two rows of 12; 7 closes a document


def test_B42_with_document_masks_each_document_is_run_as_if_alone(pair):
    ids = torch.tensor([sum(row, []) for row in DOCUMENTS])
    mask = distill.document_mask(ids, SEPARATOR)
    assert mask[0, 0].int().tolist()[4] == [0] * 4 + [1] + [0] * 7 and mask.shape == (2, 1, 12, 12) and distill.document_mask(ids, None) is None
    whole, taps = pair.student(ids, taps=True, mask=mask)
    for b, row in enumerate(DOCUMENTS):
        begin = 0
        for document in row:
            alone, own = pair.student(torch.tensor([document]), taps=True)
            place = slice(begin, begin + len(document))
            assert close(whole[b, place], alone[0], 1e-5)
            assert all(close(t["o"][b, place], o["o"][0], 1e-5) for t, o in zip(taps, own))
            begin += len(document)
    assert not close(whole, pair.student(ids), 1e-2)


def test_B42_with_a_separator_every_term_is_the_sum_over_the_documents_alone(pair):
    """Loss terms, gradients and held-out figures of packed rows against those of each document as a batch of its own."""
    ids = torch.tensor([sum(row, []) for row in DOCUMENTS])
    targets = ids.roll(-1, 1)
    packed = run(pair, Objective(separator=SEPARATOR), ids=ids, targets=targets)
    apart = []
    for b, row in enumerate(DOCUMENTS):
        begin = 0
        for document in row:
            apart.append((torch.tensor([document]), targets[b:b + 1, begin:begin + len(document)]))
            begin += len(document)
    each = [run(pair, Objective(), ids=x, targets=y) for x, y in apart]
    for name, value in packed[0].items():
        assert float(value) == pytest.approx(sum(float(sums[name]) for sums, _ in each), rel=1e-5), name
    assert all(close(g, sum(parts), 1e-5) for g, *parts in zip(packed[1], *(gradients for _, gradients in each)))
    assert evaluate(pair.student, pair.teacher, [(ids, targets)], separator=SEPARATOR) == pytest.approx(evaluate(pair.student, pair.teacher, apart), rel=1e-5)


# ----------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("real", [None, 60])
def test_evaluate_is_a_mean_over_tokens(pair, real):
    batches = [(pair.ids[i:j], pair.targets[i:j]) for i, j in ((0, 1), (1, 3), (3, 4))]  # 6, 13 and 8 valid tokens
    valid = pair.targets != IGNORE
    z, t = (net(pair.ids).double()[valid].detach() for net in (pair.student, pair.teacher))
    naive = {"val_ce": F.cross_entropy(z, pair.targets[valid]).item(),
             "val_kl": F.kl_div(z[:, :real].log_softmax(-1), t[:, :real].softmax(-1), reduction="batchmean").item(),
             "val_top1": sum(max(range(real or 96), key=a.__getitem__) == max(range(real or 96), key=b.__getitem__)
                             for a, b in zip(z.tolist(), t.tolist())) / 27}
    for chunk in (4, 512):
        assert evaluate(pair.student, pair.teacher, batches, chunk, real) == pytest.approx(naive, rel=1e-6)
    assert evaluate(pair.student, None, batches) == pytest.approx({"val_ce": naive["val_ce"]}, rel=1e-6)
    assert evaluate(pair.teacher, pair.teacher, batches, real_vocab=real)["val_top1"] == 1
