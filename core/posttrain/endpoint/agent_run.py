"""One agent in its session, from the first question to the end, whatever it does: a deadline, and what became of it.

    with endpoint.open(sampling=…, seed=…) as session:
        ended = await run_agent(env, state, session, model=endpoint.model)
    if ended.problem is None: the episode is `session.trajectory()`, to be scored
    else:                     it is unscorable, and `ended.problem` is the Reward that says why
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.rollout.reward_worker import Raised
from posttrain.rollout.rewards import unscorable
from posttrain.rollout.worker_pool import Died
from posttrain.weights.deadline import in_thread

if TYPE_CHECKING:
    from posttrain.data.agent_environment import AgentEnvironment
    from posttrain.data.environment import EpisodeState
    from posttrain.endpoint.session import Session
    from posttrain.types import Reward

GRACE_S = 2.0
"""How long an agent that was cancelled may take to clean up before it is left behind."""
_log = logging.getLogger("posttrain.endpoint")
_left: set[asyncio.Future[Any]] = set()


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of an agent. problem: why there is no reward; None: there may be one.

    truncated: it ran into a limit, "max_turns" or "context_length_exceeded", and ended on that; such an episode is scored.
    """

    problem: Reward | None = None
    truncated: str = ""


async def run_agent(
    env: AgentEnvironment, state: EpisodeState, session: Session, *, model: str, timeout_s: float | None = None
) -> Ended:
    """Run the agent until it returns, raises or overruns (default: `env.agent_timeout_s`), then close its session."""
    limit = env.agent_timeout_s if timeout_s is None else timeout_s
    work = asyncio.ensure_future(_start(env, state, session, model, limit))
    hosted = state.offload is not None and not inspect.iscoroutinefunction(env.run_agent)
    try:
        done, _ = await asyncio.wait({work}, timeout=None if hosted else limit)  # a process's deadline begins when it does
        late = not done
        session.close("its agent ran out of time" if late else "its agent has ended")
        if late:
            await _stop(work, session)
        return _ended(work, session, late, limit)
    except asyncio.CancelledError:
        session.close("its episode was given up")
        await _stop(work, session)
        raise


async def _start(env: AgentEnvironment, state: EpisodeState, session: Session, model: str, limit: float) -> Any:
    given = (session.base_url, session.api_key, model)
    if inspect.iscoroutinefunction(env.run_agent):
        return await env.run_agent(state, *given)
    if state.offload is not None:
        try:
            return await state.offload("run_agent", *given, timeout=limit)
        except TimeoutError as exc:
            raise Overran from exc
    return await in_thread(env.run_agent, state, *given)


async def _stop(work: asyncio.Future[Any], session: Session) -> None:
    """Cancel it; one that does not end is left behind, where its closed session answers it nothing any more."""
    work.cancel()
    _, pending = await asyncio.wait({work}, timeout=GRACE_S)
    if pending:
        _log.warning("the agent of sample %r goes on although it was cancelled; it is left behind", session.name)
        _left.add(work)
        work.add_done_callback(_left.discard)


def _ended(work: asyncio.Future[Any], session: Session, late: bool, limit: float) -> Ended:
    overran = f"the agent did not end within {limit:g} s (agent_timeout_s)"
    if late:
        return Ended(unscorable("agent_timeout", overran))
    failure = asyncio.CancelledError("it cancelled itself") if work.cancelled() else work.exception()
    if isinstance(failure, Overran):
        return Ended(unscorable("agent_timeout", overran))
    if isinstance(failure, Died):
        return Ended(unscorable("agent_died", str(failure)))
    if failure is not None and not (session.exhausted and session.answers):
        said = str(failure) if isinstance(failure, Raised) else f"{type(failure).__name__}: {failure}"
        return Ended(unscorable("agent_raised", said))
    if not session.answers:
        return Ended(unscorable("agent_silent", "the agent asked nothing at its base_url, or got no answer"))
    return Ended(truncated=session.exhausted)


class Overran(Exception):
    """The process of a plain `run_agent` was ended at the deadline."""
