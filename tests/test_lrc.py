"""Plain LRC: the span, its coordinates, random starts and the calibrated one, against float64 linear algebra."""
import pytest
import torch
from conftest import random_net
from torch.utils._python_dispatch import TorchDispatchMode

import lrc
import starts

F64 = torch.float64


def outside(W, W_T):
    """Share of W that col(W_T) does not hold, by an independent least squares."""
    fitted = W_T @ torch.linalg.lstsq(W_T, W).solution
    return ((W - fitted).norm() / W.norm()).item()


def test_span_is_an_orthonormal_basis_of_the_column_space():
    W = torch.randn(50, 20, dtype=F64)
    T = lrc.span(W)
    assert T.shape == (50, 20)
    assert torch.allclose(T.T @ T, torch.eye(20, dtype=F64), atol=1e-13)
    assert outside(W, T) < 1e-13 and outside(T, W) < 1e-12


def test_span_of_a_wide_or_rank_deficient_matrix_has_its_rank():
    low = torch.randn(50, 7, dtype=F64) @ torch.randn(7, 20, dtype=F64)
    assert lrc.span(low).shape == (50, 7) and outside(low, lrc.span(low)) < 1e-12
    assert lrc.span(torch.randn(12, 20)).shape == (12, 12)


def test_small_directions_of_a_real_spectrum_are_kept():
    """Singular values over five decades, as embeddings have: none may be taken for zero because the matrix is tall."""
    U, V = torch.linalg.qr(torch.randn(4000, 12, dtype=F64)).Q, torch.linalg.qr(torch.randn(12, 12, dtype=F64)).Q
    W = (U * torch.logspace(0, -5, 12, dtype=F64)) @ V
    T = lrc.span(W.float()).double()
    assert T.shape == (4000, 12) and torch.allclose(T.T @ T, torch.eye(12, dtype=F64), atol=1e-6)
    assert (U[:, :8] - T @ (T.T @ U[:, :8])).norm() < 1e-2  # below 1e-4 fp32 itself blurs the directions


def test_B25_span_is_the_same_twice_signs_follow_the_rule_and_the_rng_stays():
    W = torch.randn(40, 16)
    state = torch.get_rng_state()
    first, second = lrc.span(W), lrc.span(W.clone())
    assert torch.equal(first, second) and torch.equal(state, torch.get_rng_state())
    top = first.gather(0, first.abs().argmax(0, keepdim=True))
    assert (top > 0).all()


@pytest.mark.parametrize("dual", [False, True])
def test_slice_reaches_the_span_and_nothing_else(dual):
    W_T = torch.randn(50, 20, dtype=F64)
    start = W_T @ torch.randn(20, 8, dtype=F64)
    turn = (lambda w: w.T) if dual else (lambda w: w)
    piece = lrc.Plain(turn(W_T), turn(start), dual)
    assert torch.allclose(piece.weight(), turn(start), atol=1e-12)
    with torch.no_grad():
        piece.Z.normal_()
    assert outside(turn(piece.weight()), W_T) < 1e-12  # wherever training takes Z
    goal = W_T @ torch.randn(20, 8, dtype=F64)
    again = lrc.Plain(turn(W_T), turn(goal), dual)
    assert torch.allclose(again.weight(), turn(goal), atol=1e-12)  # and all of col(W_T) is in reach


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("out, rank", [(50, 20), (50, 7), (12, 12), (12, 5), (50, 0)])
def test_teacher_coordinates_are_the_shortest_projection_and_reach_what_the_span_reaches(out, rank, dual):
    """Tall, wide, rank-deficient and zero teachers: W = W_T P, P as an SVD finds it, nearest where W lies outside."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, dtype=F64, generator=generator)
    W_T = randn(out, rank) @ randn(rank, 20) if rank < min(out, 20) else randn(out, 20)
    turn = (lambda w: w.T) if dual else (lambda w: w)
    for W in (W_T @ randn(20, 8), randn(out, 8)):
        piece, plain = lrc.Plain(turn(W_T), turn(W), dual, "teacher"), lrc.Plain(turn(W_T), turn(W), dual)
        P = torch.linalg.lstsq(W_T, W, driver="gelsd").solution  # the shortest of those that fit best
        assert torch.equal(piece.T, W_T) and piece.Z.shape == (8, 20)
        assert torch.allclose(piece.Z.T, P, atol=1e-10) and torch.allclose(piece.weight(), turn(W_T @ P), atol=1e-10)
        assert torch.allclose(piece.weight(), plain.weight(), atol=1e-10)
    both = torch.cat([W_T, plain.T], 1)
    assert plain.T.shape[1] == torch.linalg.matrix_rank(both) == torch.linalg.matrix_rank(W_T) == rank
    with torch.no_grad():
        piece.Z.normal_()
    assert rank == 0 or outside(turn(piece.weight()), plain.T) < 1e-12


def test_teacher_coordinates_give_an_fp32_weight_back_whatever_the_spectrum():
    """Singular values over five decades, in fp32 as a checkpoint has them: W_T P to fp32's own precision."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, 24, dtype=F64, generator=generator)).Q for n in (400, 24))
    W_T = ((U * torch.logspace(0, -5, 24, dtype=F64)) @ V.T).float()
    W = W_T @ torch.randn(24, 12, generator=generator)
    assert (lrc.Plain(W_T, W, False, "teacher").weight() - W).norm() < 1e-5 * W.norm()


