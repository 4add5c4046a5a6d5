"""What is watched: losses that jump, numbers that are not finite, ranks that hold other bits, and that none of it costs a wait."""
import json
import shutil
import statistics

import pytest
import ranks
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_resume import timeless
from test_train import command

import checkpoints
import context
import lrc
import runs
import starts
import train
import watch
from files import Refusal
from model import Transformer

pytestmark = pytest.mark.usefixtures("elsewhere")
NAN = float("nan")
SIX = ["--steps", "6", "--save-every", "1", "--keep", "9", "--eval-every", "6"]


def state_at(out, step):
    return load_file(out / "checkpoint" / f"step-{step:07d}" / "state.safetensors")


# -------------------------------------------------------------------------------------------- losses


def test_a_spike_is_ten_median_deviations_above_the_median():
    """Of 1 .. 49 the median is 25; the distances from it are 0, 1, 1, 2, 2, ... 24, 24, whose median is 12."""
    recent = [*map(float, range(49, 0, -1)), None]
    assert watch.spike(recent, 25 + 120) == 0 and watch.spike(recent, -1000) == 0
    assert watch.spike(recent, 25 + 121) == pytest.approx(121 / 12)
    assert watch.spike(recent[:24], 1e9) == 0 and watch.spike(recent[:25], 1e9) > 0  # half a window to judge by
    assert watch.spike([2.0] * 30 + [3.0] * 20, 1e9) == 0  # no spread, no measure


def test_what_is_recalled_is_the_last_fifty_training_steps():
    rows = [{"step": 0, "val_ce": 1.0}] + [{"step": k, "loss": float(k)} if k % 7 else {"step": k, "skipped": "why"} for k in range(1, 101)]
    recent = watch.recall(rows, 80)
    assert list(recent) == [float(k) if k % 7 else None for k in range(31, 81)]
    assert [watch.skipped(watch.recall(rows, k)) for k in (6, 7, 8)] == [0, 1, 0] and watch.skipped(watch.recall([], 0)) == 0


def test_a_jump_of_the_loss_is_logged_and_a_resumed_run_logs_it_too(little, tmp_path, bare, capsys, monkeypatch):
    """One update at 2000 times the rate; the figure is checked against the rows of the log."""
    usual = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", lambda args, step: usual(args, step) * (2000 if step == 30 else 1))
    out = tmp_path / "run"
    more = ["--steps", "34", "--save-every", "20", "--eval-every", "40", "--keep", "9", "--schedule", "constant"]
    train.main(command(little, out, *more))
    rows = [row for row in runs.read_metrics(out) if "loss" in row]
    spiked = [row for row in rows if "spike" in row]
    assert spiked and spiked[0]["step"] == 32  # update 31 is the wild one
    before = [row["loss"] for row in rows[:31]]
    spread = statistics.median(abs(loss - statistics.median(before)) for loss in before)
    assert spiked[0]["spike"] == pytest.approx((rows[31]["loss"] - statistics.median(before)) / spread, abs=0.06)
    screen = capsys.readouterr().out
    assert f"step     32/34  loss {rows[31]['loss']:.4f} is" in screen and screen.count("median deviations") == len(spiked)
    straight = timeless(out)
    for folder in (out / "checkpoint").iterdir():
        if folder.name != "step-0000020":
            shutil.rmtree(folder)
    train.main(["--resume", "--out", str(out)])
    assert timeless(out) == straight


# ------------------------------------------------------------------------- numbers that are not finite


def out_of(module, change):
    """`module` gives change(its output)."""
    module.register_forward_hook(lambda module, inputs, output: change(output))


def backward_nan(output):
    output.register_hook(lambda grad: grad * NAN) if output.requires_grad else None
    return output


def coordinate_nan(clone, teacher):
    real = clone.pull_back

    def pull_back():
        real()
        clone.coordinates()["layers.0.self_attn.k_proj.weight.Z"].grad[0, 0] = NAN
    clone.pull_back = pull_back


def huge(clone, teacher):
    real = clone.pull_back

    def pull_back():
        real()
        for p in clone.coordinates().values():
            p.grad.fill_(1e30)  # whose square is not fp32
    clone.pull_back = pull_back


def poison(monkeypatch, fault, steps=(4,)):
    """`fault` strikes in these steps, and is gone after each."""
    real, calls = train.take_step, []

    def take_step(clone, optimizer, net, teacher, *rest):
        calls.append(1)
        step = optimizer_step + len(calls)
        if step not in steps:
            return real(clone, optimizer, net, teacher, *rest)
        result = None
        fault(clone, teacher)
        result = real(clone, optimizer, net, teacher, *rest)
        healing.append((clone, teacher))
        return result
    optimizer_step, healing, judge = 0, [], watch.judge

    def judged(*args):  # the second look comes before the fault is gone
        try:
            return judge(*args)
        finally:
            for clone, teacher in healing:
                clone.__dict__.pop("pull_back", None)
                for net in (clone.student, teacher):
                    for module in net.modules():
                        module._forward_hooks.clear()
            healing.clear()
    monkeypatch.setattr(train, "take_step", take_step)
    monkeypatch.setattr(watch, "judge", judged)


