"""One function and one file: a reward of one's own over data of one's own, without a class.

    # my_rewards.py
    def score(completion, row):
        return float(completion.strip() == row["answer"])

    environments=[{name: function, options: {reward: my_rewards.py:score, data: my.jsonl, prompt_column: question}}]

The reward is a function, sync or async, or a list of them with names and weights (`posttrain_envs.reward_functions`); the data
is whatever `posttrain.data.source` reads. Plain functions are scored in the reward processes, coroutine functions wait on the
event loop, and a list may hold both.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

from posttrain.data.environment import Environment, EpisodeState, Prompt, RowDataset, Split, is_messages, user_prompt
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import ConfigError, DataError
from posttrain.plugins.objects import PREFIX
from posttrain.types import Message, Reward
from posttrain_envs.reward_functions import RewardFunction, canonical, combine, load_functions


class Function(Environment):
    """Your own reward function over your own data: a function, a file and the names of its columns."""

    api: ClassVar[int] = 1

    @dataclass(frozen=True, kw_only=True)
    class Options(DataOptions):
        """What an answer is worth, where the rows come from, and how they are asked."""

        reward: Any = None  # file.py:function, called with (completion, row); or a list of {name, reward, weight}
        prompt_column: str = "prompt"  # the column that is asked: text, or chat messages as they are
        answer_column: str | None = None  # the column that rewards find as row["answer"]
        id_column: str | None = None  # the column that names a row for ever; null: its own `id`, else its place
        prompt: str | None = None  # what to ask, with columns in braces: "{question}\nAnswer:"; null: the prompt column
        system: str | None = None  # system message
        style: Literal["auto", "chat", "text"] = "auto"  # auto: chat messages where the model has a chat template, else text

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.data is None:
                raise ConfigError("data is missing", cause="there is nothing to ask", fix="data=my.jsonl")
            object.__setattr__(self, "reward", canonical(self.reward))
            load_functions(self.reward)
            _template_columns(self.prompt)

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._functions = load_functions(self.options.reward)
        self.metrics = {f.name: f.shown for f in self._functions if f.name}
        self._rows: dict[str, RowDataset] = {}

    def __reduce__(self) -> Any:
        """Options, and those plain functions that another process cannot import."""
        objects = {f.ref: f for f in self._functions if f.ref.startswith(PREFIX) and not f.waits}
        return _revived, (type(self), self.options, objects)

    def dataset(self, split: Split) -> RowDataset:
        """The rows of the source, all columns kept, with `id` and, when `answer_column` is set, `answer`. Raises DataError."""
        if split not in self._rows:
            self._rows[split] = rows = self._open(split)
            if len(rows):
                self.format_prompt(rows[0])
                for function in self._functions:
                    function.check_columns(rows[0])
        return self._rows[split]

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        """The template filled in, else the prompt column; as messages, as text, or as whichever the model can read."""
        o = self.options
        asked = task.get(o.prompt_column) if o.prompt is None else _fill(o.prompt, task)
        if is_messages(asked):
            return self._conversation(asked)
        if isinstance(asked, list) and asked and all(isinstance(i, int) for i in asked):
            return asked  # token ids, as they are
        if asked is None or isinstance(asked, (Mapping, list)) or not str(asked).strip():
            found = "is empty" if asked in (None, "", []) or isinstance(asked, str) else f"holds a {type(asked).__name__}"
            raise DataError(
                f"the prompt of row {task.get('id')!r} {found}" if o.prompt or o.prompt_column in task
                else f"row {task.get('id')!r} has no column {o.prompt_column!r}",
                cause=f"its columns are {', '.join(map(str, task))}",
                fix="set prompt_column to the column that is asked, or prompt to a text with columns in braces: '{question}'",
                code="no-prompt",
            )
        return user_prompt(str(asked), system=o.system, style=o.style)

    def compute_reward(self, state: EpisodeState) -> Reward | float | Any:
        """What the plain functions give; `finish_reward` adds what the coroutine functions do (`posttrain.score` runs both)."""
        if len(self._functions) == 1 and not self._functions[0].name:
            return Reward(0.0) if self._functions[0].waits else self._functions[0](state)
        return combine({f.name: (f.weight, f(state)) for f in self._functions if not f.waits})

    async def finish_reward(self, state: EpisodeState, reward: Reward) -> Reward | float | Any:
        """`reward` with the values of the coroutine functions, which wait at the same time."""
        waiting = [f for f in self._functions if f.waits]
        if not waiting:
            return reward
        values = await asyncio.gather(*(f(state) for f in waiting))
        if not waiting[0].name:
            return values[0]
        return combine({f.name: (f.weight, value) for f, value in zip(waiting, values, strict=True)}, reward)

    @cached_property
    def _source(self) -> DataOptions:
        """The options of the data, with the named columns among them; a column that gets a second name keeps its own."""
        o = self.options
        columns = dict(o.columns)
        for key, column in (("answer", o.answer_column), ("id", o.id_column)):
            if column is not None:
                columns[key] = columns.setdefault(column, column)
        return DataOptions(**{field.name: getattr(o, field.name) for field in fields(DataOptions)} | {"columns": columns})

    def _open(self, split: Split) -> RowDataset:
        o = self.options
        asked = _template_columns(o.prompt) if o.prompt is not None else [o.prompt_column]
        try:
            return open_rows(self._source, split, required=asked, same=asked)
        except DataError as exc:
            options = {o.answer_column: "answer_column", o.id_column: "id_column", asked[0] if asked else "": "prompt_column"}
            for column, option in options.items():
                if exc.code == "missing-column" and column and o.prompt is None and repr(column) in exc.message:
                    exc.fix = f"set {option} to one of them, or leave such rows out with filter"
            raise

    def _conversation(self, messages: Any) -> Prompt:
        o = self.options
        if o.style == "text":
            raise DataError(
                f"the column {o.prompt_column!r} holds chat messages, and style is text",
                fix="set style=chat, or prompt to a text with columns in braces", code="no-prompt",
            )
        own = [Message(**message) for message in messages]
        return own if not o.system or own[0].get("role") == "system" else [Message(role="system", content=o.system), *own]


def _revived(cls: type[Function], options: Any, objects: Mapping[str, RewardFunction]) -> Function:
    """The environment in another process: what can be imported is imported there, the other plain functions have travelled."""
    env = cls.__new__(cls)
    env.options, env._rows = options, {}
    env._functions = load_functions(options.reward, objects)
    return env


def _template_columns(prompt: str | None) -> list[str]:
    """The columns that a template names. Raises ConfigError for one that cannot be read."""
    try:
        found = [name for _, name, _, _ in string.Formatter().parse(prompt or "") if name is not None]
    except ValueError as exc:
        raise ConfigError(f"prompt={prompt!r} cannot be read: {exc}", fix="write {{ and }} for braces that stay") from exc
    bad = next((name for name in found if not name or set(name) & set("[]")), None)
    if bad is not None:
        raise ConfigError(f"prompt={prompt!r} names no column in {{{bad}}}", fix="write {question}; {{ is a brace that stays")
    if prompt is not None and not found:
        raise ConfigError(f"prompt={prompt!r} names no column", cause="every row asks the same", fix="write {question} into it")
    return list(dict.fromkeys(found))


def _fill(prompt: str, row: Mapping[str, Any]) -> str:
    parts = []
    for text, name, _, _ in string.Formatter().parse(prompt):
        if name is not None and row[name] is None:
            raise DataError(
                f"the column {name!r} of row {row.get('id')!r} is null, and the prompt asks it", cause=f"prompt={prompt!r}",
                fix="write a value, or leave such rows out with filter", code="no-prompt",
            )
        parts += [text, "" if name is None else str(row[name])]
    return "".join(parts)
