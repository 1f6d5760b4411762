"""Countdown: make a target out of some numbers, each used exactly once, with + - * / and brackets.

    environments=[{name: countdown}]                                                 # problems made from a seed
    environments=[{name: countdown, options: {data: Jiayi-Pan/Countdown-Tasks-3to4}}]  # rows of your own: nums, target

The answer is the last `<answer>…</answer>` after the model's thinking; without one, the last line that is an expression (with an
operator in it, if there is more than one number). It may end in `= 24`, which must then be the target. It is read by our own
parser and computed in fractions (`posttrain_envs.expression`), never by `eval`.

The reward is 1 for a right answer and 0 for any other; `format_weight` moves a share of it to the format: `<answer>` tags around
an expression, and every tag closed. (TinyZero gives 0.1 for the format alone: `format_weight: 0.1`. Telescope adds
{0, 0.5, 1} for the format and {0, 1} for the equation; its total of 2 is `format_weight: 0.5` here, without the half.)
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.data.environment import Environment, EpisodeState, Prompt, RowDataset, Split, user_prompt
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import DataError
from posttrain.types import Reward
from posttrain_envs.expression import LONGEST, Expression, read
from posttrain_envs.idle import refuse_idle
from posttrain_envs.tags import last_answer, visible, well_formed

PROMPT = (
    "Use the numbers {nums} to make {target}. Use each number exactly once, with + - * / and brackets. "
    "Think first, then write the expression between <answer> and </answer>, like <answer>(1 + 2) * 3</answer>."
)
_OPERATIONS = ("+", "-", "*", "/")
_OF_MADE = {"numbers", "largest", "largest_target", "operations", "size", "seed"}
_TRIES = 5000  # draws in a row that give no new problem, after which there are no more
_TOO_LARGE = 10**6  # of a value on the way to a made target
_LINE = re.compile(r"[-+*/()=0-9×÷−·\s`$]+", re.ASCII)


class Countdown(Environment):
    """Make a target out of given numbers; the answer is an expression, computed exactly."""

    api: ClassVar[int] = 1
    provides = ("binary_rewards",)

    @dataclass(frozen=True, kw_only=True)
    class Options(DataOptions):
        """Where the problems come from (`data`, or else a seed), how they are asked, and what the format is worth."""

        numbers: tuple[int, ...] = (3, 4)  # how many numbers a made problem has: one of these
        largest: int = 99  # of the numbers of a made problem
        largest_target: int = 99  # of a made problem
        operations: tuple[str, ...] = _OPERATIONS  # with which made problems are solvable; answers may use all four
        size: int = 10_000  # made problems of the train split; test_size (default 256) are made beside them
        seed: int = 0  # which problems are made
        system: str | None = None  # system message
        prompt: str = PROMPT  # user message; {nums} and {target} are filled in
        style: Literal["auto", "chat", "text"] = "auto"  # auto: chat messages where the model has a chat template, else text
        format_weight: float = 0.0  # share of the reward for the format, 0 to 1

        def __post_init__(self) -> None:
            super().__post_init__()
            refuse_idle(self, made=_OF_MADE, what="problems")
            unknown = [op for op in self.operations if op not in _OPERATIONS]
            if unknown or not self.operations:
                raise ValueError(f"operations={self.operations!r}: choose from {' '.join(_OPERATIONS)}")
            if not self.numbers or not all(1 <= n <= 8 for n in self.numbers):
                raise ValueError(f"numbers={self.numbers!r}: problems have 1 to 8 numbers")
            if self.largest < 1 or self.largest_target < 1 or self.size < 1:
                raise ValueError("largest, largest_target and size must be at least 1")
            if not 0 <= self.format_weight <= 1:
                raise ValueError(f"format_weight={self.format_weight} must be 0 to 1")
            for place in ("{nums}", "{target}"):
                if place not in self.prompt:
                    raise ValueError(f"prompt={self.prompt!r} does not hold {place}")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        if self.options.format_weight:
            self.lacks = ("binary_rewards",)

    def dataset(self, split: Split) -> RowDataset:
        """Rows `{"id", "nums", "target"}`."""
        if self.options.data is not None:
            return open_rows(self.options, split, required=("nums", "target"), same=("nums", "target"))
        return _make(self.options, split)

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        nums, target = _problem(task)
        text = self.options.prompt.replace("{nums}", ", ".join(map(str, nums))).replace("{target}", str(target))
        return user_prompt(text, system=self.options.system, style=self.options.style)

    def compute_reward(self, state: EpisodeState) -> Reward:
        """Parts: `correct`, and `format`, which is 1 for an expression between answer tags with all tags closed."""
        nums, target = _problem(state.task)
        text = visible(state.completion)
        tagged = last_answer(text)
        answer, claimed = _read(tagged) if tagged is not None else _last_line(text, len(nums))
        right = answer is not None and answer.value == target and claimed in (None, target)
        correct = float(right and answer is not None and sorted(answer.numbers) == sorted(nums))
        form = float(tagged is not None and answer is not None and well_formed(state.completion))
        weight = self.options.format_weight
        total = (1 - weight) * correct + weight * form
        value = None if answer is None or answer.value is None else str(answer.value)
        return Reward(total, {"correct": correct, "format": form}, {"value": value, "answer": str(target)})


def _problem(task: Mapping[str, Any]) -> tuple[list[int], int]:
    """Raises DataError for a row whose numbers or target are not whole numbers."""
    try:
        nums, target = list(task["nums"]), task["target"]
        if not nums or not all(int(n) == n for n in [*nums, target]):
            raise ValueError("not whole numbers")
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise DataError(
            f"a countdown row must hold `nums`, a list of whole numbers, and `target`, a whole number: {dict(task)!r:.200}",
            cause=f"{type(exc).__name__}: {exc}",
            fix="name the columns with `columns: {nums: …, target: …}`",
            code="countdown-row",
        ) from exc
    return [int(n) for n in nums], int(target)


def _read(text: str) -> tuple[Expression | None, int | None]:
    """The expression, and what it says behind a `=`; no expression if that is not a whole number."""
    text = text.strip()
    if len(text) > LONGEST:
        return None, None
    for mark in ("**", "`", "$"):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)].strip()
    left, equals, right = text.partition("=")
    if not equals:
        return read(text), None
    claim = read(right)
    if claim is None or claim.operators or claim.value is None:
        return None, None
    return read(left), int(claim.value)


def _last_line(text: str, count: int) -> tuple[Expression | None, int | None]:
    for line in reversed(text.splitlines()):
        if line and len(line) <= LONGEST and _LINE.fullmatch(line):
            answer, claimed = _read(line)
            if answer is not None and (answer.operators or count == 1):
                return answer, claimed
    return None, None


def _make(options: Any, split: Split) -> list[dict[str, Any]]:
    """Different problems; the first are the test split, so it does not depend on `size`. Raises DataError for too few."""
    share = 256 if options.test_size is None else options.test_size
    test = round(share * options.size) if isinstance(share, float) else share
    wanted = test if split == "test" else test + options.size
    rng, rows, misses = random.Random(options.seed), dict[str, dict[str, Any]](), 0
    while len(rows) < wanted and misses < _TRIES:
        row = _draw(rng, options)
        if row is None or row["id"] in rows:
            misses += 1
        else:
            rows[row["id"]], misses = row, 0
    made = list(rows.values())[slice(None, test) if split == "test" else slice(test, None)]
    if not made or len(rows) < test:
        raise DataError(
            f"countdown has only {len(rows)} different problem(s) with these options, of which {test} are to be the test split",
            cause=f"numbers={options.numbers}, largest={options.largest}, largest_target={options.largest_target}",
            fix="raise one of them, or lower test_size",
            code="countdown-too-few",
        )
    return made


def _draw(rng: random.Random, options: Any) -> dict[str, Any] | None:
    """A solvable problem, by joining two values at a time until one is left; None when that is no good target."""
    uniform = rng.random  # several times faster than randrange
    nums = [1 + int(uniform() * options.largest) for _ in range(options.numbers[int(uniform() * len(options.numbers))])]
    values = list(nums)
    while len(values) > 1:
        a, b = values.pop(int(uniform() * len(values))), values.pop(int(uniform() * len(values)))
        values.append(_join(uniform(), a, b, options.operations))
        if abs(values[-1]) > _TOO_LARGE:
            return None
    target = values[0]
    if not 1 <= target <= options.largest_target or (target in nums and len(nums) > 1):
        return None
    return {"id": f"{target}={'.'.join(map(str, sorted(nums)))}", "nums": nums, "target": target}


def _join(chance: float, a: int, b: int, operations: Sequence[str]) -> int:
    """A whole result of two values; a division that leaves a rest is no choice. Without a choice it is too large to be used."""
    possible = [op for op in operations if op != "/" or (b != 0 and a % b == 0)]
    if not possible:
        return _TOO_LARGE + 1
    operation = possible[int(chance * len(possible))]
    if operation == "+":
        return a + b
    if operation == "-":
        return a - b
    return a * b if operation == "*" else a // b