FAULTS = {
    "teacher's layers.1 up": (lambda clone, teacher: out_of(teacher.layers[1].mlp.up_proj, lambda y: y * NAN), ("kl", "up", "hidden", "align", "loss", "grad_norm")),
    "student's layers.0 q": (lambda clone, teacher: out_of(clone.student.layers[0].self_attn.q_proj, lambda y: y * float("inf")), ("kl", "ce", "q", "loss")),
    "gradient of layers.1.mlp.up_proj.weight": (lambda clone, teacher: out_of(clone.student.layers[1].mlp.up_proj, backward_nan), ("grad_norm",)),
    "gradient of layers.0.self_attn.v_proj.weight": (lambda clone, teacher: out_of(clone.student.layers[0].self_attn.v_proj, backward_nan), ("grad_norm",)),
    "gradient of layers.0.self_attn.k_proj.weight.Z": (coordinate_nan, ("grad_norm",)),
    "beyond the range": (huge, ("grad_norm",))}


@pytest.mark.parametrize("place", FAULTS)
def test_what_is_not_finite_stops_the_run_by_step_term_and_place(little, tmp_path, bare, monkeypatch, place):
    fault, terms = FAULTS[place]
    poison(monkeypatch, fault)
    out = tmp_path / "run"
    with pytest.raises(Refusal) as refused:
        train.main(command(little, out, *SIX))
    text = str(refused.value)
    named, _, rest = text.partition(" not finite; ")
    assert named.startswith("step 4: ") and set(terms) <= set(named.removeprefix("step 4: ").split(", ")) and "\n" not in text
    assert (terms == ("grad_norm",)) == (named == "step 4: grad_norm")
    assert rest.removeprefix("first bad: ").startswith(place) or place == "beyond the range" and place in rest
    assert "--non-finite skip" in rest
    assert checkpoints.newest_checkpoint(out).name == "step-0000003" and [row["step"] for row in runs.read_metrics(out) if "loss" in row] == [1, 2, 3]


def test_a_skipped_step_leaves_every_bit_and_is_logged(little, tmp_path, bare, monkeypatch, capsys):
    poison(monkeypatch, FAULTS["gradient of layers.1.mlp.up_proj.weight"][0], steps=(4, 5))
    out = tmp_path / "run"
    train.main(command(little, out, *SIX, "--non-finite", "skip"))
    before, after = state_at(out, 3), state_at(out, 5)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert {t.item() for name, t in state_at(out, 6).items() if name.endswith("/step")} == {4}  # AdamW's own count
    rows = {row["step"]: row for row in runs.read_metrics(out) if "lr" in row}
    assert list(rows) == [1, 2, 3, 4, 5, 6]
    for step in (4, 5):
        assert rows[step].keys() == {"step", "tokens", "skipped", "lr", "tokens_per_second"}
        assert rows[step]["skipped"] == "grad_norm not finite; first bad: gradient of layers.1.mlp.up_proj.weight"
        json.loads(json.dumps(rows[step]), parse_constant=pytest.fail)  # NaN is no JSON
    assert rows[6]["lr"] == train.learning_rate(train.parse(command(little, out, *SIX)), 5)  # the schedule goes by the step, not by the update
    assert capsys.readouterr().out.count("skipped: ") == 2


def test_the_tenth_skipped_step_in_a_row_stops_also_across_a_resume(little, tmp_path, bare, monkeypatch):
    more = ["--steps", "20", "--save-every", "1", "--keep", "99", "--eval-every", "20", "--non-finite", "skip"]
    fault = FAULTS["gradient of layers.0.self_attn.v_proj.weight"][0]
    with monkeypatch.context() as patch:
        poison(patch, fault, steps=(*range(2, 11), *range(12, 22)))  # nine, a good one, ten
        with pytest.raises(Refusal, match="step 21|step 20") as refused:
            train.main(command(little, tmp_path / "run", *more, "--steps", "30"))
    assert "step 21:" in str(refused.value) and "10 steps in a row" in str(refused.value)
    for folder in (tmp_path / "run" / "checkpoint").iterdir():
        if folder.name > "step-0000014":
            shutil.rmtree(folder)
    poison(monkeypatch, fault, steps=range(1, 99))
    with pytest.raises(Refusal, match="step 21: .*10 steps in a row"):
        train.main(["--resume", "--out", str(tmp_path / "run")])


