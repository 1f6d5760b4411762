"""Rows as a run sees them: columns renamed, ids given, some left out; the table behind is read row by row.

    view = View(table, Shape({"problem": "question"}), positions)
    view[0]          # {"id": "3", "problem": …}: the row at positions[0] of the table
    view.where(0)    # "my.jsonl:3"
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.data.tables import Table
from posttrain.errors import DataError

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Shape:
    """From a row of the source to one of the run. columns: {new name: column, or a path such as `reward_model.ground_truth`}."""

    columns: Mapping[str, str] = field(default_factory=dict)
    keep: Callable[[Mapping[str, Any]], object] | None = None

    def row(self, raw: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
        """The row with its columns renamed and its `id`: its own, else `name`. Raises DataError when a column is missing."""
        if not isinstance(raw, Mapping):
            raise DataError(
                f"{where} is a {type(raw).__name__}, not a mapping", fix='give rows such as {"question": "…", "answer": "…"}',
                code="not-an-object",
            )
        moved = {key: _take(raw, column) for key, column in self.columns.items()}
        for key, value in moved.items():
            if value is _ABSENT:
                raise missing_column(self.columns[key], raw, where, key)
        gone = set(self.columns.values()) - set(moved)
        row = {**{k: v for k, v in raw.items() if k not in gone}, **moved}
        own = row.pop("id", None)
        return {"id": name if own is None else str(own), **row}

    def keeps(self, raw: Mapping[str, Any], name: str, where: str) -> bool:
        """Whether the filter lets a row stay. Raises DataError when it fails, and as `row` does."""
        if self.keep is None:
            return True
        row = self.row(raw, name, where)
        try:
            return bool(self.keep(row))
        except Exception as exc:
            raise DataError(
                f"the filter failed on {where}", cause=f"{type(exc).__name__}: {exc}; the row has {_names(row)}",
                fix="correct the function that options.filter names: it gets a row and says whether it stays", code="filter",
            ) from exc


class View(Sequence[dict[str, Any]]):
    """Rows `positions` (rising) of a table in a shape; `where(i)` is the place of a row. One without a `required` key: DataError.

    notes: lines for the run's log. window: rows come from a stream, and reading further ahead than so many costs; None: they
    are all there.
    """

    def __init__(
        self, table: Table, shape: Shape, positions: np.ndarray, required: Iterable[str] = (), *,
        notes: Iterable[str] = (), window: int | None = None,
    ) -> None:
        self.table, self.shape, self.positions, self.required = table, shape, positions, tuple(required)
        self.notes, self.window = [note for note in notes if note], window

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = self._place(int(index))
        return self._row(self.table[place], place)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if 2 * len(self) < len(self.table) or self.window is not None:
            return (self[i] for i in range(len(self)))
        chosen = np.zeros(len(self.table), dtype=bool)  # most rows: reading on is many times faster than jumping to each
        chosen[self.positions] = True
        return (self._row(raw, place) for place, raw in enumerate(self.table) if chosen[place])

    def requiring(self, keys: Iterable[str]) -> View:
        """The same rows, each of which must have these keys."""
        return View(self.table, self.shape, self.positions, keys, notes=self.notes, window=self.window)

    def where(self, index: int) -> str:
        """Where the row was written, such as `my.jsonl:17`."""
        return self.table.where(self._place(index))

    def _row(self, raw: Any, place: int) -> dict[str, Any]:
        where = self.table.where(place)
        row = self.shape.row(raw, self.table.name(place), where)
        for key in self.required:
            if key not in row:
                raise missing_column(key, row, where)
        return row

    def _place(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return int(self.positions[index])


def kept(table: Table, shape: Shape) -> np.ndarray:
    """[rows] int64, the positions of the rows that the filter lets stay; without one all of them, unread."""
    if shape.keep is None:
        return np.arange(len(table))
    return np.array([i for i, raw in enumerate(table) if shape.keeps(raw, table.name(i), table.where(i))], dtype=np.int64)


def content(row: Mapping[str, Any], keys: Sequence[str] = ()) -> bytes:
    """A digest of what a row asks: of `keys`, else of all but its id. Rows that agree in it are the same task."""
    said = {k: row.get(k) for k in keys} if keys else {k: v for k, v in row.items() if k != "id"}
    return hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=16).digest()


def missing_column(column: str, row: Mapping[str, Any], where: str, key: str = "") -> DataError:
    """The error about a row without a column; `key`: the one that `columns` maps to it."""
    known = [str(name) for name in row if name != "id" or column == "id"]
    near = difflib.get_close_matches(column, known, n=1)
    target = key or column
    fix = f"write options.columns={{{target}: {near[0]}}}" if near else (
        f"name the column that holds it: options.columns={{{target}: …}}; or leave such rows out with options.filter")
    return DataError(f"{where} has no column {column!r}", cause=f"it has {_names(row)}", fix=fix, code="missing-column")


def _take(row: Mapping[str, Any], column: str) -> Any:
    """A column, or the value that a dotted path reaches; numbers index lists."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _ABSENT
    return value


def _names(row: Mapping[str, Any]) -> str:
    names = [str(name) for name in row]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") if names else "no column"


