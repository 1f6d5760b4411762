"""The weight plane: from the policy's parameters to engines that provably serve them.

    publish → stage and verify while engines generate → all lanes voted → pause, apply, reset, stamp, resume → canary

A failure before the vote touches no engine: the old version stays advertised and serves. A failure after it makes that lane
invalid. `weights.on_failure` decides what follows: raise; rebuild the lane's engine and retry once; or go on without the lane.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from posttrain.errors import RunAborted, WeightSyncError
from posttrain.weights.publication import Publication, PublicationPool
from posttrain.weights.receiver import Receiver

if TYPE_CHECKING:
    import torch

    from posttrain.config.schema import WeightsConfig
    from posttrain.rollout.engine import Engine
    from posttrain.weights.canary import Canary
    from posttrain.weights.transport import Transport

Source = Callable[[], Iterator[tuple[str, "torch.Tensor"]]]
"""The policy's parameters: Hugging Face names, tied duplicates omitted, always in the same order. Cast to the engine's dtype
while they are copied; give them as they are."""


class WeightPlane:
    """Brings engines to the policy's weights, one version after the other."""

    def __init__(
        self,
        engines: Engine | Sequence[Engine],
        transport: Transport,
        config: WeightsConfig,
        source: Source,
        *,
        canary: Canary | None = None,
    ) -> None:
        self.config, self._source, self._canary = config, source, canary
        engines = engines if isinstance(engines, Sequence) else [engines]
        self._pool = PublicationPool(transport, bucket_bytes=config.bucket_bytes, dtype=engines[0].spec.dtype)
        self.receivers = [
            Receiver(engine, transport, name=f"rollout-{i}", compare_bytes=config.verify_weight_values)
            for i, engine in enumerate(engines)
        ]
        self.version: int | None = None
        self._commits = 0
        self._busy = asyncio.Lock()

    async def sync(self, version: int) -> dict[str, float]:
        """Publish the current weights as `version` and bring every engine to it. Returns seconds by phase, bytes, canary.

        The source must not change before this returns its publication (`time/publish_s`); afterwards training may go on.
        Raises WeightSyncError naming the lane, the bucket and the first exception.
        """
        async with self._busy:
            began = time.perf_counter()
            publication = await asyncio.to_thread(self._publish, version)
            metrics = {"time/publish_s": time.perf_counter() - began, "weights/bytes": float(publication.plan.nbytes)}
            expected = await self._expected_of_canary()
            self._pool.hold(version)
            try:
                await self._phase("time/stage_s", metrics, self._stage(publication))
                await self._phase("time/apply_s", metrics, self._commit(publication))
            finally:
                self._pool.release(version)
            self.version, self._commits = version, self._commits + 1
            if expected is not None:
                await self._phase("time/canary_s", metrics, self._check_canary(expected, metrics))
            return metrics

    def close(self) -> None:
        """Give back all memory; idempotent. Engines are closed by whoever started them."""
        for receiver in self.receivers:
            receiver.close()
        self._pool.close()

    def _publish(self, version: int) -> Publication:
        self._pool.plan_for(self._source())
        return self._pool.publish(version, self._source())

    async def _stage(self, publication: Publication) -> None:
        timeout = self.config.stage_timeout_s
        failures = await _all(r.stage(publication, timeout=timeout) for r in self.receivers)
        if failures and self.config.on_failure == "rebuild_and_retry":
            failures = await _all(self.receivers[i].stage(publication, timeout=timeout) for i in failures)
        elif failures and self.config.on_failure == "drop_lane":
            self._drop(failures)
            return
        if failures:
            origin = next(iter(failures.values()))
            for receiver in self.receivers:
                receiver.abort(f"another lane failed: {origin}")
            raise _as_sync_error(origin)

    async def _commit(self, publication: Publication) -> None:
        failures = await _all(r.commit(timeout=self.config.apply_timeout_s) for r in self.receivers)
        if failures and self.config.on_failure == "rebuild_and_retry":
            failures = await _all(self._rebuild(self.receivers[i], publication) for i in failures)
        elif failures and self.config.on_failure == "drop_lane":
            self._drop(failures)
            return
        if failures:
            raise _as_sync_error(next(iter(failures.values())))

    async def _rebuild(self, receiver: Receiver, publication: Publication) -> None:
        await receiver.rebuild()
        await receiver.stage(publication, timeout=self.config.stage_timeout_s)
        await receiver.commit(timeout=self.config.apply_timeout_s)

    def _drop(self, failures: dict[int, BaseException]) -> None:
        if len(failures) == len(self.receivers):
            raise RunAborted(
                "every lane failed, there is no engine left to drop to", cause=str(next(iter(failures.values()))),
                fix="see weights.on_failure", code="weights",
            )  # fmt: skip
        for index in sorted(failures, reverse=True):
            self.receivers.pop(index).close()

    async def _expected_of_canary(self) -> list[list[float]] | None:
        """The trainer's log-probs of the probe at the weights just published, when a canary is due after this commit.

        It is due for every engine that no canary has proved since it was started, and every `weights.canary_every` commits.
        """
        every = self.config.canary_every
        due = not all(r.proved for r in self.receivers) or (every > 0 and self._commits % every == 0)
        return await asyncio.to_thread(self._canary.expect) if self._canary is not None and due else None

    async def _check_canary(self, expected: list[list[float]], metrics: dict[str, float]) -> None:
        assert self._canary is not None
        for receiver in self.receivers:
            try:
                metrics |= await self._canary.check(receiver.engine, expected)
                receiver.proved = True
            except WeightSyncError as exc:
                receiver.engine.invalidate(exc.message)
                raise

    async def _phase(self, key: str, metrics: dict[str, float], work: Awaitable[None]) -> None:
        began = time.perf_counter()
        await work
        metrics[key] = time.perf_counter() - began


async def _all(work: Iterable[Awaitable[None]]) -> dict[int, BaseException]:
    """Run side by side to the end; the failures by position. A cancellation is passed on."""
    results = await asyncio.gather(*work, return_exceptions=True)
    return {i: r for i, r in enumerate(results) if isinstance(r, BaseException)}


def _as_sync_error(exc: BaseException) -> BaseException:
    if isinstance(exc, Exception) and not isinstance(exc, WeightSyncError):
        wrapped = WeightSyncError(f"the weight update failed: {type(exc).__name__}: {exc}")
        wrapped.__cause__ = exc
        return wrapped
    return exc
