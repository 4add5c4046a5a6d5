"""Where a student starts: W_T P, P fitted layer by layer to the teacher's own activations (calibrate), or one that has seen no data.

The sources name a calibrated start without stating it (Train What You Deploy, arXiv 2609.02006); this one is worked out here.
A random start is what Low-Rank Clone's own code takes (arXiv 2505.12781).
"""
from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from files import Refusal
from lrc import DUAL, fix_signs
from model import Transformer, rope_table, unit_rms, widen

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
        raise Refusal("the teacher's own activations on the calibration text are not finite, or its final gain is 0: "
                      "is the checkpoint whole?")
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
                raise Refusal(f"{tempfile.gettempdir()}: calibrating on {math.prod(shape[:-1]):,} tokens takes {needed / 1e9:.1f} GB "
                              f"there, {free / 1e9:.1f} are free; make room, set TMPDIR to another place, or give fewer "
                              "--calibration-tokens") from None
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
