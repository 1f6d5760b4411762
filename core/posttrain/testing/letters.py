"""The environment of `tiny_run`: one that a model with random weights gets right about every other time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.data.environment import Environment, EpisodeState, Prompt, Rows, Split
from posttrain.types import Reward

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Letters(Environment):
    """Name a letter of the first half of the alphabet."""

    def dataset(self, split: Split) -> Rows:
        start = 0 if split == "train" else 500
        return Rows(500 if split == "train" else 50, lambda i: {"id": str(start + i), "number": start + i})

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        return f"letter{task['number']}"

    def compute_reward(self, state: EpisodeState) -> Reward:
        first = state.completion.strip()[:1]
        return Reward(float(first != "" and first in ALPHABET[: len(ALPHABET) // 2]))
