"""Training on what an agent does that asks over HTTP: the real client, the real engine, the whole run."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import openai
import pytest

from posttrain.data.agent_environment import AgentEnvironment
from posttrain.data.environment import EpisodeState
from posttrain.errors import ConfigError
from posttrain.testing.letters import ALPHABET, Letters
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.testing.tiny_run import TinyRun
from posttrain.types import ENV_VERSION, Reward

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Twice(AgentEnvironment):
    """Asks for a letter, then for another one."""

    agent_timeout_s = 60.0

    def dataset(self, split: Any) -> Any:
        return Letters().dataset(split)

    async def run_agent(self, state: EpisodeState, base_url: str, api_key: str, model: str) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": f"letter{state.task['number']}"}]
            for _ in range(2):
                answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=4)
                messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "again"}]
        state.custom["said"] = [m["content"] for m in messages[1::2]]

    def compute_reward(self, state: EpisodeState) -> Reward:
        good = [text.strip()[:1] in ALPHABET[:13] and text != "" for text in state.custom["said"]]
        return Reward(sum(good) / 2, {"first": float(good[0])})


class Plain(Twice):
    """The same with a synchronous client, in a process."""

    def run_agent(self, state: EpisodeState, base_url: str, api_key: str, model: str) -> None:  # type: ignore[override]
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": f"letter{state.task['number']}"}]
            answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
        state.custom["said"] = [answer.choices[0].message.content]


class Broken(Twice):
    """Raises in every other episode, and asks nothing in some."""

    async def run_agent(self, state: EpisodeState, base_url: str, api_key: str, model: str) -> None:
        if state.seed % 4 == 0:
            raise ValueError("no idea")
        if state.seed % 4 != 1:
            await super().run_agent(state, base_url, api_key, model)


@pytest.fixture
def tiny(tmp_path: Path) -> TinyRun:
    write_tiny_model(tmp_path / "model")
    return TinyRun(tmp_path / "model", tmp_path)


@pytest.fixture
def port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"rollout.base_port={free.getsockname()[1]}"


def test_a_run_trains_on_what_its_agents_did(tiny: TinyRun, port: str) -> None:
    result = tiny([port, "rl.steps=2", "rollout.keep_history_verbatim=true"], env=Twice)
    rows = result.rollouts()
    assert len(rows) == 16 and {row["info"]["stop_reason"] for row in rows} == {"done"}
    for row in rows:
        sampled = [version for version, mask in zip(row["weight_versions"], row["mask"], strict=True) if mask]
        assert len(set(sampled)) == 1 and ENV_VERSION in row["weight_versions"] and row["reward"] is not None
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 2
    metrics = result.metrics()
    assert [m["loss"] is not None for m in metrics] == [True, True] and metrics[-1]["reward/first"] >= 0
    assert metrics[-1]["tokens/trained"] > 0 and metrics[-1]["policy/logprob_gap"] < 1e-3, "the trainer sees what the engine saw"


def test_without_verbatim_every_turn_is_a_row_and_one_episode_has_one_reward(tiny: TinyRun, port: str) -> None:
    result = tiny([port, "rl.steps=1"], env=Twice)
    metrics = result.metrics()[-1]
    assert metrics["policy/logprob_gap"] < 1e-3 and metrics["rollout/rows"] > 16


def test_agents_beside_other_environments_and_plain_ones(tiny: TinyRun, port: str) -> None:
    environments = [{"name": "posttrain.testing.letters:Letters"}, {"name": "Twice"}, {"name": "Plain"}]
    environments[1]["name"], environments[2]["name"] = (f"{__file__}:{name}" for name in ("Twice", "Plain"))
    result = tiny([port, "rl.steps=1", "validation.prompts=6"], environments=environments)
    metrics = result.metrics()[-1]
    assert metrics["rollout/unscorable_count"] == 0
    assert sum(metrics.get(f"rollout/{name}/count", 0) for name in ("posttrain.testing.letters:Letters", "test_agents.py:Twice",
                                                                    "test_agents.py:Plain")) == 16  # fmt: skip


def test_agents_that_fail_train_nothing_and_are_counted(tiny: TinyRun, port: str) -> None:
    result = tiny([port, "rl.steps=1"], env=Broken)
    metrics = result.metrics()[-1]
    assert metrics["rollout/unscorable/agent_raised"] > 0 and metrics["rollout/unscorable/agent_silent"] > 0
    failed = [row for row in result.rollouts() if row["reward"] is None]
    assert {row["info"]["cause"] for row in failed} == {"agent_raised", "agent_silent"}


def test_a_taken_port_ends_the_run_before_it_begins(tiny: TinyRun) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is taken by process"):
            tiny([f"rollout.base_port={taken.getsockname()[1]}", "rl.steps=1"], env=Twice)


def test_in_order_of_arrival_with_updates_between_the_turns(tiny: TinyRun, port: str) -> None:
    ahead = ["loop.commit_order=arrival", "rollout.max_async_rollout=1", "rl.steps=3", "rollout.keep_history_verbatim=true"]
    result = tiny([port, *ahead], env=Twice)
    for step in (1, 2, 3):
        for row in result.rollouts(step):
            assert row["reward"] is not None, row["info"]
            assert all((v >= 0) == own for v, own in zip(row["weight_versions"], row["mask"], strict=True))


def test_evals_and_validation_ask_agents_too(tiny: TinyRun, port: str) -> None:
    result = tiny([port, "rl.steps=1", "validation.prompts=4", f"evals=[{{name: '{__file__}:Twice', prompts: 4}}]"], env=Twice)
    assert len(result.validation()) == 2 and len(result.evals()) == 2
