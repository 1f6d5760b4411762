"""Whether one series of numbers is better than another, or they cannot be told apart. Pure arithmetic, the same on every call.

    interval = paired_interval([b - a for a, b in zip(mine, yours)])        # mean difference, 95% interval
    judge(interval)                                                          # "A", "B" or None

The interval is a bootstrap of blocks, drawn with a fixed seed: neighbouring steps of a run are alike, and single ones drawn
as if they were not would make it too narrow. What is drawn is the series beside a straight line: that one side gains on the
other is no noise. Block length follows the correlation ρ of neighbours (Politis & White 2004, for AR(1)); the interval is
widened as Student's t is against the normal, for as many points as there are blocks. Measured on
AR(1) noise it holds the truth in 95% of the cases from 8 points on at ρ = 0, in 90% to 95% with 16 points or more at ρ = 0.3,
in 86% with 16 and 94% with 40 at ρ = 0.6; with 8 points in 88% and 71%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

LEAST_POINTS = 8
"""With fewer nothing is told apart."""
LEVEL = 0.95
RESAMPLES = 4000
SEED = 0


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its interval of `LEVEL`.   points: that it is the mean of."""

    mean: float
    low: float
    high: float
    points: int


def paired_interval(differences: Sequence[float], *, ordered: bool = True) -> Interval:
    """The mean of B − A over pairs. ordered: they follow one another in a run; False: they are independent, as seeds are.

    Raises ValueError without a difference, or for one that is not finite.
    """
    values = np.asarray(differences, dtype=float)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"{len(values)} differences, all of which must be finite")
    count, mean = len(values), float(values.mean())
    if np.ptp(values) == 0 and count > 2:
        return Interval(mean, mean, mean, count)
    if count < 3:
        return Interval(mean, -math.inf, math.inf, count)
    noise = _residuals(values) if ordered else values - mean
    rho = correlation(noise) if ordered else 0.0
    block = block_length(rho, count)
    means = _block_means(noise, block)
    tail, fitted = (1 - LEVEL) / 2, 2 if ordered else 1
    low, high = np.quantile(means, [tail, 1 - tail])
    wider = _student(1 - tail, count / block - fitted) / NormalDist().inv_cdf(1 - tail) * math.sqrt(count / (count - fitted))
    if ordered and (spread := float(means.std())):  # blocks of a short series miss a part of a long correlation
        wider *= max(1.0, math.sqrt((1 + rho) / (1 - rho) * float(noise.var()) / count) / spread)
    return Interval(mean, mean + float(low) * wider, mean + float(high) * wider, count)


def judge(interval: Interval) -> Literal["A", "B"] | None:
    """Who is higher by the differences B − A; None: not distinguishable, always so below `LEAST_POINTS` points."""
    if interval.points < LEAST_POINTS or interval.low <= 0 <= interval.high:
        return None
    return "B" if interval.mean > 0 else "A"


def correlation(values: Sequence[float] | np.ndarray) -> float:
    """Of neighbours, from 0 to 0.9. What is not noise is corrected by (2 + 4ρ) / n, as it is low beside a fitted line."""
    values = np.asarray(values, dtype=float)
    centred = values - values.mean()
    power, count = float(centred @ centred), len(values)
    rho = float(centred[1:] @ centred[:-1]) / power if power else 0.0
    return min(max(rho + ((2 + 4 * rho) / count if rho > 0.5 / math.sqrt(count) else 0.0), 0.0), 0.9)


def block_length(rho: float, count: int) -> int:
    """Neighbours of `count` to draw together where they correlate by `rho`: 1 for white noise, at most a quarter of them."""
    wanted = (6 * rho**2 / (1 - rho**2) ** 2 * count) ** (1 / 3)
    return int(min(max(math.ceil(wanted), 1), max(count // 4, 1)))


def _residuals(values: np.ndarray) -> np.ndarray:
    """What is left of a series beside a straight line: that one side gains on the other is no noise."""
    place = np.arange(len(values)) - (len(values) - 1) / 2
    centred = values - values.mean()
    return np.asarray(centred - place * (centred @ place) / (place @ place))


def _block_means(values: np.ndarray, block: int) -> np.ndarray:
    """Means of resamples made of blocks, which go round the end."""
    count = len(values)
    starts = np.random.default_rng(SEED).integers(0, count, size=(RESAMPLES, math.ceil(count / block)))
    places = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :count] % count
    return values[places].mean(axis=1)


def _student(probability: float, freedom: float) -> float:
    """A quantile of Student's t, by the expansion around the normal's (Abramowitz & Stegun 26.7.5); good from 3 on."""
    z, f = NormalDist().inv_cdf(probability), max(freedom, 1.0)
    return (
        z
        + (z**3 + z) / (4 * f)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3)
    )
