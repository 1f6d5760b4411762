"""Tensor-parallel slices: each element is in the slices that theory says, from whichever policy rank holds it."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.weights.plan import ParameterSpec
from posttrain.weights.slices import Cut, least_bytes, megatron_cuts, slice_bytes


def contiguous(ranks: int):
    def shards(spec: ParameterSpec) -> list[tuple[int, int, int]]:
        cuts = [spec.numel * r // ranks for r in range(ranks + 1)]
        return [(r, cuts[r], cuts[r + 1]) for r in range(ranks)]

    return shards


@settings(derandomize=True, max_examples=120, deadline=None)
@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 5))
def test_bytes_by_rank_are_those_of_the_elements(data, shape, ranks, policy_ranks):
    axis = data.draw(st.integers(0, len(shape) - 1))
    spec = ParameterSpec("w", "bfloat16", tuple(shape))
    cut = Cut(spec.shape, axis, data.draw(st.integers(1, ranks)))
    found = slice_bytes([spec], contiguous(policy_ranks), lambda _: cut, policy_ranks=policy_ranks, ranks=ranks)
    place = np.indices(shape)[axis].reshape(-1)  # of each element, along the axis
    for owner, start, stop in contiguous(policy_ranks)(spec):
        for rank in range(ranks):
            low, high = cut.range_of(rank, ranks)
            assert found[owner, rank] == 2 * int(((place[start:stop] >= low) & (place[start:stop] < high)).sum())
    assert found.sum(axis=0).tolist() == least_bytes([spec], lambda _: cut, ranks)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
def test_the_parts_of_a_cut_are_the_whole_once(size, parts, ranks):
    parts = min(parts, ranks)
    ranges = {Cut((size, 3), 0, parts).range_of(rank, ranks) for rank in range(ranks)}
    assert sorted(i for low, high in ranges for i in range(low, high)) == list(range(size))


def test_a_decoder_is_cut_by_heads_feed_forward_and_vocabulary():
    cuts, bf16 = megatron_cuts(8, kv_heads=2), "bfloat16"
    whole = [ParameterSpec("model.norm.weight", bf16, (16,)), ParameterSpec("model.layers.0.mlp.gate.weight", bf16, (8, 16)),
             ParameterSpec("model.layers.0.self_attn.o_proj.bias", bf16, (16,))]  # fmt: skip
    assert [cuts(spec) for spec in whole] == [None] * 3
    q = ParameterSpec("model.layers.0.self_attn.q_proj.weight", bf16, (64, 16))
    k = ParameterSpec("model.layers.0.self_attn.k_proj.bias", bf16, (16,))
    down = ParameterSpec("model.layers.0.mlp.experts.down_proj", bf16, (4, 16, 32))
    up = ParameterSpec("model.layers.0.mlp.experts.gate_up_proj", bf16, (4, 64, 16))
    assert least_bytes([q], cuts, 8) == [q.nbytes // 8] * 8
    assert least_bytes([k], cuts, 8) == [k.nbytes // 2] * 8  # two heads for eight ranks: four ranks hold each
    assert least_bytes([down], cuts, 8) == [down.nbytes // 8] * 8 and cuts(down).axis == 2
    assert least_bytes([up], cuts, 8) == [up.nbytes // 8] * 8
    assert math.prod(cuts(up).shape) == up.numel and cuts(up).axis == 2  # rows of the gate and of the up half, not of both
