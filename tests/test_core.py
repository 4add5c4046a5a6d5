"""The modes: one start, one merged shape, different reach; and the pull-back against autograd through the coordinates."""
import pytest
import torch
from conftest import random_net
from torch.func import functional_call

import core
import lrc
from distill import IGNORE, Objective, losses

F64 = torch.float64


def clone_of(teacher, mode, width=12, seed=3):
    """A clone whose start is W_T P with a random P: quick, and as good as the calibrated one for what is tested here."""
    student = lrc.blank_student(teacher, width).to(teacher.lm_head.weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    P = torch.randn(teacher.config.hidden_size, width, generator=generator).to(teacher.lm_head.weight.dtype) / 4
    theirs = dict(teacher.named_parameters())
    with torch.no_grad():
        for name, w in student.named_parameters():
            if w.dim() == 2:
                w.copy_(P.T @ theirs[name] if name.endswith(lrc.DUAL) else theirs[name] @ P)
    return core.open_mlp(lrc.Clone(student, lrc.slices(teacher, student), P), mode)


def complement_share(clone, teacher):
    """Energy of each trained MLP weight outside the teacher's span, by an independent projector."""
    shares = {}
    for name, w_t in teacher.named_parameters():
        if name.endswith(core.MLP):
            w, w_t = clone.weights[name].detach().double(), w_t.detach().double()
            if name.endswith("down_proj.weight"):
                w, w_t = w.T, w_t.T
            q = torch.linalg.qr(w_t).Q
            shares[name] = ((w - q @ (q.T @ w)).pow(2).sum() / w.pow(2).sum()).item()
    return shares


def train(clone, teacher, ids, steps=5, lr=1e-2, optimizer=torch.optim.AdamW, **objective):
    opt = optimizer(clone.coordinates().values(), lr=lr)
    for _ in range(steps):
        clone.zero_grad()
        clone.deploy()
        sums = losses(clone.student, teacher, ids, ids.roll(-1, 1), Objective(**objective), clone.frame, clone.student.lm_head.weight)
        (sums["loss"] / ids.numel()).backward()
        clone.pull_back()
        opt.step()
    clone.deploy()


def test_complement_completes_the_basis():
    T = lrc.span(torch.randn(50, 20, dtype=F64))
    whole = torch.cat([T, core.complement(T)], 1)
    assert whole.shape == (50, 50) and torch.allclose(whole.T @ whole, torch.eye(50, dtype=F64), atol=1e-13)


def test_all_modes_start_as_the_same_function_bit_for_bit(teacher, ids):
    logits = [clone_of(teacher, mode).student(ids) for mode in core.MODES]
    assert all(torch.equal(logits[0], other) for other in logits[1:])


def test_trained_numbers_follow_the_published_count(teacher):
    """MLP: 3 L r H for plain LRC, 3 L r d_ff when opened."""
    for mode, each in (("lrc", 24), ("dense", 60), ("core", 60)):
        mlp = sum(p.numel() for name, p in clone_of(teacher, mode).coordinates().items() if ".mlp." in name)
        assert mlp == 3 * 2 * 12 * each


@pytest.mark.parametrize("dual", [False, True])
def test_core_reaches_every_matrix_and_the_slice_does_not(dual):
    W_T, goal = torch.randn(50, 20, dtype=F64), torch.randn(50, 8, dtype=F64)
    turn = (lambda w: w.T) if dual else (lambda w: w)
    piece = lrc.Slice(turn(W_T), turn(goal), dual)
    assert (piece.weight() - turn(goal)).norm() > 0.5 * goal.norm()  # 30 of 50 dimensions are out of its reach
    opened = core.Opened(piece, core.directions("core", piece.T, None))
    with torch.no_grad():
        opened.Zc.copy_(goal.T @ opened.C)
    assert torch.allclose(opened.weight(), turn(goal), atol=1e-12)


@pytest.mark.parametrize("mode", core.MODES)
def test_pull_back_equals_autograd_through_the_coordinates_with_accumulation(teacher, ids, mode):
    """float64: two micro-batches on the deployed weights, one pull-back, against coordinates inside the forward."""
    teacher = teacher.double()
    clone = clone_of(teacher, mode)
    targets = ids.roll(-1, 1).masked_fill(ids % 5 == 0, IGNORE)
    objective = Objective(chunk=50)

    def loss(net, head, rows):
        return losses(net, teacher, ids[rows], targets[rows], objective, clone.frame, head)["loss"] / (targets != IGNORE).sum()

    for rows in (slice(0, 7), slice(7, 12)):
        loss(clone.student, clone.student.lm_head.weight, rows).backward()
    clone.pull_back()
    ours = {name: p.grad.clone() for name, p in clone.coordinates().items()}

    weights = dict(clone.student.named_parameters()) | {name: m.weight() for name, m in clone.maps.items()}
    if teacher.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    net = lambda *args, **kwargs: functional_call(clone.student, weights, args, kwargs, tie_weights=False)
    coordinates = clone.coordinates()
    oracle = torch.autograd.grad(loss(net, weights["lm_head.weight"], slice(0, 12)), coordinates.values())
    for name, g in zip(coordinates, oracle):
        assert g.abs().max() > 0, name  # B16, B19: the loss reaches every coordinate
        assert (ours[name] - g).abs().max() <= 1e-10 * max(1.0, g.abs().max().item()), name


def test_complement_of_lrc_stays_empty_and_the_opened_modes_fill_it(teacher, ids):
    for mode in core.MODES:
        clone = clone_of(teacher, mode)
        assert max(complement_share(clone, teacher).values()) < 1e-12
        train(clone, teacher, ids)
        shares = complement_share(clone, teacher).values()
        assert max(shares) < 1e-12 if mode == "lrc" else min(shares) > 1e-6


def test_core_is_dense_in_other_coordinates(ids):
    """[T U_perp] is orthogonal, so plain gradient descent takes the same path in both; AdamW, which scales each coordinate, does not."""
    teacher = random_net().double().requires_grad_(False)
    for optimizer, same in ((torch.optim.SGD, True), (torch.optim.AdamW, False)):
        dense, opened = clone_of(teacher, "dense"), clone_of(teacher, "core")
        for clone in (dense, opened):
            train(clone, teacher, ids, optimizer=optimizer, lr=1e-3)
        gap = max((dense.weights[n] - opened.weights[n]).abs().max().item() for n in dense.weights)
        assert (gap < 1e-12) == same


def test_a_fit_of_gate_and_up_on_their_own_never_asks_for_the_complement(teacher, ids):
    """The gradient of |W_T x_T - W x_S|^2 lies in col(W_T) while W does; only the end-to-end loss leaves it."""
    teacher = teacher.double()
    shares = {}
    for name, weights in (("gate and up alone", dict(w_kl=0, w_ce=0, w_align=1)), ("end to end", dict(w_align=0))):
        clone = clone_of(teacher, "dense")
        sums = losses(clone.student, teacher, ids, ids.roll(-1, 1), Objective(**weights), clone.frame, clone.student.lm_head.weight)
        (sums["mlp"] if weights["w_align"] else sums["loss"]).backward()
        grad = clone.weights["layers.1.mlp.gate_proj.weight"].grad  # of the last layer: no later gate or up depends on it
        q = torch.linalg.qr(dict(teacher.named_parameters())["layers.1.mlp.gate_proj.weight"]).Q
        shares[name] = ((grad - q @ (q.T @ grad)).pow(2).sum() / grad.pow(2).sum()).item()
    assert shares["gate and up alone"] < 1e-20 and shares["end to end"] > 0.01


def test_B19_B26_optimizer_holds_every_coordinate_once_and_one_step_moves_them_all(teacher, ids):
    clone = clone_of(teacher, "core")
    before = {name: p.detach().clone() for name, p in clone.coordinates().items()}
    assert len({id(p) for p in clone.coordinates().values()}) == len(before)
    assert ("lm_head.weight.Z" in before) != teacher.config.tie_word_embeddings
    train(clone, teacher, ids, steps=3)
    assert all(not torch.equal(before[name], p) for name, p in clone.coordinates().items())
    tied = clone.student.lm_head.weight.data_ptr() == clone.student.embed_tokens.weight.data_ptr()
    assert tied == teacher.config.tie_word_embeddings
