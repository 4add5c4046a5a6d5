"""What a user can get wrong, at every command: one line that names it, an exit code that is not 0, never a traceback, nothing left behind."""
import contextlib
import io
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pyarrow.parquet
import pytest
import torch
from conftest import random_net
from safetensors.numpy import save_file

import chat
import data
import lrc
import merge
import runs
import sources
import starts
import train
from data import Tokens
from files import Refusal, one_line
from prepare import prepare
from shards import FORMAT, Choice, digest
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
TOKEN = "hf_AbCdEf0123456789"
SMALL = "--width 12 --batch-size 2 --seq-len 16 --steps 2 --calibration-tokens 64 --eval-tokens 64".split()
UNREADABLE = Path("/proc/self/mem")  # a file that not even root can read from its beginning


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A teacher, a text, a run of two steps on it, prepared tokens; and everything that is none of these."""
    home = tmp_path_factory.mktemp("home")
    for name, changes in dict(teacher={}, narrow=dict(hidden_size=12), deep=dict(num_hidden_layers=3), few=dict(vocab_size=2000)).items():
        random_net(**dict(vocab_size=2048) | changes).save_pretrained(home / name)
        for file in TOKENIZER:
            shutil.copy(ROOT / "tiny" / file, home / name)
    (home / "text.jsonl").write_text("".join(json.dumps({"id": f"d{i}", "text": f"def f{i}(x):\n    return x * {i}\n" * 4}) + "\n" for i in range(60)), encoding="utf-8")
    (home / "tiny.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    (home / "blank.jsonl").write_text('{"text": ""}\n' * 60, encoding="utf-8")
    (home / "cloze.jsonl").write_text('{"prompt": "import", "answer": " os"}\n', encoding="utf-8")
    (home / "numbers.jsonl").write_text('{"prompt": 1, "answer": 2}\n', encoding="utf-8")
    (home / "long.jsonl").write_text(json.dumps({"prompt": "import os\n" * 60, "answer": " os"}), encoding="utf-8")
    (home / "zeros.txt").write_bytes(bytes(5000))
    (home / "utf16.txt").write_bytes("text\n".encode("utf-16"))
    (home / "latin1.md").write_bytes("é".encode("latin-1"))
    (home / "noise.jsonl").write_bytes(np.random.default_rng(0).bytes(3000))
    (home / "noise.parquet").write_bytes(np.random.default_rng(1).bytes(3000))
    (home / "empty.txt").write_bytes(b"")
    (home / "text.txt.gz").write_bytes(b"\x1f\x8b")
    (home / "empty").mkdir()
    (home / "gz").mkdir()
    (home / "gz/a.txt.gz").write_bytes(b"\x1f\x8b")
    for name, content in (("zeros", bytes(500)), ("noise", np.random.default_rng(2).bytes(500)), ("deepjson", b"[" * 100_000), ("list", b"[1]"), ("object", b"{}")):
        (home / name).mkdir()
        for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "tokens.json", "metrics.jsonl"):
            (home / name / file).write_bytes(content)
        (home / name / "tokenizer").mkdir()
    data.main(["prepare", str(home / "text.jsonl"), "--tokenizer", str(home / "teacher"), "--out", str(home / "prepared")])
    for name in ("cut", "flipped", "short"):
        shutil.copytree(home / "prepared", home / name)
    shard = next((home / "cut").glob("train-*"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-50])
    (home / "flipped" / shard.name).write_bytes(raw[:-50] + bytes([raw[-50] ^ 1]) + raw[-49:])
    (home / "short" / shard.name).unlink()
    shutil.copytree(home / "teacher", home / "stranger")  # its tokenizer is another
    spec = json.loads((home / "stranger/tokenizer.json").read_text(encoding="utf-8"))
    spec["model"]["merges"].pop()
    (home / "stranger/tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(train, "sample", lambda *args: "")
        patch.setenv("HF_TOKEN", TOKEN)
        train.main(["--teacher", "teacher", "--data", "prepared", "--out", "run", *SMALL])
    return home


@pytest.fixture
def said(home, monkeypatch, capsys):
    """A function: words of a command -> the one line with which it ends. Run as the script is, in this process; nothing may be left behind."""
    def call(words):
        words = words.split() if isinstance(words, str) else words
        files = lambda: {path: p.stat().st_size for p in home.rglob("*") if p.is_file() and (path := p.relative_to(home)).parts[0] != "tokens"}  # whole folders of tokens may stay
        before = files()
        monkeypatch.chdir(home)
        monkeypatch.setattr(sys, "argv", list(words))
        usual = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        signal.signal(signal.SIGTERM, usual)  # reproduce.py sets its own
        code, printed = caught.value.code, capsys.readouterr()
        text = code if isinstance(code, str) else printed.err.splitlines()[-1]
        assert code not in (None, 0) and "\n" not in text and len(text) < 1000 and "error: " in text, (code, text)
        assert files() == before
        return text
    return call


CASES = [line.split(" => ") for line in """train.py --teacher nowhere --data text.jsonl => teacher 'nowhere' is neither a folder, a hub id
train.py --teacher no/where --data text.jsonl => there is none here called no/where
train.py --teacher text.jsonl --data text.jsonl => teacher 'text.jsonl' is a file
train.py --teacher teacher/model.safetensors --data text.jsonl => teacher/model.safetensors' is a file
train.py --teacher '' --data text.jsonl => teacher '' is neither
train.py --teacher empty --data text.jsonl => empty/config.json: cannot be read
train.py --teacher zeros --data text.jsonl => zeros/config.json: not valid JSON
train.py --teacher noise --data text.jsonl => noise/config.json: not valid JSON
train.py --teacher list --data text.jsonl => list/config.json: holds a JSON list
train.py --teacher object --data text.jsonl => object/config.json: model_type=None
train.py --teacher deepjson --data text.jsonl => deepjson/config.json: not valid JSON
train.py --teacher teacher --data nowhere => data 'nowhere': no such file or folder
train.py --teacher teacher --data '' => --data is needed
train.py --teacher teacher --data empty => data 'empty': no .txt
train.py --teacher teacher --data gz => but 1 .gz; unpack
train.py --teacher teacher --data text.txt.gz => but 1 .gz; unpack
train.py --teacher teacher --data empty.txt => data 'empty.txt': no document in it that has text
train.py --teacher teacher --data blank.jsonl => data 'blank.jsonl': no document in it that has text
train.py --teacher teacher --data zeros.txt => zeros.txt, line 1: not text (a byte 0)
train.py --teacher teacher --data utf16.txt => utf16.txt, line 1: not UTF-8 text (a byte 0xff)
train.py --teacher teacher --data latin1.md => latin1.md, line 1: not UTF-8 text (a byte 0xe9)
train.py --teacher teacher --data noise.jsonl => noise.jsonl, line 1: not JSON
train.py --teacher teacher --data noise.parquet => noise.parquet: cannot be read as .parquet
train.py --teacher teacher --data tiny.jsonl => give more documents
train.py --teacher teacher --data zeros => zeros/tokens.json: not valid JSON
train.py --teacher teacher --data object => object/tokens.json: not as `data.py prepare` writes it
train.py --teacher teacher --data cut => cut/train-00000.safetensors: cannot be read as a token shard
train.py --teacher teacher --data flipped => flipped/train-00000.safetensors: its tokens are not those that were written
train.py --teacher teacher --data short => short: its train shards hold 0 tokens
train.py --teacher stranger --data prepared => made with tokenizer
train.py --teacher few --data text.jsonl => few: the tokenizer has 2048 tokens, the embedding only 2000 rows
train.py --teacher teacher --data prepared=0 => prepared=0 is not FOLDER=WEIGHT
train.py --teacher teacher --data prepared=1,nowhere=1 => nowhere does not exist
train.py --teacher teacher --data =1,prepared=1 => data '': name a file
train.py --teacher teacher --data prepared --width 4096 => --width 4096
train.py --teacher teacher --data prepared --width abc => argument --width: invalid int value: 'abc'
train.py --teacher teacher --data prepared --seq-len 4096 => --seq-len 4096
train.py --teacher teacher --data prepared --out text.jsonl => text.jsonl: exists and is not a run folder
train.py --teacher teacher --data prepared --out teacher => teacher: exists and is not a run folder
train.py --teacher teacher --data prepared --out text.jsonl/run => text.jsonl/run
train.py --resume --out nowhere => nowhere/config.json: cannot be read
train.py --resume --out text.jsonl => text.jsonl/config.json: cannot be read
train.py --resume --out zeros => zeros/config.json: not valid JSON
train.py --resume --out object => object: its config.json is not that of a run
train.py --stage sft --init nowhere --data text.jsonl => 'nowhere' is neither
train.py --stage sft --init teacher --data text.jsonl => teacher: no chat template
train.py --stage sft --init teacher --data prepared => prepared: holds documents, not chats
train.py --teacher nowhere --plan => 'nowhere' is neither
train.py --teacher zeros --plan => zeros/config.json: not valid JSON
train.py --teacher object --plan => object/config.json: model_type=None
train.py --teacher text.jsonl --plan => teacher 'text.jsonl' is a file
train.py --teacher teacher --plan --seq-len 4096 => --seq-len 4096 is beyond the model's 128 positions
train.py --tteacher teacher => unrecognized arguments: --tteacher
data.py prepare nowhere => data 'nowhere': no such file or folder
data.py prepare '' => data '': name a file
data.py prepare gz => but 1 .gz; unpack
data.py prepare hub:x => data 'hub:x': a hub set is written
data.py prepare zeros => zeros/tokens.json: not valid JSON
data.py prepare text.jsonl --chats => no chat template
data.py prepare latin1.md --chats => no .jsonl or .parquet file in it, but 1 .md
data.py prepare text.jsonl --column nothing => text.jsonl, line 1: no nothing
data.py prepare text.jsonl --min-score 3 => text.jsonl, line 1: no number "score"
data.py prepare text.jsonl --tokens 0 => --tokens 0
data.py prepare text.jsonl --tokens many => --tokens: invalid float value: 'many'
data.py prepare text.jsonl --tokens 1 => more than the --tokens asked for
data.py prepare text.jsonl --workers -1 => --workers -1
data.py prepare text.jsonl --tokenizer empty => empty/tokenizer.json: cannot be read
data.py prepare text.jsonl --tokenizer zeros => zeros/tokenizer.json: not valid JSON
data.py prepare text.jsonl --tokenizer object => object/tokenizer.json: pre-tokenizer None
data.py prepare text.jsonl --tokenizer deepjson => deepjson/tokenizer.json: not valid JSON
data.py prepare text.jsonl --tokenizer teacher/tokenizer.json => teacher/tokenizer.json' is a file
data.py prepare text.jsonl --out text.jsonl => text.jsonl: exists and is not a token folder
data.py prepare text.jsonl --out empty => empty: exists and is not a token folder
data.py prepare text.jsonl --out zeros => zeros/tokens.json: not valid JSON
data.py prepare text.jsonl --tokenizer stranger --out prepared => prepared: holds the tokens of other files
data.py prepare text.jsonl --out text.jsonl/tokens => Not a directory: 'text.jsonl/tokens.making'
data.py prepare text.jsonl --out '' => name a folder that is to be made
data.py tokenizer --source blank.jsonl --out new => no text to learn a vocabulary from
data.py tokenizer --source zeros.txt --out new => zeros.txt, line 1: not text
data.py tokenizer --source text.jsonl --vocab 10 --out new => --vocab 10
data.py tokenizer --source text.jsonl --vocab -5 --out new => --vocab -5
data.py tokenizer --source text.jsonl --out text.jsonl => File exists: 'text.jsonl'
merge.py nowhere => nowhere: no tokenizer folder in it
merge.py nowhere --gguf => nowhere: no tokenizer folder in it
merge.py '' => no tokenizer folder in it
merge.py text.jsonl => text.jsonl: no tokenizer folder in it
merge.py zeros => zeros/config.json: not valid JSON
merge.py object => object: no complete checkpoint/step-* in it
merge.py teacher => teacher: no tokenizer folder in it
merge.py run --out text.jsonl => text.jsonl: exists and is not a model folder
merge.py run --out teacher => teacher: holds a model that no run made
merge.py run --out text.jsonl/x => Not a directory
merge.py run --dtype int8 => invalid choice: 'int8'
merge.py run --gguf --out text.jsonl => text.jsonl: exists and is no GGUF file
merge.py noise --gguf => noise/config.json: not valid JSON
merge.py few --gguf => few/tokenizer.json: token id 2047, but the embedding has 2000 rows
eval.py teacher => nothing to do
eval.py '' --text text.jsonl => teacher '' is neither
eval.py text.jsonl --text text.jsonl => teacher 'text.jsonl' is a file
eval.py empty --text text.jsonl => empty/tokenizer.json: cannot be read
eval.py object --text text.jsonl => object/tokenizer.json: pre-tokenizer None
eval.py few --text text.jsonl => few: the tokenizer has 2048 tokens
eval.py teacher --text nowhere => data 'nowhere': no such file or folder
eval.py teacher --text zeros.txt => zeros.txt, line 1: not text
eval.py teacher --text blank.jsonl => data 'blank.jsonl': no document in it that has text
eval.py teacher --text zeros => zeros/tokens.json: not valid JSON
eval.py teacher --text flipped --whole => its tokens are not those that were written
eval.py teacher --text text.jsonl --teacher nowhere => 'nowhere' is neither
eval.py teacher --text text.jsonl --teacher stranger => teacher and stranger have different tokenizers
eval.py teacher --text text.jsonl --seq-len 0 => --seq-len 0
eval.py teacher --text text.jsonl --seq-len 4096 => --seq-len 4096
eval.py teacher --tasks piqa --local text.jsonl => --local text.jsonl: no such folder
eval.py teacher --tasks piqa --limit 0 => --limit 0
eval.py teacher --text text.jsonl --seq-len 16 --out text.jsonl => File exists: 'text.jsonl'
audit.py reach => name a student's folder, or give --width
audit.py reach '' --teacher teacher => name a student's folder, or give --width
audit.py reach --teacher teacher --width 0 => --width 0
audit.py reach zeros --teacher teacher => zeros/config.json: not valid JSON
audit.py reach narrow --teacher '' => teacher '' is neither
audit.py energy text.jsonl --teacher teacher => teacher 'text.jsonl' is a file
audit.py energy empty --teacher teacher => empty/config.json: cannot be read
audit.py energy deep --teacher teacher => deep: 3 layers
audit.py energy teacher --teacher narrow => teacher: 24 wide, its teacher 12
audit.py reach teacher --teacher narrow => teacher: 24 wide, its teacher 12
audit.py energy narrow --teacher teacher --picture x.docx => --picture x.docx
audit.py energy narrow --teacher teacher --picture nowhere/x.png => --picture nowhere/x.png
audit.py remove narrow --teacher teacher --text zeros.txt => zeros.txt, line 1: not text
audit.py remove narrow --teacher teacher --text text.jsonl --layers ² => --layers ²
audit.py remove narrow --teacher teacher --text text.jsonl --layers 1- => --layers 1-
audit.py remove narrow --teacher teacher --text text.jsonl --layers 1-0 => --layers 1-0
audit.py remove narrow --teacher teacher --text text.jsonl --layers 5 => --layers 5
audit.py remove narrow --teacher teacher --text text.jsonl --matrices q => --matrices q
audit.py remove narrow --teacher teacher --text text.jsonl --scale nan => --scale nan
audit.py remove narrow --teacher teacher --text text.jsonl --out empty => --out empty
audit.py remove narrow --teacher few --text text.jsonl --seq-len 8 => few: the tokenizer has 2048 tokens
audit.py rank narrow --teacher teacher --text tiny.jsonl => the val split has 0 tokens
audit.py rank narrow --teacher stranger --text text.jsonl => different tokenizers
audit.py spectrum narrow --teacher teacher --layer 7 => --layers 7
audit.py neurons narrow --teacher teacher --cloze nowhere => 'nowhere'
audit.py neurons narrow --teacher teacher --cloze empty => Is a directory: 'empty'
audit.py neurons narrow --teacher teacher --cloze noise.jsonl => noise.jsonl, line 1
audit.py neurons narrow --teacher teacher --cloze numbers.jsonl => numbers.jsonl, line 1
audit.py neurons narrow --teacher teacher --cloze long.jsonl => long.jsonl, line 1
audit.py neurons narrow --teacher teacher --cloze cloze.jsonl --k 0 => --k 0
runs.py => name the run folders
runs.py nowhere => nowhere/config.json: cannot be read
runs.py text.jsonl => text.jsonl/config.json: cannot be read
runs.py zeros => zeros/config.json: not valid JSON
runs.py object => object/config.json: args, data, teacher or ranks
runs.py run run => run: a second run
reproduce.py nothing => invalid choice: 'nothing'
reproduce.py all --processes 0 => --processes 0
reproduce.py all --processes x => --processes: invalid int value: 'x'""".splitlines()]


@pytest.mark.parametrize("words, part", CASES, ids=[words for words, _ in CASES])
def test_a_command_given_what_it_cannot_use_says_so_in_one_line(said, words, part):
    assert part in said(shlex.split(words))


# ------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("words", [["train.py", "--teacher", "nowhere", "--data", "text.jsonl"], ["data.py", "prepare", "zeros.txt", "--workers", "2"]], ids=lambda words: words[0])
def test_as_a_process_of_its_own_too(home, words):
    done = subprocess.run([sys.executable, ROOT / words[0], *words[1:]], cwd=home, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.skipif(not UNREADABLE.exists(), reason="needs a file that even root cannot read")
def test_a_file_that_cannot_be_read_is_named(said, home):
    (home / "locked").mkdir(exist_ok=True)
    (home / "locked/a.txt").symlink_to(UNREADABLE)
    assert "mem: cannot be read" in said(["data.py", "prepare", "locked"]) or "a.txt: cannot be read" in said(["data.py", "prepare", "locked"])


def test_files_that_are_left_out_are_told_in_one_line(home, tmp_path, monkeypatch, capsys):
    (tmp_path / "in/.git").mkdir(parents=True)
    for name in ("a.txt.gz", "b.txt.gz", "c.csv", ".git/config", "README"):
        (tmp_path / "in" / name).write_bytes(b"x")
    (tmp_path / "in/d.txt").write_text("text", encoding="utf-8")
    (tmp_path / "in/.git/hidden.py").write_bytes(b"\xff")
    (tmp_path / "in/._d.txt").write_bytes(b"\xff")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "in/e").symlink_to("../elsewhere")
    (tmp_path / "in/f.txt").symlink_to("not here")
    (tmp_path / "in/loop").symlink_to(".")
    for quiet in (False, True):
        prepare(str(tmp_path / "in"), Tokenizer(ROOT / "tiny"), tmp_path / f"out{quiet}", quiet=quiet)
        told = (f"data {str(tmp_path / 'in')!r}: left out 2 .gz, 1 without a suffix, 1 .csv, 3 links to a folder or nowhere; "
                "read are .txt, .md, .py, .jsonl, .parquet")
        assert capsys.readouterr().err.splitlines() == [told] * (not quiet)


def test_a_name_that_the_terminal_cannot_show_stops_nothing(home, monkeypatch, tmp_path):
    shutil.copy(home / "text.jsonl", tmp_path / "é.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["data.py", "prepare", "é.jsonl", "--tokenizer", str(home / "teacher"), "--out", "é"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    runpy.run_path(str(ROOT / "data.py"), run_name="__main__")
    assert (tmp_path / "é/tokens.json").exists()


def test_a_folder_that_cannot_be_listed_is_refused_by_name(home, tmp_path, monkeypatch):
    """Root may list any: os.scandir says what it says to others."""
    (tmp_path / "in/locked").mkdir(parents=True)
    (tmp_path / "in/d.txt").write_text("text", encoding="utf-8")
    scan = os.scandir

    def denied(path="."):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(Refusal, match="in/locked: cannot be read .Permission denied"):
        sources.source_files(str(tmp_path / "in"))


@contextlib.contextmanager
def no_room(size):
    """No file grows beyond so many bytes, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("words, size, part", [
    ("data.py prepare text.jsonl --out tokens/new", 2000, "new.making/train-00000.safetensors: cannot be written"),
    ("data.py prepare text.jsonl --out tokens/other", 30, "other.making/begun.json: cannot be written"),
    ("data.py tokenizer --source text.jsonl --vocab 300 --out new", 900, "new/tokenizer.json: cannot be written"),
    ("merge.py run --out new", 9000, "model.safetensors: cannot be written"), ("merge.py run --gguf --out new.gguf", 9000, "File too large")])
