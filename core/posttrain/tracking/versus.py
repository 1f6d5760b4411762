"""Two settings against each other: the score at equal batch steps, tokens and seconds, what else tells them apart, a verdict.

    versus = against(compare_runs(runs, metric))            # None unless there are exactly two settings with curves
    versus.sentence                                         # "at equal batch steps not distinguishable: …"

A is the setting whose first run was given first. Seeds of a setting are averaged; where both have the same eight seeds or more,
the pairs are the seeds, else the batch steps (or as many points between the first and the last that both have, of tokens and
seconds). `posttrain.tracking.verdict` has the statistics.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.reward_range import Better
from posttrain.tracking.comparison import Comparison, Row, compare_runs, curve_of
from posttrain.tracking.metric_names import SCORES
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.ranges import read_ranges
from posttrain.tracking.verdict import LEAST_POINTS, Interval, judge, paired_interval

AXES = {"batch steps": "step", "tokens": "tokens/generated", "seconds": "time/step_s"}
"""What a score is compared at equal amounts of, and the metric that adds up to it."""

WALL = "time/wall_s"
"""Seconds since training began; the steps of a synchronous run leave out what it waits for validations and checkpoints."""

LAST = 0.2
"""Share of the points that are the end."""
BESIDE = (
    "staleness/mean", "staleness/p95", "staleness/max", "policy/logprob_gap", "policy/logprob_gap_max",
    "policy/ratio_min", "policy/ratio_max",
)  # fmt: skip
"""Metrics that say how far engine and trainer were apart."""
HIGHER_IS_BETTER = ("reward/", "/margin", "/accuracy")


@dataclass(frozen=True, slots=True)
class Axis:
    """The score at equal amounts of one thing. a, b, difference: of all points; the same of the last ones."""

    name: str
    a: float
    b: float
    difference: Interval
    last_a: float
    last_b: float
    last_difference: Interval

    @property
    def winner(self) -> str | None:
        return judge(self.difference)


@dataclass(frozen=True, slots=True)
class Versus:
    """names: of A and B.   pairs: what the differences are over.   totals, beside: of A and B, None where one has none."""

    metric: str
    names: tuple[str, str]
    seeds: tuple[int, int]
    pairs: str
    axes: tuple[Axis, ...]
    totals: Mapping[str, tuple[float | None, float | None]]
    beside: Mapping[str, tuple[float | None, float | None]]
    better: Better | None = None
    """Which end of the metric is the good one, where a run or its name says so."""

    @property
    def verdict(self) -> str:
        """At equal batch steps: `A better`, `B better` or `not distinguishable`."""
        return self._said(self.axes[0])

    @property
    def sentence(self) -> str:
        """The verdict with its numbers, at equal batch steps first."""
        first = self.axes[0].difference
        few = f", fewer than the {LEAST_POINTS} that a verdict needs" if first.points < LEAST_POINTS else ""
        rest = "".join(f"; at equal {axis.name} {self._said(axis)} ({_range(axis.difference)})" for axis in self.axes[1:])
        return (
            f"at equal {self.axes[0].name} {self._said(self.axes[0])}: {self.metric} of B − A is {_range(first)}, "
            f"95% interval over {first.points} {self.pairs}{few}{rest}"
        )

    @property
    def caveat(self) -> str:
        """What the interval does not say."""
        if self.pairs == "seeds":
            return ""
        return (
            f"the interval is over {self.pairs} of {self.seeds[0]} and {self.seeds[1]} run(s): it says what these runs did; "
            f"other seeds may differ by more ({LEAST_POINTS} common seeds or more are compared by seed)"
        )

    def _said(self, axis: Axis) -> str:
        if axis.winner is None:
            return "not distinguishable"
        other = "B" if axis.winner == "A" else "A"
        return {"higher": f"{axis.winner} better", "lower": f"{other} better", None: f"{axis.winner} higher"}[self.better]


def verdict_of(runs: Sequence[Path], comparison: Comparison, *, asked: bool) -> Versus | None:
    """`against` of a comparison of these runs; unless its metric was asked for, of the score in training where that has more
    points and the held-out one too few."""
    versus = against(comparison)
    if asked or (versus is not None and versus.axes[0].difference.points >= LEAST_POINTS):
        return versus
    trained = next((score.trained for score in SCORES if score.held_out == comparison.metric), None)
    if trained is None or not any(curve_of(run, trained) for run in runs):
        return versus
    other = against(compare_runs(runs, trained))
    if versus is None or (other is not None and other.axes[0].difference.points > versus.axes[0].difference.points):
        return other
    return versus


def against(comparison: Comparison) -> Versus | None:
    """The two settings of a comparison against each other; None for another number of settings, or without common points."""
    rows = comparison.rows
    if len(rows) != 2 or not all(row.curve for row in rows):
        return None
    a, b = rows
    seeded = set(a.seeds) == set(b.seeds) and len(set(a.seeds)) == len(a.seeds) == len(b.seeds) >= LEAST_POINTS
    axes = [axis for name in AXES if (axis := _axis(name, a, b, comparison.metric, seeded)) is not None]
    if not axes or axes[0].name != next(iter(AXES)):
        return None
    sides = [[read_metrics(run) for run in row.runs] for row in rows]
    return Versus(
        metric=comparison.metric,
        names=(a.name, b.name),
        seeds=(len(a.runs), len(b.runs)),
        pairs="seeds" if seeded else "points of the curves",
        axes=tuple(axes),
        totals=_pairs(list(AXES.values()), sides, _total, list(AXES)),
        beside=_pairs(BESIDE, sides, _typical, BESIDE),
        better=_better(comparison.metric, [*a.runs, *b.runs]),
    )


def _better(metric: str, runs: Sequence[Path]) -> Better | None:
    """Which end of a metric is the good one: as the environments declare it, else by its name."""
    said = {one.better for run in runs if (one := read_ranges(run).get(metric))}
    if len(said) == 1:
        return said.pop()
    return "higher" if any(word in metric for word in HIGHER_IS_BETTER) else None


def points(steps: Sequence[int], run: Path, axis: str) -> list[float] | None:
    """How much of `axis` the run had used up at each of `steps`; None where it does not say."""
    if axis == "batch steps":
        return [float(step) for step in steps]
    rows = read_metrics(run)
    wall = _values(WALL, rows) if axis == "seconds" else []
    used = _values(AXES[axis], rows)
    if len(used) < len(rows) or not sum(used):
        return None
    sums = [0.0, *(wall if len(wall) == len(rows) else accumulate(used))]
    at = [0, *(row["step"] for row in rows)]
    return [float(np.interp(step, at, sums)) for step in steps]


def _axis(name: str, a: Row, b: Row, metric: str, seeded: bool) -> Axis | None:
    """The curves of all runs on common points, A's and B's means of them, and the differences."""
    curves = []
    for run in (*a.runs, *b.runs):
        curve = curve_of(run, metric)
        amounts = points(list(curve), run, name)
        if not curve or amounts is None:
            return None
        curves.append((amounts, list(curve.values())))
    grid = _grid([amounts for amounts, _ in curves], exact=name == "batch steps")
    if not len(grid):
        return None
    values = np.array([np.interp(grid, amounts, scores) for amounts, scores in curves])
    sides = values[: len(a.runs)], values[len(a.runs) :]
    if seeded:
        order = [np.argsort(row.seeds) for row in (a, b)]
        sides = sides[0][order[0]], sides[1][order[1]]
    last = max(1, round(LAST * len(grid)))

    def difference(part: slice) -> Interval:
        over = 1 if seeded else 0  # the points are averaged away, or the seeds
        mine, yours = (side[:, part].mean(axis=over) for side in sides)
        return paired_interval(yours - mine, ordered=not seeded)

    means = [float(side.mean()) for side in sides] + [float(side[:, -last:].mean()) for side in sides]
    whole, end = difference(slice(None)), difference(slice(-last, None))
    return Axis(name, means[0], means[1], whole, means[2], means[3], end)


def _grid(amounts: Sequence[Sequence[float]], *, exact: bool) -> np.ndarray:
    """Steps that all runs have, or as many points as the shortest has, from where all have begun to where the first ends."""
    if exact:
        return np.array(sorted(set(amounts[0]).intersection(*amounts)))
    start, end = max(one[0] for one in amounts), min(one[-1] for one in amounts)
    return np.linspace(start, end, min(map(len, amounts))) if end > start else np.array([])


def _pairs(
    metrics: Sequence[str], sides: Sequence[Sequence[Sequence[Mapping[str, Any]]]], reduce: Any, names: Sequence[str]
) -> dict[str, tuple[float | None, float | None]]:
    """What `reduce` makes of each metric, for A and B; those that neither has are left out."""
    found = {}
    for name, metric in zip(names, metrics, strict=True):
        pair = tuple(reduce(metric, runs) for runs in sides)
        if pair != (None, None):
            found[name] = (pair[0], pair[1])
    return found


def _total(metric: str, runs: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    """The mean over runs of the sum over steps; of `step` the last."""
    found = [max((row["step"] for row in rows), default=0) if metric == "step" else sum(_values(metric, rows)) for rows in runs]
    return statistics.fmean(found) if found and any(found) else None


def _typical(metric: str, runs: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    """Over all steps and runs: the largest of a maximum, the smallest of a minimum, else the mean."""
    found = [value for rows in runs for value in _values(metric, rows)]
    if not found:
        return None
    return max(found) if metric.endswith("max") else min(found) if metric.endswith("min") else statistics.fmean(found)


def _values(metric: str, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(v) for row in rows if isinstance(v := row.get(metric), int | float) and math.isfinite(v)]


def _range(interval: Interval) -> str:
    return f"{interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"
