"""Teachers: a preset name, a Hugging Face hub id or a local folder becomes a folder of files.

Nothing here knows about tensors. A preset carries the shape of the official Instruct checkpoint, so
that `train.py --plan` can account for a run with no weights and no network, and the published
student width and learning rate. `--preset paper` adds the rest of the published recipe, PAPER.
"""
from __future__ import annotations

import re
from pathlib import Path

from files import Refusal

HERE = Path(__file__).resolve().parent
TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]  # all that preparing data takes
WANTED = ["config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json", *TOKENIZER]


LLAMA3_ROPE = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LLAMA3 = dict(model_type="llama", torch_dtype="bfloat16", vocab_size=128256, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
              rope_theta=500000.0, max_position_embeddings=131072)
QWEN25 = dict(model_type="qwen2", torch_dtype="bfloat16", rms_norm_eps=1e-6, rope_theta=1000000.0, max_position_embeddings=32768,
              head_dim=128)

# name -> hub id (None: in this repository), student width, peak learning rate, the shape (None: read the folder). Tiny has no massive
# activations, so the published hidden-state MSE serves; but its whole stream is large, so lambda is smaller than the published 0.2
PRESETS = {
    "tiny": dict(hub=None, width=64, lr=1e-2, w_align=0.02, hidden="mse", config=None),
    "smollm2-135m": dict(hub="HuggingFaceTB/SmolLM2-135M-Instruct", width=288, lr=1e-4, config=dict(
        model_type="llama", torch_dtype="bfloat16", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, rms_norm_eps=1e-5, rope_theta=100000.0,
        max_position_embeddings=8192, tie_word_embeddings=True)),
    "llama3.2-3b": dict(hub="meta-llama/Llama-3.2-3B-Instruct", width=1536, lr=1e-4, config=dict(
        LLAMA3, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        tie_word_embeddings=True, rope_scaling=dict(LLAMA3_ROPE, factor=32.0))),
    "llama3.1-8b": dict(hub="meta-llama/Llama-3.1-8B-Instruct", width=1536, lr=1e-4, config=dict(
        LLAMA3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        tie_word_embeddings=False, rope_scaling=dict(LLAMA3_ROPE, factor=8.0))),
    "qwen2.5-3b": dict(hub="Qwen/Qwen2.5-3B-Instruct", width=1200, lr=6.7e-5, config=dict(
        QWEN25, vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2.5-7b": dict(hub="Qwen/Qwen2.5-7B-Instruct", width=2048, lr=1e-4, config=dict(
        QWEN25, vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False)),
}

# The published recipe, the same for each teacher; width and learning rate are the teacher's, above. Stage -> flags, then what is not a
# flag: tokens in all, and tokens a step. Sources agree on all but this: one says cosine for attention, one MSE (we keep cosine, see
# --attention); SFT's tokens a step are not stated (the same here); how often to evaluate and save is ours
PAPER = {
    "distill": dict(seq_len=2048, schedule="linear", warmup=0.005, weight_decay=0.0, clip=1.0, temperature=40.0,
                    w_kl=1.0, w_ce=1.0, w_align=0.2, hidden="mse", eval_every=1000, save_every=2000),
    "sft": dict(seq_len=2048, schedule="linear", warmup=0.005, weight_decay=0.0, clip=1.0, lr=1e-5, eval_every=1000, save_every=2000)}
PAPER_TOKENS = {"distill": 10.35e9, "sft": 0.62e9}
PAPER_STEP = 49152
PAPER_DATA = {
    "distill": ("10B tokens of FineWeb-Edu (score 4 or more) and 0.35B of OpenHermes", (
        "python data.py prepare hub:HuggingFaceFW/fineweb-edu:data --min-score 4 --tokenizer {teacher} --tokens 10e9 "
        "--out tokens/fineweb-edu",
        "python data.py prepare hub:teknium/OpenHermes-2.5 --skip-bad --tokenizer {teacher} --out tokens/openhermes",
        "--data tokens/fineweb-edu=10,tokens/openhermes=0.35")),
    "sft": ("0.62B tokens of 8 instruction sets that our sources do not name (LRC: UltraChat, 0.2B)", ("--data chats.jsonl",))}


def resolve(teacher: str, revision: str | None = None, files: list[str] = WANTED) -> tuple[Path, str]:
    """A preset, a local folder or a hub id -> (folder with the files, where they come from: 'id@commit' or the folder's name).

    Downloads only what is needed, with huggingface-hub's own progress bars. Raises Refusal in one line.
    """
    preset = PRESETS.get(teacher)
    if teacher == "tiny":
        return HERE / "tiny", "tiny (in this repository)"
    if preset is None and teacher and Path(teacher).is_dir():
        return Path(teacher), f"{Path(teacher).resolve().name} (local folder)"
    if preset is None and teacher and Path(teacher).exists():
        raise Refusal(f"teacher {teacher!r} is a file: give the folder that it lies in")
    repo = preset["hub"] if preset else teacher
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or repo[0] in "./":
        raise Refusal(f"teacher {teacher!r} is neither a folder, a hub id (owner/name) nor a preset: {', '.join(PRESETS)}")
    return download(repo, revision, files)


def download(repo: str, revision: str | None, files: list[str]) -> tuple[Path, str]:
    """Fetch `repo` at one exact commit. Without a network a complete cached copy serves."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    page = f"https://huggingface.co/{repo}"
    instead = f"or pass a local folder: --teacher FOLDER (there is none here called {repo})"
    try:  # one short call names what is wrong (and the commit) before any large file moves
        commit = HfApi().model_info(repo, revision=revision, timeout=8).sha
        return Path(snapshot_download(repo, revision=commit, allow_patterns=files)), f"{repo}@{commit}"
    except GatedRepoError:
        raise Refusal(f"{repo} is gated: accept its licence at {page}, log in with `hf auth login`, {instead}") from None
    except RevisionNotFoundError:
        raise Refusal(f"{repo} has no revision {revision!r}: see {page}/commits/main, {instead}") from None
    except RepositoryNotFoundError:
        raise Refusal(f"{repo}: no such model on the hub, or it is private and you are not logged in: check the name "
                      f"at {page}, log in with `hf auth login`, {instead}") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise Refusal(f"{repo}: the hub refused access (HTTP {status}): accept the licence at {page}, log in with "
                          f"`hf auth login`, {instead}") from None
        raise Refusal(f"{repo}: the hub answered HTTP {status}: try again later, {instead}") from None
    except Exception as error:  # connection, time-out, offline mode: the libraries raise many unrelated classes
        return cached(repo, revision, files, f"{repo}: the hub cannot be reached ({type(error).__name__}) and no complete copy "
                                             f"is cached: check the network, {instead}")


def cached(repo: str, revision: str | None, files: list[str], refusal: str) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=files, local_files_only=True))
    except Exception:
        folder = None
    needed = ("config.json", "*.safetensors") if "config.json" in files else ("tokenizer.json",)
    if folder is None or not all(any(folder.glob(pattern)) for pattern in needed):
        raise Refusal(refusal) from None
    return folder, f"{repo}@{folder.name}"