def test_no_space_left_is_told_and_leaves_nothing_half(said, home, words, size, part):
    with no_room(size):
        text = said(shlex.split(words))
    assert part in text and not list(home.rglob("*.tmp")) and not (home / "tokens/new").exists()


def test_a_shard_that_holds_ids_beyond_its_vocabulary_or_tells_nonsense_is_refused(home, tmp_path):
    meta = {"format": FORMAT, "vocab_size": "2048", "tokenizer": "x"}
    for tensors, more, part in (({"tokens": np.array([1, 2048], np.uint16)}, {}, "it holds the id 2048"), ({"tokens": np.array([[1, 2]], np.uint16)}, {}, "not a token shard"),
                                ({"tokens": np.array([1, 2], np.uint16)}, {"vocab_size": "many"}, "not a token shard"),
                                ({"tokens": np.array([1, 2], np.uint16)}, {"vocab_size": "9" * 5000}, "not a token shard"),
                                ({"tokens": np.array([1, 2], np.uint16), "more": np.ones(2, np.uint8)}, {}, "not a token shard")):
        save_file(tensors, tmp_path / "train-00000.safetensors", meta | {"sha256": digest(tensors)} | more)
        with pytest.raises(Refusal, match=part):
            Tokens(tmp_path, "train", 1)
    tokenizer = Tokenizer(ROOT / "tiny")
    tensors = {"tokens": np.array([1, 2, 2048], np.uint16)}  # within what it claims, beyond what the tokenizer has
    save_file(tensors, tmp_path / "train-00000.safetensors", meta | {"sha256": digest(tensors), "tokenizer": tokenizer.fingerprint, "vocab_size": "2049"})
    with pytest.raises(Refusal, match="made with 2049 tokens, the teacher's tokenizer has 2048"):
        Tokens(tmp_path, "train", 1, tokenizer)


