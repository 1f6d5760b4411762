"""Any environment of the verifiers package: its rows, its prompts, its answers turn by turn, and the score of its own rubric.

    environments=[{name: verifiers, options: {env: vf-gsm8k, args: {num_train_examples: 2000}}}]

`env` is the id of an installed environment, as `vf.load_environment` takes it. Single- and multi-turn environments and those with
tools work, in versions 0.1.11 to 0.3 of the package (`verifiers.v1`, the only thing in 0.4, is another interface). The model's
turns come from this run's engine: an environment that asks a model for them itself, rewrites what was said, or scores a whole
group at once is refused. Its functions, if they are not coroutines, run in threads, so a deadline cannot stop them.

Its rubric takes a function that raises for a wrong answer of 0; here such a reward is unscorable.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import verifiers as vf

from posttrain.data.environment import Environment, EpisodeState, Prompt, Rows, Split, ToolChat
from posttrain.errors import ConfigError, PluginError
from posttrain.types import Message, Reward
from posttrain_envs.verifiers_episode import VerifiersEpisode, message_of, quietly, settle

EPISODE = "verifiers"
"""The key of `state.custom` under which an episode's state is, as verifiers keeps it."""


class Verifiers(Environment):
    """An installed environment of the verifiers package, scored by its own rubric."""

    api: ClassVar[int] = 1

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Which environment, and what it does not say itself."""

        env: str  # id of an installed environment: the module of this name has load_environment
        args: dict[str, Any] = field(default_factory=dict)  # arguments of its load_environment
        test_size: int | float | None = None  # rows or share held out if it has no eval rows; null: a twentieth, at most 256
        split_seed: int = 0  # which ones
        max_turns: int = 32  # of an environment that sets none

        def __post_init__(self) -> None:
            if not hasattr(vf, "load_environment"):
                version = getattr(vf, "__version__", "?")
                raise PluginError(
                    f"verifiers {version} has no load_environment", cause="from 0.4 on it has another interface, verifiers.v1",
                    fix="pip install 'verifiers>=0.1.11,<0.4'", where="environments[].options.env", code="verifiers-version",
                )  # fmt: skip
            size = self.test_size
            if size is not None and (size <= 0 or (isinstance(size, float) and size >= 1)):
                raise ConfigError(f"test_size={size} holds nothing out", fix="write a number of rows, or a share between 0 and 1")
            if self.max_turns < 1:
                raise ConfigError(f"max_turns={self.max_turns} must be at least 1")

    def __reduce__(self) -> Any:
        """Options alone: another process loads the environment itself."""
        return type(self), (self.options,)

    @property
    def max_turns(self) -> int:  # type: ignore[override]
        """Those of the environment, else of the options."""
        own = getattr(self.inner, "max_turns", -1)
        return int(own) if own > 0 else int(self.options.max_turns)

    @cached_property
    def inner(self) -> Any:
        """The verifiers environment. Raises ConfigError for one that cannot be loaded or trained on here."""
        name, args = self.options.env, self.options.args
        try:
            with quietly():
                made = vf.load_environment(name, **args)
        except Exception as exc:
            absent = isinstance(exc, ValueError) and isinstance(exc.__cause__, ImportError)
            raise ConfigError(
                f"verifiers cannot load the environment {name!r}", cause=f"{type(exc).__name__}: {exc.__cause__ or exc}",
                fix=f"install it (pip install {name}, or prime env install …), or correct its id" if absent
                else "correct options.args: they are the arguments of its load_environment", code="verifiers-environment",
            ) from exc  # fmt: skip
        if getattr(made, "requires_group_rollouts", False):
            raise ConfigError(
                f"the verifiers environment {name!r} scores the samples of a group together",
                cause="a reward here is that of one episode", fix="take another, or write its rule as an algorithm's advantage",
                code="verifiers-group",
            )  # fmt: skip
        settle(made)
        return made

    def dataset(self, split: Split) -> Rows:
        """The rows of the environment; its eval rows are the test split, else a share of the others."""
        rows, held_out = self._splits[split]
        if held_out is None:
            return Rows(len(rows), lambda i: _plain(rows[i], f"{split}-{i}"))
        return Rows(len(held_out), lambda i: _plain(rows[held_out[i]], str(held_out[i])))

    @cached_property
    def _splits(self) -> dict[str, tuple[Any, list[int] | None]]:
        """The dataset of each split, and which of its rows; None for all of them."""
        train = self.inner.get_dataset()
        if self.inner.build_eval_dataset() is not None:
            return {"train": (train, None), "test": (self.inner.get_eval_dataset(), None)}
        size, count = self.options.test_size, len(train)
        held_out = min(count // 20, 256) if size is None else round(size * count) if isinstance(size, float) else size
        if not 0 < held_out < count:
            raise ConfigError(f"{held_out} of the {count} rows of {self.options.env} are to be held out",
                              fix="set options.test_size to less than all of them, and at least 1")  # fmt: skip
        order = random.Random(self.options.split_seed).sample(range(count), count)
        return {"test": (train, sorted(order[:held_out])), "train": (train, sorted(order[held_out:]))}

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        prompt = task["prompt"]
        if isinstance(prompt, str):
            return prompt
        messages = [message_of(message) for message in prompt]
        tools = self._tools(task)
        return ToolChat(messages, tools) if tools else messages

    def task_key(self, task: Mapping[str, Any]) -> Any:
        """What is asked and what is right; a game's prompt does not tell."""
        return [task["prompt"], task.get("answer"), task.get("info")]

    async def env_response(self, state: EpisodeState) -> list[Message] | None:
        episode = await self._episode(state)
        return await episode.answer()

    async def compute_reward(self, state: EpisodeState) -> Reward:
        """The rubric's total; its metrics are the parts."""
        episode = await self._episode(state)
        return await episode.score()

    async def close(self) -> None:
        if "inner" in self.__dict__:
            await self.inner._teardown()

    async def _episode(self, state: EpisodeState) -> VerifiersEpisode:
        """The episode with all of the model's turns taken in."""
        episode: VerifiersEpisode | None = state.custom.get(EPISODE)
        if episode is None:
            row = {key: value for key, value in state.task.items() if key != "id"}
            episode = state.custom[EPISODE] = await VerifiersEpisode.begin(self.inner, row, self._tools(state.task))
        await episode.hear(state)
        return episode

    def _tools(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The tools of a row, else of the environment, as OpenAI-style schemas."""
        info = task.get("info")
        info = json.loads(info) if isinstance(info, str) and info else info
        told = (info or {}).get("tool_defs") if isinstance(info, Mapping) else None
        tools = [tool if isinstance(tool, Mapping) else tool.model_dump() for tool in told or self.inner.tool_defs or ()]
        keys = ("name", "description", "parameters")
        return [{"type": "function", "function": {key: tool[key] for key in keys}} for tool in tools]


def _plain(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**row, "id": name}
