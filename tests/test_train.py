"""The loop: runs, resume, ranks, schedules, and what it refuses before the first step."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
from conftest import random_net
from safetensors.torch import load_file, save_file

import checkpoints
import core
import data
import lrc
import optimizer
import plan
import runs
import starts
import train
from distill import IGNORE
from files import Refusal
from flags import objective_of, terms
from model import Transformer

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--width", "12", "--batch-size", "2", "--seq-len", "16", "--steps", "6", "--lr", "1e-3", "--calibration-tokens", "512",
         "--eval-every", "3", "--save-every", "3", "--eval-tokens", "128"]
pytestmark = pytest.mark.usefixtures("elsewhere")


def command(folder, out, *more):
    return ["--teacher", str(folder), "--data", str(folder / "text.jsonl"), "--out", str(out), *SMALL, *more]


def run(folder, out, *more):
    train.main(command(folder, out, *more))
    return Path(out)


def test_a_run_leaves_what_the_readme_promises(teacher_folder, tmp_path, capsys):
    out = run(teacher_folder, tmp_path / "run")
    assert {p.name for p in out.iterdir()} == {"config.json", "metrics.jsonl", "curves.png", "checkpoint", "student", "tokenizer", ".lock"}
    rows = runs.read_metrics(out)
    steps, evals = [r for r in rows if "loss" in r], [r for r in rows if "val_ce" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6] and [r["step"] for r in evals] == [0, 3, 6]
    for row in steps:
        assert {"step", "tokens", "loss", "kl", "ce", "align", "lr", "tokens_per_second"} <= row.keys()
        assert row["tokens"] == row["step"] * 32
        assert row["loss"] == pytest.approx(row["kl"] + row["ce"] + 0.2 * row["align"], rel=1e-5)
    assert all({"val_ce", "val_kl", "val_top1"} <= row.keys() for row in evals)
    screen = capsys.readouterr().out
    for word in ("teacher", "student, step 0", "student, step 6", "deployed", "trained", "tok/s", "left"):
        assert word in screen


def test_a_finished_run_resumed_says_so_and_changes_nothing(teacher_folder, tmp_path):
    out = run(teacher_folder, tmp_path / "run")
    before = (out / "metrics.jsonl").read_text(), (out / "student" / "model.safetensors").read_bytes()
    train.main(["--resume", "--out", str(out)])
    assert ((out / "metrics.jsonl").read_text(), (out / "student" / "model.safetensors").read_bytes()) == before


def steps_of(out):
    return [row for row in runs.read_metrics(out) if "loss" in row]


LRC, CLONE = {"kl", "ce", "q", "k", "v", "o", "gate", "up", "hidden"}, {"kl", "ce", "q", "k", "v", "gate", "up", "attn_out", "ffn_out"}


@pytest.mark.parametrize("flags, logged, recorded", [
    ("--mode random", LRC, dict(init="calibrated", attention="cosine")),
    ("--mode slice", LRC, dict(init="calibrated")),
    ("--mode scratch", {"kl", "ce"}, {}),
    ("--recipe gpd", {"kl"}, dict(init="orthonormal")),
    ("--recipe gpd --init calibrated --mode slice", {"kl"}, dict(init="calibrated")),
    ("--recipe clone", CLONE, dict(init="calibrated", attention="mse")),
    ("--init random --mode lrc", LRC, dict(init="random")),
    ("--coordinates teacher --mode lrc", LRC, dict(coordinates="teacher")),
    ("--coordinates teacher", LRC, dict(coordinates="teacher", mode="core"))])
def test_every_arm_recipe_and_start_runs_to_a_student_of_the_plain_shape(teacher_folder, tmp_path, bare, capsys, flags, logged, recorded):
    out = run(teacher_folder, tmp_path / "run", *flags.split())
    for row in steps_of(out):
        assert row.keys() == logged | {"step", "tokens", "loss", "grad_norm", "lr", "tokens_per_second"} | ({"align"} if len(logged) > 2 else set())
        assert row["loss"] == pytest.approx(row["kl"] + row.get("ce", 0) + 0.2 * row.get("align", 0), rel=1e-5)
        assert row.get("align", 0) == pytest.approx(sum(row[name] for name in logged - {"kl", "ce"}), rel=1e-5)
    args = json.loads((out / "config.json").read_text())["args"]
    assert args.items() >= recorded.items()
    assert ("calibrating" in capsys.readouterr().out) == (args["mode"] != "scratch" and args["init"] == "calibrated")

    student, teacher = Transformer.from_pretrained(out / "student"), Transformer.from_pretrained(teacher_folder)
    assert {n: w.shape for n, w in student.named_parameters()} == {n: w.shape for n, w in Transformer(teacher.config.at_width(12)).named_parameters()}
    outside = {}
    for name, w in student.named_parameters():
        if w.dim() == 2:
            W_T, W = ((m.T if name.endswith(lrc.DUAL) else m).detach().double() for m in (teacher.get_parameter(name), w))
            outside[name.split(".")[-2]] = ((W - W_T @ torch.linalg.lstsq(W_T, W, driver="gelsd").solution).norm() / W.norm()).item()
    bare = args["mode"] == "scratch"
    assert all((outside[name] > 1e-3) == (bare or args["mode"] not in ("lrc", "slice")) for name in ("gate_proj", "up_proj", "down_proj"))
    assert all((outside[name] > 1e-3) == bare for name in ("q_proj", "o_proj", "embed_tokens"))


def test_every_mode_but_scratch_starts_from_the_same_figures(teacher_folder, tmp_path, bare):
    more = ["--steps", "1", "--calibration-tokens", "128", "--mode"]
    starts = {mode: runs.read_metrics(run(teacher_folder, tmp_path / mode, *more, mode))[:3] for mode in (*core.MODES, "scratch")}
    timeless = lambda rows: [{k: v for k, v in row.items() if k not in ("tokens_per_second", "grad_norm")} for row in rows]
    assert starts["core"][2]["step"] == 1
    for mode in core.MODES:
        assert timeless(starts[mode]) == timeless(starts["core"])  # the teacher, the student, and the first step's losses
    assert starts["slice"][2]["grad_norm"] > starts["lrc"][2]["grad_norm"]  # more coordinates take up the same gradient
    assert starts["scratch"][1]["val_ce"] == pytest.approx(7.62, abs=0.05)  # log 2048: it knows nothing


@pytest.mark.parametrize("recipe, terms", [("lrc", LRC), ("clone", CLONE)])
def test_B20_without_takes_exactly_its_term_out_of_the_log_and_the_total(teacher_folder, tmp_path, bare, recipe, terms):
    first = lambda name, *more: steps_of(run(teacher_folder, tmp_path / name, "--recipe", recipe, "--init", "orthonormal", "--steps", "1", "--eval-tokens", "16",
                                             "--w-kl", "0.7", "--w-ce", "1.3", "--w-align", "0.3", *more))[0]
    full = first("full")
    for term in sorted(terms):
        rest = first(term, "--without", term)
        assert full.keys() - rest.keys() == {term} and rest.keys() <= full.keys()
        assert all(rest[name] == full[name] for name in terms - {term})
        assert full["loss"] - rest["loss"] == pytest.approx({"kl": 0.7, "ce": 1.3}.get(term, 0.3) * full[term], abs=2e-6 * full["loss"])
        assert full["align"] - rest["align"] == pytest.approx(full[term] if term not in ("kl", "ce") else 0, abs=2e-6 * full["align"])
    two = first("two", "--without", "kl, gate")
    assert full.keys() - two.keys() == {"kl", "gate"}
    none = first("none", "--without", ",".join(terms - {"kl", "ce"}))
    assert full.keys() - none.keys() == terms - {"kl", "ce"} | {"align"}
    assert none["loss"] == pytest.approx(0.7 * full["kl"] + 1.3 * full["ce"], rel=1e-6)


def test_terms_of_a_run_are_those_of_its_recipe_less_what_is_off():
    named = lambda *flags: terms(train.parse(flags))
    assert named() == ("kl", "ce", "q", "k", "v", "o", "gate", "up", "hidden")
    assert named("--recipe", "clone") == ("kl", "ce", "q", "k", "v", "gate", "up", "attn_out", "ffn_out")
    assert named("--recipe", "gpd") == named("--recipe", "gpd", "--mode", "scratch") == ("kl",)
    assert named("--mode", "scratch") == named("--mode", "scratch", "--recipe", "clone") == named("--w-align", "0") == ("kl", "ce")
    assert named("--w-kl", "0", "--without", "o,hidden") == ("ce", "q", "k", "v", "gate", "up")
    for flags, weights in (((), (1, 1)), (("--without", "kl"), (0, 1)), (("--without", "ce", "--w-kl", "0.5"), (0.5, 0)), (("--recipe", "gpd"), (1, 0))):
        objective = objective_of(train.parse(flags), 90)
        assert (objective.w_kl, objective.w_ce, objective.real_vocab) == (*weights, 90)
        assert objective.align == (() if flags[-1:] == ("gpd",) else ("q", "k", "v", "o", "gate", "up", "hidden"))
    assert objective_of(train.parse(("--recipe", "clone")), 90).attention == "mse"
    assert objective_of(train.parse(("--recipe", "clone", "--attention", "cosine")), 90).attention == "cosine"


@pytest.mark.parametrize("flags, words", [
    ("--without attn_out", ("attn_out", "recipe lrc")), ("--without Q", ("--without Q",)), ("--recipe clone --without o,hidden", ("hidden", "clone")),
    ("--recipe gpd --without ce", ("ce", "gpd")), ("--mode scratch --without q", ("q", "scratch")), ("--without align", ("align", "gate")),
    ("--recipe gpd --without kl", ("--without",)), ("--recipe gpd --w-kl 0", ("--w-kl",)), ("--without kl,ce,q,k,v,o,gate,up,hidden", ("--without",)),
    ("--without kl,ce --w-align 0", ("--without", "--w-align")), ("--mode scratch --w-kl 0 --without ce", ("--without", "--w-kl"))])
def test_terms_that_are_not_there_and_an_objective_of_nothing_are_refused(tmp_path, flags, words):
    with pytest.raises(Refusal) as refused:
        train.main([*flags.split(), "--out", str(tmp_path / "run")])
    assert all(word in str(refused.value) for word in ("--without", *words)) and "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def built(teacher, ids=None, **flags):
    place = train.Place(torch.device("cpu"), 0, 1, None)
    return train.build(train.Args(width=12, **flags), None, teacher, teacher.config, ids if ids is None else (ids, ids), place)


def test_build_hands_start_and_seed_to_where_they_belong(ids):
    teacher = random_net().requires_grad_(False)
    for kind in ("orthonormal", "random"):
        clone, student = built(teacher, ids, mode="dense", init=kind, seed=9), lrc.blank_student(teacher, 12)
        assert torch.equal(starts.random_start(teacher, student, kind, 9), clone.frame)
        assert all(torch.allclose(clone.weights[name], w, atol=1e-5) for name, w in student.named_parameters())
    for mode in ("random", "slice"):
        maps, plain = built(teacher, ids, mode=mode, init="random", seed=9).maps, built(teacher, mode="lrc")
        assert all(torch.equal(m.C, maps[name].C) for name, m in core.open_mlp(plain, mode, 9).maps.items() if name.endswith(core.MLP))
    scratch = Transformer(teacher.config.at_width(12))
    scratch.initialise(9)
    clone = built(teacher, ids, mode="scratch", seed=9)
    assert clone.frame is None and not clone.maps and all(torch.equal(clone.weights[name], w) for name, w in scratch.named_parameters())


@pytest.mark.parametrize("mode, coordinates", [*((mode, "span") for mode in (*core.MODES, "scratch")), ("lrc", "teacher"), ("core", "teacher")])
def test_the_optimizer_steps_every_coordinate_as_textbook_adamw_does(mode, coordinates):
    """Three steps of float64 arithmetic by hand; the gradient of each step comes out of a pull-back, in whatever layout that has."""
    teacher = random_net().requires_grad_(False)
    clone = built(teacher, mode=mode, coordinates=coordinates)
    named, optimizer = clone.coordinates(), train.make_optimizer(clone, 1e-2, 0.1)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in named.values()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in named.values():
            p.copy_(torch.randn(p.shape, generator=generator))
    wide = {name: p.detach().double() for name, p in named.items()}
    first, second = ({name: torch.zeros_like(p) for name, p in wide.items()} for _ in range(2))
    for step in (1, 2, 3):
        clone.deploy()
        for w in clone.weights.values():
            w.grad = torch.randn(w.shape, generator=generator)
        clone.pull_back()
        for name, p in named.items():
            g = p.grad.double()
            first[name], second[name] = 0.9 * first[name] + 0.1 * g, 0.999 * second[name] + 0.001 * g * g
            wide[name] = wide[name] * (1 - 1e-2 * 0.1 * (p.dim() == 2))
            wide[name] -= 1e-2 * (first[name] / (1 - 0.9 ** step)) / ((second[name] / (1 - 0.999 ** step)).sqrt() + 1e-8)
        optimizer.step()
    for name, p in named.items():
        assert torch.allclose(p.double(), wide[name], atol=1e-5), name


def figures(row):
    return {k: v for k, v in row.items() if k not in ("tokens_per_second", "val_top1", "grad_norm", "teacher")}


def uneven(real):
    def batch(self, position, count):
        ids, targets = real(self, position, count)
        targets = targets.clone()
        for row in range(count):  # how many targets a sequence keeps depends on the sequence alone
            targets[row, : int(ids[row].sum()) % ids.shape[1]] = IGNORE
        return ids, targets
    return batch


def launch(tmp_path, name, argv, world, stop_at=0):
    """train.py on `world` ranks with uneven valid tokens -> its folder, the student's weights, each rank's coordinates a step, and the screens."""
    out = tmp_path / name

    def before(rank):
        pull, making, seen = lrc.Clone.pull_back, optimizer.make_optimizer, []

        def watched(clone):
            pull(clone)
            seen.append({name: p.detach().clone() for name, p in clone.coordinates().items()})
            torch.save(seen, f"{out}.rank{rank}")
            if len(seen) == stop_at:
                raise KeyboardInterrupt

        def told(*args):
            made = making(*args)
            print("moments here:", sum(t.numel() for state in made.state.values() for name, t in state.items() if name != "step"))
            return made
        data.Tokens.batch, lrc.Clone.pull_back, optimizer.make_optimizer = uneven(data.Tokens.batch), watched, told
    codes, screens = ranks.run([*argv, "--out", out], tmp_path / f"{name}.log", world, before)
    assert codes == [0] * world, screens
    return out, load_file(out / "student" / "model.safetensors"), [torch.load(f"{out}.rank{r}", weights_only=True) for r in range(world)], "".join(screens)


def timeless(out):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in runs.read_metrics(out)]


def without_out(argv):
    at = argv.index("--out")
    return argv[:at] + argv[at + 2:]


@pytest.mark.parametrize("flags", ["--mode core", pytest.param("--mode random --recipe clone --init random --coordinates teacher", marks=pytest.mark.slow)])
def test_A10_two_ranks_with_accumulation_2_equal_one_with_4(teacher_folder, tmp_path, flags):
    """Uneven valid tokens, 5 steps; and on both ranks the coordinates are the same bits at every step."""
    base = without_out(command(teacher_folder, "x", "--steps", "5", *flags.split(), "--lr", "1e-3"))
    out1, one, _, _ = launch(tmp_path, "one", [*base, "--accum", "4"], 1)
    out2, two, both, screen = launch(tmp_path, "two", [*base, "--accum", "2"], 2)
    for key in one:
        assert (one[key] - two[key]).abs().max() < 2e-5 * one[key].abs().max(), key
    for a, b in zip(*(runs.read_metrics(out) for out in (out1, out2))):
        assert figures(a) == pytest.approx(figures(b), rel=1e-4)
    assert len(both[0]) == 5
    assert all(torch.equal(a[name], b[name]) for a, b in zip(*both) for name in a)
    assert screen.count("step      5/5  kl") == 1  # B36: one rank speaks


def moments_of(out):
    return {name: t for name, t in load_file(next((out / "checkpoint").glob("step-*")) / "state.safetensors").items() if name.startswith("adamw/")}


def shares(folder, rank):
    """Three steps on gradients that are the same on both ranks, each rank training all or its share: norms, what is deployed, what rank 0 gathers."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    send = torch.distributed.broadcast

    def contiguous(tensor, source):
        assert tensor.is_contiguous()  # NCCL refuses others
        return send(tensor, source)
    torch.distributed.broadcast = contiguous
    teacher = random_net().requires_grad_(False)
    gate = teacher.layers[0].mlp.gate_proj.weight
    gate.copy_(gate[:, :5] @ gate[:5])  # its span is narrower, so that as many more numbers are drawn for `slice`
    for mode in ("core", "dense", "slice", "scratch"):
        for shard in (False, True):
            args = train.Args(mode=mode, width=12, init="orthonormal", shard=shard)
            clone = train.build(args, None, teacher, teacher.config, None, train.Place(torch.device("cpu"), rank, 2, None))
            train.share_start(clone, teacher)
            adamw, generator, norms = optimizer.make_optimizer(clone, 1e-2, 0.1), torch.Generator().manual_seed(0), []
            for lr in (1e-2, 5e-3, 1e-3):  # the loop sets it on the groups
                for group in adamw.param_groups:
                    group["lr"] = lr
                clone.deploy()
                for w in clone.weights.values():
                    w.grad = torch.randn(w.shape, generator=generator) if w.requires_grad else None
                clone.pull_back()
                norms.append(optimizer.gradient_norm(clone))
                adamw.step()
            clone.deploy()
            state = optimizer.training_state(clone, adamw)
            held = sum(t.numel() for t in [*state.values(), *(b for m in clone.maps.values() for b in m.buffers())])
            whole = optimizer.gathered(state, rank, torch.device("cpu")) if shard else state
            assert rank == 0 or not shard or whole == {}
            found = {f"state/{name}": t for name, t in whole.items()} | {f"deployed/{name}": w for name, w in clone.weights.items()}
            found = {name: t.detach().clone() for name, t in found.items()} | {"norms": torch.stack(norms), "held": torch.tensor(held)}
            save_file(found, f"{folder}/{mode}{rank}{shard}.safetensors")


