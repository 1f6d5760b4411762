"""An episode played with scripted replies instead of a model: what a test of an environment of several turns needs.

    state, reward = play(env, row, ["<guess>crane</guess>", "<guess>llama</guess>"])
    assert reward.total == 0.6 and state.messages[-1]["content"].startswith("L L A M A")

    state, reward = play(env, row, lambda state: "higher" if state.turn else "50")       # or a player that sees the episode

It goes as in a run: `format_prompt`, then turn by turn the reply and `env_response`, until that is None, `max_turns` is reached
or the replies are used up; then `compute_reward`. There are no processes and no deadlines, `state.offload` calls the method in a
thread, and what the environment raises is raised here. `aplay` is the same for a test that is a coroutine.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from posttrain.data.environment import Environment, EpisodeState, as_messages
from posttrain.rollout.rewards import as_reward
from posttrain.rollout.scoring import check_messages
from posttrain.types import Message, Reward

Player: TypeAlias = Callable[[EpisodeState], str | Message | None]
"""What says the model's next turn: its text, or a message with `tool_calls` as a packer reads it from ids; None ends it."""


class Played(NamedTuple):
    """The state at the end, with all messages, and what the episode is worth."""

    state: EpisodeState
    reward: Reward


def play(
    env: Environment, row: Mapping[str, Any], replies: Iterable[str | Message] | Player, *, seed: int = 0, start: bool = True
) -> Played:
    """The episode of one row. replies: of the model, turn by turn, or a function that gives the next one.

    start: call `env.start()` before and `env.close()` after it.
    """
    return asyncio.run(aplay(env, row, replies, seed=seed, start=start))


async def aplay(
    env: Environment, row: Mapping[str, Any], replies: Iterable[str | Message] | Player, *, seed: int = 0, start: bool = True
) -> Played:
    """`play` on an event loop that runs already."""
    prompt = env.format_prompt(row)
    state = EpisodeState(row, prompt, list(as_messages(prompt)), seed=seed)

    async def offload(method: str, *args: Any, timeout: float) -> Any:
        async with asyncio.timeout(timeout):
            return await asyncio.to_thread(getattr(env, method), state, *args)

    state.offload = offload
    if start:
        await env.start()
    try:
        await _turns(env, state, replies)
        value: Any = env.compute_reward(state)
        reward = as_reward(await value if inspect.isawaitable(value) else value)
        if type(env).finish_reward is not Environment.finish_reward and reward.total is not None:
            reward = as_reward(await env.finish_reward(state, reward))
        return Played(state, reward)
    finally:
        if start:
            await env.close()


async def _turns(env: Environment, state: EpisodeState, replies: Iterable[str | Message] | Player) -> None:
    script = None if callable(replies) else iter(replies)
    while state.turn < env.max_turns:
        said = replies(state) if callable(replies) else next(script, None)  # type: ignore[arg-type]
        if said is None:
            return
        message: Message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        state.messages.append(message)
        state.completion, state.turn = str(message.get("content") or ""), state.turn + 1
        answer: Any = env.env_response(state)
        messages = check_messages(await answer if inspect.isawaitable(answer) else answer)
        if messages is None:
            return
        state.messages += messages
        await asyncio.sleep(0)  # others that play beside it have their turn
