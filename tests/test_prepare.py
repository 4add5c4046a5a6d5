"""sources.py and prepare.py: every document once, however a source is cut, interrupted, or shared among processes; ids against the tokenizer's."""
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import load_file

import shards
import sources
from data import Tokens, main
from files import Refusal
from prepare import prepare
from shards import Choice, held_out
from sources import CHAT_COLUMNS, Bad, read, source_files, units_of
from test_chat import TEMPLATES, home, jsonl, model, talk
from test_data import Numbers, refused, stored
from tokenizer import Tokenizer

ROOT = Path(sources.__file__).parent
TINY = Tokenizer(ROOT / "tiny")


chat_home = home  # the fixture of test_chat.py


def documents(source, column="text"):
    rows = [row for unit in units_of(source_files(str(source))) for part in unit for row in read(part, (column, *CHAT_COLUMNS))]
    for row in rows:
        if isinstance(row, Bad):
            raise Refusal(f"{sources.where(row.part, row.place)}: {row.reason}")
    return rows


@pytest.fixture
def small_parts(monkeypatch):
    """Blocks of 64 bytes instead of 1 MiB: every file is cut many times."""
    monkeypatch.setattr(sources, "BLOCK", 64)
    monkeypatch.setattr(sources, "PART", (64, 128))


# ------------------------------------------------------------------------------------------- sources

def test_each_kind_of_file_gives_its_documents(tmp_path):
    long = "".join(f"line {i}\n" + "\n" * (i % 50 == 0) for i in range(2000))
    (tmp_path / "sub").mkdir()
    for name, text in {"a.txt": long, "b.md": "# b\r\n", "sub/c.py": "c = 'é'\n", "d.csv": "no", "e.jsonl": '{"title": "E", "text": "e"}\n'}.items():
        (tmp_path / name).write_bytes(text.encode())
    found = documents(tmp_path)
    pieces = [row.fields["text"] for row in found if row.part.name == "a.txt"]
    assert "".join(pieces) == long and len(pieces) > 2 and all(p.endswith("\n\n") and len(p) < 6000 for p in pieces[:-1])
    assert [(row.name, row.fields["text"]) for row in found if row.part.name != "a.txt"] == [("b.md", "# b\n"), ("E", "e"), ("sub/c.py", "c = 'é'\n")]


def test_stdlib_is_this_python_without_tests_and_packages():
    names = [name for name, *_ in source_files("stdlib")]
    assert "json/decoder.py" in names and len(names) > 300 and names == sorted(names)
    assert not [n for n in names if {"site-packages", "test", "tests", "idle_test"} & set(n.split("/"))]


def test_a_jsonl_cut_anywhere_holds_each_line_once_and_in_order(tmp_path, small_parts):
    rng = np.random.default_rng(0)
    texts = ["é" * int(n) + "\u2028" for n in rng.integers(0, 200, 120)]  # lines longer and shorter than a part; U+2028 ends no line
    lines = [json.dumps({"text": t}, ensure_ascii=bool(k % 2)) for k, t in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n" * 3, encoding="utf-8")
    assert len(units_of(source_files(str(tmp_path)))) > 50
    assert [row.fields["text"] for row in documents(tmp_path)] == texts
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines).encode())  # no line break at the end, and Windows's between
    assert [row.fields["text"] for row in documents(tmp_path)] == texts


def test_a_text_file_cut_in_parts_is_the_same_documents_as_one_part(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    (tmp_path / "a.txt").write_text("".join("x" * int(n) + "\n" * int(1 + n % 3) for n in rng.integers(0, 900, 9000)), encoding="utf-8")
    whole = [row.fields["text"] for row in documents(tmp_path)]
    monkeypatch.setattr(sources, "PART", (1 << 20, 1 << 20))
    assert len(units_of(source_files(str(tmp_path)))) == 4 and [row.fields["text"] for row in documents(tmp_path)] == whole
    assert "".join(whole) == (tmp_path / "a.txt").read_text(encoding="utf-8")


def table(path, rows, per_group=7):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=per_group)


def test_a_parquet_cut_anywhere_holds_each_row_once_and_in_order(tmp_path, small_parts):
    rows = [{"text": f"text {n} " * (n % 11), "id": f"urn:{n}", "score": n / 10, "url": "x" * 100} for n in range(100)]
    table(tmp_path / "a.parquet", rows)
    assert len(units_of(source_files(str(tmp_path)))) > 10
    assert [(row.name, row.fields) for row in documents(tmp_path)] == [(r["id"], {"text": r["text"], "score": r["score"]}) for r in rows]


