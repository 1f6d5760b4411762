"""One's own data: from a file, a folder, a hub name, a function or an object to rows with stable ids, in two splits.

    options = DataOptions(data="my.jsonl", columns={"problem": "question"}, test_size=100)
    train, test = open_rows(options, "train"), open_rows(options, "test")
    train[0]["id"], train.where(0)                       # "1", "my.jsonl:1"

An environment whose `Options` inherit `DataOptions` returns `open_rows(self.options, split)` from `dataset(split)`. What each
row must have is named in `required`; a row without it is a DataError with the file, the line and the fix. Any environment can be
fed from a file by `rl.data.factory=posttrain.load_rows`. These three names are public: `from posttrain import DataOptions`.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from posttrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from posttrain.data.environment import Split
    from posttrain.data.tables import Stream, Table
    from posttrain.data.view import Shape, View

CHECKED_ROWS = 10_000
"""So many rows are read before a run starts; the check of the rest runs beside it."""
WINDOW = 1024
"""A stream is shuffled in blocks of this many rows, so this many are read ahead."""
LARGEST_STREAM = 1_000_000
"""A stream without `take` is read to its end first, if the end comes before so many rows."""
HELD_OUT_STREAM = 1000
"""So many rows of a test split that is a stream are read."""
TEST_SPLITS = ("test", "validation")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where rows come from, and how they are named, filtered and split."""

    data: Any = None  # a .jsonl, .json, .parquet, .csv or .tsv file, a folder or glob of them, a hub name, or module:function
    data_config: str | None = None  # the hub dataset's configuration
    data_split: str = "train"  # the source's split that trains
    test_data: Any = None  # rows of the test split, named like `data` (the same: all); null: its own, else a share
    test_size: int | float | None = None  # rows or fraction held out as the test split; null: a twentieth, at most 256 rows
    columns: dict[str, str] = field(default_factory=dict)  # {key of the row: column of the source}; dots reach into columns
    filter: Any = None  # module:function(row) that says whether a row stays
    take: int | None = None  # only the first so many rows train
    streaming: bool = False  # read the source as the run goes, instead of before it
    split_seed: int = 0  # which rows are held out

    def __post_init__(self) -> None:
        size, take = self.test_size, self.take
        for name in ("data", "test_data"):
            if isinstance(text := getattr(self, name), str) and not text.strip():
                raise ConfigError(f"{name} is empty", cause="it would mean the current folder",
                                  fix=f"name a file or a folder ({name}=. for the current one), or leave {name} out")
        if isinstance(size, float) and not 0 < size < 1:
            raise ConfigError(f"test_size={size} is no fraction", fix="write a number of rows, or a fraction between 0 and 1")
        if isinstance(size, int) and size < 0:
            raise ConfigError(f"test_size={size} must be at least 0", fix="0 holds no rows out")
        if size is not None and self.test_data is not None:
            raise ConfigError("test_data and test_size are both set", fix="keep one: rows of their own, or a share of `data`")
        if take is not None and take < 1:
            raise ConfigError(f"take={take} must be at least 1", fix="leave take out to train on all rows")
        from posttrain.data.locate import absolute_data
        from posttrain.plugins.functions import absolute

        for name, anywhere in (("data", absolute_data), ("test_data", absolute_data), ("filter", absolute)):
            if isinstance(text := getattr(self, name), str):  # a resume may start in another directory
                object.__setattr__(self, name, anywhere(text))
        if isinstance(self.data, str) and self.test_data == self.data:
            object.__setattr__(self, "test_data", self.data)  # all of it is held out


