"""A rollout body: an engine and its lane in one process, whoever hosts the process.

body = RolloutBody("rollout-0", engine="vllm", options={}, spec=spec, transport="nixl")
await body.start()
async for completion in body.generate(requests): ...
await body.stage(publication, 120.0); await body.commit(120.0)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.weights.receiver import Receiver

if TYPE_CHECKING:
    from posttrain.rollout.engine import Engine, EngineSpec
    from posttrain.types import Completion, Request
    from posttrain.weights.publication import Publication

PROGRESS_S = 0.05


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

    async def start(self) -> None:
        """Bring the engine up with placeholder weights. Raises EngineStartError with the fix."""
        await self.engine.start()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Every completion as it finishes."""
        async for completion in self.engine.generate(requests):
            yield completion

    async def abort_request(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    # ---- the lane, as `LaneEnd`

    async def stage(self, publication: Publication, timeout: float) -> AsyncIterator[int]:
        """Stage it; yields the bucket that it is at while it moves on, so that whoever looks knows where a body died."""
        staging = asyncio.ensure_future(self.receiver.stage(publication, timeout=timeout))
        at: int | None = None
        try:
            while not staging.done():
                await asyncio.wait({staging}, timeout=PROGRESS_S)
                if (now := self.receiver.at) is not None and now != at:
                    at = now
                    yield now
            await staging
        finally:
            staging.cancel()

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

    async def close_lane(self) -> None:
        await self.receiver.close()

    async def close(self) -> None:
        """Free everything; idempotent."""
        await self.receiver.close()
        await self.engine.close()
