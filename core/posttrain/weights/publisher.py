"""The driver's view of whoever holds the policy's weights: publish a version, prove it, keep it while lanes pull, give it back.

One process: `LocalPublisher`. A sharded policy: `GroupPublisher` over one end for each rank; each rank copies its own shards
into its own slots, and their parts make one publication. Nothing is gathered, and the ranks do not wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar, cast

from posttrain.weights.deadline import abandon, in_thread, start_thread, within
from posttrain.weights.failure import PeerFailure, as_failure, first
from posttrain.weights.publication import (
    Digested,
    LocalSource,
    Opened,
    Publication,
    PublicationPool,
    merge_publications,
    nobody,
)

T = TypeVar("T")

TIMEOUT_S = 120.0
"""Default deadline of one publication (`weights.stage_timeout_s`)."""

STOP_S = 2.0
"""How long a copy may go on after it was told to stop."""


class Publisher(Protocol):
    """Publications are immutable from `publish` until they are released (held) or replaced (never held)."""

    async def publish(self, version: int, opened: Opened = nobody) -> Publication:
        """Snapshot the current weights. The weights may change after `PublicationPool.settle`, which whoever changes them calls.

        opened: told of it once when lanes may begin to pull, while it is written. What fails leaves nothing of `version`, and
        whoever told lanes to pull stops them.
        """

    async def digests(self, version: int) -> Digested:
        """What lanes prove it by, which is made while they pull."""

    async def hold(self, version: int) -> None:
        """Lanes pull `version`: it stays as it is until `release`."""

    async def release(self, version: int) -> None:
        """The inverse of `hold`."""

    async def retract(self, version: int) -> None:
        """Take back a version that nobody has and nobody holds, also while it is being written; it may be published again."""

    async def close(self) -> None:
        """Give back all memory; idempotent."""


class RankEnd(Publisher, Protocol):
    """One policy rank of a sharded policy: it publishes its part.

    name: what messages call it     at: the bucket that it writes, or wrote last, as far as the driver knows
    """

    name: str
    at: int | None


class LocalPublisher:
    """A pool of this process and where its weights come from; copies and digests run in threads, each until `timeout_s`."""

    def __init__(self, pool: PublicationPool, source: LocalSource, *, timeout_s: float = TIMEOUT_S) -> None:
        self.pool, self._source, self.name, self.timeout_s = pool, source, pool.peer, timeout_s

    @property
    def at(self) -> int | None:
        return self.pool.at

    async def publish(self, version: int, opened: Opened = nobody) -> Publication:
        loop = asyncio.get_running_loop()

        def tell(publication: Publication) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(opened, publication)

        try:
            self.pool.begin(version)  # here, not in the thread: a retraction may come before the thread has run
            publication = await within(start_thread(self._publish, version, tell), self.timeout_s)
        except TimeoutError as exc:
            self.pool.retract(version)
            raise self._late(version) from exc
        except asyncio.CancelledError:
            self.pool.retract(version)
            raise
        start_thread(self.pool.settle)  # lanes will ask, and the next step of the optimizer must not wait
        return publication

    def _publish(self, version: int, opened: Opened) -> Publication:
        return self.pool.write(version, self._source, opened)

    async def digests(self, version: int) -> Digested:
        try:
            return await within(start_thread(self.pool.digests, version), self.timeout_s)
        except TimeoutError as exc:
            raise self._late(version, "digested") from exc

    def _late(self, version: int, done: str = "written") -> PeerFailure:
        at = "no bucket" if self.at is None else f"bucket {self.at}"
        return PeerFailure(
            f"{self.name}: publication {version} was not {done} within {self.timeout_s:.3g} s", peer=self.name, phase="publish",
            bucket=self.at, cause=f"{at} was the last to be written", fix="raise weights.stage_timeout_s", code="deadline",
        )  # fmt: skip

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

    async def publish(self, version: int, opened: Opened = nobody) -> Publication:
        parts: list[Publication] = []

        def tell(part: Publication) -> None:
            parts.append(part)
            if len(parts) == len(self.ranks):
                with contextlib.suppress(PeerFailure):  # parts that do not fit are told once they are written
                    opened(merge_publications(parts))

        tasks = [asyncio.ensure_future(rank.publish(version, tell)) for rank in self.ranks]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failures = [_failure(rank, task) for rank, task in zip(self.ranks, tasks, strict=True) if _failed(task)]
            if failures:
                raise first(failures)
            return merge_publications([task.result() for task in tasks])
        except BaseException:
            for task in tasks:
                abandon(task)
            stops = [asyncio.ensure_future(rank.retract(version)) for rank in self.ranks]
            await asyncio.wait([*tasks, *stops], timeout=self._stop_timeout_s)
            for stop in stops:
                abandon(stop)
            raise

    async def digests(self, version: int) -> Digested:
        found: dict[int, str] = {}
        for part in await self._all(lambda rank: rank.digests(version), "digest"):
            found |= part
        return found

    async def hold(self, version: int) -> None:
        """On all ranks, or on none."""
        try:
            await self._all(lambda rank: rank.hold(version))
        except PeerFailure:
            with contextlib.suppress(PeerFailure):  # of the one that failed
                await self.release(version)
            raise

    async def release(self, version: int) -> None:
        await self._all(lambda rank: rank.release(version))

    async def retract(self, version: int) -> None:
        await self._all(lambda rank: rank.retract(version))

    async def close(self) -> None:
        await self._all(lambda rank: rank.close())

    async def _all(self, call: Callable[[RankEnd], Coroutine[Any, Any, T]], what: str = "answer") -> list[T]:
        """On every rank, also when one fails; then raises the first failure."""
        results = await asyncio.gather(*(call(rank) for rank in self.ranks), return_exceptions=True)
        for rank, result in zip(self.ranks, results, strict=True):
            if isinstance(result, Exception):
                message = f"{rank.name} did not {what}"
                raise as_failure(result, peer=rank.name, phase="publish", message=message, bucket=rank.at)
        return cast("list[T]", results)


def _failed(task: asyncio.Future[Publication]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _failure(rank: RankEnd, task: asyncio.Future[Publication]) -> PeerFailure:
    exc = RuntimeError("its task was cancelled") if task.cancelled() else task.exception()
    assert exc is not None
    return as_failure(exc, peer=rank.name, phase="publish", message=f"{rank.name} did not publish", bucket=rank.at)