def test_slices_keep_the_span_where_the_mlp_is_opened(teacher):
    theirs = dict(teacher.named_parameters())
    maps = lrc.plain_maps(teacher, lrc.blank_student(teacher, 12), "teacher", opened=("gate_proj.weight", "up_proj.weight", "down_proj.weight"))
    assert maps.keys() == {name for name, w in theirs.items() if w.dim() == 2}
    for name, m in maps.items():
        W_T = theirs[name].T if name.endswith(lrc.DUAL) else theirs[name]
        assert torch.equal(m.T, lrc.span(W_T) if ".mlp." in name else W_T)


def started(teacher, kind, seed=3, width=12):
    student = lrc.blank_student(teacher, width)
    return student, starts.random_start(teacher, student, kind, seed)


def projections(teacher, student):
    """name -> P with W_S = W_T P (o, down: P^T W_T), by float64 least squares, wherever W_T tells P apart."""
    found = {}
    for name, w in teacher.named_parameters():
        turn = (lambda m: m.T.double()) if name.endswith(lrc.DUAL) else (lambda m: m.double())
        if w.dim() == 2 and len(turn(w)) >= 24:
            W_T, W_S = turn(w), turn(student.get_parameter(name).detach())
            found[name] = torch.linalg.lstsq(W_T, W_S).solution
            assert (W_T @ found[name] - W_S).norm() < 1e-6 * W_S.norm()
    return found


