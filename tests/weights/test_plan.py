from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import WeightSyncError
from posttrain.weights.plan import (
    ALIGNMENT,
    BucketPlan,
    ParameterSpec,
    Piece,
    coverage_problems,
    place_of,
    plan_buckets,
    pull_order,
)

dtypes = st.sampled_from(["float32", "bfloat16", "float64", "uint8"])
shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
specs = st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=12).map(
    lambda items: [ParameterSpec(f"layer.{i}.weight", dtype, shape) for i, (dtype, shape) in enumerate(items)]
)


def split_over(ranks: int):
    """Every parameter in `ranks` contiguous parts, as FSDP cuts it."""

    def shards(spec: ParameterSpec) -> list[tuple[int, int, int]]:
        cuts = [spec.numel * r // ranks for r in range(ranks + 1)]
        return [(r, cuts[r], cuts[r + 1]) for r in range(ranks) if cuts[r + 1] > cuts[r]] or [(0, 0, 0)]

    return shards


@settings(derandomize=True, max_examples=150, deadline=None)
@given(specs, st.integers(8, 400), st.integers(1, 5))
def test_every_element_is_in_exactly_one_piece_at_its_place(parameters, bucket_bytes, ranks):
    plan = plan_buckets(parameters, bucket_bytes=bucket_bytes, shards=split_over(ranks))
    for spec, offset in zip(plan.parameters, plan.offsets, strict=True):
        seen = [0] * spec.numel
        for piece in (p for b in plan.buckets for p in b.pieces if p.name == spec.name):
            assert piece.nbytes == (piece.stop - piece.start) * spec.itemsize
            assert piece.target == offset + piece.start * spec.itemsize
            for element in range(piece.start, piece.stop):
                seen[element] += 1
        assert seen == [1] * math.prod(spec.shape)
    assert all(bucket.nbytes <= bucket_bytes for bucket in plan.buckets)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(specs, st.integers(8, 400), st.integers(1, 4))
def test_sources_of_one_rank_do_not_overlap(parameters, bucket_bytes, ranks):
    plan = plan_buckets(parameters, bucket_bytes=bucket_bytes, shards=split_over(ranks))
    for rank in range(ranks):
        taken: set[int] = set()
        for piece in (p for b in plan.buckets if b.rank == rank for p in b.pieces):
            span = set(range(piece.source, piece.source + piece.nbytes))
            assert not taken & span
            taken |= span
        assert max(taken, default=-1) < plan.slot_bytes(rank) or not taken


@settings(derandomize=True, max_examples=40, deadline=None)
@given(specs, st.integers(8, 400))
def test_a_plan_survives_the_wire_and_its_digest_names_it(parameters, bucket_bytes):
    plan = plan_buckets(parameters, bucket_bytes=bucket_bytes)
    again = BucketPlan.from_dict(plan.to_dict())
    assert again == plan and again.digest == plan.digest
    assert plan_buckets(parameters, bucket_bytes=bucket_bytes + 8).digest != plan.digest


def test_few_large_buckets_when_they_fit():
    plan = plan_buckets([ParameterSpec(f"p{i}", "float32", (16,)) for i in range(10)], bucket_bytes=320)
    assert [len(b.pieces) for b in plan.buckets] == [5, 5]


def test_planning_for_a_thousand_ranks_needs_no_tensor():
    parameters = [ParameterSpec(f"model.layers.{i}.w", "bfloat16", (4096, 4096)) for i in range(8)]
    plan = plan_buckets(parameters, shards=split_over(1024))
    assert {b.rank for b in plan.buckets} == set(range(1024))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ([], "there is no parameter"),
        ([ParameterSpec("a", "float32", (1,)), ParameterSpec("a", "float32", (1,))], "a is there 2 times"),
        ([ParameterSpec("a", "complex64", (1,))], "complex64"),
    ],
)
def test_unplannable_weights_are_named(parameters, words):
    with pytest.raises(WeightSyncError, match=words):
        plan_buckets(parameters)


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        (lambda spec: [(0, 0, 3)], "4 elements, the pieces end at 3"),
        (lambda spec: [(0, 1, 4)], r"elements \[0, 1\) are moved never"),
        (lambda spec: [(0, 0, 3), (1, 2, 4)], r"elements \[2, 3\) are moved twice"),
    ],
)
def test_shards_that_leave_a_hole_or_overlap_are_refused(shards, words):
    with pytest.raises(WeightSyncError, match=words):
        plan_buckets([ParameterSpec("w", "float32", (4,))], shards=shards)


def test_check_finds_a_piece_that_goes_to_the_wrong_place():
    plan = plan_buckets([ParameterSpec("w", "float32", (4,))])
    bucket = plan.buckets[0]
    moved = dataclasses.replace(bucket, pieces=(bucket.pieces[0]._replace(target=4),))
    stray = dataclasses.replace(bucket, pieces=(*bucket.pieces, Piece("ghost", 0, 1, 0, 0, 4)))
    with pytest.raises(WeightSyncError, match="go to the wrong place"):
        dataclasses.replace(plan, buckets=(moved,)).check()
    with pytest.raises(WeightSyncError, match="ghost is moved but not a parameter"):
        dataclasses.replace(plan, buckets=(stray,)).check()


def test_coverage_is_compared_in_both_directions():
    plan = plan_buckets([ParameterSpec("a", "float32", (2, 3)), ParameterSpec("b", "float32", (4,))])
    assert coverage_problems(plan, {"a": (2, 3), "b": (4,)}) == []
    problems = "\n".join(coverage_problems(plan, {"a": (3, 2), "c": (1,)}))
    assert "the engine needs c [1]" in problems
    assert "the plan sends b [4]" in problems
    assert "a: the plan sends [2, 3], the engine has [3, 2]" in problems


def test_lanes_pull_every_bucket_once_from_places_of_their_own():
    plan = plan_buckets([ParameterSpec(f"p{i}", "float32", (16,)) for i in range(100)], bucket_bytes=64)
    orders = [[bucket.index for bucket in pull_order(plan.buckets, lane)] for lane in range(8)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert orders[0] == list(range(100)) and len({order[0] for order in orders}) == 8


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(2, 200))
def test_places_of_lanes_are_apart_whatever_their_number(lanes):
    places = sorted(place_of(lane, 4 * lanes) for lane in range(lanes))
    assert places[0] >= 0 and places[-1] < 4 * lanes
    assert min(b - a for a, b in itertools.pairwise(places)) >= 1
