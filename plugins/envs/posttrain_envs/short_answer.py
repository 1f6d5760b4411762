"""Whether a short answer is the right one: a name, a date, a number.

    equal("The mount-Sor.", "Mount Sor")     # True
    equal("1,843.0", "1843")                 # True: numbers by value (`posttrain_envs.math_compare`)
    f1("Mount Ebb", "Mount Sor")             # 0.5

The text comparison is that of SQuAD, with Unicode forms made the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from posttrain_envs.math_compare import same

_NUMBER = re.compile(r"[-+−]?[0-9][0-9.,]*%?", re.ASCII)
_ARTICLES = frozenset(("a", "an", "the"))


def equal(answer: str, gold: str) -> bool:
    """Whether an answer is a right one: numbers by value, all else as `normal` texts."""
    return bool(same(gold, answer)) if _NUMBER.fullmatch(gold.strip()) else normal(answer) == normal(gold)


def normal(text: str) -> str:
    """A text without what makes no difference: case, punctuation, articles, spaces. If that is all of it, it stays."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(" " if unicodedata.category(c)[0] in "PZC" else c for c in plain)
    return " ".join(word for word in kept.split() if word not in _ARTICLES) or plain.strip()


def f1(answer: str, gold: str) -> float:
    """The harmonic mean of two shares: of the answer's words that are the gold's, and of the gold's that are the answer's."""
    if _NUMBER.fullmatch(gold.strip()):
        return float(equal(answer, gold))
    given, wanted = normal(answer).split(), normal(gold).split()
    return 2 * (Counter(given) & Counter(wanted)).total() / max(1, len(given) + len(wanted))
