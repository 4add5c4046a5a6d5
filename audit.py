"""What was reached, and what is paid for: six questions to a teacher and a student, made here or anywhere.

    python audit.py reach --teacher llama3.2-3b --width 1536      # from configs alone: what plain LRC deploys and cannot train
    python audit.py reach STUDENT --teacher TEACHER               # the same for a student's folder, however it was made
    python audit.py energy STUDENT --teacher TEACHER              # how much of each MLP matrix lies outside the teacher's span
    python audit.py remove STUDENT --teacher TEACHER --text FILE  # what the student loses without it
    python audit.py rank STUDENT --teacher TEACHER --text FILE    # effective rank of the hidden states
    python audit.py spectrum STUDENT --teacher TEACHER --layer 0  # where the student's columns fall along the teacher's singular vectors
    python audit.py neurons STUDENT --teacher TEACHER --cloze FILE    # does masking the teacher's fact neurons hurt the student?

A student is a merged Hugging Face folder: no coordinates are needed. energy, remove and spectrum read one matrix at a time from
disk, work in fp64 whatever the checkpoint's dtype, and never make a d_ff x d_ff matrix; remove also loads the two networks, to score them.
Sources: Train What You Deploy, arXiv 2609.02006; neuron masking: Low-Rank Clone, arXiv 2505.12781.
"""
from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor

import neurons
import plan
from config import Config
from data import Tokens
from distill import evaluate
from files import Refusal, any_letter_shows, read_json
from lrc import span
from model import Transformer, checked, opened, tensor_files
from prepare import prepare
from runs import TOKENIZER_FILES, pictures, save_picture
from teachers import resolve
from tokenizer import Tokenizer

KINDS = ("gate", "up", "down")


class Weights:
    """A checkpoint read tensor by tensor, each in fp64, none kept."""

    def __init__(self, source: str):
        self.folder, self.origin = resolve(str(source))
        self.config = Config.from_hf(read_json(self.folder / "config.json"), str(self.folder / "config.json"))
        self.place = {}
        for file, keys in tensor_files(self.folder).items():
            self.place |= {name: (file, key) for name, key in keys.items()}

    def mlp(self, layer: int, kind: str) -> Tensor:
        """gate, up (d_ff, width) or down, turned to (d_ff, width) too: its row space is what is inherited."""
        name = f"layers.{layer}.mlp.{kind}_proj.weight"
        if name not in self.place:
            raise Refusal(f"{self.folder}: tensor {name} is missing")
        file, key = self.place[name]
        shape = self.config.intermediate_size, self.config.hidden_size
        expected = torch.empty(shape[::-1] if kind == "down" else shape, device="meta")
        with opened(file) as tensors:
            W = checked(tensors.get_tensor(key), key, expected, file, self.config, torch.float64)
        return W.T if kind == "down" else W


def pair(teacher: str, student: str, text: bool = False) -> tuple[Weights, Weights]:
    """Both checkpoints, still on disk. With `text` they must read the same tokens too."""
    theirs, ours = Weights(teacher), Weights(student)
    shapes = [(c.num_hidden_layers, c.intermediate_size) for c in (theirs.config, ours.config)]
    if shapes[0] != shapes[1]:
        raise Refusal(f"{ours.folder}: {shapes[1][0]} layers of d_ff {shapes[1][1]}, the teacher has {shapes[0][0]} of {shapes[0][1]}: "
                      "not a student that inherits its MLP")
    must_be_narrower(theirs.config, ours.config, student)
    if text:
        tokenizer = Tokenizer(ours.folder)
        if tokenizer.fingerprint != Tokenizer(theirs.folder).fingerprint:
            raise Refusal(f"{student} and {teacher} have different tokenizers: one text is not the same tokens to both")
        for one in (ours, theirs):
            tokenizer.must_fit(one.config.vocab_size, one.folder)
    return theirs, ours


