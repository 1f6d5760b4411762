"""One rollout body's receiving end: it pulls a publication into its own staging memory, proves it, and hands it to its engine.

Phase 1 (`stage`) touches no engine. Phase 2 (`commit`) pauses it, applies, and lets it go on; what fails there leaves the lane
invalid. Staging is one copy of the weights, reused from update to update, and dropped with its transport when a pull is overdue:
whoever still writes to it writes to memory that nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import torch

from posttrain.errors import WeightSyncError
from posttrain.weights.lane import Lane
from posttrain.weights.memory import Region, private_region, shared_region
from posttrain.weights.plan import Bucket, coverage_problems
from posttrain.weights.publication import Publication, bucket_digest
from posttrain.weights.transport import Staged, Transport

if TYPE_CHECKING:
    from posttrain.rollout.engine import Engine


class Receiver:
    """`lane` says what may happen, this does it. `proved`: a canary agreed with this engine since it was started."""

    def __init__(self, engine: Engine, transport: Transport, *, name: str = "rollout-0", compare_bytes: bool = False) -> None:
        self.engine, self.lane = engine, Lane(name)
        self.proved = False
        self._compare = compare_bytes
        self._transport = transport.fresh()
        self._staging: Region | None = None
        self._staged: Staged | None = None

    async def stage(self, publication: Publication, *, timeout: float) -> None:
        """Pull and verify every bucket while the engine generates; ends with the lane's vote.

        Raises WeightSyncError naming the bucket; the lane is then aborted and the engine untouched.
        """
        lane, epoch, plan = self.lane, self.lane.epoch + 1, publication.plan
        try:
            if lane.plan is None or lane.plan.digest != plan.digest:
                self._check_coverage(publication)
                lane.set_bucket_plan(plan)
            lane.begin_weight_update(epoch, publication.version)
            staging = self._staging_for(plan.nbytes)
            async with asyncio.timeout(timeout):
                for bucket in plan.buckets:
                    await asyncio.to_thread(self._pull, publication, bucket, staging)
                    lane.stage(epoch, bucket.index)
            lane.vote(epoch)
            self._staged = Staged(publication.version, epoch, plan, publication.digests, staging)
        except TimeoutError as exc:
            self._drop_transport()
            lane.abort(f"staging took longer than {timeout:.0f} s")
            raise WeightSyncError(
                f"lane {lane.name}: publication {publication.version} was not staged within {timeout:.0f} s",
                fix="raise weights.stage_timeout_s, or look at the machine that publishes", code="deadline",
            ) from exc  # fmt: skip
        except BaseException as exc:
            lane.abort(str(exc) or type(exc).__name__)
            raise

    async def commit(self, *, timeout: float) -> None:
        """Pause, apply, resume. Raises WeightSyncError; from the first written byte on, a failure makes the lane invalid."""
        staged, lane = self._staged, self.lane
        if staged is None:
            raise WeightSyncError(f"lane {lane.name}: commit without a staged publication")
        try:
            async with asyncio.timeout(timeout):
                await self.engine.pause()
                lane.apply(staged.epoch)
                await self.engine.apply(staged)
                in_place = self.engine.weight_version()
                if in_place != staged.version:
                    raise WeightSyncError(f"the engine says version {in_place} after applying {staged.version}")
                lane.finish_weight_update(staged.epoch)
                await self.engine.resume()
        except TimeoutError as exc:
            await self._fail(f"pause, apply and resume took longer than {timeout:.0f} s")
            raise WeightSyncError(
                f"lane {lane.name}: version {staged.version} was not applied within {timeout:.0f} s",
                fix="raise weights.apply_timeout_s, or read the engine's log", code="deadline",
            ) from exc  # fmt: skip
        except BaseException as exc:
            await self._fail(str(exc) or type(exc).__name__)
            raise
        finally:
            self._staged = None

    def abort(self, cause: str) -> None:
        """Another lane failed: forget what is staged. The engine goes on with its old weights."""
        self.lane.abort(cause)
        self._staged = None

    async def rebuild(self) -> None:
        """A new engine in place of an invalid one, without weights."""
        await self.engine.close()
        self._drop_transport()
        await self.engine.start()
        self.lane.rebuild()
        self.proved = False

    def close(self) -> None:
        self._transport.close()
        if self._staging is not None:
            self._staging.release()
            self._staging = None

    async def _fail(self, cause: str) -> None:
        self.lane.abort(cause)
        if self.lane.state == "invalid":
            self.engine.invalidate(cause)
        else:  # nothing was written: let the engine go on with what it has
            with contextlib.suppress(Exception):
                await self.engine.resume()

    def _check_coverage(self, publication: Publication) -> None:
        expected = self.engine.parameters()
        problems = coverage_problems(publication.plan, expected) if expected is not None else []
        if problems:
            headline = f"lane {self.lane.name}: publication {publication.version} does not fit the engine's model:"
            raise WeightSyncError(
                "\n  ".join([headline, *problems]),
                cause="policy and engine are not built from the same model folder", code="coverage", retryable=False,
            )  # fmt: skip

    def _staging_for(self, nbytes: int) -> Region:
        if self._staging is None or self._staging.nbytes < nbytes:
            if self._staging is not None:
                self._staging.release()
            self._staging = shared_region(nbytes) if self.engine.shared_staging else private_region(nbytes)
            self._transport.register(self._staging)
        return self._staging

    def _pull(self, publication: Publication, bucket: Bucket, staging: Region) -> None:
        handle, ranges = publication.handles[bucket.rank], [(p.target, p.nbytes) for p in bucket.pieces]
        self._transport.pull(handle, bucket.pieces, staging)
        if bucket_digest(staging.buffer, ranges) != publication.digests[bucket.index]:
            raise WeightSyncError(
                f"lane {self.lane.name}: bucket {bucket.index} of publication {publication.version} arrived damaged",
                cause=f"its digest is not the publisher's (rank {bucket.rank}: {bucket.pieces[0].name} …)",
            )
        if self._compare:
            again = private_region(staging.nbytes)
            self._transport.pull(handle, bucket.pieces, again)
            for start, nbytes in ranges:
                if not torch.equal(again.buffer[start : start + nbytes], staging.buffer[start : start + nbytes]):
                    raise WeightSyncError(f"lane {self.lane.name}: bucket {bucket.index} differs from what was published")

    def _drop_transport(self) -> None:
        self._transport.close()
        self._transport = self._transport.fresh()
        if self._staging is not None:
            self._staging.release()
            self._staging = None
