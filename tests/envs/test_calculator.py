"""The calculator environment: its questions, its tool, both ways to call it, and its rewards."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import plugins
from posttrain.data.environment import ChatOrText, EpisodeState, ToolChat, episode
from posttrain.errors import ConfigError, DataError
from posttrain.testing import EnvContract
from posttrain.types import Message
from posttrain_envs.calculator import Calculator, calculate
from posttrain_envs.expression import read
from posttrain_envs.sums import draw, spoken, value, written

SMALL = {"size": 40, "test_size": 10}


def made(**options: Any) -> Calculator:
    return Calculator(Calculator.Options(**{**SMALL, **options}))


def play(env: Calculator, row: Mapping[str, Any], *turns: str) -> tuple[EpisodeState, list[Message]]:
    """The state after the turns, and what the tool answered; the last turn ends the episode."""
    state, heard = episode(env, row, ""), list[Message]()
    for number, text in enumerate(turns, 1):
        state.completion, state.turn = text, number
        messages = asyncio.run(env.env_response(state))
        assert (messages is None) == (number == len(turns))
        heard += messages or []
    return state, heard


def call(expression: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'calculate', 'arguments': {'expression': expression}})}</tool_call>"


class TestTools(EnvContract):
    plugin = "calculator"
    options = SMALL

    def gold(self, row: Mapping[str, Any]) -> str:
        return f"I know it: \\boxed{{{row['answer']}}}"


class TestShort(EnvContract):
    plugin = "calculator"
    options = {**SMALL, "calls": "short", "asked": ["words"], "call_weight": 0.0}  # noqa: RUF012

    def gold(self, row: Mapping[str, Any]) -> str:
        return str(row["answer"])


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 4), st.sets(st.sampled_from("+-*"), min_size=1))
def test_a_question_is_what_the_parser_of_the_tool_reads(seed: int, terms: int, digits: int, operations: set[str]) -> None:
    tree = draw(random.Random(seed), terms=terms, digits=digits, operations=sorted(operations))
    found = read(written(tree))
    assert found is not None and found.value == value(tree) and len(found.numbers) == terms
    assert sorted(map(str, found.numbers)) == sorted(word for word in spoken(tree).split() if word.isdigit())


def test_how_questions_are_written() -> None:
    tree = ("*", ("+", 49, 97), ("-", 5, ("-", 3, 2)))
    assert written(tree) == "(49+97)*(5-(3-2))"  # type: ignore[arg-type]
    assert written(("-", ("-", 5, 3), 2)) == "5-3-2"
    assert written(("*", ("*", 2, 3), 4)) == written(("*", 2, ("*", 3, 4))) == "2*3*4"
    assert spoken(("+", 1, ("-", 5, 3))) == "the sum of 1 and what is left of 5 when 3 is taken away"


def test_the_splits_do_not_depend_on_the_size() -> None:
    small, large = made(), made(size=80)
    assert small.dataset("test") == large.dataset("test") and large.dataset("train")[:40] == small.dataset("train")
    assert not {row["id"] for row in large.dataset("train")} & {row["id"] for row in large.dataset("test")}
    with pytest.raises(DataError, match="only 81 different"):
        made(terms=(2,), digits=1, operations=("+",), test_size=100).dataset("test")
    assert len(made(terms=(2,), digits=1, operations=("+",), size=500).dataset("train")) == 71, "all that there are"


@pytest.mark.parametrize(
    ("expression", "text"),
    [("(12 + 3) * 4", "60"), ("1/3+1/3", "2/3"), ("2−3", "-1"), ("7/7", "1"), ("999999999999*9999999", "9999998999990000001")],
)
def test_the_tool_is_exact(expression: str, text: str) -> None:
    assert asyncio.run(calculate(expression)) == text


@pytest.mark.parametrize("expression", ["2**3", "x", "", "1/0", "1.5*2", "__import__('os')", "(" * 10_000, "9" * 1000])
def test_what_the_tool_does_not_compute_is_told(expression: str) -> None:
    env = made()
    row = env.dataset("test")[0]
    state, heard = play(env, row, call(expression), "\\boxed{0}")
    assert heard[0]["content"].startswith("Error: ") and len(heard[0]["content"]) < 100
    reward = env.compute_reward(state)
    assert reward.parts["tool/errors/exception"] == 1.0 and reward.parts["called"] == 0.0


def test_an_episode_with_the_tool() -> None:
    env = made(call_weight=0.25)
    row = {"id": "12*34", "question": "12*34", "answer": "408"}
    state, heard = play(env, row, f"<think>hard</think>{call('12*34')}", "It is \\boxed{408}.")
    assert heard == [{"role": "tool", "name": "calculate", "content": "408", "tool_call_id": "call00001"}]
    reward = env.compute_reward(state)
    assert reward.total == 1.0 and reward.parts["called"] == reward.parts["correct"] == reward.parts["tool/calls"] == 1.0
    assert env.compute_reward(play(env, row, "\\boxed{408}")[0]).total == 0.75
    assert env.compute_reward(play(env, row, call("12*34"), "<answer>407</answer>")[0]).total == 0.25
    assert env.compute_reward(play(env, row, call("12*"), "\\boxed{12*34}")[0]).total == 0.0
    assert env.compute_reward(episode(env, row, call("408"))).parts["answered"] == 0.0, "a call is no answer"


def test_an_episode_with_short_calls() -> None:
    env = made(calls="short", call_weight=0.5)
    row = {"id": "12*34", "question": "12*34", "answer": "408"}
    prompt = env.format_prompt(row)
    assert isinstance(prompt, ChatOrText) and not isinstance(prompt, ToolChat)
    assert prompt == [{"role": "user", "content": "12*34="}]
    state, heard = play(env, row, "<12*34>", "408")
    assert [message["content"] for message in heard] == ["408="] and env.compute_reward(state).total == 1.0
    for bad in ("<12*34", "<12*>", "<>"):
        state, heard = play(env, row, bad, "408")
        assert [message["content"] for message in heard] == ["?="] and env.compute_reward(state).total == 0.5
    assert env.compute_reward(play(env, row, "<12*34>", "<12*34>", "409")[0]).total == 0.5
    for answer in ("", "408 ", "-408", "=408", "4 08", "408<"):
        assert env.compute_reward(play(env, row, answer)[0]).parts["correct"] == float(answer.strip() == "408")


def test_the_prompt_offers_the_tool() -> None:
    env = made()
    prompt = env.format_prompt(env.dataset("test")[0])
    assert isinstance(prompt, ToolChat) and prompt.tools[0]["function"]["name"] == "calculate"
    assert env.max_turns == 4 and made(max_turns=2).max_turns == 2
    assert not env.lacks and made(call_weight=0.1).lacks == ("binary_rewards",)


@pytest.mark.parametrize("options", [
    {"operations": ["/"]}, {"operations": []}, {"terms": [1]}, {"terms": []}, {"digits": 0}, {"asked": []}, {"asked": ["song"]},
    {"size": 0}, {"max_turns": 0}, {"prompt": "no place"}, {"call_weight": 2.0}, {"calls": "long"}, {"tool_timeout_s": 0.0},
    {"sizes": 3},
])  # fmt: skip
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plugins.load("envs", "calculator", **options)
