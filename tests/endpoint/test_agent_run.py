"""Agents that do what they should, and all that they should not: never ask, ask too late, raise, hang, refuse to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from served import MODEL, Script, client_of, on_script, session_of, user

from posttrain.data.agent_environment import AgentEnvironment
from posttrain.data.environment import EpisodeState
from posttrain.endpoint import agent_run
from posttrain.endpoint.agent_run import Ended, run_agent


class Agent(AgentEnvironment):
    """Does what the test says."""

    agent_timeout_s = 30.0

    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.act = act

    def dataset(self, split: Any) -> list[dict[str, Any]]:
        return [{"id": "0", "question": "How many?"}]

    async def run_agent(self, state: EpisodeState, base_url: str, api_key: str, model: str) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

            async def ask(text: str) -> str:
                answer = await client.chat.completions.create(model=model, messages=[user(text)])  # type: ignore[list-item]
                return answer.choices[0].message.content or ""

            await self.act(state, ask)

    def compute_reward(self, state: EpisodeState) -> float:
        return 1.0


def state_of(env: AgentEnvironment) -> EpisodeState:
    task = env.dataset("train")[0]
    return EpisodeState(task, env.format_prompt(task))


def ran(folder: Path, act: Callable[..., Any], *, timeout_s: float | None = None, say: Any = None, **options: Any) -> Any:
    """(how it ended, its state, its session) of one agent."""

    async def work(endpoint: Any, engine: Script) -> Any:
        env = Agent(act)
        state, session = state_of(env), session_of(endpoint, **options)
        ended = await run_agent(env, state, session, model=endpoint.model, timeout_s=timeout_s)
        assert session.over
        with contextlib.suppress(openai.APIStatusError):
            await client_of(session).chat.completions.create(model=MODEL, messages=[user("late")])  # type: ignore[list-item]
            pytest.fail("a session is closed when its agent has ended")
        return ended, state, session

    return on_script(folder, say or (lambda prompt: "four"), work, max_model_len=200)


def cause(ended: Ended) -> tuple[str, str]:
    assert ended.problem is not None and ended.problem.total is None
    return ended.problem.info["cause"], ended.problem.info["error"]


def test_an_agent_that_does_its_work(tmp_path: Path) -> None:
    async def act(state: Any, ask: Any) -> None:
        state.custom["answer"] = await ask(state.prompt)

    ended, state, session = ran(tmp_path, act)
    assert ended == Ended() and state.custom == {"answer": "four"} and session.trajectory().sampled == 5


def test_an_agent_that_asks_nothing_or_raises_has_no_reward(tmp_path: Path) -> None:
    async def idle(state: Any, ask: Any) -> None: ...

    async def broken(state: Any, ask: Any) -> None:
        await ask("a")
        raise ValueError("out of ideas")

    async def given_up(state: Any, ask: Any) -> None:
        raise asyncio.CancelledError

    assert cause(ran(tmp_path / "a", idle)[0]) == ("agent_silent", "the agent asked nothing at its base_url, or got no answer")
    assert cause(ran(tmp_path / "b", broken)[0]) == ("agent_raised", "ValueError: out of ideas")
    assert cause(ran(tmp_path / "c", given_up)[0])[0] == "agent_raised"


def test_an_agent_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_run, "GRACE_S", 0.05)
    cleaned: list[str] = []

    async def hangs(state: Any, ask: Any) -> None:
        try:
            await ask("forever")
        finally:
            cleaned.append("up")

    ended, _, session = ran(tmp_path / "a", hangs, timeout_s=0.5, say=lambda prompt: None)
    assert cause(ended) == ("agent_timeout", "the agent did not end within 0.5 s (agent_timeout_s)")
    assert cleaned == ["up"] and session.trajectory() is None

    async def stubborn(state: Any, ask: Any) -> None:
        end = asyncio.get_running_loop().time() + 3
        while asyncio.get_running_loop().time() < end:
            with contextlib.suppress(asyncio.CancelledError, openai.APIError):
                await asyncio.sleep(0.05)
                state.custom["late"] = await ask("again")

    ended, _, session = ran(tmp_path / "b", stubborn, timeout_s=0.2)
    assert cause(ended)[0] == "agent_timeout" and session.over == "its agent ran out of time"


def test_an_agent_that_runs_into_a_limit_is_scored(tmp_path: Path) -> None:
    async def talks_on(state: Any, ask: Any) -> None:
        for number in range(10):
            await ask(str(number))

    async def too_long(state: Any, ask: Any) -> None:
        await ask("short")
        await ask("long " * 100)

    async def only_too_long(state: Any, ask: Any) -> None:
        await ask("long " * 100)

    ended, _, session = ran(tmp_path / "a", talks_on, max_turns=3)
    assert ended == Ended(truncated="max_turns") and len(session.answers) == 3
    assert ran(tmp_path / "b", too_long)[0] == Ended(truncated="context_length_exceeded")
    assert cause(ran(tmp_path / "c", only_too_long)[0])[0] == "agent_raised"


def test_a_plain_function_runs_where_it_can_be_killed(tmp_path: Path) -> None:
    class Plain(Agent):
        def run_agent(self, state: EpisodeState, base_url: str, api_key: str, model: str) -> None:  # type: ignore[override]
            with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                answer = client.chat.completions.create(model=model, messages=[user("a")])  # type: ignore[list-item]
                state.custom["answer"] = answer.choices[0].message.content

    async def work(endpoint: Any, engine: Script) -> None:
        env, asked = Plain(lambda: None), []  # type: ignore[var-annotated]

        async def offload(method: str, *args: Any, timeout: float) -> None:
            asked.append((method, timeout))
            await asyncio.to_thread(getattr(env, method), hosted, *args)

        async def overdue(method: str, *args: Any, timeout: float) -> None:
            raise TimeoutError("killed")

        state = state_of(env)
        assert await run_agent(env, state, session_of(endpoint), model=MODEL) == Ended()
        hosted = state_of(env)
        hosted.offload = offload
        assert await run_agent(env, hosted, session_of(endpoint), model=MODEL) == Ended()
        assert asked == [("run_agent", 30.0)] and hosted.custom == state.custom == {"answer": "four"}
        hosted.offload = overdue
        assert cause(await run_agent(env, hosted, session_of(endpoint), model=MODEL))[0] == "agent_timeout"
        assert Plain.offloads and not Agent.offloads

    on_script(tmp_path, lambda prompt: "four", work)


def test_an_episode_that_is_given_up_takes_its_agent_along(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Script) -> None:
        async def hangs(state: Any, ask: Any) -> None:
            await ask("forever")

        env, session = Agent(hangs), session_of(endpoint)
        task = asyncio.ensure_future(run_agent(env, state_of(env), session, model=MODEL))
        await engine.running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.over == "its episode was given up" and engine.cancelled == 1

    on_script(tmp_path, lambda prompt: None, work)