def must_be_narrower(teacher: Config, student: Config, name: str) -> None:
    if student.hidden_size > teacher.hidden_size:
        raise Refusal(f"{name}: {student.hidden_size} wide, its teacher {teacher.hidden_size}: a student is the narrower of the two; "
                      "were they swapped?")


# ------------------------------------------------------------------------------------------------ reach


def reach(teacher: Config, student: Config) -> list[dict]:
    """For each kind of matrix: what is deployed, and which share training through a projection of W_T can never reach.

    A student's matrix keeps one side of the teacher's (kept x r from kept x inherited): W_T P fills min(kept, inherited) of its `kept`
    dimensions. A matrix that keeps neither side (pruned) is no projection of the teacher's, so all of it trains: no gap.
    """
    theirs, ours, rows = plan.matrices(teacher), plan.matrices(student), []
    for kind, (_, _, kept, inherited) in theirs.items():
        _, many, side, width = ours[kind]
        projected = side == kept
        rows.append(dict(kind=kind, many=many, kept=side, width=width, deployed=many * side * width,
                         reachable=min(kept, inherited) if projected else side, projected=projected))
    return rows


def show_reach(teacher: Config, student: Config) -> str:
    text = [f"{'matrix':<11}{'how many':>9}{'deployed, each':>17}{'reached':>9}{'out of reach':>14}{'numbers deployed':>18}{'reached':>10}"]
    for row in reach(teacher, student):
        gap = 1 - row["reachable"] / row["kept"]
        note = f"{gap:.1%}" if gap else "no gap" if row["projected"] else "no gap: not W_T P"
        text.append(f"{row['kind']:<11}{row['many']:>9}{row['kept']:>9} x{row['width']:>6}{row['reachable']:>9}{note:>14}"
                    f"{plan.count(row['deployed']):>18}{plan.count(row['deployed'] * (1 - gap)):>10}")
    return "\n".join(text)


# ----------------------------------------------------------------------------------------------- energy


def outside(W_T: Tensor, W: Tensor) -> float:
    """Share of the energy of W (out, r) outside col(W_T), W_T (out, H):  |W - T T^T W|^2 / |W|^2,  T an orthonormal basis of col(W_T)."""
    T, W = span(W_T.double()), W.double()
    whole = W.pow(2).sum()
    return float((W - T @ (T.T @ W)).pow(2).sum() / whole) if whole > 0 else 0.0


def energy(teacher: str, student: str) -> dict[str, list[float]]:
    """{"gate": share of each layer, "up": ..., "down": ...}; 0 for plain LRC, up to rounding, whatever it was trained on."""
    theirs, ours = pair(teacher, student)
    layers = range(ours.config.num_hidden_layers)
    return {kind: [outside(theirs.mlp(layer, kind), ours.mlp(layer, kind)) for layer in layers] for kind in KINDS}


def show_energy(shares: dict[str, list[float]]) -> str:
    rows = [["layer", *(f"{kind}, %" for kind in shares)]]
    rows += [[f"{layer}", *(f"{100 * share:.2f}" for share in each)] for layer, each in enumerate(zip(*shares.values()))]
    rows.append(["mean", *(f"{100 * sum(layers) / len(layers):.2f}" for layers in shares.values())])
    return "\n".join(f"{name:<8}" + "".join(f"{cell:>9}" for cell in cells) for name, *cells in rows)


def draw_energy(shares: dict[str, list[float]], picture: Path) -> None:
    plt = pictures()
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for kind, layers in shares.items():
        axes.plot([100 * share for share in layers], marker="o", label=kind)
    axes.set(xlabel="layer", ylabel="energy outside the teacher's span, %", ylim=(0, None))
    axes.legend()
    save_picture(figure, picture)


# ----------------------------------------------------------------------------------------------- remove


