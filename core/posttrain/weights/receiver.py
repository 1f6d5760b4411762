"""One rollout body's receiving end: it pulls a publication into its own staging memory, proves it, and hands it to its engine.

Phase 1 (`stage`, `prove`) touches no engine; it may begin while the publication is still being written. Phase 2 (`commit`) pauses
the engine, applies, and lets it go on; what fails there leaves the lane invalid. Staging is one copy of the weights (two where a
second read is compared), reused from update to update, and dropped with its transport when a pull is overdue: a late write goes
to memory that nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from posttrain.errors import WeightSyncError
from posttrain.weights.deadline import in_thread, quiet, start_thread, within
from posttrain.weights.digest import bucket_digest
from posttrain.weights.failure import PeerFailure, as_failure, first_exception, out_of_memory_fix
from posttrain.weights.lane import Lane
from posttrain.weights.memory import Region
from posttrain.weights.plan import Bucket, coverage_problems, pull_order
from posttrain.weights.progress import Known, staging_bytes
from posttrain.weights.publication import Publication
from posttrain.weights.shared_files import shared_folder, sweep
from posttrain.weights.transport import Staged, Transport, room, runs

if TYPE_CHECKING:
    from posttrain.rollout.engine import Engine

T = TypeVar("T")

GRACE_S = 2.0
"""How long a pull may go on after it was told to stop before its transport is closed under it."""

DIGESTS = 2
"""Buckets that may have arrived and are still being digested when the next one is pulled."""

CLOSE_S = 30.0
"""How long an engine that is to be replaced may take to close."""

POLL_S = 0.002
"""How soon a lane looks again whether a bucket is written."""


@dataclass
class _Begun:
    """A `stage` under way or done, and how many wait for it."""

    publication: Publication
    work: asyncio.Future[None]
    waiting: int = 0

    def of(self, publication: Publication) -> bool:
        return (publication.version, publication.handles) == (self.publication.version, self.publication.handles)


@dataclass
class _Arrived:
    """A publication in staging memory that is to be proved; digests: bucket → that of what arrived."""

    publication: Publication
    epoch: int
    staging: Region
    digests: dict[int, str] = field(default_factory=dict)


class Receiver:
    """The `LaneEnd` of an engine in this process. `lane` says what may happen, this does it. number: see `pull_order`."""

    def __init__(
        self, engine: Engine, transport: Transport, *, name: str = "rollout-0", number: int = 0, compare_bytes: bool = False,
        grace_s: float = GRACE_S,
    ) -> None:  # fmt: skip
        self.engine, self.name, self.lane, self.proved = engine, name, Lane(name), False
        self._number, self._compare, self._grace_s = number, compare_bytes, grace_s
        self._transport = transport.fresh()
        self._staging: Region | None = None
        self._again: Region | None = None  # of the second read, where bytes are compared
        self._begun: _Begun | None = None
        self._arrived: _Arrived | None = None
        self._staged: Staged | None = None
        self._thread: asyncio.Future[None] | None = None
        self._bucket: Bucket | None = None
        self._stop_cause: str | None = None
        self._waits_for = ""

    @property
    def at(self) -> int | None:
        """Index of the bucket that is being pulled, or was last."""
        return self._bucket.index if self._bucket is not None else None

    def warm(self) -> None:
        """Get the transport ready to pull, see `Transport.warm`."""
        self._transport.warm("pull")

    async def stage(self, publication: Publication, *, timeout: float) -> None:
        """Pull and digest every bucket, each once it is written, while the engine generates; `prove` compares, and votes. Who
        asks for a publication that is being staged, or is staged, waits with the first and shares its outcome.

        Raises PeerFailure naming the bucket; the lane is then aborted and the engine untouched.
        """
        begun = self._begun
        if begun is None or not begun.of(publication):
            begun = self._begun = _Begun(publication, asyncio.ensure_future(self._stage(publication, timeout, begun)))
            quiet(begun.work)
        begun.waiting += 1
        try:
            await asyncio.shield(begun.work)
        except asyncio.CancelledError:
            if begun.work.cancelled():
                raise self._stopped() from None  # before it did anything
            if begun.waiting == 1:
                await self._end(begun, None)
            raise
        finally:
            begun.waiting -= 1

    async def _stage(self, publication: Publication, timeout: float, before: _Begun | None) -> None:
        lane = self.lane
        try:
            await self._end(before, "another update began")
            if lane.under_way and lane.state != "applying":
                lane.abort("another update began")  # what is staged is not wanted
            self._bucket = self._stop_cause = self._arrived = self._staged = None
            self._waits_for = ""
            self._arrived = await within(self._open_and_pull(publication), timeout)
        except TimeoutError as exc:
            await self._settle(grace_s=0.0)
            lane.abort(f"staging took longer than {timeout:.3g} s")
            raise self._late(publication, timeout) from exc
        except asyncio.CancelledError:
            await self._settle(grace_s=self._grace_s)
            lane.abort(self._stop_cause or "cancelled")
            if self._stop_cause is None:
                raise
            raise self._stopped() from None
        except Exception as exc:
            lane.abort(str(exc) or type(exc).__name__)
            raise as_failure(
                exc, peer=self.name, phase="stage", message=f"lane {self.name}: publication {publication.version} was not staged"
            ) from exc

    async def prove(self, digests: Sequence[str]) -> None:
        """Vote for what has arrived if it has these digests, one for each bucket of the plan.

        Raises PeerFailure naming the bucket; the lane is then aborted and the engine untouched.
        """
        arrived, self._arrived, self._begun = self._arrived, None, None
        if arrived is None:
            raise PeerFailure(
                f"lane {self.name}: {self._stop_cause or 'nothing is staged'}", peer=self.name, phase="stage",
                stopped=self._stop_cause is not None,
            )  # fmt: skip
        publication, epoch = arrived.publication, arrived.epoch
        try:
            for bucket in publication.plan.buckets:
                if digests[bucket.index] != arrived.digests[bucket.index]:
                    self._bucket = bucket
                    damaged = WeightSyncError("arrived damaged", cause="its digest is not the publisher's")
                    raise self._bucket_failure(publication, bucket, damaged)
            self.lane.vote(epoch)
        except PeerFailure as exc:
            self.lane.abort(str(exc))
            raise
        self._staged = Staged(publication.version, epoch, publication.plan, tuple(digests), arrived.staging)

    async def commit(self, *, timeout: float) -> None:
        """Pause, apply, resume. Raises PeerFailure; from the first written byte on, a failure makes the lane invalid."""
        staged = self._staged
        if staged is None:
            raise PeerFailure(f"lane {self.name}: commit without a staged publication", peer=self.name, phase="apply")
        what = f"lane {self.name}: version {staged.version} was not applied"
        try:
            await within(self._apply(staged), timeout)
        except TimeoutError as exc:
            await self._fail(f"pause, apply and resume took longer than {timeout:.3g} s")
            raise PeerFailure(
                f"{what} within {timeout:.3g} s", peer=self.name, phase="apply",
                fix="raise weights.apply_timeout_s, or read the engine's log", code="deadline",
            ) from exc  # fmt: skip
        except BaseException as exc:
            await self._fail(str(exc) or type(exc).__name__)
            if not isinstance(exc, Exception):
                raise
            raise as_failure(exc, peer=self.name, phase="apply", message=what) from exc
        finally:
            self._staged = None

    async def abort(self, cause: str) -> None:
        """Stop pulling, within a bucket, and forget what is staged. Idempotent; the engine goes on with its old weights.

        An update that is being applied cannot be undone: the lane becomes invalid. After a commit this does nothing.
        """
        await self._stop(cause)
        if self._arrived is not None:
            self._arrived, self._stop_cause = None, cause
        self._staged = None
        sweep(shared_folder())  # whoever died may have left memory on this host
        if self.lane.under_way:
            applying = self.lane.state == "applying"
            self.lane.abort(cause)
            if applying:
                self.engine.invalidate(cause)

    async def rebuild(self) -> None:
        """A new engine in place of an invalid one, without weights."""
        await self._stop("the engine is rebuilt")
        with contextlib.suppress(Exception):  # what is broken may fail to close; the new one is what matters
            await within(self.engine.close(), CLOSE_S)
        await self._drop_transport()
        await self.engine.start()
        self.lane.rebuild()
        self.proved = False

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of a probe under the weights in place."""
        return await self.engine.logprobs(sequences)

    async def invalidate(self, cause: str) -> None:
        """Refuse to generate until rebuilt."""
        self.lane.invalidate(cause)
        self.engine.invalidate(cause)

    async def close(self) -> None:
        """Give back staging and transport; idempotent. The engine is closed by whoever started it."""
        await self._stop("the lane is closed")
        await self._drop_transport()

    # ---- phase 1

    async def _open_and_pull(self, publication: Publication) -> _Arrived:
        lane, plan = self.lane, publication.plan
        if lane.plan is None or lane.plan.digest != plan.digest:
            await in_thread(self._check_coverage, publication)  # an engine may have to build the model to say what it takes
            lane.set_bucket_plan(plan)
        epoch = lane.epoch + 1
        lane.begin_weight_update(epoch, publication.version)
        staging = self._staging_for(staging_bytes(plan))
        arrived = _Arrived(publication, epoch, staging)
        await self._pull_all(arrived)
        return arrived

    async def _pull_all(self, arrived: _Arrived) -> None:
        publication, staging = arrived.publication, arrived.staging
        digesting, known = deque[tuple[Bucket, asyncio.Future[str]]](), Known(publication.plan, publication.version)
        left = deque(pull_order(publication.plan.buckets, self._number))

        async def one_digested() -> None:
            bucket, thread = digesting.popleft()
            arrived.digests[bucket.index] = await self._done(publication, bucket, thread)
            self.lane.stage(arrived.epoch, bucket.index)

        while left:
            bucket = self._bucket = await self._next(left, known, publication, staging)
            self._thread = start_thread(self._pull, publication, bucket, known, staging)
            await self._done(publication, bucket, self._thread)
            digesting.append((bucket, start_thread(self._digest, bucket, staging)))
            if len(digesting) > DIGESTS:
                await one_digested()
        while digesting:
            await one_digested()

    async def _next(self, left: deque[Bucket], known: Known, publication: Publication, staging: Region) -> Bucket:
        """Take the first bucket that is written; wait for it."""
        while True:
            self._bucket = first = left[0]
            if not known.has(first):
                self._thread = start_thread(self._look, publication, first.rank, known, staging)
                await self._done(publication, first, self._thread)
            for place, bucket in enumerate(left):
                if known.has(bucket):
                    del left[place]
                    self._waits_for = ""
                    return bucket
            self._waits_for = known.plain(first.rank)
            await asyncio.sleep(POLL_S)

    def _look(self, publication: Publication, rank: int, known: Known, staging: Region) -> None:
        """How far a rank is. Runs in a thread."""
        self._transport.pull(publication.handles[rank], known.pieces(rank), staging)
        known.read(rank, staging.buffer)

    async def _done(self, publication: Publication, bucket: Bucket, thread: asyncio.Future[T]) -> T:
        try:
            return await asyncio.shield(thread)
        except Exception as exc:
            raise self._bucket_failure(publication, bucket, exc) from exc

    def _pull(self, publication: Publication, bucket: Bucket, known: Known, staging: Region) -> None:
        """A bucket, and how far its rank is by now. Runs in a thread."""
        handle, transport, again = publication.handles[bucket.rank], self._transport, self._again
        transport.pull(handle, (*bucket.pieces, *known.pieces(bucket.rank)), staging)
        known.read(bucket.rank, staging.buffer)
        if again is not None:
            transport.pull(handle, bucket.pieces, again)
            for start, nbytes in ((p.target, p.nbytes) for p in bucket.pieces):
                if not torch.equal(again.buffer[start : start + nbytes], staging.buffer[start : start + nbytes]):
                    raise WeightSyncError("differs from what was published", cause="weights.verify_weight_values read it twice")

    def _digest(self, bucket: Bucket, staging: Region) -> str:
        """Runs in a thread, beside the pulls of the next buckets."""
        return bucket_digest(staging.buffer, [(target, nbytes) for _, target, nbytes in runs(bucket.pieces)])

    async def _stop(self, cause: str) -> None:
        """End a running `stage`; returns when nothing writes to the staging memory any more."""
        begun, self._begun = self._begun, None
        await self._end(begun, cause)

    async def _end(self, begun: _Begun | None, cause: str | None) -> None:
        if begun is not None and not begun.work.done():
            self._stop_cause = cause
            begun.work.cancel()
            await asyncio.wait({begun.work})

    def _stopped(self) -> PeerFailure:
        return PeerFailure(f"lane {self.name}: stopped: {self._stop_cause}", peer=self.name, phase="stage", stopped=True)

    async def _settle(self, *, grace_s: float) -> None:
        """Let the running pull end; after `grace_s` give up its transport and the memory that it writes to."""
        thread = self._thread
        if thread is not None and not thread.done():
            await asyncio.wait({thread}, timeout=grace_s)
            if not thread.done():
                await self._drop_transport()
        self._thread = None

    async def _drop_transport(self) -> None:
        old, regions = self._transport, filter(None, (self._staging, self._again))
        self._transport, self._staging, self._again = old.fresh(), None, None

        def drop() -> None:
            old.close()
            for region in regions:
                region.release()

        with contextlib.suppress(TimeoutError):
            await within(start_thread(drop), self._grace_s)

    def _staging_for(self, nbytes: int) -> Region:
        self._staging = staging = room(self._transport, nbytes, self._staging, shared=self.engine.shared_staging)
        self._again = room(self._transport, nbytes, self._again) if self._compare else None
        return staging

    def _check_coverage(self, publication: Publication) -> None:
        expected = self.engine.parameters()
        problems = coverage_problems(publication.plan, expected) if expected is not None else []
        if problems:
            headline = f"lane {self.name}: publication {publication.version} does not fit the engine's model:"
            raise WeightSyncError(
                "\n  ".join([headline, *problems]),
                cause="policy and engine are not built from the same model folder", code="coverage", retryable=False,
            )  # fmt: skip

    def _bucket_failure(self, publication: Publication, bucket: Bucket, exc: Exception) -> PeerFailure:
        known = exc if isinstance(exc, WeightSyncError) else None
        what = f"bucket {bucket.index} of publication {publication.version} {known.message if known else 'was not pulled'}"
        return PeerFailure(
            f"lane {self.name}: {what}", peer=self.name, phase="stage", bucket=bucket.index, where=_place(bucket),
            cause=known.cause if known else first_exception(exc), fix=known.fix if known else out_of_memory_fix(exc),
            code=known.code if known else None, retryable=known.retryable if known else None,
        )  # fmt: skip

    def _late(self, publication: Publication, timeout: float) -> PeerFailure:
        bucket = self._bucket
        return PeerFailure(
            f"lane {self.name}: publication {publication.version} was not staged within {timeout:.3g} s", peer=self.name,
            phase="stage", bucket=None if bucket is None else bucket.index, where="" if bucket is None else _place(bucket),
            cause="" if bucket is None else self._waits_for or f"bucket {bucket.index} had not arrived",
            fix="raise weights.stage_timeout_s, or look at the machine that publishes", code="deadline",
        )  # fmt: skip

    # ---- phase 2

    async def _apply(self, staged: Staged) -> None:
        await self.engine.pause()
        self.lane.apply(staged.epoch)
        await self.engine.apply(staged)
        in_place = self.engine.weight_version()
        if in_place != staged.version:
            raise WeightSyncError(f"the engine of lane {self.name} says version {in_place} after applying {staged.version}")
        self.lane.finish_weight_update(staged.epoch)
        await self.engine.resume()

    async def _fail(self, cause: str) -> None:
        self.lane.abort(cause)
        if self.lane.state == "invalid":
            self.engine.invalidate(cause)
        else:  # nothing was written: let the engine go on with what it has
            with contextlib.suppress(Exception):
                await within(self.engine.resume(), self._grace_s)


def _place(bucket: Bucket) -> str:
    return f"bucket {bucket.index} of policy rank {bucket.rank} ({bucket.pieces[0].name} …)"