@pytest.mark.parametrize("count, words", [(1, "step 0: the teacher's val_kl on held-out"), (4, "step 6: the student's val_kl on held-out")])
def test_an_evaluation_that_is_not_finite_stops_the_run_before_it_is_saved(little, tmp_path, bare, monkeypatch, count, words):
    real, calls = context.evaluate, []
    monkeypatch.setattr(context, "evaluate", lambda *args, **more: (calls.append(1), real(*args, **more) | ({"val_kl": NAN} if len(calls) == count else {}))[1])
    with pytest.raises(Refusal, match=words):
        train.main(command(little, tmp_path / "run", *SIX, "--eval-every", "3"))
    assert getattr(checkpoints.newest_checkpoint(tmp_path / "run"), "name", None) == (None if count == 1 else "step-0000005")
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_step_waits_for_the_device_once(little, tmp_path, bare, monkeypatch):
    """Every way of a tensor to become a Python number, counted within one step, with two micro-batches: those that are on the CPU anyway (the counts of
    targets) aside, one."""
    waits, real = [], train.take_step

    def take_step(*args):
        with pytest.MonkeyPatch.context() as counting:
            for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__"):
                usual = getattr(torch.Tensor, name)

                def counted(self, *a, usual=usual, name=name, **k):
                    if self.is_floating_point():
                        waits.append(name)
                    return usual(self, *a, **k)
                counting.setattr(torch.Tensor, name, counted)
            return real(*args)
    monkeypatch.setattr(train, "take_step", take_step)
    train.main(command(little, tmp_path / "run", *SIX, "--accum", "2"))
    assert waits == ["tolist"] * 6


# --------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("dtype, bits", [(torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)])
def test_a_fingerprint_changes_with_any_one_bit(dtype, bits):
    generator = torch.Generator().manual_seed(0)
    for shape in ((7,), (5, 6)):
        t = torch.randn(shape, generator=generator).to(dtype)
        first = watch.fingerprint(t).item()
        assert watch.fingerprint(t.clone()).item() == first
        for place in range(t.numel()):
            for bit in range(8 * t.element_size()):
                other = t.clone()
                other.view(bits).view(-1)[place] ^= torch.tensor(1 << bit if bit < 8 * t.element_size() - 1 else -(1 << bit), dtype=bits)
                assert watch.fingerprint(other).item() != first
    assert watch.fingerprint(t.flip(0)).item() != first and watch.fingerprint(t.T.contiguous().T).item() == first
    assert watch.fingerprint(t[:, :0]).item() == 0


def by_hand(t):
    """The same sum in Python's integers."""
    return sum((2 * k + 1) * int(b) for k, row in enumerate(t.view(torch.int32).tolist()) for b in (row if isinstance(row, list) else [row]))


def test_a_fingerprint_is_the_sum_that_it_says(ids):
    t = torch.randn(40, 300)
    assert (watch.fingerprint(t).item() - by_hand(t)) % 2 ** 64 == 0 and (watch.fingerprint(t[3]).item() - by_hand(t[3])) % 2 ** 64 == 0


def nudged(w):
    w.data.view(-1)[5] = torch.nextafter(w.data.view(-1)[5], torch.tensor(9.0))


def other_teacher(rank):
    """Rank 1 reads files that differ in one bit of one number."""
    real = Transformer.from_pretrained.__func__

    def from_pretrained(cls, *args):
        net = real(cls, *args)
        nudged(net.layers[1].mlp.down_proj.weight)
        return net
    if rank == 1:
        Transformer.from_pretrained = classmethod(from_pretrained)


def drifting(rank):
    """On rank 1 a coordinate changes by one bit before its third step."""
    real, calls = lrc.Clone.zero_grad, []

    def zero_grad(self):
        calls.append(1)
        if len(calls) == 3:
            nudged(self.coordinates()["layers.1.mlp.gate_proj.weight.Z"])
        real(self)
    if rank == 1:
        lrc.Clone.zero_grad = zero_grad


def wrong_weight(rank):
    """On rank 1 a weight is another by one bit than what was sent, in the third step and after."""
    real, calls = lrc.Clone.deploy, []

    def deploy(self):
        calls.append(1)
        real(self)
        if len(calls) >= 7:  # two before the first step, two in each that is saved
            nudged(self.weights["layers.1.mlp.gate_proj.weight"])
    if rank == 1:
        lrc.Clone.deploy = deploy


def wrong_gradient(rank):
    """On rank 1 a gradient is another by one bit than what was added up over the ranks."""
    real = train.watch.check_ranks

    def check_ranks(tensors, when):
        if "step" in when:
            nudged(tensors["the gradient of norm.weight"])
        real(tensors, when)
    if rank == 1:
        train.watch.check_ranks = check_ranks


