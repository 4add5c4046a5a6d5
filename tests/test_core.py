"""The modes: one start, one merged shape, one count, different reach; and the pull-back against autograd through the coordinates."""
import pytest
import torch
from conftest import random_net
from torch.func import functional_call

import core
import lrc
from distill import IGNORE, Objective, losses

F64 = torch.float64


ALL = ("q", "k", "v", "o", "gate", "up", "hidden", "attn_out", "ffn_out")
INSIDE = ("lrc", "slice")  # the modes that never leave the teacher's span


def clone_of(teacher, mode, width=12, seed=3, coordinates="span", seed_of_bases=0, bases="explicit"):
    """A clone whose start is W_T P with a random P: quick, and as good as the calibrated one for what is tested here."""
    student = lrc.blank_student(teacher, width).to(teacher.lm_head.weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    P = torch.randn(teacher.config.hidden_size, width, generator=generator).to(teacher.lm_head.weight.dtype) / 4
    theirs = dict(teacher.named_parameters())
    with torch.no_grad():
        for name, w in student.named_parameters():
            if w.dim() == 2:
                w.copy_(P.T @ theirs[name] if name.endswith(lrc.DUAL) else theirs[name] @ P)
    maps = lrc.plain_maps(teacher, student, coordinates, opened=() if mode == "lrc" else core.MLP)
    return core.open_mlp(lrc.Clone(student, maps, P), mode, seed_of_bases, bases, teacher)


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
    return opt


def test_complement_completes_the_basis():
    T = lrc.span(torch.randn(50, 20, dtype=F64))
    whole = torch.cat([T, core.complement(T)], 1)
    assert whole.shape == (50, 50) and torch.allclose(whole.T @ whole, torch.eye(50, dtype=F64), atol=1e-13)


def test_all_modes_start_as_the_same_function_bit_for_bit_and_merge_to_the_plain_shape(teacher, ids):
    clones = [clone_of(teacher, mode) for mode in core.MODES]
    logits = [clone.student(ids) for clone in clones]
    assert all(torch.equal(logits[0], other) for other in logits[1:])
    for clone in clones:
        clone.deploy()
        assert torch.equal(clone.student(ids), logits[0])
        assert {n: w.shape for n, w in clone.weights.items()} == {n: w.shape for n, w in lrc.blank_student(teacher, 12).named_parameters()}


def test_trained_numbers_follow_the_published_count(teacher, ids):
    """MLP: 3 L r H for plain LRC, 3 L r d_ff when opened. AdamW holds two numbers for each, in the same shapes for core, random and slice."""
    states = {}
    for mode, each in dict(lrc=24, dense=60, core=60, random=60, slice=60).items():
        clone = clone_of(teacher, mode)
        named = {name: p for name, p in clone.coordinates().items() if ".mlp." in name}
        assert sum(p.numel() for p in named.values()) == 3 * 2 * 12 * each
        optimizer = train(clone, teacher, ids, steps=1)
        states[mode] = {name: {key: tuple(v.shape) for key, v in optimizer.state[p].items()} for name, p in named.items()}
        assert sum(v.numel() for p in named.values() for v in optimizer.state[p].values() if v.dim()) == 2 * 3 * 2 * 12 * each
    assert states["core"] == states["random"] == states["slice"] != states["dense"]


def linear_map(clone, name):
    """The coordinates of one weight, and the matrix J of the map from them to it, deployed once for each unit vector."""
    coordinates = [p for key, p in clone.coordinates().items() if key == name or key.startswith(f"{name}.")]
    size = sum(p.numel() for p in coordinates)

    def deployed(x):
        with torch.no_grad():
            for p, part in zip(coordinates, x.split([p.numel() for p in coordinates])):
                p.copy_(part.view(p.shape))
        clone.deploy()
        return clone.weights[name].detach().clone()
    return deployed, torch.stack([deployed(e).flatten() for e in torch.eye(size, dtype=F64)], 1)


@pytest.mark.parametrize("rank", [8, 5])
@pytest.mark.parametrize("mode", core.MODES)
def test_the_set_each_mode_reaches_by_construction(mode, rank):
    """Every deployed matrix is linear in its coordinates. The rank of that map is the dimension of what can be reached, its least
    squares the nearest that a target can be met: all of it, or what a projector of the teacher's weight leaves."""
    teacher = random_net(hidden_size=8, intermediate_size=20, num_hidden_layers=1).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, dtype=F64, generator=generator)
    for name in ("gate_proj", "up_proj", "down_proj"):
        w_t = getattr(teacher.layers[0].mlp, name).weight
        if rank < 8:
            w_t.copy_(randn(w_t.shape[0], rank) @ randn(rank, w_t.shape[1]))
    clone = clone_of(teacher, mode, width=4)
    for end in core.MLP:
        name = f"layers.0.mlp.{end}"
        turn = (lambda w: w.T) if name.endswith(lrc.DUAL) else (lambda w: w)
        Q = torch.linalg.svd(turn(dict(teacher.named_parameters())[name])).U[:, :rank]  # by another route than the module's
        outside = lambda w: turn(w) - Q @ (Q.T @ turn(w))
        deployed, J = linear_map(clone, name)
        assert torch.linalg.matrix_rank(J) == 4 * (rank if mode in INSIDE else 20)
        x, goal = randn(J.shape[1]), randn(*clone.weights[name].shape)
        assert torch.allclose(deployed(x).flatten(), J @ x, atol=1e-12)
        assert mode not in INSIDE or outside(deployed(x)).norm() < 1e-12 * deployed(x).norm()
        best = deployed(torch.linalg.lstsq(J, goal.flatten()[:, None], driver="gelsd").solution[:, 0])
        left = outside(goal).norm() if mode in INSIDE else 0
        assert (best - goal).norm().item() == pytest.approx(float(left), abs=1e-10)


