"""The batch contract, with the numbers worked out by hand, and as laws."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.placement.batch import BatchPlan, check_batch, divisors


def test_worked_numbers() -> None:
    assert BatchPlan(24, 8, rollout_replicas=3, dp_world=8).smallest_batch == 24
    assert BatchPlan(64, 8, mini=8, dp_world=8).legal_micros == [8]
    assert BatchPlan(48, 8, mini=48, dp_world=8).legal_micros == [8, 16, 24, 48]
    assert BatchPlan(64, 8, mini=16).n_mini == 4 and BatchPlan(64, 8).n_mini == 1 and BatchPlan(64, 8).groups == 8


@pytest.mark.parametrize(
    ("plan", "texts"),
    [
        (BatchPlan(30, 8), ["rl.batch_per_replica: 30 is not whole groups of 8 | legal: multiples of 8, here 24 or 32"]),
        (BatchPlan(5, 8), ["rl.batch_per_replica: 5 is not whole groups of 8 | legal: multiples of 8, here 8"]),
        (
            BatchPlan(24, 4, rollout_replicas=4, dp_world=16),
            [
                "rl.batch_per_replica: 24 is not whole groups of 4 over 4 rollout replicas"
                " and does not divide over dp_world=16 policy ranks | legal: multiples of 16, here 16 or 32",
            ],
        ),
        (
            BatchPlan(32, 8, mini=12, micro=5),
            [
                "rl.mini_batch_per_replica: 12 does not divide rl.batch_per_replica=32"
                " | legal: 1, 2, 4, 8, 16, 32, or null for one step",
                "rl.micro_batch_per_replica: 5 does not divide rl.mini_batch_per_replica=12"
                " | legal: 1, 2, 3, 4, 6, 12, or null for a token budget",
            ],
        ),
        (
            BatchPlan(32, 8, micro=2, dp_world=4),
            [
                "rl.micro_batch_per_replica: 2 is not a multiple of dp_world=4 | legal: 4, 8, 16, 32, or null for a token budget",
            ],
        ),
        (
            BatchPlan(0, 0, mini=-1),
            [
                "rl.group_size: is 0, must be at least 1 | ",
                "rl.batch_per_replica: is 0, must be at least 1 | ",
                "rl.mini_batch_per_replica: is -1, must be at least 1 | ",
            ],
        ),
    ],
)
def test_violations_name_the_legal_values(plan, texts) -> None:
    assert [f"{p.path}: {p.what} | {p.fix}" for p in check_batch(plan)] == texts


@given(
    st.integers(1, 96),
    st.integers(1, 8),
    st.none() | st.integers(1, 96),
    st.none() | st.integers(1, 96),
    st.integers(1, 4),
    st.integers(1, 8),
)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_the_contract_holds_exactly_when_nothing_is_reported(batch, group, mini, micro, replicas, dp) -> None:
    whole = mini or batch
    legal = batch % (group * replicas) == 0 and batch % dp == 0
    legal = legal and (mini is None or (batch % mini == 0 and mini % dp == 0))
    legal = legal and (micro is None or (whole % micro == 0 and micro % dp == 0))
    plan = BatchPlan(batch, group, mini, micro, replicas, dp)
    assert (not check_batch(plan)) == legal
    assert not [p for p in check_batch(BatchPlan(plan.smallest_batch, group, None, None, replicas, dp))]


@given(st.integers(1, 500), st.integers(1, 9))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_divisors(number, multiple) -> None:
    assert divisors(number, multiple) == [d for d in range(1, number + 1) if number % d == 0 and d % multiple == 0]
