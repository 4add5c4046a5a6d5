"""The objective: what the student is asked for, and how far from it a student is.

    L = w_kl * kl + w_ce * ce + lambda * align

    kl      1.28 * T^2 * KL(softmax(t/T) || softmax(z/T))   at T = 40, teacher logits t, student logits z
    ce      -log softmax(z)[next token]
    align   the sum of the recipe's alignment terms, each summed over layers

A recipe is a list of terms (RECIPES), and each can be left out by name:

    lrc     kl, ce, and alignment as *Train What You Deploy* runs it: q, k, v, o (1 - cosine, or MSE), gate, up, hidden
    gpd     kl alone, its stripped control
    clone   kl, ce, and the clone loss of the original LRC: the MSE of q, k, v, gate, up, attn_out, ffn_out

hidden is the published MSE, |h_S - h_T F|^2, or that over |h_T F|^2, token by token ("relative", the default). Real teachers hold
a few massive activations: in SmolLM2-135M three of 256 tokens carry 92 % of |h_T|^2 (in `tiny` 2 %), so under the plain MSE they
own the gradient.

attn_out and ffn_out compare what a layer writes into the stream with the teacher's write, projected: o_S against o_T P, P that of the very
matrix that writes, W_S = P^T W_T. So o_T P is W_S applied to the teacher's mix a_T (attention before o_proj, or silu(gate) * up):
    o_S - o_T P = W_S (a_S - a_T)
Where `down` may leave the span no P gives it, and the right side is the term. LRC's own code takes attn_out before P, at the
teacher's width.

Each term is a mean over the valid tokens of the whole optimizer step: the functions here return *sums*
over the valid tokens of one micro-batch (targets != IGNORE), the loop divides once by the count of the step.

Why 1.28: the published LRC code sums the KL over its 2048 positions and leaves T^2 = 1600 out; 2048/1600 = 1.28 times
the textbook T^2 * mean. A per-token mean without T^2 would be 2048 times too weak, without an error to tell.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from files import Refusal
from model import widen

IGNORE = -100       # target of a position that no loss may see
KL_SCALE = 1.28     # 2048 / 40^2
RECIPES = {"lrc": ("kl", "ce", "q", "k", "v", "o", "gate", "up", "hidden"),
           "gpd": ("kl",),
           "clone": ("kl", "ce", "q", "k", "v", "gate", "up", "attn_out", "ffn_out")}


@dataclass(frozen=True)
class Objective:
    temperature: float = 40.0
    w_kl: float = 1.0
    w_ce: float = 1.0
    w_align: float = 0.2             # lambda; summed over layers and terms, not averaged
    align: tuple[str, ...] = RECIPES["lrc"][2:]
    attention: str = "cosine"        # or "mse": the sources disagree, so it is a switch
    hidden: str = "relative"         # or "mse", as published
    real_vocab: int | None = None    # rows the tokenizer can emit; the padded rest would triple the KL at T = 40
    checkpointing: bool = False      # keep the taps for backward, and nothing of the arithmetic on them
    chunk: int = 512                 # rows of logits alive at once
    separator: int | None = None     # the token that closes a document; with it no attention reaches across (document_mask)


# ------------------------------------------------------------------------------- KL and CE, by chunks


def kl_rows(t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Logits over the temperature, t/T (teacher) and z/T (student), both (N, V) fp32 -> KL(p_t || p_z), (N,), and its gradient at z/T,
    p_z - p_t, (N, V). Both arguments are overwritten: tensors of this size are what the memory goes to.

    At T = 40 every log-probability is near -log V while the KL is about 1e-3, so in sum p_t (log p_t - log p_z) the rounding of the
    two normalisers shows. Adding sum (p_z - p_t), which is zero, cancels it to first order; with d = log p_z - log p_t:
        KL = sum_v  p_t * (exp(d) - 1 - d),   no summand below zero
    """
    log_t, log_z = F.log_softmax(t, -1), F.log_softmax(z, -1)
    d = torch.sub(log_z, log_t, out=t).clamp_(max=88)  # beyond 88 exp overflows in fp32, where p_t is all but 0
    p_t, p_z = log_t.exp_(), log_z.exp_()
    kl = torch.expm1(d, out=z).sub_(d).mul_(p_t).sum(-1)
    return kl, p_z.sub_(p_t)


