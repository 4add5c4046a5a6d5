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

The order of this file: the span (Plain), the student and its coordinates (Clone), the calibrated start (calibrate), random starts.
Sources: Low-Rank Clone, arXiv 2505.12781; Train What You Deploy, arXiv 2609.02006.
"""
from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from model import Transformer, rope_table, unit_rms, widen
from teachers import Refusal

DUAL = ("o_proj.weight", "down_proj.weight")  # these write into the stream: their row space is inherited, not their column space

# ------------------------------------------------------------------------------------------- the span


def span(W: Tensor) -> Tensor:
    """Orthonormal basis T (out, k) of col(W), W (out, in), k its numerical rank: left singular vectors, largest first.

    W^T W = V S^2 V^T gives T = W V S^-1: an eigenproblem of the teacher's width instead of an SVD of d_ff rows. In fp64 it resolves
    singular values down to 1e-6 of the largest; what lies below is taken for rounding (fp32's own: below 1e-7). Signs follow a rule, so that a
    basis made anew is the same basis.
    """
    W, dtype = W.detach().double(), W.dtype
    wide = W.shape[0] <= W.shape[1]  # then the left singular vectors are the eigenvectors of W W^T themselves
    S2, V = torch.linalg.eigh(W @ W.T if wide else W.T @ W)  # ascending
    S2, V = S2.flip(0), V.flip(1)
    kept = S2 > 1e-12 * S2[:1]
    S2, V = S2[kept], V[:, kept]  # (k,), (in, k)
    T = V if wide else W @ V / S2.sqrt()
    if not wide and (S2[:1] > 1e6 * S2[-1:]).any():  # the columns are orthonormal to 1e-16 S2[0] / S2[-1]: mend what an fp32 basis would show
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
            Z = (torch.linalg.pinv(A.T @ A, rtol=1e-12, hermitian=True) @ (A.T @ W.double())).T.to(W.dtype).contiguous()  # fused AdamW reads memory, not strides
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
    `owner`: weight -> the rank that alone holds its map and trains it, where ranks share them out (optimizer.py); then deploy is called by all.
    """

    def __init__(self, student: Transformer, maps: dict[str, nn.Module] | None = None, frame: Tensor | None = None, owner: dict[str, int] | None = None):
        self.student, self.maps, self.frame, self.owner = student, maps or {}, frame, owner
        self.weights = dict(student.named_parameters())  # a tied pair appears once
        self.deploy()

    def coordinates(self) -> dict[str, nn.Parameter]:
        """What trains (on this rank), by name: `layers.0.mlp.up_proj.weight.Z` where a map stands between, else the weight's own name."""
        mine = lambda name: self.owner is None or self.owner[name] == dist.get_rank()
        own = {name: w for name, w in self.weights.items() if name not in self.maps and w.requires_grad and mine(name)}
        return own | {f"{name}.{c}": p for name, m in self.maps.items() for c, p in m.named_parameters()}

    @functools.cached_property
    def order(self) -> list[str]:
        """The names of all ranks' coordinates, in the order in which one rank alone would have them. Asked for first by all ranks, once the maps are made."""
        weights = list(self.weights)
        weight = lambda name: name if name in self.weights else name.rpartition(".")[0]
        return sorted((name for names in of_all_ranks(list(self.coordinates())) for name in names), key=lambda name: (name not in self.weights, weights.index(weight(name))))

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
            for name, w in student.named_parameters() if w.dim() == 2 and (owner is None or owner[name] == dist.get_rank())}


# ------------------------------------------------------------------------------- the calibrated start