# ----------------------------------------------------------------------------------------------- a run


def places(record, way=()):
    """Every place in a JSON value that a user could have edited."""
    for key, value in record.items():
        yield (*way, key)
        if isinstance(value, dict):
            yield from places(value, (*way, key))


def edit(file, text, way, value):
    """The JSON in `text` into `file`, with another value at a place, or for `...` without it."""
    record = json.loads(text)
    holder = record
    for key in way[:-1]:
        holder = holder[key]
    holder[way[-1]] = value
    if value is ...:
        del holder[way[-1]]
    file.write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.parametrize("file", ["config.json", "checkpoint/step-0000002/state.json"])
def test_a_run_whose_json_was_edited_is_merged_or_refused(home, tmp_path, file):
    run = shutil.copytree(home / "run", tmp_path / "run")
    text = (run / file).read_text(encoding="utf-8")
    ways = [way for way in places(json.loads(text)) if way[0] != "args" or way[-1] in ("args", "stage", "mode", "recipe")]
    values = (None, "x", -1, [1], {}, True, 1 << 40, ...)
    for k, way in enumerate(ways):
        for value in values if len(ways) < 8 else (values[k % 7], ...):
            edit(run / file, text, way, value)
            try:
                merge.export(run, tmp_path / "out")
            except Refusal as refusal:
                assert str(run) in str(refusal) and "\n" not in str(refusal), (way, value)
            assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("value", [None, "x", -1, [1], {}, True, 1 << 40, ...], ids=str)