class HeadLoss(torch.autograd.Function):
    """w_kl * kl + w_ce * ce from the streams that the two heads read; a (N, V) tensor never exists, only a chunk of its rows.

    The gradient at the logits has a closed form, so forward already computes what backward needs, chunk by chunk:
        d ce / dz = softmax(z) - onehot(target)          d (T^2 KL) / dz = T * (softmax(z/T) - softmax(t/T))
    peers.naive_loss is the same in six lines, from whole logits and by autograd.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, x_t, weight_t, objective: Objective):
        """x (N, r), weight (V, r), targets (N,); teacher's x_t (N, H), weight_t (V, H) or None -> (loss, kl sum, ce sum), scalars."""
        o, kind = objective, x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        wide = widen(torch.empty(0, dtype=dtype)).dtype  # softmaxes are never taken in 16 bits
        with torch.autocast(kind, enabled=False):
            w, dx, dw = weight.to(dtype), torch.empty_like(x), torch.zeros_like(weight, dtype=wide)
            w_t = weight_t.to(dtype) if o.w_kl else None
            kl, ce = x.new_zeros((), dtype=wide), x.new_zeros((), dtype=wide)
            for i in range(0, len(x), o.chunk):
                rows = slice(i, i + o.chunk)
                yi = targets[rows]
                valid = yi != IGNORE
                seen = lambda stream: stream[rows].to(dtype).masked_fill(~valid[:, None], 0)  # what no loss may see may be NaN
                xi = seen(x)
                z = (xi @ w.T).to(wide)  # (chunk, V)
                if o.w_ce:
                    dz, label = F.log_softmax(z, -1), yi.clamp(min=0)[:, None]
                    ce -= torch.where(valid, dz.gather(1, label)[:, 0], 0).sum()
                    dz.exp_().scatter_add_(1, label, torch.full_like(label, -1, dtype=wide)).mul_(o.w_ce)
                else:
                    dz = torch.zeros_like(z)
                if o.w_kl:
                    t = (seen(x_t) @ w_t.T).to(wide)  # (chunk, V); t and z are overwritten from here on
                    kl_i, dkl = kl_rows(t.div_(o.temperature)[:, :o.real_vocab], z.div_(o.temperature)[:, :o.real_vocab])
                    kl += torch.where(valid, KL_SCALE * o.temperature ** 2 * kl_i, 0).sum()
                    dz[:, :o.real_vocab].add_(dkl, alpha=o.w_kl * KL_SCALE * o.temperature)
                dz = dz.mul_(valid[:, None].to(wide)).to(dtype)
                dx[rows] = (dz @ w).to(x.dtype)
                if dtype == wide:
                    torch.addmm(dw, dz.T, xi, out=dw)
                else:  # the sum over chunks is never rounded to 16 bits
                    dw += dz.T @ xi
        ctx.save_for_backward(dx, dw.to(weight.dtype))
        ctx.mark_non_differentiable(kl, ce)
        return o.w_kl * kl + o.w_ce * ce, kl, ce

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _kl, _ce):
        dx, dw = ctx.saved_tensors
        return grad * dx, grad * dw, None, None, None, None


# ------------------------------------------------------------------------------------------ alignment

# Each distance f(s, t) comes with its gradient at s: (..., n), (..., n) -> (...), (..., n), in fp32


