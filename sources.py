"""Sources: where documents come from, and how a source is cut so that every core can read its own part.

    stdlib                                     the standard library of this Python
    notes.txt, book.md, code.py, rows.jsonl    a file; a .jsonl or .parquet row holds a text, or a chat ("messages" or "conversations")
    FOLDER                                     such files, and .parquet
    hub:OWNER/NAME[@REVISION][:FOLDER]         the .parquet or .jsonl files of a data set on the hub, read over the network, never stored

A part is a byte range of a file. What begins in it belongs to it: a line, a piece of a .txt, a row group of a .parquet, a whole .py or .md.
So parts can be read in any order, by anyone, and together they are the file, each document once.
"""
from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from teachers import Refusal

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
PIECE = 4096                  # bytes of a .txt after which the next blank line ends a document
BLOCK = 1 << 20               # parts begin at multiples of it
PART = (4 << 20, 128 << 20)   # smallest and largest part, bytes; between them a source is cut in 512
CHAT_COLUMNS = ("messages", "conversations")


class Part(NamedTuple):
    name: str      # relative to the source
    path: str      # a local path, or hub://datasets/OWNER/NAME@COMMIT/FILE
    begin: int
    end: int


class Row(NamedTuple):
    part: Part
    place: int     # byte of a line or piece; number of a .parquet row
    name: str      # what the side (training or held out) of the document hangs on
    fields: dict   # "text", or one of CHAT_COLUMNS; and "score" where there is one

    def where(self) -> str:
        return where(self.part, self.place)


def where(part: Part, place: int) -> str:
    """A place in words, for an error: lines are counted only here, since a part does not know how many came before it."""
    if part.path.endswith(".parquet"):
        return f"{part.path}, row {place + 1}"
    line = 1
    with open_binary(part.path) as file:
        while place > 0 and (block := file.read(min(place, 1 << 20))):
            line, place = line + block.count(b"\n"), place - len(block)
    return f"{part.path}, line {line}"


# ---------------------------------------------------------------------------------------------- files


