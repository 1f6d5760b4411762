"""Statistics over the groups of a batch step: baselines, advantages, and which groups have something to learn.

All functions take, in any order and for groups of any size, `rewards` (N floats; None, NaN or ±inf is unscorable), `groups`
(the group id of each) and `trained` (whether the row has a trained token); results are float64 arrays `[N]` in input order.
A row that is unscorable or not trained is out of its group's baseline and gets 0. Rewards that agree, and groups of one,
give exactly 0. The standard deviation is the sample one (ddof = 1) and eps = 1e-6, everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from posttrain.errors import BatchError
from posttrain.objective.options import AdvantageNorm

EPS = 1e-6
AGREEMENT = 1e-9

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Rewards = Sequence[float | None]


def agree(values: Floats) -> bool:
    """Whether these rewards are all the same: max − min ≤ 1e-9·max(1, max|r|). One value, or none, agrees with itself."""
    if values.size < 2:
        return True
    low, high = float(values.min()), float(values.max())
    return high - low <= AGREEMENT * max(1.0, high, -low)


def scored(rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> tuple[Floats, NDArray[np.bool_]]:
    """Rewards as an array (0 where they do not count) and which rows count: scorable, with a trained token."""
    if not len(rewards) == len(groups) == len(trained):
        raise BatchError(
            f"{len(rewards)} rewards, {len(groups)} groups and {len(trained)} trained flags",
            fix="give one of each per trajectory",
        )
    counts = np.array([r is not None and math.isfinite(r) and bool(t) for r, t in zip(rewards, trained, strict=True)], dtype=bool)
    values = np.array([float(r) if r is not None and c else 0.0 for r, c in zip(rewards, counts, strict=True)], dtype=np.float64)
    return values, counts


def members(groups: Sequence[Hashable], counts: NDArray[np.bool_]) -> Iterator[Indices]:
    """The rows that count, group by group, in order of first appearance. Groups without one are left out."""
    rows: dict[Hashable, list[int]] = {}
    for index in np.flatnonzero(counts).tolist():
        rows.setdefault(groups[index], []).append(index)
    for indices in rows.values():
        yield np.array(indices, dtype=np.intp)


def standard_deviation(values: Floats) -> float:
    """Sample standard deviation; scaled, so that rewards near the end of the float range do not overflow when squared."""
    deviations = values - values.mean()
    scale = float(np.abs(deviations).max())
    return scale * math.sqrt(float(np.square(deviations / scale).sum()) / (values.size - 1)) if scale > 0 else 0.0


def _per_group(
    rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool], advantage: Callable[[Floats], Floats]
) -> Floats:
    values, counts = scored(rewards, groups, trained)
    out = np.zeros(len(values))
    for rows in members(groups, counts):
        if not agree(values[rows]):
            out[rows] = advantage(values[rows])
    return out


def centred(rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
    """r − mean of the group."""
    return _per_group(rewards, groups, trained, lambda r: r - r.mean())


def leave_one_out(rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
    """r − mean of the others of the group."""
    return _per_group(rewards, groups, trained, lambda r: (r - r.mean()) * (r.size / (r.size - 1)))


def normalised(rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool], norm: AdvantageNorm = "group") -> Floats:
    """(r − mean) / (std + eps) over the group; or, with `norm="batch"`, centred per group and whitened over all rows."""
    if norm == "batch":
        return whitened(rewards, groups, trained)
    return _per_group(rewards, groups, trained, lambda r: (r - r.mean()) / (standard_deviation(r) + EPS))


def whitened(rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
    """Centred per group, then (a − mean(a)) / (std(a) + eps) over all rows that count; rows of agreeing groups stay 0."""
    _, counts = scored(rewards, groups, trained)
    advantages = centred(rewards, groups, trained)
    population = advantages[counts]
    live = informative_rows(rewards, groups, trained)
    if not live.any():
        return advantages
    return np.where(live, (advantages - population.mean()) / (standard_deviation(population) + EPS), 0.0)


def baselines(rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
    """The mean reward of each row's group, over the rows that count; 0 for rows that do not."""
    values, counts = scored(rewards, groups, trained)
    out = np.zeros(len(values))
    for rows in members(groups, counts):
        out[rows] = values[rows].mean()
    return out


def informative_rows(rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> NDArray[np.bool_]:
    """Which rows count and belong to a group whose rewards disagree."""
    values, counts = scored(rewards, groups, trained)
    out = np.zeros(len(values), dtype=bool)
    for rows in members(groups, counts):
        out[rows] = not agree(values[rows])
    return out


def best_and_worst(rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> list[tuple[int, int]]:
    """(best, worst) row of every informative group; the first row wins a tie."""
    values, counts = scored(rewards, groups, trained)
    return [
        (int(rows[values[rows].argmax()]), int(rows[values[rows].argmin()]))
        for rows in members(groups, counts)
        if not agree(values[rows])
    ]


@dataclass(frozen=True, slots=True)
class GroupStats:
    """How many groups of a batch have something to learn. `informative + uninformative` is the number of groups.

    `all_zero` and `all_one` are the uninformative groups whose rewards that count are all 0 or all 1.
    """

    all_zero: int
    all_one: int
    informative: int
    uninformative: int


def group_stats(rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> GroupStats:
    """Count the groups by kind. A group without a row that counts is uninformative, and neither all-zero nor all-one."""
    values, counts = scored(rewards, groups, trained)
    informative = all_zero = all_one = 0
    for rows in members(groups, counts):
        group = values[rows]
        if not agree(group):
            informative += 1
        elif np.abs(group).max() <= AGREEMENT:
            all_zero += 1
        elif np.abs(group - 1).max() <= AGREEMENT:
            all_one += 1
    return GroupStats(all_zero, all_one, informative, len(set(groups)) - informative)