@pytest.mark.parametrize("mode", ["core", "dense", "slice", "scratch"])
def test_shared_matrices_step_and_gather_to_the_same_bits(shared_out, mode):
    whole, other, shared, second = (load_file(shared_out / f"{mode}{name}.safetensors") for name in ("0False", "1False", "0True", "1True"))
    held = [found.pop("held").item() for found in (whole, other, shared, second)]
    assert whole.keys() == shared.keys() and all(torch.equal(t, other[name]) and torch.equal(t, shared[name]) for name, t in whole.items())
    assert all(torch.equal(t, whole[name]) for name, t in second.items()) and len(second) == len([n for n in whole if not n.startswith("state/")])
    assert held[0] == held[1] and max(held[2:]) < 0.6 * held[0] and sum(held[2:]) < 1.02 * held[0]  # the frame is on both
    if mode in ("core", "slice"):
        planned = plan.memory(random_net().config, 12, mode, shards=2)
        parts = sum(planned[part] for part in ("coordinates", "optimizer (AdamW)", "bases T, C"))
        assert 4 * (max(held[2:]) - random_net().config.hidden_size * 12) == pytest.approx(parts, rel=0.01)  # without the frame; gains and step counts are the 1 %


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    pids = [ranks.fork(lambda rank=rank: shares(folder, rank), folder / f"log{rank}") for rank in (0, 1)]
    assert [ranks.end(pid) for pid in pids] == [0, 0], [(folder / f"log{rank}").read_text() for rank in (0, 1)]
    return folder


