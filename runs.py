"""A run is a folder: what it was asked, what it measured, where it stands, what it made.

    python runs.py RUN [RUN ...]        # compare finished runs: mean and spread over seeds, paired differences to plain LRC

    RUN/config.json      all flags, the data's and the teacher's identity, versions, git state
    RUN/tokenizer/       the teacher's tokenizer files, for the exported student
    RUN/metrics.jsonl    one JSON object a line: a training step (step, tokens, loss, kl, ce, align, lr, tokens_per_second, ...; spike:
                         how far the loss jumped; skipped: why the step changed nothing) or an evaluation (step, val_ce, val_kl, val_top1)
    RUN/curves.png       the same as a picture
    RUN/checkpoint/      step-0000100/state.safetensors (coordinates, AdamW's moments), student.safetensors
                         (the deployed weights, so that merge.py needs no teacher), state.json; no pickle
    RUN/student/         the merged student, a Hugging Face folder

Every file but metrics.jsonl, which grows by a row, appears whole or not at all: it is written beside its place and renamed into it.
"""
from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from checkpoints import newest_checkpoint
from core import MODES
from files import Refusal, read_json, write_whole, writing
from teachers import TOKENIZER


def check_folder(run: Path, resume: bool) -> None:
    """Refuse to start over in a folder that holds a run, or that holds anything else."""
    if not str(run).isprintable() and any("\ud800" <= c <= "\udfff" for c in str(run)):
        raise Refusal(f"{run}: a run folder's name must be UTF-8, safetensors reads no other; choose another --out")
    if resume or not run.exists():
        return
    if newest_checkpoint(run):
        raise Refusal(f"{run} already holds a run: add --resume to go on with it, or choose another --out")
    if (run / "student").exists():
        raise Refusal(f"{run} holds a finished student whose checkpoints are gone: choose another --out, or delete {run}/student to "
                      "begin anew")
    begun = (".lock", "metrics.jsonl.tmp")  # all that a run may leave before its metrics.jsonl is there
    if not run.is_dir() or any(p.name not in begun for p in run.iterdir()) and not (run / "metrics.jsonl").exists():
        raise Refusal(f"{run}: exists and is not a run folder; choose another --out")


def lock(run: Path):
    """Hold RUN/.lock for as long as the returned file lives; a second process in the same folder is refused."""
    run.mkdir(parents=True, exist_ok=True)
    file = (run / ".lock").open("w")
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows has no flock
        pass
    except BlockingIOError:
        raise Refusal(f"{run}: another process is at work in this folder; wait for it or choose another --out") from None
    except OSError as error:
        print(f"{run}/.lock: this file system locks no files ({error.strerror}); see to it that no second process trains in this folder",
              file=sys.stderr)
    return file


def surroundings(device: str = "cpu") -> dict:
    """Versions, git state and what arithmetic depends on, for config.json."""
    def git(*words):
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None
    try:
        state = {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain"))}
    except OSError:  # none here, or not for this user
        state = {"git_commit": None, "git_dirty": None}
    return state | {"python": platform.python_version(), "torch": torch.__version__, "device": device, "threads": torch.get_num_threads(),
                    "platform": platform.platform()}


TOKENIZER_FILES = (*TOKENIZER, "generation_config.json")


def start(run: Path, args: dict, identity: dict, folder: Path, student: dict, device: str = "cpu") -> None:
    """Make the run folder: config.json, and the tokenizer files that the exported student will carry. `identity` is what a resumed
    run must share besides the flags: teacher, its weights, data, ranks."""
    stamp = hashlib.sha256(json.dumps([args, identity]).encode()).hexdigest()[:16]  # by which a checkpoint knows its run
    carried = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).exists()}
    with writing(run, then="begin again"):
        run.mkdir(parents=True, exist_ok=True)
        write_whole(run / "metrics.jsonl", "")  # first: it is what check_folder knows a run by
        (run / "tokenizer").mkdir(parents=True, exist_ok=True)
        for name, content in carried.items():
            (run / "tokenizer" / name).write_bytes(content)
        record = dict(run=stamp, args=args, **identity, student=student, **surroundings(device))
        write_whole(run / "config.json", json.dumps(record, indent=2) + "\n")


