"""The learning-rate curve: its shapes, its ends, and that it needs no state."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.schema import LRSchedulerConfig
from posttrain.policy.schedule import lr_factor

SHAPES = ("constant", "linear", "cosine")


def curve(name: str, total: int, warmup: int = 0, floor: float = 0.0) -> list[float]:
    config = LRSchedulerConfig(name=name, warmup_steps=warmup, min_lr_ratio=floor)  # type: ignore[arg-type]
    return [lr_factor(config, update, total) for update in range(total + 1)]


def test_cosine_is_half_way_between_peak_and_floor_in_the_middle():
    values = curve("cosine", 110, warmup=10, floor=0.1)
    assert values[60] == pytest.approx(0.55, abs=1e-12)
    assert values[10] == 1.0
    assert values[110] == pytest.approx(0.1, abs=1e-12)


def test_linear_falls_evenly_to_its_floor():
    assert curve("linear", 4, floor=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("name", SHAPES)
def test_the_first_update_of_a_warm_up_moves_and_the_last_is_at_the_peak(name):
    assert curve(name, 20, warmup=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_none_ignores_the_warm_up():
    assert curve("none", 6, warmup=3, floor=0.5) == [1.0] * 7


@pytest.mark.parametrize(("name", "end"), [("constant", 1.0), ("linear", 0.3), ("cosine", 0.3)])
def test_the_curve_stays_put_after_its_end(name, end):
    config = LRSchedulerConfig(name=name, warmup_steps=2, min_lr_ratio=0.3)
    assert [lr_factor(config, update, 8) for update in (8, 9, 500)] == pytest.approx([end] * 3)


def test_a_warm_up_as_long_as_the_run_divides_by_nothing():
    assert curve("cosine", 3, warmup=3) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(name=st.sampled_from(SHAPES), total=st.integers(1, 60), warmup=st.integers(0, 70), floor=st.floats(0, 1))
def test_the_factor_rises_to_one_then_never_rises_nor_leaves_its_floor(name, total, warmup, floor):
    values = curve(name, total, warmup, floor)
    rising, falling = values[:warmup], values[warmup:]
    assert all(0 < a < b <= 1 for a, b in pairwise(rising))
    assert all(a >= b - 1e-12 for a, b in pairwise(falling))
    assert all(floor - 1e-12 <= value <= 1 for value in falling)
