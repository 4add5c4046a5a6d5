"""What is deployed: a run's student as a Hugging Face folder that stock transformers loads, or as a GGUF file for llama.cpp.

    python merge.py RUN                        # -> RUN/student (train.py does the same at the end of a run)
    python merge.py RUN --out DIR --dtype bfloat16
    python merge.py RUN --gguf                 # -> RUN/student.gguf; a model folder in the place of RUN -> FOLDER.gguf

There is nothing left to multiply here: the network that trained *is* the deployed student (lrc.Clone.deploy), and a checkpoint
holds its weights in fp32, one plain matrix a projection. The one rounding is the final cast to --dtype.
"""
from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

import checkpoints
import runs
from config import Config
from files import Refusal, read_json
from model import Transformer
from to_gguf import write_gguf


def deployed(run: Path) -> tuple[dict, dict, Transformer]:
    """(config.json, state.json, student) of the newest checkpoint of `run`. Strict: a missing, extra, misshapen or non-finite tensor
    is refused by name."""
    if not (run / "tokenizer").is_dir():
        raise Refusal(f"{run}: no tokenizer folder in it; is this a run folder of train.py?")
    record = read_json(run / "config.json")
    folder, state = checkpoints.find_checkpoint(run)
    if not (isinstance(record.get("student"), dict) and isinstance(record.get("args"), dict) and isinstance(record.get("data"), dict)):
        raise Refusal(f"{run / 'config.json'}: not that of a run (no args, data and student in it)")
    config = Config.from_hf(record["student"], f"{run / 'config.json'}: student")
    tensors = checkpoints.read_tensors(folder / "student.safetensors")
    with torch.device("meta"):
        asked = sum(p.numel() for p in Transformer(config).parameters())
    held = sum(t.numel() for t in tensors.values())
    if asked > 2 * held:  # before memory is taken for it; small differences are told by name below
        raise Refusal(f"{run / 'config.json'}: its student has {asked:,} numbers, the checkpoint {held:,}")
    student = Transformer(config)
    checkpoints.restore(f"{run}/checkpoint", dict(student.named_parameters()), tensors)
    return record, state, student


