"""pass@k and pass^k against the exact fractions, and what there is no estimate of."""

from itertools import combinations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import ConfigError
from posttrain.evals.estimators import pass_at_k, pass_hat_k

SETTINGS = settings(derandomize=True, deadline=None)


def test_the_numbers_worked_out_by_hand() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3, abs=1e-12)
    assert pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)
    assert pass_hat_k(10, 3, 2) == pytest.approx(0.066667, abs=1e-6)


@SETTINGS
@given(st.integers(2, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n - 1))))
def test_they_are_the_binomial_fractions(case: tuple[int, int, int]) -> None:
    n, c, k = case
    assert pass_at_k(n, c, k) == pytest.approx(1 - comb(n - c, k) / comb(n, k), abs=1e-12)
    assert pass_hat_k(n, c, k) == pytest.approx(comb(c, k) / comb(n, k), abs=1e-12)


def test_they_are_what_drawing_k_of_the_completions_gives() -> None:
    answers = [True, True, False, False, False]
    draws = list(combinations(answers, 3))
    assert pass_at_k(5, 2, 3) == pytest.approx(sum(any(d) for d in draws) / len(draws))
    assert pass_hat_k(5, 4, 3) == pytest.approx(sum(all(d) for d in combinations([True] * 4 + [False], 3)) / 10)


def test_rare_successes_of_many_completions_keep_their_digits() -> None:
    assert pass_at_k(10**9, 1, 1) == pytest.approx(1e-9, rel=1e-12)
    assert pass_at_k(1000, 0, 10) == 0.0 and pass_at_k(1000, 1000, 10) == 1.0 and pass_hat_k(1000, 3, 4) == 0.0


@pytest.mark.parametrize(("n", "c", "k"), [(1, 1, 1), (4, 2, 4), (4, 2, 8)])
def test_as_many_completions_as_k_are_refused_with_the_fix(n: int, c: int, k: int) -> None:
    for estimate in (pass_at_k, pass_hat_k):
        with pytest.raises(ConfigError, match=f"pass@{k} needs more than {k}") as caught:
            estimate(n, c, k)
        assert f"samples={2 * k}" in caught.value.fix


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0)])
def test_numbers_that_mean_nothing_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ConfigError, match="means nothing"):
        pass_at_k(n, c, k)
