"""The laws of a transport as tests: subclass, name the plug-in (`plugin = MyTransport`) or give one fixture.

class TestMine(TransportContract):
    @pytest.fixture
    def transport(self):
        transport = MyTransport()
        yield transport
        transport.close()
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from posttrain.errors import WeightSyncError
from posttrain.plugins.capabilities import declared
from posttrain.testing.elsewhere import published_elsewhere, pulled_elsewhere
from posttrain.testing.laws import by_value, travelled
from posttrain.weights.digest import bucket_digest
from posttrain.weights.memory import Region
from posttrain.weights.plan import BucketPlan, ParameterSpec, plan_buckets
from posttrain.weights.transport import Handle, Transport, views


class TransportContract:
    """What every transport does; between processes too, where it provides that."""

    plugin: ClassVar[Any] = None
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        if self.plugin is None:
            raise NotImplementedError("give the contract a transport: the class variable `plugin`, or a fixture `transport`")
        from posttrain.plugins import load

        transport: Transport = load("transports", self.plugin, **self.options)
        yield transport
        transport.close()

    def _plan(self) -> BucketPlan:
        specs = [("a", "float32", (7, 3)), ("b", "bfloat16", (33,)), ("c", "float32", (2, 2, 2))]
        return plan_buckets((ParameterSpec(*spec) for spec in specs), bucket_bytes=48)

    def _publish(self, transport: Transport, plan: BucketPlan) -> tuple[Region, Handle]:
        region, handle = transport.allocate(plan.slot_bytes(0))
        noise = torch.Generator().manual_seed(0)
        region.buffer.copy_(torch.randint(0, 256, (region.nbytes,), dtype=torch.uint8, generator=noise))
        return region, handle

    def test_a_slot_has_the_size_asked_for(self, transport: Transport) -> None:
        region, _ = transport.allocate(1000)
        assert region.nbytes == 1000, f"allocate(1000) gave {region.nbytes} bytes"
        assert region.buffer.dtype == torch.uint8, f"a slot is bytes, not {region.buffer.dtype}"

    def test_all_buckets_bring_all_parameters(self, transport: Transport) -> None:
        plan, lane = self._plan(), transport.fresh()
        slot, handle = self._publish(transport, plan)
        staging = lane.staging(plan.nbytes)
        lane.register(staging)
        for bucket in plan.buckets:
            lane.pull(handle, bucket.pieces, staging)
            sent = bucket_digest(slot.buffer, [(p.source, p.nbytes) for p in bucket.pieces])
            arrived = bucket_digest(staging.buffer, [(p.target, p.nbytes) for p in bucket.pieces])
            assert arrived == sent, "pull brought other bytes: from piece.source of the slot to piece.target of the staging"
        for (name, got), (_, want) in zip(views(plan, staging.buffer), views(plan, slot.buffer), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name
        lane.close()

    def test_a_pull_moves_its_bucket_and_nothing_else(self, transport: Transport) -> None:
        plan, lane = self._plan(), transport.fresh()
        _, handle = self._publish(transport, plan)
        staging = lane.staging(plan.nbytes)
        staging.buffer.fill_(7)
        lane.register(staging)
        bucket = plan.buckets[1]
        lane.pull(handle, bucket.pieces, staging)
        outside = torch.ones(plan.nbytes, dtype=torch.bool)
        for piece in bucket.pieces:
            outside[piece.target : piece.target + piece.nbytes] = False
        assert (staging.buffer[: plan.nbytes][outside] == 7).all(), "pull wrote outside of the pieces that it was given"
        lane.close()

    def test_two_slots_do_not_share_memory(self, transport: Transport) -> None:
        first, _ = transport.allocate(64)
        second, _ = transport.allocate(64)
        first.buffer.fill_(1)
        second.buffer.fill_(2)
        assert (first.buffer == 1).all(), "two slots share memory: a publication would change while lanes read it"

    def test_a_handle_travels_as_plain_data(self, transport: Transport) -> None:
        plan, lane = self._plan(), transport.fresh()
        slot, handle = self._publish(transport, plan)
        staging, bucket = lane.staging(plan.nbytes), plan.buckets[0]
        lane.register(staging)
        lane.pull(travelled(handle), bucket.pieces, staging)
        same = bucket_digest(staging.buffer, [(p.target, p.nbytes) for p in bucket.pieces]) == bucket_digest(
            slot.buffer, [(p.source, p.nbytes) for p in bucket.pieces]
        )
        assert same, "a copy of the handle leads to other bytes: everything that a lane needs is in it"
        lane.close()

    def test_another_process_pulls_when_it_says_so(self, transport: Transport) -> None:
        if "between_processes" not in declared("transports", transport).provides:
            pytest.skip("provides no between_processes")
        by_value(transport)
        plan = self._plan()
        slot, handle = self._publish(transport, plan)
        pieces = plan.buckets[0].pieces
        arrived = pulled_elsewhere(transport, handle, pieces, plan.nbytes)
        same = all(
            arrived[p.target : p.target + p.nbytes] == bytes(slot.buffer[p.source : p.source + p.nbytes].tolist()) for p in pieces
        )
        assert same, "another process pulled other bytes: leave between_processes out of `provides`"

    def test_a_publisher_that_dies_is_a_clear_error(self, transport: Transport) -> None:
        """Killed in another process: what was its slot must not go on giving weights, and nobody waits for it."""
        if "between_processes" not in declared("transports", transport).provides:
            pytest.skip("provides no between_processes")
        by_value(transport)
        plan, lane = self._plan(), transport.fresh()
        staging, pieces = lane.staging(plan.nbytes), plan.buckets[0].pieces
        lane.register(staging)
        with published_elsewhere(transport, plan.slot_bytes(0)) as (handle, kill):
            lane.pull(handle, pieces, staging)
            assert all((staging.buffer[p.target : p.target + p.nbytes] == 7).all() for p in pieces), "the slot was all sevens"
            kill()
            begun = time.monotonic()
            with pytest.raises(WeightSyncError):
                lane.pull(handle, pieces, staging)
        assert time.monotonic() - begun < 10, "a dead publisher was waited for: look whether its process is alive"
        lane.close()

    def test_lanes_pull_at_the_same_time(self, transport: Transport) -> None:
        plan, lanes = self._plan(), [transport.fresh() for _ in range(4)]
        slot, handle = self._publish(transport, plan)
        staging = [lane.staging(plan.nbytes) for lane in lanes]

        def pull(lane: Transport, region: Region) -> None:
            lane.register(region)
            for bucket in plan.buckets:
                lane.pull(handle, bucket.pieces, region)

        with ThreadPoolExecutor() as threads:
            list(threads.map(pull, lanes, staging))
        for region in staging:
            for (name, got), (_, want) in zip(views(plan, region.buffer), views(plan, slot.buffer), strict=True):
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), f"{name} is wrong after pulls at the same time"
        for lane in lanes:
            lane.close()

    def test_a_lane_that_closes_harms_no_other(self, transport: Transport) -> None:
        """An overdue pull is abandoned by closing its lane."""
        plan, bad, good = self._plan(), transport.fresh(), transport.fresh()
        slot, handle = self._publish(transport, plan)
        staging = good.staging(plan.nbytes)
        bad.register(bad.staging(plan.nbytes))
        bad.close()
        good.register(staging)
        bucket = plan.buckets[0]
        good.pull(handle, bucket.pieces, staging)
        same = bucket_digest(staging.buffer, [(p.target, p.nbytes) for p in bucket.pieces]) == bucket_digest(
            slot.buffer, [(p.source, p.nbytes) for p in bucket.pieces]
        )
        assert same, "a lane was closed, and another one pulls other bytes: fresh() must share nothing that close() ends"
        good.close()

    def test_a_slot_that_is_gone_is_a_clear_error(self, transport: Transport) -> None:
        plan, lane = self._plan(), transport.fresh()
        _, handle = self._publish(transport, plan)
        transport.close()
        with pytest.raises(WeightSyncError):  # anything else, or silence, would train on stale weights
            lane.pull(handle, plan.buckets[0].pieces, lane.staging(plan.nbytes))
        lane.close()

    def test_close_twice(self, transport: Transport) -> None:
        transport.allocate(64)
        transport.close()
        transport.close()
