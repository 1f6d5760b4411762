"""Where the answer of a math completion is.

    find("so \\\\boxed{5}, no: \\\\boxed{7}", "auto")    # "7"
    find("\\\\boxed{12", "auto")                       # None: an unclosed box is no answer

Only the text after the model's thinking counts (`posttrain_envs.tags.visible`). The last of several answers of a kind is the
answer. `auto` takes a box; without one a `#### 7`, an `<answer>7</answer>`, a line `Answer: 7`, in this order.
All searches are linear in the text, and an answer longer than `LONGEST` characters is none.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from posttrain_envs.tags import last_answer

Where: TypeAlias = Literal["auto", "boxed", "hash", "tag", "line", "last_number"]
LONGEST = 500  # characters of an answer

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_BARE = re.compile(r"\s*([^\s{}$.,]+)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LINE = re.compile(r"^[ \t*_#]*(?:the |final )*answer(?: is)?[ \t*_]*:[ \t*_]*(\S[^\n]*)", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(r"[-−+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?%?|[-−+]?\.[0-9]+", re.ASCII)


def find(text: str, where: Where) -> str | None:
    """The answer in `text` (thinking already taken off), stripped; None without one."""
    if where == "auto":
        answer = _boxed(text) if _BOX.search(text) else _hash(text) or last_answer(text) or _line(text)
    else:
        answer = {"boxed": _boxed, "hash": _hash, "tag": last_answer, "line": _line, "last_number": _last_number}[where](text)
    if answer is None or not answer.strip() or len(answer) > LONGEST:
        return None
    return answer.strip()


def gold(text: str) -> str | None:
    """The final answer of a reference: what follows its `####` (GSM8K), what its last box holds (MATH), or all of it."""
    if "####" in text:
        return _hash(text)
    if _BOX.search(text):
        return _boxed(text)
    return text.strip() or None


def _boxed(text: str) -> str | None:
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    rest = text[start : start + LONGEST + 10]
    if not rest.lstrip().startswith("{"):
        bare = _BARE.match(rest)  # \boxed 7
        return bare.group(1) if bare else None
    depth, opened = 0, rest.index("{")
    for mark in _BRACE.finditer(rest):
        if mark.group() == "{":
            depth += 1
        elif mark.group() == "}":
            depth -= 1
            if depth == 0:
                return rest[opened + 1 : mark.start()]
    return None


def _hash(text: str) -> str | None:
    _, found, rest = text.rpartition("####")
    return rest.lstrip(" \t#").partition("\n")[0].strip() if found else None


def _line(text: str) -> str | None:
    found = _LINE.findall(text)
    return found[-1].strip().rstrip("*_ ") if found else None


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1] if found else None
