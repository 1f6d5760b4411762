"""Text files of rows, read in place: JSON Lines and CSV with rows by index, line numbers, and no row in memory.

    rows = JsonLines("my.jsonl")
    rows[7]          # parsed now
    rows.where(7)    # "my.jsonl:8"

Opening a file finds where its records begin (16 bytes a row); a row is read and parsed when it is asked for, by whatever thread.
A record that cannot be read is a DataError with the file, the line and the fix.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.errors import DataError

CHUNK = 1 << 22
BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BLANK = np.frombuffer(b" \t\r\n", dtype=np.uint8)


class Records:
    """The records of one text file. `len`, `rows[i]`, `where(i)`, `name(i)`; picklable, reads are thread-safe.

    path: as the user wrote it, which is also how messages write it. Raises DataError when the file cannot be read.
    """

    starts: np.ndarray  # [n + 1] int64, byte at which a record begins; the last entry is the end of the file
    lines: np.ndarray | None  # [n] int64, 1-based line of a record; None: record i is line i + 1

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._file: int | None = None
        with _opening(self.path):
            self._file = os.open(Path(self.path).expanduser(), os.O_RDONLY)
            self._stamp = self._stat()
        refuse_other_encodings(self.path, os.pread(self._file, 4, 0))
        self.starts, self.lines = self._index()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.parse(self.raw(index), self.line(index))

    def line(self, index: int) -> int:
        return index + 1 if self.lines is None else int(self.lines[index])

    def where(self, index: int) -> str:
        return f"{self.path}:{self.line(index)}"

    def name(self, index: int) -> str:
        """The id of a row that brings none."""
        return str(self.line(index))

    def raw(self, index: int) -> bytes:
        """The bytes of a record. Raises DataError when the file is not the one that was opened."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.path}")
        if self._file is None:
            self._file = os.open(Path(self.path).expanduser(), os.O_RDONLY)
        if self._stat() != self._stamp:
            raise DataError(f"{self.path} has changed since it was opened", fix="start again; write new data to a new file")
        start, end = self.starts[index : index + 2]
        return os.pread(self._file, int(end - start), int(start))

    def parse(self, raw: bytes, line: int) -> dict[str, Any]:
        """The row that a record holds."""
        raise NotImplementedError

    def _index(self) -> tuple[np.ndarray, np.ndarray | None]:
        raise NotImplementedError

    def _stat(self) -> tuple[int, int]:
        assert self._file is not None
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]


class JsonLines(Records):
    """One JSON object per line. Blank lines are skipped and counted, a UTF-8 byte order mark is accepted."""

    def parse(self, raw: bytes, line: int) -> dict[str, Any]:
        return parse_line(raw, self.path, line)

    def _index(self) -> tuple[np.ndarray, np.ndarray | None]:
        assert self._file is not None
        size, begin = self._stamp[0], len(BOM) if os.pread(self._file, 3, 0) == BOM else 0
        found, blank = [np.array([begin], dtype=np.int64)], []
        for offset in range(begin, size, CHUNK):
            block = np.frombuffer(os.pread(self._file, min(CHUNK, size - offset), offset), dtype=np.uint8)
            found.append(np.flatnonzero(block == 10) + (offset + 1))
            first = np.concatenate([found[-2][-1:] if len(found[-2]) else found[-2], found[-1]])
            first = first[(first >= offset) & (first < offset + len(block))]
            blank.append(first[np.isin(block[first - offset], _BLANK)])
        starts = np.concatenate(found)
        if starts[-1] != size:
            starts = np.append(starts, size)
        suspects = np.searchsorted(starts, np.concatenate(blank)) if blank else np.array([], dtype=np.int64)
        empty = [i for i in suspects if not os.pread(self._file, int(starts[i + 1] - starts[i]), int(starts[i])).strip()]
        if not empty:
            return starts, None
        kept = np.delete(np.arange(len(starts) - 1), empty)
        return np.append(starts[kept], size), kept + 1


