"""When two numbers count as the same."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.tracking.agreement import BF16, DIFFERS, EQUAL, FP32, ROUNDING, agreement, verdict

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@given(NUMBERS, st.sampled_from(["loss", "reward/mean", "policy/kl"]))
def test_a_number_equals_itself(value: float, name: str) -> None:
    assert verdict(name, value, value, FP32) == EQUAL


@given(NUMBERS, NUMBERS, st.sampled_from(["loss", "grad_norm", "lr", "dpo/margin"]))
def test_the_order_does_not_matter(a: float, b: float, name: str) -> None:
    assert verdict(name, a, b, FP32) == verdict(name, b, a, FP32)


@pytest.mark.parametrize(
    ("name", "a", "b", "tolerance", "wanted"),
    [
        ("loss", 1e-7, 2e-7, FP32, ROUNDING),
        ("loss", 0.5, 0.5001, FP32, DIFFERS),
        ("loss", 0.5, 0.5001, BF16, ROUNDING),
        ("loss", None, 0.5, FP32, DIFFERS),
        ("loss", None, None, FP32, EQUAL),
        ("loss", math.nan, 0.5, FP32, DIFFERS),
        ("grad_norm", 1e-4, 1.00001e-4, FP32, ROUNDING),
        ("grad_norm", 1e-4, 1.1e-4, FP32, DIFFERS),
        ("policy/ratio_max", 1.01, 1.13, BF16, ROUNDING),
        ("policy/ratio_max", 1.01, 1.13, FP32, DIFFERS),
        ("policy/ratio_mean", 1.01, 1.13, BF16, DIFFERS),
        ("dpo/chosen_logprob", -400.0, -400.001, FP32, ROUNDING),
        ("reward/mean", 0.5, 0.500001, FP32, DIFFERS),
        ("reward/mean", 0.1 + 0.2, 0.3, FP32, ROUNDING),
        ("tokens/trained", 100, 101, BF16, DIFFERS),
        ("lr", 1e-6, 1.001e-6, BF16, DIFFERS),
        ("policy/clip_fraction", 0.01, 0.02, FP32, ROUNDING),
        ("policy/clip_fraction", 0.01, 0.05, FP32, DIFFERS),
    ],
)
def test_what_rounding_may_do(name: str, a: float, b: float, tolerance: float, wanted: str) -> None:
    assert verdict(name, a, b, tolerance, tokens=100) == wanted


def test_only_what_both_have_is_compared() -> None:
    recorded = {"step": 1, "loss": 0.5, "lr": 1.0, "tokens/trained": 9}
    lines = agreement(recorded, {"lr": 1.0, "loss": 0.25, "policy/kl": 1.0}, FP32)
    assert [(line.name, line.verdict, line.difference) for line in lines] == [("loss", DIFFERS, -0.25), ("lr", EQUAL, 0.0)]
    assert agreement({"loss": None}, {"loss": 0.5}, FP32)[0].difference is None
