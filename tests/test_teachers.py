"""teachers.py: which folder a name means, and what a user is told when there is none. No test reaches the network."""
import socket
import traceback
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelInfo, constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from config import Config
from files import Refusal, read_json
from model import Transformer
from teachers import HERE, PRESETS, WANTED, resolve

REPO, COMMIT, TOKEN = "meta-llama/Llama-3.2-3B-Instruct", "0123456789abcdef0123456789abcdef01234567", "hf_secret123"
FILES = ("config.json", "model.safetensors", "tokenizer.json")


def answer(kind, status):
    """What huggingface_hub raises for an HTTP status; like the real ones, its text may hold anything, a token too."""
    response = SimpleNamespace(status_code=status, headers={}, request=SimpleNamespace(headers={"authorization": f"Bearer {TOKEN}"}))
    return kind(f"{status} for\nhttps://huggingface.co/api/models/{REPO} with Bearer {TOKEN}", response=response)


def refusal(name, *parts):
    with pytest.raises(Refusal) as caught:
        resolve(name)
    text = str(caught.value)
    for part in (name, *parts):
        assert part in text, f"{part!r} is not in {text!r}"
    shown = "".join(traceback.format_exception(caught.value))  # what an uncaught one would print: no chained hub error
    assert "\n" not in text and shown.count("Traceback") == 1 and TOKEN not in shown


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No sockets, an empty hub cache, a token that must never be shown. Yields the addresses somebody tried to reach."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("Network is unreachable")
    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return tried


def hub(monkeypatch, model_info=None, download=None):
    """The hub answers with these: an exception is raised, anything else returned."""
    def says(reply):
        def call(*args, **kwargs):
            calls.append((args, kwargs))
            if isinstance(reply, Exception):
                raise reply
            return reply
        return call
    calls = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", says(model_info))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", says(download))
    return calls


def fill_cache(root, files=FILES):
    """The layout huggingface_hub keeps on disk."""
    repo = root / "cache" / ("models--" + REPO.replace("/", "--"))
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for name in files:
        (snapshot / name).write_text("{}")
    return snapshot


LOGIN = [f"https://huggingface.co/{REPO}", "hf auth login"]


@pytest.mark.parametrize("stage", ["model_info", "download"])
@pytest.mark.parametrize("error, parts", [
    (answer(GatedRepoError, 403), ["gated", "licence", *LOGIN]),
    (answer(RepositoryNotFoundError, 401), ["no such model", "private", *LOGIN]),
    (answer(HfHubHTTPError, 401), ["401", "refused access", *LOGIN]),
    (answer(HfHubHTTPError, 403), ["403", "refused access", *LOGIN]),
    (answer(RevisionNotFoundError, 404), ["no revision", LOGIN[0]]),
    (answer(HfHubHTTPError, 500), ["500", "try again later"]),
    (ConnectionError(f"no route for Bearer {TOKEN}"), ["cannot be reached", "ConnectionError", "network"])],
    ids=["gated", "not-found", "401", "403", "revision", "500", "connection"])
def test_B11_hub_errors_are_one_line_without_the_token(monkeypatch, error, parts, stage):
    hub(monkeypatch, error if stage == "model_info" else ModelInfo(id=REPO, sha=COMMIT), error)
    refusal(REPO, "--teacher FOLDER", *parts)


def test_download_is_pinned_to_one_commit_and_leaves_pickles_behind(monkeypatch, tmp_path):
    calls = hub(monkeypatch, ModelInfo(id=REPO, sha=COMMIT), str(tmp_path))
    assert resolve("llama3.2-3b") == (tmp_path, f"{REPO}@{COMMIT}")
    args, kwargs = calls[1]
    assert args == (REPO,) and kwargs == dict(revision=COMMIT, allow_patterns=WANTED)
    names = [*FILES, "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "consolidated.00.pth"]
    wanted = filter_repo_objects(names, allow_patterns=WANTED)
    assert list(wanted) == names[:-2]


@pytest.mark.parametrize("offline_mode", [False, True])
def test_B11_cached_copy_serves_without_a_network(tmp_path, monkeypatch, offline, offline_mode):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline_mode)
    snapshot = fill_cache(tmp_path)
    assert resolve(REPO) == (snapshot, f"{REPO}@{COMMIT}")
    assert bool(offline) == (not offline_mode)  # the real client tried, unless it was told not to


@pytest.mark.parametrize("files", [(), ("config.json",), ("model.safetensors",)], ids=str)
def test_incomplete_cached_copy_is_refused(tmp_path, files):
    fill_cache(tmp_path, files)
    refusal(REPO, "cannot be reached", "--teacher FOLDER")


def test_B11_local_folder_needs_no_network(tmp_path, monkeypatch, offline):
    calls = hub(monkeypatch)
    assert resolve(str(tmp_path)) == (tmp_path, f"{tmp_path.name} (local folder)")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)  # a folder that looks like a hub id is a folder
    assert resolve("owner/name")[1] .endswith("(local folder)")
    assert resolve("tiny")[0] == HERE / "tiny"
    assert not calls and not offline


@pytest.mark.parametrize("name", ["nothing-here", "./name", "../name", "./owner/name", "/no/such/folder", "../a/b", "a/b/c", "~/model", "owner/na me"])
def test_a_name_that_is_nothing_lists_the_presets(monkeypatch, name):
    calls = hub(monkeypatch)
    refusal(name, "neither a folder, a hub id", *PRESETS)
    assert not calls


# name -> total parameters in millions of the published checkpoint (tied heads once), and of the student at the preset's width
SIZES = {"smollm2-135m": (134.5, None), "llama3.2-3b": (3212.7, 1606), "llama3.1-8b": (8030.3, None),
         "qwen2.5-3b": (3085.9, 1808), "qwen2.5-7b": (7615.6, 4352), "tiny": (None, None)}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_sizes(name):
    preset = PRESETS[name]
    config = Config.from_hf(preset["config"] or read_json(HERE / name / "config.json"))
    with torch.device("meta"):
        teacher, student = (sum(p.numel() for p in Transformer(c).parameters()) / 1e6 for c in (config, config.at_width(preset["width"])))
    assert student < teacher
    for count, published, digit in zip((teacher, student), SIZES[name], (0.06, 0.5)):
        assert published is None or abs(count - published) <= digit
