"""A rollout body without an engine's weight: what its readers are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from posttrain.errors import WeightSyncError
from posttrain.rollout.body import RolloutBody
from posttrain.rollout.engine import EngineSpec
from posttrain.types import Completion, Request, Sampling

SPEC = EngineSpec(model_path="", dtype="float32", max_model_len=8, max_num_seqs=1, eos_token_ids=())
ASKED = [Request("a", [1], 2, 0, Sampling(max_tokens=4))]


def body(monkeypatch: pytest.MonkeyPatch, generate: Any) -> RolloutBody:
    made = RolloutBody("rollout-0", engine="hf", options={}, spec=SPEC, transport="inproc")
    monkeypatch.setattr(made.engine, "generate", generate)
    return made


def done(index: int) -> Completion:
    return Completion("a", index, [3], [-1.0], [0], "stop")


def test_who_reads_from_a_lane_that_is_dropped_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine was left paused half-way into an update: the second sample never comes."""
    closed = []

    async def generate(requests: Sequence[Request]) -> AsyncIterator[Completion]:
        try:
            yield done(0)
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def read() -> list[int]:
        found = []
        with pytest.raises(WeightSyncError, match="rollout-0 does not generate any more: dropped") as caught:
            async for completion in made.generate(ASKED):
                found.append(completion.index)
                asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(made.invalidate("dropped")))
        assert caught.value.code == "lane-invalid"
        return found

    made = body(monkeypatch, generate)
    assert asyncio.run(read()) == [0] and closed == [True]


def test_readers_are_told_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated run is replayed from its seed alone: nothing may depend on where objects lie in memory."""

    async def generate(requests: Sequence[Request]) -> AsyncIterator[Completion]:
        await asyncio.Event().wait()
        yield done(0)

    async def read(number: int) -> None:
        with pytest.raises(WeightSyncError):
            await anext(made.generate(ASKED))
        told.append(number)

    async def main() -> None:
        readers = []
        for number in range(60):
            kept.append([object()] * number)
            readers.append(asyncio.ensure_future(read(number)))
            await asyncio.sleep(0)
        await made.invalidate("dropped")
        await asyncio.gather(*readers)

    told, kept = list[int](), list[object]()
    made = body(monkeypatch, generate)
    asyncio.run(main())
    assert told == list(range(60))


def test_completions_and_failures_come_as_the_engine_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(requests: Sequence[Request]) -> AsyncIterator[Completion]:
        yield done(0)
        if requests[0].n == 1:
            return
        raise OSError("gone")

    async def read(requests: Sequence[Request]) -> list[int]:
        return [completion.index async for completion in made.generate(requests)]

    made = body(monkeypatch, generate)
    assert asyncio.run(read([Request("a", [1], 1, 0, Sampling(max_tokens=4))])) == [0]
    with pytest.raises(OSError, match="gone"):
        asyncio.run(read(ASKED))
    assert not made._readers


def test_an_engine_that_is_cancelled_within_leaves_no_reader_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(requests: Sequence[Request]) -> AsyncIterator[Completion]:
        yield done(0)
        raise asyncio.CancelledError

    async def read() -> None:
        async for _ in made.generate(ASKED):
            pass

    made = body(monkeypatch, generate)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(read(), 10.0))
