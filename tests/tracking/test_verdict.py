"""The statistics of a verdict: equal runs are not told apart, shifted ones are, and an interval holds the truth that often."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.tracking.verdict import LEAST_POINTS, block_length, correlation, judge, paired_interval

SERIES = st.lists(st.integers(-800, 800).map(lambda n: n / 8), min_size=LEAST_POINTS, max_size=40)


def correlated(generator: np.random.Generator, count: int, rho: float) -> np.ndarray:
    """AR(1) noise without a mean."""
    noise = generator.normal(size=count + 100)
    for place in range(1, len(noise)):
        noise[place] += rho * noise[place - 1]
    return noise[100:]


@given(st.integers(LEAST_POINTS, 60))
def test_equal_runs_are_not_distinguishable(count: int) -> None:
    assert judge(paired_interval([0.0] * count)) is None


@given(SERIES)
def test_turning_the_sides_turns_the_verdict(values: list[float]) -> None:
    forth, back = paired_interval(values), paired_interval([-value for value in values])
    assert {judge(forth), judge(back)} in ({None}, {"A", "B"})
    assert forth.mean == -back.mean and forth.low <= forth.mean <= forth.high


@given(SERIES, st.booleans())
def test_the_same_numbers_give_the_same_interval(values: list[float], ordered: bool) -> None:
    assert paired_interval(values, ordered=ordered) == paired_interval(list(values), ordered=ordered)


@given(SERIES, st.floats(0.125, 8))
def test_the_interval_scales_with_its_unit(values: list[float], unit: float) -> None:
    one, other = paired_interval(values), paired_interval([value * unit for value in values])
    for a, b in ((one.low, other.low), (one.high, other.high)):
        assert b == pytest.approx(a * unit, rel=1e-6, abs=1e-6)


@given(st.integers(1, LEAST_POINTS - 1))
def test_a_few_points_are_never_told_apart(count: int) -> None:
    assert judge(paired_interval([1.0] * count)) is None


@pytest.mark.parametrize("values", [[0.5], [0.25, 0.75]])
def test_one_or_two_points_have_no_interval(values: list[float]) -> None:
    assert (one := paired_interval(values)).mean == 0.5 and one.low == -math.inf and one.high == math.inf


def test_a_side_that_gains_steadily_is_told_from_the_other() -> None:
    gains = np.linspace(0, 0.4, 20) + np.random.default_rng(3).normal(scale=0.03, size=20)
    assert judge(paired_interval(gains)) == "B" and judge(paired_interval(gains - gains.mean())) is None


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
def test_a_shift_is_detected_and_names_who_is_higher(rho: float) -> None:
    generator = np.random.default_rng(1)
    noise = [correlated(generator, 60, rho) for _ in range(20)]
    assert [judge(paired_interval(one + 3)) for one in noise] == ["B"] * 20
    assert [judge(paired_interval(one - 3)) for one in noise] == ["A"] * 20


@pytest.mark.parametrize(
    ("count", "rho", "ordered", "least"),
    [(8, 0.0, False, 0.92), (8, 0.0, True, 0.92), (16, 0.3, True, 0.87), (40, 0.0, True, 0.93), (40, 0.6, True, 0.88)],
)
def test_the_interval_holds_the_truth_about_as_often_as_it_says(count: int, rho: float, ordered: bool, least: float) -> None:
    generator = np.random.default_rng(7)
    intervals = [paired_interval(correlated(generator, count, rho), ordered=ordered) for _ in range(200)]
    assert sum(one.low <= 0 <= one.high for one in intervals) / len(intervals) >= least


def test_blocks_grow_with_the_correlation_of_neighbours() -> None:
    lengths = [block_length(rho, 100) for rho in (0.0, 0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths) and lengths[0] == 1 and lengths[-1] == 24 and block_length(0.9, 20) == 5
    assert correlation(np.ones(10)) == 0 and 0.4 < correlation(correlated(np.random.default_rng(1), 400, 0.6)) < 0.75


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_what_is_no_number_has_no_interval(values: list[float]) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        paired_interval(values)
