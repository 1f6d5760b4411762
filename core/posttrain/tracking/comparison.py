"""Several runs side by side: what tells them apart, and what each came to; seeds of the same settings are one row.

    comparison = compare_runs(find_runs(["multirun/2026-01-01/12-00-00"]))
    for row in comparison.rows: print(row.label, row.before, row.after)

What tells runs apart are the config values that differ between them and were set by somebody: values that only follow from
another one (an objective's own defaults) are left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.layers import ABSENT, leaves
from posttrain.errors import ConfigError
from posttrain.tracking.metric_names import HELD_OUT, SCORES
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.run_dir import find_run, saved_config, saved_json

_FOLLOWED = ("default", "auto")
"""Origins of values that nobody set."""


@dataclass(frozen=True, slots=True)
class Row:
    """The runs of one setting. label: the keys that tell it apart, without the seed.

    curve: `(step, values of the runs)`.   without: the runs that have no such metric and count nowhere, as one that crashed.
    """

    label: Mapping[str, Any]
    runs: tuple[Path, ...]
    seeds: tuple[int, ...]
    curve: tuple[tuple[int, tuple[float, ...]], ...]
    without: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """The label as a person would say it: values alone where there is one key."""
        if len(self.label) == 1:
            return str(next(iter(self.label.values())))
        return " ".join(f"{key}={value}" for key, value in self.label.items()) or self.runs[0].name

    @property
    def before(self) -> tuple[float, ...]:
        """The metric of each run at its first step (0: before training); empty without it."""
        return self.curve[0][1] if self.curve else ()

    @property
    def after(self) -> tuple[float, ...]:
        return self.curve[-1][1] if self.curve else ()

    @property
    def mean(self) -> float | None:
        """The metric averaged over the steps and runs: how fast and how far, in one number."""
        return statistics.fmean(statistics.fmean(values) for _, values in self.curve) if self.curve else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, in the order in which their first runs were given. keys: what tells them apart, the seed included."""

    metric: str
    keys: tuple[str, ...]
    rows: tuple[Row, ...]


def find_runs(named: Iterable[str | Path]) -> list[Path]:
    """Every run that is named or lies in a named folder, a folder's in the order of their start. Raises ConfigError for none."""
    found: list[Path] = []
    for one in named:
        folder = Path(one).expanduser().absolute()
        inside = [path.parent for path in folder.rglob("origins.json")] if folder.is_dir() else []
        inside = [path for path in inside if (path / "config.yaml").is_file()]
        found += sorted(inside, key=lambda path: (path / "origins.json").stat().st_mtime_ns) if inside else [find_run(folder)]
    return list(dict.fromkeys(found))


def compare_runs(runs: Sequence[Path], metric: str = HELD_OUT) -> Comparison:
    """Group runs by what tells them apart but the seed, and read the metric's curve of each. Raises ConfigError, DataError."""
    configs = [dict(leaves(saved_config(run))) for run in runs]
    origins = [saved_json(run / "origins.json") for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if key != "name"
        and len({repr(config.get(key, ABSENT)) for config in configs}) > 1
        and any(known is None or known.get(key, "default") not in _FOLLOWED for known in origins)
    ]
    groups: dict[str, list[int]] = {}
    for i, config in enumerate(configs):
        groups.setdefault(repr([config.get(key, ABSENT) for key in keys if key != "seed"]), []).append(i)
    rows = []
    for members in groups.values():
        first = configs[members[0]]
        curves = {i: curve_of(runs[i], metric) for i in members}
        counted = [i for i in members if curves[i]] or members
        rows.append(
            Row(
                {key: first.get(key, ABSENT) for key in keys if key != "seed"},
                tuple(runs[i] for i in counted),
                tuple(configs[i].get("seed", 0) for i in counted),
                _common([curves[i] for i in counted]),
                tuple(runs[i] for i in members if not curves[i]),
            )
        )
    if not any(row.curve for row in rows):
        raise ConfigError(f"none of the {len(runs)} runs has {metric}", fix="see docs/reference/metrics.md: --metric NAME")
    return Comparison(metric, tuple(keys), tuple(rows))


def chosen_metric(runs: Sequence[Path]) -> str:
    """What runs are judged by: the first held-out score that one of them has, else the first of training; else HELD_OUT."""
    names = [name for score in SCORES for name in (score.held_out, score.trained)]
    return next((name for name in names if any(curve_of(run, name) for run in runs)), HELD_OUT)


def curve_of(run: Path, metric: str) -> dict[int, float]:
    """The metric of a run by step; what is not finite is left out."""
    try:
        rows = read_validation(run) if metric.startswith("validation/") else read_metrics(run)
    except FileNotFoundError:
        return {}
    values = ((row["step"], row.get(metric)) for row in rows)
    return {step: float(value) for step, value in values if isinstance(value, int | float) and math.isfinite(value)}


def _common(curves: Sequence[Mapping[int, float]]) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """The values at every step that all curves have."""
    steps = sorted(set(curves[0]).intersection(*curves))
    return tuple((step, tuple(curve[step] for curve in curves)) for step in steps)