@pytest.mark.slow
def test_sharing_changes_no_bit_and_checkpoints_are_whole(teacher_folder, tmp_path):
    """Two ranks: the same 4 steps with all matrices on both and shared out; then a run that stops at 2 shared goes on whole, and the other way."""
    flags = ["--steps", "4", "--save-every", "2", "--eval-every", "4", "--init", "orthonormal", "--weight-decay", "0.1"]
    base = without_out(command(teacher_folder, "x", *flags))
    whole, one, ours, plain_screen = launch(tmp_path, "whole", base, 2)
    sharded, two, theirs, screen = launch(tmp_path, "sharded", [*base, "--shard"], 2)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert timeless(whole) == timeless(sharded)
    assert re.search(r"(\S+) deployed, (\S+) trained", plain_screen).groups() == re.search(r"(\S+) deployed, (\S+) trained", screen).groups()
    assert all((a | b).keys() == o.keys() and not a.keys() & b.keys() and all(torch.equal(t, (a | b)[name]) for name, t in o.items()) for o, a, b in zip(ours[0], *theirs))
    moments, others = moments_of(whole), moments_of(sharded)
    assert moments.keys() == others.keys() and all(torch.equal(moments[name], others[name]) for name in moments)
    assert any(name.endswith("exp_avg_sq") and moments[name].abs().sum() > 0 for name in moments)
    shares = [int(share) for share in re.findall(r"moments here: (\d+)", screen)]
    assert sum(shares) == sum(t.numel() for name, t in moments.items() if not name.endswith("step")) and min(shares) > 0  # its vocabulary outweighs all else

    for name, first, then in (("a", ["--shard"], []), ("b", [], ["--shard"])):
        out = tmp_path / name
        with pytest.raises(AssertionError):  # the crash
            launch(tmp_path, name, [*base, *first], 2, stop_at=3)
        assert checkpoints.newest_checkpoint(out).name == "step-0000002"
        record = json.loads((out / "config.json").read_text(encoding="utf-8"))
        record["args"]["shard"] = False  # no flag takes it back
        (out / "config.json").write_text(json.dumps(record), encoding="utf-8")
        _, resumed, _, _ = launch(tmp_path, name, ["--resume", *then], 2)
        assert all(torch.equal(resumed[key], one[key]) for key in one)
        assert all(torch.equal(t, moments[key]) for key, t in moments_of(out).items())


