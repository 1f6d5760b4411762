"""The adapter `verifiers` against the real package, in the environment of `make test-adapters`."""

from __future__ import annotations

import asyncio
import atexit
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from posttrain import plugins
from posttrain.data.environment import Environment, EpisodeState, ToolChat
from posttrain.errors import ConfigError
from posttrain.testing import EnvContract, play

HERE = str(Path(__file__).parent / "verifiers_envs")
sys.path.append(HERE)


def load(kind: str = "single", **options: Any) -> Any:
    args = {"kind": kind, **options.pop("args", {})}
    return plugins.load("envs", "verifiers", env="guess-number", args=args, **options)


class TestSingle(EnvContract):
    plugin = "verifiers"
    options: ClassVar = {"env": "guess-number"}

    def gold(self, row: Mapping[str, Any]) -> str:
        return str(row["answer"])


class TestMulti(EnvContract):
    plugin = "verifiers"
    options: ClassVar = {"env": "guess-number", "args": {"kind": "multi"}}

    def gold(self, row: Mapping[str, Any]) -> str:
        return str(row["answer"])

    def replies(self, row: Mapping[str, Any]) -> list[str]:
        return ["100", "0", str(row["answer"])]


def first(env: Environment) -> Mapping[str, Any]:
    row: Mapping[str, Any] = env.dataset("train")[7]
    return row


def test_one_turn_is_asked_and_scored_as_the_environment_says() -> None:
    env = load()
    row = first(env)
    assert env.format_prompt(row) == [
        {"role": "system", "content": "Answer shortly."}, {"role": "user", "content": "What is 7+7?"},
    ]  # fmt: skip
    assert (row["id"], row["answer"], env.max_turns) == ("train-7", "14", 1)
    state, reward = play(env, row, ["14", "never said"])
    assert state.turn == 1 and reward.total == 1 and reward.parts == {"exact": 1, "length": 2, "num_turns": 1}
    assert play(env, row, ["15"]).reward.total == 0


def test_several_turns_go_as_in_its_own_rollout() -> None:
    env = load("multi")
    state, reward = play(env, first(env), ["100", "0", "14"])
    assert [m["content"] for m in state.messages[2:]] == ["100", "lower, after 1 tries", "0", "higher, after 2 tries", "14"]
    assert reward.total == 1 and reward.parts["tries"] == 3 and reward.info["stopped"] == "found"
    state, reward = play(env, first(env), ["1"] * 9)
    assert state.turn == 4 and reward.total == 0 and reward.info["stopped"] == "max_turns_reached"
    state, reward = play(env, first(env), ["what?", "14"])
    assert state.turn == 1 and reward.info["stopped"] == "has_final_env_response"
    state, reward = play(env, first(env), ["1", "2"])  # no room for another turn
    assert reward.total == 0 and reward.info["stopped"] == "cut off" and reward.parts["tries"] == 2
    assert env.inner.cleaned == 4


def test_the_rollout_of_the_package_itself_gives_the_same() -> None:
    """The same replies through `vf.Environment.run_rollout` and a client that says them."""
    from verifiers.types import Response, ResponseMessage

    from posttrain_envs.verifiers_episode import _NoModel

    class Scripted(_NoModel):
        def __init__(self, replies: list[str]) -> None:
            super().__init__()
            self.replies = iter(replies)

        async def get_response(self, *args: Any, **kwargs: Any) -> Response:
            message = ResponseMessage(content=next(self.replies), finish_reason="stop", is_truncated=False)
            return Response(id="x", created=0, model="m", message=message)

    for replies in (["100", "0", "14"], ["1", "2", "3", "4"], ["what?"], ["14"]):
        env = load("multi")
        row = first(env)

        async def theirs(env: Any = env, row: Any = row, replies: list[str] = replies) -> Any:
            return await env.inner.rollout({k: v for k, v in row.items() if k != "id"}, Scripted(replies), "m", {})

        state = asyncio.run(theirs())
        asyncio.run(env.inner.rubric.score_rollout(state))
        _, reward = play(env, row, replies)
        assert (reward.total, dict(reward.parts)) == (state["reward"], state["metrics"])
        assert reward.info["stopped"] == state["stop_condition"]


def test_tools_are_offered_called_and_counted() -> None:
    env = load("tools")
    row = first(env)
    prompt = env.format_prompt(row)
    assert isinstance(prompt, ToolChat) and [tool["function"]["name"] for tool in prompt.tools] == ["add"]
    assert prompt.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    call = '<tool_call>{"name": "add", "arguments": {"a": %s, "b": 7}}</tool_call>'
    state, reward = play(env, row, [call % 7 + call % 8, call % '"x"', "14"])
    told = [(m["role"], m["content"]) for m in state.messages[3:] if m["role"] != "assistant"]
    assert told[:2] == [("tool", "14"), ("tool", "15")] and "str" in told[2][1]
    ids = [m["tool_call_id"] for m in state.messages if m["role"] == "tool"]
    assert len(set(ids)) == 3
    assert reward.total == 1 and reward.parts["total_tool_calls"] == 3 and reward.parts["add_calls"] == 3


def test_eval_rows_are_held_out_else_a_share_of_the_others() -> None:
    env = load()
    assert (len(env.dataset("train")), len(env.dataset("test"))) == (40, 20)
    env = load(args={"evals": False}, test_size=0.25, split_seed=1)
    train, test = ([row["answer"] for row in env.dataset(split)] for split in ("train", "test"))
    assert (len(train), len(test)) == (30, 10) and not set(train) & set(test)
    assert test != [row["answer"] for row in load(args={"evals": False}, test_size=0.25).dataset("test")]


@pytest.mark.parametrize(
    ("kind", "broken", "said"),
    [
        ("single", "reward", "KeyError: 'judge'"), ("multi", "infra", "SandboxError: the sandbox is gone"),
        ("multi", "asks", "the environment asks the model itself"), ("multi", "rewrites", "rewrites what was said"),
        ("multi", "setup", "setup_state changes the prompt"),
    ],
)  # fmt: skip
def test_what_it_cannot_judge_is_no_zero(kind: str, broken: str, said: str) -> None:
    env = load(kind, args={"broken": broken})
    with pytest.raises(RuntimeError, match=said):
        play(env, first(env), ["1", "2"])


def test_in_a_run_such_an_episode_is_unscorable() -> None:
    import posttrain

    reward = posttrain.score(load(args={"broken": "reward"}), first(load()), "14")
    assert reward.total is None and reward.info["cause"] == "raised" and "judge" in reward.info["error"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": "no-such-environment"}, "install it"),
        ({"env": "guess-number", "args": {"nonsense": 1}}, "correct options.args"),
        ({"env": "guess-number", "args": {"broken": "group"}}, "an algorithm's advantage"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_says_how_to_correct_it(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plugins.load("envs", "verifiers", **options).dataset("train")
    assert said in caught.value.fix


def test_signals_and_the_end_of_the_process_stay_the_run_s(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), signal.signal, atexit.register
    load("multi").dataset("train")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), signal.signal, atexit.register) == before


def test_episodes_do_not_share_their_state() -> None:
    env = load("multi")
    one, two = (play(env, first(env), ["100", reply]).state for reply in ("14", "13"))
    assert one.custom["verifiers"].state["said"] == ["100"] and two.custom["verifiers"].state["said"] == ["100", "13"]
    assert isinstance(one, EpisodeState)
