"""`loop.agents` with several replicas: an endpoint for each, on consecutive ports, and an episode at one of them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from served import LIMIT, TURNS, Script
from test_agent_run import Agent, state_of

from posttrain.data.packer import init_data_packer
from posttrain.errors import ConfigError
from posttrain.loop.agents import Agents
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Sampling


def free_ports(count: int) -> int:
    """The first of so many consecutive ports that nobody has."""
    for first in range(20100, 30000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no ports")


def agents_of(folder: Path, engines: list[Any], port: int) -> Agents:
    write_tiny_model(folder)
    packer = init_data_packer(str(folder), chat_template=TURNS)
    for engine in engines:
        engine.packer = packer
    return Agents(engines, packer, max_model_len=LIMIT, port=port)


def test_every_replica_has_a_port_and_an_episode_stays_at_one(tmp_path: Path) -> None:
    engines, port = [Script(lambda prompt: "four") for _ in range(3)], free_ports(3)
    agents, addresses = agents_of(tmp_path, engines, port), list[str]()

    class Twice(Agent):
        async def run_agent(self, state: Any, base_url: str, api_key: str, model: str) -> None:
            addresses.append(base_url)
            await super().run_agent(state, base_url, api_key, model)

    async def act(state: Any, ask: Any) -> None:
        await ask("one")
        await together.wait()
        await ask("two")  # the address is the session's, so this is answered where the first was

    async def work() -> None:
        await agents.start()
        env = Twice(act)

        async def play(number: int) -> None:
            trajectory, failure = await agents.play(
                env, state_of(env), Sampling(8), seed=number, sample_id=str(number), group_id="g", label="agent", prompt_ids=[1]
            )
            assert failure is None and trajectory.sampled == 10

        await asyncio.gather(*(play(number) for number in range(6)))
        await agents.close()

    together = asyncio.Barrier(6)
    asyncio.run(work())
    assert sorted(int(url.split(":")[2].split("/")[0]) for url in addresses) == sorted([port, port + 1, port + 2] * 2)
    asked = [request.id for engine in engines for request in engine.requests]
    assert len(set(asked)) == len(asked) == 12, "replicas are driven as one: no two requests have one name"
    assert [len(engine.requests) for engine in engines] == [4, 4, 4]


def test_a_taken_port_among_them_is_told_and_none_is_held(tmp_path: Path) -> None:
    port = free_ports(3)
    agents = agents_of(tmp_path, [Script(lambda prompt: "four") for _ in range(3)], port)

    async def work() -> None:
        with pytest.raises(ConfigError, match=f"port {port + 2} is taken by process"):
            await agents.start()
        for own in (port, port + 1):
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", own)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 2))
        taken.listen()
        asyncio.run(work())
