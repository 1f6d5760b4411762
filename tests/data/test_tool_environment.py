"""Environments with tools: what a turn with calls is answered with, and that nothing a model writes ends a run."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest

from posttrain import ToolEnvironment, tool_metrics
from posttrain.data.environment import EpisodeState, ToolChat, episode
from posttrain.data.tool_environment import KINDS, Outcome, ToolError
from posttrain.errors import ConfigError, SandboxError
from posttrain.rollout.scoring import Scorer
from posttrain.testing import EnvContract
from posttrain.testing.coroutines import cancelled
from posttrain.testing.laws import by_value
from posttrain.types import Message, Reward


def double(n: int) -> int:
    """Double a number."""
    return 2 * n


def fail(how: str = "value") -> str:
    """Fail."""
    if how == "exit":
        sys.exit(3)
    if how == "recursion":
        return fail("recursion")
    raise ValueError("first line\nsecond line" + "." * 1000)


def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


def flood(size: int) -> str:
    """A lot."""
    return "x" * size


async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


async def give_up() -> str:
    """Something inside is cancelled."""
    inner = asyncio.ensure_future(asyncio.sleep(9))
    inner.cancel()
    await inner
    return "never"


def note(text: str, state: EpisodeState) -> str:
    """Remember a text."""
    state.custom.setdefault("notes", []).append(text)
    return f"{len(state.custom['notes'])} notes"


@dataclass
class Box:
    sides: list[int]
    colour: Literal["red", "blue"] | None = None


def fill(box: Box) -> int:
    """The volume of a box."""
    return math.prod(box.sides)


class Tools(ToolEnvironment):
    """All of them."""

    tools: Sequence[Callable[..., Any]] = (double, fail, sleep, flood, wait, give_up, note, fill)

    @dataclass(frozen=True, kw_only=True)
    class Options(ToolEnvironment.Options):
        tool_timeout_s: float = 5.0

    def dataset(self, split: str) -> list[dict[str, Any]]:
        return [{"id": "1", "prompt": "hm?"}]

    def compute_reward(self, state: EpisodeState) -> Reward:
        return Reward(1.0, tool_metrics(state))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def respond(env: ToolEnvironment, state: EpisodeState) -> list[Message] | None:
    return asyncio.run(env.env_response(state))


def answer(text: str, env: ToolEnvironment | None = None, **options: Any) -> tuple[list[str], dict[str, float]]:
    """The results of a turn, and what of the metrics is not 0."""
    made = env or Tools(Tools.Options(**options))
    state = episode(made, {"prompt": "hm?"}, text)
    messages = respond(made, state) or []
    assert all(message["role"] == "tool" and message["name"] for message in messages)
    return [message["content"] for message in messages], {name: n for name, n in tool_metrics(state).items() if n}


def test_a_call_is_answered_and_an_answer_ends_the_episode() -> None:
    env = Tools()
    state = episode(env, {"prompt": "hm?"}, f"I double.\n{call('double', n=21)}")
    assert respond(env, state) == [{"role": "tool", "name": "double", "content": "42", "tool_call_id": "call00001"}]
    state.completion = call("double", n=1)
    assert respond(env, state) == [{"role": "tool", "name": "double", "content": "2", "tool_call_id": "call00002"}]
    state.completion = "It is 42."
    assert respond(env, state) is None
    assert tool_metrics(state) == {
        "tool/calls": 2.0, "tool/errors": 0.0, "tool/output_cut": 0.0, **{f"tool/errors/{kind}": 0.0 for kind in KINDS},
    }  # fmt: skip


def test_results_come_in_the_order_of_the_calls() -> None:
    text = call("wait", seconds=0.05) + call("double", n=1) + call("wait", seconds=0.0) + call("note", text="a")
    assert answer(text)[0] == ["waited 0.05", "2", "waited 0.0", "1 notes"]


def test_calls_of_a_turn_run_at_the_same_time() -> None:
    running, most = 0, 0

    async def meet(n: int) -> str:
        """Wait for the others."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        while running < 3 and most < 3:
            await asyncio.sleep(0)
        return str(n)

    class Meeting(Tools):
        tools = (meet,)

    assert answer("".join(call("meet", n=n) for n in range(3)), Meeting())[0] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("text", "content", "kind"),
    [
        ("<tool_call>{", "Error: this tool call cannot be read: it is not JSON", "malformed"),
        (call("double", n=1)[:-12], "Error: this tool call cannot be read: </tool_call>", "malformed"),
        (call("dubble", n=1), "Error: there is no tool 'dubble'; did you mean double?", "unknown_tool"),
        (call("zzz"), "Error: there is no tool 'zzz'; the tools are double, fail, ", "unknown_tool"),
        (call("z" * 50_000), "Error: there is no tool 'zzz", "unknown_tool"),
        (call("double"), "Error: double: n must be given", "missing_argument"),
        (call("double", n="1"), 'Error: double: n must be a whole number, it is "1"', "wrong_argument"),
        (call("double", n=1, m=2), "Error: double: there is no m", "wrong_argument"),
        (call("wait", seconds="1"), 'Error: wait: seconds must be a number, it is "1"', "wrong_argument"),
        (call("note", text="a", state=1), "Error: note: there is no state", "wrong_argument"),
        (call("fail"), "Error: ValueError: first line second line...", "exception"),
        (call("fail", how="exit"), "Error: SystemExit: 3", "exception"),
        (call("fail", how="recursion"), "Error: RecursionError: ", "exception"),
        (call("give_up"), "Error: CancelledError", "exception"),
    ],
)
def test_what_is_wrong_is_told_and_counted(text: str, content: str, kind: str) -> None:
    (told,), counted = answer(text)
    assert told.startswith(content) and len(told) < 500 and "\n" not in told
    assert counted == {"tool/calls": 1.0, "tool/errors": 1.0, f"tool/errors/{kind}": 1.0}


