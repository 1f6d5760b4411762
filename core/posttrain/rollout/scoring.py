"""Reward execution: synchronous rewards in a pool of processes, asynchronous ones on the loop, both with a deadline.

An environment may do both: a plain `compute_reward` in the pool, then its `finish_reward` on the loop, each with the deadline.
Nothing CPU-bound runs on the event loop, and a reward that cannot be had is unscorable, never 0. `score` is the same path for
one completion text, for anyone's own loop:

    posttrain.score(env, row, "42")      # Reward(total=1.0, …)
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.environment import Environment, episode
from posttrain.errors import RunAborted
from posttrain.rollout.event_loop import run_to_end
from posttrain.rollout.rewards import FAILED, as_reward, raised, unscorable
from posttrain.rollout.worker_pool import WorkerPool
from posttrain.types import Reward

if TYPE_CHECKING:
    from posttrain.data.environment import EpisodeState

_log = logging.getLogger("posttrain.rewards")


class Scorer:
    """Scores episodes of `environments` (by the name that draws carry).

    timeout_s   deadline of one reward, seconds
    workers     processes for synchronous rewards; None: one per CPU core that this process may use, at most 8
    log_path    where the workers' output goes; default: this process's standard error
    strict      a reward that fails (`rewards.FAILED`) ends the run, instead of leaving its sample out
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        *,
        timeout_s: float = 30.0,
        workers: int | None = 1,
        log_path: Path | None = None,
        strict: bool = False,
    ) -> None:
        self._environments, self._timeout, self._strict = dict(environments), timeout_s, strict
        blocking = {name: env for name, env in environments.items() if not inspect.iscoroutinefunction(env.compute_reward)}
        self._pool = WorkerPool(blocking, workers=workers, timeout_s=timeout_s, log_path=log_path) if blocking else None
        self._blocking = frozenset(blocking)
        self._finishing = frozenset(n for n, env in blocking.items() if type(env).finish_reward is not Environment.finish_reward)

    async def start(self) -> None:
        """Start the workers. Raises PluginError when an environment cannot be built in them."""
        if self._pool:
            await self._pool.start()

    async def score(self, env: str, state: EpisodeState) -> Reward:
        """The reward of one episode; unscorable (total None, `info["cause"]`) when there is none.

        Raises for a bad one only when strict: RunAborted.
        """
        if env in self._blocking and self._pool:
            reward = await self._pool.score(env, state)
            if env in self._finishing and reward.total is not None:
                plain = reward
                reward = await self._within(lambda: self._environments[env].finish_reward(state, plain))
        else:
            reward = await self._within(lambda: self._environments[env].compute_reward(state))
        if reward.total is None:
            sample, cause = state.trajectory.sample_id if state.trajectory else "", reward.info.get("cause")
            _log.warning("reward of sample %r (%s) is unscorable: %s: %s", sample, env, cause, reward.info.get("error", ""))
            if self._strict and cause in FAILED:
                raise RunAborted(
                    f"the reward of sample {sample!r} ({env}) failed", cause=f"{cause}: {reward.info.get('error', '')}",
                    fix="correct the reward and resume; rollout.strict_rewards=false leaves such samples out of training",
                    where="rollout.strict_rewards", anchor="troubleshooting.md#all-rewards-are-unscorable", code="reward-failed",
                )  # fmt: skip
        return reward

    async def close(self) -> None:
        """End all workers; idempotent. No process is left."""
        if self._pool:
            await self._pool.close()

    async def _within(self, call: Callable[[], Any]) -> Reward:
        """What the coroutine of `call()` comes to, within the deadline."""
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                return as_reward(await call())
        except Exception as exc:
            if isinstance(exc, TimeoutError) and deadline.expired():
                return unscorable("timeout", f"no reward within {self._timeout:g} s (rollout.reward_timeout_s)")
            return raised(exc)


def score(env: Environment | str, row: Mapping[str, Any], completion: str, *, timeout_s: float = 30.0, seed: int = 0) -> Reward:
    """The reward of one completion text, exactly as a run would compute it (process, deadline, unscorable).

    env: an environment object, or a plug-in name. row: a row of its dataset. Works inside a running event loop too.
    """
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

    return run_to_end(once())
