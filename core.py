"""Opening the MLP: train what you deploy.

Plain LRC deploys gate, up (d_ff, r) and down (r, d_ff) whole but trains them only inside the teacher's span, T Z^T.
The modes here start from that same merged matrix; dense and core let training leave the span, random and slice are their controls:

    mode     deployed matrix W            trains                           reaches
    lrc      T Z^T                        Z (r, H)                         col(T) only
    dense    W                            W (d_ff, r)                      everything
    core     T Z^T + U_perp Zc^T          Z (r, H) and Zc (r, d_ff - H)    everything, in the teacher's own frame
    random   T Z^T + R Zc^T               the same numbers                 everything, in a frame of no meaning
    slice    T Z^T + T A Zc^T             the same numbers                 col(T) only: core's budget without core's reach

Zc starts at 0, so that at step 0 the five students are one function; all merge to one matrix of the plain shape. `core` is `dense`
with AdamW run in the frame [T U_perp]: an orthogonal change of coordinates reaches the same matrices, but AdamW scales each
coordinate by its own history, so it takes another path. Attention, embedding and head stay as lrc.py made them.
Opened holds the frame as matrices, to be read; Compact is `core` in the same frame, faster and smaller.
Source: Train What You Deploy, arXiv 2609.02006.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from lrc import Clone, Plain, of_all_ranks
from model import Transformer, widen

MODES = ("lrc", "dense", "core", "random", "slice")
BASES = ("explicit", "compact", "implicit")  # how `core` holds [T U_perp]
READABLE = 2048  # d_ff up to which explicit ones cost little
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def complement(T: Tensor) -> Tensor:
    """U_perp (out, out - k): an orthonormal basis of what T (out, k) misses, so that [T U_perp] is square and orthogonal.

    The complete QR factorisation of T spans the whole space, its first k columns span col(T). Inside the complement there is
    no singular-value order: any completion is as teacher-aligned as any other.
    """
    Q, _ = torch.linalg.qr(T, mode="complete")  # (out, out)
    return Q[:, T.shape[1]:].contiguous()


def directions(mode: str, T: Tensor, drawn: Tensor | None) -> Tensor:
    """C (out, out - k): the fixed directions of the second path, for T (out, k). Columns have length 1 (`random`: nearly), so that a
    step in Zc is as large in W as a step in Z. `drawn`: normal numbers, (out, out - k) for `random`, (k, out - k) for `slice`."""
    if mode == "core":
        return complement(T)
    if mode == "random":
        return drawn.to(T) / len(T) ** 0.5  # R: full rank, not orthogonalised, so that a part of it lies in col(T)
    A = drawn.to(T)
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


class Compact(Plain):
    """`core` without U_perp: the same coordinates from out k numbers, not out^2, and with k (2 out - k) products, not out^2.

    1. T_1 (k, k) are the first rows of T, T_2 the others. Let B (k, out - k) solve (1 - T_1^T) B = T_2^T, and U = [B; 1] - T B.
    2. U is a complement: T^T U = T_1^T B + T_2^T - B = 0, and U^T U = B^T B + 1 - B^T B = 1.
    3. It is the very U_perp that `complement` writes out: for a T with 1 - T_1 invertible only one orthogonal [T U] makes [T U] - 1 of
       rank k, and the product of the k reflectors of a QR is of that kind.
    4. Signs: QR flips some columns of T; so do we, and of Z with them. A column that QR leaves alone (tau 0) is flipped as well: U stays
       the same, and 1 - T_1 stays far from singular.
    5. T need not be held either: T_2 = B^T (1 - T_1). With a teacher's weight (`implicit`) nor is B: T = W_T M, so that
       B = N W_T2^T with N = (1 - T_1^T)^-1 M^T.
    """

    def __init__(self, plain: Plain, teacher_weight: Tensor | None = None):
        """teacher_weight: W_T, shared with the teacher and read at each step, so it must keep its value; without it B is held."""
        nn.Module.__init__(self)
        k, self.dual, self.Z = plain.T.shape[1], plain.dual, plain.Z
        R, tau = torch.geqrf(plain.T)  # tau 0: no reflection
        sign = torch.where(tau == 0, -1, 1) * R.diagonal().sign()
        T = (plain.T * sign).double()  # (out, k)
        gap = torch.eye(k, dtype=T.dtype, device=T.device) - T[:k].T
        solve = lambda right: torch.linalg.solve(gap, right).to(plain.T.dtype).contiguous()  # as broadcasts want it
        self.register_buffer("sign", sign, persistent=False)                                 # (k,)
        self.register_buffer("T1", T[:k].to(plain.T.dtype).contiguous(), persistent=False)   # (k, k)
        self.Zc = nn.Parameter(self.Z.new_zeros(len(self.Z), len(T) - k))                    # (r, out - k)
        self.teacher_weight = (teacher_weight,)  # in a tuple, or it would count as a coordinate
        if teacher_weight is None:
            self.register_buffer("B", solve(T[k:].T), persistent=False)                      # (k, out - k)
        else:  # M = (W_T^T W_T)^+ W_T^T T
            W_T = self.flip(teacher_weight).detach().double()
            M = torch.linalg.pinv(W_T.T @ W_T, rtol=1e-12, hermitian=True) @ (W_T.T @ T)
            self.register_buffer("N", solve(M.T), persistent=False)                          # (k, H)

    def W_T2(self) -> Tensor:
        return widen(self.flip(self.teacher_weight[0]))[len(self.T1):]  # (out - k, H)

    def times_B(self, x: Tensor) -> Tensor:
        return x @ self.B if self.teacher_weight[0] is None else (x @ self.N) @ self.W_T2().T  # (r, k) -> (r, out - k)

    def times_BT(self, x: Tensor) -> Tensor:
        return x @ self.B.T if self.teacher_weight[0] is None else (x @ self.W_T2()) @ self.N.T  # (r, out - k) -> (r, k)

    def weight(self) -> Tensor:
        """W = T Z^T + U Zc^T = T u + [v; Zc^T],  v = B Zc^T,  u = Z^T - v;  T u = [T_1 u; B^T (u - T_1 u)]. All transposed here."""
        v = self.times_BT(self.Zc)  # (r, k)
        u = self.Z * self.sign - v
        T1u = u @ self.T1.T
        return self.flip(torch.cat([T1u + v, self.times_B(u - T1u).add_(self.Zc)], 1).T)

    def pull_back(self, G: Tensor) -> None:
        """dL/dZ = G^T T = p + (G_1^T - p) T_1,  p = G_2^T B^T;   dL/dZc = G^T U = G_2^T + (G_1^T - dL/dZ) B."""
        G1t, G2t = self.flip(G).T.split([len(self.T1), self.Zc.shape[1]], 1)  # (r, k), (r, out - k)
        p = self.times_BT(G2t)
        dZ = p + (G1t - p) @ self.T1  # (r, k)
        self.Z.grad = dZ * self.sign
        self.Zc.grad = self.times_B(G1t - dZ).add_(G2t)


def chosen_bases(bases: str, mode: str, d_ff: int) -> str:
    """`auto` decided: explicit matrices, which are there to be read, for a small teacher, the fastest for a large one."""
    return bases if bases != "auto" else "compact" if mode == "core" and d_ff > READABLE else "explicit"


def open_mlp(clone: Clone, mode: str, seed: int = 0, bases: str = "auto", teacher: Transformer | None = None) -> Clone:
    """A plain clone -> one whose gate, up and down train as `mode` says. The student's weights do not change by a bit (with bases
    that are not explicit: by rounding). `seed` is that of R and A; `core` uses none. `bases`: how `core` holds [T U_perp]; implicit
    ones need the teacher."""
    bases = chosen_bases(bases, mode, clone.student.config.intermediate_size)
    theirs = dict(teacher.named_parameters()) if bases == "implicit" else {}  # name -> W_T
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: m.T.shape for name, m in clone.maps.items() if name.endswith(MLP)}
    if clone.owner is not None:
        shapes = {name: shape for told in of_all_ranks(shapes) for name, shape in told.items()}
    for name in [n for n in clone.weights if n in shapes]:
        out, k = shapes[name]
        # drawn for every matrix, on the CPU: the same on every device, and however the ranks share the matrices out
        rows = {"random": out, "slice": k}.get(mode)
        drawn = torch.randn(rows, out - k, generator=generator) if rows else None
        if name not in clone.maps:
            continue
        plain = clone.maps[name]
        square = plain.T.shape[0] == plain.T.shape[1]  # no U_perp
        if mode == "dense":
            del clone.maps[name]  # the deployed matrix is its own coordinate
        elif mode == "core" and bases != "explicit" and not square:
            clone.maps[name] = Compact(plain, theirs[name] if bases == "implicit" else None)
        elif mode != "lrc":
            clone.maps[name] = Opened(plain, directions(mode, plain.T, drawn))
    return clone
