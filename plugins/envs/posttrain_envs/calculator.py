"""Arithmetic that is hard to do in one's head, with a tool that does it: `calculate(expression)`.

    environments=[{name: calculator}]                                                # two to four numbers of three digits
    environments=[{name: calculator, options: {calls: short, digits: 2, terms: [2]}}]   # for a tiny model

The answer is that of the last turn: the last `\\boxed{…}` or `<answer>…</answer>` after the model's thinking
(`posttrain_envs.math_answer`). The reward is 1 for the right one, also when it was found without the tool; `call_weight` moves a
share of it to having called the tool well, which teaches a model to call before its answers get right.

With `calls: short` nothing is explained and everything is as short as it can be, for models of single characters: the question
is `12*34=`, a turn `<12*34>` is a call, its result is `408=`, and a turn that is a number is the answer. `tool_format` has no
meaning then. What makes this learnable: the answer stands in the turn before, so copying it is all that is left to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.data.environment import EpisodeState, Prompt, Split, Style, user_prompt
from posttrain.data.tool_calls import ToolCall
from posttrain.data.tool_environment import Outcome, ToolEnvironment, tool_metrics
from posttrain.errors import ConfigError, DataError
from posttrain.types import Message, Reward
from posttrain_envs.expression import read
from posttrain_envs.math_answer import find
from posttrain_envs.math_compare import same
from posttrain_envs.sums import OPERATIONS, draw, spoken, value, written
from posttrain_envs.tags import visible

PROMPT = "What is {question}? Use the calculator, then put the final answer in \\boxed{}."
_TRIES = 2000  # draws in a row that give no new question, after which there are no more


async def calculate(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: whole numbers with + - * / and brackets, such as (12 + 3) * 4
    """
    found = read(expression)
    if found is None:
        raise ValueError("not an expression of whole numbers, + - * / and brackets")
    if found.value is None:
        raise ZeroDivisionError("division by zero")
    return str(found.value)


class Calculator(ToolEnvironment):
    """Arithmetic questions that are hard without the calculator that comes with them."""

    api: ClassVar[int] = 1
    provides = ("binary_rewards",)
    tools: Sequence[Callable[..., Any]] = (calculate,)

    @dataclass(frozen=True, kw_only=True)
    class Options(ToolEnvironment.Options):
        """What is asked, how calls are written, and what a call is worth."""

        terms: tuple[int, ...] = (2, 3, 4)  # how many numbers a question has: one of these
        digits: int = 3  # of a number, at most
        operations: tuple[str, ...] = OPERATIONS  # any of + - *
        asked: tuple[Literal["signs", "words"], ...] = ("signs",)  # how a question is put: one of these
        size: int = 10_000  # questions of the train split
        test_size: int = 256  # questions of the test split
        seed: int = 0  # which questions
        calls: Literal["tools", "short"] = "tools"  # tool calls proper, or <12*34> for a tiny model
        system: str | None = None  # system message
        prompt: str | None = None  # user message around {question}; null: one that names the calculator, or 12*34=
        style: Style = "auto"  # auto: chat messages where the model has a chat template, else text; for short calls
        call_weight: float = 0.0  # share of the reward for a call without an error, 0 to 1
        max_turns: int = 4  # turns of the model

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.operations or any(one not in OPERATIONS for one in self.operations):
                raise ConfigError(f"operations={self.operations!r}: choose from {' '.join(OPERATIONS)}")
            if not self.terms or not all(2 <= n <= 8 for n in self.terms) or not 1 <= self.digits <= 9:
                raise ConfigError(f"terms={self.terms!r} must be 2 to 8 each, digits={self.digits} must be 1 to 9")
            if not self.asked or min(self.size, self.test_size, self.max_turns) < 1:
                raise ConfigError("asked must name a way to ask, and size, test_size and max_turns must be at least 1")
            if self.prompt is not None and "{question}" not in self.prompt:
                raise ConfigError(f"prompt={self.prompt!r} does not hold the question", fix="write {question} where it belongs")
            if not 0 <= self.call_weight <= 1:
                raise ConfigError(f"call_weight={self.call_weight} must be 0 to 1")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.max_turns = self.options.max_turns
        if self.options.call_weight:
            self.lacks = ("binary_rewards",)

    def dataset(self, split: Split) -> list[dict[str, Any]]:
        """Rows `{"id", "question", "answer"}`. The first questions are the test split, so it does not depend on `size`."""
        o, rows, misses = self.options, dict[str, dict[str, Any]](), 0
        rng, wanted = random.Random(o.seed), o.test_size + (o.size if split == "train" else 0)
        while len(rows) < wanted and misses < _TRIES:
            row = _question(rng, o)
            misses = misses + 1 if row["id"] in rows else 0
            rows.setdefault(row["id"], row)
        made = list(rows.values())
        found = made[: o.test_size] if split == "test" else made[o.test_size :]
        if len(made) < o.test_size or not found:
            raise DataError(
                f"calculator has only {len(made)} different question(s) with these options, of which {o.test_size} are to be the "
                "test split", cause=f"terms={o.terms}, digits={o.digits}, operations={o.operations}",
                fix="raise one of them, or lower test_size", code="calculator-too-few",
            )  # fmt: skip
        return found

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        o = self.options
        short = o.calls == "short"
        text = (o.prompt or ("{question}=" if short else PROMPT)).replace("{question}", task["question"])
        prompt = user_prompt(text, system=o.system, style=o.style)
        return prompt if short else self.with_tools(prompt)

    def parse_tool_calls(self, state: EpisodeState) -> list[ToolCall]:
        if self.options.calls == "tools":
            return super().parse_tool_calls(state)
        text = state.completion.strip()
        if not text.startswith("<"):
            return []
        problem = "" if text.endswith(">") else "there is no > at its end"
        return [ToolCall(f"call{state.turn:05d}", "calculate", {"expression": text[1:-1]}, text, problem)]

    def tool_message(self, state: EpisodeState, call: ToolCall, outcome: Outcome) -> Message:
        message = super().tool_message(state, call, outcome)
        if self.options.calls == "short":
            return Message(role="user", content="?=" if outcome.error else f"{outcome.text}=")
        return message

    def compute_reward(self, state: EpisodeState) -> Reward:
        """Parts: `correct`; `answered`; `called` (the tool, at least once without an error); the metrics of the tools."""
        answer, gold, metrics = self._answer(state.completion), state.task["answer"], tool_metrics(state)
        correct = answer is not None and bool(same(gold, answer))
        called = metrics["tool/calls"] > metrics["tool/errors"]
        total = (1 - self.options.call_weight) * correct + self.options.call_weight * called
        parts = {"correct": float(correct), "answered": float(answer is not None), "called": float(called), **metrics}
        return Reward(total, parts, {"extracted": answer, "answer": gold})

    def _answer(self, completion: str) -> str | None:
        if self.options.calls == "tools":
            closed = not self.options.thinking or "</think>" in completion
            return find(visible(completion), "auto") if closed else None
        answer = completion.strip()
        return answer if answer.lstrip("-").isdecimal() and len(answer) < 100 else None


def _question(rng: random.Random, options: Any) -> dict[str, Any]:
    tree = draw(rng, terms=rng.choice(options.terms), digits=options.digits, operations=options.operations)
    text = written(tree) if rng.choice(options.asked) == "signs" else spoken(tree)
    return {"id": text, "question": text, "answer": str(value(tree))}
