"""data.py against an independent oracle: plain arithmetic on the token stream."""
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import data
from data import Tokenizer, Tokens, place_in_order, prepare
from teachers import Refusal

ROOT = Path(data.__file__).parent


class Numbers:
    """A stand-in tokenizer whose documents are lists of ids: what prepare() must carry to disk and back unchanged."""
    fingerprint = "numbers"

    def __init__(self, vocab_size=1000):
        self.vocab_size = vocab_size

    def document(self, text):
        return [int(word) for word in text.split()]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def stored(folder, split):
    files = sorted(Path(folder).glob(f"{split}-*.safetensors"))
    return np.concatenate([load_file(f)["tokens"] for f in files]).tolist() if files else []


def refused(match, call, *args, **kwargs):
    """The call ends in a Refusal of one line that holds `match`."""
    with pytest.raises(Refusal) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert match in message and "\n" not in message.strip()


# --------------------------------------------------------------------------------------------- shards

BIG = [128000, 128001, 128009, 151643, 151645]


@pytest.mark.parametrize("vocab, dtype, ids", [(151936, "U32", BIG), (65537, "U32", [65536, 0, 1]), (65536, "U16", [65535, 0, 1])])
def test_ids_survive_the_disk_in_a_width_the_header_states(tmp_path, vocab, dtype, ids):
    out = prepare(jsonl(tmp_path / "a.jsonl", [{"text": " ".join(map(str, ids))}]), Numbers(vocab), tmp_path / "out", quiet=True)
    (shard,) = out.glob("*.safetensors")
    raw = shard.read_bytes()
    header = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
    assert header["tokens"]["dtype"] == dtype and header["tokens"]["shape"] == [len(ids)]
    assert Tokens(out, shard.name.split("-")[0], len(ids) - 1).window(0).tolist() == ids


META = {"vocab_size": "1000", "tokenizer": "numbers"}


@pytest.mark.parametrize("name, dtype, key, meta, keep", [
    ("another", np.uint16, "tokens", META | {"tokenizer": "another"}, None),
    ("65537", np.uint16, "tokens", META | {"vocab_size": "65537"}, None),
    ("train-00000", np.uint16, "tokens", META, -7),  # truncated in the ids
    ("train-00000", np.uint16, "tokens", META, 5),  # truncated in the header
    ("train-00000", np.uint16, "ids", META, None),
    ("train-00000", np.uint16, "tokens", {"tokenizer": "numbers"}, None),
    ("train-00000", np.float32, "tokens", META, None),
    (None, np.uint16, "tokens", META, None),  # nothing wrong
])
def test_a_shard_that_cannot_be_right_is_refused(tmp_path, name, dtype, key, meta, keep):
    shard = tmp_path / "train-00000.safetensors"
    save_file({key: np.arange(100).astype(dtype)}, shard, meta)
    shard.write_bytes(shard.read_bytes()[:keep])
    if name:
        refused(name, Tokens, tmp_path, "train", 10, Numbers())
    else:
        assert len(Tokens(tmp_path, "train", 10, Numbers())) == 9


@pytest.mark.parametrize("shard_tokens", [1 << 20, 100, 37, 1])
def test_windows_are_cuts_of_the_joined_documents_however_many_shards_hold_them(tmp_path, monkeypatch, shard_tokens):
    monkeypatch.setattr(data, "SHARD_TOKENS", shard_tokens)
    numbers = iter(range(10_000))
    rows = [{"title": f"t{i}", "text": " ".join(str(next(numbers)) for _ in range(1 + i % 23))} for i in range(200)]
    out = prepare(jsonl(tmp_path / "a.jsonl", rows), Numbers(10_000), tmp_path / "out", quiet=True)
    stream = [int(w) for r in rows if not data.held_out(r["title"]) for w in r["text"].split()]
    assert stored(out, "train") == stream
    assert (len(list(out.glob("train-*"))) > 1) == (shard_tokens < len(stream))
    tokens = Tokens(out, "train", 16)
    assert len(tokens) == (len(stream) - 1) // 16
    assert [tokens.window(i).tolist() for i in range(len(tokens))] == [stream[i * 16:i * 16 + 17] for i in range(len(tokens))]
    inputs, targets = tokens.batch(3, 4)
    assert inputs.tolist() == [tokens.window(tokens.shuffled(p)).tolist()[:-1] for p in range(3, 7)]
    assert targets[:, :-1].equal(inputs[:, 1:])


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


# --------------------------------------------------------------------------------------------- order

@pytest.fixture(scope="module")
def tokens_folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("order")
    save_file({"tokens": np.arange(0, 1 + 4 * 40, dtype=np.uint16)}, home / "train-00000.safetensors", {"vocab_size": "200", "tokenizer": "x"})
    return home  # 40 windows of 4; window i begins with token 4 * i


def test_each_epoch_visits_each_window_once_in_an_order_of_its_own(tokens_folder):
    tokens = Tokens(tokens_folder, "train", 4)
    order = [tokens.shuffled(p) for p in range(120)]
    epochs = [tuple(order[e:e + 40]) for e in (0, 40, 80)]
    assert all(sorted(e) == list(range(40)) for e in epochs) and len({*epochs, tuple(range(40))}) == 4
    again = Tokens(tokens_folder, "train", 4)
    for p in np.random.default_rng(1).permutation(120):  # any position at any time, as a resumed run asks
        assert again.shuffled(int(p)) == order[p]
    assert [Tokens(tokens_folder, "train", 4, seed=1).shuffled(p) for p in range(40)] != order[:40]
    assert tokens.batch(38, 4)[0][:, 0].tolist() == [4 * w for w in order[38:42]]  # across the end of an epoch