@pytest.mark.parametrize("flags", ["--mode core", "--recipe clone --mode dense", "--w-align 0"])
def test_checkpointing_changes_no_bit(teacher_folder, tmp_path, bare, flags):
    plain, saving = (run(teacher_folder, tmp_path / name, "--accum", "2", *flags.split(), *more) for name, more in (("plain", []), ("saving", ["--checkpointing"])))
    assert timeless(plain) == timeless(saving)
    state, other = (load_file(next((out / "checkpoint").glob("step-*")) / "state.safetensors") for out in (plain, saving))
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_checkpointing_really_runs_the_blocks_twice(ids):
    """And gives the same gradients, bit for bit, of every weight and through every tap."""
    calls, grads = [], []
    for checkpointing in (False, True):
        net = random_net()
        net.checkpointing = checkpointing
        for block in net.layers:
            block.mlp.up_proj.register_forward_pre_hook(lambda *_: calls.append(1))
        out, taps = net(ids, taps=True)
        (out.pow(2).mean() + sum(t.pow(2).mean() for tap in taps for t in tap.values())).backward()
        grads.append([p.grad for p in net.parameters()])
        with torch.no_grad():
            net(ids)
        assert len(calls) == (4 if not checkpointing else 4 + 6)  # 2 layers: forward, (again,) and once without a gradient
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_checkpointing_goes_through_compile_and_ddp_without_a_graph_break(ids, tmp_path):
    """Traced as in train.py, DDP around compile; the traced graph is run as it is, so that nothing waits for a compiler."""
    import torch._dynamo.utils as counters
    plain, saving = random_net(), random_net()
    saving.checkpointing = True
    counters.counters.clear()
    torch._dynamo.reset()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for net in (plain, torch.nn.parallel.DistributedDataParallel(torch.compile(saving, backend="aot_eager"), gradient_as_bucket_view=True)):
            out, taps = net(ids, taps=True, head=False)
            (out.pow(2).mean() + sum(t.pow(2).mean() for tap in taps for t in tap.values())).backward()
    finally:
        torch.distributed.destroy_process_group()
    assert not counters.counters["graph_break"] and counters.counters["stats"]["unique_graphs"] == 1
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), saving.parameters()))


