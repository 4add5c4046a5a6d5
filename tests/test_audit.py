"""audit.py against independent projectors, SVDs and hand-made networks."""
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHAPE, random_net
from safetensors.torch import load_file

import audit
import neurons
import plan
from config import Config
from files import Refusal
from model import Transformer
from teachers import PRESETS
from test_core import clone_of, complement_share, train

F64 = torch.float64
ROOT = Path(__file__).resolve().parent.parent


def saved(folder, net, dtype=torch.float32):
    net.save_pretrained(folder, dtype)
    return str(folder)


@pytest.fixture
def pair(tmp_path, ids):
    """Folders of a random teacher and of a student of it, trained a little in mode core; and the clone itself."""
    teacher = random_net().requires_grad_(False)
    clone = clone_of(teacher, "core")
    train(clone, teacher, ids)
    return saved(tmp_path / "teacher", teacher), saved(tmp_path / "student", clone.student), clone, teacher


# ------------------------------------------------------------------------------------------------ reach


@pytest.mark.parametrize("preset, gap", [("llama3.2-3b", "62.5%"), ("llama3.1-8b", "71.4%"), ("qwen2.5-3b", "81.4%"), ("qwen2.5-7b", "81.1%")])
def test_reach_of_the_published_teachers(capsys, preset, gap):
    audit.main(["reach", "--teacher", preset, "--width", str(PRESETS[preset]["width"])])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert all(gap in rows[kind] for kind in ("gate", "up", "down")) and all("no gap" in rows[kind] for kind in "qkv")


def test_reach_is_the_rank_of_what_projections_can_make():
    """Stack W_T P over many random P: the rank of all their columns together is what training can reach."""
    teacher = Config.from_hf(SHAPE)
    net = random_net()
    rows = {row["kind"]: row for row in audit.reach(teacher, teacher.at_width(12))}
    for kind, name in (("gate", "mlp.gate_proj"), ("down", "mlp.down_proj"), ("k", "self_attn.k_proj"), ("o", "self_attn.o_proj")):
        W = net.get_parameter(f"layers.0.{name}.weight").detach().double()
        W = W.T if kind in ("o", "down") else W
        assert rows[kind]["reachable"] == torch.linalg.matrix_rank(torch.cat([W @ torch.randn(24, 12, dtype=F64) for _ in range(8)], 1)), kind
    total = plan.numbers(teacher, 12, "lrc")
    assert sum(r["deployed"] for r in rows.values()) == sum(total[g]["deployed"] for g in ("attention", "mlp", "embedding, head"))
    assert sum(r["deployed"] * r["reachable"] // r["kept"] for r in rows.values()) == sum(total[g]["trained"] for g in ("attention", "mlp", "embedding, head"))


def test_reach_of_a_pruned_student_says_no_gap(tmp_path, capsys):
    teacher = saved(tmp_path / "teacher", random_net())
    pruned = saved(tmp_path / "pruned", random_net(hidden_size=16, intermediate_size=40))
    audit.main(["reach", pruned, "--teacher", teacher])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "no gap: not W_T P" in rows["gate"] and "25.0%" in rows["q"]  # 24 of 32
    for bad in ([], ["--width", "-1"], ["--width", "25"], [pruned, "--width", "12"]):
        with pytest.raises(Refusal, match="--width"):
            audit.main(["reach", *bad, "--teacher", teacher])


# --------------------------------------------------------------------------------------- energy, remove


def test_outside_by_hand():
    W_T = torch.eye(5, 2)
    W = torch.tensor([[1.0, 2], [0, 0], [3, 0], [0, 1], [0, 0]])
    assert audit.outside(W_T, W) == pytest.approx(10 / 15, abs=1e-15)
    assert audit.outside(W_T, torch.zeros(5, 2)) == 0 and audit.outside(torch.zeros(5, 2), W) == 1
    low = torch.randn(50, 3, dtype=F64) @ torch.randn(3, 20, dtype=F64)  # rank 3 of 20
    W = torch.randn(50, 4, dtype=F64)
    U = torch.linalg.svd(low).U[:, 3:]
    assert audit.outside(low, W) == pytest.approx(((U.T @ W).norm() / W.norm()).item() ** 2, rel=1e-10)


@pytest.mark.parametrize("mode, empty", [("lrc", True), ("slice", True), ("dense", False), ("core", False), ("random", False)])
def test_energy_of_each_mode(teacher, ids, mode, empty, tmp_path):
    clone = clone_of(teacher, mode)
    train(clone, teacher, ids)
    shares = audit.energy(saved(tmp_path / "teacher", teacher), saved(tmp_path / "student", clone.student))
    oracle = complement_share(clone, teacher)
    assert shares.keys() == {"gate", "up", "down"}
    for kind, layers in shares.items():
        for layer, share in enumerate(layers):
            assert share == pytest.approx(oracle[f"layers.{layer}.mlp.{kind}_proj.weight"], rel=1e-6, abs=1e-12)
            assert share < 1e-12 if empty else share > 1e-6


def test_energy_reads_a_sharded_bf16_folder_and_prints_a_table(pair, tmp_path, capsys):
    from safetensors.torch import save_file
    teacher, student, clone, net = pair
    folder = Path(saved(tmp_path / "bf16", clone.student, torch.bfloat16))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {key: file for file, keys in parts.items() for key in keys}}))
    audit.main(["energy", str(folder), "--teacher", teacher, "--picture", str(tmp_path / "e.png")])
    assert (tmp_path / "e.png").stat().st_size > 5000
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    exact = audit.energy(teacher, student)
    for layer in range(2):
        assert [float(cell) for cell in printed[1 + layer][1:]] == pytest.approx([100 * exact[kind][layer] for kind in audit.KINDS], abs=0.02)  # bf16 rounds 2^-9 of a weight
    assert [float(cell) for cell in printed[-1][1:]] == pytest.approx([50 * sum(exact[kind]) for kind in audit.KINDS], abs=0.02)


