"""Completions for the laws of environments: what a model may write instead of an answer, and wrong answers made of right ones."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

LONG = 100_000

HOSTILE = {
    "nothing": "",
    "spaces": " \t\r\n ",
    "a number": "7",
    "no answer": "something that answers nothing",
    "an empty tag": "<answer></answer>",
    "what is not ASCII": "日本語 ответ ٤٢ ½ ⅷ 🙂 é \u202e \ufeff",
    "a NUL": "\x00 7 \x00 <answer>\x00</answer>",
    "half a character": "\ud800 7 \udfff <answer>\ud800</answer>",
    "control characters": "\x1b[31m 7 \x07\x7f",
    "a very long number": "9" * LONG,
    "a very long answer in tags": f"<answer>{'9' * LONG}</answer>",
    "a very long box": f"\\boxed{{{'1+' * (LONG // 2)}1}}",
    "a very long text": "word " * (LONG // 5),
    "many lines": "\n" * LONG,
    "many brackets": "(" * LONG,
    "many open tags": "<answer>" * (LONG // 8),
    "many answers": "<answer>7</answer>" * (LONG // 18),
    "huge powers": "9**9**9**9 <answer>9**9**9**9</answer> \\boxed{9^{9^{9^9}}}",
    "not a number": "nan <answer>inf</answer> \\boxed{-nan}",
}
"""What a model may write, by name."""


def spoilt(gold: str) -> dict[str, str]:
    """Wrong answers made of a right one, by what was done to it. As many as can be made of it; no two are equal."""
    made = {"nothing": "", "shuffled": _shuffled(gold), "another number": _another_number(gold), "no end": gold[: len(gold) // 2]}
    found: dict[str, str] = {}
    for name, text in made.items():
        if text is not None and text.strip() != gold.strip() and text not in found.values():
            found[name] = text
    return found


def contradictions(gold: str, wrong: Iterable[str]) -> list[str]:
    """The right answer beside a wrong one, in both orders; empty where no wrong one is known."""
    bad = next(iter(wrong), None) or _another_number(gold) or (_shuffled(gold) if re.fullmatch(r"\w+", gold) else None)
    return [] if bad is None else [f"{gold}\n{bad}", f"{bad}\n{gold}"]


def _shuffled(text: str) -> str | None:
    """The same characters in another order; None when there is no other."""
    letters = list(text)
    for seed in range(10):
        random.Random(seed).shuffle(letters)
        if "".join(letters) != text:
            return "".join(letters)
    return None


def _another_number(text: str) -> str | None:
    """The last number raised by one; None without a number."""
    found = list(re.finditer(r"[0-9]+", text))
    if not found or len(found[-1][0]) > 1000:
        return None
    start, end = found[-1].span()
    return f"{text[:start]}{int(found[-1][0]) + 1}{text[end:]}"
