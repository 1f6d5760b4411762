"""Preference pairs that come with the data: which of two completions of one prompt is the better one. Nothing is sampled.

A run with `rollout.engine=none` takes its completions from an environment of this kind. The smallest one:

    class Politer(PreferenceEnvironment):
        '''Prefer the polite answer.'''

        def dataset(self, split):
            return [{"id": "1", "ask": "Salt?", "polite": "Here you are.", "rude": "No."}]

        def pair(self, task):
            return Pair(task["ask"], task["polite"], task["rude"])
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from posttrain.data.environment import Environment, EpisodeState, Prompt
from posttrain.types import Reward

Truncate: TypeAlias = Literal["keep_end", "keep_start", "drop"]
"""What a pair over the length limit loses: the start of its prompt, the end of its completions, or the pair goes as a whole."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt (messages or a text) and two completions of it, as text."""

    prompt: Prompt
    chosen: str
    rejected: str

    @property
    def useless(self) -> str:
        """Why there is nothing to learn from the pair: `identical`, `empty`; "" for a pair that teaches."""
        if self.chosen == self.rejected:
            return "identical"
        return "" if self.chosen.strip() and self.rejected.strip() else "empty"


@dataclass(frozen=True, slots=True)
class PairIds:
    """A pair as token ids. Both completions follow the same `prompt_ids`; each ends with its stop token unless it was cut.

    fits  False: no cut that is allowed makes it fit; the ids are then whole
    """

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    chosen_cut: bool = False
    rejected_cut: bool = False
    fits: bool = True


class PreferenceEnvironment(Environment):
    """Base of environments whose rows are pairs."""

    needs: tuple[str, ...] = ("no_sampling",)
    provides: tuple[str, ...] = ("pairs", "binary_rewards")

    @property
    def truncate(self) -> Truncate:
        """What a pair over `rollout.max_model_len` loses."""
        return "keep_end"

    @abstractmethod
    def pair(self, task: Mapping[str, Any]) -> Pair:
        """The pair of a dataset row. Raises ValueError, saying why, for a row that is none."""

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        return self.pair(task).prompt

    def compute_reward(self, state: EpisodeState) -> Reward:
        """1 for the chosen completion, letter by letter, else 0."""
        return Reward(float(state.completion.strip() == self.pair(state.task).chosen.strip()))


def fit(
    prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int], *, max_len: int, truncate: Truncate, bos: int = 0
) -> PairIds:
    """The pair cut to `max_len` tokens per row, the same prompt in both rows.

    keep_end cuts the start of the prompt, after its first `bos` ids, and leaves at least one of the others. keep_start cuts the
    ends of the completions, and leaves them different. What cannot be cut so does not fit.
    """
    prompt, chosen, rejected = list(prompt), list(chosen), list(rejected)
    room = max_len - max(len(chosen), len(rejected))
    if len(prompt) <= room:
        return PairIds(prompt, chosen, rejected)
    if truncate == "keep_end" and room > bos:
        return PairIds(prompt[:bos] + prompt[len(prompt) - room + bos :], chosen, rejected)
    space = max(max_len - len(prompt), 0)
    if truncate == "keep_start" and space and chosen[:space] != rejected[:space]:
        return PairIds(prompt, chosen[:space], rejected[:space], len(chosen) > space, len(rejected) > space)
    return PairIds(prompt, chosen, rejected, fits=False)