class Ridge:
    """argmin_B sum |y - x B|^2 + lam |B|^2, streamed: only two second moments are kept, whatever the number of tokens."""

    def __init__(self):
        self.xx = self.xy = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        x, y = x.flatten(0, -2), y.flatten(0, -2)  # (N, a), (N, b)
        self.xx, self.xy = self.xx + (x.T @ x).double(), self.xy + (x.T @ y).double()

    def solve(self, relative: float = 1e-3) -> Tensor:
        """B = (X^T X + lam I)^-1 X^T Y  (a, b), lam relative to the mean of the diagonal."""
        lam = (relative * self.xx.diagonal().mean()).clamp(min=1e-30)  # a zero matrix of the teacher leaves nothing to fit: B = 0
        return torch.linalg.solve(self.xx + lam * torch.eye(len(self.xx), dtype=self.xx.dtype, device=self.xx.device), self.xy).float()


@contextlib.contextmanager
def widened(block: nn.Module):
    """A teacher's block in fp32 while it is read. For one held in bf16 this is exact, and one block at a time; fp32 stays what it is."""
    held = {p: p.data for p in block.parameters()}
    for p, data in held.items():
        p.data = widen(data)
    try:
        yield block
    finally:
        for p, data in held.items():
            p.data = data


@torch.no_grad()
def calibrate(teacher: Transformer, student: Transformer, ids: Tensor, targets: Tensor, say=print) -> Tensor:
    """Fill `student` with W_T P, P fitted layer by layer on calibration text ids, targets (n, T); returns the frame F (H, r).

    The fit runs on the student's own stream so far, so each write into the stream also repairs what earlier layers got
    wrong. All of it is closed form: no randomness, the same result on every rank. The two streams live in two mapped
    files, one chunk of rows in memory at a time.
    """
    c, r, device = teacher.config, student.config.hidden_size, teacher.lm_head.weight.device
    rope = rope_table(teacher.rope_freq, torch.arange(ids.shape[1], device=device))
    chunks = torch.arange(len(ids)).split(max(1, 4096 // ids.shape[1]))  # rows that are in memory together
    gain = widen(teacher.norm.weight)
    Q = main_directions(teacher, ids, r, rope, chunks)
    # A tied head reads the stream out with the embedding's Q too, and the teacher's final gain g_f stands between: turn the frame
    # by it. A common factor is free (every reader normalises), so g_f goes in at RMS 1 and the stream keeps the embedding's size
    frame = gain[:, None] * Q / gain.pow(2).mean().sqrt() if c.tie_word_embeddings else Q
    student.embed_tokens.weight.copy_(widen(teacher.embed_tokens.weight) @ Q)

    with tempfile.TemporaryDirectory() as folder:
        h_T, h_S = (mapped(Path(folder) / who, *ids.shape, width) for who, width in (("teacher", c.hidden_size), ("student", r)))
        for rows in chunks:
            for h, net in ((h_T, teacher), (h_S, student)):
                h[rows] = widen(net.embed_tokens(ids[rows].to(device))).cpu()
        for i, (theirs, ours) in enumerate(zip(teacher.layers, student.layers)):  # both streams advance together
            with widened(theirs):
                fit_layer(theirs, ours, h_T, h_S, frame, rope, chunks, device)
            say(f"calibrating layer {i + 1}/{len(student.layers)}: {ids.numel():,} tokens, relative error of the stream "
                f"{stream_error(h_T, h_S, frame, chunks, device):.3f}")
        fit_read_out(teacher, student, h_T, h_S, Q, chunks)
        scale = best_scale(student, h_S, targets, device)
    student.norm.weight.mul_(scale)
    say(f"calibrated: final gain scaled by {scale:.2f}, the best of {len(SCALES)} on the calibration text")
    return frame


def main_directions(teacher: Transformer, ids: Tensor, r: int, rope, chunks) -> Tensor:
    """Q (H, r): top eigenvectors of the second moment of n(h_T), pooled over the stream before every layer and at the end."""
    c, device = teacher.config, teacher.lm_head.weight.device
    moment = torch.zeros(c.hidden_size, c.hidden_size, dtype=torch.float64, device=device)
    for rows in chunks:
        h = widen(teacher.embed_tokens(ids[rows].to(device)))  # (rows, T, H)
        for block in [*teacher.layers, None]:
            x = unit_rms(h, c.rms_norm_eps).flatten(0, 1)
            moment += (x.T @ x).double()
            if block:
                with widened(block):
                    h = block(h, *rope)[0]
    if not (torch.isfinite(moment).all() and widen(teacher.norm.weight).pow(2).sum() > 0):
        raise Refusal("the teacher's own activations on the calibration text are not finite, or its final gain is 0: is the checkpoint whole?")
    return fix_signs(torch.linalg.eigh(moment).eigenvectors[:, -r:].flip(1)).float().contiguous()


def mapped(file: Path, *shape: int) -> Tensor:
    """An fp32 tensor that lives in a file. All its room is taken at once: a mapped file that finds none later kills the process."""
    needed, free = 4 * math.prod(shape), shutil.disk_usage(file.parent).free
    with file.open("wb") as made:
        try:
            if needed > free:
                raise OSError(errno.ENOSPC, "")
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(made.fileno(), 0, needed)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that takes no room beforehand
                raise Refusal(f"{tempfile.gettempdir()}: calibrating on {math.prod(shape[:-1]):,} tokens takes {needed / 1e9:.1f} GB there, {free / 1e9:.1f} are free; "
                              "make room, set TMPDIR to another place, or give fewer --calibration-tokens") from None
    tensor = torch.from_file(str(file), shared=True, size=math.prod(shape)).view(shape)
    if os.name == "posix":
        file.unlink()  # it lives as long as the tensor: a kill leaves nothing behind
    return tensor


def fit_read_out(teacher: Transformer, student: Transformer, h_T: Tensor, h_S: Tensor, Q: Tensor, chunks) -> None:
    """With an untied head its own P by ridge; with a tied one the final gain, a least squares a channel: g_S = sum(x * y) / sum(x^2)."""
    c, device, fit, xy, xx = teacher.config, teacher.lm_head.weight.device, Ridge(), 0.0, 0.0
    for rows in chunks:
        x, y = unit_rms(h_S[rows].to(device), c.rms_norm_eps), teacher.norm(h_T[rows].to(device))
        if c.tie_word_embeddings:
            y = y @ Q  # (rows, T, r)
            xy, xx = xy + (x * y).sum((0, 1)), xx + x.pow(2).sum((0, 1))
        else:
            fit.add(x, y)
    if c.tie_word_embeddings:
        student.norm.weight.copy_(xy / xx)
    else:
        student.lm_head.weight.copy_(widen(teacher.lm_head.weight) @ fit.solve().T)


def fit_layer(theirs, ours, h_T: Tensor, h_S: Tensor, frame: Tensor, rope, chunks, device) -> None:
    """Fit one layer's seven matrices and advance both streams, in place, past it. A student gain is 1 here, so its norm is n(.)."""
    def fit(x_and_y) -> Tensor:
        ridge = Ridge()
        for rows in chunks:
            ridge.add(*x_and_y(rows, h_T[rows].to(device), h_S[rows].to(device)))
        return ridge.solve()

    def fit_half(norm, readers, mix, writer) -> None:
        """Attention and MLP are alike: some matrices read the normed stream, one writes a mix of what they read back into it."""
        # readers share P = argmin |n(h_S) P^T - g * n(h_T)|^2, and W_S = W_T P                   (H, r)
        P = fit(lambda rows, t, s: (norm(ours)(s), norm(theirs)(t))).T
        for their_reader, our_reader in zip(readers(theirs), readers(ours)):
            our_reader.weight.copy_(their_reader.weight @ P)

        # the writer: P_o = argmin |(W_o a_S)^T P_o - (h_T F - h_S)|^2, and W_S = P_o^T W_o       (H, r)
        # h_T is taken after the teacher's write, a_S is the student's own mix: the write makes up for what is wrong so far
        o_T = writer(theirs)

        def write(rows, t, s):
            t = t + o_T(mix(theirs, norm(theirs)(t)))
            h_T[rows] = t.cpu()
            return o_T(mix(ours, norm(ours)(s))), t @ frame - s
        writer(ours).weight.copy_(fit(write).T @ o_T.weight)

        for rows in chunks:
            s = h_S[rows].to(device)
            h_S[rows] = (s + writer(ours)(mix(ours, norm(ours)(s)))).cpu()

    fit_half(norm=lambda block: block.input_layernorm,
             readers=lambda block: (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj),
             mix=lambda block, x: block.self_attn.mix(x, *rope)[3],  # (rows, T, n*d)
             writer=lambda block: block.self_attn.o_proj)
    fit_half(norm=lambda block: block.post_attention_layernorm,
             readers=lambda block: (block.mlp.gate_proj, block.mlp.up_proj),
             mix=lambda block, x: block.mlp.mix(x)[2],  # (rows, T, d_ff)
             writer=lambda block: block.mlp.down_proj)


def stream_error(h_T: Tensor, h_S: Tensor, frame: Tensor, chunks, device) -> float:
    """|h_T F - h_S| / |h_T F| over the calibration text."""
    wrong = whole = 0.0
    for rows in chunks:
        target = h_T[rows].to(device) @ frame
        wrong, whole = wrong + (target - h_S[rows].to(device)).pow(2).sum(), whole + target.pow(2).sum()
    return float((wrong / whole).sqrt())


SCALES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)


def best_scale(student: Transformer, h_S: Tensor, targets: Tensor, device) -> float:
    """The factor on the final gain, i.e. on the logits, with the least next-token CE: a fit with errors is best a little less sure.
    Judged on up to 8,192 tokens and the rest of a sequence, evenly spread over the calibration text."""
    ce = torch.zeros(len(SCALES), device=device)
    for row in range(0, len(targets), math.ceil(targets.numel() / 8192)):  # one sequence of logits at a time
        z, y = student.lm_head(student.norm(h_S[row].to(device))), targets[row].to(device)  # (T, V), (T,)
        ce += torch.stack([nn.functional.cross_entropy(s * z, y, reduction="sum") for s in SCALES])
    return SCALES[int(ce.argmin())]


# ------------------------------------------------------------------------------------- random starts


@torch.no_grad()
def random_start(teacher: Transformer, student: Transformer, kind: str, seed: int) -> Tensor:
    """Fill `student` with W_T P for a P that has seen no data; returns the frame F (H, r). Norm gains stay 1.

    kind "orthonormal": one random Q (H, r) with orthonormal columns everywhere, h_S = h_T Q. A reader meets the normed stream, whose
        teacher gain g goes into its P; sqrt(H/r) makes up for the length that a projection loses:  P = diag(g) Q sqrt(H/r)
    kind "random": P ~ N(0, 0.02), one for each matrix, as LRC's own code starts (arXiv 2505.12781).
    """
    H, r, device = teacher.config.hidden_size, student.config.hidden_size, teacher.lm_head.weight.device
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(H, r, generator=generator)
    Q = torch.linalg.qr(draw()).Q if kind == "orthonormal" else 0.02 * draw()
    Q = Q.to(device)
    theirs = dict(teacher.named_parameters())

    def projection(name: str) -> Tensor:
        if name == "embed_tokens.weight":
            return Q
        if kind == "random":
            return 0.02 * draw().to(device)
        if name.endswith(DUAL):
            return Q
        norm = "norm"  # before the head; a layer has two: layers.3.input_layernorm before attention, the other before the MLP
        if name != "lm_head.weight":
            norm = ".".join(name.split(".")[:2]) + (".input_layernorm" if "self_attn" in name else ".post_attention_layernorm")
        gain = widen(theirs[f"{norm}.weight"])
        return gain[:, None] * Q * (H / r) ** 0.5

    for name, w in student.named_parameters():
        if w.dim() == 2:
            P, W_T = projection(name), widen(theirs[name])
            w.copy_(P.T @ W_T if name.endswith(DUAL) else W_T @ P)
    return Q
