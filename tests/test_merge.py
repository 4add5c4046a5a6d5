"""merge.py and the run folder it reads: what transformers loads is the student that trained, or a Refusal and the old folder."""
import json
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import checkpoints
import merge
import model
import runs
import train
from config import Config
from conftest import SHAPE, random_net
from files import Refusal
from model import Transformer
from tokenizer import Tokenizer

ROOT = Path(merge.__file__).parent
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
EXTRA = dict(hidden_act="silu", attention_dropout=0.0, bos_token_id=None, eos_token_id=0, initializer_range=0.03, torch_dtype="bfloat16")
KINDS = {  # config.json of the teacher with the keys of transformers 4, width and mode of the student
    "tied": (SHAPE | EXTRA | dict(vocab_size=2048, rope_scaling=LLAMA3), 12, "core"),
    "untied": (SHAPE | EXTRA | dict(vocab_size=2048, tie_word_embeddings=False), 8, "lrc"),
    "qwen2": ({k: v for k, v in (SHAPE | EXTRA).items() if k != "head_dim"} |
              dict(model_type="qwen2", vocab_size=2048, use_sliding_window=False), 10, "dense"),  # 10 is no multiple of 4 heads
}
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu".split()


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def snapshot(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three runs of three steps, one a kind; the untied one compiled (without a compiler behind it)."""
    home, compiled = tmp_path_factory.mktemp("runs"), torch.compile
    lines = [" ".join(WORDS[(i * k + k) % 12] for k in range(1, 12)) + ".\n\n" for i in range(400)]
    (home / "words.txt").write_text("".join(lines), encoding="utf-8")  # pieces 1 and 4 of this name are held out
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(torch, "compile", lambda net: compiled(net, backend="eager"))
        for i, (kind, (config, width, mode)) in enumerate(KINDS.items()):
            teacher = home / f"teacher-{kind}"
            random_net(i, **config | dict(head_dim=config.get("head_dim"))).save_pretrained(teacher)
            (teacher / "config.json").write_text(json.dumps(config), encoding="utf-8")
            for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                shutil.copyfile(ROOT / "tiny" / name, teacher / name)
            train.main(["--teacher", str(teacher), "--out", kind, "--width", str(width), "--mode", mode, "--data", "words.txt",
                        "--steps", "3", "--batch-size", "2", "--seq-len", "16", "--calibration-tokens", "512",
                        "--eval-tokens", "64", *["--compile"] * (kind == "untied")])
    return home


@pytest.fixture
def run(made, tmp_path):
    """A copy of the tied run that a test may damage."""
    return shutil.copytree(made / "tied", tmp_path / "run")


def trained(folder):
    """The student that trained: the weights in the checkpoint, in the network of the recorded config."""
    net = Transformer(Config.from_hf(read(folder / "config.json")["student"]))
    weights = load_file(checkpoints.newest_checkpoint(folder) / "student.safetensors")
    assert weights.keys() == dict(net.named_parameters()).keys()
    net.load_state_dict(weights, strict=False)
    return net.eval()


def edit(folder, change):
    """Change the deployed weights in the newest checkpoint."""
    file = checkpoints.newest_checkpoint(folder) / "student.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refused(call, *parts):
    with pytest.raises(Refusal) as caught:
        call()
    assert "\n" not in str(caught.value) and all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_transformers_computes_what_trained_a9_b23_b27(made, kind, tmp_path):
    student = merge.export(made / kind, tmp_path / "out")
    theirs, report = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    ids = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(3))
    ours, teacher = trained(made / kind)(ids), Transformer.from_pretrained(made / f"teacher-{kind}")(ids)
    assert (theirs(ids).logits - ours).abs().max() < 1e-5 * ours.abs().max() and (ours - teacher).abs().max() > 0.1
    assert ("lm_head.weight" in load_file(student / "model.safetensors")) == (kind == "untied")
    assert snapshot(student) == snapshot(made / kind / "student")  # what train.py exported at its end


@pytest.mark.parametrize("kind", KINDS)
def test_config_differs_in_the_documented_keys_only_a7_b28(made, kind):
    theirs, ours = read(made / f"teacher-{kind}" / "config.json"), read(made / kind / "student/config.json")
    differing = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
    derived = {"head_dim"} if kind == "qwen2" else set()
    assert differing == {"architectures", "hidden_size", "torch_dtype", "dtype", "rope_parameters"} | derived
    assert ours["hidden_size"] == KINDS[kind][1] and ours["head_dim"] == (6 if kind == "qwen2" else 8)
    assert ours["dtype"] == ours["torch_dtype"] == "float32"
    assert ours["architectures"] == ["Qwen2ForCausalLM" if kind == "qwen2" else "LlamaForCausalLM"]
    assert ours["rope_parameters"] == {"rope_theta": 10000.0} | (LLAMA3 if kind == "tied" else {"rope_type": "default"})


def test_tokenizer_generation_config_and_card(made):
    student, record = made / "tied/student", read(made / "tied/config.json")
    ours, theirs = Tokenizer(made / "teacher-tied"), AutoTokenizer.from_pretrained(student)
    for text in ("alpha beta. def f(x): return x[0]\n", "  日本 naïve\t12"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert theirs.eos_token_id == ours.separator == GenerationConfig.from_pretrained(student).eos_token_id == 0
    card = (student / "README.md").read_text(encoding="utf-8")
    rows = runs.read_metrics(made / "tied")
    step, held = (next(r for r in reversed(rows) if key in r) for key in ("loss", "val_ce"))
    losses = [f"{n} {step[n]:.4f}" for n in ("loss", "kl", "ce", "align")] + [f"{n} {held[n]:.4f}" for n in ("val_ce", "val_kl", "val_top1")]
    for part in ("| mode | core |", "| tokens | 96 |", "| steps | 3 |", "| width | 12 |", record["teacher"], record["data"]["fingerprint"], *losses):
        assert part in card, part
    assert step["step"] == held["step"] == 3 and card.startswith("---\n")


def test_card_warns_of_engines_that_derive_head_dim_b29(made):
    assert {kind: "--model-impl transformers" in (made / kind / "student/README.md").read_text(encoding="utf-8") for kind in KINDS} == {
        "tied": False, "untied": False, "qwen2": True}


def test_card_names_a_local_teacher(made):
    assert "teacher-tied" in (made / "tied/student/README.md").read_text(encoding="utf-8")


def test_bfloat16_is_one_final_cast_b23(made, tmp_path):
    out = merge.export(made / "untied", tmp_path / "bf16", torch.bfloat16)
    weights, exported = trained(made / "untied").state_dict(), load_file(out / "model.safetensors")
    assert exported.keys() == {name if "lm_head" in name else f"model.{name}" for name in weights}
    assert all(torch.equal(w, weights[name.removeprefix("model.")].bfloat16()) for name, w in exported.items())
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_A9_export_again_is_a_no_op(run):
    before = snapshot(run)
    assert merge.export(run) == run / "student" and snapshot(run) == before
    shutil.rmtree(run / "student")
    assert merge.export(run) == run / "student" and snapshot(run) == before


@pytest.mark.parametrize("change, named", [
    (lambda t: t.pop("norm.weight"), ("norm.weight", "missing")),
    (lambda t: t.update({"layers.9.mlp.up_proj.weight": torch.ones(2)}), ("layers.9.mlp.up_proj.weight",)),
    (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(60, 11)}), ("layers.1.mlp.up_proj.weight", "(60, 11)", "(60, 12)")),
    (lambda t: t["layers.0.self_attn.k_proj.weight"].__setitem__((3, 2), float("nan")), ("layers.0.self_attn.k_proj.weight", "NaN"))])
def test_B9_a_bad_tensor_is_named_and_the_old_student_stands(run, change, named):
    edit(run, change)
    before = snapshot(run)
    refused(lambda: merge.export(run), *named)
    assert snapshot(run) == before


@pytest.mark.parametrize("before", ["old student", "nothing"])
@pytest.mark.parametrize("broken", ["save_file", "copyfile", "rename"])
def test_an_interrupted_write_leaves_no_half_folder(run, monkeypatch, broken, before):
    def fail(*args, **kwargs):
        raise OSError("disk full")
    if before == "nothing":
        shutil.rmtree(run / "student")
    files = snapshot(run)
    place = {"save_file": model, "copyfile": merge.shutil, "rename": merge.os}[broken]
    monkeypatch.setattr(place, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        merge.export(run)
    assert snapshot(run) == files and not list(run.glob("*.tmp")) and (run / "student").exists() == (before == "old student")


@pytest.mark.parametrize("what", ["notes", "run", "another project", "file"])
def test_out_never_replaces_what_is_no_student(run, tmp_path, what):
    out = run if what == "run" else tmp_path / "out"
    if what == "file":
        out.write_text("mine", encoding="utf-8")
    elif what != "run":
        out.mkdir()
        (out / ("config.json" if what == "another project" else "notes.txt")).write_text('{"name": "mine"}', encoding="utf-8")
    before = snapshot(tmp_path)
    refused(lambda: merge.export(run, out), str(out))
    assert snapshot(tmp_path) == before and not list(tmp_path.glob("*.tmp"))


def test_out_may_be_empty_or_an_older_student(run, tmp_path):
    (tmp_path / "out").mkdir()
    first = snapshot(merge.export(run, tmp_path / "out"))
    edit(run, lambda t: t["norm.weight"].mul_(2))
    (tmp_path / "out/stale.txt").write_text("", encoding="utf-8")
    second = snapshot(merge.export(run, tmp_path / "out"))
    assert first.keys() == second.keys() and first["model.safetensors"] != second["model.safetensors"]


def test_command_on_a_folder_that_is_no_run(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "merge.py", tmp_path], capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and str(tmp_path) in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("damage", [
    lambda run: shutil.rmtree(run / "checkpoint"),
    lambda run: (run / "config.json").write_text("{", encoding="utf-8"),
    lambda run: (checkpoints.newest_checkpoint(run) / "student.safetensors").write_bytes(b"\x10"),
    lambda run: (checkpoints.newest_checkpoint(run) / "state.json").unlink()])
def test_command_on_a_damaged_run(run, monkeypatch, damage):
    damage(run)
    before = snapshot(run)
    monkeypatch.setattr(sys, "argv", ["merge.py", str(run)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "merge.py"), run_name="__main__")
    text = caught.value.code  # a string: Python prints it and exits with 1
    assert text.startswith("error: ") and str(run) in text and "\n" not in text and snapshot(run) == before


def test_a_run_holds_no_wrapper_names_and_no_pickle_a11_b37(made, run, tmp_path):
    for kind in KINDS:
        files = [p for p in (made / kind).rglob("*") if p.is_file()]
        assert {p.suffix for p in files if p.name != ".lock"} == {".safetensors", ".json", ".jsonl", ".png", ".md"}
        names = [name for p in files if p.suffix == ".safetensors" for name in load_file(p)]
        assert len(names) > 100 and not [name for name in names if re.search(r"_orig_mod|(^|[./])module\.", name)]
    assert (made / "untied/config.json").read_text(encoding="utf-8").count('"compile": true') == 1

    class Touch:
        def __reduce__(self):
            return Path.touch, (tmp_path / "touched",)
    (checkpoints.newest_checkpoint(run) / "student.safetensors").write_bytes(pickle.dumps(Touch()))
    refused(lambda: merge.export(run), "checkpoint")
    assert not (tmp_path / "touched").exists()


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["merge.py", *map(str, words)])
    runpy.run_path(str(ROOT / "merge.py"), run_name="__main__")


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_of_a_run_and_of_its_student_is_what_trained(made, kind, tmp_path):
    """Bit for bit in the matrices that llama.cpp takes as they are; test_to_gguf.py looks at every one."""
    of_run, of_folder = merge.export_gguf(made / kind, tmp_path / "student.gguf"), merge.export_gguf(made / kind / "student")
    assert of_folder == made / kind / "student.gguf" and of_folder.read_bytes() == of_run.read_bytes()
    of_folder.unlink()
    weights, reader = trained(made / kind).state_dict(), GGUFReader(of_run)
    found = {t.name: torch.from_numpy(t.data.copy()) for t in reader.tensors}
    assert torch.equal(found["token_embd.weight"], weights["embed_tokens.weight"]) and ("output.weight" in found) == (kind == "untied")
    assert torch.equal(found["blk.1.ffn_down.weight"], weights["layers.1.mlp.down_proj.weight"])
    assert ("blk.0.attn_v.bias" in found) == (kind == "qwen2") and ("rope_freqs.weight" in found) == (kind == "tied")


def test_gguf_command_writes_beside_the_student_in_a_folder_or_where_it_is_told(run, tmp_path, monkeypatch, capsys):
    command(monkeypatch, run, "--gguf")
    command(monkeypatch, run, "--gguf", "--out", tmp_path, "--dtype", "float16")
    command(monkeypatch, run / "student", "--gguf", "--out", tmp_path / "b.gguf", "--dtype", "bfloat16")
    files = [run / "student.gguf", tmp_path / "student.gguf", tmp_path / "b.gguf"]
    assert capsys.readouterr().out.split() == [str(f) for f in files]
    assert [GGUFReader(f).fields["general.file_type"].contents() for f in files] == [0, 1, 32] and not list(tmp_path.rglob("*.tmp"))
    before = files[0].read_bytes()
    command(monkeypatch, run, "--gguf")
    assert files[0].read_bytes() == before


def test_gguf_never_replaces_another_file_and_fp16_is_for_gguf_alone(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    refused(lambda: merge.export_gguf(run, tmp_path / "notes.txt"), str(tmp_path / "notes.txt"), "no GGUF file")
    refused(lambda: merge.export_gguf(tmp_path), str(tmp_path), "no tokenizer folder")
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"
    with pytest.raises(SystemExit) as caught:
        command(monkeypatch, run, "--dtype", "float16")
    assert caught.value.code == 2 and "--gguf" in capsys.readouterr().err