def test_a_tool_says_what_is_wrong_in_its_own_words() -> None:
    def plain(kind: str = "exception") -> str:
        """Fail."""
        raise ToolError("line 1\nline 2" + "." * 5000, kind)

    async def waits() -> str:
        """Fail."""
        raise ToolError("too slow", "timeout")

    class Failing(Tools):
        tools = (plain, waits)

    (told, slow, _), counted = answer(call("plain") + call("waits") + call("plain", kind="odd"), Failing())
    assert told.startswith("Error: line 1\nline 2..") and "[cut: 5,013 characters" in told and slow == "Error: too slow"
    assert counted == {
        "tool/calls": 3.0, "tool/errors": 3.0, "tool/errors/exception": 2.0, "tool/errors/timeout": 1.0, "tool/output_cut": 2.0,
    }  # fmt: skip


def test_a_sandbox_that_fails_is_nobodys_fault() -> None:
    async def broken() -> str:
        """Run."""
        raise SandboxError("the host is gone")

    class Broken(Tools):
        tools = (broken, wait)

    with pytest.raises(SandboxError, match="the host is gone"):
        answer(call("broken") + call("wait", seconds=60) + call("broken"), Broken())


def test_a_tool_may_keep_its_own_time() -> None:
    class Patient(Tools):
        def deadline(self, name: str) -> float | None:
            return None if name == "wait" else super().deadline(name)

    env = Patient(Patient.Options(tool_timeout_s=0.1))
    assert answer(call("wait", seconds=0.3) + call("sleep", seconds=9), env)[0] == [
        "waited 0.3", "Error: sleep gave nothing within 0.1 s",
    ]  # fmt: skip


@pytest.mark.parametrize("text", [call("sleep", seconds=60), call("wait", seconds=60)])
def test_a_late_tool_is_told_and_counted(text: str) -> None:
    (told, other), counted = answer(text + call("double", n=2), tool_timeout_s=0.2)
    assert told.endswith("gave nothing within 0.2 s") and counted["tool/errors/timeout"] == 1.0
    assert other == "4"


def test_a_long_result_is_cut_with_a_note() -> None:
    (told,), counted = answer(call("flood", size=2000), max_tool_output=50)
    assert told == "x" * 50 + "\n[cut: 2,000 characters, the first 50 are shown]"
    assert counted == {"tool/calls": 1.0, "tool/output_cut": 1.0}
    assert answer(call("flood", size=50), max_tool_output=50)[0] == ["x" * 50]


def test_calls_beyond_the_limit_of_a_turn_are_not_run() -> None:
    told, counted = answer("".join(call("note", text=str(n)) for n in range(4)), max_calls=2)
    assert told == ["1 notes", "2 notes", *["Error: only the first 2 calls of a turn are run"] * 2]
    assert counted == {"tool/calls": 4.0, "tool/errors": 2.0, "tool/errors/too_many": 2.0}