def test_a_run_whose_json_was_edited_is_compared_and_resumed_or_refused(home, tmp_path, value):
    run = shutil.copytree(home / "run", tmp_path / "run")
    text = (run / "config.json").read_text(encoding="utf-8")
    began = {name: json.loads(text)[name] for name in ("teacher", "data", "ranks")}
    for way in [way for way in places(json.loads(text)) if way[0] in ("args", "teacher", "data", "ranks")]:
        edit(run / "config.json", text, way, value)
        for work in (lambda: runs.compare([run]), lambda: train.parse(["--resume", "--out", str(run)]), lambda: runs.same(run, began)):
            try:
                work()
            except Refusal as refusal:
                assert "\n" not in str(refusal), (way, value)


@pytest.mark.parametrize("line", [b"null", b"3", b'{"val_kl": 1}', b'{"step": "1"}', b'{"step": 1, "loss": "x"}', b"\xff", b"[" * 3000])
def test_a_metrics_line_that_is_no_row_is_refused_by_its_number(home, tmp_path, line):
    run = shutil.copytree(home / "run", tmp_path / "run")
    rows = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([rows[0], line + b"\n", *rows[1:]]))
    with pytest.raises(Refusal, match="metrics.jsonl, line 2: not a row"):
        runs.compare([run])


