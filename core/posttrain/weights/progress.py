"""How far a publication is written: a word at the end of each policy rank's slot, which a lane pulls as it pulls a bucket.

A rank writes its buckets in the plan's order and counts them there, so that a lane pulls what is written while the rank copies
the rest. The word has the version too: a slot that was taken for another publication is told at once. It decides when a bucket is
pulled, never whether it arrived: digests do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from posttrain.errors import WeightSyncError
from posttrain.weights.plan import ALIGNMENT, Bucket, BucketPlan, Piece, align

WORD = "progress"
"""Names the piece that is no parameter's."""

_COUNT_BITS, _WORD_BYTES = 24, 8


def slot_bytes(plan: BucketPlan, rank: int) -> int:
    """Size of a rank's slot, its word included."""
    return word(plan, rank).source + ALIGNMENT


def staging_bytes(plan: BucketPlan) -> int:
    """Size of a lane's staging, with a place for the words of all ranks, one at a time."""
    return align(plan.nbytes) + ALIGNMENT


def word(plan: BucketPlan, rank: int) -> Piece:
    """Where a rank's word is, and where a lane pulls it to."""
    return Piece(WORD, 0, 1, align(plan.slot_bytes(rank)), align(plan.nbytes), _WORD_BYTES)


class Written:
    """The rank's side: its word, and what is left of each bucket.   slot: uint8, of `slot_bytes`"""

    def __init__(self, plan: BucketPlan, rank: int, slot: torch.Tensor) -> None:
        at = word(plan, rank).source
        self._word = slot[at : at + _WORD_BYTES].view(torch.int64)
        self._pieces = {bucket.index: len(bucket.pieces) for bucket in plan.buckets if bucket.rank == rank}
        self._left, self._version, self._count = dict[int, int](), 0, 0

    def begin(self, version: int) -> None:
        """Nothing of `version` is written: before a lane is told of it."""
        self._left, self._version, self._count = dict(self._pieces), version, 0
        self._tell()

    def piece(self, bucket: int) -> None:
        """One more piece of a bucket lies in the slot."""
        self._left[bucket] -= 1
        if not self._left[bucket]:
            self._count += 1
            self._tell()

    def _tell(self) -> None:
        self._word.fill_((self._version << _COUNT_BITS) | self._count)


class Known:
    """The lane's side: what it knows to be written of `version`."""

    def __init__(self, plan: BucketPlan, version: int) -> None:
        self._plan, self._version, self._counts = plan, version, Counter[int]()

    def has(self, bucket: Bucket) -> bool:
        """Whether a bucket may be pulled."""
        return self._plan.places_in_rank[bucket.index] < self._counts[bucket.rank]

    def pieces(self, rank: int) -> Sequence[Piece]:
        """What to pull into staging before `read`."""
        return (word(self._plan, rank),)

    def read(self, rank: int, staging: torch.Tensor) -> None:
        """Raises WeightSyncError when the slot is another publication's."""
        at = word(self._plan, rank).target
        said = int(staging[at : at + _WORD_BYTES].view(torch.int64))
        version = said >> _COUNT_BITS
        if version != self._version:
            raise WeightSyncError(
                f"is not to be had: the slot of policy rank {rank} has version {version}", cause="a newer publication replaced it"
            )
        self._counts[rank] = said & ((1 << _COUNT_BITS) - 1)

    def plain(self, rank: int) -> str:
        return f"policy rank {rank} had written {self._counts[rank]} bucket(s) of it"
