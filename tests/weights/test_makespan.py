"""The simulation of an update against cases that can be told by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.weights.makespan import limit, makespan


def test_one_lane_takes_what_its_link_takes():
    assert makespan([[10, 20, 30]], 2.0) == pytest.approx(30.0) == limit([[10, 20, 30]], 2.0)


def test_lanes_that_begin_at_the_same_rank_share_its_link_to_the_end():
    assert makespan([[10] * 8] * 4, 1.0) == pytest.approx(4 * 80)


def test_lanes_that_begin_apart_do_not_meet():
    assert makespan([[10] * 8] * 4, 1.0, starts=[0, 2, 4, 6]) == pytest.approx(80) == limit([[10] * 8] * 4, 1.0)


def test_two_lanes_and_two_ranks_by_hand():
    # both share rank 0 (4 bytes each at half speed: 8 s), then rank 1 (2 bytes each: 4 s)
    assert makespan([[4, 2]] * 2, 1.0) == pytest.approx(12)
    # apart: lane 1 has rank 1 after 2 s, shares rank 0 until lane 0 has the rest of it at 6 s, and ends at 8 s
    assert makespan([[4, 2]] * 2, 1.0, starts=[0, 1]) == pytest.approx(8)


def test_fewer_lanes_at_once_come_one_after_the_other():
    assert makespan([[5, 5]] * 3, 1.0, concurrent=1) == pytest.approx(30)


def test_lanes_with_work_of_their_own_need_only_that():
    assert makespan([[8, 0], [0, 8]], 1.0) == pytest.approx(8) == limit([[8, 0], [0, 8]], 1.0)
    assert makespan([[0, 0], [3, 1]], 1.0) == pytest.approx(4)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 5))
def test_no_order_beats_the_limit_and_none_is_worse_than_one_lane_after_the_other(data, ranks, lanes):
    work = [data.draw(st.lists(st.integers(0, 50), min_size=ranks, max_size=ranks)) for _ in range(lanes)]
    starts = [data.draw(st.integers(0, ranks - 1)) for _ in range(lanes)]
    took = makespan(work, 1.0, starts=starts, concurrent=data.draw(st.integers(1, lanes)))
    assert limit(work, 1.0) - 1e-6 <= took <= sum(map(sum, work)) + 1e-6
