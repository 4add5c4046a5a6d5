"""Sources: where documents come from, and how a source is cut so that every core can read its own part.

    stdlib                                     the standard library of this Python
    notes.txt, book.md, code.py, rows.jsonl    a file; a .jsonl or .parquet row holds a text, or a chat ("messages" or "conversations")
    FOLDER                                     a folder of such files
    hub:OWNER/NAME[@REVISION][:FOLDER]         the .parquet or .jsonl files of a data set on the hub, read over the network, never stored

What is no text is no document: bytes that are not UTF-8, or a byte 0, make a Bad in place of a Row. Files of other kinds are left out, and
told; hidden ones too, without a word.

A part is a byte range of a file. What begins in it belongs to it: a line, a piece of a .txt, a row group of a .parquet, a whole .py or .md.
So parts can be read in any order, by anyone, and together they are the file, each document once.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple

from files import Refusal, one_line

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
PIECE = 4096                  # bytes of a .txt after which the next blank line ends a document
BLOCK = 1 << 20               # parts begin at multiples of it
PART = (4 << 20, 128 << 20)   # smallest and largest part, bytes; between them a source is cut in 512
LINE = 64 << 20               # longest line, bytes: beyond it a file is no text, and would be held in memory
TABLES = (".jsonl", ".parquet")
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
    fields: dict   # "text", or "messages"; and "score" where there is one


class Bad(NamedTuple):
    """A row that is no document."""
    part: Part
    place: int
    reason: str


def where(part: Part, place: int) -> str:
    """A place in words, for an error: lines are counted only here, since a part does not know how many came before it."""
    if part.path.lower().endswith(".parquet"):
        return f"{part.path}, row {place + 1}"
    line = 1
    with open_binary(part.path) as file:
        while place > 0 and (block := file.read(min(place, 1 << 20))):
            line, place = line + block.count(b"\n"), place - len(block)
    return f"{part.path}, line {line}"


# ---------------------------------------------------------------------------------------------- files


def source_files(source: str, kinds: tuple[str, ...] = SUFFIXES, tell: bool = False) -> list[tuple[str, str, int, int]]:
    """(name, path, bytes, time of change) of every file of a source of these kinds, sorted by name; with `tell` a line for what is left
    out. Raises Refusal where there is none."""
    if not source:
        raise Refusal("data '': name a file, a folder, `stdlib` or hub:OWNER/NAME")
    if source.startswith("hub:"):
        return hub_files(source, tell)
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        found, others = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts) and ".py" in kinds], ""
    else:
        root = Path(source)
        if not root.exists():
            raise Refusal(f"data {source!r}: no such file or folder, and neither `stdlib` nor hub:OWNER/NAME")
        every, links = ([root], 0) if root.is_file() else files_under(root)
        found = [*{p.resolve(): p for p in reversed(every) if p.suffix.lower() in kinds}.values()]  # a file and a link to it are one
        root = root.parent if root.is_file() else root
        others = counted((p.relative_to(root).as_posix() for p in every if p.suffix.lower() not in kinds), links)
    if not found:
        instead = f", but {others}; unpack or convert what is text" if others else ""
        raise Refusal(f"data {source!r}: no {', '.join(kinds[:-1])} or {kinds[-1]} file in it{instead}")
    if tell and others:
        print(f"data {source!r}: left out {others}; read are {', '.join(kinds)}", file=sys.stderr)
    return sorted((p.relative_to(root).as_posix(), str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in found)


def files_under(root: Path) -> tuple[list[Path], int]:
    """The files of a folder and of those within it, sorted, and how many links lead to a folder or nowhere: none of them is followed. What
    is hidden (.git, .venv, a copy of an editor's) is no source; a folder that cannot be listed is refused."""
    def unreadable(error):
        raise Refusal(f"{error.filename}: cannot be read ({error.strerror}); mend or leave out this folder")
    found, links = [], 0
    for folder, inner, names in os.walk(root, onerror=unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        paths = [Path(folder, name) for name in (*inner, *names) if not name.startswith(".")]
        found += (p for p in paths if p.is_file())
        links += sum(p.is_symlink() and not p.is_file() for p in paths)
    return sorted(found), links


def counted(names: Iterable[str], links: int = 0) -> str:
    """Files by kind, for a line about those that are not read: "3 .gz, 1 .csv, 1 link to a folder or nowhere". Hidden ones need no word."""
    seen = [path for path in map(PurePath, names) if not any(part.startswith(".") for part in path.parts)]
    kinds = Counter(path.suffix.lower() or "without a suffix" for path in seen)
    told = [f"{count:,} {kind}" for kind, count in kinds.most_common(8)]
    if links:
        told.append(f"{links:,} link{'s' * (links > 1)} to a folder or nowhere")
    return ", ".join(told)


def hub_files(source: str, tell: bool = False) -> list[tuple[str, str, int, int]]:
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
            raise Refusal(f"{source}: the hub cannot give it ({type(error).__name__}): check the name at "
                          f"https://huggingface.co/datasets/{repo}, the network and, for a gated set, `hf auth login`; "
                          "or fetch the files on a machine that can and give their folder") from None
        inside = [f for f in info.siblings if f.rfilename.startswith(under)]
        files = [(f.rfilename, f"hub://datasets/{repo}@{info.sha}/{f.rfilename}", f.size or 0, 0) for f in inside
                 if f.rfilename.lower().endswith(TABLES)]
        if files:
            others = counted(f.rfilename for f in inside if not f.rfilename.lower().endswith((*TABLES, "readme.md")))
            if tell and others:
                print(f"{source}: left out {others}; read are {', '.join(TABLES)}", file=sys.stderr)
            return sorted(files)
    raise Refusal(f"{source}: no .parquet or .jsonl file in it; see https://huggingface.co/datasets/{repo}/tree/main")


@contextlib.contextmanager
def open_binary(path: str) -> Iterator[BinaryIO]:
    """The file, local or on the hub; whatever goes wrong in reading is an OSError that names it and says what to do."""
    if not path.startswith("hub://"):
        try:
            with open(path, "rb") as file:
                yield file
        except OSError as error:
            raise OSError(f"{path}: cannot be read ({error.strerror or error}); mend or leave out this file") from None
        return
    from huggingface_hub import HfFileSystem
    try:
        with HfFileSystem().open(path.removeprefix("hub://"), "rb") as file:
            yield file
    except Refusal:
        raise
    except Exception as error:
        raise OSError(f"{path}: reading stopped ({type(error).__name__}: {one_line(error)}); the same command goes on from there") from None


def units_of(files: list[tuple[str, str, int, int]]) -> list[list[Part]]:
    """Files -> units of work, each one part of a large file or several small files. What a unit holds follows from the sizes alone."""
    size = min(max(sum(length for _, _, length, _ in files) // 512 // BLOCK * BLOCK, PART[0]), PART[1])
    units: list[list[Part]] = []
    room = 0  # left in the last unit
    for name, path, length, _ in files:
        step = length if path.lower().endswith((".py", ".md")) else size  # these are one document
        for begin in range(0, max(length, 1), max(step, 1)):
            part = Part(name, path, begin, min(begin + step, length) if length else 1)
            if part.end - part.begin > room:
                units.append([])
                room = size
            units[-1].append(part)
            room -= part.end - part.begin
    return units


# ------------------------------------------------------------------------------------------ documents


def read(part: Part, columns: tuple[str, ...] = ("text", *CHAT_COLUMNS)) -> Iterator[Row | Bad]:
    """The documents that begin in `part`; of a row of a table the first of `columns` that it has. Raises Refusal where the file
    is broken."""
    with open_binary(part.path) as file:
        if part.path.lower().endswith(TABLES):
            for place, fields in parquet_rows(part, file, columns) if part.path.lower().endswith(".parquet") else json_rows(part, file):
                yield row_of(part, place, fields, columns)
        elif part.path.lower().endswith(".txt"):
            for place, raw in pieces(file, part):
                yield document_of(part, place, raw)
        else:
            yield document_of(part, 0, file.read(), part.name)


def lines_from(part: Part, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(place, line) of each line that begins in the part."""
    place = max(part.begin - 1, 0)
    file.seek(place)
    skip = part.begin > 0  # the end of a line that began before; a lone line break where none did
    while place < part.end and (line := file.readline(LINE + 1)):
        if len(line) > LINE:
            raise Refusal(f"{part.path}: a line of more than {LINE >> 20} MiB, at byte {place}; is this text?")
        if not skip:
            yield place, line
        place, skip = place + len(line), False


def pieces(file: BinaryIO, part: Part) -> Iterator[tuple[int, bytes]]:
    """A text file ends a document at the first blank line beyond PIECE bytes, and at each BLOCK, where parts may begin."""
    held, start, size = [], part.begin, 0
    for place, line in lines_from(part, file):
        if held and place // BLOCK > start // BLOCK:
            yield start, b"".join(held)
            held = []
        if not held:
            start, size = place, 0
        held.append(line)
        size += len(line)
        if size > PIECE and not line.strip():
            yield start, b"".join(held)
            held = []
    if held:
        yield start, b"".join(held)


def document_of(part: Part, place: int, raw: bytes, name: str | None = None) -> Row | Bad:
    """UTF-8 text with line breaks as Python reads them; its side hangs on its name, else on itself."""
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        return Bad(part, place, f"not UTF-8 text (a byte {raw[error.start]:#04x})")
    if "\0" in text:
        return Bad(part, place, "not text (a byte 0)")
    return Row(part, place, name or text, {"text": text})


def json_rows(part: Part, file: BinaryIO) -> Iterator[tuple[int, object]]:
    for place, line in lines_from(part, file):
        if line.strip():
            try:
                yield place, json.loads(line.decode("utf-8-sig"))  # of bytes json would take half a character too
            except (ValueError, RecursionError) as error:
                yield place, error


def parquet_rows(part: Part, file: BinaryIO, columns: tuple[str, ...]) -> Iterator[tuple[int, dict]]:
    """The rows of the row groups whose first byte lies in the part, some at a time; only the columns that matter are read."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile
    try:
        table = ParquetFile(file, page_checksum_verification=True)
        names = table.schema_arrow.names
        if not set(columns) & set(names):
            there = ", ".join(names) or "none at all"
            raise Refusal(f"{part.path}: no column {' or '.join(columns)}, but {there}; name the text's with --column")
        place, size = 0, file.seek(0, 2)
        groups = [table.metadata.row_group(g) for g in range(table.metadata.num_row_groups)]
        if sum(group.num_rows for group in groups) != table.metadata.num_rows:
            raise ValueError("its row groups are not all its rows")
        for g, group in enumerate(groups):
            first, begun = group.column(0), place
            begin = min((o for o in (first.dictionary_page_offset, first.data_page_offset) if o), default=0)
            if group.num_rows and not 0 < begin < size:
                raise ValueError(f"row group {g + 1} lies outside the file")  # in no part, so nobody would read it
            if part.begin <= begin < part.end:
                for batch in table.iter_batches(batch_size=256, row_groups=[g], use_threads=False,  # the workers have the cores
                                                columns=[n for n in names if n in (*columns, "id", "title", "score")]):
                    yield from enumerate(batch.to_pylist(), place)
                    place += len(batch)
                if place - begun != group.num_rows:
                    raise ValueError(f"row group {g + 1} holds {place - begun:,} rows, not {group.num_rows:,}")
            else:
                place += group.num_rows
    except Refusal:
        raise
    except (ArrowException, ArithmeticError, LookupError, OSError, ValueError) as error:
        # ArithmeticError and LookupError: dates and time zones that Python has not
        if part.path.startswith("hub://") and isinstance(error, OSError):
            raise  # the network's, not the file's
        raise Refusal(f"{part.path}: cannot be read as .parquet ({' '.join(str(error).split())}); fetch the file again") from None


def row_of(part: Part, place: int, fields: object, columns: tuple[str, ...]) -> Row | Bad:
    """The document in a row of a table. Its side hangs on its id or title, else on itself, so that a copy falls on the same side."""
    if isinstance(fields, Exception):
        return Bad(part, place, f"not JSON ({fields})")
    if not isinstance(fields, dict):
        return Bad(part, place, f"a JSON {type(fields).__name__}, not an object")
    kind = next((c for c in columns if fields.get(c) is not None), None)
    chat = kind in CHAT_COLUMNS
    if kind is None or not isinstance(fields[kind], list if chat else str):
        there = ", ".join(map(str, fields)) or "nothing"
        return Bad(part, place, f"no {' or '.join(columns)} that is a text or a list of messages, but {there} (--column names the text's)")
    name = next((fields[key] for key in ("id", "title") if fields.get(key) not in (None, "")), fields[kind])
    kept = {"messages" if chat else "text": fields[kind], "score": fields.get("score")}
    return Row(part, place, name if isinstance(name, str) else json.dumps(name, default=str), kept)