def test_strangers_and_damage_are_refused_by_name(pair, tmp_path):
    teacher, student, clone, _ = pair
    with pytest.raises(Refusal, match="inherits its MLP"):
        audit.energy(teacher, saved(tmp_path / "other", random_net(num_hidden_layers=3)))
    with torch.no_grad():
        clone.student.layers[1].mlp.up_proj.weight[3, 4] = math.nan
    with pytest.raises(Refusal, match="layers.1.mlp.up_proj.weight holds NaN"):
        audit.energy(teacher, saved(tmp_path / "nan", clone.student))


def test_removal_by_an_independent_projector_and_the_identity_pass(pair):
    teacher, student, clone, net = pair
    gone, same = audit.ablate(teacher, student, range(1, 2), ("gate", "down")), audit.ablate(teacher, student, range(2), scale=1.0)
    for name, w in clone.student.named_parameters():
        assert (same.get_parameter(name) - w).abs().max() <= 1e-7 * w.abs().max(), name
        if name in ("layers.1.mlp.gate_proj.weight", "layers.1.mlp.down_proj.weight"):
            turn = (lambda x: x.T) if "down" in name else (lambda x: x)
            A = turn(net.get_parameter(name)).double()
            fitted = A @ torch.linalg.lstsq(A, turn(w.detach()).double()).solution
            assert (turn(gone.get_parameter(name)).double() - fitted).abs().max() < 1e-6 and not torch.equal(gone.get_parameter(name), w)
        else:
            assert torch.equal(gone.get_parameter(name), w), name


def test_the_remove_command_scores_and_writes_a_folder(tmp_path, monkeypatch, capsys, ids):
    monkeypatch.chdir(tmp_path)
    teacher = random_net(vocab_size=2048).requires_grad_(False)
    clone = clone_of(teacher, "core")
    train(clone, teacher, ids)
    folders = saved("teacher", teacher), saved("student", clone.student)
    for folder in folders:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "tiny" / name, folder)
    Path("text.jsonl").write_text("".join(json.dumps({"id": f"d{i}", "text": f"def f{i}(x):\n    return x * {i}\n" * 4}) + "\n" for i in range(200)))
    text = ["--text", "text.jsonl", "--seq-len", "16", "--tokens", "256"]
    audit.main(["remove", folders[1], "--teacher", folders[0], *text, "--layers", "all", "0", "1-1"])
    rows = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["student", *(f"gate+up+down, layers {name}" for name in ("all", "0", "1-1"))]
    assert len({row[1] for row in rows}) == 4
    audit.main(["remove", folders[1], "--teacher", folders[0], *text, "--scale", "1", "--out", "same"])
    whole, same = [re.split(r"\s{2,}", line)[1:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert whole == same and Path("same/tokenizer.json").exists()
    assert Transformer.from_pretrained("same").config == Transformer.from_pretrained(folders[1]).config
    audit.main(["rank", folders[1], "--teacher", folders[0], *text])
    assert len(capsys.readouterr().out.splitlines()) == 3
    for bad, word in ((["--layers", "2"],) * 2, (["--layers", "1-0"],) * 2, (["--layers", "x"],) * 2, (["--matrices", "gate,q"],) * 2, (["--out", "same"],) * 2,
                      (["--layers", "0", "1", "--out", "new"], ["--out"]), (["--seq-len", "0"],) * 2, (["--seq-len", "129"],) * 2, (["--scale", "nan"],) * 2):
        with pytest.raises(Refusal, match=word[0]):
            audit.main(["remove", folders[1], "--teacher", folders[0], *text, *bad])


# ------------------------------------------------------------------------------- rank, spectrum, neurons


def test_effective_rank_by_hand():
    assert audit.effective_rank(torch.eye(7, dtype=F64)) == pytest.approx(7)
    assert audit.effective_rank(torch.diag(torch.tensor([9.0, 1.0, 0, 0], dtype=F64))) == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))
    assert audit.effective_rank(torch.zeros(3, 3)) == 0


