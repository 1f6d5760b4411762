"""Environments that take for ever, for the law of deadlines. Without pytest: reward processes import this module."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from posttrain.data.environment import Environment, EpisodeState, Prompt, RowDataset, Split

FOR_EVER = 3600.0


class SlowEnvironment(Environment):
    """`inner`, whose rewards come an hour late."""

    def __init__(self, inner: Environment) -> None:
        super().__init__()
        self.inner = inner

    def dataset(self, split: Split) -> RowDataset:
        return self.inner.dataset(split)

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        return self.inner.format_prompt(task)

    def compute_reward(self, state: EpisodeState) -> Any:
        reward = self.inner.compute_reward(state)
        time.sleep(FOR_EVER)
        return reward


class SlowAsyncEnvironment(SlowEnvironment):
    """The same on the event loop."""

    async def compute_reward(self, state: EpisodeState) -> Any:
        reward = await self.inner.compute_reward(state)  # type: ignore[misc]
        await asyncio.sleep(FOR_EVER)
        return reward
