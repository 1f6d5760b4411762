from __future__ import annotations

import threading

import pytest
import torch

from posttrain.errors import WeightSyncError
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.publication import LocalWeight, PublicationPool, bucket_digest, whole
from posttrain.weights.transport import views


def weights(value: float) -> list[LocalWeight]:
    return list(whole([("a", torch.full((3, 4), value)), ("b", torch.full((5,), value, dtype=torch.bfloat16))]))


@pytest.fixture
def pool():
    pool = PublicationPool(InprocTransport(), bucket_bytes=32)
    pool.plan_for(weights(0.0))
    yield pool
    pool.close()


def contents(pool: PublicationPool, publication) -> dict[str, torch.Tensor]:
    slot = next(s for s in pool._slots if s.publication == publication)
    return dict(views(publication.plan, slot.region.buffer))


def test_a_publication_is_a_snapshot(pool):
    source = weights(1.0)
    publication = pool.publish(1, source)
    source[0].values.fill_(9.0)
    assert (contents(pool, publication)["a"] == 1.0).all()
    assert (contents(pool, publication)["b"] == 1.0).all()


def test_digests_change_with_a_single_bit(pool):
    first = pool.publish(1, weights(1.0))
    changed = weights(1.0)
    changed[0].values[11] = 1.0000001
    second = pool.publish(2, changed)
    assert sum(x != y for x, y in zip(first.digests, second.digests, strict=True)) == 1
    assert len(first.digests) == len(first.plan.buckets)


def test_held_publications_stay_as_they_are_and_a_third_is_refused(pool):
    first = pool.publish(1, weights(1.0))
    pool.hold(1)
    second = pool.publish(2, weights(2.0))
    pool.hold(2)
    with pytest.raises(WeightSyncError, match=r"\[1, 2\] are both still being pulled"):
        pool.publish(3, weights(3.0))
    assert (contents(pool, first)["a"] == 1.0).all() and (contents(pool, second)["a"] == 2.0).all()
    pool.release(1)
    pool.publish(3, weights(3.0))
    assert (contents(pool, second)["a"] == 2.0).all()


def test_a_third_publication_replaces_the_older_unpulled_one(pool):
    pool.publish(1, weights(1.0))
    pool.publish(2, weights(2.0))
    pool.publish(3, weights(3.0))
    with pytest.raises(WeightSyncError, match="publication 1 is not in the pool"):
        pool.hold(1)
    pool.hold(2)


def test_a_hold_while_a_slot_is_being_taken_wins_or_is_refused(pool, monkeypatch):
    """The driver holds on one thread while another publishes: between the choice of a slot and its end as a publication."""
    pool.publish(1, weights(1.0))
    pool.publish(2, weights(2.0))
    choose, held, refused = pool._free_slot, [], []

    def hold() -> None:
        try:
            pool.hold(1)
            held.append(1)
        except WeightSyncError as exc:
            refused.append(exc.message)

    holding = threading.Thread(target=hold)

    def slowly():
        slot = choose()
        holding.start()
        holding.join(0.2)
        assert not held and not refused, "a hold went between"
        return slot

    monkeypatch.setattr(pool, "_free_slot", slowly)
    pool.publish(3, weights(3.0))
    holding.join(5)
    assert refused == ["policy rank 0: publication 1 is not in the pool"] and not held
    assert sum(slot.holders for slot in pool._slots) == 0

    monkeypatch.setattr(pool, "_free_slot", choose)
    pool.hold(2)
    pool.publish(4, weights(4.0))  # the hold was first: its publication stays, and 3 goes
    pool.release(2)
    with pytest.raises(WeightSyncError, match="publication 3 is not in the pool"):
        pool.hold(3)


def test_a_slot_is_allocated_without_the_lock(pool):
    allocate = pool._transport.allocate

    def while_others_hold(nbytes):
        assert not pool._state.locked(), "a driver that holds would wait for an allocation"
        return allocate(nbytes)

    pool._transport.allocate = while_others_hold
    pool.publish(1, weights(1.0))
    pool.publish(2, weights(2.0))


def test_one_slot_is_enough_when_each_is_pulled_before_the_next(pool):
    for version in range(1, 6):
        pool.publish(version, weights(float(version)))
        pool.hold(version)
        pool.release(version)
    assert len(pool._slots) == 1


def test_versions_advance(pool):
    pool.publish(4, weights(1.0))
    for version in (4, 3):
        with pytest.raises(WeightSyncError, match="does not advance past 4"):
            pool.publish(version, weights(1.0))


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        ([("a", torch.zeros(3, 4))], "published nothing"),
        ([("a", torch.zeros(4, 3)), ("b", torch.zeros(5, dtype=torch.bfloat16))], r"a \[4, 3\]"),
        ([("a", torch.zeros(3, 4)), ("b", torch.zeros(5))], "float32, the plan has b"),
        ([*((w.name, w.values.view(w.shape)) for w in weights(0.0)), ("c", torch.zeros(1))], "published c"),
    ],
)
def test_a_stream_that_is_not_the_plan_is_refused(pool, stream, words):
    with pytest.raises(WeightSyncError, match=words):
        pool.publish(1, whole(stream))


def test_a_failed_publish_is_not_advertised(pool):
    with pytest.raises(WeightSyncError):
        pool.publish(1, whole([("a", torch.zeros(3, 4))]))
    with pytest.raises(WeightSyncError, match="publication 1 is not in the pool"):
        pool.hold(1)


def test_bucket_digest_reads_only_its_ranges():
    buffer = torch.arange(32, dtype=torch.uint8)
    before = bucket_digest(buffer, [(0, 8), (16, 8)])
    buffer[10] = 200
    assert bucket_digest(buffer, [(0, 8), (16, 8)]) == before
    buffer[17] = 200
    assert bucket_digest(buffer, [(0, 8), (16, 8)]) != before


def test_floating_parameters_are_cast_to_the_wire_s_dtype_while_they_are_copied():
    pool = PublicationPool(InprocTransport(), bucket_bytes=2**20, dtype="bfloat16")
    source = [("w", torch.linspace(0, 1, 7)), ("steps", torch.arange(3))]
    publication = pool.publish(1, whole(source)) if pool.plan_for(whole(source)) else None
    got = contents(pool, publication)
    assert torch.equal(got["w"], source[0][1].to(torch.bfloat16)) and torch.equal(got["steps"], source[1][1])
    pool.close()
