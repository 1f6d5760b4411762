"""Rollout bodies in processes of their own, in simulated time: `Replicas`, `RemoteLane` and `RolloutBody` are the real ones.

A message takes a while. Requests to one process begin in the order in which they were sent, as an actor's do; answers may
overtake one another. Whoever stops waiting for an answer does not stop the work. A process may die at any moment, with all
that it does: at the next update its lane puts another in its place or is dropped, or the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from posttrain.errors import RunInterrupted, WaitExpired
from posttrain.loop.sim.engine import Outbox, SimEngine, delivered
from posttrain.loop.sim.weights import SimLane
from posttrain.rollout.body import RolloutBody
from posttrain.rollout.replicas import RemoteLane, Replicas
from posttrain.weights.deadline import within

if TYPE_CHECKING:
    import random

    from posttrain.loop.sim.trace import Trace
    from posttrain.loop.sim.world import World
    from posttrain.types import Completion, Request

REPLACE_S = 10.0
"""Virtual seconds that a new engine may take to start."""
IN_ORDER = 1e-6
"""Virtual seconds between two requests that would arrive at once."""


class BodyEngine(SimEngine):
    """One that is asked where it is. When it closes or dies, whoever asked is told."""

    asked: Callable[[], None]

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        outbox: Outbox = asyncio.Queue()
        samples = [sample for request in requests for sample in self.ask(request, outbox)]
        self.asked()
        try:
            async for done in delivered(outbox, samples):
                yield done
        finally:
            self.forget(samples)

    async def close(self) -> None:
        self.closed = True
        self.lose("the engine was closed")


class _Body(RolloutBody):
    def __init__(self, engine: SimEngine, receiver: SimLane) -> None:
        self.engine, self.receiver = engine, receiver
        self._readers = {}


class _Process:
    """Where a body is. Its work ends with it; `tell` is called then, of what was asked."""

    def __init__(self, body: RolloutBody, engine: SimEngine) -> None:
        self.body, self.engine, self.dead = body, engine, False
        self._asked: dict[Callable[[], None], asyncio.Task[None] | None] = {}
        self._last = 0.0

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]], tell: Callable[[], None], delay: float) -> None:
        """In the order in which it was asked."""
        loop = asyncio.get_running_loop()
        self._asked[tell] = None
        self._last = max(self._last + IN_ORDER, loop.time() + delay)

        def arrives() -> None:
            if not self.dead:
                self._asked[tell] = task = loop.create_task(work(), name=f"work of {self.engine.label}")
                task.add_done_callback(lambda _: self._asked.pop(tell, None))

        loop.call_at(self._last, arrives)

    def die(self) -> None:
        if self.dead:
            return
        self.dead = True
        self.engine.die()
        asked, self._asked = self._asked, {}
        for tell, task in asked.items():
            if task is not None:
                task.cancel()
            tell()


class SimRemote:
    """`placement.remote.Remote` in simulated time.   make: a body and its engine, for each process."""

    def __init__(self, name: str, make: Callable[[], tuple[RolloutBody, SimEngine]], rng: random.Random, trace: Trace) -> None:
        self.name, self.ended = name, False
        self._make, self._rng, self._trace = make, rng, trace
        self.process = _Process(*make())

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        process, answer = self.process, asyncio.get_running_loop().create_future()

        def settle(value: Any, failure: BaseException | None) -> None:
            if not answer.done():
                answer.set_result(value) if failure is None else answer.set_exception(failure)

        async def work() -> None:
            value, failure = None, None
            try:
                value = await getattr(process.body, method)(*args)
            except Exception as exc:
                failure = exc
            asyncio.get_running_loop().call_later(self._delay(), settle, value, failure)

        self._begin(process, work, lambda: settle(None, self._died()))
        try:
            return await within(answer, timeout)
        except TimeoutError:
            raise WaitExpired(f"{self.name} did not answer {method} within {timeout:g} s", fix="") from None

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        process, items = self.process, asyncio.Queue[tuple[bool, Any]]()

        async def work() -> None:
            loop, last, at = asyncio.get_running_loop(), None, 0.0

            def send(ended: bool, value: Any) -> None:
                nonlocal at
                at = max(at, loop.time()) + self._delay()  # in the order in which they were sent
                loop.call_at(at, items.put_nowait, (ended, value))

            try:
                async for value in getattr(process.body, method)(*args):
                    send(False, value)
            except Exception as exc:
                last = exc
            send(True, last)

        self._begin(process, work, lambda: items.put_nowait((True, self._died())))
        while True:
            ended, value = await items.get()
            if not ended:
                yield value
            elif value is None:
                return
            else:
                raise value

    def kill(self) -> None:
        self.ended = True
        self.process.die()

    def replace(self) -> None:
        """`Fleet.replace`."""
        self.kill()
        self.process, self.ended = _Process(*self._make()), False
        self._trace(self.name, "runs again, in a new process")

    def _begin(self, process: _Process, work: Callable[[], Coroutine[Any, Any, None]], tell: Callable[[], None]) -> None:
        if process.dead:
            tell()
        else:
            process.begin(work, tell, self._delay())

    def _delay(self) -> float:
        return self._rng.random() * 0.02

    def _died(self) -> RunInterrupted:
        return RunInterrupted(f"{self.name} died", cause="injected", fix="resume", code="role-died")


class SimReplicas(Replicas):
    """The real one; a process dies when `deadly` samples are complete."""

    def __init__(self, world: World, rng: random.Random, trace: Trace, deadly: int | None) -> None:
        self.world, self._rng, self._trace, self._deadly = world, rng, trace, deadly
        self.completions, self.died = 0, False
        self.asked: set[str] = set()
        self.dispatched: Callable[[set[str], int], None] = lambda asked, samples: None
        self.receivers: list[SimLane] = []
        self.remotes = [SimRemote(f"rollout-{n}", partial(self._body, n), rng, trace) for n in range(world.engines)]
        lanes = [RemoteLane(remote, REPLACE_S, remote.replace) for remote in self.remotes]  # type: ignore[arg-type]
        may_lose = world.config.weights.on_failure != "raise"
        super().__init__(lanes, start_timeout_s=REPLACE_S, may_lose=may_lose, say=lambda text: trace("replicas", text))

    @property
    def engines(self) -> list[SimEngine]:
        return [remote.process.engine for remote in self.remotes]

    def generate(self, requests: Sequence[Request], *, first: RemoteLane | None = None) -> AsyncIterator[Completion]:
        self.asked |= {request.id for request in requests if not request.id.startswith("validation")}
        return super().generate(requests, first=first)

    def _body(self, number: int) -> tuple[RolloutBody, SimEngine]:
        engine = BodyEngine(number, self.world, self._rng, self._trace)
        engine.label = f"rollout-{number}"
        engine.completed = self._completed
        engine.asked = lambda: self.dispatched(self.asked, sum(one.training for one in self.engines))
        lane = SimLane(engine, number, self.world.faults.updates, self._rng, dies=lambda: self._die(number))
        self.receivers.append(lane)
        return _Body(engine, lane), engine

    def _completed(self) -> None:
        self.completions += 1
        if self.completions == self._deadly:
            self._die(self._rng.randrange(len(self.remotes)))

    def _die(self, number: int) -> None:
        """Not at once: nobody is told in the middle of what it does."""
        process = self.remotes[number].process
        self.died = True
        asyncio.get_running_loop().call_soon(process.die)
