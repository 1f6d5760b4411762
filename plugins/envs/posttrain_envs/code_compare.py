"""Whether what a program gave is what was expected: texts by four stages, values by structure. Pure and linear in the input.

    same_text("1.50 2\\n", "1.5000001 2")      # "numeric"
    same_text("1 2", "1 3")                    # None
    same_value([1, {"a": 0.5}], [1, {"a": 0.50001}])      # True

Texts: `exact`, then `lines` (without the blanks at their ends, and empty lines at the end), then `tokens` (split at blanks), then
`numeric` (the same number of tokens, each the same or two numbers within the tolerance). Two whole numbers are the same only when
they are equal, however large: a tolerance would make 1000000 and 1000000.0004 one, which is meant, but never 7 and 8.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, TypeAlias

Stage: TypeAlias = Literal["exact", "lines", "tokens", "numeric"]

TOLERANCE = 1e-3
RELATIVE = 1e-9
"""Of large numbers: what floating point loses, and no more."""
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
_WHOLE = re.compile(r"([+-]?)0*([0-9]+)", re.ASCII)
_LONGEST = 400
_DEEPEST = 100


def same_text(expected: str, given: str, tolerance: float = TOLERANCE) -> Stage | None:
    """The first stage by which two outputs are the same; None when they differ."""
    if expected == given:
        return "exact"
    if _lines(expected) == _lines(given):
        return "lines"
    wanted, found = expected.split(), given.split()
    if wanted == found:
        return "tokens"
    if len(wanted) != len(found) or not wanted:
        return None
    return "numeric" if all(_same_token(a, b, tolerance) for a, b in zip(wanted, found, strict=True)) else None


def same_value(expected: Any, given: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether two values of JSON are the same: lists and objects by their parts, numbers within the tolerance, texts exactly.

    True is not 1, and 1 is 1.0. What is nested deeper than 100 levels is not the same as anything.
    """
    return _same(expected, given, tolerance, 0)


def _same(expected: Any, given: Any, tolerance: float, depth: int) -> bool:
    if depth > _DEEPEST:
        return False
    if isinstance(expected, bool) or isinstance(given, bool):
        return expected is given
    if isinstance(expected, int | float) and isinstance(given, int | float):
        return _same_number(expected, given, tolerance)
    if isinstance(expected, list) and isinstance(given, list):
        return len(expected) == len(given) and all(
            _same(a, b, tolerance, depth + 1) for a, b in zip(expected, given, strict=True)
        )
    if isinstance(expected, dict) and isinstance(given, dict):
        return expected.keys() == given.keys() and all(_same(expected[k], given[k], tolerance, depth + 1) for k in expected)
    return type(expected) is type(given) and bool(expected == given)


def _same_number(expected: float, given: float, tolerance: float) -> bool:
    if isinstance(expected, int) and isinstance(given, int):
        return expected == given
    try:
        wanted, found = float(expected), float(given)
    except OverflowError:  # an int beyond all floats
        return False
    if not (math.isfinite(wanted) and math.isfinite(found)):
        return wanted == found or (math.isnan(wanted) and math.isnan(found))
    return abs(wanted - found) <= max(tolerance, RELATIVE * abs(wanted))


def _same_token(expected: str, given: str, tolerance: float) -> bool:
    if expected == given:
        return True
    whole = _WHOLE.fullmatch(expected), _WHOLE.fullmatch(given)
    if whole[0] and whole[1]:
        return _normal(whole[0]) == _normal(whole[1])
    if max(len(expected), len(given)) > _LONGEST or not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(given)):
        return False
    return _same_number(float(expected), float(given), tolerance)


def _normal(number: re.Match[str]) -> tuple[bool, str]:
    return number[1] == "-" and number[2] != "0", number[2]


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
