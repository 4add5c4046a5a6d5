"""Plain Low-Rank Clone: every student weight starts as teacher weight x projection, and stays in its span.

A student matrix of plain LRC is W_T P (q, k, v, gate, up, embedding, head: the teacher's input side shrinks from H to r)
or P^T W_T (o, down: its output side does). Whatever P is trained to, the columns of W_T P stay in col(W_T). So an
orthonormal basis T of col(W_T) holds all that plain LRC can reach, and its coordinates Z are what trains:

    W = T Z^T,  T (out, k) fixed,  Z (r, k) trained,  k = rank(W_T) <= min(out, H)       (the dual for o and down, transposed)

For gate and up, T is (d_ff, H): 1 - H/d_ff of the deployed matrix can never be reached. core.py opens that rest. Where out <= H
(k, v, mostly q and o) T is square, so nothing is out of reach and Z only turns the coordinates.

LRC's own code trains P. Z reaches the same matrices with an orthonormal T in between, so that a step in Z is a step of the same
size in W; AdamW takes another path in it, and there are fewer numbers (for k_proj r * m*d, not r * H). `--coordinates teacher`
trains P: the same equation with W_T itself in the place of T, and P^T in that of Z.

The order of this file: the span (Plain), the student and its coordinates (Clone). What a student starts from is in starts.py.
Sources: Low-Rank Clone, arXiv 2505.12781; Train What You Deploy, arXiv 2609.02006.
"""
from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from model import Transformer, widen

DUAL = ("o_proj.weight", "down_proj.weight")  # these write into the stream: their row space is inherited, not their column space

# ------------------------------------------------------------------------------------------- the span


def span(W: Tensor) -> Tensor:
    """Orthonormal basis T (out, k) of col(W), W (out, in), k its numerical rank: left singular vectors, largest first.

    W^T W = V S^2 V^T gives T = W V S^-1: an eigenproblem of the teacher's width instead of an SVD of d_ff rows. In fp64 it resolves
    singular values down to 1e-6 of the largest; what lies below is taken for rounding (fp32's own: below 1e-7). Signs follow a rule,
    so that a basis made anew is the same basis.
    """
    W, dtype = W.detach().double(), W.dtype
    wide = W.shape[0] <= W.shape[1]  # then the left singular vectors are the eigenvectors of W W^T themselves
    S2, V = torch.linalg.eigh(W @ W.T if wide else W.T @ W)  # ascending
    S2, V = S2.flip(0), V.flip(1)
    kept = S2 > 1e-12 * S2[:1]
    S2, V = S2[kept], V[:, kept]  # (k,), (in, k)
    T = V if wide else W @ V / S2.sqrt()
    # the columns are orthonormal to 1e-16 S2[0] / S2[-1]: mend what an fp32 basis would show
    if not wide and (S2[:1] > 1e6 * S2[-1:]).any():
        T = torch.linalg.solve_triangular(torch.linalg.cholesky(T.T @ T).T, T, upper=True, left=False)
    return fix_signs(T).to(dtype).contiguous()


def fix_signs(vectors: Tensor) -> Tensor:
    """Columns (n, k) turned so that the entry of largest magnitude in each is positive."""
    return vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()


