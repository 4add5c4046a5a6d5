"""bench.py measures what it says: its arithmetic by closed forms, what it compares with against our own losses in float64."""
import math
import sys
from dataclasses import replace

import pytest
import torch

import bench
import distill
import lrc
import measure
import peers
from config import Config
from conftest import random_net
from files import Refusal
from tasks import tasks_folder
from teachers import PRESETS

F64 = torch.float64


@pytest.fixture(scope="module")
def pair():
    """A teacher in float64, LRC's coordinates P for it, our student made of the same P, a micro-batch."""
    teacher = random_net(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                         head_dim=12, vocab_size=50).double().requires_grad_(False)
    P = {name: p.detach().double().mul(10 if p.dim() == 2 else 1).requires_grad_() for name, p in peers.projections(teacher, 8).items()}
    student = lrc.blank_student(teacher, 8).double()
    theirs = dict(teacher.named_parameters())
    with torch.no_grad():
        for name, w in student.named_parameters():
            if w.dim() == 2:
                w.copy_(P[name].T @ theirs[name] if name.endswith(lrc.DUAL) else theirs[name] @ P[name])
    clone = lrc.Clone(student, lrc.plain_maps(teacher, student, "teacher"), torch.zeros(24, 8, dtype=F64))
    for name, m in clone.maps.items():  # plain_maps takes the shortest P that gives the weight; LRC's is this one
        m.Z.data.copy_(P[name].T)
    tokens = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    return teacher, P, clone, tokens[:, :-1], tokens[:, 1:]


def test_the_gradient_of_lrcs_own_step_is_that_of_its_terms(pair):
    """A directional difference of (kl + ce + 0.2 * the other terms) / tokens, in float64."""
    teacher, P, _, ids, targets = pair
    along = {name: torch.randn(p.shape, dtype=F64, generator=torch.Generator().manual_seed(3)) for name, p in P.items()}

    def total(shift):
        moved = {name: (p.detach() + shift * along[name]).requires_grad_() for name, p in P.items()}
        terms = peers.lrc_step(teacher, moved, ids, targets)
        return (terms["kl"] + terms["ce"] + 0.2 * sum(v for k, v in terms.items() if k not in ("kl", "ce"))) / targets.numel(), moved
    slope = (total(1e-5)[0] - total(-1e-5)[0]) / 2e-5
    assert sum((p.grad * along[name]).sum().item() for name, p in total(0.0)[1].items()) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("w_align", [0.0, 0.2])
def test_lrcs_own_step_computes_our_terms_and_our_gradients(pair, w_align):
    teacher, P, clone, ids, targets = pair
    for p in P.values():
        p.grad = None
    found = peers.lrc_step(teacher, P, ids, targets, w_align)
    align = ("q", "k", "v", "gate", "up", "ffn_out")
    objective = distill.Objective(align=align, attention="mse", w_align=0.2)
    writers = [(b.self_attn.o_proj.weight, b.mlp.down_proj.weight) for b in clone.student.layers]
    clone.zero_grad()
    ours = distill.losses(clone.student, teacher, ids, targets, objective if w_align else replace(objective, w_align=0), clone.frame, clone.student.lm_head.weight, writers)
    for name in ("kl", "ce", *(align if w_align else ())):
        assert found[name] == pytest.approx(ours[name].item(), rel=1e-9), name
    if not w_align:  # LRC compares attn_out at the teacher's width: another term, another gradient
        (ours["loss"] / targets.numel()).backward()
        clone.pull_back()
        for name, m in clone.maps.items():
            assert torch.allclose(P[name].grad.T, m.Z.grad, rtol=1e-9, atol=1e-12), name


def test_lrcs_own_attention_term_is_taken_at_the_teachers_width(pair):
    teacher, P, clone, ids, targets = pair
    with torch.no_grad():
        (_, s), (_, t) = clone.student(ids, taps=True), teacher(ids, taps=True)
        by_hand = sum(((a["o"] - b["o"]) @ block.self_attn.o_proj.weight.T).pow(2).mean(-1).sum() for a, b, block in zip(s, t, teacher.layers))
    assert peers.lrc_step(teacher, P, ids, targets)["attn_out"] == pytest.approx(float(by_hand), rel=1e-9)


def test_the_naive_loss_is_ours_masked_targets_included():
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)
    inputs = draw(12, 6), draw(30, 6), torch.tensor([-100, *range(11)]), draw(12, 9), draw(30, 9)
    kl, ce = peers.naive_loss(*inputs)
    _, ours_kl, ours_ce = distill.HeadLoss.apply(*inputs, distill.Objective(chunk=5))
    assert float(kl) == pytest.approx(float(ours_kl), rel=1e-9) and float(ce) == pytest.approx(float(ours_ce), rel=1e-9)


