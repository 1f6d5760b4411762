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
import math
import os
import re
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from posttrain.errors import DataError

csv.field_size_limit(2**31 - 1)  # the limit of the process; by default a value of 131,072 characters is too long
CHUNK = 1 << 22
BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SPACE = np.isin(np.arange(256), list(b" \t\r\n"))


class Records:
    """The records of one text file. `len`, `rows[i]`, `where(i)`, `name(i)`; picklable, reads are thread-safe.

    path: as messages write it. keep_open: false when there are more files than a process
    may hold open. Raises DataError when the file cannot be read.
    """

    starts: np.ndarray  # [n + 1] int64, byte at which a record begins; the last entry is the end of the file
    lines: np.ndarray | None  # [n] int64, 1-based line of a record; None: record i is line i + 1

    def __init__(self, path: str | Path, *, keep_open: bool = True) -> None:
        self.path, self._keep_open = str(path), keep_open
        self._real = os.path.abspath(os.path.expanduser(path))  # the current folder may change, and differs in other processes
        self._file: int | None = None
        self._lock = threading.Lock()
        try:
            self._file = os.open(self._real, os.O_RDONLY)
        except OSError as exc:
            raise DataError(
                f"{self.path} cannot be read", cause=f"{type(exc).__name__}: {exc.strerror}",
                fix="check the path and its permissions", code="unreadable-file",
            ) from exc
        self._stamp = _stamp(self._file)
        refuse_other_encodings(self.path, os.pread(self._file, 4, 0))
        self.starts, self.lines = self._index()
        if not keep_open:
            self._close()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.path}")
        return self.parse(self._read(index, index + 1), self.line(index))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first = 0
        while first < len(self):
            last = max(int(np.searchsorted(self.starts, self.starts[first] + CHUNK, "right")) - 1, first + 1)
            block, base = self._read(first, last), int(self.starts[first])
            for index in range(first, last):
                yield self.parse(block[self.starts[index] - base : self.starts[index + 1] - base], self.line(index))
            first = last

    def line(self, index: int) -> int:
        return index + 1 if self.lines is None else int(self.lines[index])

    def where(self, index: int) -> str:
        return f"{self.path}:{self.line(index)}"

    def name(self, index: int) -> str:
        """The id of a row that brings none."""
        return str(self.line(index))

    def _read(self, first: int, last: int) -> bytes:
        """The bytes of records first … last-1. Raises DataError when the file is not the one that was opened."""
        with self._lock:  # two threads would both open it, and one would stay open
            file = self._file if self._file is not None else os.open(self._real, os.O_RDONLY)
            self._file = file if self._keep_open else None
        try:
            if _stamp(file) != self._stamp:
                raise DataError(
                    f"{self.path} has changed since it was opened",
                    fix="start again; write new data to a new file",
                    code="changed-file",
                )
            start, end = int(self.starts[first]), int(self.starts[last])
            return os.pread(file, end - start, start)
        finally:
            if not self._keep_open:
                os.close(file)

    def parse(self, raw: bytes, line: int) -> dict[str, Any]:
        """The row that a record holds."""
        raise NotImplementedError

    def _index(self) -> tuple[np.ndarray, np.ndarray | None]:
        raise NotImplementedError

    def _close(self) -> None:
        file, self._file = getattr(self, "_file", None), None
        if file is not None:
            os.close(file)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"} | {"_file": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    __del__ = _close


