"""What training reached: how much of each deployed MLP matrix lies outside the teacher's span.

    python audit.py energy STUDENT --teacher TEACHER        # folders; the student a merged one, no coordinates needed

    energy = |W - T T^T W|^2 / |W|^2        T an orthonormal basis of col(W_T); for down of the row space

0 for plain LRC, up to rounding, whatever it was trained on. Source: Train What You Deploy, arXiv 2609.02006.
"""
from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from core import MLP
from lrc import DUAL, span
from model import Transformer
from teachers import Refusal


def outside(W_T: Tensor, W: Tensor) -> float:
    """Share of the energy of W (out, r) outside col(W_T), W_T (out, H). In fp64, without a matrix of out x out."""
    T, W = span(W_T.double()), W.double()
    whole = W.pow(2).sum()
    return float((W - T @ (T.T @ W)).pow(2).sum() / whole) if whole > 0 else 0.0


@torch.no_grad()
def energy(teacher: Transformer, student: Transformer) -> dict[str, list[float]]:
    """{"gate": share of each layer, "up": ..., "down": ...}."""
    if len(teacher.layers) != len(student.layers) or teacher.config.intermediate_size != student.config.intermediate_size:
        raise Refusal(f"the student has {len(student.layers)} layers of d_ff {student.config.intermediate_size}, the teacher {len(teacher.layers)} of "
                      f"{teacher.config.intermediate_size}: not a student of this teacher")
    shares = {}
    for kind in MLP:
        pairs = [[block.mlp.get_parameter(kind) for block in net.layers] for net in (teacher, student)]
        turn = (lambda w: w.T) if kind in DUAL else (lambda w: w)
        shares[kind.partition("_")[0]] = [outside(turn(theirs), turn(ours)) for theirs, ours in zip(*pairs)]
    return shares


def table(shares: dict[str, list[float]]) -> str:
    rows = [[f"{layer}", *(f"{100 * share:.2f}" for share in layers)] for layer, layers in enumerate(zip(*shares.values()))]
    rows.append(["mean", *(f"{100 * sum(layers) / len(layers):.2f}" for layers in shares.values())])
    return "\n".join(f"{row[0]:<8}" + "".join(f"{cell:>8}" for cell in row[1:]) for row in [["layer", *(f"{k}, %" for k in shares)], *rows])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["energy"])
    parser.add_argument("student", help="folder of a merged student")
    parser.add_argument("--teacher", default="tiny", help="preset, hub id or folder (default: tiny)")
    args = parser.parse_args()
    try:
        print(table(energy(*(Transformer.from_pretrained(source) for source in (args.teacher, args.student)))))
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
