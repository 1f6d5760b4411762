"""Any task of the reasoning-gym package by name, made offline and scored by the task's own scorer.

    environments=[{name: reasoning_gym, options: {task: basic_arithmetic, config: {max_terms: 3}, answer: last_line}}]

Rows come from one seeded dataset: the first `test_size` are the test split, later ones train, and a train row whose question
is in the test split is replaced. (The package seeds row `i` with `seed + i`, so two datasets with near seeds share rows.)
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

import reasoning_gym
from reasoning_gym.factory import DATASETS

from posttrain.data.environment import Environment, EpisodeState, Prompt, Rows, Split
from posttrain.errors import ConfigError, DataError
from posttrain.types import Message, Reward
from posttrain_envs.tags import last_answer

_TRIES = 8


class ReasoningGym(Environment):
    """Over a hundred verifiable reasoning tasks: arithmetic, algebra, logic, games, graphs, code, …"""

    api: ClassVar[int] = 1

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Which task, how it is asked, and where the answer is in the completion."""

        task: str  # name in reasoning-gym, such as basic_arithmetic
        config: dict[str, Any] = field(default_factory=dict)  # the task's own settings
        size: int = 2000  # problems of the train split
        test_size: int = 128  # problems of the test split
        seed: int = 0  # which problems
        system: str | None = None  # system message
        prompt: str = "{question}"  # user message; {question} is the task's text
        examples: int = 0  # solved problems shown before the question, as earlier turns; none of them is in a split
        answer: Literal["tag", "last_line", "whole"] = "tag"  # <answer>…</answer>, the last line, or all of it
        style: Literal["chat", "text"] = "chat"  # through the chat template, or as plain text

        def __post_init__(self) -> None:
            if "{question}" not in self.prompt:
                raise ConfigError(f"prompt={self.prompt!r} does not hold the question", fix="write {question} where it belongs")
            if self.size < 1 or self.test_size < 1 or self.examples < 0:
                raise ConfigError(
                    f"size={self.size}, test_size={self.test_size} and examples={self.examples} must be at least 1, 1 and 0"
                )
            _make(self.task, self.config, size=1, seed=self.seed)

    def __reduce__(self) -> Any:
        """Options alone: the worker builds the task itself."""
        return type(self), (self.options,)

    def dataset(self, split: Split) -> Rows:
        """Rows `{"id", "question", "answer", "metadata"}`, made on demand."""
        o = self.options
        if split == "test":
            return Rows(o.test_size, self._row)
        return Rows(o.size, lambda i: self._train_row(o.test_size + i))

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        o = self.options
        messages: list[Message] = [{"role": "system", "content": o.system}] if o.system else []
        for example in self._examples:
            messages.append({"role": "user", "content": o.prompt.replace("{question}", example["question"])})
            messages.append({"role": "assistant", "content": str(example["answer"])})
        messages.append({"role": "user", "content": o.prompt.replace("{question}", task["question"])})
        return messages if o.style == "chat" else "\n".join(str(message["content"]) for message in messages)

    def compute_reward(self, state: EpisodeState) -> Reward:
        """The task's own score in [0, 1]; `answered` says whether an answer was found."""
        answer = extract(state.completion, self.options.answer)
        score = float(self._task.score_answer(answer, dict(state.task)))
        return Reward(score, {"answered": float(answer is not None)}, {"extracted": answer, "answer": str(state.task["answer"])})

    @cached_property
    def _task(self) -> Any:
        o = self.options
        return _make(o.task, o.config, size=(o.test_size + o.size) * _TRIES + o.examples, seed=o.seed)

    @cached_property
    def _examples(self) -> list[Mapping[str, Any]]:
        """Problems past every index that a split may use."""
        first = (self.options.test_size + self.options.size) * _TRIES
        return [self._row(first + i) for i in range(self.options.examples)]

    @cached_property
    def _test_questions(self) -> frozenset[str]:
        return frozenset(self._row(i)["question"] for i in range(self.options.test_size))

    def _row(self, index: int) -> dict[str, Any]:
        return {"id": f"{self.options.task}-{index}", **self._task[index]}

    def _train_row(self, index: int) -> dict[str, Any]:
        stride = self.options.test_size + self.options.size
        for attempt in range(_TRIES):
            row = self._row(index + attempt * stride)
            if row["question"] not in self._test_questions:
                return row
        raise DataError(
            f"the reasoning-gym task {self.options.task!r} has too few different questions with this config",
            cause=f"{_TRIES} tries in a row for train row {index} gave questions of the test split",
            fix="make the task larger in options.config, or lower options.test_size",
        )


def extract(completion: str, where: Literal["tag", "last_line", "whole"]) -> str | None:
    """The answer in a completion; None when there is none."""
    if where == "tag":
        return last_answer(completion)
    lines = [line.strip() for line in completion.strip().splitlines() if line.strip()]
    if not lines:
        return None
    return lines[-1] if where == "last_line" else completion.strip()


def _make(task: str, config: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """The package's dataset. Raises ConfigError for an unknown task or settings that it refuses."""
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        raise ConfigError(
            f"reasoning-gym has no task {task!r}", cause=f"it has {len(DATASETS)} tasks",
            fix=f"did you mean {', '.join(near)}?" if near else "see reasoning_gym.factory.DATASETS", code="reasoning-gym-task",
        )
    known = {f.name for f in fields(DATASETS[task][1])} - {"size", "seed"}
    unknown = sorted(set(config) - known)
    if unknown:
        raise ConfigError(
            f"the reasoning-gym task {task!r} has no setting {', '.join(map(repr, unknown))}",
            cause=f"its settings: {', '.join(sorted(known))}",
            fix="correct options.config (size and seed are options of their own)", code="reasoning-gym-config",
        )
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **config)
    except (AssertionError, ValueError, TypeError) as exc:
        raise ConfigError(
            f"the reasoning-gym task {task!r} refuses its settings {dict(config)}", cause=f"{type(exc).__name__}: {exc}",
            fix="correct options.config", code="reasoning-gym-config",
        ) from exc
