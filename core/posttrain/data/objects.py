"""What Python code hands over as a dataset, as tables by split: lists, `datasets` objects, data frames, generators, functions.

    tables_of([{"question": "2+2?"}], "data")                    # {"train": Listed}
    tables_of(datasets.load_from_disk(path), "data")             # {"train": …, "test": …}
    call("my_data.py:questions", {"limit": 100}, "rl.data.factory")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.data.tables import Listed, Stream, Table
from posttrain.errors import DataError, PosttrainError
from posttrain.plugins.resolution import import_target, target_of

WANTED = "a list of dicts, a datasets.Dataset, {split: such a dataset}, or a generator of dicts"


def tables_of(made: Any, source: str) -> dict[str, Table | Stream]:
    """The tables of a dataset object by split, "train" where it knows none. Raises DataError when it is no dataset."""
    if isinstance(made, Mapping):
        return _by_split(made, source)
    if callable(made) and not hasattr(made, "__getitem__"):
        return tables_of(call(made, {}, source), source)
    return {"train": table_of(made, source)}


def table_of(made: Any, source: str) -> Table | Stream:
    """One dataset object as a table, or as a stream when it can only be iterated."""
    from posttrain.data.locate import SUFFIXES

    if hasattr(made, "iloc") and hasattr(made, "columns"):
        import datasets

        made = datasets.Dataset.from_pandas(made, preserve_index=False)
    if isinstance(made, (str, bytes, Mapping)) or made is None:
        raise _no_dataset(made, source)
    if isinstance(made, (list, tuple)) and made and all(isinstance(row, str) and row.endswith(SUFFIXES) for row in made):
        raise DataError(f"{source} is a list of files, not of rows", cause=f"it begins with {made[0]!r:.80}", code="no-dataset",
                        fix="name several files by a folder or a glob: data='data/*.jsonl'; rows are dicts")
    if hasattr(made, "__len__") and hasattr(made, "__getitem__"):
        return Listed(made, source)
    if isinstance(made, Iterable):
        return Stream.of(made, source)
    raise _no_dataset(made, source)


def call(ref: Any, kwargs: Mapping[str, Any], where: str) -> Any:
    """What a function, or the object at a dotted path, gives. Raises DataError when it cannot be imported or fails."""
    name = ref if isinstance(ref, str) else getattr(ref, "__name__", type(ref).__name__)
    try:
        made = import_target(target_of(ref)) if isinstance(ref, str) else ref
    except (ImportError, AttributeError, OSError, SyntaxError) as exc:
        raise DataError(
            f"{where}={name!r} cannot be imported", cause=f"{type(exc).__name__}: {exc}",
            fix="install the package that holds it, or correct the path (form: package.module:function or file.py:function)",
            where=where,
        ) from exc
    if not callable(made):
        return made
    try:
        return made(**kwargs)
    except PosttrainError:
        raise
    except Exception as exc:
        raise DataError(
            f"{where}={name!r} failed", cause=f"{type(exc).__name__}: {exc}",
            fix=f"check {where}_kwargs and the data they name" if kwargs else "correct the function", where=where,
        ) from exc


def _by_split(made: Mapping[Any, Any], source: str) -> dict[str, Table | Stream]:
    rows = next((value for value in made.values() if isinstance(value, (list, tuple)) and value), None)
    if not made or (rows is not None and not isinstance(rows[0], Mapping)):
        raise DataError(
            f"{source} is a dict of columns", cause=f"its keys are {', '.join(map(str, list(made)[:8])) or 'none'}",
            fix="give rows, [{…}, {…}], or datasets.Dataset.from_dict(columns)", code="no-dataset",
        )
    return {str(split): table_of(value, f"{source} ({split})") for split, value in made.items()}


def _no_dataset(made: Any, source: str) -> DataError:
    kind = type(made).__name__
    return DataError(f"{source} gave {'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}, which is no dataset",
                     cause="a dataset has rows, each a dict", fix=f"return {WANTED}", where=source if "." in source else "",
                     code="no-dataset")
