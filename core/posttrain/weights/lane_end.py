"""The driver's view of one rollout body's receiving end, wherever the body lives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from posttrain.weights.publication import Publication


class LaneEnd(Protocol):
    """The driver's view of one rollout body's receiving end; `Receiver` is the one of an engine in this process.

    proved: a canary agreed with the engine since it was started
    at: the bucket that the lane pulls, or pulled last, as far as the driver knows: what is named when the lane dies
    """

    name: str
    proved: bool

    @property
    def at(self) -> int | None: ...

    async def stage(self, publication: Publication, *, timeout: float) -> None:
        """Phase 1: pull every bucket, and digest it, while the engine generates."""

    async def prove(self, digests: Sequence[str]) -> None:
        """Vote: what is staged has the publisher's digests, one for each bucket of the plan."""

    async def commit(self, *, timeout: float) -> None:
        """Phase 2: bring the engine to what is staged."""

    async def abort(self, cause: str) -> None:
        """Stop a running `stage` within a bucket and forget what is staged. Idempotent; after a commit it does nothing."""

    async def rebuild(self) -> None:
        """A new engine, without weights."""

    async def logprobs(self, sequences: Sequence[Sequence[int]], /) -> list[list[float]]:
        """Log-probs of a probe under the weights in place."""

    async def invalidate(self, cause: str) -> None:
        """Refuse to generate until rebuilt."""

    async def close(self) -> None:
        """Give back all memory; idempotent."""