def export(run: Path, out: Path | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """Write the newest checkpoint of `run` as a HF folder: weights, config, tokenizer files, model card.

    The folder appears whole or not at all; a student that already stands at `out` is replaced only then.
    """
    run = Path(run)
    out = (Path(out) if out else run / "student").resolve()
    if out.exists() and not (out.is_dir() and ((out / "model.safetensors").exists() or not any(out.iterdir()))):
        raise Refusal(f"{out}: exists and is not a model folder; delete it or choose another --out")
    readme = out / "README.md"
    ours = readme.is_file() and "low-rank clone distillation" in readme.read_text(encoding="utf-8", errors="replace")
    if out.exists() and any(out.iterdir()) and not ours:
        raise Refusal(f"{out}: holds a model that no run made; choose another --out")
    record, state, student = deployed(run)
    try:
        about = card(run, record, state, student)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refusal(f"{run}: config.json, metrics.jsonl or the checkpoint's state.json is not as train.py writes it "
                      f"({type(error).__name__}: {error})") from None
    making = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(making, ignore_errors=True)
    try:
        student.save_pretrained(making, dtype)
        for file in sorted((run / "tokenizer").iterdir()):
            shutil.copyfile(file, making / file.name)
        (making / "README.md").write_text(about, encoding="utf-8", errors="backslashreplace")  # a file's name may be no text
        swap(making, out)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return out


def export_gguf(source: Path, out: Path | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """Write the newest checkpoint of a run, or a model folder, as one GGUF file: at `out`, or in it if that is a folder."""
    source = Path(source)
    exported = (source / "model.safetensors").exists() or (source / "model.safetensors.index.json").exists()
    default = source.resolve().with_name(f"{source.resolve().name}.gguf") if exported else source / "student.gguf"
    out = Path(out) / default.name if out and Path(out).is_dir() else Path(out or default)
    if out.exists() and first_bytes(out, 4) != b"GGUF":
        raise Refusal(f"{out}: exists and is no GGUF file; choose another --out")
    net, tokenizer = (Transformer.from_pretrained(source), source) if exported else (deployed(source)[2], source / "tokenizer")
    out.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(net, tokenizer, out, dtype)


def first_bytes(file: Path, count: int) -> bytes:
    with file.open("rb") as opened:
        return opened.read(count)


def swap(making: Path, out: Path) -> None:
    """Put `making` at `out`; what stood there goes only once the new folder is in place."""
    aside = out.with_name(f"{out.name}.{os.getpid()}.old.tmp")
    if out.exists():
        os.rename(out, aside)
    try:
        os.rename(making, out)
    except BaseException:
        if aside.exists():
            os.rename(aside, out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def card(run: Path, record: dict, state: dict, student: Transformer) -> str:
    """The model card: what was distilled from what, with which figures."""
    args, rows = record["args"], runs.read_metrics(run)
    made = {"distill": f"A student of {record['teacher']}", "pretrain": "A pretrained network", "sft": f"{record['teacher']}, fine-tuned"}
    train = [r for r in rows if "loss" in r and r["step"] <= state["step"]]
    held = [r for r in rows if "val_ce" in r and r["step"] <= state["step"]]
    flags = ("recipe", "without", "init", "coordinates") if args["stage"] == "distill" else ()
    lines = [("stage", args["stage"]), ("teacher", record["teacher"]), ("mode", args["mode"] if args["stage"] == "distill" else "-"),
             *((name, args[name]) for name in flags if args.get(name)),
             ("width", f"{student.config.hidden_size}"), ("parameters", f"{sum(p.numel() for p in student.parameters()):,}"),
             ("steps", f"{state['step']:,}"), ("tokens", f"{state['tokens']:,}"),
             ("data", f"{record['data']['source']} (fingerprint {record['data']['fingerprint']})"),
             ("last training step", figures(train[-1:], ("loss", "kl", "ce", "align"))),
             ("held-out", figures(held[-1:], ("val_ce", "val_kl", "val_top1"))),
             ("code", record["git_commit"] or "not in git")]
    c = student.config
    if c.model_type == "qwen2" and c.hidden_size != c.num_attention_heads * c.head_dim:  # the warning travels with the folder
        lines.append(("serving", "vLLM: --model-impl transformers (its own Qwen2 takes width / heads for head_dim and answers wrongly)"))
    return (f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# {made[args['stage']]}\n\n"
            "Made with the code of low-rank clone distillation (arXiv 2505.12781, 2609.02006). Nats a token; "
            "val_kl is KL(teacher || student) at T = 1.\n\n"
            "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in lines))


def figures(rows: list[dict], names: tuple[str, ...]) -> str:
    return ", ".join(f"{n} {rows[0][n]:.4f}" for n in names if n in rows[0]) if rows else "none logged"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of train.py; with --gguf also a model folder")
    parser.add_argument("--out", type=Path, help="folder to write (default: RUN/student); with --gguf a file (default: RUN/student.gguf)")
    parser.add_argument("--gguf", action="store_true", help="write a GGUF file for llama.cpp instead of a Hugging Face folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32",
                        help="of the exported weights (default: float32); float16, which large activations overflow, with --gguf alone")
    arguments = parser.parse_args()
    if arguments.dtype == "float16" and not arguments.gguf:
        parser.error("--dtype float16 goes with --gguf: transformers computes in the dtype of the file, and fp16 activations overflow; "
                     "take bfloat16")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is half written goes, as at Ctrl-C
    try:
        print((export_gguf if arguments.gguf else export)(arguments.run, arguments.out, getattr(torch, arguments.dtype)))
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing was written")
