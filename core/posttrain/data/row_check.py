"""Every row of a source is looked at once: the first before the run starts, the rest in a thread beside it.

    check = RowCheck(source)
    check.first()               # raises for what is wrong with the first 10,000 rows
    check.start()               # the others, at a pace that leaves the run its processor
    check.raise_if_failed()     # at each draw: what was found meanwhile

So a broken line 700,000 ends a run in its first minutes and not in hour ten, and starting does not wait for it. Rows made on
demand (`Rows`) and rows of a stream are only looked at first: the ones are without end, the others not there yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from posttrain.data.dataset import Source, place_of, read_row, row_id
from posttrain.data.environment import Rows
from posttrain.errors import DataError, PosttrainError

FIRST_ROWS = 10_000
SLICE_ROWS, PAUSE_S = 500, 0.002


class RowCheck:
    """Rows can be read, are mappings, and no two share an id; `refuse(position, row)` may raise for what else must not be."""

    def __init__(self, source: Source, refuse: Callable[[int, Any], None] | None = None) -> None:
        self.source, self._refuse = source, refuse
        self.failure: PosttrainError | None = None
        window = getattr(source.rows, "window", None)
        self._first = min(len(source.rows), FIRST_ROWS, window or FIRST_ROWS)
        self._all = self._first if window or isinstance(source.rows, Rows) else len(source.rows)
        self._ids = np.zeros(self._all, dtype=np.int64)
        self._thread: threading.Thread | None = None

    def first(self) -> None:
        """Look at the first rows. Raises PosttrainError."""
        for position, row in enumerate(islice(self._rows_in_order(), self._first)):
            self._look(position, row)
        self._compare(self._first)

    def start(self) -> None:
        """Look at the rest in a thread, if there is a rest."""
        if self._first < self._all and self._thread is None:
            self._thread = threading.Thread(target=self._look_at_rest, name=f"rows of {self.source.env}", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until all rows are looked at. Raises what was found."""
        if self._thread is not None:
            self._thread.join()
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise what the thread has found so far, if anything."""
        if self.failure is not None:
            raise self.failure

    def _look_at_rest(self) -> None:
        try:
            for position, row in enumerate(self._rows_in_order()):
                if position >= self._first:
                    self._look(position, row)
                if position % SLICE_ROWS == 0:
                    time.sleep(PAUSE_S)
            self._compare(self._all)
        except PosttrainError as exc:
            self.failure = exc
        except Exception as exc:
            self.failure = DataError(
                f"the rows of {self.source.env} could not be checked", cause=f"{type(exc).__name__}: {exc}",
                fix="correct the dataset, or the environment that refuses its rows", code="unreadable-row",
            )
            self.failure.__cause__ = exc

    def _rows_in_order(self) -> Iterator[Any]:
        """All rows; a dataset that can be iterated is, which reads files and Arrow many times faster than row by row."""
        position, rows = 0, iter(self.source.rows) if hasattr(self.source.rows, "__iter__") else None
        while position < self._all:
            try:
                row = read_row(self.source, position) if rows is None else next(rows)
            except PosttrainError:
                raise
            except Exception:
                row = read_row(self.source, position)  # raises with the place
            yield row
            position += 1

    def _look(self, position: int, row: Any) -> None:
        self._ids[position] = hash(row_id(row, position))
        if self._refuse is not None:
            self._refuse(position, row)

    def _compare(self, count: int) -> None:
        """Raise DataError for an id that is there twice: it would pool two prompts in the ledger and the rollout files."""
        order = np.argsort(self._ids[:count], kind="stable")
        for a, b in zip(order[:-1][same := np.diff(self._ids[order]) == 0], order[1:][same], strict=True):
            names = [row_id(read_row(self.source, int(i)), int(i)) for i in (a, b)]
            if names[0] == names[1]:
                raise DataError(
                    f"two rows of {self.source.env} have the same id {names[0]!r}: "
                    f"{place_of(self.source.rows, int(a))} and {place_of(self.source.rows, int(b))}",
                    fix="give every row its own id, or leave ids out: a row is then named by its line", code="repeated-id",
                )