def source_files(source: str) -> list[tuple[str, str, int, int]]:
    """(name, path, bytes, time of change) of every file of a source, sorted by name. Raises Refusal where there is none."""
    if source.startswith("hub:"):
        return hub_files(source)
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        found = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    else:
        root = Path(source)
        if not root.exists():
            raise Refusal(f"data {source!r}: no such file or folder, and neither `stdlib` nor hub:OWNER/NAME")
        found = [root] if root.is_file() else [p for p in root.rglob("*") if p.is_file()]
        found = [p for p in found if p.suffix in SUFFIXES]
        root = root.parent if root.is_file() else root
    if not found:
        raise Refusal(f"data {source!r}: no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file in it")
    return sorted((p.relative_to(root).as_posix(), str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in found)


def hub_files(source: str) -> list[tuple[str, str, int, int]]:
    """The data files of hub:OWNER/NAME[@REVISION][:FOLDER] at one exact commit. A set in another format is read from the .parquet copy
    that the hub makes of it."""
    from huggingface_hub import HfApi
    match = re.fullmatch(r"hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::([\w./-]+))?", source)
    if not match:
        raise Refusal(f"data {source!r}: a hub set is written hub:OWNER/NAME, hub:OWNER/NAME@REVISION or hub:OWNER/NAME:FOLDER")
    repo, revision, folder = match.groups()
    under = f"{folder.strip('/')}/" if folder else ""
    for branch in (revision, *(() if revision else ("refs/convert/parquet",))):
        try:
            info = HfApi().dataset_info(repo, revision=branch, timeout=30, files_metadata=True)
        except Exception as error:  # gated, missing, offline, refused: the libraries raise many unrelated classes
            raise Refusal(f"{source}: the hub cannot give it ({type(error).__name__}): check the name at https://huggingface.co/datasets/{repo}, the "
                          "network and, for a gated set, `hf auth login`; or fetch the files on a machine that can and give their folder") from None
        files = [(f.rfilename, f"hub://datasets/{repo}@{info.sha}/{f.rfilename}", f.size or 0, 0) for f in info.siblings
                 if f.rfilename.startswith(under) and f.rfilename.endswith((".parquet", ".jsonl"))]
        if files:
            return sorted(files)
    raise Refusal(f"{source}: no .parquet or .jsonl file in it; see https://huggingface.co/datasets/{repo}/tree/main")


def open_binary(path: str) -> BinaryIO:
    if not path.startswith("hub://"):
        return open(path, "rb")
    from huggingface_hub import HfFileSystem
    return HfFileSystem().open(path.removeprefix("hub://"), "rb")


def cut(files: list[tuple[str, str, int, int]]) -> list[list[Part]]:
    """Files -> units of work, each one part of a large file or several small files. The cut follows from the sizes alone."""
    size = min(max(sum(length for _, _, length, _ in files) // 512 // BLOCK * BLOCK, PART[0]), PART[1])
    units: list[list[Part]] = []
    room = 0  # left in the last unit
    for name, path, length, _ in files:
        step = length if path.endswith((".py", ".md")) else size  # these are one document
        for begin in range(0, max(length, 1), max(step, 1)):
            part = Part(name, path, begin, min(begin + step, length) if length else 1)
            if part.end - part.begin > room:
                units.append([])
                room = size
            units[-1].append(part)
            room -= part.end - part.begin
    return units


# ------------------------------------------------------------------------------------------ documents


def read(part: Part, column: str = "text", skip_bad: bool = False) -> Iterator[Row | None]:
    """The documents that begin in `part`. A row that cannot be read raises Refusal with its line, or with `skip_bad` is a None."""
    with open_binary(part.path) as file:
        if part.path.endswith((".jsonl", ".parquet")):
            for place, fields in (parquet_rows if part.path.endswith(".parquet") else json_rows)(part, file, column):
                try:
                    yield row_of(part, place, fields, column)
                except Refusal:
                    if not skip_bad:
                        raise
                    yield None
        elif part.path.endswith(".txt"):
            for place, text in pieces(file, part):
                yield Row(part, place, text, {"text": text})
        else:
            yield Row(part, 0, part.name, {"text": text_of(file.read())})


def lines_from(file: BinaryIO, begin: int) -> Iterator[tuple[int, bytes]]:
    """(place, line) of each line that begins at byte `begin` or later."""
    file.seek(max(begin - 1, 0))
    place = max(begin - 1, 0)
    if begin:
        place += len(file.readline())  # the end of a line that began before; a lone line break where none did
    while line := file.readline():
        yield place, line
        place += len(line)


def pieces(file: BinaryIO, part: Part) -> Iterator[tuple[int, str]]:
    """A text file ends a document at the first blank line beyond PIECE bytes, and at each BLOCK, where parts may begin."""
    held, start, size = [], part.begin, 0
    for place, line in lines_from(file, part.begin):
        if place >= part.end:
            break
        if held and place // BLOCK > start // BLOCK:
            yield start, text_of(b"".join(held))
            held = []
        if not held:
            start, size = place, 0
        held.append(line)
        size += len(line)
        if size > PIECE and not line.strip():
            yield start, text_of(b"".join(held))
            held = []
    if held:
        yield start, text_of(b"".join(held))


def text_of(raw: bytes) -> str:
    """UTF-8 with line breaks as Python reads them; what is not UTF-8 becomes U+FFFD."""
    return raw.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def json_rows(part: Part, file: BinaryIO, column: str) -> Iterator[tuple[int, object]]:
    for place, line in lines_from(file, part.begin):
        if place >= part.end:
            break
        if line.strip():
            try:
                yield place, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield place, error


def row_of(part: Part, place: int, fields: object, column: str) -> Row:
    """The document in a row of a table. Its side hangs on its id or title, else on itself, so that a copy falls on the same side."""
    if not isinstance(fields, dict):
        reason = f"not JSON ({fields})" if isinstance(fields, Exception) else f"a JSON {type(fields).__name__}, not an object"
        raise Refusal(f"{where(part, place)}: {reason}; mend or drop the line, or --skip-bad")
    kind = next((c for c in (column, *CHAT_COLUMNS) if fields.get(c) is not None), None)
    if kind is None or not isinstance(fields[kind], str if kind == column else list):
        raise Refusal(f'{where(part, place)}: no "{column}" that is text and no {" or ".join(CHAT_COLUMNS)} that is a list, but {sorted(fields)}; '
                      "name the column with --column, mend or drop the line, or --skip-bad")
    name = next((fields[key] for key in ("id", "title") if fields.get(key) not in (None, "")), fields[kind])
    kept = {"text" if kind == column else "messages": fields[kind]} | {k: fields[k] for k in ("score",) if fields.get(k) is not None}
    return Row(part, place, name if isinstance(name, str) else json.dumps(name), kept)


def parquet_rows(part: Part, file: BinaryIO, column: str) -> Iterator[tuple[int, dict]]:
    """The rows of the row groups whose first byte lies in the part, some at a time; only the columns that matter are read."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile
    try:
        table = ParquetFile(file)
        wanted = [c for c in (column, *CHAT_COLUMNS, "id", "title", "score") if c in table.schema_arrow.names]
        place = 0
        for g in range(table.metadata.num_row_groups):
            group = table.metadata.row_group(g)
            first = group.column(0)
            begin = min(o for o in (first.dictionary_page_offset, first.data_page_offset) if o)
            if part.begin <= begin < part.end:
                for batch in table.iter_batches(batch_size=256, row_groups=[g], columns=wanted):
                    yield from enumerate(batch.to_pylist(), place)
                    place += len(batch)
            else:
                place += group.num_rows
    except ArrowException as error:
        raise Refusal(f"{part.path}: cannot be read as .parquet ({error}); fetch the file again") from None