def open_rows(options: DataOptions, split: Split, *, required: Sequence[str] = (), same: Sequence[str] = ()) -> View:
    """The rows of a split, each a dict with an `id`. The same options give the same rows, on every call and machine.

    required: keys that every row has after `columns`. same: keys whose values make two rows the same task, which is then never on
    both sides of the split; default: all but the id. The first 10,000 rows are read here. Raises DataError.
    """
    rows = _opened(options, tuple(same))[split].requiring(required)
    if split == "train" and len(rows) == 0:
        if options.test_data is not None and options.test_data is options.data:
            from posttrain.data.split import all_held_out

            raise all_held_out(len(_opened(options, tuple(same))["test"]))
        raise DataError(
            f"no row of {_title(options.data)} is left to train",
            cause="options.filter let none stay" if options.filter else "the test split took all",
            fix="correct options.filter" if options.filter else "lower options.test_size", code="empty-dataset",
        )
    for _ in islice(rows, CHECKED_ROWS if rows.window is None else rows.window):
        pass
    return rows


def load_rows(data: Any = None, **options: Any) -> dict[str, View]:
    """Both splits of any data, for `rl.data.factory`; the arguments are the fields of `DataOptions`.

        rl.data.factory=posttrain.load_rows
        'rl.data.factory_kwargs={data: my.jsonl, columns: {problem: question}}'
    """
    from posttrain.plugins.build import build_options

    made = build_options(_Holder, {"data": data, **options}, "load_rows", "rl.data.factory_kwargs")
    return {split: open_rows(made, split) for split in ("train", "test")}  # type: ignore[arg-type]


class _Holder:
    Options = DataOptions


_kept: dict[int, dict[tuple[str, ...], dict[str, View]]] = {}


def _opened(options: DataOptions, same: tuple[str, ...]) -> dict[str, View]:
    """Both splits, opened once for an options object: several parts of a run ask for them."""
    if id(options) not in _kept:
        _kept[id(options)] = {}
        weakref.finalize(options, _kept.pop, id(options), None)
    by_keys = _kept[id(options)]
    if same not in by_keys:
        by_keys[same] = _open(options, same)
    return by_keys[same]


def _open(options: DataOptions, same: tuple[str, ...]) -> dict[str, View]:
    from posttrain.data.split import split_rows, without_copies
    from posttrain.data.tables import Stream
    from posttrain.data.view import Shape, View, kept

    if options.data is None:
        raise DataError(
            "options.data is not set", cause="this environment's rows come from your own data",
            fix="name a file, a folder, a dataset of the hub, or module:function", code="no-data",
        )
    shape = Shape(options.columns, _filter(options.filter))
    splits = _tables(options.data, options, "options.data")
    train = _named(splits, options)
    if options.test_data is not None and options.test_data is options.data:
        return _all_held_out(splits, train, shape)
    test = _held_out(splits, options, shape)
    if isinstance(train, Stream) and options.take is not None:
        return _streamed(train, options.take, test, options, shape, same)
    table = _drained(train, LARGEST_STREAM) if isinstance(train, Stream) else train
    if len(table) == 0:
        raise DataError(f"{_title(options.data)} is empty", cause="it holds no row", fix="give rows", code="empty-dataset")
    rows, note = View(table, shape, kept(table, shape)), ""
    if test is None:
        positions, held = split_rows(rows, options.test_size, options.split_seed, same)
        test = View(table, shape, held)
    else:
        positions, note = without_copies(rows, test, same)
    return {"train": View(table, shape, positions[: options.take], notes=[note]), "test": test}


def _all_held_out(splits: dict[str, Table | Stream], train: Table | Stream, shape: Shape) -> dict[str, View]:
    """Of `test_data` that is `data`: the source's own test split, else all of its rows; none trains."""
    from posttrain.data.tables import Stream
    from posttrain.data.view import View, kept

    table = next((splits[name] for name in TEST_SPLITS if name in splits), train)
    if isinstance(table, Stream):
        table = _drained(table, LARGEST_STREAM)
    positions = kept(table, shape)
    return {"train": View(table, shape, positions[:0]), "test": View(table, shape, positions)}