@pytest.mark.slow
def test_checkpointing_changes_no_bit_on_two_ranks(teacher_folder, tmp_path):
    base = without_out(command(teacher_folder, "x", "--steps", "3", "--accum", "2"))
    _, one, _, _ = launch(tmp_path, "plain", base, 2)
    _, two, _, _ = launch(tmp_path, "saving", [*base, "--checkpointing"], 2)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_teacher_held_in_bf16_starts_the_student_as_its_fp32_copy_does(teacher_folder, tmp_path, bare):
    """Weights that bf16 can hold: calibration widens them block by block, so the start is the same bit for bit, in every map and for every start."""
    narrow = tmp_path / "narrow"
    shutil.copytree(teacher_folder, narrow)
    net = Transformer.from_pretrained(teacher_folder)
    net.to(torch.bfloat16).to(torch.float32).save_pretrained(narrow)
    for start in ("calibrated", "orthonormal", "random"):
        for coordinates in ("span", "teacher"):
            clones = []
            for dtype in (torch.float32, torch.bfloat16):
                teacher = Transformer.from_pretrained(narrow, dtype).requires_grad_(False)
                ids = torch.randint(0, 2048, (12, 32), generator=torch.Generator().manual_seed(1))
                clones.append(built(teacher, ids, init=start, coordinates=coordinates))
                assert all(p.dtype == dtype for p in teacher.parameters())
            one, two = clones
            assert torch.equal(one.frame, two.frame)
            assert all(torch.equal(one.weights[name], two.weights[name]) and two.weights[name].dtype == torch.float32 for name in one.weights)
            assert all(torch.equal(p, two.coordinates()[name]) for name, p in one.coordinates().items())