def test_calibration_without_room_for_its_streams_is_refused_first(home, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("", (), {"free": 1000})())
    with pytest.raises(Refusal, match="set TMPDIR to another place, or give fewer --calibration-tokens"):
        starts.calibrate(*made_pair())


def made_pair():
    teacher = random_net().requires_grad_(False)
    ids = torch.zeros(2, 16, dtype=torch.long)
    return teacher, lrc.blank_student(teacher, 12), ids, ids


# --------------------------------------------------------------------------------------- a foreign template


def chat_teacher(folder, template, **more):
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tiny/tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": template} | more), encoding="utf-8")
    return folder


@pytest.mark.parametrize("template, part", [
    ("{{ ''.__class__.__mro__ }}", "'__class__'"), ("{{ cycler.__init__.__globals__ }}", "'__init__'"), ("{{ messages.append(1) }}", "'append'"),
    ("{% include '/etc/passwd' %}", "no loader"), ("{% for a in range(1000000000) %}{% endfor %}", "Range too big"),
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "does not end"), ("{{ 10 ** 10 ** 10 }}", "`**`"), ("{{ 'a' * 10000000000 }}", "`*`"),
    ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MemoryError"), ("{{ 'x'|center(10000000000) }}", "MemoryError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"), ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "broken"),
    ("{{ " + "(" * 3000, "broken"), ([3], "no chat template"), (3, "no text")])
