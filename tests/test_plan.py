"""plan.py: published figures from the presets alone, and every number against the tensors of a real clone."""
import json
import re
import socket

import pytest
import torch

import core
import plan
import train
from conftest import SHAPE, random_net
from model import Config
from teachers import Refusal


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a plan needs no network")
    for name in ("create_connection", "getaddrinfo", "socket"):
        monkeypatch.setattr(socket, name, refuse)


def planned(capsys, *flags):
    train.main(["--plan", *flags])
    return capsys.readouterr().out


def row(text, group):
    """The three numbers of one line of the table."""
    return re.search(rf"^{group} +(\S+) +(\S+) +(\S+)$", text, re.M).groups()


@pytest.mark.parametrize("preset, unreachable, deployed, mlp", [
    ("llama3.2-3b", "62.5%", "1.606B", ("1.057B", "0.396B", "1.057B")),
    ("llama3.1-8b", "71.4%", "3.011B", ("2.114B", "0.604B", "2.114B")),
    ("qwen2.5-3b", "81.4%", "1.808B", ("1.427B", "0.265B", "1.427B"))])
def test_published_figures(capsys, preset, unreachable, deployed, mlp):
    text = planned(capsys, "--teacher", preset, "--mode", "core", "--batch-size", "3", "--seq-len", "2048", "--accum", "8", "--steps", "203451")
    assert row(text, "mlp") == mlp and row(text, "total")[0] == deployed and f"{deployed} deployed, mode core" in text
    assert f"unreachable for plain LRC: {unreachable} of" in text and "for core: 0.0%" in text
    assert "= 49,152 a step" in text and "= 10.000B" in text
    plain = planned(capsys, "--teacher", preset, "--mode", "lrc")
    assert row(plain, "mlp") == (mlp[0], mlp[1], mlp[1]) and f"for lrc: {unreachable}" in plain
    for mode, left in (("slice", unreachable), ("random", "0.0%"), ("dense", "0.0%"), ("scratch", "0.0%")):
        other = planned(capsys, "--teacher", preset, "--mode", mode)
        assert row(other, "mlp") == mlp and f"for {mode}: {left}" in other
        assert (row(other, "total")[2] == deployed) == (mode == "scratch")


def size(tensors, item=None):
    return sum(t.numel() * (item or t.element_size()) for t in tensors)


@pytest.mark.parametrize("mode, coordinates", [*((mode, "span") for mode in core.MODES), ("lrc", "teacher"), ("dense", "teacher"), ("slice", "teacher"),
                                               ("scratch", "span")])
@pytest.mark.parametrize("d_ff", [60, 20])  # 20: the MLP narrower than the stream, a span of all d_ff dimensions
def test_numbers_and_memory_are_those_of_a_clone(teacher, mode, coordinates, d_ff, ids):
    teacher = random_net(**teacher.config.raw | dict(intermediate_size=d_ff)).requires_grad_(False)
    place = train.Place(torch.device("cpu"), 0, 1, None)
    clone = train.build(train.Args(mode=mode, coordinates=coordinates, width=12), None, teacher, teacher.config, None, place)
    deployed, trained = dict(clone.student.named_parameters()), clone.coordinates()
    total = plan.numbers(teacher.config, 12, mode, coordinates)
    kinds = {"attention": r"self_attn.*proj\.weight", "mlp": r"mlp\.", "embedding, head": "embed|lm_head", "norm gains": "norm",
             "q/k/v bias (inherited)": "bias", "total": ""}
    for group, pattern in kinds.items():
        real = {k: size((p for n, p in named.items() if re.search(pattern, n)), 1) for k, named in (("deployed", deployed), ("trained", trained))}
        assert total.get(group, dict(deployed=0, trained=0)) == real, group

    optimizer = train.make_optimizer(clone, 1e-4)
    clone.student(ids).square().sum().backward()
    clone.pull_back()
    owned = {id(p): p for p in [*deployed.values(), *trained.values()]}.values()
    real = {
        "teacher (bf16)": size(teacher.parameters(), 2), "student": size(deployed.values()),
        "coordinates": size(p for m in clone.maps.values() for p in m.parameters()),
        "gradients": size(p.grad for p in owned if p.grad is not None),
        "optimizer (AdamW)": size(t for state in optimizer.state.values() for name, t in state.items() if name != "step"),
        "bases T, C": size(b for m in clone.maps.values() for b in m.buffers())}
    assert plan.memory(teacher.config, 12, mode, coordinates) == {part: bytes for part, bytes in real.items() if bytes}


@pytest.mark.parametrize("tied", [True, False])
def test_pretraining_trains_every_weight(capsys, tmp_path, tied):
    shape = dict(SHAPE, tie_word_embeddings=tied)
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    text = planned(capsys, "--stage", "pretrain", "--teacher", str(tmp_path))
    whole = plan.count(sum(p.numel() for p in random_net(**shape).parameters()))
    assert row(text, "total")[::2] == (whole, whole)


@pytest.mark.parametrize("flags", [["--plan"], []])
def test_a6_a_width_nothing_could_load_is_refused_first(tmp_path, flags):
    shape = dict(SHAPE, hidden_size=64, head_dim=16)
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")  # no weights, no tokenizer: refused before either
    for width, parts in ((50, ("--width 50", "48", "52", "4 heads")), (65, ("1 to 64",)), (-4, ("--width -4",))):
        with pytest.raises(Refusal) as caught:
            train.main([*flags, "--teacher", str(tmp_path), "--width", str(width)])
        assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)
    for near in (48, 52, 64):
        plan.check_width(Config.from_hf(shape), near)


def test_a6_qwen2_takes_any_width(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(SHAPE, model_type="qwen2", hidden_size=64, head_dim=16)), encoding="utf-8")
    assert "student   r 50," in planned(capsys, "--teacher", str(tmp_path), "--width", "50")
