"""Sums of small numbers with one right answer: `12+7=` → `19`.

Rows are drawn without replacement from all problems of the given size, the test split first, so the splits share no problem.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.data.environment import Environment, EpisodeState, Prompt, Rows, Split
from posttrain.types import Message, Reward

_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


class Arithmetic(Environment):
    """Exact arithmetic on small numbers; a tiny character-level model can learn it on a laptop."""

    api: ClassVar[int] = 1
    provides = ("binary_rewards",)

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """What is asked, and how many problems of it."""

        operations: tuple[str, ...] = ("+",)  # any of + - *
        digits: int = 2  # operands are 0 … 10^digits - 1
        largest: int | None = None  # operands are 0 … largest instead
        size: int = 10_000  # problems of the train split, at most what is left after the test split
        test_size: int = 256  # problems of the test split, at most a fifth of all
        seed: int = 0  # which problems, in which order
        style: Literal["text", "chat"] = "text"  # the bare problem as text, or a chat message

        def __post_init__(self) -> None:
            unknown = [op for op in self.operations if op not in _OPERATIONS]
            if unknown or not self.operations:
                raise ValueError(f"operations={self.operations!r}: choose from {', '.join(_OPERATIONS)}")
            if not 1 <= self.digits <= 6:
                raise ValueError(f"digits={self.digits} must be 1 to 6")
            if self.largest is not None and self.largest < 1:
                raise ValueError(f"largest={self.largest} must be at least 1")
            if self.size < 1 or self.test_size < 1:
                raise ValueError(f"size={self.size} and test_size={self.test_size} must be at least 1")

        @property
        def operands(self) -> int:
            """How many values an operand takes."""
            return 10**self.digits if self.largest is None else self.largest + 1

    def dataset(self, split: Split) -> Rows:
        """Rows `{"id", "problem", "answer"}`; the id names the problem, so it is the same under every size."""
        o = self.options
        everything = len(o.operations) * o.operands**2
        test = min(o.test_size, everything // 5)
        train = min(o.size, everything - test)
        numbers = random.Random(o.seed).sample(range(everything), test + train)
        chosen = numbers[:test] if split == "test" else numbers[test:]
        return Rows(len(chosen), lambda i: self._row(chosen[i]))

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        text = f"{task['problem']}="
        if self.options.style == "text":
            return text
        return [Message(role="user", content=text)]

    def compute_reward(self, state: EpisodeState) -> Reward:
        """1 for the exact answer, else 0; `format` says whether it was a number at all."""
        given = state.completion.strip()
        number = re.fullmatch(r"-?\d+", given) is not None
        return Reward(float(given == state.task["answer"]), {"format": float(number)}, {"answer": state.task["answer"]})

    def _row(self, number: int) -> dict[str, Any]:
        base = self.options.operands
        number, b = divmod(number, base)
        kind, a = divmod(number, base)
        operation = self.options.operations[kind]
        problem = f"{a}{operation}{b}"
        return {"id": problem, "problem": problem, "answer": str(_OPERATIONS[operation](a, b))}
