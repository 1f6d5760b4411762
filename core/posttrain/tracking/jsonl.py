"""One JSON object per line, appended and flushed, so that a crash loses at most the line being written.

JSON has no NaN: non-finite numbers are written as the strings "NaN", "Infinity" and "-Infinity", which `read` turns back.
Anything with an `item()` (a numpy or torch scalar) is written as the number it holds.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.tracking.files import superseded_name, write_text, writing

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """An append-only file; thread-safe. A torn last line, left by a crash, is cut off when the file is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        _cut_torn_line(path)
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n"
        with self._lock, writing(self.path):
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        with writing(self.path):
            self._file.close()


def plain(value: Any) -> Any:
    """The same value in plain JSON types."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order; nothing when the file is absent. A torn last line is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                row = json.loads(line)
                yield {k: _NON_FINITE.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def truncate_after(path: Path, step: int) -> int:
    """Move the rows whose `step` is past `step` to `<name>.superseded`; return how many.

    A resume calls this, so that a file never tells two stories about one step. The rows are kept, never deleted.
    """
    _cut_torn_line(path)
    if not path.is_file():
        return 0
    kept: list[str] = []
    past: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        (past if json.loads(line).get("step", 0) > step else kept).append(line)
    if past:
        write_text(superseded_name(path), "".join(past))
        write_text(path, "".join(kept))
    return len(past)


def _cut_torn_line(path: Path) -> None:
    """Drop what follows the last newline."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            file.truncate(whole)
