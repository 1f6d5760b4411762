"""What a mean over prompts is worth: seeded bootstrap intervals, of one eval and of the difference of two, paired by prompt.

    interval([1.0, 0.0, 0.5, …])                    # Interval(mean, low, high): 95% of the means of resampled prompts
    paired(before, after)                           # the same of after − before, prompt by prompt
    paired(before, after).distinguishable           # False: 0 is inside, the two cannot be told apart

Prompts are resampled, not completions: completions of one prompt are not independent. Pairing takes the difficulty of the
prompts out of a difference, so it finds smaller ones than two separate intervals would.

A bootstrap of values that are all equal has no width, which says too much. Where they are all at the end of a known range (64 of
64 correct), the interval goes on as far as a mean would have to be for such a sample to be improbable: 1 − 0.025^(1/n) from it.
And fewer than six prompts that differ are never told apart: five coins fall alike in more than 5% of all cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.data.seeds import derive_seed

LEVEL = 0.95
RESAMPLES = 10_000
AT_LEAST = 6
"""Prompts that must differ before two evals are told apart: 2 · 0.5^6 is the first below 5%."""
_CELLS = 2_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its interval. prompts: how many it is over.   differing: of a difference, prompts where the two differ."""

    mean: float
    low: float
    high: float
    prompts: int
    differing: int | None = None

    @property
    def distinguishable(self) -> bool:
        """Of a difference: whether it can be told from none."""
        return not self.low <= 0 <= self.high and (self.differing is None or self.differing >= AT_LEAST)


def interval(values: Sequence[float], *, bounds: tuple[float, float] | None = None, seed: int = 0) -> Interval:
    """The mean of one value per prompt. bounds: the range that the values have by their nature, such as (0, 1) for a share.

    Raises ValueError without values.
    """
    found = _array(values)
    mean, (low, high) = float(found.mean()), _bootstrap(found, seed)
    if bounds is not None and found.min() == found.max() and found[0] in bounds:
        reach = (bounds[1] - bounds[0]) * (1 - ((1 - LEVEL) / 2) ** (1 / len(found)))
        low, high = (low, bounds[0] + reach) if found[0] == bounds[0] else (bounds[1] - reach, high)
    return Interval(mean, low, high, len(found))


def paired(before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0) -> Interval:
    """`after` − `before` over the prompts that both have, by their id. Raises ValueError when they have none in common."""
    both = [name for name in before if name in after]
    gaps = _array([after[name] - before[name] for name in both])
    low, high = _bootstrap(gaps, seed)
    return Interval(float(gaps.mean()), low, high, len(both), int(np.count_nonzero(np.abs(gaps) > 1e-12)))


def _array(values: Sequence[float]) -> np.ndarray:
    """[prompts] float64."""
    if len(values) == 0:
        raise ValueError("there is no prompt to take a mean over")
    return np.asarray(values, dtype=np.float64)


def _bootstrap(values: np.ndarray, seed: int) -> tuple[float, float]:
    """The ends of the interval: percentiles of the means of `RESAMPLES` resamples, the same for the same values and seed."""
    if values.min() == values.max():
        return float(values[0]), float(values[0])
    random = np.random.Generator(np.random.Philox(derive_seed(seed, "bootstrap", len(values))))
    rows = max(_CELLS // len(values), 1)
    means = [
        values[random.integers(0, len(values), size=(min(rows, RESAMPLES - done), len(values)))].mean(axis=1)
        for done in range(0, RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
