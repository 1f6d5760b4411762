"""Engines in the loop's own process, as one that generates. When one dies, the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from posttrain.loop.sim.engine import Outbox, Sample, SimEngine, delivered
from posttrain.loop.sim.weights import SimLane
from posttrain.types import Completion, Request

if TYPE_CHECKING:
    import random

    from posttrain.loop.sim.trace import Trace
    from posttrain.loop.sim.world import World


class SimFleet:
    """All engines as one that generates. A request goes to the one with the least to do, and stays there."""

    def __init__(self, world: World, rng: random.Random, trace: Trace, deadly: int | None) -> None:
        self.engines = [SimEngine(number, world, rng, trace) for number in range(world.engines)]
        self.lanes = self.receivers = [SimLane(one, number, world.faults.updates, rng) for number, one in enumerate(self.engines)]
        self._rng, self._deadly = rng, deadly
        self.completions = 0
        self.died = False
        self.asked: set[str] = set()
        self.dispatched: Callable[[set[str], int], None] = lambda asked, samples: None
        for engine in self.engines:
            engine.completed = self._completed

    async def start(self) -> None:
        for engine in self.engines:
            await engine.start()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        outbox: Outbox = asyncio.Queue()
        asked: list[tuple[SimEngine, list[Sample]]] = []
        try:
            for request in requests:
                engine = min(self.engines, key=lambda one: (one.load, self._rng.random()))
                asked.append((engine, engine.ask(request, outbox)))
            if training := {request.id for request in requests if not request.id.startswith("validation")}:
                self.asked |= training
                self.dispatched(self.asked, sum(engine.training for engine in self.engines))
            async for done in delivered(outbox, [sample for _, samples in asked for sample in samples]):
                yield done
        finally:
            for engine, samples in asked:
                engine.forget(samples)

    async def abort(self, request_id: str) -> None:
        for engine in self.engines:
            await engine.abort(request_id)

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()

    def _completed(self) -> None:
        self.completions += 1
        if self.completions == self._deadly:
            self.died = True
            self._rng.choice(self.engines).die()