@torch.no_grad()
def ablate(teacher: str, student: str, layers: range, kinds: tuple[str, ...] = KINDS, scale: float = 0.0) -> Transformer:
    """The student with W -> T T^T W + scale (W - T T^T W) in these layers and kinds: 0 removes the complement, 1 is the identity
    pass through the same arithmetic."""
    theirs, ours = pair(teacher, student)
    net = Transformer.from_pretrained(ours.folder)
    for layer in layers:
        for kind in kinds:
            W, T = ours.mlp(layer, kind), span(theirs.mlp(layer, kind))
            inside = T @ (T.T @ W)
            W = inside + scale * (W - inside)
            net.get_parameter(f"layers.{layer}.mlp.{kind}_proj.weight").copy_(W.T if kind == "down" else W)
    return net


def layer_range(text: str, count: int) -> range:
    """"all", "3" or "0-2" (both ends in) -> the layers."""
    first, dash, last = ("0", "-", str(count - 1)) if text == "all" else text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal() and len(text) < 20 and int(first) <= int(last) < count):
        raise Refusal(f"--layers {text:.60}: write all, one layer (3) or a range (0-2), within 0 to {count - 1}")
    return range(int(first), int(last) + 1)


# ------------------------------------------------------------------------------------------------- rank


def effective_rank(moment: Tensor) -> float:
    """exp of the entropy of the singular values' shares (Roy & Vetterli, EUSIPCO 2007), from X^T X: p_i = s_i / sum s, exp(-sum p ln p)."""
    s = torch.linalg.eigvalsh(moment).clamp(min=0).sqrt()
    p = s / s.sum()
    return float(torch.special.entr(p).sum().exp()) if s.sum() > 0 else 0.0


@torch.no_grad()
def effective_ranks(net: Transformer, batches) -> list[tuple[float, float]]:
    """Of the stream after each layer, over all tokens: (as it is, less its mean over tokens). The mean, and a few massive activations,
    can hold most of the length of the first."""
    count, moments, sums = 0, 0.0, 0.0
    for ids, _ in batches:
        _, taps = net(ids, taps=True, head=False)
        h = torch.stack([tap["hidden"].flatten(0, 1) for tap in taps]).double()  # (layers, N, width)
        moments, sums, count = moments + h.mT @ h, sums + h.sum(1), count + h.shape[1]
    return [(effective_rank(m), effective_rank(m - torch.outer(s, s) / count)) for m, s in zip(moments, sums)]


# --------------------------------------------------------------------------------------------- spectrum