def test_a_template_that_reaches_out_or_never_ends_is_refused(home, tmp_path, monkeypatch, template, part):
    monkeypatch.setattr(chat, "SECONDS", 0.3 if part == "does not end" else 5)  # on a busy machine the others take longer than they should
    monkeypatch.setattr(chat, "ROOM", 100 << 20)
    source = tmp_path / "c.jsonl"
    source.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n', encoding="utf-8")
    before = time.monotonic()
    with pytest.raises(Refusal) as caught:
        prepare(str(source), Tokenizer(chat_teacher(tmp_path / "m", template)), tmp_path / "out", quiet=True, choice=Choice(chats=True))
    assert part in str(caught.value) and str(tmp_path / "m") in str(caught.value) and "\n" not in str(caught.value) and time.monotonic() - before < 5
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and resource_limit() == -1


def resource_limit():
    resource = pytest.importorskip("resource")
    return resource.getrlimit(resource.RLIMIT_AS)[0]


def test_a_template_that_is_no_utf8_is_refused_by_name(home, tmp_path):
    folder = chat_teacher(tmp_path / "m", None)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(Refusal, match="chat_template.jinja: not UTF-8"):
        chat.read_template(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "\\ud800"}', encoding="utf-8")
    with pytest.raises(Refusal, match="its chat template is no text"):
        chat.read_template(folder)