def test_rows_are_named_by_id_or_title_or_their_own_text_and_places_are_told_in_lines(tmp_path, small_parts):
    rows = [{"text": "a", "id": 7}, {"text": "b", "title": "B"}, {"text": "c"}, {"conversations": [{"from": "gpt", "value": "d"}]}]
    found = documents(jsonl(tmp_path / "a.jsonl", rows))
    assert [row.name for row in found] == ["7", "B", "c", json.dumps(rows[3]["conversations"])]
    assert [sources.where(row.part, row.place).rpartition(", ")[2] for row in found] == ["line 1", "line 2", "line 3", "line 4"]


@pytest.mark.parametrize("rows, column, why", [
    ([{"body": "a", "url": "b"}], "text", "but body, url"), ([{"text": "good"}, {"text": None}], "text", "row 2: no text"), ([{"text": 5}], "text", "row 1: no text"),
    ([{"body": ["a"]}], "body", "row 1: no body")])
def test_a_table_without_the_column_is_refused_by_name(tmp_path, rows, column, why):
    table(tmp_path / "a.parquet", rows)
    refused(why, documents, tmp_path, column)


@pytest.mark.parametrize("line", ["{not json", '{"title": "no text"}', "[1, 2]", "3", '{"text": null}', '{"text": 5}', "\udcff", '{"text": "\udced\udca0\udc80"}', "[" * 100_000])
def test_a_bad_jsonl_line_is_refused_by_its_number_or_left_out_and_counted(tmp_path, line):
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "good"}\n' + line.encode("utf-8", "surrogateescape") + b'\n{"text": "better"}\n')
    refused("bad.jsonl, line 2:", prepare, str(tmp_path / "bad.jsonl"), TINY, tmp_path / "out", quiet=True)
    assert os.listdir(tmp_path) == ["bad.jsonl"]  # nothing left behind, and it can be tried again
    out = prepare(str(tmp_path / "bad.jsonl"), TINY, tmp_path / "out", quiet=True, choice=Choice(skip_bad=True))
    assert sorted(stored(out, "train") + stored(out, "val")) == sorted(TINY.document("good") + TINY.document("better"))
    assert json.loads((out / "tokens.json").read_text(encoding="utf-8"))["skipped"] == 1


