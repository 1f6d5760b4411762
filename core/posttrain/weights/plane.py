"""The weight plane: from the policy's parameters to engines that provably serve them.

    publish → stage and verify while engines generate → all lanes voted → pause, apply, reset, stamp, resume → canary

Lanes that have nothing else to do begin to stage while the publication is still being written.

The first failure is the origin: it is recorded, every other lane is told and stops within a bucket. A failure before the vote
touches no engine: the old version stays advertised and serves. A failure after it makes that lane invalid; the other lanes end
what they have begun to apply. `weights.on_failure` decides what follows: raise; heal the lanes and retry once; or go on without
the lane that failed, once another one has read the publication, or passed its canary: what no lane can read is the publisher's
fault, and what no lane computes the policy's function with is everybody's. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from posttrain.errors import RunAborted
from posttrain.weights.ahead import Ahead
from posttrain.weights.deadline import abandon, in_thread, within
from posttrain.weights.failure import PeerFailure, Phase, as_failure, bounded, failures_of, first, of_publisher
from posttrain.weights.lane_end import LaneEnd
from posttrain.weights.publication import Publication, PublicationPool, complete_digests, whole
from posttrain.weights.publisher import LocalPublisher, Publisher
from posttrain.weights.receiver import Receiver
from posttrain.weights.shared_files import shared_folder, sweep

if TYPE_CHECKING:
    import torch

    from posttrain.config.schema import WeightsConfig
    from posttrain.rollout.engine import Engine
    from posttrain.weights.canary import Canary
    from posttrain.weights.transport import Transport

T = TypeVar("T")
Logprobs = list[list[float]]

Source = Callable[[], Iterator[tuple[str, "torch.Tensor"]]]
"""The policy's parameters: Hugging Face names, tied duplicates omitted, always in the same order. Cast to the engine's dtype
while they are copied; give them as they are."""


Digesting = asyncio.Future[tuple[str, ...]]
"""The digests of a publication, which are made while lanes pull."""


@dataclass(frozen=True)
class Update:
    """A publication on its way.

    expected: the trainer's log-probs of the canary's probe at its weights (None: no canary will be asked for)
    due: whether a canary follows in any case, and not only if an engine is started anew on the way
    """

    publication: Publication
    expected: Logprobs | None
    due: bool
    metrics: dict[str, float]


class WeightPlane:
    """Brings engines to the policy's weights, one version after the other.

    `version` is the advertised one: every lane that is left has committed it, and passed the canary if one was due.
    `last_failure` is the origin of the last update that failed, also of one that was healed.
    """

    def __init__(
        self, publisher: Publisher, lanes: Sequence[LaneEnd], config: WeightsConfig, *, canary: Canary | None = None
    ) -> None:
        self.publisher, self.lanes, self.config = publisher, list(lanes), config
        self.version: int | None = None
        self.last_failure: PeerFailure | None = None
        self._canary, self._commits = canary, 0
        self._busy = asyncio.Lock()
        self._ahead = Ahead()

    @classmethod
    def local(
        cls,
        engines: Engine | Sequence[Engine],
        transport: Transport,
        config: WeightsConfig,
        source: Source,
        *,
        canary: Canary | None = None,
    ) -> WeightPlane:
        """The plane of an unsharded policy and engines that are all driven from this process."""
        engines = engines if isinstance(engines, Sequence) else [engines]
        pool = PublicationPool(transport, bucket_bytes=config.bucket_bytes, dtype=engines[0].spec.dtype)
        lanes = [
            Receiver(engine, transport, name=f"rollout-{i}", compare_bytes=config.verify_weight_values)
            for i, engine in enumerate(engines)
        ]
        publisher = LocalPublisher(pool, lambda: whole(source()), timeout_s=config.stage_timeout_s)
        return cls(publisher, lanes, config, canary=canary)

    async def sync(self, version: int) -> dict[str, float]:
        """Publish the current weights as `version` and bring every engine to it. Returns seconds by phase, bytes, canary.

        Raises WeightSyncError naming the lane, the policy rank, the bucket and the first exception.
        """
        update = await self.publish(version)
        try:
            return await self.deliver(update)
        except PeerFailure as exc:
            if not self.may_publish_again(exc):
                raise
        return await self.deliver(await self.publish_again(version))

    def may_publish_again(self, failure: PeerFailure) -> bool:
        """Whether a delivery failed because what is published could not be read or proved, and `weights.on_failure` has it
        healed."""
        return self.config.on_failure == "rebuild_and_retry" and failure.phase in ("publish", "stage")

    async def publish_again(self, version: int) -> Update:
        """Take back a publication that nobody has, and snapshot the weights anew: they must still be those of `version`."""
        await self._of_policy(self.publisher.retract(version), f"publication {version} was not taken back")
        return await self.publish(version)

    async def publish(self, version: int) -> Update:
        """Snapshot the current weights, and what a canary needs of them. When this returns, training may go on: its next
        optimizer step waits until the publication is digested, see `PublicationPool.settle`."""
        began = time.perf_counter()
        try:
            publication = await self._publish(version)
            metrics = {"time/publish_s": time.perf_counter() - began, "weights/bytes": float(publication.plan.nbytes)}
            every = self.config.canary_every
            due = not self._proved() or (every > 0 and self._commits % every == 0)
            return Update(publication, await self._expected_of_canary(due), due, metrics)
        except BaseException:
            await self._not_ahead(version)
            raise

    async def deliver(self, update: Update) -> dict[str, float]:
        """Bring every engine to a publication; of two that wait, a third replaces the older one."""
        publication, metrics = update.publication, dict(update.metrics)
        version = publication.version
        async with self._busy:
            try:
                await self._of_policy(self.publisher.hold(version), f"publication {version} was not held")
            except BaseException as exc:
                if isinstance(exc, PeerFailure):
                    self._record(exc)
                await self._not_ahead(version)
                raise
            digests = asyncio.ensure_future(self._digests(publication))
            try:
                await self._phase("time/stage_s", metrics, self._stage(publication, digests))
                await self._phase("time/apply_s", metrics, self._commit(publication, digests))
                if update.expected is not None and (update.due or not self._proved()):
                    await self._phase("time/canary_s", metrics, self._prove_meaning(update, update.expected, digests, metrics))
            finally:
                abandon(digests)
                self._ahead.forget()
                with contextlib.suppress(Exception):  # a rank that died holds nothing; what happened to it is said elsewhere
                    await within(self.publisher.release(version), self.config.abort_timeout_s)
            self.version, self._commits = version, self._commits + 1
            return metrics

    async def close(self) -> None:
        """Give back all memory; idempotent. Engines are closed by whoever started them."""
        self._ahead.forget()
        ends = [asyncio.ensure_future(close) for close in (*(lane.close() for lane in self.lanes), self.publisher.close())]
        await asyncio.wait(ends, timeout=self.config.abort_timeout_s)
        for end in ends:
            abandon(end)

    # ---- phases

    async def _publish(self, version: int) -> Publication:
        try:
            return await self._publish_once(version)
        except PeerFailure as exc:
            self._record(exc)
            if self.config.on_failure != "rebuild_and_retry":
                raise
        return await self._publish_once(version)

    async def _publish_once(self, version: int) -> Publication:
        limit = self.config.stage_timeout_s + self.config.abort_timeout_s  # its ranks have the shorter one
        writing = True

        def opened(publication: Publication) -> None:
            if writing and self._ahead.version is None and not self._busy.locked():
                self._ahead.begin(self._first_lanes(), publication, timeout=self.config.stage_timeout_s)

        try:
            what = f"publication {version} was not made"
            return await self._of_policy(self.publisher.publish(version, opened), what, timeout=limit)
        except PeerFailure:
            await self._not_ahead(version)
            raise
        finally:
            writing = False

    def _first_lanes(self) -> Sequence[LaneEnd]:
        return self.lanes[: self.config.max_concurrent_lanes]

    async def _not_ahead(self, version: int) -> None:
        """Stop those who pull a publication that will not be delivered."""
        if self._ahead.version == version:
            await self._stop(self._first_lanes(), f"publication {version} is not to be had")
            self._ahead.forget()

    async def _digests(self, publication: Publication) -> tuple[str, ...]:
        limit = self.config.stage_timeout_s + self.config.abort_timeout_s
        found = await self._of_policy(
            self.publisher.digests(publication.version), f"publication {publication.version} was not digested", timeout=limit
        )
        return complete_digests(publication, found)

    async def _stage(self, publication: Publication, digests: Digesting) -> None:
        """Until every lane that is left has voted. Lanes that were told to stop stage again."""
        lanes, failures, attempts = list(self.lanes), dict[LaneEnd, PeerFailure](), 1
        while failure := await self._stage_all(publication, digests, lanes):
            failed, origin, answered = failure
            if self.config.on_failure == "drop_lane" and len(lanes) > 1 and not of_publisher(origin):
                lanes.remove(failed)
                failures[failed] = origin
            elif self.config.on_failure == "rebuild_and_retry" and attempts == 1 and origin.phase == "stage":
                attempts += 1
                for lane in [lane for lane in self.lanes if lane.name not in answered]:
                    await self._rebuild(lane)
            else:
                raise self._record(first([*failures.values(), origin]))
        if failures:
            await self._drop(failures)

    async def _stage_all(
        self, publication: Publication, digests: Digesting, lanes: Sequence[LaneEnd]
    ) -> tuple[LaneEnd, PeerFailure, set[str]] | None:
        """These lanes side by side; the first failure ends the others. Returns it, and who acknowledged the end."""
        gate = asyncio.Semaphore(self.config.max_concurrent_lanes or len(lanes))

        async def stage(lane: LaneEnd) -> None:
            async with gate:
                await self._stage_one(lane, publication, digests)

        tasks = {asyncio.ensure_future(stage(lane)): lane for lane in lanes}
        answered: set[str] = set()
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if not (failures := failures_of(done)):
                return None
            answered = await self._stop(lanes, f"another lane failed: {first(failures).message}")
            if pending:
                done, pending = await asyncio.wait(tasks, timeout=self.config.abort_timeout_s)
        except asyncio.CancelledError:
            await self._stop(lanes, "the update was cancelled")
            raise
        finally:
            for task in tasks:
                abandon(task)
        origin = self._record(first(failures_of(task for task in tasks if task in done)))
        failed = next(lane for task, lane in tasks.items() if task in done and failures_of([task]) == [origin])
        return failed, origin, answered

    async def _stage_one(self, lane: LaneEnd, publication: Publication, digests: Digesting) -> None:
        timeout = self.config.stage_timeout_s
        await self._of_lane(lane, "stage", lane.stage(publication, timeout=timeout), timeout)
        await self._of_lane(lane, "stage", lane.prove(await asyncio.shield(digests)))

    async def _stop(self, lanes: Iterable[LaneEnd], cause: str) -> set[str]:
        """Abort lanes; the names of those that acknowledged it in time."""
        told = {asyncio.ensure_future(lane.abort(cause)): lane for lane in lanes}
        done, pending = await asyncio.wait(told, timeout=self.config.abort_timeout_s)
        for task in pending:
            abandon(task)
        return {told[task].name for task in done if not task.cancelled() and task.exception() is None}

    async def _commit(self, publication: Publication, digests: Digesting) -> None:
        """All lanes apply; each ends what it has begun, because a stopped one would be a mixture."""
        failures = await self._commit_all()
        if failures and self.config.on_failure == "rebuild_and_retry":
            for lane in failures:
                await self._rebuild_to(lane, publication, digests)
        elif failures and self.config.on_failure == "drop_lane":
            await self._drop(failures)
        elif failures:
            raise first(list(failures.values()))

    async def _commit_all(self) -> dict[LaneEnd, PeerFailure]:
        timeout = self.config.apply_timeout_s
        work = [self._of_lane(lane, "apply", lane.commit(timeout=timeout), timeout) for lane in self.lanes]
        results = await asyncio.gather(*work, return_exceptions=True)
        failures: dict[LaneEnd, PeerFailure] = {}
        for lane, result in zip(self.lanes, results, strict=True):
            if isinstance(result, PeerFailure):
                failures[lane] = result
            elif isinstance(result, BaseException):
                raise result
        if failures:
            origin = self._record(first(list(failures.values())))
            await self._stop(failures, f"it did not answer: {origin.message}")  # one that failed by itself has nothing to stop
        return failures

    async def _rebuild_to(self, lane: LaneEnd, publication: Publication, digests: Digesting) -> None:
        """A new engine, brought to what the other lanes have committed."""
        try:
            await self._rebuild(lane)
            await self._stage_one(lane, publication, digests)
            await self._of_lane(lane, "apply", lane.commit(timeout=self.config.apply_timeout_s))
        except PeerFailure as exc:
            exc.phase = "apply"
            raise

    async def _rebuild(self, lane: LaneEnd) -> None:
        await self._of_lane(lane, "apply", lane.rebuild(), self.config.rebuild_timeout_s)

    async def _drop(self, failures: dict[LaneEnd, PeerFailure]) -> None:
        if len(failures) == len(self.lanes):
            origin = first(list(failures.values()))
            raise RunAborted(
                "every lane failed, there is no engine left to drop to", cause=str(origin), fix="see weights.on_failure",
                code="weights",
            ) from origin  # fmt: skip
        for lane, failure in failures.items():
            self.lanes.remove(lane)
            for end in (lane.invalidate(f"dropped: {failure.message}"), lane.close()):
                with contextlib.suppress(Exception):  # it may be dead
                    await within(end, self.config.abort_timeout_s)

    # ---- canary

    def _proved(self) -> bool:
        return all(lane.proved for lane in self.lanes)

    async def _expected_of_canary(self, due: bool) -> Logprobs | None:
        """The trainer's log-probs of the probe at the weights just published.

        Asked for when a canary is due: for every engine that none has proved since it was started, and every
        `weights.canary_every` commits. And always where an engine may be started anew while this publication is delivered, as
        the trainer may have moved on by then; that is a forward over a few short prompts, little beside a batch step.
        """
        if self._canary is None or not (due or self.config.on_failure == "rebuild_and_retry"):
            return None
        return await self._of_policy(in_thread(self._canary.expect), "the trainer's log-probs of the canary's probe did not come")

    async def _prove_meaning(self, update: Update, expected: Logprobs, digests: Digesting, metrics: dict[str, float]) -> None:
        """Every lane computes the policy's function. Where one does with this publication, another that does not is at fault
        itself: it is healed or dropped. Where none does, a new engine would not either."""
        failures = await self._check_canary(self.lanes, expected, metrics)
        if failures and (self.config.on_failure == "raise" or len(failures) == len(self.lanes)):
            raise first(list(failures.values()))
        if failures and self.config.on_failure == "drop_lane":
            await self._drop(failures)
        elif failures:
            for lane in failures:
                await self._rebuild_to(lane, update.publication, digests)
            if again := await self._check_canary(list(failures), expected, metrics):
                raise first(list(again.values()))

    async def _check_canary(
        self, lanes: Iterable[LaneEnd], expected: Logprobs, metrics: dict[str, float]
    ) -> dict[LaneEnd, PeerFailure]:
        """Ask these lanes; those that do not agree refuse to generate from then on, and are returned."""
        assert self._canary is not None
        failures, timeout = dict[LaneEnd, PeerFailure](), self.config.apply_timeout_s
        for lane in lanes:
            try:
                metrics |= await self._of_lane(lane, "canary", self._canary.check(lane, expected), timeout)
                lane.proved = True
            except PeerFailure as exc:
                failures[lane] = exc
                with contextlib.suppress(Exception):
                    await within(lane.invalidate(exc.message), self.config.abort_timeout_s)
        if failures:
            self._record(first(list(failures.values())))
        return failures

    def _record(self, failure: PeerFailure) -> PeerFailure:
        self.last_failure = failure
        sweep(shared_folder())  # whoever died may have left memory on this host
        return failure

    # ---- deadlines and names

    async def _of_lane(self, lane: LaneEnd, phase: Phase, work: Awaitable[T], timeout: float | None = None) -> T:
        """`work` of a lane, its failure named. The lane has a deadline of its own; this one is for a lane that is gone."""
        limit = (timeout if timeout is not None else self.config.stage_timeout_s) + self.config.abort_timeout_s
        try:
            what = f"lane {lane.name} failed in {phase}"
            return await bounded(work, peer=lane.name, phase=phase, what=what, timeout=limit)
        except PeerFailure as exc:
            raise as_failure(exc, peer=lane.name, phase=phase, message="", bucket=lane.at if phase == "stage" else None) from exc

    async def _of_policy(self, work: Awaitable[T], what: str, *, timeout: float | None = None) -> T:
        return await bounded(work, peer="policy", phase="publish", what=what, timeout=timeout or self.config.stage_timeout_s)

    async def _phase(self, key: str, metrics: dict[str, float], work: Awaitable[None]) -> None:
        began = time.perf_counter()
        await work
        metrics[key] = time.perf_counter() - began
