"""metrics.jsonl: one object per batch step, uninformative ones included (their `loss` is null).

    writer = MetricsWriter(run_dir.metrics)
    writer.write(12, {"reward/mean": 0.7, "loss": 0.01})
    rows = read_metrics("outputs/my-run")

`step` counts batch steps from 1. validation.jsonl has the same form, one object per held-out validation; step 0 is the one before
the first batch step. The names are in `posttrain.tracking.metric_names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.tracking.jsonl import JsonLines, read, truncate_after

__all__ = ["MetricsWriter", "read_metrics", "read_validation", "truncate_after"]


class MetricsWriter:
    """Appends rows; each is on disk (flushed) when `write` returns. Raises RunInterrupted when the disk is full."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._lines.write({"step": step, **metrics})

    def close(self) -> None:
        self._lines.close()


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """The rows of a run directory's metrics.jsonl (or of that file), in step order as written."""
    return _read(run, "metrics.jsonl")


def read_validation(run: str | Path) -> list[dict[str, Any]]:
    """The rows of a run directory's validation.jsonl (or of that file)."""
    return _read(run, "validation.jsonl")


def _read(run: str | Path, name: str) -> list[dict[str, Any]]:
    path = Path(run)
    return list(read(path / name if path.is_dir() else path))
