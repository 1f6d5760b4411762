"""One episode of a verifiers environment, driven turn by turn by whoever generates, in the order of its own `rollout`.

    episode = await VerifiersEpisode.begin(env, row, tools)     # init_state, setup_state
    await episode.hear(state)                                   # the model's turns, as trajectory steps
    await episode.answer()                                      # is_completed, then get_prompt_messages
    await episode.score()                                       # cleanup, then the rubric

What it raises makes the episode unscorable: an error of its infrastructure, of a reward function, or what it cannot do here.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import json
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import AssistantMessage, ClientConfig, Response, ResponseMessage, ToolCall
from verifiers.utils.message_utils import maybe_normalize_messages

from posttrain.data.environment import EpisodeState, as_messages
from posttrain.data.tool_calls import parse
from posttrain.types import Message, Reward

_failed: ContextVar[list[Exception] | None] = ContextVar("posttrain verifiers failures", default=None)
_loading = threading.Lock()


class VerifiersEpisode:
    """`state` is the environment's own, with everything it keeps of an episode."""

    def __init__(self, env: Any, state: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        self.env, self.state, self._tools = env, state, tools
        self._prompt: list[Any] = list(state["prompt"])
        self._heard = 0
        self._ended = False

    @classmethod
    async def begin(cls, env: Any, row: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> VerifiersEpisode:
        """The state of a row, set up as the environment does. Raises RuntimeError when it asks otherwise than its row."""
        given = row["prompt"] if isinstance(row["prompt"], str) else [message_of(message) for message in row["prompt"]]
        state = await env.init_state({**row, "prompt": given}, _NoModel(), "posttrain", {})
        asked = _shown(state["prompt"])
        state["timing"].generation.start = time.time()
        changed = await env.setup_state(state)
        state = state if changed is None else changed
        if _shown(state["prompt"]) != asked:
            raise RuntimeError("setup_state changes the prompt, which was asked already: put what it adds into the dataset")
        return cls(env, state, tools)

    async def hear(self, state: EpisodeState) -> None:
        """Take in what the model said since the last time."""
        said = [m for m in state.messages[len(as_messages(state.prompt)) :] if m["role"] == "assistant"]
        for number, message in enumerate(said[self._heard :], self._heard + 1):
            last = number == len(said)
            cut = last and state.trajectory is not None and state.trajectory.finish_reason == "length"
            text = state.completion if last else str(message.get("content") or "")
            await self.env.add_model_response(self.state, self._prompt, self._response(text, cut, number))
        self._heard = len(said)

    async def answer(self) -> list[Message] | None:
        """What the environment says; None when one of its stop conditions holds."""
        if await self.env.is_completed(self.state):
            self._refuse_error()
            return None
        before = self._messages()
        try:
            prompt = list(maybe_normalize_messages(await self.env.get_prompt_messages(self.state), field_name="prompt_messages"))
        except vf.Error as exc:
            raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc
        if self.state.get("final_env_response") is not None and await self.env.is_completed(self.state):
            return None
        if _shown(prompt[: len(before)]) != _shown(before) or len(prompt) == len(before):
            raise RuntimeError("it rewrites what was said: only environments whose conversation grows can be trained on")
        self._prompt = prompt
        return [message_of(message.model_dump()) for message in prompt[len(before) :]]

    async def score(self) -> Reward:
        """What its rubric gives. Raises what a reward function raised."""
        if not self._ended:
            self._ended = True
            if not await self.env.is_completed(self.state):
                self.state["is_completed"] = self.state["is_truncated"] = True  # cut off: no room, or no more turns
            self._refuse_error()
            await self.env.cleanup(self.state)
            failures: list[Exception] = []
            token = _failed.set(failures)
            try:
                await self.env.rubric.score_rollout(self.state)
            finally:
                _failed.reset(token)
                await self.env.rubric.cleanup(self.state)
            if failures:
                self.state["error"] = failures[0]
        self._refuse_error()
        metrics = {str(name): float(value) for name, value in (self.state["metrics"] or {}).items()}
        return Reward(float(self.state["reward"]), metrics, {"stopped": str(self.state.get("stop_condition") or "cut off")})

    def _response(self, text: str, cut: bool, number: int) -> Any:
        calls = [
            ToolCall(id=call.id, name=call.name, arguments=json.dumps(call.arguments) if not call.problem else call.raw)
            for call in (parse(text, tools=self._tools, first=100 * number + 1) if self._tools else ())
        ]
        reason = "length" if cut else "tool_calls" if calls else "stop"
        message = ResponseMessage(content=text, tool_calls=calls or None, finish_reason=reason, is_truncated=cut)
        return Response(id=f"turn-{number}", created=int(time.time()), model="posttrain", message=message)

    def _messages(self) -> list[Any]:
        """The conversation up to the model's last turn."""
        if not self.state["trajectory"]:
            return list(self.state["prompt"])
        step = self.state["trajectory"][-1]
        return [*step["prompt"], *step["completion"]]

    def _refuse_error(self) -> None:
        error = self.state.get("error")
        if error is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


class _NoModel(Client):  # type: ignore[misc, type-arg]
    """The model is asked by the run, never by the environment."""

    def __init__(self) -> None:
        super().__init__(None)

    def setup_client(self, config: ClientConfig) -> None:
        return None

    async def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the environment asks the model itself: its turns come from the run, which nobody can ask from here")

    to_native_tool = to_native_prompt = get_native_response = raise_from_native_response = from_native_response = _refuse
    get_response = _refuse

    async def close(self) -> None:
        return None


def message_of(message: Mapping[str, Any] | Any) -> Message:
    """A message as posttrain has it; content in parts becomes text. Raises ValueError for an image or a sound."""
    raw = message if isinstance(message, Mapping) else message.model_dump()
    content = raw.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
        if any(part.get("type") != "text" for part in parts):
            raise ValueError("a message holds more than text, which is all that this adapter passes on")
        content = "".join(str(part["text"]) for part in parts)
    made = Message(role=raw["role"], content=content or "")
    for key in ("name", "tool_call_id"):
        if raw.get(key) is not None:
            made[key] = raw[key]  # type: ignore[literal-required]
    return made


def settle(env: Any) -> None:
    """Make what a rubric swallows known, and let plain functions of rubrics and tools run beside the event loop."""
    for one in [env, *getattr(env, "envs", ())]:
        for rubric in _rubrics(one.rubric):
            rubric.funcs[:] = [_noting(func) for func in rubric.funcs]
        tools = getattr(one, "tool_map", {})
        tools.update({name: _beside(tool) for name, tool in tools.items() if not inspect.iscoroutinefunction(tool)})


@contextmanager
def quietly() -> Iterator[None]:
    """While an environment is made it does not take the signals of the process, nor a place among what runs at its end."""
    with _loading:
        before = signal.signal, atexit.register
        signal.signal, atexit.register = (lambda *_: None), (lambda func, *_, **__: func)  # type: ignore[assignment]
        try:
            yield
        finally:
            signal.signal, atexit.register = before  # type: ignore[assignment]


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for one in getattr(rubric, "rubrics", ()):
        yield from _rubrics(one)


def _noting(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; what it raises is also noted for the episode that is scored."""
    waits = inspect.iscoroutinefunction(func)

    @functools.wraps(func)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = func(*args, **kwargs) if waits else await asyncio.to_thread(func, *args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except Exception as exc:
            noted = _failed.get()
            if noted is not None:
                noted.append(exc)
            raise

    return call


def _beside(func: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(func)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(func, *args, **kwargs)

    return call


def _shown(messages: Sequence[Any]) -> list[Any]:
    """Messages as they can be compared."""
    return [(m.role, m.content) if not isinstance(m, AssistantMessage) else (m.role, m.content, m.tool_calls) for m in messages]
