"""The laws of an environment as tests: subclass, give one fixture.

    class TestMine(EnvContract):
        @pytest.fixture
        def env(self):
            return MyEnvironment()
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import cloudpickle
import pytest

from posttrain.data.environment import Environment, RowDataset, Split, episode, is_messages
from posttrain.rollout.scoring import score

SPLITS: tuple[Split, ...] = ("train", "test")
COMPLETIONS = ("", "7", "something that answers nothing", "\x00 🙂 <answer></answer>")


class EnvContract:
    """What every environment does; looks at up to `rows` rows of a split."""

    rows = 16

    @pytest.fixture
    def env(self) -> Environment:
        raise NotImplementedError("give the contract an environment")

    def some(self, env: Environment, split: Split) -> list[Mapping[str, Any]]:
        data = env.dataset(split)
        return [data[i] for i in range(min(len(data), self.rows))]

    def test_both_splits_hold_rows_with_ids_of_their_own(self, env: Environment) -> None:
        for split in SPLITS:
            data = env.dataset(split)
            assert isinstance(data, RowDataset) and len(data) > 0
            rows = self.some(env, split)
            assert all(isinstance(row, Mapping) for row in rows)
            ids = [str(row["id"]) for row in rows if "id" in row]
            assert len(set(ids)) == len(ids) and len(ids) in (0, len(rows))

    def test_the_same_options_give_the_same_rows(self, env: Environment) -> None:
        again = type(env)(env.options)
        for split in SPLITS:
            rows = self.some(env, split)
            assert rows == self.some(env, split) == self.some(again, split)

    def test_the_splits_share_no_prompt(self, env: Environment) -> None:
        asked = {split: {repr(env.format_prompt(row)) for row in self.some(env, split)} for split in SPLITS}
        assert not asked["train"] & asked["test"]

    def test_prompts_are_messages_text_or_ids_and_do_not_change(self, env: Environment) -> None:
        for row in self.some(env, "train"):
            prompt = env.format_prompt(row)
            assert is_messages(prompt) or (isinstance(prompt, str) and prompt) or all(isinstance(i, int) for i in prompt)
            assert prompt and env.format_prompt(row) == prompt

    def test_any_completion_has_a_reward_as_a_run_computes_it(self, env: Environment) -> None:
        row = self.some(env, "test")[0]
        for completion in COMPLETIONS:
            reward = score(env, row, completion)
            assert reward.total is not None, f"{completion!r} is unscorable: {reward.info}"

    def test_an_episode_leaves_nothing_behind(self, env: Environment) -> None:
        """The same episode is worth the same whatever was scored in between: the object is shared by all episodes."""
        if inspect.iscoroutinefunction(env.compute_reward):
            pytest.skip("scored on the event loop")
        rows = self.some(env, "train")
        first = [repr(env.compute_reward(episode(env, row, COMPLETIONS[1]))) for row in rows]
        backwards = [repr(env.compute_reward(episode(env, row, COMPLETIONS[1]))) for row in reversed(rows)]
        assert backwards[::-1] == first

    def test_it_travels_to_other_processes(self, env: Environment) -> None:
        self.some(env, "train")
        copy = cloudpickle.loads(cloudpickle.dumps(env))
        assert self.some(copy, "train") == self.some(env, "train")

    def test_it_names_a_contract_version(self, env: Environment) -> None:
        assert type(env).api == 1 and (type(env).__doc__ or "").strip()