def test_effective_ranks_of_a_network_against_an_svd(ids):
    net = random_net()
    batches = [(ids[:5], None), (ids[5:], None)]
    h = torch.cat([tap["hidden"].flatten(0, 1) for rows, _ in batches for tap in [net(rows, taps=True)[1][1]]]).detach().double()
    for x, ours in zip((h, h - h.mean(0)), audit.effective_ranks(net, batches)[1]):
        p = torch.linalg.svdvals(x)
        p = p / p.sum()
        assert ours == pytest.approx((-(p * p.log()).sum()).exp().item(), rel=1e-4)


def test_spectrum_against_an_svd():
    W_T, W = torch.randn(50, 20, dtype=F64), torch.randn(50, 8, dtype=F64)
    U, S, _ = torch.linalg.svd(W_T, full_matrices=False)
    s, theirs, ours = audit.spectrum(W_T, W)
    assert torch.allclose(s, S) and torch.allclose(theirs, S ** 2 / (S ** 2).sum())
    assert torch.allclose(ours, (U.T @ W).pow(2).sum(1) / W.pow(2).sum()) and 1 - ours.sum() == pytest.approx(audit.outside(W_T, W))


def test_spectrum_and_rank_commands(pair, tmp_path, capsys, monkeypatch):
    teacher, student, *_ = pair
    audit.main(["spectrum", student, "--teacher", teacher, "--layer", "1", "--picture", str(tmp_path / "s.png")])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 6 and all(float(row[-1]) == 1 for row in rows if row[1] == "teacher") and (tmp_path / "s.png").stat().st_size > 5000
    with pytest.raises(Refusal, match="0 to 1"):
        audit.main(["spectrum", student, "--teacher", teacher, "--layer", "2"])


def test_masked_neurons_are_those_a_network_without_them_would_lack():
    """Against the definition: zero the product silu(gate) * up at these indices in the forward pass."""
    net = random_net()
    questions = [([3, 4, 5], [6]), ([7, 8], [9, 10]), ([1], [2])]
    chosen = torch.tensor([5, 59, 60, 60 + 17])  # two of each layer, d_ff 60
    questions = [(prompt, net(torch.tensor([prompt]))[0, -1:].argmax(-1).tolist()) for prompt, _ in questions]  # what it says is right
    assert neurons.answers(net, questions).all()
    before = {name: p.clone() for name, p in net.named_parameters()}
    ours = neurons.masked(net, questions, chosen)
    assert all(torch.equal(before[name], p) for name, p in net.named_parameters())
    hooks = [net.layers[layer].mlp.down_proj.register_forward_pre_hook(lambda m, x, cut=cut: (x[0].index_fill(-1, torch.tensor(cut), 0.0),))
             for layer, cut in ((0, [5, 59]), (1, [0, 17]))]
    assert ours.tolist() == neurons.answers(net, questions).tolist()
    for hook in hooks:
        hook.remove()
    ours, seen = neurons.activity(net, questions), []
    for layer in net.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda m, x: seen.append(x[0][0, -1].abs()) or None)
    for prompt, _ in questions:
        net(torch.tensor([prompt]))
    assert torch.allclose(ours, torch.stack(seen).view(3, 2, 60).mean(0))


