"""What bench.py compares with: the same step and the same loss, computed as others do. Nothing here is used to train.

    plain_step    the student as an ordinary language model, and a forward pass of the teacher: the least that distilling with logits costs
    lrc_step      plain LRC as its published code computes it, written anew from a description of that code
    naive_loss    KL and CE from two whole tensors of logits, by autograd

The published code of Low-Rank Clone (arXiv 2505.12781) keeps both models in one module whose layers advance the two streams together.
q, k, v and o go through two products a token, x -> x P^T -> x P^T W_T^T, o at the teacher's width, where it is also compared; gate, up,
down, the embedding and the head are rebuilt from W_T and P in each forward pass, and autograd goes back through that in each backward;
every term of every layer is read from the device by itself. Written anew here from that description, on this project's own RoPE and
attention. Its own recipe on 8 GPUs is one micro-batch of three sequences of 2,048 tokens a step and device.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from distill import IGNORE, KL_SCALE
from model import Transformer, rope_table, widen


def naive_loss(x: Tensor, weight: Tensor, targets: Tensor, x_t: Tensor, weight_t: Tensor,
               temperature: float = 40.0) -> tuple[Tensor, Tensor]:
    """x (N, r), weight (V, r), targets (N,), x_t (N, H), weight_t (V, H) -> the sums over tokens of kl and ce, as distill.HeadLoss."""
    z = widen(x @ weight.T)  # (N, V)
    with torch.no_grad():
        t = widen(x_t @ weight_t.T)  # (N, V)
    kl = F.kl_div(F.log_softmax(z / temperature, -1), F.log_softmax(t / temperature, -1), reduction="none", log_target=True).sum(-1)
    kl = KL_SCALE * temperature ** 2 * torch.where(targets != IGNORE, kl, 0).sum()
    return kl, F.cross_entropy(z, targets, ignore_index=IGNORE, reduction="sum")


def plain_step(student: Transformer, teacher: Transformer | None, ids: Tensor, targets: Tensor) -> None:
    """One micro-batch of plain training, gradients included, no optimizer; and the teacher's logits."""
    if teacher is not None:
        with torch.no_grad():
            teacher(ids)
    F.cross_entropy(student(ids).flatten(0, 1).float(), targets.flatten()).backward()


def projections(teacher: Transformer, width: int) -> dict[str, Tensor]:
    """P (H, width) for each matrix of the teacher, by its name, N(0, 0.02), and gains of 1: what the published code trains."""
    generator, c = torch.Generator().manual_seed(0), teacher.config
    made = {name: 0.02 * torch.randn(c.hidden_size, width, generator=generator) if w.dim() == 2 else torch.ones(width)
            for name, w in teacher.named_parameters() if not name.endswith(".bias")}
    return {name: p.to(teacher.lm_head.weight.device).requires_grad_() for name, p in made.items()}


def lrc_step(teacher: Transformer, P: dict[str, Tensor], ids: Tensor, targets: Tensor, w_align: float = 0.2,
             temperature: float = 40.0) -> dict[str, float]:
    """One micro-batch, ids and targets (B, T), gradients included, no optimizer -> the terms, as sums over its tokens."""
    c, W = teacher.config, dict(teacher.named_parameters())
    cos_sin = rope_table(teacher.rope_freq, torch.arange(ids.shape[1], device=ids.device))
    norm = lambda h, gain: F.rms_norm(h, h.shape[-1:], gain, c.rms_norm_eps)
    mean_square = lambda a, b: F.mse_loss(a, b, reduction="sum") / a.shape[-1]
    aligned, sums = 0.0, dict.fromkeys(("q", "k", "v", "gate", "up", "attn_out", "ffn_out"), 0.0)
    h_T, h_S = teacher.embed_tokens(ids), F.embedding(ids, W["embed_tokens.weight"] @ P["embed_tokens.weight"])  # (B, T, H), (B, T, r)
    for i, block in enumerate(teacher.layers):
        at = f"layers.{i}."
        with torch.no_grad():
            q, k, v, mixed = block.self_attn.mix(block.input_layernorm(h_T), *cos_sin)
            attn_out = block.self_attn.o_proj(mixed)
            h_T = h_T + attn_out
            gate, up, product = block.mlp.mix(block.post_attention_layernorm(h_T))
            ffn_out = block.mlp.down_proj(product)
            h_T = h_T + ffn_out
        x = norm(h_S, P[f"{at}input_layernorm.weight"])
        two = lambda name: F.linear(x @ P[f"{at}self_attn.{name}.weight"].T,
                                    W[f"{at}self_attn.{name}.weight"], W.get(f"{at}self_attn.{name}.bias"))
        ours = {name: two(f"{name}_proj") for name in ("q", "k", "v")}
        ours["attn_out"] = block.self_attn.o_proj(block.self_attn.attend(ours["q"], ours["k"], ours["v"], *cos_sin))  # (B, T, H)
        h_S = h_S + ours["attn_out"] @ P[f"{at}self_attn.o_proj.weight"]
        x = norm(h_S, P[f"{at}post_attention_layernorm.weight"])
        for name in ("gate", "up"):
            ours[name] = F.linear(x, W[f"{at}mlp.{name}_proj.weight"] @ P[f"{at}mlp.{name}_proj.weight"])
        P_down = P[f"{at}mlp.down_proj.weight"]
        ours["ffn_out"] = F.linear(F.silu(ours["gate"]) * ours["up"], P_down.T @ W[f"{at}mlp.down_proj.weight"])
        h_S = h_S + ours["ffn_out"]
        theirs = dict(q=q, k=k, v=v, gate=gate, up=up, attn_out=attn_out, ffn_out=ffn_out @ P_down)
        for name in sums:
            term = mean_square(ours[name], theirs[name])
            aligned, sums[name] = aligned + term, sums[name] + term.item()
    tied = "embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
    kl, ce = naive_loss(norm(h_S, P["norm.weight"]).flatten(0, 1), W[tied] @ P[tied], targets.flatten(),
                        teacher.norm(h_T).flatten(0, 1), W[tied], temperature)
    (kl + ce + w_align * aligned).div(targets.numel()).backward()
    return {"kl": kl.item(), "ce": ce.item(), **sums}