class Plain(nn.Module):
    """W = T Z^T, all that plain LRC can reach; `dual` matrices are treated as their transpose."""

    def __init__(self, teacher_weight: Tensor, W: Tensor, dual: bool, coordinates: str = "span"):
        """teacher_weight: W_T; W: the student's matrix at the start, in the span of W_T already or else projected onto it.
        coordinates: "span", or "teacher" for T = W_T and Z = P^T, so that W = W_T P."""
        super().__init__()
        self.dual = dual
        W_T, W = self.flip(teacher_weight).detach(), self.flip(W)
        self.register_buffer("T", span(W_T) if coordinates == "span" else W_T.contiguous(), persistent=False)  # (out, k)
        if coordinates == "span":
            Z = W.T @ self.T  # T^T T = 1
        else:  # the shortest P of those that give W: (W_T^T W_T)^+ W_T^T W
            A = W_T.double()
            P = torch.linalg.pinv(A.T @ A, rtol=1e-12, hermitian=True) @ (A.T @ W.double())  # (H, r)
            Z = P.T.to(W.dtype).contiguous()  # fused AdamW reads memory, not strides
        self.Z = nn.Parameter(Z)  # (r, k)

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
    `owner`: weight -> the rank that alone holds its map and trains it, where ranks share them out (optimizer.py); then deploy is
    called by all.
    """

    def __init__(self, student: Transformer, maps: dict[str, nn.Module] | None = None, frame: Tensor | None = None,
                 owner: dict[str, int] | None = None):
        self.student, self.maps, self.frame, self.owner = student, maps or {}, frame, owner
        self.weights = dict(student.named_parameters())  # a tied pair appears once
        self.deploy()

    def coordinates(self) -> dict[str, nn.Parameter]:
        """What trains (on this rank), by name: `layers.0.mlp.up_proj.weight.Z` where a map stands between, else the weight's own name."""
        own = {name: w for name, w in self.weights.items() if name not in self.maps and w.requires_grad and of_this_rank(name, self.owner)}
        return own | {f"{name}.{c}": p for name, m in self.maps.items() for c, p in m.named_parameters()}

    @functools.cached_property
    def order(self) -> list[str]:
        """The names of all ranks' coordinates, in the order in which one rank alone would have them. Asked for first by all ranks, once
        the maps are made."""
        weights = list(self.weights)
        names = [name for theirs in of_all_ranks(list(self.coordinates())) for name in theirs]

        def place(name: str) -> tuple[bool, int]:
            own = name in self.weights  # else a map's: the weight's name, and .Z or .Zc
            return not own, weights.index(name if own else name.rpartition(".")[0])
        return sorted(names, key=place)

    @torch.no_grad()
    def deploy(self) -> None:
        for name, m in self.maps.items():
            self.weights[name].copy_(m.weight())
        for name, rank in (self.owner or {}).items():
            dist.broadcast(self.weights[name], rank)

    @torch.no_grad()
    def pull_back(self) -> None:
        for name, m in self.maps.items():
            m.pull_back(self.weights[name].grad)

    def zero_grad(self) -> None:
        self.student.zero_grad(set_to_none=True)
        for m in self.maps.values():
            m.zero_grad(set_to_none=True)


def of_this_rank(name: str, owner: dict[str, int] | None) -> bool:
    return owner is None or owner[name] == dist.get_rank()


def of_all_ranks(thing) -> list:
    """What each rank has of a small thing, by rank. Called by all."""
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, thing)
    return told


def blank_student(teacher: Transformer, width: int) -> Transformer:
    """The student's network: q/k/v biases inherited and frozen (they live in head space), gains 1, matrices 0 until calibrated."""
    with torch.device("meta"):
        student = Transformer(teacher.config.at_width(width))
    student.to_empty(device=teacher.lm_head.weight.device).tie()
    biases = {name: b for name, b in teacher.named_parameters() if name.endswith(".bias")}
    with torch.no_grad():
        for name, p in student.named_parameters():
            if name in biases:
                p.copy_(biases[name])
            else:
                p.fill_(1.0 if p.dim() == 1 else 0.0)
            p.requires_grad_(name not in biases)
    return student.eval()


def plain_maps(teacher: Transformer, student: Transformer, coordinates: str = "span", opened: tuple[str, ...] = (),
               owner: dict[str, int] | None = None) -> dict[str, Plain]:
    """A Plain map for each of the seven matrices a layer, the embedding and an untied head, or with an `owner` for those of this rank; norm
    gains train as they are. Names that end in `opened` get span coordinates in any case: core.py builds on their T."""
    theirs = dict(teacher.named_parameters())
    return {name: Plain(widen(theirs[name]), w, name.endswith(DUAL), "span" if name.endswith(opened) else coordinates)
            for name, w in student.named_parameters() if w.dim() == 2 and of_this_rank(name, owner)}
