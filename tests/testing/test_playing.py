"""`play` drives an environment as a run does, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from posttrain.data.environment import Environment, EpisodeState
from posttrain.testing import aplay, play
from posttrain.types import Message, Reward


class Hotter(Environment):
    """Guess a number; a plain `env_response` that remembers in `custom`, and a `finish_reward`."""

    max_turns = 3

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def dataset(self, split: str) -> list[dict[str, Any]]:
        return [{"id": "7", "n": 7}]

    def format_prompt(self, task: Mapping[str, Any]) -> Any:
        return "Guess a number."

    async def start(self) -> None:
        self.calls.append("start")

    async def close(self) -> None:
        self.calls.append("close")

    def env_response(self, state: EpisodeState) -> list[Message] | None:
        state.custom["said"] = [*state.custom.get("said", ()), state.completion]
        if state.completion == str(state.task["n"]):
            return None
        return [{"role": "user", "content": "higher" if state.completion < "7" else "lower"}]

    def compute_reward(self, state: EpisodeState) -> float:
        return 1 / len(state.custom["said"]) if state.completion == "7" else 0.0

    async def finish_reward(self, state: EpisodeState, reward: Reward) -> Reward:
        return Reward(reward.total, {"turns": float(state.turn)})


ROW = {"id": "7", "n": 7}


def test_replies_are_answered_until_the_environment_ends_the_episode() -> None:
    env = Hotter()
    state, reward = play(env, ROW, ["3", "7", "9"])
    assert [m["content"] for m in state.messages] == ["Guess a number.", "3", "higher", "7"]
    assert (state.turn, state.completion, state.custom) == (2, "7", {"said": ["3", "7"]})
    assert reward == Reward(0.5, {"turns": 2.0}) and env.calls == ["start", "close"]


def test_it_ends_at_max_turns_with_the_last_answer_and_where_the_replies_end() -> None:
    state, reward = play(Hotter(), ROW, ["9"] * 5, start=False)
    assert state.turn == 3 and state.messages[-1]["content"] == "lower" and reward.total == 0
    state, _ = play(Hotter(), ROW, ["9"])
    assert state.turn == 1 and state.messages[-1]["content"] == "lower"


def test_a_player_sees_the_episode() -> None:
    def player(state: EpisodeState) -> str:
        return "5" if state.turn == 0 else {"higher": "7", "lower": "3"}[state.messages[-1]["content"]]

    assert play(Hotter(), ROW, player).reward.total == 0.5


class Odd(Hotter):
    def env_response(self, state: EpisodeState) -> Any:
        return "higher"


class Broken(Hotter):
    def env_response(self, state: EpisodeState) -> Any:
        raise KeyError("n")


@pytest.mark.parametrize(("env", "error"), [(Odd(), TypeError), (Broken(), KeyError)])
def test_what_is_wrong_with_the_environment_is_raised_and_it_is_closed(env: Hotter, error: type[Exception]) -> None:
    with pytest.raises(error):
        play(env, ROW, ["3"])
    assert env.calls == ["start", "close"]


class Offloads(Hotter):
    async def env_response(self, state: EpisodeState) -> Any:  # type: ignore[override]
        assert state.offload is not None
        await state.offload("note", "x", timeout=30)
        return None

    def note(self, state: EpisodeState, what: str) -> None:
        state.custom["said"] = [what]


def test_offload_calls_the_method_and_a_coroutine_can_play_too() -> None:
    async def both() -> Any:
        return await asyncio.gather(aplay(Offloads(), ROW, ["7"]), aplay(Hotter(), ROW, ["1", "7"]))

    one, two = asyncio.run(both())
    assert one.state.custom == {"said": ["x"]} and two.reward.total == 0.5


def test_a_message_with_calls_is_a_reply_as_it_is() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    state, _ = play(Hotter(), ROW, [{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert state.messages[1]["tool_calls"] == [call] and state.completion == ""
