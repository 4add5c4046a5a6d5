"""Plain Low-Rank Clone: every student weight starts as teacher weight x projection, and stays in its span.

A student matrix of plain LRC is W_T P (q, k, v, gate, up, embedding, head: the teacher's input side shrinks from H to r)
or P^T W_T (o, down: its output side does). Whatever P is trained to, the columns of W_T P stay in col(W_T). So an
orthonormal basis T of col(W_T) holds all that plain LRC can reach, and its coordinates Z are what trains:

    W = T Z^T,  T (out, k) fixed,  Z (r, k) trained,  k = rank(W_T) <= min(out, H)       (the dual for o and down, transposed)

For gate and up, T is (d_ff, H): 1 - H/d_ff of the deployed matrix can never be reached. core.py opens that rest.

The order of this file: the span (Slice), the student and its coordinates (Clone), the calibrated start (calibrate).
Sources: Low-Rank Clone, arXiv 2505.12781; Train What You Deploy, arXiv 2609.02006; method.md sections 1 and 4.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from model import Transformer

DUAL = ("o_proj.weight", "down_proj.weight")  # these write into the stream: their row space is inherited, not their column space

# ------------------------------------------------------------------------------------------- the span


def span(W: Tensor) -> Tensor:
    """Orthonormal basis T (out, k) of col(W), W (out, in), k its numerical rank: left singular vectors, largest first.

    Signs are fixed by a rule (the entry of largest magnitude is positive), so that a basis made anew is the same basis.
    Computed on the CPU: LAPACK gives the same answer whatever the accelerator.
    """
    U, S, _ = torch.linalg.svd(W.detach().cpu(), full_matrices=False)
    T = U[:, S > S[0] * max(W.shape) * torch.finfo(S.dtype).eps]
    top = T.gather(0, T.abs().argmax(0, keepdim=True))  # (1, k)
    return (T * top.sign()).to(W.device).contiguous()


class Slice(nn.Module):
    """W = T Z^T, all that plain LRC can reach; `dual` matrices are treated as their transpose."""

    def __init__(self, teacher_weight: Tensor, W: Tensor, dual: bool):
        """teacher_weight: W_T; W: the student's matrix at the start, in the span of W_T already or else projected onto it."""
        super().__init__()
        self.dual = dual
        self.register_buffer("T", span(self.flip(teacher_weight)), persistent=False)  # (out, k)
        self.Z = nn.Parameter(self.flip(W).T @ self.T)  # Z = W^T T  (r, k)

    def flip(self, W: Tensor) -> Tensor:
        return W.T if self.dual else W

    def weight(self) -> Tensor:
        """The deployed matrix, W = T Z^T."""
        return self.flip(self.T @ self.Z.T)

    def pull_back(self, G: Tensor) -> None:
        """G = dL/dW  ->  dL/dZ = G^T T."""
        self.Z.grad = self.flip(G).T @ self.T


# ------------------------------------------------------------------------------------------ the clone


class Clone:
    """A student network and the coordinates that train it. Not a network itself: the network that runs is the student.

        clone.deploy()       coordinates -> the student's weights, once before the micro-batches of a step
        loss.backward()      gradients gather on the student's weights
        clone.pull_back()    gradients of the weights -> gradients of the coordinates, once after them

    A weight without a map (a norm gain, or the MLP of mode `dense`) is its own coordinate: the student's parameter trains.
    `frame` F (H, r) says where the student's stream lives in the teacher's: h_S ~ h_T F.
    """

    def __init__(self, student: Transformer, maps: dict[str, nn.Module] | None = None, frame: Tensor | None = None):
        self.student, self.maps, self.frame = student, maps or {}, frame
        self.weights = dict(student.named_parameters())  # a tied pair appears once
        self.deploy()

    def coordinates(self) -> dict[str, nn.Parameter]:
        """What trains, by name: `layers.0.mlp.up_proj.weight.Z` where a map stands between, else the weight's own name."""
        own = {name: w for name, w in self.weights.items() if name not in self.maps and w.requires_grad}
        return own | {f"{name}.{c}": p for name, m in self.maps.items() for c, p in m.named_parameters()}

    @torch.no_grad()
    def deploy(self) -> None:
        for name, m in self.maps.items():
            self.weights[name].copy_(m.weight())

    @torch.no_grad()
    def pull_back(self) -> None:
        for name, m in self.maps.items():
            m.pull_back(self.weights[name].grad)

    def zero_grad(self) -> None:
        self.student.zero_grad(set_to_none=True)
        for m in self.maps.values():
            m.zero_grad(set_to_none=True)


def slices(t,s):...
def blank_student():...
def calibrate():...