def read_record(run: Path) -> dict:
    """config.json of a run, its parts of the kinds that train.py writes."""
    record = read_json(run / "config.json")
    args, data = record.get("args"), record.get("data")
    if not (isinstance(args, dict) and isinstance(data, dict) and isinstance(data.get("fingerprint"), str)
            and isinstance(record.get("teacher"), str) and type(record.get("ranks")) is int):
        raise Refusal(f"{run / 'config.json'}: args, data, teacher or ranks are not as train.py writes them; is this a run folder, "
                      "or was it edited?")
    return record


def same(run: Path, identity: dict) -> None:
    """Refuse to resume with another teacher, other data or another number of ranks than the run began with."""
    record = read_record(run)
    for name, now in identity.items():
        was = record.get(name, now)  # runs from before weights had a digest lack it
        if name == "data":
            was, now = was["fingerprint"], now["fingerprint"]
        if was != now:
            raise Refusal(f"{run}: the run began with {name.replace('_', ' ')} {was}, now it is {now}; resume with what it began with")


def shards_of(run: Path) -> tuple[list[Path], list[float]] | None:
    """The folders of shards that the run began with, and their weights, where all of them still stand: their sources may have changed
    since, or be out of reach. That they hold what they did, `same` sees to."""
    data = read_record(run)["data"]
    folders, weights = data.get("folders"), data.get("weights")
    if not (isinstance(folders, list) and folders and isinstance(weights, list) and len(weights) == len(folders)):
        return None
    for folder, weight in zip(folders, weights):
        if not (isinstance(folder, str) and (Path(folder) / "tokens.json").exists() and type(weight) is float and weight > 0):
            return None
    return list(map(Path, folders)), weights


def elsewhere(run: Path, device: str) -> str:
    """A line on what arithmetic depends on and is another than where the run began; "" where nothing is."""
    record, now = read_record(run), surroundings(device)
    others = [f"{name} {now[name]} (was {record[name]})" for name in ("torch", "device", "threads", "git_commit")
              if record.get(name, now[name]) != now[name]]
    return f"{run}: resumed with {', '.join(others)}: it goes on, perhaps not bit for bit as it would have there" if others else ""


# -------------------------------------------------------------------------------------------- metrics


def append_metrics(run: Path, row: dict) -> None:
    with writing(run / "metrics.jsonl"), (run / "metrics.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def read_metrics(run: Path) -> list[dict]:
    """The rows of metrics.jsonl; a last line torn by a crash is left out."""
    path, rows = run / "metrics.jsonl", []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            row = None
        figures = {k: v for k, v in row.items() if k not in ("teacher", "skipped")} if isinstance(row, dict) else {}
        if type(figures.get("step")) is not int or any(type(v) not in (int, float) for v in figures.values()):
            raise Refusal(f"{path}, line {number}: not a row of figures with its step; mend or drop the line")
        rows.append(row)
    return rows


def cut_metrics(run: Path, step: int, say=print) -> None:
    """Forget what was logged after the checkpoint that a run resumes from: those steps come again. Steps before it that are not there
    are told."""
    kept = [row for row in read_metrics(run) if row["step"] <= step]
    if lost := step - len({row["step"] for row in kept if "loss" in row or "skipped" in row}):
        say(f"{run / 'metrics.jsonl'}: {lost} of the {step} steps up to the checkpoint are not in it; was it edited? The run goes on, "
            "its table and curves lack them")
    with writing(run / "metrics.jsonl"):
        write_whole(run / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))


def table(run: Path, numbers: dict[str, int]) -> str:
    """The result of a run: held-out figures of the teacher, the student at step 0 and the student now."""
    rows = read_metrics(run)
    evals = [r for r in rows if "val_ce" in r]
    lines = [("teacher", r["teacher"]) for r in rows if "teacher" in r]
    lines += [(f"student, step {r['step']}", r) for r in (*evals[:1], *evals[-1:])]
    text = [f"{'held-out':<20}{'CE':>9}{'KL to teacher':>15}{'top-1':>8}"]
    for name, row in lines:
        kl, top1 = (f"{row[k]:.4f}" if k in row else "-" for k in ("val_kl", "val_top1"))
        text.append(f"{name:<20}{row['val_ce']:>9.4f}{kl:>15}{top1:>8}")
    return "\n".join(text + [""] + [f"{name:<20}{value:>15,}" for name, value in numbers.items()])


