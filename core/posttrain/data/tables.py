"""Tables: whatever holds rows, behind one face: a length, rows by index, and for each row its place and a stable name.

    table = as_table([{"question": "2+2?", "answer": "4"}], "my list")
    table[0], table.where(0), table.name(0)       # the row, "my list, row 1", "1"

Text files are tables of their own (`records`); `Rows` wraps what is in memory or in Arrow, `Joined` puts files end to end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol


class Table(Protocol):
    """Rows by index. `where` says where a row was written, `name` is its id when it brings none: its place at the source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...

    def where(self, index: int) -> str: ...

    def name(self, index: int) -> str: ...


class Listed:
    """A list, a `datasets.Dataset` or any other map-style dataset; rows are counted from 1. `source` as in messages."""

    def __init__(self, rows: Any, source: str) -> None:
        self.rows, self.source = rows, source

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.rows[index]  # type: ignore[no-any-return]

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

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        which, inner = self._find(index)
        return self.tables[which][inner]

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
