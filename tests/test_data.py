"""data.py against an independent oracle: plain arithmetic on the token stream."""
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import data
import sources
from data import Mixture, Tokens, describe, open_split, place_in_order, prepared
from files import Refusal
from prepare import prepare
from shards import FORMAT, digest, held_out

ROOT = Path(data.__file__).parent

class Numbers:
    """A stand-in tokenizer whose documents are lists of ids: what prepare() must carry to disk and back unchanged."""
    fingerprint, separator, folder = "numbers", 999, ROOT / "tiny"

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
def test_A4_ids_survive_the_disk_in_a_width_the_header_states(tmp_path, vocab, dtype, ids):
    out = prepare(jsonl(tmp_path / "a.jsonl", [{"text": " ".join(map(str, ids))}]), Numbers(vocab), tmp_path / "out", quiet=True)
    (shard,) = out.glob("*.safetensors")
    raw = shard.read_bytes()
    header = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
    assert header["tokens"]["dtype"] == dtype and header["tokens"]["shape"] == [len(ids)]
    assert Tokens(out, shard.name.split("-")[0], len(ids) - 1).window(0).tolist() == ids


META = {"format": FORMAT, "vocab_size": "1000", "tokenizer": "numbers"}


@pytest.mark.parametrize("name, dtype, key, meta, keep", [
    ("another", np.uint16, "tokens", META | {"tokenizer": "another"}, None),
    ("65537", np.uint16, "tokens", META | {"vocab_size": "65537"}, None),
    ("train-00000", np.uint16, "tokens", META, -7),  # truncated in the ids
    ("train-00000", np.uint16, "tokens", META, 5),  # truncated in the header
    ("train-00000", np.uint16, "ids", META, None),
    ("train-00000", np.uint16, "tokens", {"tokenizer": "numbers"}, None),
    ("lrc-tokens 0", np.uint16, "tokens", META | {"format": "lrc-tokens 0"}, None),
    ("None", np.uint16, "tokens", {k: META[k] for k in ("vocab_size", "tokenizer")}, None),
    ("train-00000", np.float32, "tokens", META, None),
    (None, np.uint16, "tokens", META, None),  # nothing wrong
])
def test_A4_a_shard_that_cannot_be_right_is_refused(tmp_path, name, dtype, key, meta, keep):
    shard = tmp_path / "train-00000.safetensors"
    tensors = {key: np.arange(100).astype(dtype)}
    save_file(tensors, shard, meta | {"sha256": digest(tensors)})
    shard.write_bytes(shard.read_bytes()[:keep])
    if name:
        refused(name, Tokens, tmp_path, "train", 10, Numbers())
    else:
        assert len(Tokens(tmp_path, "train", 10, Numbers())) == 9


@pytest.mark.parametrize("part", [1 << 20, 512, 64])
def test_windows_are_cuts_of_the_joined_documents_however_many_shards_hold_them(tmp_path, monkeypatch, part):
    monkeypatch.setattr(sources, "BLOCK", part)
    monkeypatch.setattr(sources, "PART", (part, part))
    numbers = iter(range(10_000))
    rows = [{"title": f"t{i}", "text": " ".join(str(next(numbers)) for _ in range(1 + i % 23))} for i in range(200)]
    out = prepare(jsonl(tmp_path / "a.jsonl", rows), Numbers(10_000), tmp_path / "out", quiet=True, workers=1)
    stream = [int(w) for r in rows if not held_out(r["title"]) for w in r["text"].split()]
    assert stored(out, "train") == stream
    assert (len(list(out.glob("train-*"))) > 1) == (part < 1 << 20)
    tokens = Tokens(out, "train", 16)
    assert len(tokens) == (len(stream) - 1) // 16
    assert [tokens.window(i).tolist() for i in range(len(tokens))] == [stream[i * 16:i * 16 + 17] for i in range(len(tokens))]
    inputs, targets = tokens.batch(3, 4)
    assert inputs.tolist() == [tokens.window(tokens.shuffled(p)).tolist()[:-1] for p in range(3, 7)]
    assert targets[:, :-1].equal(inputs[:, 1:])


# --------------------------------------------------------------------------------------------- order

@pytest.fixture(scope="module")
def tokens_folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("order")
    tensors = {"tokens": np.arange(0, 1 + 4 * 40, dtype=np.uint16)}
    save_file(tensors, home / "train-00000.safetensors", {"format": FORMAT, "vocab_size": "200", "tokenizer": "x", "sha256": digest(tensors)})
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


