"""The flags of train.py: one dataclass with defaults and help, what is refused before anything is loaded, and what the flags come to:
terms, objective, dtypes."""
from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from core import BASES, MODES
from distill import RECIPES, Objective
from files import Refusal, read_json
from teachers import PAPER, PAPER_DATA, PAPER_STEP, PAPER_TOKENS, PRESETS


def flag(default, help, **more):
    return field(default=default, metadata=dict(help=help, **more))


@dataclass
class Args:
    stage: str = flag("distill", "distill: a student of --teacher; pretrain: random weights in its shape, CE only; sft: its own weights, "
                      "on chats", choices=["distill", "pretrain", "sft"])
    teacher: str = flag("tiny", f"preset ({', '.join(PRESETS)}), hub id, or local HF folder")
    preset: str = flag("none", "paper: the published budget, batch, schedule and weights, for every flag not given (teachers.py); --plan "
                       "prints its data", choices=["none", "paper"])
    revision: str = flag("", "hub revision of the teacher (default: newest; the exact commit is recorded)")
    mode: str = flag("core", "how the student's MLP trains (core.py); scratch: no weight of the teacher's at all, the baseline",
                     choices=[*MODES, "scratch"])
    recipe: str = flag("lrc", "the terms of the objective and the start that goes with them (distill.py)", choices=list(RECIPES))
    without: str = flag("", "terms of the recipe to leave out, by name, with commas: kl, ce, q, k, v, o, gate, up, hidden, attn_out, "
                        "ffn_out")
    init: str = flag("auto", "the start: calibrated, or W_T P with a random P: orthonormal, or random, N(0, 0.02) as LRC's own code "
                     "(auto: gpd orthonormal, else calibrated); with --stage sft the model to fine-tune: RUN/student, or another folder "
                     "or hub id")
    coordinates: str = flag("span", "what stays in the span trains as Z (span) or as P, W = W_T P (teacher)", choices=["span", "teacher"])
    bases: str = flag("auto", "core's [T U_perp]: explicit, d_ff^2 numbers a matrix; compact, d_ff H, the fastest; implicit, 2 H^2 and "
                      "the teacher's own weights (auto: explicit up to a d_ff of 2,048, to be read; else compact)",
                      choices=["auto", *BASES])
    width: int = flag(0, "student width r (0: the preset's, else half the teacher's)")
    data: str = flag("", "stdlib, a .txt/.md/.py/.jsonl/.parquet file, a folder of such, hub:OWNER/NAME, a prepared folder, or a mixture "
                     "of those by weight, a=10,b=0.35 (default for tiny: stdlib); for sft a .jsonl of chats")
    doc_mask: bool = flag(False, "no attention from a document to those packed before it (the calibrated start is fitted without this)")
    steps: int = flag(400, "optimizer steps")
    batch_size: int = flag(16, "sequences a micro-batch, a rank")
    seq_len: int = flag(128, "tokens a sequence")
    accum: int = flag(1, "micro-batches a step, a rank")
    lr: float = flag(0.0, "peak learning rate (0: the preset's, else 1e-4; sft: 1e-5)")
    schedule: str = flag("linear", "decay after warm-up", choices=["linear", "cosine", "constant"])
    warmup: float = flag(0.05, "warm-up as a share of the steps (published: 0.005)")
    weight_decay: float = flag(0.0, "AdamW's, on matrices only")
    clip: float = flag(1.0, "largest gradient norm over all coordinates")
    temperature: float = flag(40.0, "T of the KL")
    w_kl: float = flag(1.0, "weight of the KL (its scale 1.28 T^2 is inside the term)")
    w_ce: float = flag(1.0, "weight of the cross-entropy")
    w_align: float = flag(-1.0, "lambda, weight of the alignment (-1: the preset's, else the published 0.2)")
    attention: str = flag("auto", "attention alignment (auto: cosine; recipe clone: mse)", choices=["auto", "cosine", "mse"])
    hidden: str = flag("auto", "hidden-state alignment: mse as published, or relative to the teacher's size, token by token (auto: "
                       "relative; tiny: mse)", choices=["auto", "relative", "mse"])
    calibration_tokens: int = flag(32768, "training tokens that the calibrated start sees; well above the teacher's width")
    seed: int = flag(1234, "seed of the data order, of random starts and random bases; the calibrated start uses none")
    out: str = flag("", "run folder (default: runs/TEACHER-MODE)")
    resume: bool = flag(False, "go on from the newest checkpoint of --out, with the flags stored there")
    compile: bool = flag(False, "torch.compile the student and the teacher")
    dtype: str = flag("auto", "autocast: auto is bfloat16 where CUDA has it, else float32", choices=["auto", "float32", "bfloat16"])
    checkpointing: bool = flag(False, "activation checkpointing: a student's block runs again in backward, for less memory; the same "
                               "numbers")
    teacher_dtype: str = flag("auto", "the frozen teacher's weights (auto: the start is fitted to fp32 and the loop runs as --dtype says; "
                              "files of bf16 stay bf16 where it says bf16)", choices=["auto", "float32", "bfloat16"])
    shard: bool = flag(False, "share the matrices out over the ranks: each holds the bases, coordinates and moments of its own; the same "
                       "numbers, and whole checkpoints")
    tf32: bool = flag(False, "CUDA: matrix products of fp32 in TF32, that is the once-a-step map from coordinates to weights")
    eval_every: int = flag(100, "steps between evaluations on held-out text")
    eval_tokens: int = flag(32768, "held-out tokens an evaluation reads, evenly spread")
    save_every: int = flag(200, "steps between checkpoints")
    keep: int = flag(1, "how many checkpoints stay, the newest")
    non_finite: str = flag("stop", "when a loss or gradient is not finite: stop, or skip that step, which then changes nothing (a tenth "
                           "in a row stops)", choices=["stop", "skip"])
    check_ranks: int = flag(1000, "steps between checks that all ranks hold the same bits (also made at the start)")
    log_every: int = flag(20, "steps between progress lines; metrics.jsonl gets every step")
    plan: bool = flag(False, "print what this run would be, and stop")
    gpus: int = flag(0, "--plan: ranks to count with (0: those of torchrun, else 8 with --preset paper and 1 without)")
    mfu: float = flag(0.4, "--plan: the share of an H100's peak that is assumed to be reached")
    gpu_memory: float = flag(80.0, "--plan: GB on a GPU")