def test_a_broken_parquet_is_refused_by_name(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    refused("a.parquet: cannot be read as .parquet", prepare, str(tmp_path), TINY, tmp_path / "out", quiet=True)


# in thrift's compact form: where the data begin (4, of field 9), and 40 of the file, of the column and of the row group (fields 3, 5, 3)
@pytest.mark.parametrize("number, which, other", [(b"\x26\x08", 0, 0), (b"\x26\x08", 0, 7), *[(b"\x16\x50", which, other) for which in range(3) for other in (0, 60, 82)]], ids=str)
def test_a_parquet_whose_footer_is_damaged_loses_no_row_unsaid(tmp_path, number, which, other):
    parquet.write_table(pyarrow.table({"text": [f"t{i}" for i in range(40)]}), tmp_path / "a.parquet", use_dictionary=False, write_statistics=False, compression="none")
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    at = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    for _ in range(which + 1):
        at = raw.index(number, at) + 1
    assert len(documents(tmp_path)) == 40
    raw[at] = other
    (tmp_path / "a.parquet").write_bytes(raw)
    try:
        assert len(documents(tmp_path)) == 40
    except Refusal as refusal:
        assert "a.parquet: cannot be read as .parquet" in str(refusal)


@pytest.mark.parametrize("ids", [pyarrow.array([10**15], pyarrow.timestamp("ms")), pyarrow.array([0], pyarrow.timestamp("us", "Nowhere/Land")),
                                 pyarrow.array([1 << 62], pyarrow.duration("ms"))], ids=lambda ids: str(ids.type))
def test_a_date_that_python_has_not_is_refused_by_its_file(tmp_path, ids):
    parquet.write_table(pyarrow.table({"text": ["a"], "id": ids}), tmp_path / "a.parquet")
    refused("a.parquet: cannot be read as .parquet", prepare, str(tmp_path), TINY, tmp_path / "out", quiet=True)
    assert os.listdir(tmp_path) == ["a.parquet"]


# ----------------------------------------------------------------------------------------------- hub

class Hub:
    """The two calls that sources.py makes of huggingface_hub, on files in memory."""
    def __init__(self, branches):
        self.branches = branches

    def __call__(self):
        return self

    def dataset_info(self, repo, revision=None, timeout=None, files_metadata=False):
        if repo != "some/set":
            raise ConnectionError("no network")
        files = self.branches[revision or "main"]
        sibling = lambda name: type("Sibling", (), {"rfilename": name, "size": len(files[name])})
        return type("Info", (), {"sha": f"commit-of-{(revision or 'main').replace('/', '-')}", "siblings": [sibling(n) for n in files]})

    def open(self, path, mode):
        _, repo, rest = path.split("/", 2)
        name, _, file = rest.partition("/")
        name, _, commit = name.partition("@")
        return io.BytesIO(self.branches[commit.removeprefix("commit-of-").replace("refs-convert-", "refs/convert/")][file])


def in_memory(rows):
    buffer = io.BytesIO()
    table(buffer, rows)
    return buffer.getvalue()


def test_a_hub_set_is_read_at_one_commit_by_folder_and_score_and_from_the_parquet_copy_of_other_formats(tmp_path, monkeypatch):
    rows = [{"text": f"t{n}", "id": str(n), "score": float(n % 5)} for n in range(40)]
    import huggingface_hub
    hub = Hub({"main": {"data/a.parquet": in_memory(rows[:20]), "sample/b.parquet": in_memory(rows[20:]), "readme.md": b"# no data"}})
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", hub)
    assert [row.fields["text"] for row in documents("hub:some/set")] == [r["text"] for r in rows]
    assert [row.fields["text"] for row in documents("hub:some/set:sample")] == [r["text"] for r in rows[20:]]
    assert all("@commit-of-main/" in path for _, path, *_ in source_files("hub:some/set"))
    out = prepare("hub:some/set", TINY, tmp_path / "out", quiet=True, choice=Choice(min_score=4))
    expected = {side: [i for r in rows if r["score"] >= 4 and held_out(r["id"]) == (side == "val") for i in TINY.document(r["text"])] for side in ("train", "val")}
    assert {side: stored(out, side) for side in expected} == expected and expected["train"]
    hub.branches = {"main": {"set.json": b"[]"}, "refs/convert/parquet": {"default/train/0000.parquet": in_memory(rows[:3])}}
    assert [row.fields["text"] for row in documents("hub:some/set")] == ["t0", "t1", "t2"]
    hub.branches = {"main": {"set.json": b"[]"}, "refs/convert/parquet": {}}
    refused("no .parquet or .jsonl file", documents, "hub:some/set")


@pytest.mark.parametrize("source, why", [("hub:other/set", "the hub cannot give it (ConnectionError)"), ("hub:set", "is written hub:OWNER/NAME"),
                                         ("hub:../../etc", "is written hub:OWNER/NAME")])
def test_a_hub_that_cannot_be_reached_says_so_and_what_to_do(monkeypatch, source, why):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub({}))
    refused(why, documents, source)


# ------------------------------------------------------------------------------------------ held out

def sides(tmp_path, name, count):
    """Document number -> the split where prepare() puts it, seen in the shards."""
    out = prepare(jsonl(tmp_path / f"{name}.jsonl", [{"title": f"doc {i}", "text": f"{i}"} for i in range(count)]),
                  Numbers(10_000), tmp_path / name, quiet=True)
    found = {split: stored(out, split) for split in ("train", "val")}
    assert sorted(found["train"] + found["val"]) == list(range(count))  # each on exactly one side
    return {i: split for split in found for i in found[split]}


def test_a_document_keeps_its_side_when_others_are_added(tmp_path):
    few, many = sides(tmp_path, "few", 700), sides(tmp_path, "many", 1500)
    assert few == {i: many[i] for i in few}
    assert [i for i, side in few.items() if side == "val"][:3] == [20, 27, 29]  # the same in every process and every version
    assert 45 < sum(side == "val" for side in many.values()) < 110  # one in twenty


# ------------------------------------------------------------------------------------------- prepare

def test_missing_and_empty_and_too_little_are_refused_by_name(tmp_path):
    refused("nowhere", prepare, str(tmp_path / "nowhere"), TINY)
    (tmp_path / "empty").mkdir()
    refused("empty", prepare, str(tmp_path / "empty"), TINY)
    out = prepare(jsonl(tmp_path / "a.jsonl", [{"title": "a", "text": "short"}]), TINY, tmp_path / "little", quiet=True)
    for split in ("train", "val"):
        refused("little", Tokens, out, split, 64, TINY)


