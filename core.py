"""Opening the MLP: train what you deploy.

Plain LRC deploys gate, up (d_ff, r) and down (r, d_ff) whole but trains them only inside the teacher's span, T Z^T.
The modes here start from that same merged matrix and let training leave the span:

    lrc     W = T Z^T                          trains Z (r, H)                      reaches col(T) only
    dense   W                                  trains W (d_ff, r)                   reaches everything
    core    W = T Z^T + U_perp Zp^T, Zp = 0    trains Z (r, H) and Zp (r, d_ff-H)   reaches everything

`core` is `dense` with AdamW run in the frame [T U_perp]: an orthogonal change of coordinates reaches the same matrices, but AdamW
scales each coordinate by its own history, so it takes another path. At step 0 the three students are one function, and all
merge to one matrix of the plain shape. Attention, embedding and head stay as lrc.py made them.
Source: Train What You Deploy, arXiv 2609.02006.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from lrc import Clone, Slice

MODES = ("lrc", "dense", "core")
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def complement(T: Tensor) -> Tensor:
    """U_perp (out, out - k): an orthonormal basis of what T (out, k) misses, so that [T U_perp] is square and orthogonal.

    The complete QR factorisation of T spans the whole space, its first k columns span col(T). Inside the complement there is
    no singular-value order: any completion is as teacher-aligned as any other.
    """
    Q, _ = torch.linalg.qr(T, mode="complete")  # (out, out)
    return Q[:, T.shape[1]:].contiguous()


class Core(Slice):
    """W = T Z^T + U_perp Zp^T: the slice, and a complement path that starts at zero."""

    def __init__(self, opened: Slice):
        nn.Module.__init__(self)  # not Slice's: the span is there already, and finding it again costs an eigenproblem
        self.dual, self.Z = opened.dual, opened.Z
        self.register_buffer("T", opened.T, persistent=False)                       # (out, k)
        self.register_buffer("U_perp", complement(opened.T), persistent=False)      # (out, out - k)
        self.Zp = nn.Parameter(self.Z.new_zeros(len(self.Z), self.U_perp.shape[1]))  # (r, out - k)

    def weight(self) -> Tensor:
        return self.flip(self.T @ self.Z.T + self.U_perp @ self.Zp.T)

    def pull_back(self, G: Tensor) -> None:
        """dL/dZ = G^T T,  dL/dZp = G^T U_perp."""
        super().pull_back(G)
        self.Zp.grad = self.flip(G).T @ self.U_perp


def open_mlp(clone: Clone, mode: str) -> Clone:
    """A plain clone -> one whose gate, up and down train as `mode` says. The student's weights do not change by a bit."""
    for name in [n for n in clone.maps if n.endswith(MLP)]:
        if mode == "dense":
            del clone.maps[name]  # the deployed matrix is its own coordinate
        elif mode == "core":
            clone.maps[name] = Core(clone.maps[name])
    return clone
