"""Reward execution: synchronous rewards in a pool of processes, asynchronous ones on the loop, both with a deadline.

Nothing CPU-bound runs on the event loop, and a reward that cannot be had is unscorable, never 0. `score` is the same path for
one completion text, for anyone's own loop:

    posttrain.score(env, row, "42")      # Reward(total=1.0, …)
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.rollout.rewards import as_reward, raised, unscorable
from posttrain.rollout.worker_pool import WorkerPool
from posttrain.types import Reward

if TYPE_CHECKING:
    from posttrain.data.environment import Environment, EpisodeState

_log = logging.getLogger("posttrain.rewards")


class Scorer:
    """Scores episodes of `environments` (by the name that draws carry).

    timeout_s   deadline of one reward, seconds     workers   processes for synchronous rewards
    log_path    where the workers' output goes; default: this process's standard error
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        *,
        timeout_s: float = 30.0,
        workers: int = 1,
        log_path: Path | None = None,
    ) -> None:
        self._environments, self._timeout = dict(environments), timeout_s
        blocking = {name: env for name, env in environments.items() if not inspect.iscoroutinefunction(env.compute_reward)}
        self._pool = WorkerPool(blocking, workers=workers, timeout_s=timeout_s, log_path=log_path) if blocking else None
        self._blocking = frozenset(blocking)

    async def start(self) -> None:
        """Start the workers. Raises PluginError when an environment cannot be built in them."""
        if self._pool:
            await self._pool.start()

    async def score(self, env: str, state: EpisodeState) -> Reward:
        """The reward of one episode; unscorable (total None, `info["cause"]`) when there is none. Never raises for a bad one."""
        if env in self._blocking and self._pool:
            reward = await self._pool.score(env, state)
        else:
            reward = await self._score_here(self._environments[env], state)
        if reward.total is None:
            sample = state.trajectory.sample_id if state.trajectory else ""
            _log.warning("reward of sample %r (%s) is unscorable: %s: %s",
                         sample, env, reward.info.get("cause"), reward.info.get("error", ""))
        return reward

    async def close(self) -> None:
        """End all workers; idempotent. No process is left."""
        if self._pool:
            await self._pool.close()

    async def _score_here(self, env: Environment, state: EpisodeState) -> Reward:
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                value: Any = env.compute_reward(state)
                return as_reward(await value)
        except Exception as exc:
            if isinstance(exc, TimeoutError) and deadline.expired():
                return unscorable("timeout", f"no reward within {self._timeout:g} s (rollout.reward_timeout_s)")
            return raised(exc)


def score(env: Environment | str, row: Mapping[str, Any], completion: str, *, timeout_s: float = 30.0, seed: int = 0) -> Reward:
    """The reward of one completion text, exactly as a run would compute it (process, deadline, unscorable).

    env: an environment object, or a plug-in name. row: a row of its dataset. Works inside a running event loop too.
    """
    from posttrain.data.environment import episode

    if isinstance(env, str):
        from posttrain.plugins import load

        env = load("envs", env)
    state = episode(env, row, completion, seed=seed)  # type: ignore[arg-type]

    async def once() -> Reward:
        scorer = Scorer({"env": env}, timeout_s=timeout_s)  # type: ignore[dict-item]
        try:
            await scorer.start()
            return await scorer.score("env", state)
        finally:
            await scorer.close()

    return _run(once())


def _run(work: Any) -> Reward:
    """Run a coroutine to its end from a place that may itself be inside an event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)  # type: ignore[no-any-return]
    box: dict[str, Any] = {}

    def target() -> None:
        try:
            box["value"] = asyncio.run(work)
        except BaseException as exc:
            box["error"] = exc

    thread = threading.Thread(target=target, name="posttrain-score")
    thread.start()
    thread.join()
    if "error" in box:
        raise box["error"]
    return box["value"]  # type: ignore[no-any-return]