def test_the_same_source_is_prepared_once_and_a_changed_one_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    first = prepare(source, TINY, quiet=True)
    times = {f: os.stat(f).st_mtime_ns for f in first.iterdir()}
    assert prepare(source, TINY, quiet=True) == first == prepare(str(first), TINY, quiet=True)
    assert times == {f: os.stat(f).st_mtime_ns for f in first.iterdir()} and os.listdir("tokens") == [first.name]
    assert prepare(source, TINY, quiet=True, choice=Choice(tokens=100)) != first
    jsonl(tmp_path / "a.jsonl", [{"text": "one and two"}])
    second = prepare(source, TINY, quiet=True)
    assert second != first and stored(second, "train") + stored(second, "val") == TINY.document("one and two")


def test_a_named_folder_with_other_tokens_is_not_passed_off_as_this_source(tmp_path):
    prepare(jsonl(tmp_path / "a.jsonl", [{"text": "1"}]), Numbers(), tmp_path / "out", quiet=True)
    refused("out", prepare, jsonl(tmp_path / "b.jsonl", [{"text": "2"}]), Numbers(), tmp_path / "out", quiet=True)
    (tmp_path / "mine").mkdir()
    refused("mine", prepare, jsonl(tmp_path / "b.jsonl", [{"text": "2"}]), Numbers(), tmp_path / "mine", quiet=True)
    assert list((tmp_path / "mine").iterdir()) == []


def test_many_small_documents_take_time_in_proportion_to_their_number(tmp_path):
    source, start = jsonl(tmp_path / "a.jsonl", [{"text": "1"}] * 12_000), time.process_time()
    prepare(source, Numbers(), tmp_path / "out", quiet=True)
    assert time.process_time() - start < 3


def test_a_budget_is_a_sample_of_the_whole_source_of_whole_documents_fixed_by_the_seed(tmp_path, small_parts):
    source = jsonl(tmp_path / "a.jsonl", [{"text": " ".join([str(n)] * 10 + ["999"])} for n in range(300)])
    take = lambda name, **choice: stored(prepare(source, Numbers(), tmp_path / name, quiet=True, choice=Choice(**choice), workers=1), "train")
    all_of_it, some, other = take("all"), take("some", tokens=1000, seed=1), take("other", tokens=1000, seed=2)
    assert len(some) == 990 and len(all_of_it) > 3000  # 90 documents of 11; the 91st would pass 1,000
    numbers = [some[k] for k in range(0, 990, 11)]
    assert some == [i for n in numbers for i in [n] * 10 + [999]] and len(set(numbers)) == 90  # documents whole, none twice
    assert max(numbers) > 200 and min(numbers) < 100 and some != other and some == take("again", tokens=1000, seed=1)


def test_chats_join_the_documents_in_the_models_own_template_with_every_token_counting(chat_home, tmp_path):
    folder, library = model(chat_home, tmp_path / "m", TEMPLATES["chatml"])
    chats = [talk("Hi", "Hello"), talk("What?", "That.", "And?", "No.")]
    shared = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in chats[1]]
    source = jsonl(tmp_path / "c.jsonl", [{"messages": chats[0], "id": 1}, {"conversations": shared, "id": 2}, {"text": "plain", "id": 3}])
    tokenizer = Tokenizer(folder)
    out = prepare(source, tokenizer, tmp_path / "out", quiet=True)
    (shard,) = out.glob("train-*")
    assert set(load_file(shard)) == {"tokens"}
    rendered = [library.apply_chat_template(m, tokenize=True, return_dict=True)["input_ids"] + [tokenizer.separator] for m in chats]
    assert stored(out, "train") == rendered[0] + rendered[1] + tokenizer.document("plain")
    refused("c.jsonl, line 3:", prepare, source, tokenizer, tmp_path / "sft", quiet=True, choice=Choice(chats=True))


def test_scores_that_are_no_number_and_documents_that_do_not_fit_are_never_taken(tmp_path):
    rows = [{"text": f"t{n}", "score": [5, 3, float("nan"), None][n % 4]} for n in range(40)]
    source = jsonl(tmp_path / "a.jsonl", rows)
    refused("line 4: no number", prepare, source, TINY, tmp_path / "out", quiet=True, choice=Choice(min_score=4))
    out = prepare(source, TINY, tmp_path / "out", quiet=True, choice=Choice(min_score=4, skip_bad=True))
    assert sorted(stored(out, "train") + stored(out, "val")) == sorted(i for r in rows if r["score"] == 5 for i in TINY.document(r["text"]))
    refused("more than the --tokens", prepare, source, TINY, tmp_path / "few", quiet=True, choice=Choice(tokens=1))
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    refused("no document in it", prepare, str(tmp_path / "empty.jsonl"), TINY, tmp_path / "none", quiet=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "empty.jsonl", "out"]


