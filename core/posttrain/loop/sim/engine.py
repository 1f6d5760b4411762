"""Engines in virtual time. Tokens come at a pace; each carries the version of the weights that were in place when it was sampled.

A sample's length and seed are fixed by its request, so it is the same whichever engine samples it and whenever. What it says
depends on the weights, token by token.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from posttrain.errors import RunInterrupted, WeightSyncError
from posttrain.loop.sim.ends import VOCABULARY, length
from posttrain.rollout.engine import Engine, EngineSpec
from posttrain.types import Completion, Request

if TYPE_CHECKING:
    from posttrain.loop.sim.trace import Trace
    from posttrain.loop.sim.world import World

SPEC = EngineSpec(model_path="", dtype="float32", max_model_len=1000, max_num_seqs=1, eos_token_ids=())
Outbox = asyncio.Queue[Completion | BaseException]


async def delivered(outbox: Outbox, samples: Sequence[Sample]) -> AsyncIterator[Completion]:
    """What comes of these samples, until each has come; one may come twice."""
    owed = {(sample.request.id, sample.index) for sample in samples}
    while owed:
        item = await outbox.get()
        if isinstance(item, BaseException):
            raise item
        owed.discard((item.request_id, item.index))
        yield item


class Injected(RuntimeError):
    """Raised on purpose."""


@dataclass(slots=True, eq=False)
class Sample:
    """One sample in an engine; `since`: when its current stretch of tokens began."""

    request: Request
    index: int
    outbox: Outbox
    total: int
    pace: float
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class SimEngine(Engine):
    """`fault` is set by its lane: how the next update fails, if it does."""

    name = "sim"

    def __init__(self, number: int, world: World, rng: random.Random, trace: Trace) -> None:
        super().__init__(SPEC)
        self.label = f"engine {number}"
        self._world, self._rng, self._trace = world, rng, trace
        self.capacity = world.config.rollout.max_num_seqs
        self.running: list[Sample] = []
        self.waiting: deque[Sample] = deque()
        self.paused, self.version, self.weights = False, None, ""
        self.dead = self.closed = False
        self.fault = ""
        self.completed: Callable[[], None] = lambda: None

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def training(self) -> int:
        """Samples that are not of a validation."""
        return sum(not s.request.id.startswith("validation") for s in (*self.running, *self.waiting))

    async def start(self) -> None:
        self.version, self.invalid, self.weights, self.paused, self.closed = None, None, "", False, False

    def ask(self, request: Request, outbox: Outbox) -> list[Sample]:
        """Begin its samples; what becomes of them comes to `outbox`. Whoever asked ends them with `forget`."""
        self.refuse_invalid()
        self._refuse_dead()
        if self.version is None:
            raise WeightSyncError("no weights yet")
        mine = [self._sample(request, index, outbox) for index in request.indices]
        self._rng.shuffle(mine)
        self.waiting.extend(mine)
        self._fill()
        return mine

    def forget(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._drop(sample)
        self._fill()

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        raise NotImplementedError  # the fleet asks

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(self._rng.random() * 0.2)
        for sample in [s for s in (*self.running, *self.waiting) if s.request.id == request_id]:
            self._advance(sample)
            self._finish(sample, "aborted")
        self._fill()

    async def pause(self) -> None:
        await self._update_step("pause")
        for sample in self.running:
            self._advance(sample)
            self._stop(sample)
        self.paused = True

    async def apply(self, staged: Any) -> None:
        assert self.paused, "applied while it decodes"
        await self._update_step("apply")
        self.weights, self.version = staged.region.weights, staged.version

    async def resume(self) -> None:
        await asyncio.sleep(self._rng.random() * 0.05)
        self.paused = False
        for sample in self.running:
            self._go(sample)
        self._fill()

    def weight_version(self) -> int | None:
        return self.version

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        raise NotImplementedError

    async def close(self) -> None:
        """What runs is asked again of the engine that takes its place, from its first token."""
        self.closed = True
        for sample in self.running:
            self._stop(sample)
            sample.token_ids, sample.logprobs, sample.versions = [], [], []
        self.waiting.extendleft(reversed(self.running))
        self.running = []

    def die(self) -> None:
        """Gone, with everything that it was asked for."""
        self.dead = True
        self._trace(self.label, f"dies with {self.load} samples")
        self.lose("the engine died")

    def lose(self, why: str) -> None:
        """Nothing of what it was asked for will come."""
        for outbox in {id(s.outbox): s.outbox for s in (*self.running, *self.waiting)}.values():
            outbox.put_nowait(RunInterrupted(why, cause="injected", fix="resume", code="engine-dead"))
        for sample in self.running:
            self._stop(sample)
        self.running, self.waiting = [], deque()

    # ---- samples

    def _sample(self, request: Request, index: int, outbox: Outbox) -> Sample:
        total = min(length(request.seed, index, self._world.tail), request.sampling.max_tokens)
        return Sample(request, index, outbox, total, 0.06 + 0.14 * self._rng.random())

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.capacity and not self.paused and self._can:
            sample = self.waiting.popleft()
            self.running.append(sample)
            self._go(sample)

    @property
    def _can(self) -> bool:
        return self.version is not None and not self.dead and not self.closed and self.invalid is None

    def _go(self, sample: Sample) -> None:
        loop = asyncio.get_running_loop()
        sample.since = loop.time()
        sample.timer = loop.call_later((sample.total - len(sample.token_ids)) * sample.pace, self._completed, sample)

    def _stop(self, sample: Sample) -> None:
        if sample.timer is not None:
            sample.timer.cancel()
            sample.timer = None

    def _completed(self, sample: Sample) -> None:
        self._sampled(sample, sample.total)
        self._finish(sample, "stop" if sample.total < sample.request.sampling.max_tokens else "length")
        self._fill()

    def _advance(self, sample: Sample) -> None:
        """Up to now. At least one token is left to come."""
        if sample.timer is not None:
            elapsed = asyncio.get_running_loop().time() - sample.since
            self._sampled(sample, min(len(sample.token_ids) + int(elapsed / sample.pace), sample.total - 1))
            sample.since += elapsed

    def _sampled(self, sample: Sample, count: int) -> None:
        """Sampled by the weights in place, until there are `count` tokens."""
        have = len(sample.token_ids)
        if count <= have:
            return
        assert self.version is not None
        names = f"{sample.request.seed} {sample.index} {self.weights}"
        base = int.from_bytes(blake2b(names.encode(), digest_size=4).digest(), "big")
        sample.token_ids += [(base + 7919 * t) % VOCABULARY for t in range(have, count)]
        sample.logprobs += [-0.5 - (base + t) % 17 / 8 for t in range(have, count)]
        sample.versions += [self.version] * (count - have)

    def _finish(self, sample: Sample, reason: Any) -> None:
        self._drop(sample)
        done = Completion(sample.request.id, sample.index, sample.token_ids, sample.logprobs, sample.versions, reason)
        faults, loop = self._world.faults, asyncio.get_running_loop()
        if self._trace.keep:
            by = sorted(set(done.versions))
            self._trace(self.label, f"{reason} {done.request_id}/{done.index}, {len(done.token_ids)} tokens of {by}")
        under_way = self._rng.random() * (8 if self._rng.random() < faults.late else 0.1)
        loop.call_later(under_way, sample.outbox.put_nowait, done)
        if self._rng.random() < faults.duplicate:
            loop.call_later(under_way * self._rng.random() * 2, sample.outbox.put_nowait, done)
        self.completed()

    def _drop(self, sample: Sample) -> None:
        self._stop(sample)
        if sample in self.running:
            self.running.remove(sample)
        elif sample in self.waiting:
            self.waiting.remove(sample)

    # ---- faults

    async def _update_step(self, what: str) -> None:
        self._refuse_dead()
        await asyncio.sleep(self._rng.random() * 0.2)
        if self.fault.startswith(what):
            fault, self.fault = self.fault, ""
            self._trace(self.label, f"update fails: {fault}")
            if what == "pause":
                self.paused = True
                for sample in self.running:
                    self._advance(sample)
                    self._stop(sample)
            if fault.endswith("stalls"):
                await asyncio.sleep(1e9)
            raise Injected(fault)

    def _refuse_dead(self) -> None:
        if self.dead:
            raise RunInterrupted("the engine is dead", cause="injected", fix="resume")
