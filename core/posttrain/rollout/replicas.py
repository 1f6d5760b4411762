"""Rollout bodies in other processes, driven as one: their lanes for the weight plane, their engines as one generator.

The requests of a batch are dealt to the replicas in order, the first ones a request longer: a replica's share is its data cell,
and a group never straddles two cells. A replica that is no longer there (its lane was dropped) gets no share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from posttrain.errors import WeightSyncError
from posttrain.weights.publication import Publication

if TYPE_CHECKING:
    from posttrain.placement.remote import Remote
    from posttrain.types import Completion, Request

GRACE_S = 10.0
"""What a call may take beyond the deadline that the other end keeps itself."""


@dataclass(eq=False)
class RemoteLane:
    """The `LaneEnd` of a `RolloutBody` in another process. rebuild_timeout_s: of a new engine."""

    remote: Remote
    rebuild_timeout_s: float
    proved: bool = False
    invalid: str = ""
    at: int | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.remote.name

    async def stage(self, publication: Publication, *, timeout: float) -> None:
        async with asyncio.timeout(timeout + GRACE_S):
            async for bucket in self.remote.stream("stage", publication, timeout):
                self.at = bucket

    async def commit(self, *, timeout: float) -> None:
        await self.remote.call("commit", timeout, timeout=timeout + GRACE_S)

    async def abort(self, cause: str) -> None:
        await self.remote.call("abort", cause, timeout=GRACE_S)

    async def rebuild(self) -> None:
        await self.remote.call("rebuild", timeout=self.rebuild_timeout_s)
        self.proved, self.invalid = False, ""

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        found: list[list[float]] = await self.remote.call("logprobs", sequences, timeout=self.rebuild_timeout_s)
        return found

    async def invalidate(self, cause: str) -> None:
        self.invalid = cause
        await self.remote.call("invalidate", cause, timeout=GRACE_S)

    async def close(self) -> None:
        await self.remote.call("close_lane", timeout=GRACE_S)


class Replicas:
    """The engines of all bodies, as one that generates (`Generates`). start_timeout_s: of one engine."""

    def __init__(self, lanes: Sequence[RemoteLane], *, start_timeout_s: float) -> None:
        self.lanes, self._start_timeout_s = list(lanes), start_timeout_s

    async def start(self) -> None:
        """All engines side by side; the first that does not start ends the wait."""
        from posttrain.placement.remote import first_failure

        await first_failure([lane.remote.call("start", timeout=self._start_timeout_s + GRACE_S) for lane in self.lanes])

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Every completion as it finishes, from whichever replica."""
        serving = [lane for lane in self.lanes if not lane.invalid]
        if not serving:
            raise WeightSyncError(f"no rollout replica is left: {self.lanes[0].invalid}", code="lane-invalid")
        finished: asyncio.Queue[Completion | BaseException | None] = asyncio.Queue()
        shares = zip(serving, cells(requests, len(serving)), strict=True)
        tasks = [asyncio.create_task(_drain(lane.remote, share, finished)) for lane, share in shares if share]
        try:
            open_streams = len(tasks)
            while open_streams:
                item = await finished.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    open_streams -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, request_id: str) -> None:
        """Stop a request wherever it runs."""
        await asyncio.gather(*(lane.remote.call("abort_request", request_id, timeout=GRACE_S) for lane in self.lanes))

    async def close(self) -> None:
        """Free every engine; replicas that are gone are passed over."""
        ends = [lane.remote.call("close", timeout=self._start_timeout_s) for lane in self.lanes if not lane.remote.ended]
        await asyncio.gather(*ends, return_exceptions=True)


def cells(requests: Sequence[Request], replicas: int) -> list[list[Request]]:
    """The share of each replica: in order, sizes by divmod, the first ones a request longer."""
    share, longer = divmod(len(requests), replicas)
    starts = [cell * share + min(cell, longer) for cell in range(replicas + 1)]
    return [list(requests[starts[cell] : starts[cell + 1]]) for cell in range(replicas)]


async def _drain(remote: Remote, requests: Sequence[Request], finished: asyncio.Queue[Completion | BaseException | None]) -> None:
    try:
        async for completion in remote.stream("generate", list(requests)):
            finished.put_nowait(completion)
        finished.put_nowait(None)
    except Exception as exc:
        finished.put_nowait(exc)
