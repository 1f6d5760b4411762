"""Rows of a training dataset that are kept out of training, for an eval to ask.

    train, held = apart(env.dataset("train"), 100, env)

The first rows are held out. Rows that ask the same as one of them do not train either; in data of more than `SCANNED_ROWS` rows
those are not searched for here, and the check that runs beside the run refuses them. A row without an id of its own is named by
its place in the whole dataset, on both sides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.data.environment import Rows
from posttrain.data.split import SCANNED_ROWS
from posttrain.errors import DataError

if TYPE_CHECKING:
    from posttrain.data.environment import Environment, RowDataset


class Part(Sequence[Any]):
    """Rows `positions` of a dataset, with its places and its window."""

    def __init__(self, rows: RowDataset, positions: Sequence[int], notes: Sequence[str] = ()) -> None:
        self._rows, self._positions = rows, positions
        self.notes = [*getattr(rows, "notes", ()), *notes]
        self.window = getattr(rows, "window", None)

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return named(self._rows, self._positions[index])

    def where(self, index: int) -> str:
        from posttrain.data.dataset import place_of

        return place_of(self._rows, self._positions[index])


def named(rows: RowDataset, position: int) -> Any:
    """The row at a position, with its place as its id where it has none."""
    row = rows[position]
    return {"id": str(position), **row} if isinstance(row, Mapping) and "id" not in row else row


def apart(rows: RowDataset, count: int, env: Environment, label: str) -> tuple[RowDataset, RowDataset]:
    """(what trains, the `count` rows that are held out). Raises DataError when nothing is left to train."""
    size = len(rows)
    if count >= size:
        raise DataError(
            f"an eval holds out {count} rows of {label}, and its training dataset has {size}",
            cause="nothing is left to train", fix="lower the prompts of the entry of evals, or give more rows",
            where="evals", code="small-dataset",
        )  # fmt: skip
    held = Part(rows, range(count))
    if isinstance(rows, Rows) and size > SCANNED_ROWS:
        return Rows(size - count, lambda i: named(rows, count + i)), held
    left: Sequence[int] = range(count, size)
    note = f"{count} row(s) are held out for evals"
    if size <= SCANNED_ROWS and held.window is None:
        asked = {key for row in held if (key := _key(env, row)) is not None}
        left = [i for i in left if _key(env, rows[i]) not in asked]
        if not left:
            raise DataError(
                f"no row of {label} is left to train", cause=f"all ask the same as the first {count}, which an eval holds out",
                fix="lower the prompts of the entry of evals, or give more rows", where="evals", code="small-dataset",
            )  # fmt: skip
        if copies := size - count - len(left):
            note += f", and {copies} that ask the same do not train either"
    return Part(rows, left, [note]), held


def _key(env: Environment, row: Any) -> str | None:
    """What tells whether two rows are the same task; None for a row that cannot be asked about."""
    with contextlib.suppress(Exception):
        return repr(env.task_key(row))
    return None
