"""Rollout bodies in other processes, driven as one: their lanes for the weight plane, their engines as one generator.

The requests of a call are dealt to the replicas in order, each the share that makes all equally loaded: with nothing under way
that is a replica's data cell, the first ones a request longer. A group never straddles two replicas. A replica that is no longer
there (its lane was dropped) gets no share. Where
`weights.on_failure` says that a run may lose one, what it owed is asked of the others, with the same seeds, and the next update
of the weights replaces it, or goes on without it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from posttrain.errors import RunInterrupted, WeightSyncError
from posttrain.weights.deadline import in_thread
from posttrain.weights.publication import Publication

if TYPE_CHECKING:
    from posttrain.placement.remote import Remote
    from posttrain.rollout.engine import Generates
    from posttrain.types import Completion, Request

GRACE_S = 10.0
"""What a call may take beyond the deadline that the other end keeps itself."""


@dataclass(eq=False)
class RemoteLane:
    """The `LaneEnd` of a `RolloutBody` in another process.

    respawn: puts a new process in the place of one that is gone   rebuild_timeout_s: of a new engine
    """

    remote: Remote
    rebuild_timeout_s: float
    respawn: Callable[[], None]
    proved: bool = False
    invalid: str = ""
    at: int | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.remote.name

    @property
    def serving(self) -> bool:
        """Whether it may be asked to generate."""
        return not self.invalid and not self.remote.ended

    async def stage(self, publication: Publication, *, timeout: float) -> None:
        self.at = None
        async with asyncio.timeout(timeout + GRACE_S):
            async for bucket in self.remote.stream("stage", publication, timeout):
                self.at = bucket

    async def prove(self, digests: Sequence[str]) -> None:
        await self.remote.call("prove", digests, timeout=GRACE_S)

    async def commit(self, *, timeout: float) -> None:
        await self.remote.call("commit", timeout, timeout=timeout + GRACE_S)
        if self.invalid == REBUILT:
            self.invalid = ""

    async def abort(self, cause: str) -> None:
        await self.remote.call("abort", cause, timeout=GRACE_S)

    async def rebuild(self) -> None:
        self.proved, self.invalid = False, REBUILT  # nobody asks it before it has weights
        if not await self._rebuilt_in_place():
            await in_thread(self.respawn)
            await self.remote.call("start", timeout=self.rebuild_timeout_s)

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        found: list[list[float]] = await self.remote.call("logprobs", sequences, timeout=self.rebuild_timeout_s)
        return found

    async def invalidate(self, cause: str) -> None:
        self.invalid = cause
        await self.remote.call("invalidate", cause, timeout=GRACE_S)

    async def close(self) -> None:
        await self.remote.call("close_lane", timeout=GRACE_S)

    async def _rebuilt_in_place(self) -> bool:
        """Whether the process is alive and has a new engine."""
        if self.remote.ended:
            return False
        try:
            await self.remote.call("rebuild", timeout=self.rebuild_timeout_s)
        except RunInterrupted as exc:
            if exc.code not in GONE:
                raise
            return False
        return True


GONE = ("role-died", "role-stuck")
"""Codes of the errors that say that a process is no longer there."""

LOST = (*GONE, "engine-dead", "lane-invalid", "no-weights", "completions-missing")
"""Codes of the errors that say that what an engine was asked for will not come; another one can be asked, or the next."""

REBUILT = "its engine is being rebuilt"

Item: TypeAlias = "tuple[RemoteLane, Completion | BaseException | None]"


class Replicas:
    """The engines of all bodies, as one that generates (`Generates`).

    start_timeout_s: of one engine.   may_lose: go on when a replica dies while it generates.   say: tells of it.
    """

    def __init__(
        self,
        lanes: Sequence[RemoteLane],
        *,
        start_timeout_s: float,
        may_lose: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self.lanes, self._start_timeout_s = list(lanes), start_timeout_s
        self._may_lose, self._say = may_lose, say
        self._load: Counter[RemoteLane] = Counter()  # samples that each owes

    async def start(self) -> None:
        """All engines side by side; the first that does not start ends the wait."""
        from posttrain.placement.remote import first_failure

        await first_failure([lane.remote.call("start", timeout=self._start_timeout_s + GRACE_S) for lane in self.lanes])

    def each(self) -> list[Generates]:
        """One that generates for each replica: on it while it serves, afterwards on the others. What has begun on a replica and
        goes on there finds its prefix in that engine's cache."""
        return [_One(self, lane) for lane in self.lanes]

    async def generate(self, requests: Sequence[Request], *, first: RemoteLane | None = None) -> AsyncIterator[Completion]:
        """Every completion as it finishes, from whichever replica.   first: the one that is asked for all while it serves."""
        finished: asyncio.Queue[Item] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []
        owed = {request.id: (request, set(request.indices)) for request in requests}
        holders: dict[RemoteLane, list[Request]] = {}

        def owes(share: Sequence[Request]) -> int:
            return sum(len(owed[request.id][1]) for request in share)

        def ask(share: Sequence[Request]) -> None:
            serving = self._serving()
            if first in serving:
                serving = [first]
            for lane, part in zip(serving, shares(share, [self._load[lane] for lane in serving]), strict=True):
                if part:
                    self._load[lane] += owes(part)
                    holders.setdefault(lane, []).extend(part)
                    tasks.append(asyncio.create_task(_drain(lane, part, finished)))

        ask(requests)
        try:
            while any(indices for _, indices in owed.values()):
                lane, item = await finished.get()
                if isinstance(item, BaseException):
                    lost = [(request, owed[request.id][1]) for request in holders.pop(lane, [])]
                    share = [replace(request, wanted=tuple(sorted(indices))) for request, indices in lost if indices]
                    self._load[lane] -= owes(share)
                    ask(self._lost(lane, item, share))
                elif item is None:
                    if all(task.done() for task in tasks) and finished.empty():
                        break  # an engine returned fewer than it was asked for: whoever counts says so
                elif item.index in owed[item.request_id][1]:
                    self._load[lane] -= 1
                    owed[item.request_id][1].discard(item.index)
                    yield item
        finally:
            for lane, held in holders.items():
                self._load[lane] -= owes(held)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, request_id: str) -> None:
        """Stop a request wherever it runs."""
        calls = [lane.remote.call("abort_request", request_id, timeout=GRACE_S) for lane in self.lanes if lane.serving]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and getattr(outcome, "code", "") not in LOST:
                raise outcome

    async def close(self) -> None:
        """Free every engine; replicas that are gone are passed over."""
        ends = [lane.remote.call("close", timeout=self._start_timeout_s) for lane in self.lanes if not lane.remote.ended]
        await asyncio.gather(*ends, return_exceptions=True)

    def _serving(self) -> list[RemoteLane]:
        serving = [lane for lane in self.lanes if lane.serving]
        if not serving:
            causes = "; ".join(f"{lane.name}: {lane.invalid or 'its process ended'}" for lane in self.lanes)
            raise WeightSyncError("no rollout replica is left", cause=causes, fix="go on with --resume", code="lane-invalid")
        return serving

    def _lost(self, lane: RemoteLane, exc: BaseException, share: list[Request]) -> list[Request]:
        """What a replica still owed when it died. Raises `exc` where a run may not lose one, or it is another failure."""
        if not self._may_lose or (code := getattr(exc, "code", "")) not in LOST:
            raise exc
        if code in GONE:
            lane.remote.kill()
        lane.invalid = lane.invalid or str(exc).splitlines()[0]
        self._say(f"{lane.invalid}; {len(share)} prompt(s) go to the other replicas")
        return share