def test_two_ranks_read_what_one_rank_with_two_micro_batches_reads(tokens_folder):
    tokens = Tokens(tokens_folder, "train", 4)

    def reads(step, world, rank, accum, batch=2):
        places = [place_in_order(step, m, rank, accum, world, batch) for m in range(accum)]
        return [first for place in places for first in tokens.batch(place, batch)[0][:, 0].tolist()]

    seen = []
    for step in range(10):  # 10 steps of 4 windows: one epoch
        ranks = [reads(step, 2, rank, 1) for rank in (0, 1)]
        assert ranks[0] + ranks[1] == reads(step, 1, 0, 2)
        seen += ranks[0] + ranks[1]
    assert sorted(seen) == [4 * i for i in range(40)]  # no window twice, on any rank


def test_spread_covers_the_split_evenly_and_never_twice(tokens_folder):
    tokens = Tokens(tokens_folder, "train", 4)
    for count, windows in ((100, list(range(40))), (6, [0, 8, 16, 23, 31, 39])):
        assert [x[0].tolist() for x, _ in tokens.spread(count)] == [[4 * i + k for k in range(4)] for i in windows]
        assert all(y.equal(x + 1) for x, y in tokens.spread(count))


# ------------------------------------------------------------------------------------------- sources

def test_each_kind_of_file_gives_its_documents(tmp_path):
    long = "".join(f"line {i}\n" + "\n" * (i % 50 == 0) for i in range(2000))
    (tmp_path / "sub").mkdir()
    for name, text in {"a.txt": long, "b.md": "# b\n", "sub/c.py": "c = 'é'\n", "d.csv": "no", "e.jsonl": '{"title": "E", "text": "e"}\n'}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = list(data.documents(str(tmp_path)))
    pieces = [text for name, text in found if name.startswith("a.txt:")]
    assert "".join(pieces) == long and len(pieces) > 2 and all(p.endswith("\n\n") and len(p) < 6000 for p in pieces[:-1])
    assert [d for d in found if not d[0].startswith("a.txt:")] == [("b.md", "# b\n"), ("E", "e"), ("sub/c.py", "c = 'é'\n")]
    assert len({name for name, _ in found}) == len(found)
    assert list(data.documents(str(tmp_path / "b.md"))) == [("b.md", "# b\n")]


def test_stdlib_is_this_python_without_tests_and_packages():
    names = [name for name, _ in data.source_files("stdlib")]
    assert "json/decoder.py" in names and len(names) > 300 and names == sorted(names)
    assert not [n for n in names if {"site-packages", "test", "tests", "idle_test"} & set(n.split("/"))]


@pytest.mark.parametrize("line", ["{not json", '{"title": "no text"}', "[1, 2]", "3", '{"text": null}', '{"text": 5}'])
def test_a_bad_jsonl_line_is_refused_by_name(tmp_path, line):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + line + "\n", encoding="utf-8")
    refused("bad.jsonl", prepare, str(tmp_path / "bad.jsonl"), Tokenizer(ROOT / "tiny"), tmp_path / "out", quiet=True)


def test_a_failed_prepare_leaves_nothing_behind_and_can_be_tried_again(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{not json\n', encoding="utf-8")
    for _ in range(2):
        refused("bad.jsonl", prepare, str(tmp_path / "bad.jsonl"), Tokenizer(ROOT / "tiny"), tmp_path / "out", quiet=True)
        assert os.listdir(tmp_path) == ["bad.jsonl"]


def test_missing_and_empty_and_too_little_are_refused_by_name(tmp_path):
    tokenizer = Tokenizer(ROOT / "tiny")
    refused("nowhere", prepare, str(tmp_path / "nowhere"), tokenizer)
    (tmp_path / "empty").mkdir()
    refused("empty", prepare, str(tmp_path / "empty"), tokenizer)
    out = prepare(jsonl(tmp_path / "a.jsonl", [{"title": "a", "text": "short"}]), tokenizer, tmp_path / "little", quiet=True)
    for split in ("train", "val"):
        refused("little", Tokens, out, split, 64, tokenizer)


def test_the_same_source_is_prepared_once_and_a_changed_one_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer, source = Tokenizer(ROOT / "tiny"), jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    first = prepare(source, tokenizer, quiet=True)
    times = {f: os.stat(f).st_mtime_ns for f in first.iterdir()}
    assert prepare(source, tokenizer, quiet=True) == first == prepare(str(first), tokenizer, quiet=True)
    assert times == {f: os.stat(f).st_mtime_ns for f in first.iterdir()} and os.listdir("tokens") == [first.name]
    other = Tokenizer(ROOT / "tiny")
    other.fingerprint = "another"
    assert prepare(source, other, quiet=True) != first
    jsonl(tmp_path / "a.jsonl", [{"text": "one and two"}])
    second = prepare(source, tokenizer, quiet=True)
    assert second != first and stored(second, "train") + stored(second, "val") == tokenizer.document("one and two")


def test_a_named_folder_with_other_tokens_is_not_passed_off_as_this_source(tmp_path):
    prepare(jsonl(tmp_path / "a.jsonl", [{"text": "1"}]), Numbers(), tmp_path / "out", quiet=True)
    refused("out", prepare, jsonl(tmp_path / "b.jsonl", [{"text": "2"}]), Numbers(), tmp_path / "out", quiet=True)


def test_many_small_documents_take_time_in_proportion_to_their_number(tmp_path):
    source, start = jsonl(tmp_path / "a.jsonl", [{"text": "1"}] * 12_000), time.process_time()
    prepare(source, Numbers(), tmp_path / "out", quiet=True)
    assert time.process_time() - start < 1.5  # 0.3 s where each document costs the same, 4 s where each counts all before it
