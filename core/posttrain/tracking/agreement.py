"""Whether numbers that were computed twice are the same: to the bit, within rounding, or not.

    lines = agreement({"loss": 0.25, "lr": 1e-3}, {"loss": 0.25000001, "lr": 1e-3}, tolerance=FP32)
    [line.verdict for line in lines]                                    # ["within rounding", "equal to the bit"]

What is counted or comes from recorded rewards has no rounding that could differ. What comes out of the model has: a value of
the order of 1 may be off by `tolerance`, a larger one by that share of itself. What hangs on single numbers may be off by ten
times that: an extreme over tokens, and a gradient norm, which is compared by its share at any size. A share of tokens may be off
by two tokens, which lie within rounding of the clip's edge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["equal to the bit", "within rounding", "DIFFERS"]
EQUAL: Verdict = "equal to the bit"
ROUNDING: Verdict = "within rounding"
DIFFERS: Verdict = "DIFFERS"

FP32, BF16 = 1e-5, 2e-2
"""Tolerances: float32 with other shapes, orders or a wider type; and bfloat16, which keeps 8 bits."""

COMPUTED = ("loss", "grad_norm", "policy/", "dpo/")
"""Metrics that the model computes, by name or prefix; the others are exact."""
TOKENS = ("policy/clip_fraction", "policy/seq_masked_share")


@dataclass(frozen=True, slots=True)
class Line:
    """One number, twice. difference: recomputed minus recorded; None where one of them is no number."""

    name: str
    recorded: Any
    recomputed: Any
    verdict: Verdict

    @property
    def difference(self) -> float | None:
        a, b = self.recorded, self.recomputed
        return b - a if isinstance(a, int | float) and isinstance(b, int | float) else None


def agreement(recorded: Mapping[str, Any], recomputed: Mapping[str, Any], tolerance: float) -> list[Line]:
    """A line for each metric that both have, in the order of `recorded`."""
    tokens = recorded.get("tokens/trained") or 0
    names = [name for name in recorded if name in recomputed]
    return [Line(n, recorded[n], recomputed[n], verdict(n, recorded[n], recomputed[n], tolerance, tokens)) for n in names]


def verdict(name: str, a: Any, b: Any, tolerance: float, tokens: float = 0) -> Verdict:
    """Of one metric. tokens: that trained, which a share of them is counted over."""
    if same(a, b):
        return EQUAL
    if not (isinstance(a, int | float) and isinstance(b, int | float) and math.isfinite(a) and math.isfinite(b)):
        return DIFFERS
    size = max(abs(a), abs(b))
    if name not in COMPUTED and not name.startswith(COMPUTED[2:]):
        allowed = 1e-12 * size
    elif name == "grad_norm":
        allowed = 10 * tolerance * size
    else:
        allowed = (10 if name.endswith(("_min", "_max")) else 1) * tolerance * max(1.0, size)
    if name in TOKENS and tokens:
        allowed = max(allowed, 2 / tokens)
    return ROUNDING if abs(a - b) <= allowed else DIFFERS


def same(a: Any, b: Any) -> bool:
    """Equal to the bit; a number that is none equals itself, and 1 is 1.0."""
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