def _streamed(
    stream: Stream, take: int, test: View | None, options: DataOptions, shape: Shape, same: tuple[str, ...]
) -> dict[str, View]:
    """`take` rows of a stream, read as they are asked for. Its first rows are held out where there is no other test split."""
    import numpy as np

    from posttrain.data.split import wanted_rows
    from posttrain.data.tables import Spool
    from posttrain.data.view import View, content

    first = 0 if test is not None else wanted_rows(options.test_size, take)
    asked = {content(row, same) for row in test} if test is not None else set()
    ids: dict[str, str] = {}

    def keep(raw: Any, name: str, where: str) -> bool:
        if not shape.keeps(raw, name, where):
            return False
        row = shape.row(raw, name, where)
        if (earlier := ids.setdefault(row["id"], where)) is not where:
            raise repeated_id(row["id"], earlier, where)
        digest = content(row, same)
        if test is None and len(spool) < first:
            asked.add(digest)
            return True
        return digest not in asked

    spool = Spool(stream, keep)
    held = test if test is not None else View(spool, shape, np.arange(spool.read(first)))
    return {"train": View(spool, shape, np.arange(first, first + take), window=WINDOW), "test": held}


def as_view(table: Table | Stream) -> View:
    """All rows of a table as they are, with ids; of a stream too, which is read to its end."""
    from posttrain.data.tables import Stream
    from posttrain.data.view import Shape, View, kept

    whole = _drained(table, LARGEST_STREAM) if isinstance(table, Stream) else table
    return View(whole, Shape(), kept(whole, Shape()))


def _drained(stream: Stream, limit: int, *, part: bool = False) -> Table:
    """A table of all rows of a stream; of the first `limit` when `part`."""
    from posttrain.data.tables import Spool

    spool = Spool(stream, lambda raw, name, where: True)
    if spool.read(limit) >= limit and not part and spool.read(limit + 1) > limit:
        raise DataError(
            f"{stream.source} has not ended after {limit:,} rows", cause="the length of a stream is known at its end",
            fix="set options.take to the number of rows to train on: then it is read as the run goes", code="endless-stream",
        )
    return spool


def _named(splits: dict[str, Table | Stream], options: DataOptions) -> Table | Stream:
    """The split that trains."""
    name = options.data_split
    if name in splits:
        return splits[name]
    near = difflib.get_close_matches(name, splits, n=1) or list(splits)[:1]
    raise DataError(
        f"{_title(options.data)} has no split {name!r}", cause=f"its splits: {', '.join(splits)}",
        fix=f"set options.data_split={near[0]}" if near else "correct options.data", code="no-such-split",
    )


def _held_out(splits: dict[str, Table | Stream], options: DataOptions, shape: Shape) -> View | None:
    """The rows of `test_data`, else of the source's own test split unless `test_size` asks for a share; None: take a share."""
    from posttrain.data.tables import Stream
    from posttrain.data.view import View, kept

    if options.test_data is not None:
        given = _tables(options.test_data, options, "options.test_data")
        table = next((given[name] for name in (*TEST_SPLITS, "train") if name in given), next(iter(given.values())))
    else:
        own = [name for name in TEST_SPLITS if name in splits and name != options.data_split.partition("[")[0]]
        if not own or options.test_size is not None:
            return None
        table = splits[own[0]]
    if isinstance(table, Stream):
        table = _drained(table, HELD_OUT_STREAM, part=True)
    return View(table, shape, kept(table, shape))


def _tables(data: Any, options: DataOptions, where: str) -> dict[str, Table | Stream]:
    from posttrain.data.locate import find_tables
    from posttrain.data.objects import tables_of

    if not isinstance(data, str):
        return tables_of(data, where.rpartition(".")[2])
    config, split = (options.data_config, options.data_split) if data is options.data else (None, "test")
    return find_tables(data, config, split, streaming=options.streaming, where=where)


def _filter(ref: Any) -> Any:
    from posttrain.plugins.functions import function_of

    return function_of(ref, "filter") if isinstance(ref, str) else ref


def _title(data: Any) -> str:
    from posttrain.data.locate import shown

    return shown(data) if isinstance(data, str) else "data"


def repeated_id(name: str, first: str, second: str) -> DataError:
    """The error about rows that share an id. first, second: their places."""
    return DataError(
        f"{first} and {second} have the same id {name!r}", fix="give every row its own id, or leave ids out",
        code="repeated-id",
    )
