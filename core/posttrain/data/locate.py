"""What `data` names: files, a hub dataset, a function or an object, as tables by split.

A path ends in .jsonl, .ndjson, .json, .parquet, .csv or .tsv, is a folder, or is a glob of such. `module:name` and
`file.py:name` name a function that returns a dataset, or the dataset itself. Any other text is a hub name.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.data.records import Csv, JsonLines, Tsv, decode, parse_line, refuse_other_encodings
from posttrain.data.tables import Joined, Listed, Table
from posttrain.errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
SPLIT_WORDS = {
    "train": "train", "training": "train", "test": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}
_REFERENCE = re.compile(r"^(?P<module>[\w./~\\-]+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)$")
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def is_path(text: str) -> bool:
    """Whether a text names files rather than a hub dataset or a function."""
    if _REFERENCE.match(text) or text.startswith("object:"):
        return False
    looks = text.endswith(SUFFIXES) or text.startswith((".", "/", "~")) or bool(set(text) & set("*?["))
    return looks or Path(text).expanduser().exists() or not _HUB_NAME.match(text)


def files_by_split(text: str) -> dict[str, list[Path]]:
    """The files of a path, folder or glob, in sorted order, by the split that their names tell. Raises DataError."""
    path = Path(text).expanduser()
    if set(text) & set("*?["):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        root = Path(os.path.commonpath([f.parent for f in found])) if found else path
    elif path.is_dir():
        found = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file() and not _hidden(f.relative_to(path)))
        root = path
    elif path.is_file():
        return {"train": [path]}
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


def read_files(files: Sequence[Path], root: Path | None = None) -> Table:
    """One table of files of one kind."""
    if files[0].suffix == ".parquet":
        return _parquet(files)
    tables = [read_file(file) for file in files]
    if len(tables) == 1:
        return tables[0]
    root = root or Path(os.path.commonpath([f.parent for f in files]))
    return Joined(tables, [f.relative_to(root).as_posix() for f in files])


def read_file(path: Path) -> Table:
    """The table of one text file. Raises DataError when it is empty or no data file."""
    kinds: dict[str, Any] = {".jsonl": JsonLines, ".ndjson": JsonLines, ".json": _json, ".csv": Csv, ".tsv": Tsv}
    if path.suffix not in kinds:
        raise DataError(
            f"{path} is no data file that can be read", cause=f"its name ends in {path.suffix or 'nothing'}",
            fix=f"write it as one of {', '.join(SUFFIXES)}", code="unknown-file",
        )
    table: Table = kinds[path.suffix](path)
    if len(table) == 0:
        raise DataError(f"{path} is empty", cause="it holds no row", fix="write rows into it, one JSON object per line"
                        if path.suffix in (".jsonl", ".ndjson") else "write rows into it", code="empty-dataset")
    return table


def _json(path: Path) -> Table:
    """A JSON document: a list of objects, an object with one such list in it, or JSON Lines under another name."""
    raw = path.read_bytes()
    refuse_other_encodings(str(path), raw[:4])
    if raw.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
        try:
            parse_line(raw.split(b"\n", 1)[0].removeprefix(b"\xef\xbb\xbf"), str(path), 1)
            return JsonLines(path)
        except DataError:
            pass
    text = decode(raw.removeprefix(b"\xef\xbb\xbf"), str(path), 1) if raw.strip() else "[]"
    try:
        document = json.loads(text)
    except json.JSONDecodeError as exc:
        raise DataError(f"{path}:{exc.lineno} is not JSON", cause=f"{exc.msg}, column {exc.colno}", fix="correct the file",
                        code="broken-line") from exc
    lists = [v for v in document.values() if isinstance(v, list)] if isinstance(document, dict) else [document]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise DataError(f"{path} holds no list of rows", cause=f"it holds a {type(document).__name__}",
                        fix='write [{"question": "…"}, …], or one object per line in a .jsonl file', code="not-an-object")
    return Listed(lists[0], str(path))


def _parquet(files: Sequence[Path]) -> Table:
    import datasets

    name = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    try:
        return Listed(datasets.Dataset.from_parquet([str(f) for f in files]), name)
    except Exception as exc:
        raise DataError(f"{name} cannot be read as Parquet", cause=_innermost(exc), fix="write the file again",
                        code="unreadable-file") from exc


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


def _innermost(exc: BaseException) -> str:
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"