def test_what_cannot_be_compared_is_refused_before_anything_is_scored(tmp_path):
    teacher, student = (saved(tmp_path / str(width), random_net(vocab_size=2049, hidden_size=width)) for width in (24, 12))
    (tmp_path / "c.jsonl").write_text('{"prompt": "import", "answer": " os"}')
    for folder, name in ((teacher, "a"), (student, "b")):  # two tokenizers that differ in a special token
        spec = json.loads((ROOT / "tiny" / "tokenizer.json").read_text())
        spec["added_tokens"].append(dict(spec["added_tokens"][0], id=2048, content=f"<{name}>"))
        Path(folder, "tokenizer.json").write_text(json.dumps(spec))
        shutil.copy(ROOT / "tiny" / "tokenizer_config.json", folder)
    for command in (["remove"], ["rank"], ["neurons", "--cloze", str(tmp_path / "c.jsonl")]):
        with pytest.raises(Refusal, match="different tokenizers"):
            audit.main([*command, student, "--teacher", teacher])
    shutil.copy(Path(teacher, "tokenizer.json"), student)
    for bad in (["--k", "0"], ["--k", "61"], ["--draws", "1"]):
        with pytest.raises(Refusal, match=bad[0]):
            audit.main(["neurons", student, "--teacher", teacher, "--cloze", str(tmp_path / "c.jsonl"), *bad])
    Path(student, "model.safetensors").write_bytes(b"not one")
    with pytest.raises(Refusal, match="cannot be read as safetensors"):
        audit.main(["energy", student, "--teacher", teacher])


def test_the_neurons_table(capsys, tmp_path):
    """A teacher and a student that are one network: masking all that fires must hurt both, the least active neither."""
    net = random_net()
    prompts = [[i, i + 1, i + 2] for i in range(20)]
    questions = [(prompt, net(torch.tensor([prompt]))[0, -1:].argmax(-1).tolist()) for prompt in prompts]
    rows = [re.split(r"\s{2,}", line) for line in neurons.table(net, net, questions, 40, 5).splitlines()]
    assert rows[1][1:] == rows[2][1:] and rows[1][1].startswith("1.000 [0.839, 1.000]")  # Wilson: 20 of 20
    top, least = (float(cell.split()[0]) for cell in rows[1][2:4])
    assert top < least <= 1
    assert re.fullmatch(r"[01]\.\d{3} ± 0\.\d{3}", rows[1][4])
    assert neurons.wilson(torch.tensor([True] * 5 + [False] * 5)) == "0.500 [0.237, 0.763]"


def test_B43_cloze_prompts_begin_with_a_bos_where_the_tokenizer_puts_one(tmp_path):
    from tokenizer import Tokenizer
    (tmp_path / "c.jsonl").write_text('{"prompt": "import", "answer": " os"}\n\n')
    tokenizer = Tokenizer(ROOT / "tiny")
    plain = neurons.read_cloze(str(tmp_path / "c.jsonl"), tokenizer, 99)
    tokenizer.bos = 7
    assert neurons.read_cloze(str(tmp_path / "c.jsonl"), tokenizer, 99) == [([7, *prompt], answer) for prompt, answer in plain]


@pytest.mark.parametrize("line, word", [("{", "line 1"), ('{"prompt": "x"}', "line 1"), ('{"prompt": "", "answer": "x"}', "where a token ends"),
                                        ('{"prompt": "retu", "answer": "rn"}', "where a token ends"), ("", "no question")])
def test_cloze_files_are_checked(tmp_path, line, word):
    from tokenizer import Tokenizer
    (tmp_path / "c.jsonl").write_text(line + "\n" if line else "")
    with pytest.raises(Refusal, match=word):
        neurons.read_cloze(str(tmp_path / "c.jsonl"), Tokenizer(ROOT / "tiny"), 99)


PEAK = """
import resource, sys
sys.path.insert(0, {root!r})
import audit
audit.main({argv!r})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["energy", "spectrum"])
def test_a_layer_of_a_3b_teacher_needs_no_d_ff_by_d_ff_matrix(tmp_path, command):
    """11008 x 2048 (Qwen2.5-3B) in bf16 on disk; one 11008 x 11008 matrix in fp64 alone is 0.97 GB, and the libraries take 0.3."""
    shape = SHAPE | dict(model_type="qwen2", intermediate_size=11008, num_hidden_layers=1, num_attention_heads=16, head_dim=128)
    for name, width in (("teacher", 2048), ("student", 1200)):
        net = Transformer(Config.from_hf(shape | dict(hidden_size=width)))
        net.initialise(width)
        net.save_pretrained(tmp_path / name, torch.bfloat16)
        del net
    script = PEAK.format(root=str(ROOT), argv=[command, str(tmp_path / "student"), "--teacher", str(tmp_path / "teacher")])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    print(f"{command}: peak {done.stdout.splitlines()[-1]} GB")
    assert float(done.stdout.splitlines()[-1]) < 1.4
