"""Where the code of environments runs: plain functions in a pool of processes, coroutines on the loop, all with a deadline.

An environment may do both: a plain `compute_reward` in the pool, then its `finish_reward` on the loop, each with the deadline.
Nothing CPU-bound runs on the event loop. A reward that cannot be had is unscorable, never 0, and so is an episode whose
`env_response` fails. `score` is the same path for one completion text, for anyone's own loop:

    posttrain.score(env, row, "42")      # Reward(total=1.0, …)
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.environment import Environment, episode
from posttrain.errors import RunAborted
from posttrain.rollout.event_loop import run_to_end
from posttrain.rollout.reward_worker import REWARD, Raised
from posttrain.rollout.rewards import FAILED, as_reward, raised, unscorable
from posttrain.rollout.worker_pool import Died, WorkerPool
from posttrain.types import Message, Reward

if TYPE_CHECKING:
    from posttrain.data.environment import EpisodeState

_log = logging.getLogger("posttrain.rewards")

ANSWER = "env_response"


class Scorer:
    """Scores episodes of `environments` (by the name that draws carry).

    timeout_s   deadline of one reward, seconds         env_timeout_s   of one answer to a turn
    workers     processes for plain functions; None: one per CPU core that this process may use, at most 8
    log_path    where the workers' output goes; default: this process's standard error
    strict      a reward that fails (`rewards.FAILED`) ends the run, instead of leaving its sample out
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        *,
        timeout_s: float = 30.0,
        env_timeout_s: float = 120.0,
        workers: int | None = 1,
        log_path: Path | None = None,
        strict: bool = False,
    ) -> None:
        self._environments, self._strict = dict(environments), strict
        self._timeout, self._env_timeout = timeout_s, env_timeout_s
        hosted = {name: env for name, env in environments.items() if env.offloads or _plain(env, REWARD) or _plain(env, ANSWER)}
        self._pool = WorkerPool(hosted, workers=workers, log_path=log_path) if hosted else None
        self._blocking = frozenset(name for name, env in environments.items() if _plain(env, REWARD))
        self._finishing = frozenset(n for n in self._blocking if _own(environments[n], "finish_reward"))
        self._started: list[Environment] = []

    def deadline(self, env: str) -> float:
        """Seconds that a reward of this environment may take."""
        return max(self._timeout, self._environments[env].reward_timeout_s)

    @property
    def longest_s(self) -> float:
        """The longest of these deadlines."""
        return max(map(self.deadline, self._environments), default=self._timeout)

    async def start(self) -> None:
        """Start the workers, and what environments bring up. Raises PluginError when one cannot be built in a worker."""
        if self._pool:
            await self._pool.start()
        for env in self._environments.values():
            self._started.append(env)
            await env.start()

    async def respond(self, env: str, state: EpisodeState) -> list[Message] | Reward | None:
        """What the environment says to the model's last turn; None: the episode ends; a Reward, unscorable: it failed."""
        environment = self._environments[env]
        limit = max(self._env_timeout, environment.answer_timeout_s)
        try:
            if _plain(environment, ANSWER):
                return check_messages(await self.call(env, state, ANSWER, timeout=limit))
            async with asyncio.timeout(limit) as deadline:
                answer: Any = environment.env_response(state)
                return check_messages(await answer if inspect.isawaitable(answer) else answer)
        except Exception as exc:
            late = isinstance(exc, TimeoutError) and (_plain(environment, ANSWER) or deadline.expired())
            cause = "timeout" if late else "died" if isinstance(exc, Died) else "raised"
            what = f"no answer within {limit:g} s (rollout.env_timeout_s)" if late else _says(exc)
            reward = unscorable(f"env_{cause}", what)
            self.tell(env, state, reward)
            return reward

    async def call(self, env: str, state: EpisodeState, method: str, *args: Any, timeout: float) -> Any:
        """`method(state, *args)` of an environment in a process, which may change `state.custom`. See `EpisodeState.offload`."""
        assert self._pool is not None, f"{env} has no processes: set offloads = True in its class"
        found, state.custom = await self._pool.call(env, method, state, *args, timeout_s=timeout)
        return found

    async def score(self, env: str, state: EpisodeState) -> Reward:
        """The reward of one episode; unscorable (total None, `info["cause"]`) when there is none.

        Raises for a bad one only when strict: RunAborted.
        """
        if env in self._blocking and self._pool:
            reward = await self._in_pool(env, state)
            if env in self._finishing and reward.total is not None:
                plain = reward
                reward = await self._within(env, lambda: self._environments[env].finish_reward(state, plain))
        else:
            reward = await self._within(env, lambda: self._environments[env].compute_reward(state))
        if reward.total is None:
            self.tell(env, state, reward)
        return reward

    async def stacks(self) -> dict[str, str]:
        """What every worker writes of itself, for the report of a hang."""
        return await self._pool.stacks() if self._pool else {}

    async def close(self) -> None:
        """End all workers and what environments brought up; idempotent. No process is left."""
        if self._pool:
            await self._pool.close()
        started, self._started = self._started, []
        ended = await asyncio.gather(*(env.close() for env in started), return_exceptions=True)
        for failure in filter(lambda one: isinstance(one, BaseException), ended):
            raise failure  # type: ignore[misc]

    async def _in_pool(self, env: str, state: EpisodeState) -> Reward:
        try:
            reward: Reward = await self.call(env, state, REWARD, timeout=self.deadline(env))
            return reward
        except TimeoutError as exc:
            return unscorable("timeout", f"no reward within {self.deadline(env):g} s (rollout.reward_timeout_s); {exc}")
        except (Died, Raised) as exc:
            return unscorable("died" if isinstance(exc, Died) else "raised", str(exc))

    def tell(self, env: str, state: EpisodeState, reward: Reward) -> None:
        """Say that an episode has no reward. Raises RunAborted when that is a fault and the scorer is strict."""
        sample, cause = state.trajectory.sample_id if state.trajectory else "", reward.info.get("cause")
        _log.warning("reward of sample %r (%s) is unscorable: %s: %s", sample, env, cause, reward.info.get("error", ""))
        if self._strict and cause in FAILED:
            raise RunAborted(
                f"the reward of sample {sample!r} ({env}) failed", cause=f"{cause}: {reward.info.get('error', '')}",
                fix="correct the environment and resume; rollout.strict_rewards=false leaves such samples out of training",
                where="rollout.strict_rewards", anchor="troubleshooting.md#all-rewards-are-unscorable", code="reward-failed",
            )  # fmt: skip

    async def _within(self, env: str, call: Callable[[], Any]) -> Reward:
        """What the coroutine of `call()` comes to, within the deadline."""
        try:
            async with asyncio.timeout(self.deadline(env)) as deadline:
                return as_reward(await call())
        except Exception as exc:
            if isinstance(exc, TimeoutError) and deadline.expired():
                return unscorable("timeout", f"no reward within {self.deadline(env):g} s (rollout.reward_timeout_s)")
            return raised(exc)


def check_messages(answer: Any) -> list[Message] | None:
    """What an `env_response` returned. Raises TypeError when it is no list of messages."""
    if answer is None:
        return None
    good = isinstance(answer, Sequence) and not isinstance(answer, str) and bool(answer)
    if not good or not all(isinstance(m, Mapping) and "role" in m and "content" in m for m in answer):
        shown = f"{type(answer).__name__} {str(answer)[:60]!r}"
        raise TypeError(f"env_response returned {shown}, not messages [{{'role': …, 'content': …}}] or None to end the episode")
    return [Message(**message) for message in answer]


def _own(env: Environment, method: str) -> bool:
    return getattr(type(env), method) is not getattr(Environment, method)


def _plain(env: Environment, method: str) -> bool:
    """Whether an environment has the method, and it is a plain function."""
    return _own(env, method) and not inspect.iscoroutinefunction(getattr(env, method))


def _says(exc: Exception) -> str:
    return str(exc) if isinstance(exc, Died | Raised) else f"{type(exc).__name__}: {exc}"


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
