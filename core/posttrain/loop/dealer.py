"""Who asks the engine for the next turns of episodes that go on side by side.

`Freely` asks for each as soon as it is wanted. `InStep` waits until every episode that still generates wants one, and asks for
all in one call, in the order of their places: then the engine's batches depend on nothing but ids, and a run is reproducible to
the bit also when environments take their time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from posttrain.errors import RunAborted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from posttrain.rollout.engine import Generates
    from posttrain.types import Completion, Request


Place = tuple[int, int]
"""Of an episode: the index of its draw, and of the sample."""


class Dealer(Protocol):
    async def next(self, request: Request, place: Place) -> Completion:
        """The completion of a request for one. Raises what the engine raises."""

    def leave(self) -> None:
        """An episode wants no further turn."""

    async def close(self) -> None:
        """Ask for nothing more."""


class Freely:
    def __init__(self, engine: Generates) -> None:
        self._engine = engine

    async def next(self, request: Request, place: Place) -> Completion:
        found = [done async for done in self._engine.generate([request])]
        if not found:
            raise missing([request.id])
        return found[0]

    def leave(self) -> None:
        pass

    async def close(self) -> None:
        pass


class InStep:
    """episodes: how many there are in the beginning."""

    def __init__(self, engine: Generates, episodes: int) -> None:
        self._engine, self._left = engine, episodes
        self._wanted: dict[Place, tuple[Request, asyncio.Future[Completion]]] = {}
        self._asking: dict[asyncio.Task[None], None] = {}

    async def next(self, request: Request, place: Place) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._wanted[place] = request, answer
        self._ask_if_all()
        return await answer

    def leave(self) -> None:
        self._left -= 1
        self._ask_if_all()

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for _, answer in self._wanted.values():
            answer.cancel()

    def _ask_if_all(self) -> None:
        if self._wanted and len(self._wanted) == self._left:
            wanted, self._wanted = self._wanted, {}
            task = asyncio.create_task(self._ask(wanted), name="next turns")
            self._asking[task] = None
            task.add_done_callback(self._asking.pop)

    async def _ask(self, wanted: dict[Place, tuple[Request, asyncio.Future[Completion]]]) -> None:
        requests = [wanted[place][0] for place in sorted(wanted)]
        open_ = {request.id: answer for request, answer in wanted.values()}
        failure: BaseException | None = None
        try:
            async for done in self._engine.generate(requests):
                if answer := open_.pop(done.request_id, None):
                    _settle(answer, done)
            if open_:
                failure = missing(list(open_))
        except BaseException as exc:
            failure = exc
        for answer in open_.values():
            _settle(answer, failure)


def _settle(answer: asyncio.Future[Completion], outcome: Completion | BaseException | None) -> None:
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    elif outcome is None or isinstance(outcome, BaseException):
        answer.cancel()
    else:
        answer.set_result(outcome)


def missing(names: Sequence[str]) -> RunAborted:
    """The error of completions that the engine owes."""
    return RunAborted(
        f"the engine returned no completion for {len(names)} sample(s), first {names[0] if names else ''}",
        cause="an engine must return n completions per request", fix="see logs/ of the engine", code="completions-missing",
    )  # fmt: skip