def test_B34_two_ranks_read_what_one_rank_with_two_micro_batches_reads(tokens_folder):
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


# ------------------------------------------------------------------------------------------- mixture

@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Folders whose windows of 4 begin with 4 * i, plus 10,000 in the second and 20,000 in the third."""
    home = tmp_path_factory.mktemp("mixture")
    for k, windows in enumerate((40, 7, 300)):
        (home / str(k)).mkdir()
        for split in ("train", "val"):
            tensors = {"tokens": np.arange(10_000 * k, 10_000 * k + 1 + 4 * windows, dtype=np.uint16)}
            save_file(tensors, home / str(k) / f"{split}-00000.safetensors", {"format": FORMAT, "vocab_size": "30000", "tokenizer": "numbers", "sha256": digest(tensors)})
        summary = {"source": str(k), "fingerprint": str(k), "tokens": dict.fromkeys(("train", "val"), 1 + 4 * windows)}
        (home / str(k) / "tokens.json").write_text(json.dumps(summary), encoding="utf-8")
    return home


def test_a_mixture_reads_each_folder_in_its_share_and_in_its_own_order_from_any_position(three):
    parts = [Tokens(three / str(k), "train", 4, seed=5) for k in range(3)]
    mixture = Mixture(parts, [10, 0.35, 3], seed=5)
    reads = [int(mixture.batch(p, 1)[0][0, 0]) for p in range(2 * 1024)]
    per_folder = [[r for r in reads if r // 10_000 == k] for k in range(3)]
    for k, (seen, weight) in enumerate(zip(per_folder, (10, 0.35, 3))):
        assert abs(len(seen) - 2 * 1024 * weight / 13.35) <= 2
        assert seen == [10_000 * k + 4 * parts[k].shuffled(p) for p in range(len(seen))]  # its own epochs, none skipped
    assert len(set(reads[:13])) > 3 and [r // 10_000 for r in reads[:1024]] != [r // 10_000 for r in reads[1024:]]
    again = Mixture(parts, [10, 0.35, 3], seed=5)
    for p in np.random.default_rng(1).permutation(2048)[:300]:  # as a resumed run asks
        assert int(again.batch(int(p), 1)[0][0, 0]) == reads[p]
    inputs, targets = mixture.batch(1020, 8)  # across a period
    assert inputs[:, 0].tolist() == reads[1020:1028] and targets.equal(inputs + 1)


def test_a_mixtures_evaluation_reads_each_folder_in_its_share(three):
    mixture = Mixture([Tokens(three / str(k), "val", 4) for k in range(3)], [6, 1, 3])
    first = [int(x) // 10_000 for inputs, _ in mixture.spread(20, 4) for x in inputs[:, 0]]
    assert [first.count(k) for k in range(3)] == [12, 2, 6]


def test_the_data_flag_names_folders_with_weights(three, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = f"{three}/0=10,{three}/2=0.5"
    folders, weights = prepared(spec, Numbers(30_000))
    assert (folders, weights) == ([three / "0", three / "2"], [10, 0.5])
    assert isinstance(open_split(folders, weights, "train", 4, Numbers(30_000)), Mixture)
    ours, other = describe(spec, folders), describe(f"{three}/0=1,{three}/2=0.5", folders)
    assert ours["source"] == spec and ours["fingerprint"] != other["fingerprint"]
    for bad in (f"{three}/0=10,{three}/2", f"{three}/0=x", f"{three}/0=-1", f"{three}/0=nan", f"{three}/0=0"):
        refused("is not FOLDER=WEIGHT", prepared, bad, Numbers(30_000))
    refused("is there twice", prepared, f"{three}/0=1,{three}/0=1", Numbers(30_000))
    refused("nowhere does not exist", prepared, f"{three}/0=1,nowhere=1", Numbers(30_000))
    (tmp_path / "date=2024").mkdir()
    (tmp_path / "date=2024" / "a.jsonl").write_text('{"text": "1"}', encoding="utf-8")
    assert prepared(str(tmp_path / "date=2024"), Numbers(), quiet=True)[1] == [1.0]
    refused("1 in 1024", open_split, folders, [1, 1e-9], "train", 4)