def test_slice_and_random_draw_their_directions_as_stated():
    generator = lambda: torch.Generator().manual_seed(5)
    T = torch.linalg.qr(torch.randn(900, 300, dtype=F64, generator=generator())).Q
    C = core.directions("slice", T, torch.randn(300, 600, generator=generator()))
    A = T.T @ C
    assert C.shape == (900, 600) and torch.allclose(C, T @ A, atol=1e-14)
    assert torch.allclose(A.norm(dim=0), torch.ones(600, dtype=F64), atol=1e-13) and torch.linalg.matrix_rank(A) == 300
    R = core.directions("random", T, torch.randn(900, 600, generator=generator()))
    assert R.shape == (900, 600) and torch.linalg.matrix_rank(R) == 600 and torch.linalg.matrix_rank(torch.cat([T, R], 1)) == 900
    assert (R.norm(dim=0) - 1).abs().max() < 0.12 and (R.norm(dim=0).mean() - 1).abs() < 0.005  # 1 +- 1/sqrt(2 * 900)
    assert ((T.T @ R).pow(2).sum() / R.pow(2).sum()).item() == pytest.approx(1 / 3, abs=0.01)  # H/d_ff of it lies in the span


def test_B25_bases_come_from_the_seed_alone():
    teacher = random_net().requires_grad_(False)
    state = torch.get_rng_state()
    bases = {(mode, seed, again): {n: m.C for n, m in clone_of(teacher, mode, seed_of_bases=seed).maps.items() if n.endswith(core.MLP)}
             for mode in ("core", "random", "slice") for seed in (1, 2) for again in (0, 1)}
    same = lambda one, two: [torch.equal(bases[one][n], bases[two][n]) for n in bases[one]]
    for mode in ("core", "random", "slice"):
        assert all(same((mode, 1, 0), (mode, 1, 1)))
        assert same((mode, 1, 0), (mode, 2, 0)) == [mode == "core"] * 6
        drawn = list(bases[mode, 1, 0].values())
        assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])  # each matrix has its own
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("mode, coordinates", [*((mode, "span") for mode in core.MODES), ("lrc", "teacher"), ("core", "teacher")])
def test_pull_back_equals_autograd_through_the_coordinates_with_accumulation(teacher, ids, mode, coordinates):
    """float64: two micro-batches on the deployed weights, one pull-back, against coordinates inside the forward."""
    teacher = teacher.double()
    clone = clone_of(teacher, mode, coordinates=coordinates, seed_of_bases=7)
    with torch.no_grad():
        for name, p in clone.coordinates().items():
            if name.endswith("Zc"):
                p.normal_(std=0.05)  # off the start, where the second path writes nothing yet
    clone.deploy()
    targets = ids.roll(-1, 1).masked_fill(ids % 5 == 0, IGNORE)
    objective = Objective(chunk=50, align=ALL)

    def loss(net, weights, rows):
        writers = [tuple(weights[f"layers.{i}.{name}"] for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")) for i in range(2)]
        return losses(net, teacher, ids[rows], targets[rows], objective, clone.frame, weights["lm_head.weight"], writers)["loss"] / (targets != IGNORE).sum()

    own = dict(clone.student.named_parameters())
    for rows in (slice(0, 7), slice(7, 12)):
        loss(clone.student, own | {"lm_head.weight": clone.student.lm_head.weight}, rows).backward()
    clone.pull_back()
    ours = {name: p.grad.clone() for name, p in clone.coordinates().items()}

    weights = own | {name: m.weight() for name, m in clone.maps.items()}
    if teacher.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    net = lambda *args, **kwargs: functional_call(clone.student, weights, args, kwargs, tie_weights=False)
    named = clone.coordinates()
    oracle = torch.autograd.grad(loss(net, weights, slice(0, 12)), named.values())
    for name, g in zip(named, oracle):
        assert g.abs().max() > 0, name  # B16, B19: the loss reaches every coordinate
        assert ours[name].shape == g.shape and (ours[name] - g).abs().max() <= 1e-10 * max(1.0, g.abs().max().item()), name


@pytest.mark.parametrize("dtype, empty", [(torch.float32, 1e-12), (F64, 1e-24)])
def test_complement_of_lrc_and_slice_stays_empty_and_the_others_fill_it(teacher, ids, dtype, empty):
    teacher = teacher.to(dtype)
    for mode in core.MODES:
        clone = clone_of(teacher, mode)
        assert max(complement_share(clone, teacher).values()) < empty
        before = {name: p.detach().clone() for name, p in clone.coordinates().items()}
        train(clone, teacher, ids)
        shares = complement_share(clone, teacher).values()
        assert max(shares) < empty if mode in INSIDE else min(shares) > 1e-6
        assert not any(torch.equal(before[name], p) for name, p in clone.coordinates().items())  # slice's second path moves, too


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
        (sums["gate"] + sums["up"] if weights["w_align"] else sums["loss"]).backward()
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


# --------------------------------------------------------------------- compact and implicit bases

@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("bases", ["compact", "implicit"])
@pytest.mark.parametrize("out, H, rank", [(60, 24, 24), (60, 24, 17), (30, 24, 24), (25, 24, 24)])  # tall, deficient, k > out/2, nearly square
def test_compact_and_implicit_bases_are_the_explicit_ones(out, H, rank, bases, dual):
    """Against T and the U_perp of a complete QR: the matrix, both gradients, at random coordinates."""
    generator = torch.Generator().manual_seed(out + rank)
    randn = lambda *shape: torch.randn(*shape, dtype=F64, generator=generator)
    close = lambda a, b: float((a - b).detach().abs().max()) < 1e-10 * float(b.detach().abs().max())
    W_T = randn(out, rank) @ randn(rank, H)
    W = W_T @ randn(H, 9)
    W_T, W = (W_T.T.contiguous(), W.T) if dual else (W_T, W)
    explicit, compact = (lrc.Plain(W_T, W, dual) for _ in range(2))
    explicit, compact = core.Opened(explicit, core.complement(explicit.T)), core.Compact(compact, W_T if bases == "implicit" else None)
    assert torch.equal(explicit.Z, compact.Z) and close(compact.weight(), W)
    with torch.no_grad():
        for name in ("Z", "Zc"):
            value = randn(*getattr(explicit, name).shape)
            getattr(explicit, name).copy_(value)
            getattr(compact, name).copy_(value)
        G = randn(*W.shape)
        for m in (explicit, compact):
            m.pull_back(G)
    assert close(compact.weight(), explicit.weight()) and close(compact.Z.grad, explicit.Z.grad) and close(compact.Zc.grad, explicit.Zc.grad)
    assert compact.Z.grad.is_contiguous() and compact.Zc.grad.is_contiguous()
    assert all(b.is_contiguous() for b in compact.buffers())  # NCCL broadcasts nothing else
    held = {"B": (rank, out - rank)} if bases == "compact" else {"N": (rank, H)}
    assert {name: b.shape for name, b in compact.named_buffers()} == {"sign": (rank,), "T1": (rank, rank), **held}


@pytest.mark.parametrize("bases", ["compact", "implicit"])
@pytest.mark.parametrize("kind", ["a row alone", "diagonal", "zeros below", "zeros above"])
def test_columns_that_a_qr_does_not_reflect(kind, bases):
    """LAPACK reflects no column that is already a multiple of its unit vector: 1 - T_1 would be singular with its sign."""
    W_T = torch.randn(20, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    if kind == "a row alone":
        W_T[0], W_T[1:, 0] = 0, 0
        W_T[0, 0] = 50
    elif kind == "diagonal":
        W_T = torch.zeros(20, 8, dtype=F64)
        W_T[range(8), range(8)] = torch.arange(1, 9, dtype=F64)
    else:
        W_T[8:] = 0 if kind == "zeros below" else W_T[8:]
        W_T[:12] = 0 if kind == "zeros above" else W_T[:12]
    W = W_T @ torch.randn(8, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    explicit, compact = (lrc.Plain(W_T, W, False) for _ in range(2))
    explicit, compact = core.Opened(explicit, core.complement(explicit.T)), core.Compact(compact, W_T if bases == "implicit" else None)
    with torch.no_grad():
        value = torch.randn(5, 12, dtype=F64, generator=torch.Generator().manual_seed(2))
        explicit.Zc.copy_(value), compact.Zc.copy_(value)
    assert float((explicit.weight() - compact.weight()).detach().abs().max()) < 1e-9


@pytest.mark.parametrize("bases", ["compact", "implicit"])
def test_core_trains_the_same_with_other_bases(teacher, ids, bases):
    """The same losses at every step, in float64 to 1e-9; the teacher's tensors are shared, not copied."""
    wide = random_net(**teacher.config.raw).double().requires_grad_(False)
    pair = [clone_of(wide, "core"), clone_of(wide, "core", bases=bases)]
    held = {p.data_ptr() for p in wide.parameters()}
    opened = [m for m in pair[1].maps.values() if isinstance(m, core.Compact)]
    assert len(opened) == 6 and (bases == "compact" or all(m.teacher_weight[0].data_ptr() in held for m in opened))
    assert pair[0].coordinates().keys() == pair[1].coordinates().keys()
    ends = []
    for clone in pair:
        train(clone, wide, ids, steps=8)
        ends.append({name: p.detach().clone() for name, p in clone.coordinates().items()})
    for name, p in ends[0].items():
        assert torch.allclose(p, ends[1][name], rtol=1e-7, atol=1e-9), name
    assert max(complement_share(pair[1], wide).values()) > 1e-4


@pytest.mark.parametrize("d_ff, bases, kind", [(2048, "auto", core.Opened), (2049, "auto", core.Compact), (2049, "explicit", core.Opened), (40, "compact", core.Compact)])
def test_bases_are_explicit_up_to_a_d_ff_of_2048_where_nothing_is_said(d_ff, bases, kind):
    clone = clone_of(random_net(num_hidden_layers=1, intermediate_size=d_ff).requires_grad_(False), "core", bases=bases)
    assert [type(m) for name, m in clone.maps.items() if name.endswith(core.MLP)] == 3 * [kind]
    assert core.chosen_bases(bases, "dense", d_ff) == ("explicit" if bases == "auto" else bases)  # the other modes have none