# ------------------------------------------------------------------------------------------------- secrets


def test_no_file_of_a_run_holds_the_token(home):
    files = [p for p in (home / "run").rglob("*") if p.is_file()]
    assert len(files) > 10 and not [p for p in files if TOKEN.encode() in p.read_bytes()]


LEAKS = [f"401 for https://user:{TOKEN}@huggingface.co/x", f"Authorization: Bearer {TOKEN}", f"GET 'https://cdn.hf.co/a.parquet?X-Amz-Signature=s3cr3t&x={TOKEN}' failed\nagain",
         "proxy http://me:s3cr3t@proxy:3128 refused", "token s3cr3t is not valid", f"invalid token {TOKEN}"]


@pytest.mark.parametrize("leak", LEAKS)
def test_no_token_and_no_credentials_are_printed(monkeypatch, tmp_path, leak, capsys):
    """What the hub's libraries raise while data are read, and while lm-eval loads its tasks."""
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")

    class Broken:
        def open(self, *_):
            raise ConnectionError(leak)

        def load(self, *_):
            raise ConnectionError(leak)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Broken)
    with pytest.raises(OSError) as caught:
        list(sources.read(sources.Part("a.jsonl", "hub://datasets/o/n@c/a.jsonl", 0, 10)))
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: Broken())
    import eval as evaluation
    texts = [str(caught.value), evaluation.find_tasks(["piqa"], None).missing["piqa"], one_line(ConnectionError(leak))]
    assert all("s3cr3t" not in text and TOKEN not in text and "\n" not in text and "ConnectionError" in text for text in texts[:2]), texts
    assert "s3cr3t" not in texts[2] and TOKEN not in texts[2]


