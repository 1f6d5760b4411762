"""A rollout body: an engine and its lane in one process, whoever hosts the process.

body = RolloutBody("rollout-0", engine="vllm", options={}, spec=spec, transport="nixl")
await body.start()
async for completion in body.generate(requests): ...
async for bucket in body.stage(publication, 120.0): ...
await body.prove(digests); await body.commit(120.0)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.errors import WeightSyncError
from posttrain.weights.deadline import in_thread, moving
from posttrain.weights.receiver import Receiver

if TYPE_CHECKING:
    from posttrain.rollout.engine import Engine, EngineSpec
    from posttrain.types import Completion, Request
    from posttrain.weights.publication import Publication

Reader = asyncio.Queue["Completion | BaseException | None"]
"""What one call to `generate` gets: completions, and at last a failure or None."""


class RolloutBody:
    """engine, transport: plug-ins by name, built here with `options` and `transport_options`.   number: of this lane among the
    lanes.   compare_bytes: see `weights.verify_weight_values`."""

    def __init__(
        self,
        name: str,
        *,
        engine: str,
        options: Mapping[str, Any],
        spec: EngineSpec,
        transport: str,
        transport_options: Mapping[str, Any] | None = None,
        number: int = 0,
        compare_bytes: bool = False,
    ) -> None:
        self.engine: Engine = plugins.build("engines", engine, dict(options), where="rollout.options", spec=spec)
        end = plugins.build("transports", transport, dict(transport_options or {}), where="weights.options")
        self.receiver = Receiver(self.engine, end, name=name, number=number, compare_bytes=compare_bytes)
        self._readers: dict[Reader, None] = {}

    async def start(self) -> None:
        """Bring the engine up with placeholder weights, after the transport: that is quick. Raises EngineStartError and
        WeightSyncError with the fix."""
        await in_thread(self.receiver.warm)
        await self.engine.start()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Every completion as it finishes. Raises WeightSyncError (code `lane-invalid`) when the lane is dropped meanwhile: an
        engine that was left paused, or half updated, may never come to the end of what it has begun."""
        reader: Reader = asyncio.Queue()
        self._readers[reader] = None
        named = f"{self.receiver.name} generates {requests[0].id}" if requests else None  # a report of a hang has it
        reading = asyncio.create_task(_read(self.engine.generate(requests), reader), name=named)
        try:
            while (item := await reader.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            del self._readers[reader]
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def abort_request(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def stacks(self) -> Mapping[str, str]:
        """What the engine's processes write of themselves."""
        return await self.engine.stacks()

    # ---- the lane, as `LaneEnd`

    def stage(self, publication: Publication, timeout: float) -> AsyncIterator[int | None]:
        """Stage it; yields the bucket that it is at while it moves on, so that whoever looks knows where a body died."""
        return moving(self.receiver.stage(publication, timeout=timeout), lambda: self.receiver.at)

    async def prove(self, digests: Sequence[str]) -> None:
        await self.receiver.prove(digests)

    async def commit(self, timeout: float) -> None:
        await self.receiver.commit(timeout=timeout)

    async def abort(self, cause: str) -> None:
        await self.receiver.abort(cause)

    async def rebuild(self) -> None:
        await self.receiver.rebuild()

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self.receiver.logprobs(sequences)

    async def invalidate(self, cause: str) -> None:
        await self.receiver.invalidate(cause)
        for reader in self._readers:
            reader.put_nowait(WeightSyncError(f"{self.receiver.name} does not generate any more: {cause}", code="lane-invalid"))

    async def close_lane(self) -> None:
        await self.receiver.close()

    async def close(self) -> None:
        """Free everything; idempotent."""
        await self.receiver.close()
        await self.engine.close()


async def _read(stream: AsyncIterator[Completion], reader: Reader) -> None:
    try:
        async for completion in stream:
            reader.put_nowait(completion)
        reader.put_nowait(None)
    except BaseException as exc:  # a cancellation from within the engine, too: nobody may wait for what has ended
        reader.put_nowait(exc)
        if not isinstance(exc, Exception):
            raise
