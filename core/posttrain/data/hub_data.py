"""Datasets of the hub by name, through the `datasets` library, which is imported only here and when one is asked for.

Whether the hub can be reached is asked once, without retries and for a few seconds at most. When it cannot, `datasets` is told
so: a dataset in its cache is used, and one that is not there is refused at once, instead of after half a minute of retries.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.data.hub import words
from posttrain.data.tables import Listed, Stream, Table
from posttrain.errors import DataError

PROBE_S = 4.0
_TRUE = ("1", "ON", "YES", "TRUE")  # as the hub's client reads its variables


def load_hub(name: str, config: str | None, split: str, *, streaming: bool = False) -> dict[str, Table | Stream]:
    """The splits of a dataset. `split` may be a slice of one, such as `train[:1000]`. Raises DataError."""
    import datasets

    options = {"streaming": True} if streaming else {}
    try:
        with _offline_if_unreachable(), _without_progress_bars():
            found: dict[str, Any] = dict(datasets.load_dataset(name, config, **options))
            if "[" in split:
                found[split] = datasets.load_dataset(name, config, split=split, **options)
    except Exception as exc:
        raise _refusal(name, config, exc) from exc
    label = f"{name}{f'/{config}' if config else ''}"
    make = Stream.of if streaming else Listed
    return {key: make(rows, f"{label} ({key})") for key, rows in found.items()}


def load_saved(folder: Path) -> Any:
    """A folder that `save_to_disk` wrote. Raises DataError."""
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except Exception as exc:
        raise DataError(f"{folder} cannot be read as a saved dataset", cause=f"{type(exc).__name__}: {exc}",
                        fix="save it again with save_to_disk", code="unreadable-file") from exc


def parquet(files: list[Path], name: str) -> Table:
    """Parquet files as one memory-mapped table. Raises DataError."""
    import datasets

    try:
        with _without_progress_bars():
            return Listed(datasets.Dataset.from_parquet([str(f) for f in files]), name)
    except Exception as exc:
        raise _broken_parquet(files, exc) from exc


def parquet_stream(files: list[Path], name: str) -> Stream:
    """The rows of Parquet files, a group of rows in memory at a time."""

    def rows() -> Iterator[Any]:
        import pyarrow.parquet

        for file in files:
            try:
                for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
                    yield from batch.to_pylist()
            except (OSError, ValueError) as exc:
                raise _broken_parquet([file], exc) from exc

    return Stream.of(rows(), name)


def reachable(timeout_s: float = PROBE_S) -> bool:
    """Whether the hub answers, asked with its own client (proxies and certificates included) and without retries."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    answered: list[bool] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=timeout_s)
            answered.append(True)
        except Exception:
            answered.append(False)

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no deadline of its own
    asking.start()
    asking.join(timeout_s)
    return answered == [True]


@contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Inside, `datasets` and the hub's client are in offline mode when the hub cannot be reached: as with HF_HUB_OFFLINE=1."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if not any(before) and not reachable():
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """They would tear the display of a run."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _refusal(name: str, config: str | None, exc: BaseException) -> DataError:
    """What the library says, as one message with its fix."""
    text = words(exc)
    if re.search(r"Couldn't reach|OfflineModeIsEnabled|LocalEntryNotFound|ConnectError|ConnectTimeout|offline mode", text):
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached from here"
        return DataError(
            f"the dataset {name} is not in this machine's cache, and {why}",
            cause=f"there is no file or folder {name} either",
            fix="load it once where there is a network; or give options.data a local file or folder",
            code="dataset-absent",
        )
    if re.search(r"is a gated dataset|\b40[13]\b", text):
        return DataError(f"the dataset {name} is gated or private", cause=_line(text),
                         fix="accept its terms on its page and set HF_TOKEN to a token that may read it", code="dataset-gated")
    if re.search(r"DatasetNotFoundError|doesn't exist", text):
        return DataError(f"there is no dataset {name} on the hub, and no file or folder of this name", cause=_line(text),
                         fix="correct options.data: a file, a folder, or a name such as openai/gsm8k", code="dataset-absent")
    if known := re.search(r"(?:available configs|Available configs in the cache|configurations in the cache):\s*(.+)", text):
        names = re.findall(r"[\w.+-]+", known[1])
        said = "has several configurations" if config is None else f"has no configuration {config!r}"
        return DataError(f"the dataset {name} {said}", cause=f"they are {', '.join(names)}",
                         fix=f"choose one: options.data_config={names[0] if names else '…'}", code="dataset-config")
    return DataError(f"the dataset {name} cannot be loaded", cause=_line(text),
                     fix="see the cause; a dataset that needs a script of its own must be written as files first", code="dataset")


def _broken_parquet(files: list[Path], exc: BaseException) -> DataError:
    import pyarrow.parquet

    for file in files:
        try:
            pyarrow.parquet.ParquetFile(file).close()
        except Exception as broken:
            return DataError(f"{file} cannot be read as Parquet", cause=f"{type(broken).__name__}: {broken}".splitlines()[0],
                             fix="write the file again", code="unreadable-file")
    return DataError(f"{', '.join(f.name for f in files[:3])} do not make one table", cause=_line(words(exc)),
                     fix="give all files the same columns and types", code="mixed-files")


def _line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