def test_at_most_so_many_calls_run_at_once_over_all_episodes() -> None:
    running, most = 0, 0

    async def busy() -> str:
        """Be busy."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return ""

    class Busy(Tools):
        tools = (busy,)

    env = Busy(Busy.Options(max_concurrent_tools=3))

    async def many() -> None:
        await asyncio.gather(*(env.env_response(episode(env, {"prompt": "?"}, call("busy") * 2)) for _ in range(20)))

    for _ in range(2):  # in two event loops
        most = 0
        asyncio.run(many())
        assert most == 3


def test_a_thousand_episodes_keep_their_own_state() -> None:
    env = Tools()
    states = [episode(env, {"prompt": "?"}, call("note", text=str(n)) + call("wait", seconds=0.0)) for n in range(1000)]

    async def many() -> None:
        await asyncio.gather(*(env.env_response(state) for state in states))

    asyncio.run(many())
    assert [state.custom["notes"] for state in states] == [[str(n)] for n in range(1000)]
    assert all(tool_metrics(state)["tool/calls"] == 2.0 for state in states)


class Host:
    """What hosts an episode offers it: methods in another process, here a copy of the environment and of the state."""

    def __init__(self, env: ToolEnvironment, state: EpisodeState) -> None:
        self.env, self.state, self.asked = env, state, list[tuple[Any, ...]]()

    async def offload(self, method: str, *args: Any, timeout: float) -> Any:
        self.asked.append((method, *args, timeout))
        if args[0] == "sleep":
            raise TimeoutError
        if args[0] == "fail":
            raise RuntimeError("reward worker 0 (pid 7) ended with exit code 3")
        state = EpisodeState(self.state.task, self.state.prompt, custom=pickle.loads(pickle.dumps(self.state.custom)))
        await asyncio.sleep(0)
        made = getattr(pickle.loads(pickle.dumps(self.env)), method)(state, *args)
        self.state.custom.clear()
        self.state.custom.update(state.custom)
        return pickle.loads(pickle.dumps(made))


def test_plain_tools_run_where_the_host_can_kill_them() -> None:
    env = Tools(Tools.Options(tool_timeout_s=3.0))
    text = "".join([call("note", text="a"), call("double", n=1), call("sleep", seconds=9), call("wait", seconds=0), call("fail"),
                    call("note", text="b"), call("double")])  # fmt: skip
    state = episode(env, {"prompt": "?"}, text)
    host = Host(env, state)
    state.offload = host.offload
    messages = respond(env, state)
    assert messages is not None and [message["content"] for message in messages] == [
        "1 notes", "2", "Error: sleep gave nothing within 3 s", "waited 0.0", "Error: fail ended its process", "2 notes",
        "Error: double: n must be given",
    ]  # fmt: skip
    assert state.custom["notes"] == ["a", "b"] and ("run_tool", "double", {"n": 1}, 3.0) in host.asked
    assert tool_metrics(state)["tool/calls"] == 7.0 and not [one for one in host.asked if one[1] == "wait"]


def test_in_the_processes_of_a_run() -> None:
    """Two episodes at a time; a tool that hangs is killed with its process, and the next call has another one."""
    env = Tools(Tools.Options(tool_timeout_s=1.0))
    by_value(env)
    one = call("note", text="a") + call("fill", box={"sides": [2, 3], "colour": "red"}) + call("note", text="b")
    texts = (one, call("sleep", seconds=60) + call("double", n=2))
    states = [episode(env, {"prompt": "?"}, text) for text in texts]

    async def whole() -> list[Any]:
        scorer = Scorer({"env": env}, workers=1)
        try:
            await scorer.start()
            for state in states:
                state.offload = partial(scorer.call, "env", state)
            answers = await asyncio.gather(*(scorer.respond("env", state) for state in states))
            return [*answers, await scorer.score("env", states[1])]
        finally:
            await scorer.close()

    first, second, reward = asyncio.run(whole())
    assert [message["content"] for message in first] == ["1 notes", "6", "2 notes"] and states[0].custom["notes"] == ["a", "b"]
    assert [message["content"] for message in second] == ["Error: sleep gave nothing within 1 s", "4"]
    assert reward.parts["tool/calls"] == 2.0 and reward.parts["tool/errors/timeout"] == 1.0


def test_cancelling_an_episode_leaves_nothing() -> None:
    env = Tools()
    for text in (call("wait", seconds=60) * 3, call("sleep", seconds=0.3) + call("wait", seconds=60), call("give_up")):
        for turns in (1, 2, 3, 5, 10):
            assert asyncio.run(cancelled(lambda text=text: env.env_response(episode(env, {"prompt": "?"}, text)), turns)) == ""


def test_the_prompt_offers_the_tools() -> None:
    prompt = Tools().format_prompt({"prompt": "hm?"})
    assert isinstance(prompt, ToolChat) and prompt == [{"role": "user", "content": "hm?"}]
    assert [tool["function"]["name"] for tool in prompt.tools][:2] == ["double", "fail"]
    again = pickle.loads(pickle.dumps(prompt))
    assert again == prompt and again.tools == prompt.tools
    for told, mark in (("json", "<tool_call>"), ("python", "double(n: int)")):
        text = Tools(Tools.Options(tool_format=told)).format_prompt({"prompt": "hm?"})  # type: ignore[arg-type]
        assert not isinstance(text, ToolChat) and [message["role"] for message in text] == ["system", "user"]  # type: ignore[index]
        assert mark in text[0]["content"]  # type: ignore[index]
    assert Tools().format_prompt({"prompt": [1, 2, 3]}) == [1, 2, 3]


def test_calls_as_python() -> None:
    assert answer("double(n=4)", tool_format="python")[0] == ["8"]
    assert answer("double(4)", tool_format="auto")[0] == []


def test_calls_that_a_packer_has_read() -> None:
    env = Tools()
    state = episode(env, {"prompt": "?"}, "I double.")
    state.messages[-1]["tool_calls"] = [
        {"id": "abc", "type": "function", "function": {"name": "double", "arguments": '{"n": 3}'}},
        {"type": "function", "function": {"name": "double", "arguments": {"n": 4}}},
        {"type": "function", "function": {"name": "double", "arguments": '{"n": '}},
    ]
    messages = respond(env, state) or []
    assert [(message["tool_call_id"], message["content"]) for message in messages[:2]] == [("abc", "6"), ("call00002", "8")]
    assert messages[2]["content"].startswith("Error: this tool call cannot be read: it is not JSON")


def test_thinking_that_the_prompt_opened() -> None:
    assert answer(f"hm {call('double', n=1)}", thinking=True)[0] == []
    assert answer(f"hm</think>{call('double', n=1)}", thinking=True)[0] == ["2"]


def test_methods_as_tools_and_a_travelling_environment() -> None:
    class Corpus(Tools):
        """Looks up words."""

        def __init__(self, options: Any = None) -> None:
            self.words = {"a": "the first letter"}
            super().__init__(options)

        @property
        def tools(self) -> Sequence[Callable[..., Any]]:  # type: ignore[override]
            return [self.look_up]

        def look_up(self, word: str) -> str:
            """Look a word up."""
            return self.words[word]

    env = Corpus()
    env._gates  # noqa: B018
    import cloudpickle

    for one in (env, cloudpickle.loads(cloudpickle.dumps(env))):
        assert answer(call("look_up", word="a"), one)[0] == ["the first letter"]
        assert answer(call("look_up", word="b"), one)[0] == ["Error: KeyError: 'b'"]


def test_a_final_answer_may_be_something_else() -> None:
    class Finish(Tools):
        """Ends with a call."""

        def is_final_answer(self, state: EpisodeState, calls: Sequence[Any]) -> bool:
            return any(call.name == "double" for call in calls)

        def tool_message(self, state: EpisodeState, call: Any, outcome: Outcome) -> Message:
            return Message(role="tool", name=call.name, content=f"<{outcome.text}>")

    env = Finish()
    assert respond(env, episode(env, {"prompt": "?"}, call("double", n=1))) is None
    assert respond(env, episode(env, {"prompt": "?"}, "hm")) == [{"role": "user", "content": "No tool was called."}]
    assert answer(call("flood", size=1), env)[0] == ["<x>"]


def untyped(a): ...


@pytest.mark.parametrize(("given", "words"), [((untyped,), "has no type"), ((double, double), "another tool has this name")])
def test_what_cannot_be_a_tool_is_refused_at_construction(given: Any, words: str) -> None:
    class Wrong(Tools):
        tools = given

    with pytest.raises(ConfigError, match=words):
        Wrong()


def test_options_of_its_own_must_hold_those_of_tools() -> None:
    class Wrong(Tools):
        @dataclass(frozen=True)
        class Options:
            size: int = 1

    with pytest.raises(ConfigError, match=r"inherit ToolEnvironment\.Options"):
        Wrong()


@pytest.mark.parametrize("option", ["tool_timeout_s", "max_concurrent_tools", "max_calls", "max_tool_output"])
def test_options_that_cannot_work(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        Tools.Options(**{option: 0})


class Asked(Tools):
    """One question of each split."""

    def dataset(self, split: str) -> list[dict[str, Any]]:
        return [{"id": f"{split}-{n}", "prompt": f"{split} {n}?"} for n in range(3)]


class TestContract(EnvContract):
    """With tools of a file that no other process can import, one of which takes the episode."""

    @pytest.fixture
    def env(self) -> ToolEnvironment:
        return Asked()