PLAN_ONLY = {"gpus", "mfu", "gpu_memory"}
FREE_ON_RESUME = {"resume", "out", "compile", "log_every", "eval_every", "save_every", "keep", "non_finite", "check_ranks", "plan",
                  "checkpointing", "shard", *PLAN_ONLY}


def option(name: str) -> str:
    """A flag as it stands on the command line."""
    return "--" + name.replace("_", "-")


def parse(argv: list[str] | None, about: str = "") -> Args:
    """Command line -> Args. With --resume the run folder's own flags are the defaults, and contradicting one is refused."""
    parser = argparse.ArgumentParser(usage="%(prog)s [--flag value ...]   (--help explains each)", description=about,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)  # so that what was given and what was not can be told apart
    for f in fields(Args):
        kind = dict(action="store_true") if isinstance(f.default, bool) else dict(type=type(f.default))
        meta = dict(f.metadata)
        meta["help"] += "" if f.default in ("", False, 0, -1) else f" (default: {f.default})"
        parser.add_argument(option(f.name), **kind, **meta)
    given = vars(parser.parse_args(argv))
    args = Args(**given)
    if not args.out:
        name = Path(network(args))
        name = name.parent.name if name.name == "student" and name.parent.name else name.name  # RUN/student
        args.out = f"runs/{name}-{args.mode if args.stage == 'distill' else args.stage}"
    if args.resume:
        args = resumed(args, given)
    check(args)
    if not args.resume:
        check_effect(args)
    preset = PRESETS.get(args.teacher, {})
    if args.preset == "paper" and not args.resume:
        follow_paper(args, given)
    args.width = args.width or preset.get("width", 0)
    args.lr = args.lr or (1e-5 if args.stage == "sft" else preset.get("lr", 1e-4))
    args.w_align = preset.get("w_align", 0.2) if args.w_align < 0 else args.w_align
    args.hidden = preset.get("hidden", "relative") if args.hidden == "auto" else args.hidden
    if args.attention == "auto":
        args.attention = "mse" if args.recipe == "clone" else "cosine"
    if args.init == "auto" and args.stage == "distill":
        args.init = "orthonormal" if args.recipe == "gpd" else "calibrated"
    args.data = args.data or ("stdlib" if args.teacher == "tiny" and args.stage != "sft" else "")
    if args.stage == "distill" and not terms(args):
        raise Refusal("every term of the objective is left out or has weight 0 (--without, --w-kl, --w-ce, --w-align): nothing would be "
                      "trained")
    return args


