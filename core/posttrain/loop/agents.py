"""Episodes whose turns an agent asks for over HTTP (`data.agent_environment`): an endpoint for each replica, on consecutive
ports; a session for each episode, all of it at one of them: that with the fewest, of equals the first.

    agents = Agents([engine], packer, max_model_len=4096, port=8100)
    await agents.start()                    # a taken port is told before anything is trained
    trajectory, failure = await agents.play(env, state, sampling, seed=…, sample_id=…, group_id=…, label=…, prompt_ids=…)
    await agents.close()
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from posttrain.endpoint.agent_run import run_agent
from posttrain.types import Reward, Sampling, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from posttrain.data.agent_environment import AgentEnvironment
    from posttrain.data.environment import EpisodeState
    from posttrain.data.packer import DataPacker
    from posttrain.endpoint.server import Endpoint
    from posttrain.rollout.engine import Generates

MODEL = "posttrain"
"""The name under which agents ask for the model that trains."""
ENDS = {"": "done", "max_turns": "max_turns", "context_length_exceeded": "context"}
"""`info["stop_reason"]` by how an agent ended, as in episodes that an environment answers."""


class Agents:
    """engines: one that generates for each replica.   port: `rollout.base_port`, of the first one's endpoint; the others follow.
    verbatim: `rollout.keep_history_verbatim`.   one_by_one: see `Endpoint`.
    """

    def __init__(
        self,
        engines: Sequence[Generates],
        packer: DataPacker,
        *,
        max_model_len: int,
        port: int,
        verbatim: bool = False,
        one_by_one: bool = False,
    ) -> None:
        self._engines, self._packer, self._max_model_len = list(engines), packer, max_model_len
        self._port, self._verbatim, self._one_by_one = port, verbatim, one_by_one
        self._endpoints: list[Endpoint] = []
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen; once. Raises ConfigError naming who has a port, and then listens on none."""
        async with self._starting:
            if self._endpoints:
                return
            from posttrain.endpoint.server import Endpoint

            try:
                for replica, engine in enumerate(self._engines):
                    endpoint = Endpoint(
                        engine, self._packer, max_model_len=self._max_model_len, model=MODEL, one_by_one=self._one_by_one,
                        sessions_only=True,
                    )  # fmt: skip
                    await endpoint.start(self._port + replica)
                    self._endpoints.append(endpoint)
            except BaseException:
                await self.close()
                raise

    async def play(
        self,
        env: AgentEnvironment,
        state: EpisodeState,
        sampling: Sampling,
        *,
        seed: int,
        sample_id: str,
        group_id: str,
        label: str,
        prompt_ids: Sequence[int],
        stopped: asyncio.Event | None = None,
        trains: bool = True,
        priority: int = 0,
    ) -> tuple[Trajectory, Reward | None]:
        """One episode: its rows, and why it cannot be scored, if so. `state` is then as it was when it ended.

        prompt_ids: of the trajectory of an agent that asked nothing.   stopped: the episode is given up, as "aborted".
        trains, priority: see `Endpoint.open`.
        """
        await self.start()
        endpoint = min(self._endpoints, key=lambda one: one.sessions)
        session = endpoint.open(
            sampling=sampling, seed=seed, name=sample_id, verbatim=self._verbatim, max_turns=env.max_turns, trains=trains,
            priority=priority,
        )
        work = asyncio.ensure_future(run_agent(env, state, session, model=endpoint.model))
        stop = asyncio.ensure_future((stopped or asyncio.Event()).wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        nothing = Trajectory(list(prompt_ids), [], [], [], [], "error", sample_id=sample_id, group_id=group_id, env=label)
        trajectory = session.trajectory(sample_id, group_id, label) or nothing
        state.trajectory, state.messages, state.turn = trajectory, list(trajectory.messages), len(session.answers)
        state.completion = str(trajectory.messages[-1]["content"]) if trajectory.messages else ""
        if work.cancelled():
            trajectory.finish_reason = "aborted"
            return trajectory, None
        ended = work.result()
        if ended.truncated:
            trajectory.finish_reason = "length"
        trajectory.info["stop_reason"] = "failed" if ended.problem else ENDS[ended.truncated]
        return trajectory, ended.problem

    async def close(self) -> None:
        """Stop listening; idempotent."""
        endpoints, self._endpoints = self._endpoints, []
        for endpoint in endpoints:
            await endpoint.close()
