"""Requests that are gathered into calls: what waits goes together, what is given up is never asked, a failure reaches all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from posttrain.endpoint.together import Together
from posttrain.types import Completion, Request, Sampling


class Slow:
    """Answers each call when it is let; keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.aborted: list[str] = []
        self.let = asyncio.Semaphore(0)
        self.failure: Exception | None = None

    async def start(self) -> None: ...

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        self.calls.append([r.id for r in requests])
        await self.let.acquire()
        if self.failure:
            raise self.failure
        for request in requests:
            for index in range(request.n):
                yield Completion(request.id, index, [index], [0.0], [1], "stop")

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def close(self) -> None: ...


def request(name: str, n: int = 1) -> Request:
    return Request(name, [1], n, 0, Sampling(4))


async def answers(together: Together, *requests: Request) -> list[tuple[str, int]]:
    return [(c.request_id, c.index) async for c in together.generate(requests)]


async def begun(engine: Slow, calls: int) -> None:
    while len(engine.calls) < calls:
        await asyncio.sleep(0.001)


def test_what_comes_while_a_call_runs_is_the_next_call() -> None:
    async def main() -> None:
        engine = Slow()
        together = Together(engine)
        first = asyncio.ensure_future(answers(together, request("a", 2)))
        await begun(engine, 1)
        later = [asyncio.ensure_future(answers(together, request(name))) for name in "bcd"]
        await asyncio.sleep(0.01)
        later[1].cancel()
        await asyncio.gather(later[1], return_exceptions=True)
        await together.abort("c")
        engine.let.release()
        assert await first == [("a", 0), ("a", 1)]
        await begun(engine, 2)
        engine.let.release()
        assert await later[0] == [("b", 0)] and await later[2] == [("d", 0)]
        assert engine.calls == [["a"], ["b", "d"]]
        await together.close()

    asyncio.run(main())


def test_a_failure_reaches_all_of_the_call_and_nobody_else() -> None:
    async def main() -> None:
        engine = Slow()
        together = Together(engine)
        engine.failure = ValueError("broken")
        failing = [asyncio.ensure_future(answers(together, request(name))) for name in "ab"]
        await begun(engine, 1)
        engine.let.release()
        assert [str(e) for e in await asyncio.gather(*failing, return_exceptions=True)] == ["broken", "broken"]
        engine.failure = None
        engine.let.release()
        assert await answers(together, request("c")) == [("c", 0)]

    asyncio.run(main())


def test_what_is_asked_when_it_is_closed_ends() -> None:
    async def main() -> None:
        engine = Slow()
        together = Together(engine)
        asked = asyncio.ensure_future(answers(together, request("a")))
        await begun(engine, 1)
        await together.close()
        assert await asked == []
        await together.abort("a")
        assert engine.aborted == ["a"]

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_was_never_asked_is_aborted_without_the_engine(n: int) -> None:
    async def main() -> None:
        engine = Slow()
        together = Together(engine)
        first = asyncio.ensure_future(answers(together, request("a")))
        await begun(engine, 1)
        waiting = asyncio.ensure_future(answers(together, request("b", n)))
        await asyncio.sleep(0.01)
        await together.abort("b")
        assert await waiting == [] and engine.aborted == []
        engine.let.release()
        assert await first == [("a", 0)] and engine.calls == [["a"]]

    asyncio.run(main())