def test_a_row_with_text_and_messages_is_a_chat_where_chats_are_asked_for(chat_home, tmp_path):
    folder, library = model(chat_home, tmp_path / "m", TEMPLATES["chatml"])
    source = jsonl(tmp_path / "c.jsonl", [{"text": "as text", "messages": talk("a", "b"), "id": n} for n in range(30)])
    chats, documents = (prepare(source, Tokenizer(folder), tmp_path / str(c), quiet=True, choice=Choice(chats=c)) for c in (True, False))
    ids = library.apply_chat_template(talk("a", "b"), tokenize=True, return_dict=True)["input_ids"]
    assert stored(chats, "train")[:len(ids)] == ids and stored(documents, "train")[:2] == Tokenizer(folder).encode("as text")[:2]


def test_a_template_that_writes_the_separator_is_counted_and_a_document_mask_refused(chat_home, tmp_path):
    import train
    folder, _ = model(chat_home, tmp_path / "m", TEMPLATES["inst"])  # it ends each answer with the separator
    chats = jsonl(tmp_path / "c.jsonl", [{"messages": talk("a", "b", "c", "d"), "id": n} for n in range(50)])
    out = prepare(chats, Tokenizer(folder), tmp_path / "out", quiet=True, choice=Choice(chats=True))
    assert json.loads((out / "tokens.json").read_text(encoding="utf-8"))["separator_inside"] == 50
    args = train.Args(stage="sft", init=str(folder), data=str(out), seq_len=8, doc_mask=True)
    shape = type("Shape", (), {"max_position_embeddings": 100, "vocab_size": 10_000})
    refused("--doc-mask", train.tokens_of, args, folder, shape, train.Place(None, 0, 1, None))


@pytest.mark.parametrize("column", [pyarrow.array([1, 2, 3], pyarrow.date32()), pyarrow.array([b"a", b"b", b"c"]), pyarrow.array([1.5, None, 2])])
def test_ids_of_any_type_name_a_row(tmp_path, column):
    parquet.write_table(pyarrow.table({"id": column, "text": ["a", "b", "c"]}), tmp_path / "a.parquet")
    assert len({row.name for row in documents(tmp_path)}) == 3


def test_text_that_is_not_utf8_and_a_file_without_columns_are_refused_by_name(tmp_path):
    bad = pyarrow.StringArray.from_buffers(2, pyarrow.py_buffer(np.array([0, 1, 3], np.int32)), pyarrow.py_buffer(b"a\xff\xfe"))
    parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "a.parquet")
    refused("a.parquet: cannot be read", documents, tmp_path)
    parquet.write_table(pyarrow.table({}), tmp_path / "a.parquet")
    refused("a.parquet: no column text", documents, tmp_path)


def test_a_line_without_end_is_not_taken_for_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LINE", 1000)
    (tmp_path / "a.txt").write_text("a\n" + "x" * 2000, encoding="utf-8")
    refused("a line of more than", documents, tmp_path)


