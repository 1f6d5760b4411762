"""A sharded policy: whatever the shards and the buckets, what arrives in staging is the full weights, to the byte."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_toys import ToyEngine, run

from posttrain.config.schema import WeightsConfig
from posttrain.errors import WeightSyncError
from posttrain.policy.sharding import chunk, fsdp_shards
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.plane import WeightPlane
from posttrain.weights.publication import LocalWeight, Publication, PublicationPool, complete_digests, merge_publications
from posttrain.weights.publisher import GroupPublisher, LocalPublisher
from posttrain.weights.receiver import Receiver

Weights = dict[str, torch.Tensor]
Ranges = dict[str, list[tuple[int, int]]]
"""Of each rank, the elements `[start, stop)` that it holds."""


@st.composite
def weights(draw) -> Weights:
    made = {}
    for number in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]))
        shape = draw(st.lists(st.integers(0 if number else 1, 7), min_size=1, max_size=3))
        noise = torch.Generator().manual_seed(number)
        made[f"layer.{number}"] = (100 * torch.randn(shape, generator=noise)).to(dtype)
    return made


@st.composite
def uneven(draw):
    """Any cut of any parameter over any ranks, each of which may hold more than it publishes, as HSDP replicas do."""
    full, ranks = draw(weights()), draw(st.integers(1, 5))
    shares, held = {}, {name: [(0, 0)] * ranks for name in full}
    for name, tensor in full.items():
        n = tensor.numel()
        cuts = sorted(draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1)))
        order = draw(st.permutations(range(ranks)))
        shares[name] = [(rank, a, b) for rank, a, b in zip(order, [0, *cuts], [*cuts, n], strict=True) if b > a] or [(0, 0, 0)]
        for rank, a, b in shares[name]:
            held[name][rank] = (draw(st.integers(0, a)), draw(st.integers(b, n)))
    return full, ranks, lambda spec: shares[spec.name], held


@st.composite
def hsdp(draw):
    full = draw(weights())
    replicate, shard = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    held = {name: [chunk(tuple(t.shape), shard, rank % shard) for rank in range(replicate * shard)] for name, t in full.items()}
    return full, replicate * shard, fsdp_shards(replicate, shard), held


def source(full: Weights, held: Ranges, rank: int):
    def local():
        for name, tensor in full.items():
            start, stop = held[name][rank]
            yield LocalWeight(name, tuple(tensor.shape), start, tensor.reshape(-1)[start:stop])

    return local


def group(full: Weights, ranks: int, shards, held: Ranges, *, bucket_bytes: int, dtype=None, transport=InprocTransport):
    pools = [PublicationPool(transport(), bucket_bytes=bucket_bytes, dtype=dtype, shards=shards, rank=r) for r in range(ranks)]
    return GroupPublisher([LocalPublisher(pool, source(full, held, rank)) for rank, pool in enumerate(pools)])


async def staged(lane: Receiver, publisher: GroupPublisher, publication: Publication) -> None:
    await lane.stage(publication, timeout=20)
    await lane.prove(complete_digests(publication, await publisher.digests(publication.version)))


def settle(publisher: GroupPublisher) -> None:
    """As a policy does before it changes its weights."""
    for rank in publisher.ranks:
        rank.pool.settle()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.one_of(uneven(), hsdp()), st.integers(8, 300), st.sampled_from([None, "bfloat16", "float32"]))
def test_staging_is_the_full_weights_to_the_byte(policy, bucket_bytes, dtype):
    full, ranks, shards, held = policy

    async def scenario() -> None:
        publisher = group(full, ranks, shards, held, bucket_bytes=bucket_bytes, dtype=dtype)
        lane = Receiver(ToyEngine(knows_parameters=False), InprocTransport())
        publication = await publisher.publish(1)
        await staged(lane, publisher, publication)
        assert lane._staged is not None
        arrived = dict(lane._staged.tensors())
        assert list(arrived) == list(full)
        for name, tensor in full.items():
            want = tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor
            assert torch.equal(arrived[name].reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name
        sent = sum(b.nbytes for b in publication.plan.buckets)
        assert sent == sum(s.nbytes for s in publication.plan.parameters), "no byte is published twice"
        await lane.close()
        await publisher.close()

    run(scenario())


def two_ranks(**config):
    full = {"a": torch.arange(40.0), "b": torch.arange(24.0).view(4, 6)}
    shards = fsdp_shards(1, 2)
    held = {name: [chunk(tuple(t.shape), 2, rank) for rank in range(2)] for name, t in full.items()}
    return full, group(full, 2, shards, held, bucket_bytes=32, **config)


def test_a_rank_copies_its_own_share_and_nothing_else():
    _, publisher = two_ranks()
    publication = run(publisher.publish(1))
    assert [publication.plan.slot_bytes(rank) for rank in range(2)] == [20 * 4 + 48 + 12 * 4, 20 * 4 + 48 + 12 * 4]
    assert set(publication.handles) == {0, 1}


def test_parts_of_two_versions_are_no_publication():
    _, publisher = two_ranks()

    async def scenario() -> None:
        first = await publisher.publish(1)
        parts = [await rank.publish(2) for rank in publisher.ranks]
        with pytest.raises(WeightSyncError, match="policy rank 1 published version 2, rank 0 version 1"):
            merge_publications([await LocalPublisher(*again(publisher, 0)).publish(1), parts[1]])
        with pytest.raises(WeightSyncError, match=r"publication 2 lacks bucket \d+ of policy rank 1"):
            merge_publications(parts[:1])
        assert merge_publications(parts).handles.keys() == {0, 1}
        with pytest.raises(WeightSyncError, match=r"publication 2 lacks the digest of bucket \d+ of policy rank 1"):
            complete_digests(merge_publications(parts), await publisher.ranks[0].digests(2))
        found = await publisher.digests(2)
        assert complete_digests(merge_publications(parts), found) == complete_digests(first, await publisher.digests(1))

    def again(publisher, rank):
        one = publisher.ranks[rank]
        return PublicationPool(InprocTransport(), bucket_bytes=32, shards=fsdp_shards(1, 2), rank=rank), one._source

    run(scenario())


def test_parts_of_two_plans_are_no_publication():
    _, publisher = two_ranks()
    _, other = two_ranks()
    other.ranks[1].pool._bucket_bytes = 64

    async def scenario() -> None:
        mine, theirs = await publisher.ranks[0].publish(1), await other.ranks[1].publish(1)
        with pytest.raises(WeightSyncError, match="policy rank 1 cut its weights by another plan than rank 0"):
            merge_publications([mine, theirs])

    run(scenario())


def test_a_rank_that_holds_less_than_the_plan_wants_is_named():
    full = {"a": torch.arange(40.0)}
    publisher = group(full, 2, fsdp_shards(1, 2), {"a": [(0, 20), (25, 40)]}, bucket_bytes=32)
    with pytest.raises(WeightSyncError, match=r"policy rank 1 holds elements \[25, 40\) of a, the plan wants \[20, 28\) from it"):
        run(publisher.publish(1))
    assert not any(slot.publication for slot in publisher.ranks[0].pool._slots), "rank 0 took its part back"


def test_a_failed_rank_is_named_and_the_version_can_be_published_again():
    _, publisher = two_ranks()
    healthy = publisher.ranks[1]._source

    def broken():
        raise RuntimeError("out of paper")
        yield

    async def scenario() -> None:
        publisher.ranks[1]._source = broken
        with pytest.raises(WeightSyncError, match=r"policy rank 1 did not publish\n +cause: RuntimeError: out of paper"):
            await publisher.publish(1)
        publisher.ranks[1]._source = healthy
        assert (await publisher.publish(1)).version == 1

    run(scenario())


def test_a_copy_that_had_not_begun_when_it_was_taken_back_is_stopped_too(monkeypatch):
    """Rank 1 fails before the thread of rank 0 has run: that thread must find the retraction, and the next publication it."""
    _, publisher = two_ranks()
    healthy, gate = publisher.ranks[1]._source, threading.Event()

    def broken():
        raise RuntimeError("out of paper")
        yield

    write = publisher.ranks[0].pool.write

    def late(*args):
        assert gate.wait(10)
        return write(*args)

    monkeypatch.setattr(publisher.ranks[0].pool, "write", late)

    async def scenario() -> None:
        publisher.ranks[1]._source = broken
        publishing = asyncio.ensure_future(publisher.publish(1))
        await asyncio.sleep(0.2)
        gate.set()
        with pytest.raises(WeightSyncError, match="out of paper"):
            await publishing
        publisher.ranks[1]._source = healthy
        assert (await publisher.publish(1)).version == 1

    run(scenario())


def test_a_third_publication_replaces_one_not_yet_pulled_and_a_held_one_never_changes():
    full, publisher = two_ranks()

    async def scenario() -> None:
        lane = Receiver(ToyEngine(knows_parameters=False), InprocTransport())
        first = await publisher.publish(1)
        await publisher.hold(1)
        for version in (2, 3, 4):
            settle(publisher)
            full["a"].add_(1)
            last = await publisher.publish(version)
        with pytest.raises(WeightSyncError, match="policy rank 0: publication 2 is not in the pool"):
            await publisher.hold(2)
        await staged(lane, publisher, first)
        assert torch.equal(dict(lane._staged.tensors())["a"], torch.arange(40.0)), "the held one is as it was published"
        await lane.abort("test")
        await publisher.release(1)
        await publisher.hold(4)
        await staged(lane, publisher, last)
        assert torch.equal(dict(lane._staged.tensors())["a"], torch.arange(40.0) + 3)
        await lane.close()

    run(scenario())


class SlowTransport(InprocTransport):
    """Each pull waits until it may go on."""

    gate = threading.Event()

    def pull(self, handle, pieces, into) -> None:
        assert self.gate.wait(10)
        super().pull(handle, pieces, into)


def test_training_goes_on_while_lanes_pull():
    """The weights change in place between publish and delivery, as an optimizer does; what arrives is what was published."""
    full, publisher = two_ranks()
    SlowTransport.gate.clear()
    engine = ToyEngine(knows_parameters=False)
    plane = WeightPlane(publisher, [Receiver(engine, SlowTransport())], WeightsConfig(bucket_bytes=32))

    async def scenario() -> None:
        update = await plane.publish(1)
        delivery = asyncio.ensure_future(plane.deliver(update))
        for _ in range(5):  # five optimizer steps
            settle(publisher)
            full["a"].mul_(2).add_(1)
            await asyncio.sleep(0.01)
        assert not delivery.done() and engine.version is None
        second = await plane.publish(2)
        SlowTransport.gate.set()
        metrics = await delivery
        assert metrics["time/stage_s"] >= 0.05
        assert engine.total == float(torch.arange(40.0).sum() + torch.arange(24.0).sum())
        await plane.deliver(second)
        assert engine.total == float(full["a"].sum() + torch.arange(24.0).sum())

    run(scenario())
    run(plane.close())


class CountingTransport(InprocTransport):
    """Counts the lanes that pull at the same moment."""

    now = most = 0
    lock = threading.Lock()

    def pull(self, handle, pieces, into) -> None:
        cls = type(self)
        with cls.lock:
            cls.now += 1
            cls.most = max(cls.most, cls.now)
        time.sleep(0.01)
        super().pull(handle, pieces, into)
        with cls.lock:
            cls.now -= 1


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (2, 2), (None, 4)])
def test_max_concurrent_lanes_is_how_many_pull_at_once(limit, most):
    CountingTransport.now = CountingTransport.most = 0
    _, publisher = two_ranks()
    engines = [ToyEngine(knows_parameters=False) for _ in range(4)]
    lanes = [Receiver(engine, CountingTransport(), name=f"rollout-{i}") for i, engine in enumerate(engines)]
    plane = WeightPlane(publisher, lanes, WeightsConfig(bucket_bytes=32, max_concurrent_lanes=limit))
    run(plane.sync(1))
    assert CountingTransport.most == most and all(engine.version == 1 for engine in engines)
    run(plane.close())


@pytest.mark.parametrize("exc", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ...")])
def test_out_of_memory_during_an_update_names_the_knob(exc):
    class Full(InprocTransport):
        def register(self, region) -> None:
            raise exc

    _, publisher = two_ranks()
    plane = WeightPlane(publisher, [Receiver(ToyEngine(knows_parameters=False), Full())], WeightsConfig(bucket_bytes=32))
    with pytest.raises(WeightSyncError, match="lane rollout-0: publication 1 was not staged") as caught:
        run(plane.sync(1))
    assert "weights.max_concurrent_lanes" in caught.value.fix
    run(plane.close())
