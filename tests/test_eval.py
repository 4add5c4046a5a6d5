"""eval.py against lm-eval's own hf backend, plain forward passes, and numbers by hand."""
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import eval as ours
from data import Tokens
from eval import mean_of_nine, task_table
from files import Refusal
from likelihood import Model, harness
from model import Transformer
from prepare import prepare
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["import os\nos.path.", "def f(self, x):\n    return ", "for i in ", "", "class A:\n    def __init__(", "x = 1  ", "#" * 40, "import os\nos.path."]
OPTIONS = ["join", " x", "range(10)", "exists(path)", "a\n", "self", " "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tiny in float32 with 64 positions: an fp32 file, so that transformers computes in fp32 too."""
    path = tmp_path_factory.mktemp("models") / "tiny64"
    Transformer.from_pretrained("tiny").save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "tiny" / name, path)
    return path


@pytest.fixture(scope="module")
def with_bos(folder, tmp_path_factory):
    """The same with a Llama-like post-processor that puts <|endoftext|> first."""
    path = tmp_path_factory.mktemp("models") / "bos"
    shutil.copytree(folder, path)
    spec = json.loads((path / "tokenizer.json").read_text())
    spec["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                              "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                              "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [spec["added_tokens"][0]["id"]], "tokens": ["<|endoftext|>"]}}}
    (path / "tokenizer.json").write_text(json.dumps(spec))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|endoftext|>"}))
    return path


def backends(folder):
    from lm_eval.models.huggingface import HFLM
    return harness(Model(str(folder), batch_tokens=256)), HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4)


def asked(kind, *args):
    from lm_eval.api.instance import Instance
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(args)]


def test_branches_equal_separate_rows(folder):
    """float64: each continuation on its own, through the network without a mask."""
    model = Model(str(folder), batch_tokens=150)
    model.net.double()
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(0, 2048, (n,), generator=generator).tolist()
    contexts = [draw(n) for n in (1, 3, 20, 40)]
    pairs = [(context, draw(n)) for context in contexts for n in (1, 1, 2, 5, 9)] + [(contexts[1], [7])] * 2
    for (context, continuation), (score, greedy) in zip(pairs, model.score(pairs)):
        z = model.net(torch.tensor([context + continuation[:-1]]))[0, len(context) - 1:]
        alone = F.log_softmax(z, -1).gather(1, torch.tensor(continuation)[:, None]).sum().item()
        assert score == pytest.approx(alone, abs=1e-4)  # softmax is taken in fp32 here
        assert greedy == (z.argmax(-1).tolist() == continuation)
    said = model.net(torch.tensor([contexts[2]]))[0, -1].argmax().item()
    assert model.score([(contexts[2], [said])])[0][1] and not model.score([(contexts[2], [said ^ 1])])[0][1]


@pytest.mark.parametrize("kind", ["folder", "with_bos"])
def test_B43_B45_loglikelihoods_agree_with_lm_evals_hf_backend(kind, request, capsys):
    """Shared and empty contexts, trailing spaces, contexts beyond the 64 positions; with and without a BOS."""
    mine, theirs = backends(request.getfixturevalue(kind))
    long = "import os, sys, re, json\n" * 12
    requests = asked("loglikelihood", *[(p, o) for p in (*PROMPTS, long, long + "x = ") for o in OPTIONS if p or o.strip()])
    for request_, a, b in zip(requests, mine.loglikelihood(requests, disable_tqdm=True), theirs.loglikelihood(requests, disable_tqdm=True), strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-4) and a[1] == b[1], request_.args
    assert capsys.readouterr().err.count("cut from the left") == 1
    rolling = asked("loglikelihood_rolling", *[(t,) for t in ("x = 1\n", long, "def f():\n    pass\n" * 30)])
    for a, b in zip(mine.loglikelihood_rolling(rolling, disable_tqdm=True), theirs.loglikelihood_rolling(rolling, disable_tqdm=True), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_generation_agrees_with_lm_evals_hf_backend(folder):
    mine, theirs = backends(folder)
    requests = asked("generate_until", *[(p, {"until": stops, "max_gen_toks": 12}) for p in PROMPTS if p for stops in (["\n"], ["):", "self"])])
    assert mine.generate_until(requests, disable_tqdm=True) == theirs.generate_until(requests, disable_tqdm=True)
    with pytest.raises(Refusal, match="greedily"):
        mine.generate_until(asked("generate_until", ("x", {"do_sample": True})))


def test_B43_bos_stands_first_exactly_once_or_never(folder, with_bos):
    plain, bos = Model(str(folder)), Model(str(with_bos))
    first = bos.tokenizer.bos
    assert first is not None and plain.tokenizer.bos is None
    for text in ("x = 1", "<|endoftext|>x = 1"):
        assert bos.encode(text)[0] == first and bos.encode(text).count(first) == 1 and first not in plain.encode(text)
    assert bos.encode("x", bos=False) == plain.encode("x") and plain.prefix == plain.tokenizer.end == bos.prefix


def test_B45_a_long_context_loses_its_left_and_a_long_continuation_is_refused(folder):
    model = Model(str(folder))
    assert model.max_length == 64
    context = list(range(100, 100 + 64 + 5))
    assert model.fit(context, [1, 2, 3]) == context[-62:]  # 62 + 3 tokens, of which the last is not an input
    with pytest.raises(Refusal, match="65 tokens is longer"):
        model.fit(context, [1] * 65)


# ------------------------------------------------------------------------------------------------ tasks


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Four small tasks of one's own; the last asks for a column that is not there."""
    where = tmp_path_factory.mktemp("tasks")
    rows = [{"ctx": f"import os\nos.path.{w}(", "choices": ["paths", "a quite wrong answer"], "gold": 0} for w in ("join", "exists", "isfile", "dirname", "split", "abspath")]
    (where / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, column in (("local_arc_easy", "ctx"), ("mine", "ctx"), ("raises", "ctx"), ("unreadable", "nowhere")):
        (where / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {where / 'rows.jsonl'}\noutput_type: multiple_choice\ntest_split: test\n"
            f"doc_to_text: '{{{{{column}}}}}'\ndoc_to_choice: choices\ndoc_to_target: gold\nmetric_list:\n" + "".join(
                f"  - {{metric: {m}, aggregation: mean, higher_is_better: true}}\n" for m in ("acc", "acc_norm")) + "metadata: {version: 1.0}\n")
    return where


def test_B44_acc_and_acc_norm_by_hand(local):
    """Log-likelihoods -10 and -12 for answers of 5 and 20 characters: acc picks the first, acc_norm the second."""
    from lm_eval.api.model import LM

    class Fixed(LM):
        def loglikelihood(self, requests, **_):
            return [(-10.0 if request.args[1].strip() == "paths" else -12.0, False) for request in requests]

        def loglikelihood_rolling(self, requests, **_):
            raise AssertionError

        generate_until = loglikelihood_rolling
    loaded, _, _, manager = ours.find_tasks(["mine"], local)
    row = ours.run_task(Fixed(), "mine", loaded["mine"], None, manager)
    assert (row["all"]["acc"], row["all"]["acc_norm"], row["documents"], row["metric"], row["value"]) == (1.0, 0.0, 6, "acc_norm", 0.0)


def test_B44_mmlu_is_a_mean_over_documents_not_over_its_groups():
    from lm_eval.api.metrics import aggregate_subtask_metrics
    shares, counts = (24.21, 23.82, 21.71, 21.31), (4705, 3077, 3107, 3153)
    assert aggregate_subtask_metrics(list(shares), list(counts)) == pytest.approx(22.92, abs=0.005) != pytest.approx(sum(shares) / 4, abs=0.005)


def test_A12_B44_a_task_that_fails_is_named_and_the_others_finish(folder, local, tmp_path, capsys, monkeypatch):
    real = ours.run_task
    monkeypatch.setattr(ours, "run_task", lambda lm, name, *more: real(lm, name, *more) if name != "raises" else 1 / 0)
    with pytest.raises(Refusal, match="without no_such_task, raises, unreadable"):
        ours.main([str(folder), "--tasks", "no_such_task,arc_easy,raises,unreadable,mine", "--local", str(local), "--out", str(tmp_path / "out"), "--offline"])
    screen = capsys.readouterr().out
    assert screen.index("no_such_task cannot be had") < screen.index("arc_easy: local_arc_easy") < screen.index("fingerprint") < screen.index("| arc_easy | acc |")
    report = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert report["tasks"]["arc_easy"]["metric"] == "acc" and report["tasks"]["mine"]["documents"] == 6 and "ZeroDivisionError" in report["tasks"]["raises"]["failed"]
    assert {"fingerprint", "bos", "dtype", "batch_tokens", "shots", "limit", "versions"} <= report.keys() and report["missing"].keys() == {"no_such_task", "unreadable"}
    assert report["versions"].keys() == {"torch", "lm_eval", "datasets"} and "BOS none, before an empty context <|endoftext|>" in screen
    assert "mean of 1 of nine, local data" in screen and "Avg9 (arXiv" in screen
    ours.main([str(folder), "--text", "stdlib", "--seq-len", "32", "--tokens", "64", "--out", str(tmp_path / "out")])  # a later command adds, and takes nothing away
    later = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert later["tasks"] == report["tasks"] and later["text"]["tokens"] == 64
    ours.main([str(folder), str(folder), "--tasks", "mine", "--local", str(local), "--out", str(tmp_path / "two"), "--limit", "2"])
    assert "| mine | acc_norm |" in capsys.readouterr().out


def test_A12_each_tasks_result_is_on_disk_before_the_next_begins(folder, local, tmp_path, monkeypatch):
    real = ours.run_task

    def stopped(lm, name, *more):
        if name == "raises":
            raise KeyboardInterrupt
        return real(lm, name, *more)
    monkeypatch.setattr(ours, "run_task", stopped)
    with pytest.raises(KeyboardInterrupt):
        ours.main([str(folder), "--tasks", "arc_easy,raises,mine", "--local", str(local), "--out", str(tmp_path), "--offline"])
    (report,) = tmp_path.glob("*.json")
    assert json.loads(report.read_text(encoding="utf-8"))["tasks"].keys() == {"arc_easy"}


def test_B45_offline_fails_at_once_where_nothing_is_local(folder, tmp_path, capsys, monkeypatch):
    """Under 10 s, lm-eval's own indexing of its tasks (seconds of a core, more on a loaded one) left out."""
    import time
    from lm_eval.tasks import TaskManager
    taken, real = [], TaskManager.load

    def clocked(self, *args):
        begun = time.time()
        try:
            return real(self, *args)
        finally:
            taken.append(time.time() - begun)
    monkeypatch.setattr(TaskManager, "load", clocked)
    with pytest.raises(Refusal, match="none of the tasks"):
        ours.main([str(folder), "--tasks", "piqa", "--offline", "--out", str(tmp_path)])
    assert len(taken) == 1 and taken[0] < 10 and "task piqa cannot be had" in capsys.readouterr().out
    for bad, word in (([], "nothing to do"), (["--tasks", "x", "--limit", "0"], "--limit 0"), (["--tasks", "x", "--local", "nowhere"], "--local nowhere"),
                      (["--text", "stdlib", "--seq-len", "65"], "--seq-len 65"), (["--tasks", "x", "--teacher", "tiny"], "--teacher")):
        with pytest.raises(Refusal, match=word):
            ours.main([str(folder), *bad])


def test_avg9_by_hand_and_never_under_a_false_name():
    nine = {name: dict(value=0.5 + 0.01 * i, stderr=0.03, metric=m) for i, (name, m) in enumerate(ours.AVG9.items())}
    assert mean_of_nine(nine | {"mathqa": dict(value=0.0, stderr=1.0)}, None) == ("Avg9", pytest.approx(0.54), pytest.approx(0.01))
    fewer = {k: v for k, v in nine.items() if k != "logiqa"}
    assert mean_of_nine(fewer, None)[0] == "mean of 8 of nine" and mean_of_nine(nine | {"logiqa": {"failed": "x"}}, None)[0] == "mean of 8 of nine"
    assert mean_of_nine(nine, 100)[0] == "Avg9, 100 documents a task" and mean_of_nine({}, None) is None
    assert mean_of_nine(nine | {"piqa": nine["piqa"] | {"instead": "local"}}, None)[0] == "Avg9, local data"
    text = task_table([dict(model="a", tasks=nine, limit=None), dict(model="b", tasks=fewer, limit=None)])
    assert "| **Avg9** | | **54.00 ± 1.00** |  |" in text and "| logiqa | acc_norm | 52.00 ± 3.00 | failed |" in text and "66.18" in text


def test_published_means_differ_by_the_gains_of_the_papers_abstract():
    means = dict(ours.PUBLISHED)
    gain = lambda ours, plain: round(means[ours] - means[plain], 2)
    assert gain("Llama 1.5B, core", "Llama 1.5B, plain LRC, 10B tokens") == 2.36 and gain("Llama 2.7B, dense", "Llama 2.7B, plain LRC") == 2.71
    assert gain("Qwen 1.7B, dense", "Qwen 1.7B, plain LRC") == 6.39
    assert gain("Qwen 1.7B, core, of another lineage", "Qwen 1.7B, plain LRC") == 10.45  # the paper flags it wherever it appears


# ----------------------------------------------------------------------------------------- held-out text


def test_text_figures_against_plain_forward_passes(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"id": f"d{i}", "text": f"def f{i}(x):\n    return x * {i}  # é\n" * 4}) + "\n" for i in range(120)))
    ours.main([str(folder), "--text", "text.jsonl", "--teacher", "tiny", "--seq-len", "32", "--tokens", "320", "--out", "out"])
    report = json.loads(next(Path("out").glob("*.json")).read_text())["text"]
    tokenizer, net = Tokenizer(folder), Transformer.from_pretrained(folder)
    windows = list(Tokens(prepare("text.jsonl", tokenizer, quiet=True), "val", 32, tokenizer).spread(10))
    nats = sum(F.cross_entropy(net(x)[0].double(), y[0], reduction="sum").item() for x, y in windows)
    size = sum(len(tokenizer.encoding.decode_bytes([i])) for _, y in windows for i in y[0].tolist() if i != tokenizer.separator)
    assert report["tokens"] == 32 * len(windows) and report["bytes"] == size
    assert report["val_ce"] == pytest.approx(nats / report["tokens"], rel=1e-5) and report["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert report["val_kl"] == pytest.approx(0, abs=1e-6) and report["val_top1"] == 1  # the folder is tiny itself
    ours.main([str(folder), "--text", "text.jsonl", "--tokens", "64", "--out", "out"])
    assert json.loads(next(Path("out").glob("*.json")).read_text())["text"]["seq_len"] == 64  # all the positions that this model has
    ours.main([str(folder), "--text", "text.jsonl", "--whole", "--seq-len", "32", "--tokens", "1000000", "--out", "out"])
    assert json.loads(next(Path("out").glob("*.json")).read_text())["text"]["tokens"] > 20 * len(windows)
