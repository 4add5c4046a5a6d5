"""Shared by all tests: small random teachers, one thread, no hub.

A number such as A7 or B25 in the name of a test stands for a known failure of this trade, from a log of public bug reports.
"""
import json
import os
import shutil
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch

import data
import runs
import train
from config import Config
from model import Transformer
from shards import held_out

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)  # small matrices: threads only get in each other's way, and sums keep one order

SHAPE = dict(model_type="llama", vocab_size=96, hidden_size=24, intermediate_size=60, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=128,
             tie_word_embeddings=True)


def random_net(seed: int = 0, scale: float = 0.2, **changes) -> Transformer:
    """A random network of SHAPE with `changes`; gains and biases random too, so that no term hides behind a one or a zero."""
    net = Transformer(Config.from_hf(SHAPE | changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * scale + ("norm" in name))
    return net.eval()


@pytest.fixture(autouse=True)
def seeded():
    """A test that draws without a generator of its own draws the same numbers in every run, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(params=["llama-tied", "llama-untied", "qwen2-untied"])
def teacher(request) -> Transformer:
    kind, tie = request.param.split("-")
    return random_net(model_type=kind, tie_word_embeddings=tie == "tied").requires_grad_(False)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 96, (12, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """A random 2-layer Llama with tiny's tokenizer, and a text for it."""
    folder = tmp_path_factory.mktemp("teacher")
    random_net(vocab_size=2048).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ROOT / "tiny" / name, folder / name)
    (folder / "text.jsonl").write_text("".join(json.dumps({"id": f"d{i}", "text": f"def f{i}(x):\n    return x * {i} + {i * i}\n" * 4}) + "\n" for i in range(200)))
    return folder


@pytest.fixture(scope="module")
def little(teacher_folder, tmp_path_factory):
    """The teacher with a text so short that 6 steps on one rank go through it more than twice; chats; and a mixture of two texts."""
    folder = tmp_path_factory.mktemp("little")
    for file in teacher_folder.iterdir():
        if file.name != "text.jsonl":
            shutil.copy(file, folder)
    rows = [json.dumps({"id": f"d{i}", "text": f"def f{i}(x):\n    return x * {i}\n" * 2}) + "\n" for i in range(40)]
    seen, kept = ([row for i, row in enumerate(rows) if held_out(f"d{i}") == held] for held in (False, True))
    (folder / "text.jsonl").write_text("".join(seen[:12] + kept))
    chat = [json.dumps({"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} {i * i}"}]}) + "\n" for i in range(20)]
    (folder / "chats.jsonl").write_text("".join(chat))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    for name, part in (("a", seen[:6] + kept), ("b", seen[6:] + kept)):
        (folder / f"{name}.jsonl").write_text("".join(part))
        data.main(["prepare", str(folder / f"{name}.jsonl"), "--tokenizer", str(folder), "--out", str(folder / name)])
    return folder


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """In a folder of its own: what a command leaves behind stays there."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bare(monkeypatch):
    """A run without its curves and samples."""
    monkeypatch.setattr(runs, "draw_curves", lambda run: None)
    monkeypatch.setattr(train, "sample", lambda *args: "")


@pytest.fixture(scope="session")
def cache():
    """Where downloads are kept."""
    folder = Path(os.environ.get("LRC_TEST_CACHE", Path.home() / ".cache" / "lrc-tests"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
