"""Tables: whatever holds rows, behind one face: a length, rows by index, and for each row its place and a stable name.

    table = Listed([{"question": "2+2?", "answer": "4"}], "my list")
    table[0], table.where(0), table.name(0)       # the row, "my list, row 1", "1"

Text files are tables of their own (`records`). What can only be read from its start is a `Stream`; `Spool` makes a table of it.
"""

from __future__ import annotations

import pickle
import tempfile
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Protocol, TypeAlias

from posttrain.errors import DataError

StreamRow: TypeAlias = tuple[Any, str, str]
"""A row of a stream as it is at the source, its name and its place."""


class Table(Protocol):
    """Rows by index. `where` says where a row was written, `name` is its id when it brings none: its place at the source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def where(self, index: int) -> str: ...

    def name(self, index: int) -> str: ...


class Listed:
    """A list, a `datasets.Dataset` or any other map-style dataset; rows are counted from 1. `source` as in messages."""

    def __init__(self, rows: Any, source: str) -> None:
        self.rows, self.source = rows, source

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows) if hasattr(self.rows, "__iter__") else (self.rows[i] for i in range(len(self)))

    def where(self, index: int) -> str:
        return f"{self.source}, row {index + 1}"

    def name(self, index: int) -> str:
        return str(index + 1)


class Joined:
    """Tables end to end. `labels` tell their rows apart: the name of row 17 of `a.jsonl` is `a.jsonl:17`."""

    def __init__(self, tables: Sequence[Table], labels: Sequence[str]) -> None:
        self.tables, self.labels = list(tables), list(labels)
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        which, inner = self._find(index)
        return self.tables[which][inner]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.tables)

    def where(self, index: int) -> str:
        which, inner = self._find(index)
        return self.tables[which].where(inner)

    def name(self, index: int) -> str:
        which, inner = self._find(index)
        return f"{self.labels[which]}:{self.tables[which].name(inner)}"

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        return which, index - (self._ends[which - 1] if which else 0)


class Stream:
    """Rows that come one after the other, once. `source` as in messages."""

    def __init__(self, rows: Iterable[StreamRow], source: str) -> None:
        self.rows, self.source = rows, source

    @classmethod
    def of(cls, rows: Iterable[Any], source: str) -> Stream:
        """The stream of an iterable; its rows are counted from 1."""
        return cls(((row, str(n), f"{source}, row {n}") for n, row in enumerate(rows, 1)), source)


class Spool:
    """A table of the rows of a stream for which `keep(raw, name, where)` holds, read no further than asked and kept on disk.

    So a second epoch gives the same rows and a stream is read once. The file is unnamed: it goes with the process. Reads are
    thread-safe. An index past the end raises DataError with the counts; `len` is the number of rows read so far.
    """

    def __init__(self, stream: Stream, keep: Callable[[Any, str, str], bool]) -> None:
        self.source, self.ended, self.seen = stream.source, False, 0
        self._rows, self._keep = iter(stream.rows), keep
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this object)
        self._ends, self._lock = array("q", [0]), threading.RLock()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Any:
        return self._get(index)[0]

    def name(self, index: int) -> str:
        return self._get(index)[1]

    def where(self, index: int) -> str:
        return self._get(index)[2]

    def read(self, count: int) -> int:
        """Read until `count` rows are kept or the stream ends; returns how many are kept."""
        with self._lock:
            while len(self) < count and not self.ended:
                self._advance()
        return len(self)

    def _get(self, index: int) -> StreamRow:
        with self._lock:
            if self.read(index + 1) <= index:
                raise DataError(
                    f"{self.source} ended after {self.seen} row(s), and row {index + 1} of those that stay is asked for",
                    cause=f"{len(self)} of them stay after options.filter, and those of the test split do not train",
                    fix=f"set options.take to at most what is there ({len(self)} with the test split), or give more rows",
                    code="stream-ended",
                )
            self._file.seek(self._ends[index])
            return pickle.loads(self._file.read(self._ends[index + 1] - self._ends[index]))  # type: ignore[no-any-return]

    def _advance(self) -> None:
        try:
            row = next(self._rows, None)
        except DataError:
            raise
        except Exception as exc:
            raise DataError(
                f"{self.source} failed after row {self.seen}", cause=f"{type(exc).__name__}: {exc}",
                fix="correct the function or the files behind it", code="unreadable-row",
            ) from exc
        if row is None:
            self.ended = True
            return
        self.seen += 1
        if self._keep(*row):
            self._write(row)

    def _write(self, row: StreamRow) -> None:
        try:
            packed = pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as exc:
            raise DataError(
                f"{row[2]} cannot be kept on disk, as the rows of a stream are", cause=f"{type(exc).__name__}: {exc}",
                fix="give rows of numbers, texts, lists and dicts", code="unreadable-row",
            ) from exc
        try:
            self._file.seek(self._ends[-1])
            self._file.write(packed)
            self._file.flush()
        except OSError as exc:
            raise DataError(
                f"the rows of {self.source} cannot be kept on disk after row {len(self)}", cause=f"{exc.strerror or exc}",
                fix=f"make room in {tempfile.gettempdir()}, or set TMPDIR to a folder that has it", code="disk",
            ) from exc
        self._ends.append(self._ends[-1] + len(packed))
