"""The laws of a transport as tests: subclass, give one fixture.

    class TestMine(TransportContract):
        @pytest.fixture
        def transport(self):
            transport = MyTransport()
            yield transport
            transport.close()
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from posttrain.errors import WeightSyncError
from posttrain.weights.memory import Region, private_region
from posttrain.weights.plan import BucketPlan, ParameterSpec, plan_buckets
from posttrain.weights.publication import bucket_digest
from posttrain.weights.transport import Handle, Transport, views


class TransportContract:
    """What every transport does. `staging` may be overridden where pulls need memory of another kind."""

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        raise NotImplementedError("give the contract a transport")

    def staging(self, nbytes: int) -> Region:
        return private_region(nbytes)

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
        assert region.nbytes == 1000 and region.buffer.dtype == torch.uint8

    def test_all_buckets_bring_all_parameters(self, transport: Transport) -> None:
        plan, lane = self._plan(), transport.fresh()
        slot, handle = self._publish(transport, plan)
        staging = self.staging(plan.nbytes)
        lane.register(staging)
        for bucket in plan.buckets:
            lane.pull(handle, bucket.pieces, staging)
            sent = bucket_digest(slot.buffer, [(p.source, p.nbytes) for p in bucket.pieces])
            assert bucket_digest(staging.buffer, [(p.target, p.nbytes) for p in bucket.pieces]) == sent
        for (name, got), (_, want) in zip(views(plan, staging.buffer), views(plan, slot.buffer), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name
        lane.close()

    def test_a_pull_moves_its_bucket_and_nothing_else(self, transport: Transport) -> None:
        plan, lane = self._plan(), transport.fresh()
        _, handle = self._publish(transport, plan)
        staging = self.staging(plan.nbytes)
        staging.buffer.fill_(7)
        lane.register(staging)
        bucket = plan.buckets[1]
        lane.pull(handle, bucket.pieces, staging)
        outside = torch.ones(plan.nbytes, dtype=torch.bool)
        for piece in bucket.pieces:
            outside[piece.target : piece.target + piece.nbytes] = False
        assert (staging.buffer[: plan.nbytes][outside] == 7).all()
        lane.close()

    def test_two_slots_do_not_share_memory(self, transport: Transport) -> None:
        first, _ = transport.allocate(64)
        second, _ = transport.allocate(64)
        first.buffer.fill_(1)
        second.buffer.fill_(2)
        assert (first.buffer == 1).all()

    def test_a_slot_that_is_gone_is_a_clear_error(self, transport: Transport) -> None:
        plan, lane = self._plan(), transport.fresh()
        _, handle = self._publish(transport, plan)
        transport.close()
        with pytest.raises(WeightSyncError):
            lane.pull(handle, plan.buckets[0].pieces, self.staging(plan.nbytes))
        lane.close()

    def test_close_twice(self, transport: Transport) -> None:
        transport.allocate(64)
        transport.close()
        transport.close()
