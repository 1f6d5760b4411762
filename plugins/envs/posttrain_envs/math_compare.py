"""Whether two answers are the same, as far as a few microseconds can tell: text, then exact numbers.

    same("72", "$72.00")          # True
    same("-5", "5")               # False
    same("x^2", "x \\\\cdot x")     # None: only algebra can tell

Numbers are compared as fractions, never as text or floats. `1,800` is 1800, but `1,2` is not 12. Signs count. A unit behind a
number is left off (`72 apples`, `5\\\\text{ cm}`), a word that is a factor is not (`72 million`, `2 pi`); `50%` is 50 or 0.5,
whichever the other side says. Decimals agree when they differ by no more than 1e-6 (relative below 1), so `0.333333` is `1/3`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_WRAPPED = re.compile(
    r"\${1,2}(.*)(?<!\\)\${1,2}|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*|\\(?:text|mathrm|mathbf|textbf){([^{}]*)}", re.DOTALL
)
_DROPPED = re.compile(r"\\[!,;:]|\\(?:left|right)(?![a-z])|\\displaystyle|\^\\circ|\^{\\circ}|\^?°|\\degree")
_SPELLINGS = (("−", "-"), ("–", "-"), ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\$", "$"), ("\\%", "%"), ("{,}", ","),
              ("\\ ", " "), ("~", " "))
_SPACED = re.compile(r"\s*([-+*/=^_,<>])\s*|([({\[])\s+|\s+([)}\]])")
_ASSIGNED = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*=\s*(?=[^=]*$)", re.ASCII)
_WORDS = re.compile(r"[A-Za-z][A-Za-z .'-]*", re.ASCII)
_NUMBER = re.compile(
    r"""(?P<sign>[-+]?)\s*[$€£]?\s*(?P<inner>[-+]?)
    (?: \\frac\s*(?:{(?P<a>[-+]?[0-9]+)}|(?P<a1>[0-9]))\s*(?:{(?P<b>[0-9]+)}|(?P<b1>[0-9]))
      | (?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)
        (?:[eE](?P<exponent>[-+]?[0-9]{1,3})|\s*/\s*(?P<over>[0-9]+))?
    )(?P<unit>.*)""",
    re.ASCII | re.DOTALL | re.VERBOSE,
)
_UNIT = re.compile(
    r"""(?:\s*(?P<percent>%)
      | \s*\\(?:text|mathrm|textbf){(?P<latex>[^{}]*)}(?:\^\{?[23]\}?)?
      | \s+(?P<words>[A-Za-z][A-Za-z .'-]*))?""",
    re.ASCII | re.VERBOSE,
)
_FACTORS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NO_UNITS = frozenset(
    ("pi", "e", "i", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "mod", "theta", "alpha", "beta", "infinity", "infty",
     "plus", "minus", "times", "over", "and", "or", "to", "x", "y", "z", "a", "b", "c", "n", "k", "half", "halves", "third",
     "thirds", "quarter", "quarters", "power", "squared", "cubed", "root", "choose")
)
_LONGEST_NUMBER = 200
_CLOSE = Fraction(1, 10**6)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written: exactly, in decimals, or in percent."""

    value: Fraction
    decimal: bool = False
    percent: bool = False


def same(gold: str, answer: str) -> bool | None:
    """Whether `answer` is `gold`; None when this cannot tell. Never raises."""
    left, right = normal(gold), normal(answer)
    if left == right:
        return bool(left)
    a, b = number(left), number(right)
    if a and b:
        return _close(a, b)
    if a and not _may_be_a_number(right):
        return False
    if _WORDS.fullmatch(left) and _WORDS.fullmatch(right) and (len(left) == 1 or len(left) > 3):
        return left.casefold() == right.casefold()
    return None


def normal(text: str) -> str:
    """One spelling: no wrapping, no LaTeX spacing, no degree sign, no end of sentence, `x =` left off."""
    text = text.strip()
    for _ in range(4):
        found = _WRAPPED.fullmatch(text)
        if not found:
            break
        text = next(group for group in found.groups() if group is not None).strip()
    for old, new in _SPELLINGS:
        text = text.replace(old, new)
    text = " ".join(_DROPPED.sub("", text).split()).rstrip(" .,;") if len(text) > 1 else text
    text = _ASSIGNED.sub("", text)
    choice = re.fullmatch(r"\(([A-Z])\)", text)
    return choice.group(1) if choice else _SPACED.sub(r"\1\2\3", text)


def number(text: str) -> Number | None:
    """The number that a normal text is, unit and all; None when it is not plainly one."""
    found = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if found is None or (found["sign"] and found["inner"]):
        return None
    factor, percent = _unit(found["unit"])
    if factor is None:
        return None
    top = found["a"] or found["a1"] or (found["number"] or "").replace(",", "")
    bottom = int(found["b"] or found["b1"] or found["over"] or 1)
    if bottom == 0 or ("." in top and found["over"]):
        return None
    value = Fraction(top) / bottom * factor * Fraction(10) ** int(found["exponent"] or 0)
    negative = "-" in (found["sign"], found["inner"])
    return Number(-value if negative else value, decimal="." in top or bool(found["exponent"]), percent=percent)


def _unit(rest: str) -> tuple[int | None, bool]:
    """The factor that the words behind a number mean (None: not to be told), and whether they are a percent sign."""
    found = _UNIT.fullmatch(rest)
    if found is None:
        return None, False
    words = (found["latex"] or found["words"] or "").casefold().replace(".", "").split()
    if words in (["percent"], ["per", "cent"]) or found["percent"]:
        return 1, True
    if words and words[0] in _FACTORS:
        factor = _FACTORS[words[0]]
        return (None, False) if _NO_UNITS & set(words[1:]) or set(words[1:]) & set(_FACTORS) else (factor, False)
    if (_NO_UNITS | set(_FACTORS)) & set(words) or (found["words"] and words and len(words[0]) == 1):
        return None, False
    return 1, False


def _close(a: Number, b: Number) -> bool:
    if a.percent != b.percent:
        whole = Number(a.value, a.decimal), Number(b.value, b.decimal)
        share = tuple(Number(n.value / 100, True) if n.percent else n for n in (a, b))
        return _close(*whole) or _close(*share)
    if a.value == b.value:
        return True
    if not (a.decimal or b.decimal) or (a.value.denominator == 1 and b.value.denominator == 1):
        return False
    size = max(abs(a.value), abs(b.value))
    return abs(a.value - b.value) <= _CLOSE * min(Fraction(1), size)


def _may_be_a_number(text: str) -> bool:
    """Whether an answer to a numeric question could still be right: it has a digit or a LaTeX command in it."""
    return bool(re.search(r"[0-9\\]", text, re.ASCII)) or "π" in text
