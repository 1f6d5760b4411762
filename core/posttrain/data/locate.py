"""What a text names: files, a function, or a dataset of the hub, as tables by split.

    find_tables("my.jsonl")              # {"train": JsonLines}
    find_tables("data/")                 # {"train": …, "test": …} by the names of the files
    find_tables("openai/gsm8k", "main")

A path ends in .jsonl, .ndjson, .json, .parquet, .csv or .tsv, is a folder, or is a glob. `package.module:name` and `file.py:name`
name a function that returns a dataset, or the dataset itself. Any other text is a hub name.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.data.records import BOM, Csv, JsonLines, Tsv, decode, parse_json, read_csv, read_lines, refuse_other_encodings
from posttrain.data.tables import Joined, Listed, Stream, StreamRow, Table
from posttrain.errors import DataError
from posttrain.plugins.functions import absolute

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
SPLIT_WORDS = {
    "train": "train", "training": "train", "test": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}
_REFERENCE = re.compile(r"^(?P<module>[\w./~\\-]+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)$")
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_GLOB = set("*?[")
OPEN_FILES = 64
"""A folder of more files is read with each file open only while a row is read."""


def find_tables(
    text: str, config: str | None = None, split: str = "train", *, streaming: bool = False, where: str = "options.data"
) -> dict[str, Table | Stream]:
    """The tables that a text names, by split; streams when `streaming`. Files are checked as far as their kind allows.

    config, split: of a hub dataset. where: the option to name in errors. Raises DataError.
    """
    if _REFERENCE.match(text) or text.startswith("object:"):
        from posttrain.data.objects import call, tables_of

        return tables_of(call(text, {}, where), f"the data of {shown(text)}")
    if _looks_like_path(text):
        saved = Path(shown(text)).expanduser()
        if (saved / "state.json").is_file() or (saved / "dataset_dict.json").is_file():
            from posttrain.data.hub_data import load_saved
            from posttrain.data.objects import tables_of

            return tables_of(load_saved(saved), shown(text))
        read = stream_files if streaming else read_files
        return {name: read(files) for name, files in files_by_split(text).items()}
    from posttrain.data.hub_data import load_hub

    return load_hub(text, config, split, streaming=streaming)


def shown(text: str) -> str:
    """What a text names, as one would type it here: a path in the current folder without that folder."""
    here = Path.cwd()
    return str(Path(text).relative_to(here)) if Path(text).is_relative_to(here) and Path(text) != here else text


def absolute_data(text: str) -> str:
    """What a text names, the same in every directory: paths made absolute, names of modules and of a hub as they are."""
    if text.startswith("object:") or not (_REFERENCE.match(text) or _looks_like_path(text)):
        return text
    return absolute(text) if _REFERENCE.match(text) else os.path.abspath(os.path.expanduser(text))


def _looks_like_path(text: str) -> bool:
    """Whether a text names files rather than a hub dataset."""
    looks = text.endswith(SUFFIXES) or text.startswith((".", "/", "~")) or bool(set(text) & _GLOB)
    path = Path(text).expanduser()
    mistyped = path.suffix[1:].isalpha() and path.parent.is_dir()  # my.jsnl, in a folder that is here
    return looks or mistyped or path.exists() or not _HUB_NAME.match(text)


def files_by_split(text: str) -> dict[str, list[Path]]:
    """The files of a path, folder or glob, in sorted order, by the split that their names tell. Raises DataError."""
    text = shown(text)
    path = Path(text).expanduser()
    if set(text) & _GLOB and not path.exists():
        found = sorted(Path(name) for name in glob.glob(_pattern(path), recursive=True) if Path(name).is_file())
        root = Path(os.path.commonpath([f.parent for f in found])) if found else path
    elif path.is_dir():
        found = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file() and not _hidden(f.relative_to(path)))
        root = path
    elif path.is_file():
        return {"train": [path]}
    elif path.exists():
        raise DataError(f"{text} is no regular file", cause="it is a device, a pipe or a socket, which is read but once",
                        fix="write the rows into a file, or name a generator: module:function", code="unreadable-file")
    else:
        raise _absent(text, path)
    if not found:
        what = "folder" if path.is_dir() else "glob"
        raise DataError(
            f"the {what} {text} holds no data file", cause=f"looked for {', '.join(SUFFIXES)}",
            fix="name a file, or a glob such as 'data/*.jsonl'", code="no-data-files",
        )
    _one_kind(text, found)
    return _split_by_name(text, root, found)


def _pattern(path: Path) -> str:
    """The glob of a path, with the folders that are there taken as they are written: `runs[1]/*.jsonl`."""
    folder = next((p for p in path.parents if p.exists()), Path())
    return os.path.join(glob.escape(str(folder)), path.relative_to(folder))


def read_files(files: Sequence[Path]) -> Table:
    """One table of files of one kind; the rows of several files are named by file and line."""
    if files[0].suffix == ".parquet":
        from posttrain.data.hub_data import parquet

        return parquet(list(files), _title(files))
    tables = [read_file(file, keep_open=len(files) <= OPEN_FILES) for file in files]
    return tables[0] if len(tables) == 1 else Joined(tables, _labels(files))


def stream_files(files: Sequence[Path]) -> Stream:
    """The rows of files of one kind, read from the start, with the names that `read_files` gives them."""
    suffix, labels = files[0].suffix, [f"{label}:" for label in _labels(files)] if len(files) > 1 else [""]
    if suffix == ".parquet":
        from posttrain.data.hub_data import parquet_stream

        return parquet_stream(list(files), _title(files))

    real = [file.absolute() for file in files]  # opened later, when the current folder may be another

    def rows() -> Iterator[StreamRow]:
        for file, path, label in zip(real, map(str, files), labels, strict=True):
            with open(file, "rb") as opened:
                refuse_other_encodings(path, opened.read(4))
                opened.seek(0)
                if suffix in (".jsonl", ".ndjson"):
                    yield from ((row, f"{label}{line}", f"{path}:{line}") for line, row in read_lines(path, opened))
                elif suffix in (".csv", ".tsv"):
                    found = read_csv(path, Csv.delimiter if suffix == ".csv" else Tsv.delimiter, opened)
                    yield from ((row, f"{label}{line}", f"{path}:{line}") for _, line, row in found)
                else:
                    table = read_file(file)
                    yield from ((row, f"{label}{table.name(i)}", f"{path}, row {i + 1}") for i, row in enumerate(table))

    return Stream(rows(), _title(files))


def read_file(path: Path, *, keep_open: bool = True) -> Table:
    """The table of one text file. Raises DataError when it is empty or no data file."""
    kinds: dict[str, Any] = {".jsonl": JsonLines, ".ndjson": JsonLines, ".json": _json, ".csv": Csv, ".tsv": Tsv}
    if path.suffix not in kinds:
        raise DataError(
            f"{path} is no data file that can be read", cause=f"its name ends in {path.suffix or 'nothing'}",
            fix=f"write it as one of {', '.join(SUFFIXES)}", code="unknown-file",
        )
    table: Table = kinds[path.suffix](path, keep_open=keep_open)
    if len(table) == 0:
        raise DataError(f"{path} is empty", cause="it holds no row", fix="write rows into it, one JSON object per line"
                        if path.suffix in (".jsonl", ".ndjson") else "write rows into it", code="empty-dataset")
    return table


def _json(path: Path, *, keep_open: bool) -> Table:
    """A JSON document: a list of objects, an object with one such list in it, or JSON Lines under another name."""
    raw = path.read_bytes()
    refuse_other_encodings(str(path), raw[:4])
    lines = [decode(line, str(path), number) for number, line in enumerate(raw.removeprefix(BOM).split(b"\n"), 1)]
    try:
        document = parse_json("\n".join(lines), str(path), 1) if raw.strip() else []
    except DataError as exc:
        more = isinstance(exc.__cause__, json.JSONDecodeError) and exc.__cause__.msg == "Extra data"
        if more and raw.removeprefix(BOM).lstrip()[:1] == b"{":
            return JsonLines(path, keep_open=keep_open)
        raise
    values = document.values() if isinstance(document, dict) else []
    lists = [v for v in values if isinstance(v, list) and all(isinstance(row, dict) for row in v)]
    lists = [document] if isinstance(document, list) else lists
    if len(lists) != 1:
        raise DataError(
            f"{path} holds no list of rows", cause=f"it holds a {type(document).__name__}",
            fix='write [{"question": "…"}, …], or one object per line in a .jsonl file', code="not-an-object",
        )
    return Listed(lists[0], str(path))


def _title(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{os.path.commonpath([f.parent for f in files])} ({len(files)} files)"


def _labels(files: Sequence[Path]) -> list[str]:
    """What tells the files apart: their paths from the folder that they share."""
    root = os.path.commonpath([f.parent for f in files])
    return [f.relative_to(root).as_posix() for f in files]


def _split_by_name(text: str, root: Path, found: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by the word in their name or folder that names a split; all others train. Raises DataError when that is unclear."""
    splits: dict[str, list[Path]] = {}
    for file in found:
        words = re.split(r"[^a-z]+", file.relative_to(root).as_posix().lower())
        named = next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), "")
        splits.setdefault(named, []).append(file)
    rest = splits.pop("", [])
    if rest and "train" in splits:
        raise DataError(
            f"{text} holds files of the split train and others without a split, such as {rest[0].name}",
            fix=f"name those that train: options.data='{root}/train*{rest[0].suffix}'", code="mixed-files",
        )
    return {"train": rest, **splits} if rest else splits


def _one_kind(text: str, found: Sequence[Path]) -> None:
    kinds = {file.suffix: file for file in reversed(found)}
    if len(kinds) > 1 or not set(kinds) <= set(SUFFIXES):
        raise DataError(
            f"{text} holds files of several kinds: {', '.join(sorted(file.name for file in kinds.values()))}",
            fix=f"name one kind with a glob, such as '*{sorted(kinds)[0]}'", code="mixed-files",
        )


def _absent(text: str, path: Path) -> DataError:
    folder = next((p for p in path.parents if p.is_dir()), Path("."))
    names = sorted(f.name for f in folder.iterdir()) if folder == path.parent else []
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return DataError(
        f"there is no file {text}",
        cause=f"looked in {folder.absolute()}" if folder == path.parent else f"there is no folder {path.parent}",
        fix=f"did you mean {', '.join(str(path.parent / n) for n in near)}?" if near else "correct options.data",
        code="no-such-file",
    )


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)

