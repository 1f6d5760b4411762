"""Between a request and an engine: messages become ids, ids are sampled, and what was sampled becomes an answer's text.

Rendering and decoding run in one thread of their own: nothing that computes runs on the event loop. A request that is cancelled,
because its client went away or its session was closed, is aborted in the engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.data.environment import ChatOrText, Prompt, ToolChat
from posttrain.data.packer import engine_input, next_prompt
from posttrain.endpoint.api_error import TOO_LONG, ApiError, bad
from posttrain.endpoint.calls_of import calls_of
from posttrain.endpoint.chat_messages import spelled_calls
from posttrain.errors import PackerError, PosttrainError
from posttrain.types import Completion, FinishReason, Message, Request, Sampling

if TYPE_CHECKING:
    from posttrain.data.packer import DataPacker
    from posttrain.endpoint.asked import Asked
    from posttrain.rollout.engine import Generates

T = TypeVar("T")


@dataclass(slots=True)
class Choice:
    """One answer. text: what is said, without calls and without the stop text.   said: all that was sampled, as text.

    The per-token lists are of what was sampled, up to the token that completed a stop text.
    """

    text: str
    said: str
    tool_calls: list[dict[str, Any]]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    tokens: list[str] = field(default_factory=list)

    @property
    def message(self) -> Message:
        """As the client gets it, and sends it back."""
        out = Message(role="assistant", content=self.text)
        if self.tool_calls:
            out["tool_calls"] = self.tool_calls
        return out


_ENDPOINTS = itertools.count()
"""Several may ask one engine, which tells requests apart by their names."""


class Answering:
    """One engine and one packer. max_model_len: prompt plus answer, tokens."""

    def __init__(self, engine: Generates, packer: DataPacker, max_model_len: int) -> None:
        self.engine, self.packer, self.max_model_len = engine, packer, max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="endpoint")
        self._name, self._numbers = f"endpoint-{next(_ENDPOINTS)}", itertools.count()

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args))

    async def prompt_ids(self, asked: Asked) -> list[list[int]]:
        """The prompts of a request as the engine reads them. Raises ApiError 400 for what cannot be rendered."""
        prompts = [self._chat(asked.messages, asked.tools)] if asked.chat else asked.prompts
        return await self.in_thread(lambda: [self._ids(prompt) for prompt in prompts])

    def room(self, ids: Sequence[int], asked: Asked, most: int | None = None) -> int:
        """Tokens that an answer may have. most: by the run, where there is one. Raises ApiError 400 when there is no room."""
        left = self.max_model_len - len(ids)
        if left < 1:
            raise bad(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your messages resulted in "
                f"{len(ids)} tokens.", "messages" if asked.chat else "prompt", TOO_LONG,
            )  # fmt: skip
        return min(left, *(limit for limit in (asked.max_tokens, most) if limit is not None), left)

    async def sample(
        self, ids: Sequence[int], n: int, seed: int, sampling: Sampling, priority: int = 0
    ) -> list[Completion]:
        """`n` completions in order. Raises ApiError 500 when the engine failed, 409 before it has weights."""
        request = Request(f"{self._name}-{next(self._numbers)}", list(ids), n, seed, sampling, priority)
        done: dict[int, Completion] = {}
        try:
            async for completion in self.engine.generate([request]):
                done[completion.index] = completion
        except PosttrainError as exc:
            if exc.code == "no-weights":
                raise ApiError(409, "the engine has no weights yet; ask again", code=exc.code, retry_after=1) from exc
            raise ApiError(500, exc.message, code=exc.code) from exc
        finally:
            if len(done) < n:
                await asyncio.shield(asyncio.ensure_future(self.engine.abort(request.id)))
        failed = next((c for c in done.values() if c.finish_reason in ("error", "aborted")), None)
        if failed is not None or len(done) < n:
            said = (failed.error or failed.finish_reason) if failed else f"{len(done)} of {n} completions"
            raise ApiError(500, f"the engine failed: {said}", code="engine")
        return [done[index] for index in range(n)]

    async def choices(self, ids: Sequence[int], completions: Sequence[Completion], asked: Asked) -> list[Choice]:
        """The answers to the prompt `ids` as their client gets them."""
        return await self.in_thread(lambda: [self._choice(ids, completion, asked) for completion in completions])

    async def next_ids(
        self, ids: Sequence[int], said: Sequence[Message], added: Sequence[Message], asked: Asked, *, verbatim: bool
    ) -> tuple[list[int], bool]:
        """The prompt after `ids`, which say `said`, and `added`; and whether it begins with them (`data.packer.next_prompt`).

        Not where an assistant says in `added` what it did not say here. Raises ApiError 400 for what cannot be rendered.
        """

        def rendered() -> list[int]:
            return self._ids(self._chat([*said, *added], asked.tools))

        def work() -> tuple[list[int], bool]:
            if any(message["role"] == "assistant" for message in added):
                return rendered(), False
            prefix = self.packer.thinking_prefix
            try:
                return next_prompt(self.packer, ids, added, rendered, verbatim=verbatim, prefix=prefix)
            except PackerError as exc:
                raise _unrenderable(exc) from exc

        return await self.in_thread(work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _chat(self, messages: list[Message], tools: list[dict[str, Any]]) -> Prompt:
        said = messages if self.packer.knows_tools else spelled_calls(messages)
        return ToolChat(said, tools) if tools else ChatOrText(said)

    def _ids(self, prompt: Prompt) -> list[int]:
        try:
            return list(engine_input(self.packer, prompt)["prompt_ids"])
        except PackerError as exc:
            raise _unrenderable(exc) from exc

    def _choice(self, prompt: Sequence[int], done: Completion, asked: Asked) -> Choice:
        text, length = stopped(self._text, done.token_ids, asked.stop)
        ids = list(done.token_ids[:length])
        said = self._text(ids)
        reason: FinishReason = "stop" if length < len(done.token_ids) or text != said else done.finish_reason
        prefix = self.packer.thinking_prefix if asked.chat else ""
        outside, calls = prefix + text, list[dict[str, Any]]()
        if asked.calls:
            opened = self.packer.spell(prompt[-8:]).rstrip().endswith("<think>") and not prefix
            outside, calls = calls_of(outside, asked.tools, (*prompt, *ids), thinking=opened)
        tokens = [self.packer.spell([i]) for i in ids] if asked.logprobs else []
        logprobs, versions = list(done.logprobs[:length]), list(done.versions[:length])
        return Choice(outside, prefix + said, calls, ids, logprobs, versions, reason, tokens)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.packer.get_rollout_output(ids)["text"])


def _unrenderable(exc: PackerError) -> ApiError:
    return bad(f"{exc.message}: {exc.cause}" if exc.cause else exc.message, "messages", exc.code)


def stopped(text_of: Callable[[Sequence[int]], str], ids: Sequence[int], stop: Sequence[str]) -> tuple[str, int]:
    """The text before the first stop text, and how many ids it took to complete that one; all when there is none."""
    text = text_of(ids)
    found = [(at, word) for word in stop if (at := text.find(word)) >= 0]
    if not found:
        return text, len(ids)
    at, word = min(found)
    low, high = 1, len(ids)
    while low < high:  # the shortest beginning whose text has the whole word
        middle = (low + high) // 2
        low, high = (low, middle) if word in text_of(ids[:middle])[at:] else (middle + 1, high)
    return text[:at], low
