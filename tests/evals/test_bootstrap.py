"""Intervals: how often they hold the truth, when two evals are told apart, and what no width would claim."""

import numpy as np
import pytest

from posttrain.evals.bootstrap import AT_LEAST, interval, paired


def named(values: list[float]) -> dict[str, float]:
    return {str(i): value for i, value in enumerate(values)}


def test_an_interval_holds_the_mean_and_is_the_same_each_time() -> None:
    values = [0.0] * 30 + [1.0] * 70
    found = interval(values, bounds=(0, 1))
    assert found.mean == pytest.approx(0.7) and found.low < 0.7 < found.high and found.prompts == 100
    assert found == interval(values, bounds=(0, 1))
    many = np.linspace(0, 1, 100).tolist()
    assert interval(many) == interval(many) != interval(many, seed=1)
    assert found.high - found.low == pytest.approx(2 * 1.96 * (0.7 * 0.3 / 100) ** 0.5, rel=0.1)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    held = [(found := interval(random.random(50).tolist())).low <= 0.5 <= found.high for _ in range(100)]
    assert 88 <= sum(held) <= 100


def test_all_alike_at_the_end_of_a_range_is_no_certainty() -> None:
    right, wrong = interval([1.0] * 64, bounds=(0, 1)), interval([0.0] * 64, bounds=(0, 1))
    assert right.high == 1 and right.low == pytest.approx(0.025 ** (1 / 64)) and right.low < 0.95
    assert wrong.low == 0 and wrong.high == pytest.approx(1 - 0.025 ** (1 / 64))
    assert interval([0.5] * 8, bounds=(0, 1)).low == 0.5
    assert (found := interval([3.0] * 8)).low == found.high == 3.0  # of a reward without a known range nothing more is known


def test_a_paired_difference_finds_what_separate_intervals_do_not() -> None:
    random = np.random.default_rng(1)
    hard = random.random(60)
    before, after = named(hard.tolist()), named((hard + 0.05).tolist())
    gap = paired(before, after)
    assert gap.mean == pytest.approx(0.05) and gap.distinguishable and gap.differing == 60
    assert interval(list(before.values())).high > interval(list(after.values())).low
    assert paired(after, before).mean == pytest.approx(-0.05) and paired(after, before).distinguishable


def test_a_difference_with_0_inside_is_not_distinguishable() -> None:
    before = named([float(i % 2) for i in range(40)])
    after = before | {"0": 1.0, "1": 0.0}
    assert not paired(before, after).distinguishable and not paired(before, before).distinguishable


def test_a_handful_of_prompts_is_never_told_apart() -> None:
    few = paired(named([0.0] * (AT_LEAST - 1)), named([1.0] * (AT_LEAST - 1)))
    assert (few.low, few.high) == (1, 1) and not few.distinguishable
    assert paired(named([0.0] * AT_LEAST), named([1.0] * AT_LEAST)).distinguishable


def test_only_common_prompts_are_compared() -> None:
    found = paired({"a": 0.0, "b": 0.0}, {"b": 1.0, "c": 1.0})
    assert found.prompts == 1 and found.mean == 1
    with pytest.raises(ValueError, match="no prompt"):
        paired({"a": 0.0}, {"b": 1.0})
    with pytest.raises(ValueError, match="no prompt"):
        interval([])


def test_many_prompts_are_resampled_in_pieces() -> None:
    found = interval(np.linspace(0, 1, 5000).tolist())
    assert found.low < 0.5 < found.high and found.high - found.low < 0.02