@pytest.mark.parametrize("hook, flags, words, saved", [
    (other_teacher, "", "at the start: the ranks have drifted apart: the teacher's layers.1.mlp.down_proj.weight", None),
    (drifting, "", "after step 4: the ranks have drifted apart: layers.", 3),
    (wrong_weight, "--shard", "in step 4: the ranks have drifted apart: layers.1.mlp.gate_proj.weight is another", 3),
    (wrong_gradient, "--shard", "in step 2: the ranks have drifted apart: the gradient of norm.weight is another", 1)])
def test_ranks_that_differ_stop_by_name(little, tmp_path, hook, flags, words, saved):
    out = tmp_path / "run"
    codes, screens = ranks.run(command(little, out, *SIX, "--check-ranks", "2", *flags.split()), tmp_path / "log", 2, hook)
    error = screens[0].splitlines()[-1]
    assert codes == [1, 1] and error.startswith(f"error: {words}") and "is another on rank 1 than on rank 0" in error and screens[1] == "", screens
    assert (checkpoints.newest_checkpoint(out).name if saved else checkpoints.newest_checkpoint(out)) == (saved and f"step-{saved:07d}")


def one_rank_nan(rank):
    real, calls = lrc.Clone.zero_grad, []

    def zero_grad(self):
        calls.append(1)
        real(self)
        if len(calls) == 4:
            out_of(self.student.layers[0].mlp.up_proj, lambda y: y * NAN)
        if len(calls) == 5:
            self.student.layers[0].mlp.up_proj._forward_hooks.clear()
    if rank == 1:
        lrc.Clone.zero_grad = zero_grad


@pytest.mark.parametrize("policy", ["stop", "skip", "skip --shard"])
def test_a_fault_of_one_rank_stops_or_skips_on_both_and_is_named(little, tmp_path, policy):
    out = tmp_path / "run"
    codes, screens = ranks.run(command(little, out, *SIX, "--non-finite", *policy.split(), "--check-ranks", "1"), tmp_path / "log", 2, one_rank_nan)
    assert "first bad: student's layers.0 up, gradient of norm.weight, seen on rank 1" in screens[0] and screens[1] == ""
    if policy == "stop":
        assert codes == [1, 1] and checkpoints.newest_checkpoint(out).name == "step-0000003"
    else:
        assert codes == [0, 0] and [row["step"] for row in runs.read_metrics(out) if "skipped" in row] == [4]
        assert all(torch.equal(t, state_at(out, 4)[name]) for name, t in state_at(out, 3).items())


def unshared(rank):
    """Nothing of the start crosses from rank to rank; that they agree is then their own doing."""
    dist.broadcast = lambda *args, **kwargs: None


def unequal(rank):
    unshared(rank)
    real = starts.calibrate
    if rank == 1:
        starts.calibrate = lambda teacher, student, ids, targets, say: real(teacher, student, ids[1:], targets[1:], say)


@pytest.mark.parametrize("flags", ["--mode core", "--mode random --init orthonormal"])
def test_every_rank_comes_to_the_same_start_by_itself(little, tmp_path, flags):
    more = [*SIX, "--steps", "1", *flags.split()]
    codes, screens = ranks.run(command(little, tmp_path / "run", *more), tmp_path / "log", 2, unshared)
    assert codes == [0, 0], screens


def test_a_start_of_other_text_would_have_been_seen(little, tmp_path):
    codes, screens = ranks.run(command(little, tmp_path / "run", *SIX, "--steps", "1"), tmp_path / "log", 2, unequal)
    assert codes == [1, 1] and "at the start: the ranks have drifted apart" in screens[0]


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_command_twice_writes_the_same_metrics(little, tmp_path, world):
    for name in ("one", "two"):
        codes, screens = ranks.run(command(little, tmp_path / name, *SIX), tmp_path / "log", world)
        assert codes == [0] * world, screens
    assert timeless(tmp_path / "one") == timeless(tmp_path / "two")


# --------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("flags, words", [
    (["--keep", "0"], "--keep 0 is out of range"), (["--check-ranks", "0"], "--check-ranks 0 is out of range"),
    (["--check-ranks", "10"], "--check-ranks 10 would have no effect: one rank has nobody to be compared with")])
def test_flags_that_cannot_be_meant(flags, words):
    with pytest.raises(Refusal, match=words):
        train.parse(flags)


def test_the_watch_may_change_on_a_resume(little, tmp_path, bare, monkeypatch):
    out = tmp_path / "run"
    train.main(command(little, out, *SIX))
    train.main(["--resume", "--out", str(out), "--keep", "2", "--non-finite", "skip"])
    with pytest.raises(Refusal, match="nobody to be compared with"):
        train.main(["--resume", "--out", str(out), "--check-ranks", "10"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.parse(["--check-ranks", "10"]).check_ranks == 10
