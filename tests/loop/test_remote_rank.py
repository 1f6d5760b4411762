"""A rank of a policy elsewhere as one that publishes, without a cluster: what the driver knows of a publication under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from posttrain.errors import RunInterrupted, WaitExpired
from posttrain.loop.policy_group import RemoteRank
from posttrain.policy.rank import PolicyRank
from posttrain.weights.failure import PeerFailure
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.publication import LocalWeight, PublicationPool, complete_digests, whole
from posttrain.weights.publisher import GroupPublisher, LocalPublisher

AT = 3
"""The bucket at which a rank stands still."""


class Rank(PolicyRank):
    """Publishes five parameters, a bucket each; where the gate is closed, it waits at one of them."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self._publisher = LocalPublisher(PublicationPool(InprocTransport(), bucket_bytes=8), self._weights, timeout_s=timeout_s)

    def _weights(self) -> Iterator[LocalWeight]:
        for number, weight in enumerate(whole((f"w{i}", torch.full((2,), float(i))) for i in range(5))):
            if number == AT + 1:
                self.gate.wait(20)
            yield weight


class Elsewhere:
    """A `Remote` whose role lives here. dies: the role is dead after so many seconds of a stream."""

    name = "policy-1"

    def __init__(self, rank: Rank, *, dies: float | None = None) -> None:
        self.rank, self.dies = rank, dies

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        try:
            async with asyncio.timeout(self.dies):
                async for said in getattr(self.rank, method)(*args):
                    yield said
        except TimeoutError as exc:
            raise RunInterrupted("policy-1 died", code="role-died") from exc

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        return await getattr(self.rank, method)(*args)

    async def late(self, method: str, timeout: float) -> WaitExpired:
        return WaitExpired(f"policy-1 did not finish {method} within {timeout:g} s")


def publish(rank: Rank, timeout: float = 20.0, *, dies: float | None = None) -> Any:
    end = RemoteRank(Elsewhere(rank, dies=dies), timeout)  # type: ignore[arg-type]

    async def published() -> Any:
        publisher = GroupPublisher([end], stop_timeout_s=0.1)
        publication = await publisher.publish(1)
        return publication, complete_digests(publication, await publisher.digests(1))

    try:
        return asyncio.run(published())
    finally:
        rank.gate.set()


def stalled(timeout_s: float = 20.0) -> Rank:
    rank = Rank(timeout_s)
    rank.publisher.pool.plan_for(rank._weights())
    rank.gate.clear()
    return rank


def test_a_publication_arrives_whole() -> None:
    publication, digests = publish(Rank())
    assert publication.version == 1 and len(digests) == 5 and all(digests)


def test_a_rank_that_dies_while_it_publishes_is_named_with_its_bucket() -> None:
    with pytest.raises(PeerFailure) as caught:
        publish(stalled(), dies=0.3)
    assert (caught.value.peer, caught.value.bucket, caught.value.where) == ("policy-1", AT, f"at bucket {AT}")
    assert caught.value.message == "policy-1 did not publish" and "policy-1 died" in caught.value.cause


def test_a_rank_that_stands_still_names_its_bucket_itself() -> None:
    with pytest.raises(PeerFailure, match=r"policy rank 0: publication 1 was not written within 0\.2 s") as caught:
        publish(stalled(timeout_s=0.2))
    assert caught.value.bucket == AT and caught.value.code == "deadline"


def test_a_rank_that_says_nothing_more_is_named_with_the_last_bucket_it_said() -> None:
    with pytest.raises(PeerFailure) as caught:
        publish(stalled(), timeout=0.3)
    assert caught.value.bucket == AT and "policy-1 did not finish publish within 0.3 s" in caught.value.cause
