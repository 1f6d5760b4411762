"""One's own data: from a file, a folder, a hub name, a function or an object to rows with stable ids, in two splits.

    options = DataOptions(data="my.jsonl", columns={"problem": "question"}, test_size=100)
    train, test = open_rows(options, "train"), open_rows(options, "test")
    train[0]["id"], train.where(0)                       # "1", "my.jsonl:1"

An environment whose `Options` inherit `DataOptions` returns `open_rows(self.options, split)` from `dataset(split)`. What one
row needs is named in `required`, and a row without it is a DataError with the file, the line and the fix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from posttrain.data.environment import Split
    from posttrain.data.tables import Table
    from posttrain.data.view import View

CHECKED_ROWS = 10_000
"""So many rows are read before a run starts; the rest is checked while it runs."""
TEST_SPLITS = ("test", "validation")
LARGEST_TEST_SHARE = 256


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where rows come from, and how they are named, filtered and split."""

    data: Any = None  # a .jsonl, .json, .parquet, .csv or .tsv file, a folder or glob of them, a hub name, or module:function
    data_config: str | None = None  # the hub dataset's configuration
    data_split: str = "train"  # the source's split that trains
    test_data: Any = None  # rows of the test split, named like `data`; null: the source's own test split, else a share
    test_size: int | float | None = None  # rows (or a fraction of them) of the test split; null: a twentieth, at most 256
    columns: dict[str, str] = field(default_factory=dict)  # {key of the row: column of the source}; dots reach into columns
    filter: Any = None  # module:function(row) that says whether a row stays
    take: int | None = None  # only the first rows train, this many
    streaming: bool = False  # read the source as the run goes, instead of before it
    split_seed: int = 0  # which rows are the test split


def open_rows(options: DataOptions, split: Split, *, required: Sequence[str] = ()) -> View:
    """The rows of a split, each a dict with an `id`. The same options give the same rows, on every call and machine.

    required: keys that every row has after `columns`. Raises DataError.
    """
    import numpy as np

    from posttrain.data.view import Shape, View, check_rows, kept

    shape = Shape(options.columns, _function(options.filter))
    tables = _tables(options.data)
    train = tables[options.data_split]
    test = next((tables[name] for name in TEST_SPLITS if name in tables and name != options.data_split), None)
    if options.test_data is not None:
        test = next(iter(_tables(options.test_data).values()))
    if test is not None:
        table, positions = (train, kept(train, shape)) if split == "train" else (test, kept(test, shape))
    else:
        everything = np.asarray(kept(train, shape))
        size = options.test_size
        n = min(len(everything) // 20, LARGEST_TEST_SHARE) if size is None else (
            round(size * len(everything)) if isinstance(size, float) else size)
        held = np.sort(np.random.Generator(np.random.Philox(options.split_seed)).permutation(len(everything))[:n])
        table, positions = train, everything[held] if split == "test" else np.delete(everything, held)
    if split == "train" and options.take is not None:
        positions = positions[: options.take]
    view = View(table, shape, positions)
    check_rows(view, required, CHECKED_ROWS)
    return view


def _tables(data: Any) -> Mapping[str, Table]:
    from posttrain.data.locate import files_by_split, is_path, read_files
    from posttrain.data.tables import Listed

    if isinstance(data, str) and is_path(data):
        return {name: read_files(files) for name, files in files_by_split(data).items()}
    if isinstance(data, str):
        raise NotImplementedError(data)
    return {"train": Listed(data, "data")}


def _function(ref: Any) -> Callable[[Mapping[str, Any]], object] | None:
    from posttrain.plugins.resolution import import_target, target_of

    return import_target(target_of(ref)) if isinstance(ref, str) else ref  # type: ignore[no-any-return]
