"""What holds for every source file: text is UTF-8, devices are chosen in one place, imports go one way, scripts have a guard."""
import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(ROOT.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_B39_every_text_file_is_opened_as_utf8(path):
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) in ("open", "read_text", "write_text"):
            source = ast.unparse(call)
            binary = re.search(r"""['"][rwa]b['"]""", source) or ".lock" in source or source.startswith("os.open(")  # neither the lock file nor a descriptor holds text
            assert binary or "encoding='utf-8'" in source, f"{path.name}:{call.lineno}: {source}"


def test_B40_cuda_is_named_where_the_device_is_chosen_and_nowhere_else():
    assert {p.name for p in FILES if re.search(r"""["']cuda|\.cuda\(|torch\.cuda""", p.read_text(encoding="utf-8"))} == {"context.py"}


def test_no_pickle_is_ever_read_or_written():
    for path in FILES:
        assert not re.search(r"torch\.(load|save)\(|import pickle|allow_pickle", path.read_text(encoding="utf-8")), path.name


def test_the_network_knows_no_clone_and_merge_knows_no_loop():
    """Every file's own imports, followed to the end."""
    def direct(name):
        tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names} | {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        return {m for m in names if (ROOT / f"{m}.py").exists()}
    imports = {path.stem: direct(path.stem) for path in FILES}

    def reach(name):
        found, new = set(), imports[name]
        while new:
            found |= new
            new = set().union(*(imports[m] for m in new)) - found
        return found
    assert reach("model") == {"config", "files", "teachers"}
    assert reach("core") == {"config", "files", "lrc", "model", "teachers"}
    assert not reach("merge") & {"train", "distill", "data"}
    assert reach("prepare") == {"chat", "files", "shards", "sources", "tokenizer"}
    assert not (reach("audit") | reach("eval")) & {"train", "reproduce"}
    assert all(name not in reach(name) for name in (p.stem for p in FILES))  # no cycles


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_line_fits_a_screen(path):
    assert [f"{path.name}:{n}" for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if len(line) > 140] == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_file_says_what_it_is_and_reads_no_private_name_of_another(path):
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    names = "|".join(file.stem for file in FILES)
    assert not re.search(rf"\b({names})\._[a-z]", text)
