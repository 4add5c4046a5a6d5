"""Shared by all tests: small random teachers, one thread, no hub.

A number such as A7 or B25 in the name of a test stands for a known failure of this trade, from a log of public bug reports.
"""
import os

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch

from model import Config, Transformer

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


@pytest.fixture(params=["llama-tied", "llama-untied", "qwen2-untied"])
def teacher(request) -> Transformer:
    kind, tie = request.param.split("-")
    return random_net(model_type=kind, tie_word_embeddings=tie == "tied").requires_grad_(False)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 96, (12, 32), generator=torch.Generator().manual_seed(1))