@dataclass(frozen=True)
class _One:
    """`Replicas` that begin with one of theirs. They are started and closed together."""

    replicas: Replicas
    lane: RemoteLane

    async def start(self) -> None:
        await self.replicas.start()

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        return self.replicas.generate(requests, first=self.lane)

    async def abort(self, request_id: str) -> None:
        await self.replicas.abort(request_id)

    async def close(self) -> None:
        await self.replicas.close()


def shares(requests: Sequence[Request], loads: Sequence[int]) -> list[list[Request]]:
    """The share of each replica, in order: the least loaded gets the next request, and of equals the first one.

    loads: samples that each replica owes already.
    """
    owed, counts = list(loads), [0] * len(loads)
    for request in requests:
        least = min(range(len(owed)), key=owed.__getitem__)
        counts[least] += 1
        owed[least] += len(request.indices)
    stops = list(accumulate(counts))
    return [list(requests[stop - count : stop]) for count, stop in zip(counts, stops, strict=True)]


async def _drain(lane: RemoteLane, requests: Sequence[Request], finished: asyncio.Queue[Item]) -> None:
    try:
        async for completion in lane.remote.stream("generate", list(requests)):
            finished.put_nowait((lane, completion))
        finished.put_nowait((lane, None))
    except Exception as exc:
        finished.put_nowait((lane, exc))