class Csv(Records):
    """A table as text with a header; every value is a `str`. Quoted values may hold line ends. All of it is checked at once."""

    delimiter = ","

    def parse(self, raw: bytes, line: int) -> dict[str, Any]:
        values = next(csv.reader(raw.decode("utf-8").splitlines(keepends=True), delimiter=self.delimiter, strict=True))
        return dict(zip(self.header, values, strict=True))

    def _index(self) -> tuple[np.ndarray, np.ndarray | None]:
        starts, lines = [], []
        self.header: list[str] = []
        for start, line, values in self._scan():
            if not self.header:
                self.header = self._check_header(values, line)
            elif len(values) != len(self.header):
                raise DataError(
                    f"{self.path}:{line} has {len(values)} value(s), the header has {len(self.header)}",
                    cause=f"the columns are {', '.join(self.header)}; the line begins {_short(self.delimiter.join(values))}",
                    fix='give each line a value for each column; a value with a delimiter or a line end in it goes in "…"',
                    code="ragged-row",
                )
            else:
                starts.append(start)
                lines.append(line)
        return np.array([*starts, self._stamp[0]], dtype=np.int64), np.array(lines, dtype=np.int64)

    def _scan(self) -> Iterator[tuple[int, int, list[str]]]:
        """(first byte, first line, values) of each record that is not a blank line."""
        position = line = 0

        def feed() -> Iterator[str]:
            nonlocal position, line
            with open(Path(self.path).expanduser(), "rb") as file:
                for raw in file:
                    position, line = position + len(raw), line + 1
                    yield decode(raw.removeprefix(BOM) if line == 1 else raw, self.path, line)

        limit = csv.field_size_limit(2**31 - 1)
        try:
            reader, before = csv.reader(feed(), delimiter=self.delimiter, strict=True), (0, 0)
            for values in reader:
                if values:
                    yield before[0], before[1] + 1, values
                before = position, line
        except csv.Error as exc:
            raise DataError(
                f"{self.path}:{line} is not CSV", cause=str(exc), fix='write a quote inside a quoted value twice: "say ""yes"""',
                code="broken-line",
            ) from exc
        finally:
            csv.field_size_limit(limit)

    def _check_header(self, names: list[str], line: int) -> list[str]:
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or "" in names:
            raise DataError(
                f"{self.path}:{line} is no header",
                cause=f"the column {twice[0]!r} is there twice" if twice else "a name is empty",
                fix="give the first line a name for each column", code="csv-header",
            )
        return names


class Tsv(Csv):
    """CSV with tabs."""

    delimiter = "\t"


def parse_line(raw: bytes, path: str, line: int) -> dict[str, Any]:
    """The JSON object on a line. Raises DataError: not UTF-8, not JSON, not an object, a key twice, NaN."""
    text = decode(raw, path, line)
    try:
        row = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except ValueError as exc:
        at = getattr(exc, "pos", 0)
        near = f" near {_short(text[max(at - 20, 0) : at + 20].strip())}" if hasattr(exc, "pos") else ""
        raise DataError(
            f"{path}:{line} is not JSON", cause=f"{getattr(exc, 'msg', exc)}{near}",
            fix="correct the line: each line is one JSON object", code="broken-line",
        ) from exc
    if not isinstance(row, dict):
        raise DataError(
            f"{path}:{line} is a {_JSON_NAMES.get(type(row), type(row).__name__)}, not an object",
            cause=f"it begins {_short(text)}",
            fix='write rows such as {"question": "…", "answer": "…"}; a file that is one list of them is called .json',
            code="not-an-object",
        )
    return row


_JSON_NAMES = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def decode(raw: bytes, path: str, line: int) -> str:
    """The text of a line. Raises DataError when it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise DataError(
            f"{path}:{line} is not UTF-8",
            cause=f"byte 0x{raw[exc.start]:02x} at column {exc.start + 1}, after {_short(raw[: exc.start].decode()[-20:])}",
            fix=f"convert the file: iconv -f LATIN1 -t UTF-8 {path} > fixed{Path(path).suffix}  (or the encoding that it has)",
            code="encoding",
        ) from exc


def refuse_other_encodings(path: str, head: bytes) -> None:
    """Raise DataError for UTF-16, which its first bytes tell, and for compressed files."""
    if head[:2] in _UTF16:
        fix = f"convert the file: iconv -f UTF-16 -t UTF-8 {path} > fixed{Path(path).suffix}"
        raise DataError(f"{path} is UTF-16, not UTF-8", fix=fix, code="encoding")
    for magic, tool in ((b"\x1f\x8b", "gunzip"), (b"\x28\xb5\x2f\xfd", "zstd -d"), (b"PK\x03\x04", "unzip")):
        if head.startswith(magic):
            raise DataError(f"{path} is compressed", fix=f"decompress it: {tool} {path}", code="encoding")


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice in one object")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON: write null, or leave the key out")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")


class _opening:
    """Turns the failure to open a file into a DataError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, exc: BaseException | None, trace: Any) -> None:
        if isinstance(exc, OSError):
            raise DataError(
                f"{self.path} cannot be read", cause=f"{type(exc).__name__}: {exc.strerror}",
                fix="check the path and its permissions", code="unreadable-file",
            ) from exc