def test_orthonormal_start_is_one_frame_with_the_gain_in_front_of_every_reader(teacher):
    student, frame = started(teacher, "orthonormal")
    Q = frame.double()
    assert Q.shape == (24, 12) and torch.allclose(Q.T @ Q, torch.eye(12, dtype=F64), atol=1e-6)
    theirs, tied = {name: w.double() for name, w in teacher.named_parameters()}, teacher.config.tie_word_embeddings
    expected = {"embed_tokens.weight": theirs["embed_tokens.weight"] @ Q}
    if not tied:
        expected["lm_head.weight"] = theirs["lm_head.weight"] @ (theirs["norm.weight"].diag() @ Q) * 2 ** 0.5
    for i in range(2):
        for norm, names in (("input", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")), ("post_attention", ("mlp.gate_proj", "mlp.up_proj"))):
            g = theirs[f"layers.{i}.{norm}_layernorm.weight"]
            expected |= {f"layers.{i}.{name}.weight": theirs[f"layers.{i}.{name}.weight"] @ (g.diag() @ Q) * 2 ** 0.5 for name in names}
        expected |= {f"layers.{i}.{name}.weight": Q.T @ theirs[f"layers.{i}.{name}.weight"] for name in ("self_attn.o_proj", "mlp.down_proj")}
    for name, w in student.named_parameters():
        if w.dim() == 2:
            assert torch.allclose(w.double(), expected.pop(name), atol=1e-5), name
        else:
            assert torch.equal(w, theirs[name].float() if name.endswith("bias") else torch.ones_like(w))
    assert not expected and (student.lm_head.weight is student.embed_tokens.weight) == tied


def test_orthonormal_start_at_full_width_is_the_teacher(teacher, ids):
    """r = H: the stream is the teacher's, turned, and no reader sees the difference. A tied head leaves its final gain out."""
    if teacher.config.tie_word_embeddings:
        teacher.norm.weight.fill_(1.0)
    theirs = teacher(ids)
    assert (started(teacher, "orthonormal", width=24)[0](ids) - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_random_start_draws_a_projection_of_std_002_for_each_matrix(teacher):
    student, frame = started(teacher, "random")
    found = projections(teacher, student)
    assert len(found) == (11 if teacher.config.tie_word_embeddings else 12)  # k and v are too low for P to be told
    assert torch.allclose(found["embed_tokens.weight"], frame.double(), atol=1e-6)
    drawn = torch.stack(list(found.values()))
    assert drawn.std().item() == pytest.approx(0.02, rel=0.05) and abs(drawn.mean()) < 0.002
    assert all(P.std().item() == pytest.approx(0.02, rel=0.25) for P in drawn)
    flat = drawn.flatten(1)
    assert (torch.corrcoef(flat) - torch.eye(len(flat), dtype=F64)).abs().max() < 0.3  # no two alike
    for name, w in student.named_parameters():
        if w.dim() == 1:
            assert torch.equal(w, teacher.get_parameter(name) if name.endswith("bias") else torch.ones_like(w))
        elif ".k_proj" in name or ".v_proj" in name:
            assert outside(w.detach().double(), teacher.get_parameter(name).double()) < 1e-5 and w.std() > 0


@pytest.mark.parametrize("kind", ["orthonormal", "random"])
def test_B8_B25_random_starts_come_from_the_seed_alone(teacher, kind):
    state = torch.get_rng_state()
    (one, f1), (two, f2), (other, f3) = (started(teacher, kind, seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(f1, f2) and all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert not torch.equal(f1, f3) and not any(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()) if a.dim() == 2)


def test_ridge_streamed_equals_the_stacked_least_squares():
    x, y = torch.randn(300, 6, dtype=F64), torch.randn(300, 4, dtype=F64)
    ridge = starts.Ridge()
    for part in torch.arange(300).split(70):
        ridge.add(x[part], y[part])
    lam = 0.1 * (x.T @ x).diagonal().mean()
    stacked = torch.linalg.lstsq(torch.cat([x, lam.sqrt() * torch.eye(6, dtype=F64)]), torch.cat([y, torch.zeros(6, 4, dtype=F64)])).solution
    assert torch.allclose(ridge.solve(0.1).double(), stacked, atol=1e-6)  # solve() hands back fp32


def calibrated(teacher, width, ids):
    student = lrc.blank_student(teacher, width)
    frame = starts.calibrate(teacher, student, ids, ids.roll(-1, 1), say=lambda _: None)
    return student, frame


@pytest.fixture
def exact(monkeypatch):
    """Calibration without its two deliberate biases: the ridge's shrinkage and the factor on the final gain."""
    solve = starts.Ridge.solve
    monkeypatch.setattr(starts.Ridge, "solve", lambda self: solve(self, 1e-9))
    monkeypatch.setattr(starts, "SCALES", (1.0,))


def test_calibration_at_full_width_gives_the_teacher_back(teacher, ids, exact):
    """With r = H each fit has an exact answer. A tied head has one only where the final gain is the same in every channel."""
    if teacher.config.tie_word_embeddings:
        teacher.norm.weight.fill_(3.0)
    student, _ = calibrated(teacher, teacher.config.hidden_size, ids)
    theirs, ours = teacher(ids), student(ids)
    assert (theirs - ours).abs().max() < 1e-3 * theirs.abs().max()


def test_frame_is_the_leading_eigenspace_turned_by_a_tied_heads_gain(teacher, ids):
    _, frame = calibrated(teacher, 12, ids)
    _, taps = teacher(ids, taps=True)
    stream = torch.cat([teacher.embed_tokens(ids)] + [tap["hidden"] for tap in taps]).double().flatten(0, -2)  # every depth, (N, H)
    normed = stream / (stream.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    leading = torch.linalg.svd(normed, full_matrices=False).Vh[:12].T  # an independent route: right singular vectors of the data
    gain = teacher.norm.weight.double() if teacher.config.tie_word_embeddings else torch.ones(24, dtype=F64)
    Q = frame.double() / (gain / gain.pow(2).mean().sqrt())[:, None]
    assert torch.allclose(Q.T @ Q, torch.eye(12, dtype=F64), atol=1e-5)
    assert (Q - leading @ (leading.T @ Q)).norm() < 1e-2


def test_tied_final_gain_is_the_least_squares_of_each_channel(ids, exact):
    teacher = random_net().requires_grad_(False)
    student, frame = calibrated(teacher, 12, ids)
    (_, t), (_, s) = teacher(ids, taps=True), student(ids, taps=True)
    h_T, h_S = (taps[-1]["hidden"].double().flatten(0, 1) for taps in (t, s))
    normed = lambda h: h / (h.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    gain = teacher.norm.weight.double()
    Q = frame.double() / (gain / gain.pow(2).mean().sqrt())[:, None]
    target = (gain * normed(h_T)) @ Q
    for i in range(12):
        best = torch.linalg.lstsq(normed(h_S)[:, i:i + 1], target[:, i:i + 1]).solution.item()
        assert student.norm.weight[i].item() == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("length, rows", [(100, 163), (128, 256), (2000, 8)])
def test_the_factor_on_the_final_gain_is_that_of_the_text_and_8192_tokens_judge_it(length, rows):
    """Next tokens drawn from softmax(0.6 z): no other factor on z has a lower CE."""
    student, generator = random_net(hidden_size=12), torch.Generator().manual_seed(0)
    h_S, read = torch.randn(rows, length, 12, generator=generator), []
    z = student.lm_head(student.norm(h_S))
    targets = torch.multinomial((0.6 * z).softmax(-1).flatten(0, 1), 1, generator=generator).view(rows, length)
    student.lm_head.register_forward_hook(lambda module, x, z: read.append(len(x[0])))
    with torch.no_grad():
        assert starts.best_scale(student, h_S, targets, torch.device("cpu")) == 0.6
    assert 4096 <= sum(read) < 8192 + length


def test_every_write_is_the_best_the_span_allows(teacher, ids, exact):
    """The last down_proj: no matrix P_o^T W_o brings the student's stream nearer to h_T F. Checked by the normal equations."""
    student, frame = calibrated(teacher, 12, ids)
    (_, t), (_, s) = teacher(ids, taps=True), student(ids, taps=True)
    error = (t[-1]["hidden"] @ frame - s[-1]["hidden"]).double().flatten(0, 1)  # (N, r)
    product = (torch.nn.functional.silu(s[-1]["gate"]) * s[-1]["up"]) @ teacher.layers[-1].mlp.down_proj.weight.T  # (N, H)
    slope = product.double().flatten(0, 1).T @ error  # d|error|^2 / dP_o, 0 at the optimum
    assert slope.norm() < 1e-3 * product.norm() * error.norm()


def test_calibrated_student_stays_in_the_teachers_span_and_inherits_biases(teacher, ids):
    student, frame = calibrated(teacher, 12, ids)
    theirs = dict(teacher.named_parameters())
    assert frame.shape == (24, 12)
    for name, w in student.named_parameters():
        assert torch.isfinite(w).all()
        if name.endswith("bias"):
            assert torch.equal(w, theirs[name]) and not w.requires_grad
        elif w.dim() == 2:
            turn = (lambda m: m.T.double()) if name.endswith(lrc.DUAL) else (lambda m: m.double())
            assert outside(turn(w.detach()), turn(theirs[name])) < 1e-5, name
    assert (student.lm_head.weight is student.embed_tokens.weight) == teacher.config.tie_word_embeddings


def test_B8_calibration_twice_gives_the_same_student_and_leaves_the_rng(teacher, ids):
    state = torch.get_rng_state()
    (one, f1), (two, f2) = calibrated(teacher, 12, ids), calibrated(teacher, 12, ids)
    assert torch.equal(f1, f2) and all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert torch.equal(state, torch.get_rng_state())


def test_calibration_beats_a_plain_frame_and_more_so_with_width(teacher, ids):
    """Independent yardstick: mean squared error of the logits against the teacher's, per width."""
    theirs = teacher(ids)
    error = lambda width: (calibrated(teacher, width, ids)[0](ids) - theirs).pow(2).mean().item()
    assert error(20) < error(8) < theirs.pow(2).mean().item()


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func._schema.name.endswith(("from_file", "view", "_")):  # the file, and writes into it
            self.numel = max(self.numel, out.numel())
        return out


def test_calibration_memory_does_not_grow_with_the_number_of_batches():
    teacher = random_net().requires_grad_(False)
    largest = []
    for sequences in (160, 640):
        ids = torch.randint(0, 96, (sequences, 64))
        student = lrc.blank_student(teacher, 12)
        with LargestTensor() as mode:
            starts.calibrate(teacher, student, ids, ids, say=lambda _: None)
        largest.append(mode.numel)
    assert largest[0] == largest[1]