def spectrum(W_T: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W_T (out, H), W (out, r) -> singular values of W_T (k,), largest first, and along its left singular vectors t_i the share of energy
    of the teacher's matrix, s_i^2 / sum s^2, and of the student's, |t_i^T W|^2 / |W|^2, (k,) each. What the last lacks of 1 is outside."""
    T = span(W_T)  # (out, k)
    s = (T.T @ W_T).norm(dim=1)  # |t_i^T W_T| = s_i
    return s, s.pow(2) / s.pow(2).sum(), (T.T @ W).pow(2).sum(1) / W.pow(2).sum().clamp(min=1e-300)


def draw_spectrum(named: dict[str, tuple[Tensor, Tensor, Tensor]], picture: Path) -> None:
    plt = pictures()
    figure, axes = plt.subplots(1, len(named), figsize=(4 * len(named), 3.5), layout="constrained", sharey=True, squeeze=False)
    for ax, (kind, (_, theirs, ours)) in zip(axes[0], named.items()):
        ax.semilogy(theirs, color="black", label="teacher: s² / Σ s²")
        ax.semilogy(ours, ".", markersize=3, color="tab:blue", label="student: |tᵀW|² / |W|²")
        ax.set(title=f"{kind}: {100 * (1 - ours.sum()):.1f} % outside", xlabel="singular vector of W_T on the d_ff side, largest first")
    axes[0, 0].set(ylabel="share of energy")
    axes[0, 0].legend()
    save_picture(figure, picture)


# ----------------------------------------------------------------------------------------- the commands


def held_out_text(args, folder: Path, config: Config):
    """(tokenizer, a function that starts over the held-out windows (ids, targets) of --text)."""
    if not 1 <= args.seq_len <= config.max_position_embeddings or args.tokens < 1:
        raise Refusal(f"--seq-len {args.seq_len}, --tokens {args.tokens}: at least 1, and a window within the model's "
                      f"{config.max_position_embeddings} positions")
    tokenizer = Tokenizer(folder)
    held = Tokens(prepare(args.text, tokenizer, quiet=True), "val", args.seq_len, tokenizer)
    return tokenizer, lambda: held.spread(max(1, args.tokens // args.seq_len), max(1, 2048 // args.seq_len))


def reach_command(args) -> None:
    theirs = plan.shape_of(args.teacher, None)
    if bool(args.student) == (args.width is not None):
        raise Refusal("reach: name a student's folder, or give --width")
    if args.width is not None:
        plan.check_width(theirs, args.width)
    ours = plan.shape_of(args.student, None) if args.student else theirs.at_width(args.width)
    must_be_narrower(theirs, ours, args.student)
    print(show_reach(theirs, ours))


def energy_command(args) -> None:
    shares = energy(args.teacher, args.student)
    print(show_energy(shares))
    if args.picture:
        draw_energy(shares, args.picture)


def remove_command(args) -> None:
    theirs, ours = pair(args.teacher, args.student, text=True)
    kinds = tuple(args.matrices.split(","))
    ranges = {text: layer_range(text, ours.config.num_hidden_layers) for text in args.layers}
    if not set(kinds) <= set(KINDS):
        raise Refusal(f"--matrices {args.matrices}: of gate, up, down, with commas")
    if not math.isfinite(args.scale):
        raise Refusal(f"--scale {args.scale}: a number; 0 removes the complement, 1 keeps it")
    if args.out and (len(ranges) > 1 or args.out.exists()):
        raise Refusal(f"--out {args.out}: exists, or is asked for with more than one --layers")
    tokenizer, windows = held_out_text(args, ours.folder, ours.config)
    teacher = Transformer.from_pretrained(theirs.folder)
    print(f"{'':<28}{'CE':>9}{'KL to teacher':>15}{'top-1':>8}")

    def line(name: str, net: Transformer) -> None:
        figures = evaluate(net, teacher, windows(), real_vocab=tokenizer.vocab_size)
        print(f"{name:<28}{figures['val_ce']:>9.4f}{figures['val_kl']:>15.4f}{figures['val_top1']:>8.4f}", flush=True)
    line("student", Transformer.from_pretrained(ours.folder))
    for text, layers in ranges.items():
        net = ablate(args.teacher, args.student, layers, kinds, args.scale)
        line(f"{'+'.join(kinds)}, layers {text}", net)
    if args.out:
        making = args.out.with_name(f"{args.out.name}.{os.getpid()}.tmp")
        try:
            net.save_pretrained(making)
            for name in TOKENIZER_FILES:
                if (ours.folder / name).exists():
                    shutil.copyfile(ours.folder / name, making / name)
            os.rename(making, args.out)
        finally:
            shutil.rmtree(making, ignore_errors=True)


def rank_command(args) -> None:
    theirs, ours = pair(args.teacher, args.student, text=True)
    _, windows = held_out_text(args, theirs.folder, ours.config)
    ranks = [effective_ranks(Transformer.from_pretrained(one.folder), windows()) for one in (theirs, ours)]
    print(f"{'layer':<8}{'teacher':>10}{'centred':>10}{'student':>10}{'centred':>10}")
    for layer, rows in enumerate(zip(*ranks)):
        print(f"{layer:<8}" + "".join(f"{value:>10.2f}" for row in rows for value in row))


def spectrum_command(args) -> None:
    theirs, ours = pair(args.teacher, args.student)
    layer = layer_range(str(args.layer), ours.config.num_hidden_layers)[0]
    named = {kind: spectrum(theirs.mlp(layer, kind), ours.mlp(layer, kind)) for kind in KINDS}
    print(f"layer {layer}, share of energy in the top singular directions of W_T")
    print(f"{'':<16}" + "".join(f"{part:>9}" for part in ("1/16", "1/4", "1/2", "all")))
    for kind, (s, *shares) in named.items():
        for who, share in zip(("teacher", "student"), shares):
            top = [share[:max(1, len(s) * sixteenths // 16)].sum() for sixteenths in (1, 4, 8, 16)]
            print(f"{kind + ', ' + who:<16}" + "".join(f"{value:>9.3f}" for value in top))
    if args.picture:
        draw_spectrum(named, args.picture)


def neurons_command(args) -> None:
    theirs, ours = pair(args.teacher, args.student, text=True)
    most = ours.config.num_hidden_layers * ours.config.intermediate_size // 2
    if not 1 <= args.k <= most or args.draws < 2:
        raise Refusal(f"--k {args.k}, --draws {args.draws}: 1 to {most} neurons (half of all), and at least 2 draws")
    questions = neurons.read_cloze(args.cloze, Tokenizer(theirs.folder), ours.config.max_position_embeddings)
    print(neurons.table(*(Transformer.from_pretrained(one.folder) for one in (theirs, ours)), questions, args.k, args.draws))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(run, help: str, student: str | None = None, text: bool = False):
        p = commands.add_parser(run.__name__.removesuffix("_command"), help=help)
        p.set_defaults(run=run)
        p.add_argument("student", nargs=student, help="folder of a merged student")
        p.add_argument("--teacher", default="tiny", help="preset, hub id or folder (default: tiny)")
        if text:
            p.add_argument("--text", default="stdlib", help="as --data of train.py; its held-out documents are read (default: stdlib)")
            p.add_argument("--seq-len", type=int, default=128, help="tokens a window (default: 128)")
            p.add_argument("--tokens", type=int, default=32768, help="tokens in all (default: 32768)")
        return p
    p = command(reach_command, "what plain LRC deploys and cannot train, from configs alone", "?")
    p.add_argument("--width", type=int, help="student width, without a folder")
    p = command(energy_command, "share of each MLP matrix outside the teacher's span")
    p.add_argument("--picture", type=Path, help="file to draw it to (.png, .svg)")
    p = command(remove_command, "the student without its complement: scored, and written with --out", text=True)
    p.add_argument("--layers", nargs="+", default=["all"], help="all, 3 or 0-2; several are scored one after another (default: all)")
    p.add_argument("--matrices", default=",".join(KINDS), help="of gate,up,down (default: the three together)")
    p.add_argument("--scale", type=float, default=0.0, help="what the complement is multiplied with: 0 removes it, 1 is the identity pass")
    p.add_argument("--out", type=Path, help="folder to write the ablated model to (one --layers)")
    command(rank_command, "effective rank of the hidden states by layer, teacher and student", text=True)
    p = command(spectrum_command, "the student's columns along the teacher's singular vectors")
    p.add_argument("--layer", type=int, default=0)
    p.add_argument("--picture", type=Path, help="file to draw it to (.png, .svg)")
    p = command(neurons_command, "mask the teacher's most active neurons on factual questions, in both models")
    p.add_argument("--cloze", required=True, help='.jsonl of {"prompt": ..., "answer": ...}')
    p.add_argument("--k", type=int, default=50, help="neurons to mask (default: 50)")
    p.add_argument("--draws", type=int, default=20, help="random sets (default: 20)")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    picture = getattr(args, "picture", None)
    if picture and (picture.suffix not in (".png", ".svg", ".pdf") or not picture.parent.is_dir()):
        raise Refusal(f"--picture {picture}: a name that ends in .png, .svg or .pdf, in a folder that exists")
    args.run(args)


if __name__ == "__main__":
    any_letter_shows()
    try:
        main()
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
