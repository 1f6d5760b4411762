"""Requests that come one by one, asked of the engine together: for one that decodes what it is given in one call side by side,
and calls one after the other (`hf`). What comes while a call runs waits, and makes up the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.rollout.engine import Generates
    from posttrain.types import Completion, Request

GATHER_S = 0.002
"""How long the first of a call waits for others."""


class Together:
    """A `Generates` in front of another one."""

    def __init__(self, engine: Generates) -> None:
        self._engine = engine
        self._waiting: dict[str, Request] = {}
        self._owed: dict[str, asyncio.Queue[Completion | BaseException | None]] = {}
        self._calls: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """As the engine's."""
        answers: asyncio.Queue[Completion | BaseException | None] = asyncio.Queue()
        for request in requests:
            self._waiting[request.id], self._owed[request.id] = request, answers
        if self._calls is None or self._calls.done():
            self._calls = asyncio.create_task(self._call_on(), name="endpoint calls")
        left = len(requests)
        try:
            while left:
                answer = await answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                left -= answer is None
                if answer is not None:
                    yield answer
        finally:
            for request in requests:
                self._waiting.pop(request.id, None)
                self._owed.pop(request.id, None)

    async def abort(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is None:
            await self._engine.abort(request_id)
        elif request_id in self._owed:
            self._owed[request_id].put_nowait(None)  # it was never asked

    async def close(self) -> None:
        """End what is asked; the engine itself stays."""
        if self._calls is not None:
            self._calls.cancel()
            await asyncio.gather(self._calls, return_exceptions=True)

    async def _call_on(self) -> None:
        """One call after the other, until nobody waits."""
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            asked, self._waiting = self._waiting, {}
            failure: BaseException | None = None
            try:
                if asked:
                    async for done in self._engine.generate(list(asked.values())):
                        if answers := self._owed.get(done.request_id):
                            answers.put_nowait(done)
            except asyncio.CancelledError:
                for name in asked:
                    self._settle(name, None)
                raise
            except Exception as exc:
                failure = exc
            for name in asked:
                self._settle(name, failure)

    def _settle(self, name: str, failure: BaseException | None) -> None:
        if answers := self._owed.get(name):
            answers.put_nowait(failure)
