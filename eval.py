"""What a model can do: the nine tasks of the papers through lm-eval, and held-out text, for any folder, preset or hub id.

    python eval.py MODEL [MODEL ...] --tasks avg9                    # nine tasks, 0-shot, MathQA outside; needs the hub for the task data
    python eval.py MODEL --tasks avg9 --offline --local TASKS        # local YAML in TASKS stands in where there is one
    python eval.py MODEL --tasks hellaswag,my_task --local TASKS     # any lm-eval names, and your own
    python eval.py MODEL --text stdlib --teacher tiny                # held-out CE, bits per byte, KL and top-1 agreement

The harness asks for log-likelihoods; the network that answers is our own (likelihood.py).
Results are written task by task; a task that cannot be loaded is named before any model is, and the others run.
Metrics: arXiv 2609.02006, 2505.12781. Harness: EleutherAI/lm-evaluation-harness.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TQDM_DISABLE", "" if sys.stderr.isatty() else "1")  # read when tqdm is imported: no bars in a log file

import torch

from data import Tokens
from distill import IGNORE, evaluate
from files import Refusal, one_line, read_json, write_whole
from likelihood import Model, harness
from model import Transformer, fingerprint
from prepare import prepare
from sources import source_files
from teachers import resolve
from tokenizer import Tokenizer

# task -> its metric in the papers' mean of nine; MathQA is reported outside it
AVG9 = {"arc_easy": "acc", "arc_challenge": "acc_norm", "logiqa": "acc_norm", "commonsense_qa": "acc", "piqa": "acc", "winogrande": "acc",
        "boolq": "acc", "sciq": "acc", "mmlu": "acc"}
OUTSIDE = {"mathqa": "acc_norm"}
PUBLISHED = (("Llama-3.2-3B-Instruct (teacher)", 66.18), ("Llama 1.5B, plain LRC, 10B tokens", 63.04), ("Llama 1.5B, dense", 65.27),
             ("Llama 1.5B, core", 65.40), ("Llama 2.7B, plain LRC", 65.55), ("Llama 2.7B, dense", 68.26), ("Qwen 1.7B, plain LRC", 52.99),
             ("Qwen 1.7B, dense", 59.38), ("Qwen 1.7B, core, of another lineage", 63.44))  # Avg9, arXiv 2609.02006, lm-eval, 0-shot

# ------------------------------------------------------------------------------------------------ tasks


class Tasks(NamedTuple):
    """The tasks asked for, by name."""
    loaded: dict[str, list]    # its lm-eval tasks
    instead: dict[str, str]    # which local file it is
    missing: dict[str, str]    # why it cannot be had
    manager: object            # lm-eval's own


def find_tasks(names: list[str], local: Path | None) -> Tasks:
    """In folder `local`, NAME.yaml or local_NAME.yaml goes before lm-eval's own NAME."""
    from lm_eval.tasks import TaskManager
    own = {p.stem for p in local.rglob("*.yaml")} if local else set()
    choice = {name: f"local_{name}" if f"local_{name}" in own else name for name in names}
    all_own = own >= set(choice.values())  # lm-eval's take seconds to index
    tasks = Tasks({}, {}, {}, TaskManager(include_path=str(local.resolve()) if local else None, include_defaults=not all_own))
    for name, chosen in choice.items():
        try:
            found = tasks.manager.load([chosen])
            tasks.loaded[name] = [found["groups"][chosen]] if chosen in found["groups"] else list(found["tasks"].values())
            if chosen in own:
                tasks.instead[name] = f"{chosen} ({local})"
        except Exception as error:  # the libraries raise many unrelated classes: no network, a removed loader, a bad YAML
            tasks.missing[name] = f"{type(error).__name__}: {one_line(error)[:160]}"
    return tasks


def run_task(lm, name: str, tasks: list, limit: int | None, manager) -> dict:
    """One task, 0-shot -> its metric (that of the papers for the ten, else acc_norm, acc, or the first there is), standard error, all of
    lm-eval's figures."""
    from lm_eval import simple_evaluate
    begun = time.time()
    results = simple_evaluate(model=lm, tasks=tasks, num_fewshot=0, limit=limit, log_samples=False, verbosity="ERROR", task_manager=manager)
    top = next((task.name for task in tasks if hasattr(task, "get_all_tasks")), None) or tasks[0].task_name
    figures = {key.removesuffix(",none"): value for key, value in results["results"][top].items() if isinstance(value, float)}
    values = [key for key in figures if not key.endswith("_stderr")]
    wanted = AVG9.get(name) or OUTSIDE.get(name)
    metric = wanted if wanted in values else next((m for m in ("acc_norm", "acc") if m in values), values[0])
    if wanted and metric != wanted:
        raise Refusal(f"{name}: no {wanted} among {', '.join(values)}")
    documents = sum(n["effective"] for n in results["n-samples"].values())
    return dict(metric=metric, value=figures[metric], stderr=figures.get(f"{metric}_stderr"), documents=documents,
                seconds=round(time.time() - begun, 1), version=results["versions"].get(top), all=figures)


