"""The neuron-masking experiment: the student shares the teacher's d_ff indices, so do the teacher's fact neurons carry the student's facts?

Silence the neurons that fire most in the *teacher* on factual questions, at the same (layer, index) in both models, and see what is
forgotten; random and least active sets are the controls. The command is `python audit.py neurons`.
Source: Low-Rank Clone, arXiv 2505.12781, which defines neither scope nor score: table() says what is meant here.
"""
from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from files import Refusal
from model import Transformer
from tokenizer import Tokenizer


def read_cloze(path: str, tokenizer: Tokenizer, positions: int) -> list[tuple[list[int], list[int]]]:
    """{"prompt": ..., "answer": ...} a line -> token ids of both; a BOS first where the tokenizer's own post-processor puts one."""
    questions, bos = [], [tokenizer.bos] * (tokenizer.bos is not None)
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, whole = (tokenizer.encode(text) for text in (row["prompt"], row["prompt"] + row["answer"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Refusal(f'{path}, line {number}: write {{"prompt": "The capital of France is", "answer": " Paris"}}') from None
        if not prompt or whole[:len(prompt)] != prompt or len(whole) == len(prompt):
            raise Refusal(f"{path}, line {number}: the prompt must end where a token ends (give the answer its leading space)")
        if len(bos + whole) > positions:
            raise Refusal(f"{path}, line {number}: {len(bos + whole)} tokens, the model has {positions} positions")
        questions.append((bos + prompt, whole[len(prompt):]))
    if not questions:
        raise Refusal(f"{path}: no question in it")
    return questions


@torch.no_grad()
def answers(net: Transformer, questions) -> Tensor:
    """Right or wrong (n,) bool: every token of the answer is the network's first choice."""
    right = []
    for prompt, answer in questions:
        z = net(torch.tensor([prompt + answer[:-1]]))[0, len(prompt) - 1:]  # (len(answer), V)
        right.append(z.argmax(-1).tolist() == answer)
    return torch.tensor(right)


@torch.no_grad()
def activity(net: Transformer, questions) -> Tensor:
    """(layers, d_ff): mean |silu(gate) * up| at the last token of the prompts, where the answer is about to be said."""
    total = 0.0
    for prompt, _ in questions:
        _, taps = net(torch.tensor([prompt]), taps=True, head=False)
        total = total + torch.stack([(F.silu(tap["gate"][0, -1]) * tap["up"][0, -1]).abs() for tap in taps])
    return total / len(questions)


@torch.no_grad()
def masked(net: Transformer, questions, silent: Tensor) -> Tensor:
    """answers() with these neurons (flat indices into (layers, d_ff)) silenced: their columns of down_proj at 0."""
    layers, columns = silent // net.config.intermediate_size, silent % net.config.intermediate_size
    kept = {}
    for layer in layers.unique().tolist():
        w = net.layers[layer].mlp.down_proj.weight
        kept[layer] = w.clone()
        w[:, columns[layers == layer]] = 0
    right = answers(net, questions)
    for layer, w in kept.items():
        net.layers[layer].mlp.down_proj.weight.copy_(w)
    return right


def wilson(right: Tensor) -> str:
    """Share right and its 95 % interval (Wilson's score)."""
    n, p, z = len(right), right.double().mean().item(), 1.96
    middle, half = (p + z * z / (2 * n)) / (1 + z * z / n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return f"{p:.3f} [{max(0.0, middle - half):.3f}, {min(1.0, middle + half):.3f}]"


def table(teacher: Transformer, student: Transformer, questions, k: int, draws: int, seed: int = 0) -> str:
    """The table of the masking experiment. The sources define neither scope nor score; here:

    neurons are ranked over the whole network by their mean activity in the *teacher* on all questions; masked at the same (layer, index) in
    both models; score: share of questions whose whole answer is the first choice, token by token. Random sets: `draws` of them, from all
    neurons outside the top k, mean ± standard deviation over draws.
    """
    order = activity(teacher, questions).flatten().argsort(descending=True)
    generator = torch.Generator().manual_seed(seed)
    sets = [order[k:][torch.randperm(len(order) - k, generator=generator)[:k]] for _ in range(draws)]
    text = [f"{'':<10}{'unmasked':>24}{f'top {k}':>24}{f'least active {k}':>24}{f'random {k}, {draws} draws':>28}"]
    for who, net in (("teacher", teacher), ("student", student)):
        shares = torch.stack([masked(net, questions, chosen).double().mean() for chosen in sets])
        cells = [wilson(answers(net, questions)), wilson(masked(net, questions, order[:k])), wilson(masked(net, questions, order[-k:]))]
        text.append(f"{who:<10}" + "".join(f"{cell:>24}" for cell in cells) + f"{shares.mean():>18.3f} ± {shares.std():.3f}")
    return "\n".join(text)
