"""The driver's view of whoever holds the policy's weights: publish a version, keep it while lanes pull, give it back.

One process: `LocalPublisher`. A sharded policy: `GroupPublisher` over one end for each rank; each rank copies its own shards
into its own slots, and their parts make one publication. Nothing is gathered, and the ranks do not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from posttrain.errors import WeightSyncError
from posttrain.weights.deadline import abandon, in_thread
from posttrain.weights.publication import LocalWeight, Publication, PublicationPool, merge_publications

LocalSource = Callable[[], Iterable[LocalWeight]]
"""What a policy rank holds now: every parameter in the same order, its own elements, tied duplicates omitted. Given in the
dtype that they are stored in; the pool casts them while it copies."""


STOP_S = 2.0
"""How long a copy may go on after it was told to stop."""


class Publisher(Protocol):
    """Publications are immutable from `publish` until they are released (held) or replaced (never held)."""

    async def publish(self, version: int) -> Publication:
        """Snapshot the current weights. They may change as soon as this has returned. What fails leaves nothing of `version`."""

    async def hold(self, version: int) -> None:
        """Lanes pull `version`: it stays as it is until `release`."""

    async def release(self, version: int) -> None:
        """The inverse of `hold`."""

    async def close(self) -> None:
        """Give back all memory; idempotent."""


class RankEnd(Publisher, Protocol):
    """One policy rank of a sharded policy: it publishes its part. `name` is what messages call it."""

    name: str

    async def retract(self, version: int) -> None:
        """Take back a part that was never held, also while it is being written."""


class LocalPublisher:
    """A pool of this process and where its weights come from; copies run in a thread of their own."""

    def __init__(self, pool: PublicationPool, source: LocalSource) -> None:
        self.pool, self._source, self.name = pool, source, pool.peer

    async def publish(self, version: int) -> Publication:
        try:
            return await in_thread(self._publish, version)
        except asyncio.CancelledError:
            self.pool.retract(version)
            raise

    def _publish(self, version: int) -> Publication:
        self.pool.plan_for(self._source())
        return self.pool.publish(version, self._source())

    async def retract(self, version: int) -> None:
        await in_thread(lambda: self.pool.retract(version, timeout=STOP_S))

    async def hold(self, version: int) -> None:
        self.pool.hold(version)

    async def release(self, version: int) -> None:
        self.pool.release(version)

    async def close(self) -> None:
        self.pool.close()


class GroupPublisher:
    """All ranks of a sharded policy. The first that fails is named, and the others take back what they published."""

    def __init__(self, ranks: Sequence[RankEnd], *, stop_timeout_s: float = 2 * STOP_S) -> None:
        self.ranks, self._stop_timeout_s = list(ranks), stop_timeout_s

    async def publish(self, version: int) -> Publication:
        tasks = [asyncio.ensure_future(rank.publish(version)) for rank in self.ranks]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if failed := next((t for t in tasks if t.done() and (t.cancelled() or t.exception())), None):
                raise _named(self.ranks[tasks.index(failed)].name, failed)
            return merge_publications([task.result() for task in tasks])
        except BaseException:
            for task in tasks:
                abandon(task)
            stops = [asyncio.ensure_future(rank.retract(version)) for rank in self.ranks]
            await asyncio.wait([*tasks, *stops], timeout=self._stop_timeout_s)
            for stop in stops:
                abandon(stop)
            raise

    async def hold(self, version: int) -> None:
        await self._all(lambda rank: rank.hold(version))

    async def release(self, version: int) -> None:
        await self._all(lambda rank: rank.release(version))

    async def close(self) -> None:
        await self._all(lambda rank: rank.close())

    async def _all(self, call: Callable[[RankEnd], Coroutine[Any, Any, None]]) -> None:
        """On every rank, also when one fails; then raises the first failure."""
        results = await asyncio.gather(*(call(rank) for rank in self.ranks), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


def _named(name: str, failed: asyncio.Future[Publication]) -> BaseException:
    exc = None if failed.cancelled() else failed.exception()
    if isinstance(exc, WeightSyncError):
        return exc
    error = WeightSyncError(f"{name} did not publish: {type(exc).__name__}: {exc}" if exc else f"{name} stopped publishing")
    error.__cause__ = exc
    return error
