"""engines.py, the tool that compares engines: it sees a wrong token, a wrong id and an engine that fails."""
import sys
from pathlib import Path

import pytest
import torch

import engines
from model import Transformer
from tokenizer import Tokenizer

TINY = Path(__file__).resolve().parent.parent / "tiny"


@pytest.mark.slow
def test_transformers_gives_our_tokens_and_ids():
    assert engines.compare(TINY, ["transformers"], sys.executable, 16)


def test_what_differs_is_named(monkeypatch, capsys):
    net, tokenizer = Transformer.from_pretrained(TINY), Tokenizer(TINY)
    monkeypatch.setattr(engines, "PROMPTS", ["import os\n"])
    monkeypatch.setattr(engines, "TEXTS", ["a b", "c"])
    prompt = tokenizer.encode("import os\n")
    whole = net.generate(torch.tensor([prompt]), 3)
    made, z = whole[0, len(prompt):].tolist(), net(whole)[0, len(prompt) - 1:-1].detach()
    right = dict(version="0", made=[made], logp=[[row.log_softmax(-1)[i].item() for row, i in zip(z, made)]], ids=[tokenizer.encode(t) for t in ("a b", "c")])

    def verdict(**changes):
        monkeypatch.setattr(engines, "ask", lambda *_: right | changes)
        return engines.compare(TINY, ["transformers"], sys.executable, 3), capsys.readouterr().out
    fine, text = verdict()
    assert fine and "same tokens 1/1" in text and "same ids 2/2" in text
    other = z[1].topk(2).indices[1].item()  # the runner-up in the place of the second token
    fine, text = verdict(made=[[made[0], other, made[2]]])
    assert not fine and f"prompt 0, token 1: {other}, ours {made[1]}; in our logits {z[1].max() - z[1, other]:.1e} apart" in text
    fine, text = verdict(ids=[tokenizer.encode("a b"), [7]])
    assert not fine and "'c': ids [7]" in text and "same ids 1/2" in text
    fine, text = verdict(logp=[[right["logp"][0][0] + 0.25, *right["logp"][0][1:]]])
    assert fine and "log-probabilities within 2e-01" in text
    fine, text = verdict(error="ValueError: no such head")
    assert not fine and "cannot: ValueError: no such head" in text


def test_the_error_is_the_one_the_engine_raised(tmp_path):
    assert "error" in engines.ask("transformers", sys.executable, str(tmp_path / "none"), [[1]], ["a"], 1)