def resumed(args: Args, given: dict) -> Args:
    """The flags of the run at --out; what contradicts them, or would have no effect now, is refused."""
    record = read_json(Path(args.out) / "config.json")
    if not isinstance(record.get("args"), dict):
        raise Refusal(f"{args.out}: its config.json is not that of a run; --resume takes the --out of an earlier one")
    stored = {f.name: f.default for f in fields(Args)} | record["args"]  # older runs lack newer flags
    for f in fields(Args):
        value, kind = stored[f.name], type(stored[f.name])
        fits = kind is type(f.default) or (kind, type(f.default)) == (int, float)
        if not fits or value not in f.metadata.get("choices", [value]):
            raise Refusal(f"{args.out}/config.json: {f.name} is {value!r}, which {option(f.name)} cannot be; was it edited?")
    if unknown := sorted(stored.keys() - {f.name for f in fields(Args)}):
        raise Refusal(f"{args.out}/config.json: {unknown[0]} is no flag of this train.py; resume with the code the run began with "
                      "(its git_commit)")
    for name, value in given.items():
        if name not in FREE_ON_RESUME and value != stored[name]:
            raise Refusal(f"{option(name)} {value} contradicts {args.out}/config.json ({stored[name]}); a resumed run keeps its flags")
    args = Args(**stored | given | {"out": args.out})
    for name, why in of_the_moment(args).items():
        if name in given:
            raise Refusal(f"{option(name)} would have no effect: {why}; leave it out")
    return args


def network(args: Args) -> str:
    """Where the files come from that a run begins with: the teacher's, in fine-tuning the model's own."""
    return args.init if args.stage == "sft" else args.teacher


