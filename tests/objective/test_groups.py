"""Baselines, advantages and group counts: the cases of the field, and the laws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.errors import BatchError
from posttrain.objective import GroupStats, build_objective, group_stats
from posttrain.objective.groups import EPS, baselines, informative_rows, standard_deviation

NAMES = ("grpo", "rloo", "dr_grpo", "reinforce_pp", "cispo", "gspo", "sapo")
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)

Rewards = Sequence[float | None]


OBJECTIVES = {name: build_objective(name) for name in NAMES}


def advantages(name: str, rewards: Rewards, groups: Sequence[object], trained: Sequence[bool] | None = None) -> np.ndarray:
    return OBJECTIVES[name].advantages(rewards, groups, trained)


def near(values: Sequence[float], tolerance: float = 1e-5) -> object:
    return pytest.approx(values, abs=tolerance)


def test_case_adv_1_uneven_groups() -> None:
    rewards, groups = [5, 5, 5, 1, 0, 9], ["a", "a", "a", "b", "b", "c"]
    assert advantages("dr_grpo", rewards, groups) == near([0, 0, 0, 0.5, -0.5, 0])
    assert advantages("grpo", rewards, groups) == near([0, 0, 0, 0.70711, -0.70711, 0])
    assert advantages("rloo", rewards, groups) == near([0, 0, 0, 1, -1, 0])
    for name in NAMES:
        assert [float(a) for a in advantages(name, rewards, groups)][:3] == [0.0, 0.0, 0.0]
        assert float(advantages(name, rewards, groups)[5]) == 0.0


def test_case_adv_3_a_row_without_trained_tokens_leaves_the_baseline() -> None:
    rewards, groups, trained = [1, 0, 0, 5], [0] * 4, [True, True, True, False]
    assert advantages("dr_grpo", rewards, groups, trained) == near([0.66667, -0.33333, -0.33333, 0])
    assert advantages("grpo", rewards, groups, trained) == near([1.15470, -0.57735, -0.57735, 0])
    assert baselines(rewards, groups, trained) == near([1 / 3, 1 / 3, 1 / 3, 0])


def test_case_adv_5_leave_one_out_and_the_bound_of_ddof_1() -> None:
    rewards = [0, 0, 1, 0, 0]
    assert advantages("rloo", rewards, [0] * 5) == near([-0.25, -0.25, 1, -0.25, -0.25])
    assert advantages("grpo", rewards, [0] * 5) == near([-0.447214, -0.447214, 1.788854, -0.447214, -0.447214])


@PROPERTY
@given(st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=5))
def test_case_adv_5_normalised_advantages_are_bounded(rewards: list[float]) -> None:
    assert np.abs(advantages("grpo", rewards, [0] * 5)).max() <= 4 / math.sqrt(5) + 1e-12


def test_case_adv_7_negative_and_huge_rewards() -> None:
    root = math.sqrt(3) / 2
    for rewards in ([1, 0, 0, 1], [-5, -7, -7, -5], [1, -1, -1, 1]):
        assert advantages("grpo", rewards, [0] * 4) == near([root, -root, -root, root])
    for huge in (1e30, 1e200):  # the square of the second is beyond float64
        assert advantages("grpo", [huge, 0, 0, 0], [0] * 4) == near([1.5, -0.5, -0.5, -0.5])
        assert advantages("grpo", [-huge, 0, 0, 0], [0] * 4) == near([-1.5, 0.5, 0.5, 0.5])
    assert advantages("grpo", [math.inf, 1, 0, 0], [0] * 4) == near([0, 1.15470, -0.57735, -0.57735])


@pytest.mark.parametrize("unscorable", [None, math.nan, math.inf, -math.inf])
def test_case_samp_1_an_unscorable_reward_leaves_the_baseline(unscorable: float | None) -> None:
    rewards = [1, 0, unscorable, 1]
    assert advantages("dr_grpo", rewards, [0] * 4) == near([0.33333, -0.66667, 0, 0.33333])
    assert advantages("grpo", rewards, [0] * 4) == near([0.57735, -1.15470, 0, 0.57735])
    for name in NAMES:
        assert list(advantages(name, [unscorable] * 4, [0] * 4)) == [0.0] * 4


def test_worked_numbers_of_four_rewards() -> None:
    rewards = [1, 0, 0, 1]
    assert advantages("grpo", rewards, [0] * 4) == near([0.866024, -0.866024, -0.866024, 0.866024])
    assert advantages("rloo", rewards, [0] * 4) == near([0.666667, -0.666667, -0.666667, 0.666667])
    assert advantages("dr_grpo", [1, 0, 0, 0], [0] * 4) == near([0.75, -0.25, -0.25, -0.25])
    assert advantages("rloo", [1, 0, 0, 0], [0] * 4) == near([1, -1 / 3, -1 / 3, -1 / 3])
    two_groups = advantages("reinforce_pp", [1, 0, 3, 0], ["a", "a", "b", "b"])  # centred: ±0.5 and ±1.5
    assert two_groups == near([0.387298, -0.387298, 1.161894, -1.161894])
    grpo = build_objective("grpo", advantage_norm="batch")
    assert grpo.advantages([1, 0, 3, 0], ["a", "a", "b", "b"]) == near(list(two_groups))


@pytest.mark.parametrize("name", NAMES)
def test_rewards_that_agree_give_exactly_zero(name: str) -> None:
    rewards = [0.1 + 0.2, 0.3, 0.3 + 1e-10, 1e12, 1e12 + 1.0, 1.0, 0.0]
    tied = advantages(name, rewards, ["a", "a", "a", "b", "b", "c", "c"])
    assert list(tied[:5]) == [0.0] * 5
    assert np.abs(tied[5:]).min() > 0.1


rewards_and_groups = st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3), st.booleans()), min_size=1, max_size=20)


@PROPERTY
@given(rewards_and_groups, st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", NAMES)
def test_advantages_move_with_their_rows(name: str, rows: list[tuple[float, int, bool]], rng) -> None:
    order = list(range(len(rows)))
    rng.shuffle(order)
    plain = advantages(name, *map(list, zip(*rows, strict=True)))
    moved = advantages(name, *map(list, zip(*(rows[i] for i in order), strict=True)))
    assert moved == pytest.approx(plain[order], abs=1e-12, rel=1e-9)


@PROPERTY
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=8), st.integers(-50, 50), st.integers(1, 9))
@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_normalised_advantages_are_affine_invariant(name: str, rewards: list[int], shift: int, scale: int) -> None:
    """Exactly, once the eps beside the standard deviation is taken out."""
    assume(len(set(rewards)) > 1)
    moved = [scale * r + shift for r in rewards]

    def without_eps(values: list[int]) -> np.ndarray:
        std = standard_deviation(np.array(values, dtype=np.float64))
        return advantages(name, values, [0] * len(values)) * (std + EPS) / std

    assert without_eps(moved) == near(without_eps(rewards), 1e-12)
    assert advantages(name, moved, [0] * len(rewards)) == near(advantages(name, rewards, [0] * len(rewards)), 1e-4)


@PROPERTY
@given(rewards_and_groups)
@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_a_group_does_not_see_the_others(name: str, rows: list[tuple[float, int, bool]]) -> None:
    whole = advantages(name, *map(list, zip(*rows, strict=True)))
    for group in {row[1] for row in rows}:
        own = [i for i, row in enumerate(rows) if row[1] == group]
        alone = advantages(name, *map(list, zip(*(rows[i] for i in own), strict=True)))
        assert list(whole[own]) == list(alone)


def test_group_stats() -> None:
    rewards = [0, 0, 1, 1, 0, 1, 0.5, 0.5, None, None, 0, 1, 0, 0]
    groups = ["zero"] * 2 + ["one"] * 2 + ["live"] * 2 + ["half"] * 2 + ["faults"] * 2 + ["cut"] * 2 + ["far"] * 2
    trained = [True] * 11 + [False] + [True] * 2
    assert group_stats(rewards, groups, trained) == GroupStats(all_zero=3, all_one=1, informative=1, uninformative=6)
    assert list(informative_rows(rewards, groups, trained)) == [False] * 4 + [True] * 2 + [False] * 8
    assert group_stats([], [], []) == GroupStats(0, 0, 0, 0)


def test_lengths_must_agree() -> None:
    with pytest.raises(BatchError, match="2 rewards, 1 groups and 2 trained flags"):
        advantages("grpo", [1, 0], ["a"])
