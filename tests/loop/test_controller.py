"""The controller's own arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from posttrain.loop.cohort import Round
from posttrain.loop.controller import seconds_of


def rounds(*times: tuple[float, float, float], step: int = 0) -> list[Round]:
    return [Round(step, [], [], *one) for one in times]


def test_rounds_of_a_cohort_ran_one_after_the_other() -> None:
    assert seconds_of(rounds((10.0, 2.0, 3.0), (14.0, 1.0, 1.5), step=4)) == {"time/rollout_s": 4.5, "time/generate_s": 3.0}


def test_prompts_side_by_side_are_measured_from_where_the_batch_before_ended() -> None:
    flights = rounds((10.0, 4.0, 5.0), (11.0, 5.0, 8.0))
    assert seconds_of(flights, 0.0) == {"time/rollout_s": 9.0, "time/generate_s": 6.0}
    assert seconds_of(flights, 14.0) == {"time/rollout_s": 5.0, "time/generate_s": 2.0}
    assert seconds_of(flights, 17.0) == {"time/rollout_s": 2.0, "time/generate_s": 0.0}


def test_what_a_checkpoint_brought_along_took_no_time() -> None:
    assert seconds_of(rounds((0.0, 0.0, 0.0)), 70.0) == {"time/rollout_s": 0.0, "time/generate_s": 0.0}
    assert seconds_of(rounds((0.0, 0.0, 0.0), (90.0, 1.0, 2.0)))["time/rollout_s"] == 2.0


TIMES = st.tuples(st.floats(1, 100), st.floats(0, 10), st.floats(0, 10)).map(lambda t: (t[0], t[1], t[1] + t[2]))


@given(st.lists(TIMES, min_size=1, max_size=20), st.integers(1, 5))
def test_the_times_of_all_batches_are_at_most_the_time_that_passed(times: list[tuple[float, float, float]], size: int) -> None:
    flights = sorted(rounds(*times), key=lambda one: one.ended)
    ended, total = 0.0, 0.0
    for place in range(0, len(flights), size):
        batch = flights[place : place + size]
        found = seconds_of(batch, ended)
        assert 0 <= found["time/generate_s"] <= found["time/rollout_s"] + 1e-9
        total += found["time/rollout_s"]
        ended = max([ended, *(one.ended for one in batch)])
    first = min(one.began for one in flights)
    assert total <= ended - first + 1e-9 or total == approx(ended - first)