def mean_of_nine(tasks: dict[str, dict], limit: int | None) -> tuple[str, float, float] | None:
    """(name, mean, standard error) over the nine. The name says so where it is not the whole of them."""
    there = [tasks[name] for name in AVG9 if name in tasks and "value" in tasks[name]]
    if not there:
        return None
    n = len(there)
    name = "Avg9" if n == 9 else f"mean of {n} of nine"
    name += f", {limit} documents a task" * bool(limit) + ", local data" * any("instead" in row for row in there)
    return name, sum(row["value"] for row in there) / n, math.sqrt(sum((row["stderr"] or 0.0) ** 2 for row in there)) / n


def task_table(reports: list[dict]) -> str:
    """One row a task, one column a model, in percent ± standard error; the nine's mean; the published means below."""
    def cell(row):
        if "value" not in row:
            return "failed"
        error = "" if row["stderr"] is None else f" ± {100 * row['stderr']:.2f}"
        return f"{100 * row['value']:.2f}{error}"
    names = list(dict.fromkeys(name for report in reports for name in report["tasks"]))
    text = ["| task | metric | " + " | ".join(report["model"] for report in reports) + " |", "|---|---|" + "---|" * len(reports)]
    for name in names:
        rows = [report["tasks"].get(name, {}) for report in reports]
        outside = " (outside the nine)" if name in OUTSIDE else ""
        metric = next((row["metric"] for row in rows if "metric" in row), "")
        text.append(f"| {name}{outside} | {metric} | " + " | ".join(map(cell, rows)) + " |")
    means = [mean_of_nine(report["tasks"], report["limit"]) for report in reports]
    for label in dict.fromkeys(mean[0] for mean in means if mean):
        cells = [f"**{100 * m[1]:.2f} ± {100 * m[2]:.2f}**" if m and m[0] == label else "" for m in means]
        text.append(f"| **{label}** | | " + " | ".join(cells) + " |")
    if any(means):
        published = "; ".join(f"{who} {value:.2f}" for who, value in PUBLISHED)
        text += ["", f"Published Avg9 (arXiv 2609.02006, not run here): {published}."]
    return "\n".join(text)


# ----------------------------------------------------------------------------------------- held-out text


def text_figures(model: Model, text: str, teacher: Transformer | None, seq_len: int, tokens: int, whole: bool) -> dict[str, float]:
    """Nats a token, bits a byte (of the text that the scored tokens spell), and against a teacher KL at T = 1 and top-1 agreement."""
    if not 1 <= seq_len <= model.max_length:
        raise Refusal(f"--seq-len {seq_len} is out of range: 1 to {model.origin}'s {model.max_length} positions")
    folder = prepare(text, model.tokenizer, quiet=True)
    splits = [Tokens(folder, split, seq_len, model.tokenizer) for split in (("val", "train") if whole else ("val",))]
    windows = [pair for split in splits for pair in split.spread(max(1, tokens // seq_len), max(1, 2048 // seq_len))]
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.dtype == "bfloat16"):
        figures = evaluate(model.net, teacher, windows, real_vocab=model.tokenizer.vocab_size)
    targets = [i for _, t in windows for i in t.flatten().tolist() if i != IGNORE]
    special = set(model.tokenizer.special.values())
    size = sum(len(model.tokenizer.bytes[i]) for i in targets if i not in special)
    if not size:
        raise Refusal(f"--text {text}: its {len(targets)} tokens spell no text")
    return {"tokens": len(targets), "bytes": size} | figures | {"bits_per_byte": figures["val_ce"] * len(targets) / size / math.log(2)}


# ------------------------------------------------------------------------------------------- the command


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder, preset or hub id")
    parser.add_argument("--tasks", default="", help="avg9, or lm-eval task names with commas")
    parser.add_argument("--local", type=Path, help="folder of task YAML files: NAME.yaml or local_NAME.yaml goes before lm-eval's own")
    parser.add_argument("--limit", type=int, help="first documents of each task only")
    parser.add_argument("--text", default="", help="as --data of train.py: held-out CE, bits per byte")
    parser.add_argument("--teacher", default="", help="with --text: KL and top-1 agreement to this model")
    parser.add_argument("--whole", action="store_true", help="with --text: all documents, not only the held-out ones")
    parser.add_argument("--seq-len", type=int,
                        help="with --text: tokens a window (default: 1024, or the model's positions where they are fewer)")
    parser.add_argument("--tokens", type=int, default=65536, help="with --text: at most so many, evenly spread")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="padded tokens in the network together")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
                        help="autocast: auto is bfloat16 on an accelerator, else float32")
    parser.add_argument("--offline", action="store_true", help="resolve models and task data locally, or fail in seconds")
    parser.add_argument("--out", type=Path, default=Path("results/eval"), help="folder of one JSON a model (default: results/eval)")
    return parser


