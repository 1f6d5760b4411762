"""Which rows are held out: a seeded share of them, the same whatever else changes, and no row on both sides.

Each row has a number drawn from the seed and its place at the source; the rows with the smallest numbers are the test split. So
`take`, a filter and rows added at the end leave the numbers as they are. Rows with the same content share the number of the
first of them: copies never land on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.data.view import View, content
from posttrain.errors import DataError

SCANNED_ROWS = 50_000
"""Up to so many rows are compared with each other before a run; in larger data the check that runs beside it compares prompts."""
SHARE, LARGEST_SHARE = 20, 256


def split_rows(view: View, size: int | float | None, seed: int, same: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(train, test): the table positions of a view, split, both in the order of the source.

    size: rows, or a fraction of them; None: a twentieth, at most 256, and none where all rows are copies of one. same: keys whose
    values make two rows the same task (empty: all but the id). Raises DataError when nothing is left to train.
    """
    positions = view.positions
    wanted = wanted_rows(size, len(positions))
    numbers = _numbers(positions, seed)
    held = np.zeros(len(positions), dtype=bool)
    if wanted >= len(positions) > 0:
        raise _nothing_left(size, len(positions))
    if len(view) > SCANNED_ROWS:
        held[np.argpartition(numbers, wanted)[:wanted]] = True
    elif wanted:
        ranks = numbers[_first_copies(view, same)]
        order = np.argsort(ranks, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(ranks[order]) != 0, True)) + 1  # of the runs of copies
        if len(ends) > 1:
            held[order[: ends[min(int(np.searchsorted(ends, wanted)), len(ends) - 2)]]] = True
        elif size is not None:
            raise _nothing_left(size, len(positions), "all rows are copies of one")
    return positions[~held], positions[held]


def _nothing_left(size: object, rows: int, cause: str = "") -> DataError:
    return DataError(
        f"options.test_size={'null' if size is None else size} leaves none of {rows} row(s) to train", cause=cause,
        fix="lower options.test_size, or set options.test_size=0 for no test split", code="small-dataset",
    )


def wanted_rows(size: int | float | None, total: int) -> int:
    """How many of `total` rows `test_size` holds out."""
    if size is None:
        return min(total // SHARE, LARGEST_SHARE)
    return size if isinstance(size, int) else max(round(size * total), 1)


def without_copies(train: View, test: View, same: Sequence[str]) -> tuple[np.ndarray, str]:
    """The table positions of the train rows that are not in `test`, and a line that says how many are left out ("": none)."""
    if not 0 < len(test) <= SCANNED_ROWS or len(train) > SCANNED_ROWS:
        return train.positions, ""
    asked = {content(row, same) for row in test}
    fresh = [i for i, row in enumerate(train) if content(row, same) not in asked]
    gone = len(train) - len(fresh)
    if not fresh and gone:
        raise all_held_out(gone)
    note = f"{gone} row(s) of the train split are in the test split too: they do not train" if gone else ""
    return train.positions[fresh], note


def all_held_out(rows: int) -> DataError:
    """The error of a source whose rows are all in the test split."""
    return DataError(
        f"every row that would train is in the test split too ({rows} of them)",
        fix="name other rows in options.test_data, or leave it out: a share of the rows is held out then",
        code="not-held-out",
    )


def _first_copies(view: View, same: Sequence[str]) -> np.ndarray:
    """For each row the index of the first row with the same content."""
    first: dict[bytes, int] = {}
    return np.array([first.setdefault(content(row, same), i) for i, row in enumerate(view)], dtype=np.int64)


def _numbers(positions: np.ndarray, seed: int) -> np.ndarray:
    """A number for each position, by the seed: SplitMix64, whose outputs for different positions all differ."""
    step, one, two = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    with np.errstate(over="ignore"):
        start = np.array([seed % 2**64], dtype=np.uint64) * two
        x = (positions.astype(np.uint64) + start + np.uint64(1)) * step
        x = (x ^ (x >> np.uint64(30))) * one
        x = (x ^ (x >> np.uint64(27))) * two
        return x ^ (x >> np.uint64(31))