def test_the_plain_step_is_the_mean_cross_entropy(pair):
    teacher, _, clone, ids, targets = pair
    clone.zero_grad()
    peers.plain_step(clone.student, teacher, ids, targets)
    found = clone.student.norm.weight.grad.clone()
    clone.zero_grad()
    z = clone.student(ids)
    (-z.log_softmax(-1).gather(2, targets[..., None]).mean()).backward()
    assert torch.allclose(found, clone.student.norm.weight.grad, rtol=1e-5)  # F.cross_entropy in fp32


def test_exponents_and_ratios_by_closed_form():
    assert bench.exponent(2, [5 + 3 * n ** 1.5 for n in (1, 2, 4)]) == pytest.approx(1.5)
    assert bench.exponent(4, [7 + n for n in (2, 8, 32)]) == pytest.approx(1) and math.isnan(bench.exponent(2, [1, 1, 2])) and math.isnan(bench.exponent(2, [1, 0.9, 2]))
    row = measure.ratio("x", [2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert row.value == "2.000" and row.spread == "1.000 to 3.000; 4 s / 3 s"


def test_works_are_warmed_up_and_timed_in_turns():
    called = []
    taken = measure.side_by_side([lambda i=i: called.append(i) for i in range(3)], torch.device("cpu"), 3)
    assert called == [0, 1, 2] + [0, 1, 2] + [2, 1, 0] + [0, 1, 2] and [len(t) for t in taken] == [3, 3, 3]


def test_the_shape_keeps_the_published_proportions():
    """Tokens to d_ff decides what the map costs, rows of the vocabulary to layers what the loss costs: both as in Llama-3.2-3B -> 1536."""
    full, (c, r, batch, length) = Config.from_hf(PRESETS["llama3.2-3b"]["config"]), measure.paper_shape(torch.device("cpu"))
    assert (c.intermediate_size / c.hidden_size, c.hidden_size / r, c.num_attention_heads / c.num_key_value_heads) == (8192 / 3072, 2, 3)
    assert batch * length / c.intermediate_size == 12288 / 8192 and 4 * batch * length * 8 == 49152
    assert c.vocab_size / c.num_hidden_layers * 8 == pytest.approx(full.vocab_size / full.num_hidden_layers, rel=1e-3)


def test_a_step_of_the_bench_has_every_term_of_the_loss_and_lowers_it():
    """Over three steps; with accumulation the micro-batches hold different tokens."""
    made = bench.Distillation(replace(measure.paper_shape(torch.device("cpu"), layers=1)[0], vocab_size=64), 24, 2, 16, 2, "--mode core --bases compact")
    terms = [made.step() for _ in range(3)]
    assert set(terms[0]) == {"kl", "ce", "align", "loss", "grad_norm", "q", "k", "v", "o", "gate", "up", "hidden"}
    assert terms[-1]["loss"] < terms[0]["loss"] and len({tuple(ids.flatten().tolist()) for ids, _ in made.micro}) == 2


@pytest.fixture
def witnessed(monkeypatch):
    """The bench at a toy size, each work run once and not timed -> tokens that passed through what, by work in the order in which a row measures them."""
    shape = replace(measure.paper_shape(torch.device("cpu"), layers=1)[0], vocab_size=64), 24, 6, 16
    monkeypatch.setattr(bench, "paper_shape", lambda device, layers=4: shape)
    seen, now = [], {}

    def watch(module, name, what):
        real = getattr(module, name)

        def counted(*args, **kw):
            now[what] = now.get(what, 0) + next(a for a in args if isinstance(a, torch.Tensor)).numel()
            return real(*args, **kw)
        monkeypatch.setattr(module, name, counted)
    watch(peers, "lrc_step", "theirs")
    watch(peers, "plain_step", "plain")
    real = measure.train.take_step
    monkeypatch.setattr(measure.train, "take_step", lambda clone, *args: now.__setitem__("ours " + kinds(clone), sum(ids.numel() for ids, _ in args[3])) or real(clone, *args))

    def kinds(clone):
        gate = next((m for name, m in clone.maps.items() if "gate" in name), None)
        if gate is None:
            return "dense"
        return type(gate).__name__ + ("" if getattr(gate, "teacher_weight", (None,))[0] is None else " implicit")

    def once(works, device, repeats):
        for work in works:
            now.clear()
            work()
            seen.append(dict(now))
        return [[float(k + 1)] * repeats for k in range(len(works))]
    monkeypatch.setattr(bench, "side_by_side", once)
    return seen


def test_both_sides_of_a_ratio_see_the_same_tokens(witnessed):
    """24 sequences of 16 tokens a step, 6, or 3; the first named is the numerator."""
    step = 24 * 16
    rows = bench.step(torch.device("cpu"))
    assert witnessed == [{"ours Compact": step}, {"plain": step}, {"ours Opened": step}, {"plain": step}, {"ours dense": step}, {"plain": step}]
    assert [row.value for row in rows] == 3 * ["0.500"]
    witnessed.clear()
    rows = bench.beside_lrc(torch.device("cpu"))
    sizes = [step, step, step, step, step // 8, step // 8]
    assert witnessed == [side for size, kind in zip(sizes, ("Compact", "Plain") * 3) for side in ({f"ours {kind}": size}, {"theirs": size})]
    witnessed.clear()
    rows = bench.mapped(torch.device("cpu"))
    assert witnessed == [{f"ours {kind}": size} for size in (step // 4, step, step // 8) for kind in ("dense", "Compact", "Opened", "Compact implicit")]
    assert [row.value for row in rows[:3]] == ["2.000", "3.000", "4.000"] and [row.what.split()[3] for row in rows[:3]] == ["compact", "explicit", "implicit"]


def test_plain_training_runs_the_teacher_too(pair, monkeypatch):
    teacher, _, clone, ids, targets = pair
    calls, real = [], type(teacher).forward
    monkeypatch.setattr(type(teacher), "forward", lambda self, *args, **kw: calls.append(self) or real(self, *args, **kw))
    peers.plain_step(clone.student, teacher, ids, targets)
    assert calls == [teacher, clone.student]


def test_a_row_that_cannot_be_measured_leaves_the_others(capsys, monkeypatch):
    def fails(device):
        """One."""
        raise Refusal("no second device")
    monkeypatch.setitem(bench.ROWS, "ranks", fails)
    with pytest.raises(Refusal, match="not every row"):
        bench.main(["ranks", "bases"])
    out = capsys.readouterr().out
    assert "| ranks | not measured | no second device |" in out and out.count("| frozen bases") == 3


def test_bytes_of_bases_are_those_of_the_whole_model(capsys, tmp_path):
    """Measured on a quarter of the sides; the closed form counts the whole: out^2, out H and 2 H^2 numbers of 4 bytes, and signs."""
    bench.main(["bases", "--markdown", str(tmp_path / "table.md")])
    out, H, many = 11008, 2048, 3 * 36
    expected = [f"{4 * many * n / 1e9:.1f} GB" for n in (out ** 2, out * H, 2 * H * H)]
    rows = capsys.readouterr().out.splitlines()[2:5]
    assert [line.split(" | ")[1] for line in rows] == expected
    assert f"{2 * many * out * (out - H) / 1e9:.1f} GB (published: 7 to 28)" in rows[0]  # the paper gives the range alone, over its teachers
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert text.count("\n| frozen bases of core") == 3 and "`python bench.py bases`" in text and torch.__version__ in text


def test_bad_rows_are_refused_by_name_and_all_are_listed(capsys):
    for argv, says in ((["fast"], "no row 'fast'"), (["eval"], "--model FOLDER"), (["eval", "--model", "tiny"], "--local TASKS")):
        with pytest.raises(Refusal, match=says):
            bench.main(argv)
    bench.main(["--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(bench.ROWS)


def hold(made):
    return torch.ones(made * 1024 * 1024 // 4)  # freed at once: only the peak sees it


def forty():
    return 40


def end(made):
    sys.exit(3)


@pytest.mark.slow
def test_the_memory_of_a_process_of_its_own_is_measured():
    assert 40e6 < measure.alone(hold, forty)[1] < 50e6
    with pytest.raises(Refusal, match="ended without an answer"):
        measure.alone(end, forty)


@pytest.mark.slow
def test_both_backends_answer_alike(cache, capsys):
    """On the embedded teacher: the row refuses where an accuracy differs."""
    bench.main(["eval", "--model", "tiny", "--local", str(tasks_folder(cache))])
    assert "| eval.py / lm-eval's hf backend, 6 tasks, 40 documents each, the same accuracies |" in capsys.readouterr().out


@pytest.mark.slow
def test_fifty_compiled_steps_are_two_graphs_without_a_break():
    rows = bench.ROWS["compile"](torch.device("cpu"))
    assert rows[1].value == "0, 2"