def test_a_bf16_teacher_guides_an_fp32_student(teacher_folder, tmp_path, bare):
    loss = {}
    for dtype in ("auto", "float32", "bfloat16"):
        out = run(teacher_folder, tmp_path / dtype, "--teacher-dtype", dtype, "--steps", "2")
        assert load_file(out / "student" / "model.safetensors")["model.norm.weight"].dtype == torch.float32
        loss[dtype] = [row["loss"] for row in steps_of(out)]
    assert loss["auto"] == loss["float32"] != loss["bfloat16"] and loss["bfloat16"] == pytest.approx(loss["float32"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [("--w-kl", "0"), ("--w-ce", "0"), ("--w-align", "0"), ("--attention", "mse")])
def test_B31_every_loss_switch_runs_on_two_ranks(teacher_folder, tmp_path, weights):
    base = without_out(command(teacher_folder, "x", "--steps", "3", *weights))
    out, _, _, _ = launch(tmp_path, "run", base, 2)
    last = runs.read_metrics(out)[-2]
    if weights[1] == "0":
        assert weights[0][4:] not in last


@pytest.mark.slow
def test_B32_compiled_equals_eager_without_graph_breaks(teacher_folder, tmp_path):
    import torch._dynamo.utils as counters
    eager = runs.read_metrics(run(teacher_folder, tmp_path / "eager"))
    counters.counters.clear()
    compiled = runs.read_metrics(run(teacher_folder, tmp_path / "compiled", "--compile"))
    for a, b in zip(eager, compiled):
        assert figures(a) == pytest.approx(figures(b), rel=1e-5)
    assert not counters.counters["graph_break"]
    assert counters.counters["stats"]["unique_graphs"] <= 2  # B33: the student and the teacher, once each
    keys = load_file(next((tmp_path / "compiled" / "checkpoint").glob("step-*")) / "student.safetensors").keys()
    assert not any("_orig_mod" in key for key in keys)  # A11


def test_learning_rate_follows_its_closed_form():
    args = train.Args(lr=1.0, steps=100, warmup=0.1, schedule="linear")
    rates = [train.learning_rate(args, step) for step in range(100)]
    assert rates[:11] == pytest.approx([0.1 * k for k in range(1, 11)] + [1.0])
    assert rates[55] == pytest.approx(0.5) and rates[99] == pytest.approx(1 / 90)
    args.schedule = "cosine"
    assert train.learning_rate(args, 55) == pytest.approx(0.5)
    assert train.learning_rate(args, 99) == pytest.approx(0.5 * (1 - torch.cos(torch.tensor(torch.pi / 90)).item()), abs=1e-6)


def test_pretraining_uses_the_shape_of_the_folder_and_no_teacher(teacher_folder, tmp_path):
    out = run(teacher_folder, tmp_path / "run", "--stage", "pretrain", "--width", "0")  # 0: no width of its own
    last = [r for r in runs.read_metrics(out) if "loss" in r][-1]
    assert last["loss"] == last["ce"] and "kl" not in last
    assert json.loads((out / "student" / "config.json").read_text())["hidden_size"] == 24


def test_sft_tunes_a_model_on_the_assistants_words_alone(teacher_folder, tmp_path):
    """From a distilled student, as the README has it; the loss falls on 'ok' and the end of its turn, which are soon learnt."""
    student = run(teacher_folder, tmp_path / "run") / "student"
    (student / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
                                                 "{% if add_generation_prompt %}assistant: {% endif %}")
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"say {i} {i * i}"}, {"role": "assistant", "content": "ok"}]}) + "\n" for i in range(300)))
    before = load_file(student / "model.safetensors")
    assert train.parse(["--stage", "sft", "--init", str(student)]).out == "runs/run-sft" and train.parse(["--stage", "sft", "--init", str(student)]).lr == 1e-5
    train.main(["--stage", "sft", "--init", str(student), "--data", str(chats), "--out", str(tmp_path / "sft"), *SMALL[2:],
                "--lr", "3e-2", "--steps", "60", "--schedule", "constant"])
    rows = [r for r in runs.read_metrics(tmp_path / "sft") if "loss" in r]
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"] and "kl" not in rows[0]
    after = load_file(tmp_path / "sft" / "student" / "model.safetensors")
    assert before.keys() == after.keys() and all(before[k].shape == after[k].shape and not torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("more, word", [
    (["--width", "13"], "12 and 16"), (["--width", "99"], "24"), (["--seq-len", "500"], "128 positions"), (["--steps", "0"], "--steps"),
    (["--data", "nowhere"], "nowhere"), (["--data", ""], "--data"), (["--teacher", "no-such"], "no-such"), (["--lr", "nan"], "--lr"),
    (["--init", "somewhere"], "--stage sft"), (["--data", "hub:nobody/nothing"], "hub cannot give it"), (["--data", "a=1,b=zero"], "FOLDER=WEIGHT")])
def test_bad_input_stops_before_the_first_step(teacher_folder, tmp_path, more, word):
    with pytest.raises(Refusal) as refused:
        train.main(command(teacher_folder, tmp_path / "run", *more))
    assert word in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_in_use_or_contradicted_is_refused(teacher_folder, tmp_path):
    out = run(teacher_folder, tmp_path / "run")
    with pytest.raises(Refusal, match="--resume"):
        run(teacher_folder, out)
    with pytest.raises(Refusal, match="--mode lrc contradicts"):
        train.main(["--resume", "--out", str(out), "--mode", "lrc"])
    with pytest.raises(Refusal, match="no such file"):
        train.main(["--resume", "--out", str(tmp_path / "nowhere")])
    with pytest.raises(Refusal, match="not that of a run"):
        train.main(["--resume", "--out", str(ROOT / "tiny")])
    for flags in (["--shard"], ["--gpus", "8"]):
        with pytest.raises(Refusal, match="would have no effect"):
            train.main(["--resume", "--out", str(out), *flags])


def test_a_damaged_checkpoint_is_refused_by_name(teacher_folder, tmp_path):
    out = run(teacher_folder, tmp_path / "run")
    file = next((out / "checkpoint").glob("step-*")) / "state.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if k != "coordinates/norm.weight"}, file)
    with pytest.raises(Refusal, match="coordinates/norm.weight is missing"):
        train.main(["--resume", "--out", str(out)])


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")])
def test_too_little_memory_is_one_line(teacher_folder, tmp_path, error):
    def scarce(rank):
        def batch(*args):
            raise error
        data.Tokens.batch = batch
    codes, (screen,) = ranks.run(command(teacher_folder, tmp_path / "run", "--init", "orthonormal"), tmp_path / "log", before=scarce)
    assert codes == [1] and screen.splitlines()[-1].startswith("error: out of memory (") and "--checkpointing" in screen and "Traceback" not in screen


def test_a_sample_that_the_screen_has_no_letters_for_is_written_all_the_same(teacher_folder, tmp_path):
    """The last lines of a run of days, on a screen that is not UTF-8."""
    def ascii_screen(rank):
        sys.stdout = open(1, "w", encoding="ascii", closefd=False)
        runs.draw_curves = lambda run: None
        runs.table = lambda *args: "\u00fc"
    codes, (screen,) = ranks.run(command(teacher_folder, tmp_path / "run", "--init", "orthonormal", "--steps", "1"), tmp_path / "log", before=ascii_screen)
    assert codes == [0] and "\\xfc" in screen


def test_an_error_is_one_line_and_a_nonzero_exit(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--teacher", "no/such model"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_resume_refuses_other_data_another_teacher_and_another_number_of_ranks(teacher_folder, tmp_path):
    out = run(teacher_folder, tmp_path / "run")
    record = json.loads((out / "config.json").read_text())
    for change, word in ((dict(ranks=2), "ranks 2"), (dict(teacher="other"), "teacher other"), (dict(data=record["data"] | {"fingerprint": "0"}), "data 0")):
        (out / "config.json").write_text(json.dumps(record | change))
        with pytest.raises(Refusal, match=word):
            train.main(["--resume", "--out", str(out)])


def test_a_folder_that_is_no_run_or_that_another_process_trains_in_is_refused(teacher_folder, tmp_path):
    with pytest.raises(Refusal, match="not a run folder"):
        run(teacher_folder, teacher_folder)  # a teacher's own folder must survive a slip of --out
    with runs.lock(tmp_path / "run"), pytest.raises(Refusal, match="another process"):
        run(teacher_folder, tmp_path / "run")
    run(teacher_folder, tmp_path / "run")  # the lock alone does not make it a run


@pytest.mark.parametrize("flags", [["--warmup", "2"], ["--warmup", "nan"], ["--seed", "-1"], ["--w-kl", "-1"], ["--w-align", "-0.5"], ["--clip", "nan"],
                                   ["--temperature", "1e200"], ["--w-align", "inf"], ["--seed", str(2 ** 63)], ["--steps", "1" + "0" * 400], ["--steps", "10000000"],
                                   ["--lr", "1e300"], ["--temperature", "0"], ["--eval-tokens", "0"], ["--w-kl", "0", "--w-ce", "0", "--w-align", "0"]])
def test_numbers_that_cannot_be_meant_are_refused_by_flag(flags):
    with pytest.raises(Refusal, match=flags[0]):
        train.parse(flags)


@pytest.mark.parametrize("told, words", [
    (dict(RANK="3"), "RANK=3 in the environment is no place among ranks"), (dict(RANK="2", WORLD_SIZE="2"), "no place among ranks"), (dict(WORLD_SIZE="0"), "no place among ranks"),
    (dict(RANK="x"), "no place among ranks"), (dict(WORLD_SIZE="2", RANK="0"), "WORLD_SIZE=2, but .*MASTER_ADDR expected")])
def test_an_environment_that_is_no_place_among_ranks_is_refused(monkeypatch, told, words):
    """A rank above 0 of one would train in silence and write nothing."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Refusal, match=words):
        train.find_place(train.parse([]))


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(Refusal, match="rank 0: this machine has 8 GPUs, too few for LOCAL_RANK=8; give torchrun --nproc_per_node=8"):
        train.find_place(train.parse([]))


def test_an_empty_word_in_the_environment_is_none(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    place = train.find_place(train.parse([]))
    assert (place.rank, place.world) == (0, 1)


@pytest.mark.parametrize("zero", ["mlp.gate_proj", "self_attn.o_proj", "self_attn.q_proj"])
def test_a_teacher_with_a_zero_matrix_still_distils(teacher_folder, tmp_path, zero):
    folder = tmp_path / "teacher"
    shutil.copytree(teacher_folder, folder)
    net = random_net(vocab_size=2048)
    with torch.no_grad():
        net.get_parameter(f"layers.0.{zero}.weight").zero_()
    net.save_pretrained(folder)
    assert all(torch.isfinite(w).all() for w in load_file(run(folder, tmp_path / "run") / "student" / "model.safetensors").values())


def test_compare_pairs_seeds_and_refuses_what_is_unlike(teacher_folder, tmp_path, bare):
    folders = [run(teacher_folder, tmp_path / f"{mode}{seed}", "--mode", mode, "--seed", str(seed)) for mode in ("lrc", "core") for seed in (1, 2)]
    end = {f.name: runs.read_metrics(f)[-1]["val_ce"] for f in folders}
    paired = [end["core1"] - end["lrc1"], end["core2"] - end["lrc2"]]
    row = runs.compare(folders).splitlines()[-1]
    assert f"| {sum(paired) / 2:.4f} ± {abs(paired[0] - paired[1]) / 2 ** 0.5:.4f} |" in row
    with pytest.raises(Refusal, match="differ in lr"):
        runs.compare([folders[0], run(teacher_folder, tmp_path / "other", "--lr", "2e-3")])
    with pytest.raises(Refusal, match="second run"):
        runs.compare([folders[0], folders[0]])


@pytest.mark.parametrize("flags, word", [
    (["--stage", "sft", "--init", "F", "--mode", "lrc"], "--mode lrc"), (["--stage", "sft", "--init", "F", "--teacher", "F"], "--teacher F"),
    (["--stage", "pretrain", "--init", "F"], "--init F"), (["--stage", "pretrain", "--without", "ce"], "--without ce"),
    (["--stage", "pretrain", "--width", "64"], "--width 64"),
    (["--mode", "scratch", "--init", "calibrated"], "--init calibrated"), (["--mode", "scratch", "--coordinates", "teacher"], "--coordinates teacher"),
    (["--recipe", "gpd", "--w-align", "3"], "--w-align 3.0"), (["--mode", "dense", "--bases", "implicit"], "--bases implicit"),
    (["--recipe", "gpd", "--hidden", "mse"], "--hidden mse"),
    (["--recipe", "clone", "--hidden", "mse"], "--hidden mse"), (["--without", "q,k,v,o", "--attention", "mse"], "--attention mse"),
    (["--w-align", "0", "--attention", "mse"], "--attention mse"),
    (["--without", "kl", "--temperature", "2"], "--temperature 2.0"), (["--revision", "main"], "--revision main"),
    (["--teacher", str(ROOT / "tiny"), "--revision", "main"], "--revision main")])
def test_a_flag_that_would_be_ignored_is_refused(flags, word):
    with pytest.raises(Refusal, match=f"{word} would have no effect"):
        train.parse(flags)


def test_compare_takes_runs_that_differ_in_how_they_were_held_for_equal(teacher_folder, tmp_path):
    """A core run of a large teacher has compact bases, its lrc run none; one was sharded, before the flag had its name."""
    folders = [run(teacher_folder, tmp_path / mode, "--mode", mode) for mode in ("core", "lrc")]
    for folder, more in zip(folders, ({"bases": "compact", "shard_optimizer": True, "non_finite": "skip"}, {})):
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        record["args"] |= more
        (folder / "config.json").write_text(json.dumps(record), encoding="utf-8")
    assert "core" in runs.compare(folders)


def test_compare_takes_no_flag_of_one_run_alone_for_equal(teacher_folder, tmp_path):
    folders = [run(teacher_folder, tmp_path / f"{seed}", "--mode", "lrc", "--seed", str(seed)) for seed in (1, 2)]
    record = json.loads((folders[0] / "config.json").read_text())
    del record["args"]["recipe"]
    (folders[0] / "config.json").write_text(json.dumps(record))
    for order in (folders, folders[::-1]):
        with pytest.raises(Refusal, match="differ in recipe"):
            runs.compare(order)
