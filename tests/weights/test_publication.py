from __future__ import annotations

import threading

import pytest
import torch

from posttrain.errors import WeightSyncError
from posttrain.weights.digest import Digests, bucket_digest
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.publication import LocalWeight, PublicationPool, complete_digests, whole
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
    pool.settle()
    source[0].values.fill_(9.0)
    assert (contents(pool, publication)["a"] == 1.0).all()
    assert (contents(pool, publication)["b"] == 1.0).all()


def test_digests_change_with_a_single_bit(pool):
    first = pool.publish(1, weights(1.0))
    changed = weights(1.0)
    changed[0].values[11] = 1.0000001
    pool.publish(2, changed)
    one, other = pool.digests(1), pool.digests(2)
    assert [one[b] != other[b] for b in one].count(True) == 1 and list(one) == [b.index for b in first.plan.buckets]


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


def overwrites(pool: PublicationPool, name: str):
    """A pool in which a byte of the slot changes as soon as `name` is copied, before any digest of it."""
    write = pool._write

    def overwritten(place, piece, weight):
        own = write(place, piece, weight)
        if piece.name == name:
            place.view(torch.uint8)[0] ^= 1
        return own

    pool._write = overwritten


def as_a_lane_digests(pool: PublicationPool, publication) -> list[str]:
    buffer = next(s for s in pool._slots if s.publication == publication).region.buffer
    return [bucket_digest(buffer, [(p.source, p.nbytes) for p in bucket.pieces]) for bucket in publication.plan.buckets]


def digests(pool: PublicationPool, publication) -> list[str]:
    return list(complete_digests(publication, pool.digests(publication.version)))


def test_the_digest_is_of_the_policy_s_bytes_so_that_an_overwritten_slot_is_found(pool):
    publication = pool.publish(1, weights(1.0))
    assert as_a_lane_digests(pool, publication) == digests(pool, publication)
    overwrites(pool, "b")
    second = pool.publish(2, weights(2.0))
    differ = [b.index for b, found in zip(second.plan.buckets, as_a_lane_digests(pool, second), strict=True)
              if found != digests(pool, second)[b.index]]  # fmt: skip
    assert differ == [b.index for b in second.plan.buckets if any(p.name == "b" for p in b.pieces)]


def test_what_is_cast_is_cast_anew_for_its_digest():
    pool = PublicationPool(InprocTransport(), bucket_bytes=2**20, dtype="bfloat16")
    source = [("w", torch.linspace(0, 1, 7))]
    pool.plan_for(whole(source))
    publication = pool.publish(1, whole(source))
    assert as_a_lane_digests(pool, publication) == digests(pool, publication)
    overwrites(pool, "w")
    publication = pool.publish(2, whole(source))
    assert as_a_lane_digests(pool, publication) != digests(pool, publication)
    pool.close()


def test_a_tensor_that_does_not_lie_in_one_piece_is_copied_as_it_reads(pool):
    turned, every_second = torch.arange(12.0).reshape(4, 3).t(), torch.arange(10, dtype=torch.bfloat16)[::2]
    publication = pool.publish(1, whole([("a", turned), ("b", every_second)]))
    assert torch.equal(contents(pool, publication)["a"], turned)
    assert torch.equal(contents(pool, publication)["b"], every_second)
    assert as_a_lane_digests(pool, publication) == digests(pool, publication)


def test_digests_are_made_once_from_the_values_as_they_are_when_they_are_asked_for():
    values = torch.zeros(4)
    digests = Digests([(0, values[:2], torch.float32), (0, values[2:], torch.float32), (3, values, torch.bfloat16)])
    values.fill_(1.0)
    found = digests.found()
    assert found == {0: of(torch.ones(4)), 3: of(torch.ones(4, dtype=torch.bfloat16))}
    values.fill_(2.0)
    assert digests.found() == found


def test_a_digest_that_fails_is_told_to_whoever_asks_and_not_to_who_trains():
    digests = Digests([(0, Broken(), torch.float32)])  # type: ignore[list-item]
    digests.settle()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is gone"):
            digests.found()


class Broken:
    def detach(self):
        raise RuntimeError("the device is gone")


def of(values: torch.Tensor) -> str:
    return bucket_digest(values.view(torch.uint8), [(0, values.nbytes)])


def test_who_changes_the_weights_waits_for_their_digests(pool):
    source, gate, order = weights(1.0), threading.Event(), []

    class Slow(torch.Tensor):
        def detach(self):
            gate.wait(10)
            order.append("digested")
            return super().detach()

    publication = pool.publish(1, source)
    slot = next(s for s in pool._slots if s.publication is publication)
    slot.digests = Digests([(0, source[0].values.as_subclass(Slow), torch.float32)])
    making = threading.Thread(target=pool.digests, args=(1,))
    making.start()
    threading.Timer(0.2, gate.set).start()
    pool.settle()
    order.append("changed")
    making.join()
    assert order == ["digested", "changed"]