def check(args) -> None:
    """What can be refused before anything is loaded."""
    if not args.tasks and not args.text:
        raise Refusal("nothing to do: give --tasks avg9 (or names), --text FILE, or both")
    for name in ("limit", "tokens", "batch_tokens", "seq_len"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise Refusal(f"--{name.replace('_', '-')} {getattr(args, name)} is out of range: at least 1")
    if args.local and not args.local.is_dir():
        raise Refusal(f"--local {args.local}: no such folder")
    if args.teacher and not args.text:
        raise Refusal("--teacher would have no effect without --text")
    if args.text and not (Path(args.text) / "tokens.json").exists():
        source_files(args.text)
    for source in args.models:
        folder, _ = resolve(source)
        if args.teacher and Tokenizer(folder).fingerprint != Tokenizer(resolve(args.teacher)[0]).fingerprint:
            raise Refusal(f"{source} and {args.teacher} have different tokenizers: their logits cannot be compared")


class Report:
    """What is known of one model, in one JSON file: rewritten whole after each task, and taken up again by a later command."""

    def __init__(self, source: str, model: Model, args, missing: dict[str, str], packages: tuple[str, ...]):
        conditions = dict(dtype=model.dtype, batch_tokens=args.batch_tokens, shots=0, limit=args.limit)
        tokenizer = model.tokenizer
        bos = "none" if tokenizer.bos is None else tokenizer.decode([tokenizer.bos])
        self.data = dict(model=Path(source).name, origin=model.origin, fingerprint=fingerprint(model.folder),
                         tokenizer=tokenizer.fingerprint, bos=bos, prefix=tokenizer.decode([model.prefix]), **conditions,
                         versions={package: version(package) for package in packages}, missing=missing, tasks={})
        limit = f"-limit{args.limit}" if args.limit else ""
        self.file = args.out / f"{Path(source).name}-{self.data['fingerprint']}-{model.dtype}{limit}.json"
        args.out.mkdir(parents=True, exist_ok=True)
        if self.file.exists():  # same weights, dtype and limit: other tasks, or the text, of an earlier command stay
            before = read_json(self.file)
            self.data |= {"tasks": before.get("tasks", {})} | ({"text": before["text"]} if "text" in before else {})

    def keep(self, part: str, value: dict) -> None:
        self.data[part] = value
        write_whole(self.file, json.dumps(self.data, indent=2) + "\n")


def score_tasks(model: Model, tasks: Tasks, limit: int | None, report: Report) -> set[str]:
    """All tasks on one model, each kept as it ends -> the names of those that failed."""
    failed = set()
    for name, loaded in tasks.loaded.items():
        try:
            row = run_task(harness(model), name, loaded, limit, tasks.manager)
            print(f"{name}: {row['metric']} {100 * row['value']:.2f}, {row['documents']} documents, {row['seconds']:.0f} s", flush=True)
        except Exception as error:  # one task must not take the others with it
            failed.add(name)
            row = {"failed": f"{type(error).__name__}: {one_line(error)}"}
            print(f"{name}: failed, the others run: {row['failed']}", flush=True)
        if name in tasks.instead:
            row["instead"] = tasks.instead[name]
        report.keep("tasks", report.data["tasks"] | {name: row})
    return failed


def score_text(model: Model, args, report: Report) -> None:
    teacher = Transformer.from_pretrained(args.teacher, device=str(model.device)) if args.teacher else None
    if teacher:
        model.tokenizer.must_fit(teacher.config.vocab_size, args.teacher)
    seq_len = min(1024, model.max_length) if args.seq_len is None else args.seq_len
    figures = text_figures(model, args.text, teacher, seq_len, args.tokens, args.whole)
    report.keep("text", {"source": args.text, "seq_len": seq_len, "teacher": args.teacher} | figures)
    print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()), flush=True)


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    if args.offline:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    check(args)
    tasks = Tasks({}, {}, {}, None)
    if args.tasks:
        tasks = find_tasks([*AVG9, *OUTSIDE] if args.tasks == "avg9" else [name for name in args.tasks.split(",") if name], args.local)
        for name, why in tasks.missing.items():
            print(f"task {name} cannot be had, the others run: {why}", flush=True)
        for name, what in tasks.instead.items():
            print(f"task {name}: {what}", flush=True)
        if not tasks.loaded:
            raise Refusal("none of the tasks can be loaded; see above")
    reports, failed = [], set(tasks.missing)
    for source in args.models:
        model = Model(source, args.batch_tokens, dtype=args.dtype)
        report = Report(source, model, args, tasks.missing, ("torch", "lm_eval", "datasets") if tasks.loaded else ("torch",))
        print("{origin}: fingerprint {fingerprint}, {dtype}, BOS {bos}, before an empty context {prefix}".format(**report.data), flush=True)
        failed |= score_tasks(model, tasks, args.limit, report)
        if args.text:
            score_text(model, args, report)
        reports.append(report.data)
    if tasks.loaded:
        print("\n" + task_table(reports))
    if failed:
        raise Refusal(f"without {', '.join(sorted(failed))}: see above")


if __name__ == "__main__":
    try:
        main()
    except (Refusal, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; finished tasks are kept, see --out")