def launched() -> dict[str, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK, as far as the environment has them: what torchrun tells a process about its place."""
    told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if os.environ.get(name)}
    if not all(value.isdecimal() for value in told.values()) or int(told.get("RANK", 0)) >= int(told.get("WORLD_SIZE", 1)):
        place = " ".join(f"{name}={value}" for name, value in told.items())
        raise Refusal(f"{place} in the environment is no place among ranks; start several with torchrun, or unset them")
    return {name: int(value) for name, value in told.items()}


def ranks(args: Args) -> int:
    """How many ranks the run has, or with --plan is counted with."""
    if args.plan and args.gpus:
        return args.gpus
    return launched().get("WORLD_SIZE") or (8 if args.plan and args.preset == "paper" else 1)


def follow_paper(args: Args, given: dict) -> None:
    """Fill the flags that were not given from the published recipe: its constants; batch_size and accum so that a step has 49,152 tokens;
    steps so that all steps together have its budget."""
    if args.stage not in PAPER or args.stage == "distill" and args.teacher == "tiny":
        this = "the embedded teacher" if args.stage == "distill" else f"--stage {args.stage}"
        raise Refusal("--preset paper is for --stage distill, with a teacher of 135M parameters or more, and for --stage sft; "
                      f"not for {this}: leave it out")
    for name, value in PAPER[args.stage].items():
        setattr(args, name, given.get(name, value))
    if not {"batch_size", "accum"} <= given.keys():
        # batch_size * accum = 49,152 tokens / seq_len / ranks: one sequence a micro-batch takes the least memory
        args.batch_size, args.accum = given.get("batch_size", 1), given.get("accum", 1)
        micro = args.batch_size * args.accum * args.seq_len * ranks(args)  # tokens, with the factor that is still missing at 1
        if PAPER_STEP % micro:
            raise Refusal(f"--preset paper takes {PAPER_STEP:,} tokens a step: not a multiple of {args.batch_size * args.accum} x "
                          f"{args.seq_len} tokens on {ranks(args)} ranks; change the number of ranks (of 2048: 1, 2, 3, 4, 6, 8, 12, 24), "
                          "or give both --batch-size and --accum")
        missing = "batch_size" if "accum" in given else "accum"
        setattr(args, missing, PAPER_STEP // micro)
    if "steps" not in given:
        args.steps = round(PAPER_TOKENS[args.stage] / (args.batch_size * args.accum * args.seq_len * ranks(args)))
    if not args.data and not args.plan:
        what, commands = PAPER_DATA[args.stage]
        told = ", then ".join(f"`{c.format(teacher=args.teacher)}`" for c in commands)
        raise Refusal(f"--data is needed; the paper's is {what}: {told}")


STARTS = ("auto", "calibrated", "orthonormal", "random")
OF_DISTILLATION = {"mode", "recipe", "without", "coordinates", "bases", "width", "temperature", "w_kl", "w_ce", "w_align", "attention",
                   "hidden", "teacher_dtype"}
OF_ALIGNMENT = {"attention", "hidden", "w_align"}


def of_the_moment(args: Args) -> dict[str, str]:
    """Flags that may be given anew at a resume, and have no effect here: name -> why."""
    inert = {} if args.plan else dict.fromkeys(PLAN_ONLY, "only --plan reads it")
    if ranks(args) <= 1:
        more = "; give --gpus N" if args.plan else ""
        inert |= {"shard": f"one rank has nobody to share with{more}", "check_ranks": "one rank has nobody to be compared with"}
    return inert


def check_effect(args: Args) -> None:
    """Refuse a flag that this run would ignore: its author believes that it does something."""
    distil, begins = args.stage == "distill", network(args)
    named = terms(args) if distil else ()
    local = args.stage != "pretrain" and (begins == "tiny" or Path(begins).is_dir())
    table = [  # (where this holds, these flags do nothing, and this is why); of two reasons for a flag the upper one is told
        (not distil, OF_DISTILLATION, f"--stage {args.stage} has no teacher to follow"),
        (args.stage == "sft", {"teacher"}, "the model to fine-tune is --init"),
        (args.stage == "pretrain", {"init"}, "pretraining starts from random weights"),
        (distil and args.mode == "scratch", {"init", "coordinates", *OF_ALIGNMENT}, "--mode scratch inherits and aligns nothing"),
        (distil and args.recipe == "gpd", OF_ALIGNMENT, "recipe gpd aligns nothing"),
        (distil and args.mode != "core", {"bases"}, f"mode {args.mode} has no U_perp"),
        (distil and "kl" not in named, {"temperature"}, "the objective has no kl"),
        (distil and not {"q", "k", "v", "o"} & set(named), {"attention"}, "the objective has no k, o, q, v"),
        (distil and "hidden" not in named, {"hidden"}, "the objective has no hidden"),
        (local, {"revision"}, f"{begins} is no repository of the hub")]
    inert = of_the_moment(args)
    for holds, names, why in table:
        if holds:
            inert = dict.fromkeys(names, why) | inert
    for f in fields(Args):
        value = getattr(args, f.name)
        if f.name in inert and value != f.default:
            raise Refusal(f"{option(f.name)} {value} would have no effect: {inert[f.name]}; leave it out")


def terms(args: Args) -> tuple[str, ...]:
    """The terms of the objective that this run has: those of the recipe, less --without, less those of weight 0. A student from
    scratch has nothing to align: its frame and its heads are its own."""
    without = {name for name in args.without.replace(" ", "").split(",") if name}
    recipe = tuple(t for t in RECIPES[args.recipe] if args.mode != "scratch" or t in ("kl", "ce"))
    for name in sorted(without - set(recipe)):
        scratch = ", mode scratch" if args.mode == "scratch" else ""
        raise Refusal(f"--without {name}: not a term of recipe {args.recipe}{scratch}, which has {', '.join(recipe)}")
    weight = lambda name: {"kl": args.w_kl, "ce": args.w_ce}.get(name, args.w_align)
    return tuple(t for t in recipe if t not in without and weight(t))


def objective_of(args: Args, real_vocab: int, separator: int | None = None) -> Objective:
    separator = separator if args.doc_mask else None
    if args.stage != "distill":
        return Objective(w_kl=0, w_align=0, separator=separator)
    named = terms(args)
    align = tuple(t for t in named if t not in ("kl", "ce"))
    return Objective(args.temperature, args.w_kl * ("kl" in named), args.w_ce * ("ce" in named), args.w_align, align,
                     args.attention, args.hidden, real_vocab, checkpointing=args.checkpointing, separator=separator)


def teacher_dtypes(args: Args, file: str, student: str) -> tuple[str, str]:
    """The teacher's dtype (while the clone is built, in the loop), from those of its files and of the student's arithmetic. By default the
    start is fitted to fp32 weights and the loop runs as the student does. Files of bf16 lose nothing as bf16: starts.py widens what it
    reads, a block at a time."""
    loop = student if args.teacher_dtype == "auto" else args.teacher_dtype
    return ("bfloat16" if args.teacher_dtype == "bfloat16" or file == loop == "bfloat16" else "float32"), loop


def check(args: Args) -> None:
    """Refuse what cannot be meant. Ranges are written as `not in range`, so that nan is refused too."""
    if args.stage == "sft" and args.init in STARTS:
        raise Refusal("--stage sft needs --init: the model to fine-tune, RUN/student or another folder or hub id")
    if args.stage == "distill" and args.init not in STARTS:
        raise Refusal(f"--init {args.init}: one of {', '.join(STARTS)}; a model to fine-tune goes with --stage sft")
    at_least_1 = ("steps", "batch_size", "seq_len", "accum", "eval_every", "save_every", "log_every", "eval_tokens", "calibration_tokens",
                  "keep", "check_ranks")
    most = 1e30
    ranges = {
        **dict.fromkeys(at_least_1, (1, 10 ** 15)),
        **dict.fromkeys(("lr", "w_kl", "w_ce", "weight_decay"), (0, most)),
        **dict.fromkeys(("width", "gpus"), (0, 10 ** 15)),
        **dict.fromkeys(("clip", "gpu_memory"), (1e-30, most)),
        "temperature": (1e-30, 1e15),  # T^2 is an fp32 number
        "warmup": (0, 1),
        "mfu": (1e-30, 1),
        "steps": (1, 9_999_999),       # a checkpoint's name has seven digits
        "seed": (0, 2 ** 63 - 1)}      # PyTorch's has 63 bits
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if not low <= value <= high:
            least = "positive" if low == 1e-30 else f"at least {low}"
            raise Refusal(f"{option(name)} {value} is out of range: it must be {least} and at most {high}")
    if not (0 <= args.w_align <= most or args.w_align == -1):
        raise Refusal(f"--w-align {args.w_align} is out of range: at least 0 and at most {most}, or -1 for the preset's")