class JsonLines(Records):
    """One JSON object per line. Blank lines are skipped and counted, a UTF-8 byte order mark is accepted."""

    def parse(self, raw: bytes, line: int) -> dict[str, Any]:
        return parse_line(raw, self.path, line)

    def _index(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Line starts, found 4 MiB at a time. A line that begins with white space is looked at: it may be blank."""
        assert self._file is not None
        size, begin = self._stamp[0], len(BOM) if os.pread(self._file, 3, 0) == BOM else 0
        found, spaced, before = [np.array([begin], dtype=np.int64)], [], 10
        for offset in range(begin, size, CHUNK):
            block = np.frombuffer(os.pread(self._file, min(CHUNK, size - offset), offset), dtype=np.uint8)
            after = np.flatnonzero(block == 10) + 1
            found.append(after + offset)
            first = np.concatenate([[0] if before == 10 else after[:0], after[after < len(block)]]).astype(np.int64)
            spaced.append(first[_SPACE[block[first]]] + offset)
            before = int(block[-1])
        starts = np.concatenate(found)
        starts = starts if starts[-1] == size else np.append(starts, size)
        suspects = np.searchsorted(starts, np.concatenate([*spaced, starts[:0]]))
        blank = [i for i in suspects if not os.pread(self._file, int(starts[i + 1] - starts[i]), int(starts[i])).strip()]
        if not blank:
            return starts, None
        lines = np.delete(np.arange(len(starts) - 1), blank)
        return np.append(starts[lines], size), lines + 1


class Csv(Records):
    """A table as text with a header; every value is a `str`. Quoted values may hold line ends. All of it is checked at once."""

    delimiter = ","

    def parse(self, raw: bytes, line: int) -> dict[str, Any]:
        pieces = [piece + "\n" for piece in raw.decode("utf-8").split("\n")]  # as a file gives them; splitlines knows more ends
        values = next(csv.reader(pieces, delimiter=self.delimiter, strict=True))
        return dict(zip(self.header, values, strict=True))

    def _index(self) -> tuple[np.ndarray, np.ndarray | None]:
        starts, lines = [], []
        self.header: list[str] = []
        with open(self._real, "rb") as file:
            for start, line, row in read_csv(self.path, self.delimiter, file):
                self.header = self.header or list(row)
                starts.append(start)
                lines.append(line)
        return np.array([*starts, self._stamp[0]], dtype=np.int64), np.array(lines, dtype=np.int64)


class Tsv(Csv):
    """CSV with tabs."""

    delimiter = "\t"


def read_csv(path: str, delimiter: str, file: BinaryIO) -> Iterator[tuple[int, int, dict[str, str]]]:
    """(first byte, first line, row) of each record below the header. Raises DataError for what is not CSV, with the line."""
    header: list[str] = []
    for start, line, values in _csv_records(path, delimiter, file):
        if not header:
            header = values
            if len(header) == 1 and (other := next((c for c in _OTHERS if c != delimiter and _names_split(header[0], c)), "")):
                fix = f"write the file with {delimiter!r} between the values, or rename the column"
                fix = fix if other != "\t" else f"name the file {Path(path).with_suffix('.tsv')}"
                cause = f"its names are separated by {other!r}, and those of a {Path(path).suffix} file by {delimiter!r}"
                raise DataError(f"{path}:{line} has one column, {_short(header[0])}", cause=cause, fix=fix, code="csv-header")
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice or "" in header:
                raise DataError(
                    f"{path}:{line} is no header",
                    cause=f"the column {twice[0]!r} is there twice" if twice else "a name is empty",
                    fix="give the first line a name for each column", code="csv-header",
                )
        elif len(values) != len(header):
            raise DataError(
                f"{path}:{line} has {len(values)} value(s), the header has {len(header)}",
                cause=f"the columns are {', '.join(header)}; the line begins {_short(delimiter.join(values))}",
                fix='give each line a value for each column; a value with a delimiter or a line end in it goes in "…"',
                code="ragged-row",
            )
        else:
            yield start, line, dict(zip(header, values, strict=True))


_OTHERS = ";\t|"


def _names_split(text: str, delimiter: str) -> bool:
    """Whether a text is several names with the delimiter between them."""
    return delimiter in text and all(name.strip() for name in text.split(delimiter))


def _csv_records(path: str, delimiter: str, file: BinaryIO) -> Iterator[tuple[int, int, list[str]]]:
    """(first byte, first line, values) of each record that is not a blank line."""
    position = line = 0

    def feed() -> Iterator[str]:
        nonlocal position, line
        for raw in file:
            position, line = position + len(raw), line + 1
            yield decode(raw.removeprefix(BOM) if line == 1 else raw, path, line)

    try:
        before = 0, 0
        for values in csv.reader(feed(), delimiter=delimiter, strict=True):
            if values:
                yield before[0], before[1] + 1, values
            before = position, line
    except csv.Error as exc:
        returns = "new-line character" in str(exc)
        cause = "its lines end in carriage returns alone" if returns else str(exc)
        fix = _new_line_ends(path) if returns else 'write a quote inside a quoted value twice: "say ""yes"""'
        raise DataError(f"{path}:{line} is not CSV", cause=cause, fix=fix, code="broken-line") from exc


def read_lines(path: str, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of each line of a JSON Lines file, read from its start. `path` is for messages."""
    for line, raw in enumerate(file, 1):
        raw = raw.removeprefix(BOM) if line == 1 else raw
        if raw.strip():
            yield line, parse_line(raw, path, line)


def parse_line(raw: bytes, path: str, line: int) -> dict[str, Any]:
    """The JSON object on a line. Raises DataError: not UTF-8, not an object, and as `parse_json` does."""
    text = decode(raw, path, line)
    row = parse_json(text, path, line, "correct the line: each line is one JSON object")
    if not isinstance(row, dict):
        raise DataError(
            f"{path}:{line} is a {_JSON_NAMES.get(type(row), type(row).__name__)}, not an object",
            cause=f"it begins {_short(text)}",
            fix='write rows such as {"question": "…", "answer": "…"}; a file that is one list of them is called .json',
            code="not-an-object",
        )
    return row


def parse_json(text: str, path: str, line: int, fix: str = "correct the file") -> Any:
    """The value of a JSON text that begins on `line`.

    Raises DataError with the line: not JSON, a key twice, no finite number, nested too deep, half of a surrogate pair.
    """
    try:
        value = _loads(text)
    except json.JSONDecodeError as exc:
        at = exc.pos
        line += text.rstrip().count("\n", 0, at)
        cause = f"{exc.msg} near {_short(text[max(at - 20, 0) : at + 20].strip())}"
        if "\r" in text.strip() and "\n" not in text.strip():
            cause, fix = "its lines end in carriage returns alone", _new_line_ends(path)
        raise DataError(f"{path}:{line} is not JSON", cause=cause, fix=fix, code="broken-line") from exc
    except ValueError as exc:
        line += _lines_before_refusal(text)
        raise DataError(f"{path}:{line} is not JSON", cause=str(exc), fix=fix, code="broken-line") from exc
    except RecursionError as exc:
        line += _lines_before_refusal(text)
        raise DataError(f"{path}:{line} is nested too deep to be read", cause="lists or objects in each other, about a thousand",
                        fix="write the inner part as a text", code="broken-line") from exc
    if half := next((found for found in _ESCAPES.finditer(text) if found[1]), None) if "\\u" in text else None:
        raise DataError(
            f"{path}:{line + text.count(chr(10), 0, half.start())} holds {half[1]}, half of a surrogate pair",
            cause="it is no character, and no tokenizer takes it", code="broken-line",
            fix="write the pair (an emoji is \\ud83d\\ude00) or the character itself, or remove it",
        )
    return value


def _loads(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)


def _lines_before_refusal(text: str) -> int:
    """How many lines stand before the refused one. The parser tells no place; the fewest lines that it refuses do."""
    lines = text.split("\n")

    def refused(count: int) -> bool:
        try:
            _loads("\n".join(lines[:count]))
        except json.JSONDecodeError:  # it only ends too early
            return False
        except (ValueError, RecursionError):
            return True
        return False

    return bisect_left(range(1, len(lines)), True, key=refused)


_ESCAPES = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.")  # a group: half of a pair
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
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice in the object that ends here")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON: write null, or leave the key out")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is larger than any number can be")
    return value


def _new_line_ends(path: str) -> str:
    return f"convert the file: tr '\\r' '\\n' < {path} > fixed{Path(path).suffix}"


def _stamp(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")
