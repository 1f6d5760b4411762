"""The least that tensor-parallel ranks can be sent: each its own part of every parameter, and nothing of the others'.

Engines behind the staging memory of a body take full tensors, once per body. A consumer that accepts slices would pull, per
rank, `slice_bytes(...)` instead: its share of what is cut, and a copy of what every rank holds whole. Pure arithmetic; nothing
is enumerated element by element, so it runs for thousands of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.weights.plan import ParameterSpec, Shards

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "embed_tokens", "lm_head")
"""Layers whose output is cut: their weight and bias by rows, the vocabulary too."""

COLUMNS = ("o_proj", "down_proj")
"""Layers whose input is cut: their weight by columns; a bias is whole."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter seen as `shape` and cut along `axis` into `parts`; of more ranks than parts, neighbours share one."""

    shape: tuple[int, ...]
    axis: int
    parts: int

    def range_of(self, rank: int, ranks: int) -> tuple[int, int]:
        """`(first, last + 1)` along the axis that rank `rank` of `ranks` holds."""
        part, size = rank * self.parts // ranks, self.shape[self.axis]
        return part * size // self.parts, (part + 1) * size // self.parts


Cuts = Callable[[ParameterSpec], Cut | None]
"""How a parameter is cut over tensor-parallel ranks; None: every rank holds it whole."""


def megatron_cuts(ranks: int, kv_heads: int) -> Cuts:
    """The usual cut of a decoder: heads, feed-forward and vocabulary over the ranks. kv_heads: of keys and values.

    Experts that are stored together, `[experts, rows, columns]`, are each cut like a feed-forward, gate and up halves apart.
    """

    def cut(spec: ParameterSpec) -> Cut | None:
        names, shape = spec.name.split("."), spec.shape
        if names[-1] == "gate_up_proj" and len(shape) == 3:
            return Cut((shape[0], 2, shape[1] // 2, shape[2]), 2, ranks)
        layer = next((name for name in reversed(names) if name in ROWS or name in COLUMNS), None)
        if layer in COLUMNS:
            return Cut(shape, len(shape) - 1, ranks) if names[-1] != "bias" else None
        if layer is None:
            return None
        return Cut(shape, 0, min(ranks, kv_heads) if layer in ("k_proj", "v_proj") else ranks)

    return cut


def slice_bytes(
    parameters: Iterable[ParameterSpec], shards: Shards, cuts: Cuts, *, policy_ranks: int, ranks: int
) -> np.ndarray[Any, Any]:
    """Bytes `[policy_ranks, ranks]` that each tensor-parallel rank of one body pulls from each policy rank, int64."""
    total = np.zeros((policy_ranks, ranks), dtype=np.int64)
    for spec in parameters:
        owner, start, stop = np.array(shards(spec), dtype=np.int64).reshape(-1, 3).T
        cut = cuts(spec)
        for rank in range(ranks):
            held = stop - start if cut is None else _held(cut, stop, rank, ranks) - _held(cut, start, rank, ranks)
            np.add.at(total[:, rank], owner, held * spec.itemsize)
    return total


def least_bytes(parameters: Iterable[ParameterSpec], cuts: Cuts, ranks: int) -> list[int]:
    """What theory asks for: bytes of the slices that each tensor-parallel rank holds."""
    found = [0] * ranks
    for spec in parameters:
        cut = cuts(spec)
        for rank in range(ranks):
            found[rank] += spec.nbytes if cut is None else _share(cut, rank, ranks) * spec.itemsize
    return found


def _share(cut: Cut, rank: int, ranks: int) -> int:
    low, high = cut.range_of(rank, ranks)
    return math.prod(cut.shape) // cut.shape[cut.axis] * (high - low)


def _held(cut: Cut, end: Sequence[int] | np.ndarray[Any, Any], rank: int, ranks: int) -> np.ndarray[Any, Any]:
    """How many of the first `end` elements are in the rank's slice."""
    low, high = cut.range_of(rank, ranks)
    inner = math.prod(cut.shape[cut.axis + 1 :])
    whole, rest = np.divmod(np.asarray(end), cut.shape[cut.axis] * inner)
    return np.asarray(whole * (high - low) * inner + np.clip(rest - low * inner, 0, (high - low) * inner))
