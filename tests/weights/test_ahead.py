"""Lanes that pull a publication while it is written: never what is not written yet, and nothing is left of what was not made."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weight_toys import LAYERS, ToyEngine, trained

from posttrain.config.schema import WeightsConfig
from posttrain.errors import WeightSyncError
from posttrain.policy.sharding import fsdp_shards
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.plan import BucketPlan, ParameterSpec, plan_buckets
from posttrain.weights.plane import WeightPlane
from posttrain.weights.progress import WORD, Known, Written, slot_bytes, staging_bytes

LAST = f"layers.{LAYERS - 1}.weight"
SPECS = [ParameterSpec("a", "float32", (33, 4)), ParameterSpec("b", "bfloat16", (50,)), ParameterSpec("c", "float32", (7, 7))]


# ---- the word


def carried(plan: BucketPlan, rank: int, slot: torch.Tensor, known: Known) -> None:
    """What a lane does."""
    staging = torch.zeros(staging_bytes(plan), dtype=torch.uint8)
    for piece in known.pieces(rank):
        staging[piece.target : piece.target + piece.nbytes] = slot[piece.source : piece.source + piece.nbytes]
    known.read(rank, staging)


@given(bucket_bytes=st.sampled_from([8, 24, 100, 4096]), ranks=st.integers(1, 3), data=st.data())
def test_what_a_lane_may_pull_is_exactly_what_is_written(bucket_bytes: int, ranks: int, data: Any) -> None:
    plan = plan_buckets(SPECS, bucket_bytes=bucket_bytes, shards=fsdp_shards(1, ranks))
    for rank in sorted({bucket.rank for bucket in plan.buckets}):
        slot = torch.zeros(slot_bytes(plan, rank), dtype=torch.uint8)
        written, known, own = Written(plan, rank, slot), Known(plan, 7), [b for b in plan.buckets if b.rank == rank]
        written.begin(7)
        pieces = [bucket.index for bucket in own for _ in bucket.pieces]
        stop = data.draw(st.integers(0, len(pieces)))
        for index in pieces[:stop]:
            written.piece(index)
        carried(plan, rank, slot, known)
        assert [known.has(b) for b in own] == [b.index not in pieces[stop:] for b in own]


def test_the_word_lies_beside_the_parameters_and_names_the_version() -> None:
    plan = plan_buckets(SPECS, bucket_bytes=64)
    ends = max(p.source + p.nbytes for b in plan.buckets for p in b.pieces)
    (word,) = Known(plan, 1).pieces(0)
    assert word.source >= ends and word.target >= plan.nbytes and word.source % 8 == word.target % 8 == 0
    assert slot_bytes(plan, 0) >= word.source + word.nbytes and staging_bytes(plan) >= word.target + word.nbytes
    slot = torch.zeros(slot_bytes(plan, 0), dtype=torch.uint8)
    Written(plan, 0, slot).begin(2)
    with pytest.raises(WeightSyncError, match="the slot of policy rank 0 has version 2") as caught:
        carried(plan, 0, slot, Known(plan, 1))
    assert "a newer publication replaced it" in caught.value.cause


def test_a_plan_that_is_known_is_not_unpacked_again() -> None:
    packed = pickle.dumps(plan_buckets(SPECS, bucket_bytes=64))
    first = pickle.loads(packed)
    assert first == plan_buckets(SPECS, bucket_bytes=64) and pickle.loads(packed) is first


# ---- the plane


class Gated:
    """A plane whose policy stops before it writes the last layer, until `gate` is set. `fault`: what is raised there then."""

    def __init__(self, lanes: int = 2, **config: Any) -> None:
        self.gate, self.waits, self.fault, self.step = threading.Event(), threading.Event(), "", 1
        self.engines = [ToyEngine() for _ in range(lanes)]
        settings = WeightsConfig(bucket_bytes=1024, **config)
        self.plane = WeightPlane.local(self.engines, InprocTransport(), settings, self._source)
        self.pulled: list[tuple[str, int]] = []
        for lane in self.plane.lanes:
            self._watch(lane)

    def _source(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in trained(self.step).items():
            if name == LAST:
                self.waits.set()
                assert self.gate.wait(20)
                if fault := self.fault:
                    self.fault = ""
                    raise RuntimeError(fault)
            yield name, tensor

    def _watch(self, lane: Any) -> None:
        pull = lane._transport.pull

        def watched(handle: Any, pieces: Any, into: Any) -> None:
            if pieces[0].name != WORD:
                self.pulled.append((lane.name, lane.at))
            pull(handle, pieces, into)

        lane._transport.pull = watched

    @contextlib.asynccontextmanager
    async def first(self):
        """With version 1 in place, and the gate closed for the next."""
        for engine in self.engines:
            await engine.start()
        self.gate.set()
        await self.plane.sync(1)
        self.gate.clear(), self.waits.clear(), self.pulled.clear()
        self.step = 2
        yield
        self.gate.set()
        await self.plane.close()

    async def until(self, ready: Any) -> None:
        async with asyncio.timeout(20):
            while not ready():
                await asyncio.sleep(0.005)


def test_lanes_pull_what_is_written_and_wait_for_the_rest() -> None:
    gated = Gated()

    async def scenario() -> None:
        async with gated.first():
            publishing = asyncio.ensure_future(gated.plane.publish(2))
            await gated.until(lambda: len(gated.pulled) == 2 * (LAYERS - 1))
            await asyncio.sleep(0.05)
            assert len(gated.pulled) == 2 * (LAYERS - 1), "the last bucket is not written"
            assert not publishing.done() and [e.version for e in gated.engines] == [1, 1]
            gated.gate.set()
            await gated.plane.deliver(await publishing)
            assert len(gated.pulled) == len(set(gated.pulled)) == 2 * LAYERS, "nothing is pulled twice"
            assert [e.version for e in gated.engines] == [2, 2]
            assert all(torch.equal(e.weights[n], t) for e in gated.engines for n, t in trained(2).items())

    asyncio.run(scenario())


@pytest.mark.parametrize("on_failure", ["raise", "rebuild_and_retry"])
def test_a_policy_that_fails_while_lanes_pull_stops_them(on_failure: str) -> None:
    gated = Gated(on_failure=on_failure)

    async def scenario() -> None:
        async with gated.first():
            gated.fault = "the disk is on fire"
            syncing = asyncio.ensure_future(gated.plane.sync(2))
            await gated.until(lambda: len(gated.pulled) == 2 * (LAYERS - 1))
            gated.gate.set()
            if on_failure == "raise":
                with pytest.raises(WeightSyncError, match="the disk is on fire"):
                    await syncing
                assert [e.version for e in gated.engines] == [1, 1]
                assert [lane.lane.state for lane in gated.plane.lanes] == ["aborted"] * 2
                assert all(slot.holders == 0 for slot in gated.plane.publisher.pool._slots)
                syncing = asyncio.ensure_future(gated.plane.sync(2))
            await syncing
            assert [e.version for e in gated.engines] == [2, 2]

    asyncio.run(scenario())


def test_a_publication_that_is_given_up_leaves_no_lane_pulling() -> None:
    gated = Gated(lanes=1)

    async def scenario() -> None:
        async with gated.first():
            publishing = asyncio.ensure_future(gated.plane.publish(2))
            await gated.until(lambda: len(gated.pulled) == LAYERS - 1)
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            lane = gated.plane.lanes[0]
            assert lane.lane.state == "aborted" and lane._begun is None
            gated.gate.set()
            await gated.until(gated.plane.publisher.pool._idle.is_set)
            await gated.plane.sync(3)
            assert gated.engines[0].version == 3

    asyncio.run(scenario())


def test_a_lane_that_waits_too_long_says_how_far_the_policy_was() -> None:
    gated = Gated(lanes=1, stage_timeout_s=0.4)

    async def scenario() -> None:
        async with gated.first():
            gated.plane.publisher.timeout_s = 20.0  # so that the lane's deadline passes first
            publishing = asyncio.ensure_future(gated.plane.publish(2))
            await gated.until(lambda: gated.plane.lanes[0].lane.state == "aborted")
            gated.gate.set()
            with pytest.raises(WeightSyncError, match=r"rollout-0: publication 2 was not staged within 0\.4 s") as caught:
                await gated.plane.deliver(await publishing)
            assert f"policy rank 0 had written {LAYERS - 1} bucket(s) of it" in caught.value.cause

    asyncio.run(scenario())


def test_two_who_ask_for_one_publication_share_the_pull_and_a_third_does_not() -> None:
    gated = Gated(lanes=1)

    async def scenario() -> None:
        async with gated.first():
            gated.gate.set()
            publication = await gated.plane.publisher.publish(2)
            lane = gated.plane.lanes[0]
            asking = [asyncio.ensure_future(lane.stage(publication, timeout=20)) for _ in range(2)]
            await asyncio.sleep(0)
            asking[0].cancel()
            await asking[1]
            assert len(gated.pulled) == LAYERS, "one pull, and it goes on for whoever is left"
            await lane.abort("a test says so")
            await lane.stage(publication, timeout=20)
            assert len(gated.pulled) == 2 * LAYERS
            await lane.abort("the end")

    asyncio.run(scenario())


def test_one_lane_at_a_time_where_the_config_says_so() -> None:
    gated = Gated(max_concurrent_lanes=1)

    async def scenario() -> None:
        async with gated.first():
            publishing = asyncio.ensure_future(gated.plane.publish(2))
            await gated.until(lambda: len(gated.pulled) == LAYERS - 1)
            assert {name for name, _ in gated.pulled} == {"rollout-0"}
            gated.gate.set()
            await gated.plane.deliver(await publishing)
            assert [e.version for e in gated.engines] == [2, 2]

    asyncio.run(scenario())