def draw_curves(run: Path) -> None:
    """curves.png: each loss term by step, and held-out cross-entropy with the teacher's as a line."""
    plt = pictures()
    rows = read_metrics(run)
    teacher_ce = next((r["teacher"]["val_ce"] for r in rows if "teacher" in r), None)
    steps, evals = [r for r in rows if "loss" in r], [r for r in rows if "val_ce" in r]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name in ("loss", "kl", "ce", "align"):
        points = [(r["step"], r[name]) for r in steps if r.get(name) is not None]
        if points:
            left.plot(*zip(*points), label=name, linewidth=2 if name == "loss" else 1)
    left.set(xlabel="step", ylabel="training loss by term", yscale="log")
    if left.lines:
        left.legend()
    right.plot([r["step"] for r in evals], [r["val_ce"] for r in evals], "o-", color="C0", label="student, held-out CE")
    if evals and "val_kl" in evals[0]:
        right.plot([r["step"] for r in evals], [r["val_kl"] for r in evals], "s-", color="C1", label="KL(teacher || student)")
    if teacher_ce is not None:
        right.axhline(teacher_ce, color="black", linestyle="--", label="teacher, held-out CE")
    right.set(xlabel="step", ylabel="nats a token")
    right.legend()
    with writing(run / "curves.png"):
        save_picture(figure, run / "curves.png")


def pictures():
    """matplotlib's pyplot, drawing to files alone."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def save_picture(figure, path: Path, dpi: int = 110) -> None:
    """Whole or not at all, and out of matplotlib's memory."""
    making = path.with_name(f"{path.stem}.tmp{path.suffix}")
    try:
        figure.savefig(making, dpi=dpi)
        os.replace(making, path)
    finally:
        making.unlink(missing_ok=True)
        pictures().close(figure)


FREE_TO_DIFFER = {"mode", "bases", "width", "seed", "out", "resume", "compile", "plan", "log_every", "save_every", "eval_every",
                  "checkpointing", "shard", "shard_optimizer", "keep", "check_ranks", "non_finite"}


def compare(folders: list[Path]) -> str:
    """A markdown table of finished distillations, one row a (width, mode), over seeds; differences are paired by seed and data order.
    Runs that differ in anything else are refused."""
    ends: dict[tuple, dict[int, dict]] = {}
    first = None
    if not folders:
        raise Refusal("name the run folders to compare: python runs.py RUN [RUN ...]")
    for run in folders:
        record, evals = read_record(run), [r for r in read_metrics(run) if {"val_ce", "val_kl", "val_top1"} <= r.keys()]
        args = record["args"]
        if any(type(args.get(name)) is not int for name in ("steps", "width", "seed")) or args.get("mode") not in (*MODES, "scratch"):
            raise Refusal(f"{run / 'config.json'}: steps, width, seed or mode are not as train.py writes them; was it edited?")
        if not evals or evals[-1]["step"] != args["steps"]:
            raise Refusal(f"{run}: not a finished distillation ({evals[-1]['step'] if evals else 0} of {args['steps']} steps)")
        shared = {k: v for k, v in args.items() if k not in FREE_TO_DIFFER} | {"data": record["data"]["fingerprint"]}
        first = first or (run, shared)
        for name in sorted(shared.keys() | first[1].keys()):  # a run from before a flag existed does not hold it
            if shared.get(name) != first[1].get(name):
                raise Refusal(f"{run} and {first[0]} differ in {name}: {shared.get(name)} and {first[1].get(name)}; compare like with like")
        seeds = ends.setdefault((args["width"], args["mode"]), {})
        if args["seed"] in seeds:
            raise Refusal(f"{run}: a second run of mode {args['mode']}, width {args['width']}, seed {args['seed']}")
        seeds[args["seed"]] = evals[-1] | {"start": evals[0]["val_ce"]}

    spread = lambda values: f"{statistics.mean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")
    lines = ["| width | mode | seeds | CE, step 0 | CE | KL to teacher | top-1 | CE − CE(lrc), paired |",
             "|---|---|---|---|---|---|---|---|"]
    for (width, mode), seeds in sorted(ends.items(), key=lambda item: (-item[0][0], [*MODES, "scratch"].index(item[0][1]))):
        plain = ends.get((width, "lrc"), {})
        paired = [end["val_ce"] - plain[seed]["val_ce"] for seed, end in seeds.items() if seed in plain]
        figures = [spread([end[key] for end in seeds.values()]) for key in ("start", "val_ce", "val_kl", "val_top1")]
        row = [width, mode, len(seeds), *figures, spread(paired) if paired and mode != "lrc" else ""]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        print(compare([Path(argument) for argument in sys.argv[1:]]))
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
