"""Opening the MLP: train what you deploy.

Plain LRC deploys gate, up (d_ff, r) and down (r, d_ff) whole but trains them only inside the teacher's span, T Z^T.
The modes here start from that same merged matrix; three of them let training leave the span, one is their control:

    mode     deployed matrix W            trains                           reaches
    lrc      T Z^T                        Z (r, H)                         col(T) only
    dense    W                            W (d_ff, r)                      everything
    core     T Z^T + U_perp Zc^T          Z (r, H) and Zc (r, d_ff - H)    everything, in the teacher's own frame
    random   T Z^T + R Zc^T               the same numbers                 everything, in a frame of no meaning
    slice    T Z^T + T A Zc^T             the same numbers                 col(T) only: core's budget without core's reach

Zc starts at 0, so that at step 0 the five students are one function; all merge to one matrix of the plain shape. `core` is `dense`
with AdamW run in the frame [T U_perp]: an orthogonal change of coordinates reaches the same matrices, but AdamW scales each
coordinate by its own history, so it takes another path. Attention, embedding and head stay as lrc.py made them.
Opened holds the frame as matrices, to be read; Implicit is `core` in the same frame for teachers whose U_perp is too large to hold.
Source: Train What You Deploy, arXiv 2609.02006.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from lrc import Clone, Plain
from model import Transformer, widen

MODES = ("lrc", "dense", "core", "random", "slice")
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def complement(T: Tensor) -> Tensor:
    """U_perp (out, out - k): an orthonormal basis of what T (out, k) misses, so that [T U_perp] is square and orthogonal.

    The complete QR factorisation of T spans the whole space, its first k columns span col(T). Inside the complement there is
    no singular-value order: any completion is as teacher-aligned as any other.
    """
    Q, _ = torch.linalg.qr(T, mode="complete")  # (out, out)
    return Q[:, T.shape[1]:].contiguous()


def directions(mode: str, T: Tensor, generator: torch.Generator) -> Tensor:
    """C (out, out - k): the fixed directions of the second path, for T (out, k). Columns have length 1 (`random`: nearly), so that a
    step in Zc is as large in W as a step in Z."""
    out, k = T.shape
    if mode == "core":
        return complement(T)
    draw = lambda rows: torch.randn(rows, out - k, generator=generator).to(T)  # on the CPU: the same on every device and rank
    if mode == "random":
        return draw(out) / out ** 0.5  # R: full rank, not orthogonalised, so that a part of it lies in col(T)
    A = draw(k)
    return T @ (A / A.norm(dim=0))  # T A, A (k, out - k) with unit columns


class Opened(Plain):
    """W = T Z^T + C Zc^T: the slice, and a second path along C that starts at zero."""

    def __init__(self, plain: Plain, C: Tensor):
        nn.Module.__init__(self)  # not Plain's: the span is there already, and finding it again costs an eigenproblem
        self.dual, self.Z = plain.dual, plain.Z
        self.register_buffer("T", plain.T, persistent=False)                # (out, k)
        self.register_buffer("C", C, persistent=False)                      # (out, out - k)
        self.Zc = nn.Parameter(self.Z.new_zeros(len(self.Z), C.shape[1]))   # (r, out - k)

    def weight(self) -> Tensor:
        return self.flip(self.T @ self.Z.T + self.C @ self.Zc.T)

    def pull_back(self, G: Tensor) -> None:
        """dL/dZ = G^T T,  dL/dZc = G^T C."""
        super().pull_back(G)
        self.Zc.grad = self.flip(G).T @ self.C


class Implicit(Plain):
    """`core` with neither T nor U_perp in memory: the same coordinates, from the teacher's own W_T and two matrices of its width.

    With T_1 (k, k) the first rows of T and T_2 the others, let B solve (1 - T_1^T) B = T_2^T. Then
        U = [B; 1] - T B
    is a complement: T^T U = T_1^T B + T_2^T - B = 0, and U^T U = B^T B + 1 - B^T B = 1. It is the very U_perp that `complement` writes
    out: only one orthogonal [T U] differs from the unit matrix by one of rank k, and the product of the k reflectors of a QR does too.
    QR turns the sign of some columns of T, which keeps 1 - T_1^T far from singular; so do we, and turn Z with them.
    """

    def __init__(self, plain: Plain, teacher_weight: Tensor):
        """teacher_weight: W_T, shared with the teacher and read at each step, so it must keep its value."""
        nn.Module.__init__(self)
        self.dual, self.Z, self.teacher_weight = plain.dual, plain.Z, (teacher_weight,)  # in a tuple, or it would count as a coordinate
        W_T, k, dtype = self.flip(teacher_weight).detach().double(), plain.T.shape[1], plain.T.dtype
        sign = torch.linalg.qr(plain.T).R.diagonal().sign()
        T = (plain.T * sign).double()                                                              # (out, k)
        # T = W_T M:  M = (W_T^T W_T)^+ W_T^T T
        M = torch.linalg.pinv(W_T.T @ W_T, rtol=1e-12, hermitian=True) @ (W_T.T @ T)
        # B = (1 - T_1^T)^-1 T_2^T = N W_T2^T:  N = (1 - T_1^T)^-1 M^T
        N = torch.linalg.solve(torch.eye(k, dtype=T.dtype, device=T.device) - T[:k].T, M.T)
        self.register_buffer("sign", sign, persistent=False)                # (k,)
        self.register_buffer("M", M.to(dtype), persistent=False)            # (H, k)
        self.register_buffer("N", N.to(dtype), persistent=False)            # (k, H)
        self.Zc = nn.Parameter(self.Z.new_zeros(len(self.Z), len(T) - k))   # (r, out - k)

    def weight(self) -> Tensor:
        """W = T Z^T + U Zc^T = T (Z^T - v) + [v; Zc^T],  v = B Zc^T."""
        W_T, k = widen(self.flip(self.teacher_weight[0])), len(self.N)  # (out, H)
        v = (self.Zc @ W_T[k:]) @ self.N.T  # (r, k), transposed, as all of these
        W = ((self.Z * self.sign - v) @ self.M.T) @ W_T.T  # (r, out)
        W[:, :k] += v
        W[:, k:] += self.Zc
        return self.flip(W.T)

    def pull_back(self, G: Tensor) -> None:
        """dL/dZ = G^T T,  dL/dZc = G^T U = G_2^T + (G_1^T - G^T T) B."""
        W_T, k, G = widen(self.flip(self.teacher_weight[0])), len(self.N), self.flip(G).T  # (r, out)
        GT = (G @ W_T) @ self.M  # (r, k)
        self.Z.grad = GT * self.sign
        self.Zc.grad = ((G[:, :k] - GT) @ self.N) @ W_T[k:].T + G[:, k:]


def open_mlp(clone: Clone, mode: str, seed: int = 0, teacher: Transformer | None = None) -> Clone:
    """A plain clone -> one whose gate, up and down train as `mode` says. The student's weights do not change by a bit (with a teacher: by rounding).
    `seed` is that of R and A; `core` uses none. With a `teacher`, `core` goes by its weights instead of explicit bases (Implicit)."""
    theirs = dict(teacher.named_parameters()) if teacher is not None else {}
    generator = torch.Generator().manual_seed(seed)
    for name in [n for n in clone.maps if n.endswith(MLP)]:
        if mode == "dense":
            del clone.maps[name]  # the deployed matrix is its own coordinate
        elif mode == "core" and theirs and len(clone.maps[name].T) > clone.maps[name].T.shape[1]:  # a square T leaves no U_perp
            clone.maps[name] = Implicit(clone.maps[name], theirs[name])
        elif mode != "lrc":
            clone.maps[name] = Opened(clone.maps[name], directions(mode, clone.maps[name].T, generator))
    return clone