def test_a_file_and_a_link_to_it_are_one_and_a_prepared_folder_takes_no_options(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.md").write_text("text", encoding="utf-8")
    (tmp_path / "in" / "b.md").symlink_to(tmp_path / "in" / "a.md")
    assert [row.name for row in documents(tmp_path / "in")] == ["a.md"]
    out = prepare(str(tmp_path / "in"), TINY, tmp_path / "out", quiet=True)
    for more in (dict(out=tmp_path / "other"), dict(choice=Choice(min_score=3))):
        refused("prepared already", prepare, str(out), TINY, **more)
    refused("documents, not chats", prepare, str(out), TINY, choice=Choice(chats=True))


def test_a_shard_that_is_missing_is_missed(tmp_path):
    out = prepare(jsonl(tmp_path / "a.jsonl", [{"text": f"{n} " * 400} for n in range(3000)]), TINY, tmp_path / "out", quiet=True)
    (out / "train-00001.safetensors").unlink()
    refused("tokens.json says", Tokens, out, "train", 16, TINY)


# ------------------------------------------------------------------------- processes, interruption

@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_a_killed_process_hangs_nobody(tmp_path, victim):
    """A worker killed as by the system for want of memory: one line, and the same command goes on. The parent killed: no worker stays."""
    source = jsonl(tmp_path / "a.jsonl", [{"text": f"{n} " * 400} for n in range(9000)])
    command = [sys.executable, str(ROOT / "data.py"), "prepare", source, "--tokenizer", str(ROOT / "tiny"), "--out", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    children = lambda: [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    workers = []
    while process.poll() is None and not list((tmp_path / "out.making").glob("unit-*")):
        workers = [pid for pid in children() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        time.sleep(0.01)
    assert len(workers) == 2
    os.kill(workers[0] if victim == "worker" else process.pid, signal.SIGKILL)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == (1 if victim == "worker" else -signal.SIGKILL) and "Traceback" not in said
    assert victim == "parent" or "goes on where it stopped" in said
    for _ in range(500):
        if not any(Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text() for pid in workers):
            break
        time.sleep(0.02)
    else:
        raise AssertionError("a worker is left")
    assert contents(prepare(source, TINY, tmp_path / "out", quiet=True)) == contents(prepare(source, TINY, tmp_path / "whole", quiet=True))


def contents(folder):
    return {p.name: load_file(p)["tokens"].tolist() for p in sorted(folder.glob("*.safetensors"))}


def test_two_processes_write_what_one_writes(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": f"{n} " * 400} for n in range(9000)])
    one, two = (prepare(source, TINY, tmp_path / str(workers), quiet=True, workers=workers) for workers in (1, 2))
    assert contents(one) == contents(two) and len(contents(one)) > 6
    same = [json.loads((out / "tokens.json").read_text(encoding="utf-8"))["fingerprint"] for out in (one, two)]
    assert same[0] == same[1]


def test_what_a_killed_process_finished_is_not_done_again(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", [{"text": f"{n} " * 400} for n in range(9000)])
    whole = contents(prepare(source, TINY, tmp_path / "whole", quiet=True))
    command = [sys.executable, str(ROOT / "data.py"), "prepare", source, "--tokenizer", str(ROOT / "tiny"), "--out", str(tmp_path / "out"), "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    making = tmp_path / "out.making"
    for _ in range(3000):
        if len(list(making.glob("unit-*.json"))) >= 2 or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list(making.glob("unit-*.json")))
    assert 2 <= done < len(units_of(source_files(source))) and not (tmp_path / "out").exists()
    (making / "train-99999.safetensors").write_bytes(b"left over")
    read_now = []
    monkeypatch.setattr(shards, "read", lambda part, *rest: read_now.append(part) or read(part, *rest))
    assert contents(prepare(source, TINY, tmp_path / "out", quiet=True, workers=1)) == whole
    assert len(read_now) == len(units_of(source_files(source))) - done and not making.exists()


def test_a_folder_begun_with_other_files_is_begun_anew(tmp_path):
    making = tmp_path / "out.making"
    making.mkdir()
    (making / "begun.json").write_text('{"stamp": "another"}', encoding="utf-8")
    (making / "unit-00000.json").write_text('{"tokens": "of another source"}', encoding="utf-8")
    out = prepare(jsonl(tmp_path / "a.jsonl", [{"text": "one"}]), TINY, tmp_path / "out", quiet=True)
    assert stored(out, "train") + stored(out, "val") == TINY.document("one")


def test_the_second_of_two_at_once_waits_and_finds_the_work_done(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": f"{n} " * 100} for n in range(2000)])
    command = [sys.executable, str(ROOT / "data.py"), "prepare", source, "--tokenizer", "tiny", "--out", str(tmp_path / "out")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [p.communicate()[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert sum("held-out tokens in" in text for text in said) == 1  # one of them did the work
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out"]


# ------------------------------------------------------------------------------------------- command

def test_the_command_prepares_and_says_what_it_made(tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl", [{"body": f"text {n}", "score": n} for n in range(100)] + [{"none": 1}])
    main(["prepare", source, "--out", str(tmp_path / "out"), "--column", "body", "--min-score", "50", "--tokens", "100", "--seed", "3", "--skip-bad", "--workers", "1"])
    said = capsys.readouterr().out
    assert said.strip().endswith(str(tmp_path / "out")) and "1 rows left out" in said and "documents" in said
    assert 90 < len(stored(tmp_path / "out", "train")) <= 100
    for bad in (["--tokens", "-1"], ["--tokens", "nan"], ["--tokens", "inf"], ["--tokens", "0.5"], ["--workers", "0"], ["--seed", "-1"], ["--min-score", "nan"], ["--out", "."]):
        with pytest.raises(Refusal):
            main(["prepare", source, *bad])