def test_a_damaged_page_of_a_parquet_with_checksums_is_refused(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["abc" * 100] * 3}), tmp_path / "a.parquet", write_page_checksum=True, compression="none")
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(raw.replace(b"abcabc", b"abdabc", 1))
    with pytest.raises(Refusal, match="a.parquet: cannot be read as .parquet"):
        prepare(str(tmp_path), Tokenizer(ROOT / "tiny"), tmp_path / "out", quiet=True)


def test_a_refusal_is_one_line_whatever_a_foreign_file_holds(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"a\nb\u2028\x1b[2J": 1}), encoding="utf-8")
    with pytest.raises(Refusal) as caught:
        prepare(str(tmp_path / "a.jsonl"), Tokenizer(ROOT / "tiny"), tmp_path / "out", quiet=True)
    assert "but a b  [2J (" in str(caught.value) and str(caught.value).isprintable()
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(map(str, range(10_000)), 1)), encoding="utf-8")
    with pytest.raises(Refusal) as caught:
        prepare(str(tmp_path / "a.jsonl"), Tokenizer(ROOT / "tiny"), tmp_path / "out", quiet=True)
    text = str(caught.value)
    assert len(text) < 1000 and "a.jsonl, line 1: no text" in text and text.endswith("data.py prepare --skip-bad")


@pytest.mark.parametrize("words, place", [("merge.py run --out new", "os.rename"), ("merge.py run --gguf --out new.gguf", "to_gguf.tensors"),
                                          ("audit.py energy narrow --teacher teacher", "lrc.span"),
                                          ("eval.py teacher --text text.jsonl --seq-len 16", "model.Transformer.from_pretrained")])
def test_ctrl_c_is_one_line_too(home, monkeypatch, words, place):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt
    before = {p for p in home.rglob("*") if p.is_file()}
    monkeypatch.setattr(place, stop)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit, match="^interrupted"):
        runpy.run_path(str(ROOT / words.split()[0]), run_name="__main__")
    assert {p for p in home.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("words", [["audit.py", "reach", "--teacher", "llama3.2-3b", "--width", "1536"], ["data.py", "prepare", "stdlib", "--tokenizer", "nowhere"]])
def test_a_screen_that_was_closed_is_no_traceback(words):
    done = subprocess.run(f"{sys.executable} {' '.join(words)} >&-", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and (done.returncode == 0) == (words[0] == "audit.py"), done.stderr