def square(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """|s - t|^2 / n, a mean over features, so that a width doubled by repetition changes nothing.   d/ds = 2 (s - t) / n"""
    d, n = s - t, s.shape[-1]
    return torch.linalg.vector_norm(d, dim=-1).square() / n, d.mul_(2 / n)


def relative(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """|s - t|^2 / |t|^2.   d/ds = 2 (s - t) / |t|^2"""
    d, whole = s - t, torch.linalg.vector_norm(t, dim=-1, keepdim=True).square().clamp(min=1e-12 * t.shape[-1])
    return torch.linalg.vector_norm(d, dim=-1).square() / whole[..., 0], d.mul_(2 / whole)


def cosine(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """1 - c, c = s.t / (|s| |t|).   d/ds = (c s/|s| - t/|t|) / |s|"""
    size_s, size_t = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-8) for x in (s, t))
    c = torch.linalg.vecdot(s, t)[..., None] / (size_s * size_t)
    return 1 - c[..., 0], (s * (c / size_s ** 2)).addcmul_(t, -1 / (size_s * size_t))


class Distance(torch.autograd.Function):
    """The sum of a distance over the valid tokens. Its gradient in closed form takes a third of the passes over memory that autograd
    makes of the formula."""

    @staticmethod
    def forward(ctx, s, t, valid, f):
        with torch.autocast(s.device.type, enabled=False):
            value, ds = f(widen(s), widen(t) if isinstance(t, Tensor) else t)
        if s.device.type != "cpu" or not valid.all():  # on a GPU the question would wait for the device, so there it is always filled
            ds.masked_fill_(~valid[..., None], 0)  # fill, not times: what no loss may see may be NaN
        ctx.save_for_backward(ds.to(s.dtype))
        return torch.where(valid, value, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ds, = ctx.saved_tensors
        return grad * ds, None, None, None


def align_sums(student: list[dict], teacher: list[dict], frame: Tensor | None, valid: Tensor, objective: Objective,
               writers: list[tuple[Tensor, Tensor]] | None = None) -> dict[str, Tensor]:
    """Taps of both models, one dict a layer; valid (B, T) -> the terms of objective.align, each summed over layers and tokens.

    q, k, v (before RoPE), o (before o_proj), gate and up (before the activation) live in spaces that both models share. The hidden
    state does not: the teacher's is compared through the frame F (H, r), h_T F. `writers` are the student's (o_proj, down_proj) weights
    a layer, which attn_out and ffn_out need.
    """
    heads = cosine if objective.attention == "cosine" else square
    compare = relative if objective.hidden == "relative" else square
    distance = lambda f, a, b: Distance.apply(a, b, valid, f)
    product = lambda tap: F.silu(tap["gate"]) * tap["up"]  # what down_proj reads

    def term(name, s, t, writer):
        if name == "hidden":
            return distance(compare, s[name], t[name] @ frame.to(t[name].dtype))
        if name == "attn_out":  # W_S (a_S - a_T)
            return distance(square, F.linear(s["o"] - t["o"], writer[0]), 0)
        if name == "ffn_out":
            return distance(square, F.linear(product(s) - product(t), writer[1]), 0)
        return distance(square if name in ("gate", "up") else heads, s[name], t[name])

    sums = dict.fromkeys(objective.align, 0.0)
    for s, t, writer in zip(student, teacher, writers or [None] * len(student), strict=True):
        for name in objective.align:
            if objective.checkpointing:
                value = checkpoint(term, name, s, t, writer, use_reentrant=False, preserve_rng_state=False)
            else:
                value = term(name, s, t, writer)
            sums[name] += value
    return sums


def document_mask(ids: Tensor, separator: int | None) -> Tensor | None:
    """ids (B, T) -> (B, 1, T, T) bool, True where attention may go: back, and no further than the document's first token.
    Positions need not begin anew in each document: RoPE sees only their differences. None, the plain causal mask, without a
    separator."""
    if separator is None:
        return None
    closes = ids == separator
    document = closes.cumsum(1) - closes.long()  # (B, T): how many documents were closed before this token
    return ((document[:, :, None] == document[:, None, :]).tril())[:, None]


def losses(student, teacher, ids: Tensor, targets: Tensor, objective: Objective, frame: Tensor | None = None,
           head: Tensor | None = None, writers: list[tuple[Tensor, Tensor]] | None = None) -> dict[str, Tensor]:
    """One micro-batch, ids and targets (B, T) -> sums over its valid tokens: kl, ce, the terms of align, align, and loss.

    `student` may be wrapped (DDP, compile): it is called, never reached into; its weights come as `head` (V, r) and `writers` (see
    align_sums). `teacher` is None where nothing is distilled. Terms of weight 0 are neither computed nor reported.
    """
    aligned = teacher is not None and objective.w_align > 0 and len(objective.align) > 0
    mask = document_mask(ids, objective.separator)
    run = lambda net: net(ids, taps=True, head=False, mask=mask) if aligned else (net(ids, head=False, mask=mask), None)
    x, taps = run(student)  # (B, T, r)
    x_t = weight_t = None
    if teacher is not None and (aligned or objective.w_kl):
        with torch.no_grad():
            x_t, taps_t = run(teacher)  # (B, T, H)
        x_t, weight_t = x_t.flatten(0, 1), teacher.lm_head.weight
    loss, kl, ce = HeadLoss.apply(x.flatten(0, 1), head, targets.flatten(), x_t, weight_t, objective)
    sums = ({"kl": kl} if objective.w_kl else {}) | ({"ce": ce} if objective.w_ce else {})
    if aligned:
        parts = align_sums(taps, taps_t, frame, targets != IGNORE, objective, writers)
        sums |= parts | {"align": sum(parts.values())}
        loss = loss + objective.w_align * sums["align"]
    return sums | {"loss": loss}


# ----------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(student, teacher, batches, chunk: int = 512, real_vocab: int | None = None, separator: int | None = None) -> dict[str, float]:
    """Held-out figures in nats a token: val_ce, and against a teacher val_kl = KL(teacher || student) at T = 1 and
    val_top1 = share of positions with the same argmax; both over the rows the tokenizer can emit. `separator`: see document_mask."""
    ce = kl = same = count = 0.0
    for ids, targets in batches:
        ids, targets = ids.to(student.lm_head.weight.device), targets.to(student.lm_head.weight.device).flatten()
        mask = document_mask(ids, separator)
        x = student(ids, head=False, mask=mask).flatten(0, 1)
        x_t = teacher(ids, head=False, mask=mask).flatten(0, 1) if teacher is not None else None
        for i in range(0, len(x), chunk):
            rows = slice(i, i + chunk)
            z = widen(student.lm_head(x[rows]))
            ce += F.cross_entropy(z, targets[rows], ignore_index=IGNORE, reduction="sum").item()
            if teacher is not None:
                valid = targets[rows] != IGNORE
                t = widen(teacher.lm_head(x_t[rows]))[valid, :real_vocab]
                z = z[valid, :real_vocab]
                same += (t.argmax(-1) == z.argmax(-1)).sum().item()
                kl += kl_rows(t, z)[0].sum().item()
        count += (targets != IGNORE).sum().item()
    if not count:
        raise Refusal("the held-out windows that were read hold no target for the loss; raise --eval-tokens or give more data")
    figures = {"val_ce": ce / count}
    return figures | ({"val_kl": kl / count, "val_top1": same / count} if teacher is not None else {})
