"""Which bytes of a publication come from where: pure data, made without a tensor and without a device.

A plan lays all parameters end to end in one staging buffer and cuts their elements into buckets. A bucket is what one
transfer moves: pieces of one policy rank, at most `bucket_bytes` together. Every element of every parameter is in exactly one
piece; `BucketPlan.check` proves it, `coverage_problems` compares a plan with the parameters that an engine takes.

    plan = plan_buckets([ParameterSpec("lm_head.weight", "bfloat16", (49152, 576))])
    for bucket in plan.buckets: transport.pull(handle, bucket.pieces, into=staging)
"""

from __future__ import annotations

import math
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from posttrain.errors import WeightSyncError

ALIGNMENT = 64
"""Parameters start at multiples of this many bytes, in slots and in staging."""

GOLDEN_RATIO = 0.6180339887498949

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter as the trainer names it (Hugging Face name), its wire dtype and full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


Shards = Callable[[ParameterSpec], Sequence[tuple[int, int, int]]]
"""Who holds a parameter: `(policy rank, first element, last element + 1)` of its flattened elements."""


class Piece(NamedTuple):
    """Elements `[start, stop)` of one parameter: `nbytes` at `source` in its rank's slot go to `target` in staging."""

    name: str
    start: int
    stop: int
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one transfer moves: pieces of one policy rank."""

    index: int
    rank: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class BucketPlan:
    """parameters: in the order of loading; offsets: where each starts in staging, bytes; buckets: in the order of pulling."""

    parameters: tuple[ParameterSpec, ...]
    offsets: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int

    @cached_property
    def nbytes(self) -> int:
        """Size of the staging buffer."""
        return max((o + p.nbytes for p, o in zip(self.parameters, self.offsets, strict=True)), default=0)

    @cached_property
    def digest(self) -> str:
        """Names this plan: equal digests mean equal plans."""
        name = blake2b(digest_size=16)
        name.update(repr((self.parameters, self.offsets, self.bucket_bytes)).encode())
        for bucket in self.buckets:  # one at a time: plans of large models have millions of pieces
            name.update(repr((bucket.index, bucket.rank, [tuple(piece) for piece in bucket.pieces])).encode())
        return name.hexdigest()

    def slot_bytes(self, rank: int) -> int:
        """Size of the slot that policy rank `rank` publishes from."""
        return self._slots.get(rank, 0)

    @cached_property
    def places_in_rank(self) -> dict[int, int]:
        """bucket → how many buckets its rank writes before it"""
        before, places = Counter[int](), dict[int, int]()
        for bucket in self.buckets:
            places[bucket.index] = before[bucket.rank]
            before[bucket.rank] += 1
        return places

    @cached_property
    def _slots(self) -> dict[int, int]:
        ends: dict[int, int] = {}
        for bucket in self.buckets:
            ends[bucket.rank] = max(ends.get(bucket.rank, 0), *(piece.source + piece.nbytes for piece in bucket.pieces))
        return ends

    def __reduce__(self) -> tuple[Any, ...]:
        """It goes with every publication: packed once, and not unpacked where it is known."""
        return _received, (self.digest, self._packed)

    @cached_property
    def _packed(self) -> bytes:
        return pickle.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the wire: pieces are tuples of their fields."""
        return {
            "parameters": [(p.name, p.dtype, p.shape) for p in self.parameters],
            "offsets": self.offsets,
            "buckets": [(b.index, b.rank, [tuple(piece) for piece in b.pieces]) for b in self.buckets],
            "bucket_bytes": self.bucket_bytes,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BucketPlan:
        return cls(
            parameters=tuple(ParameterSpec(name, dtype, tuple(shape)) for name, dtype, shape in data["parameters"]),
            offsets=tuple(data["offsets"]),
            buckets=tuple(Bucket(index, rank, tuple(Piece(*p) for p in pieces)) for index, rank, pieces in data["buckets"]),
            bucket_bytes=data["bucket_bytes"],
        )

    def check(self) -> None:
        """Raise WeightSyncError, naming every fault, unless each element is moved exactly once to its own place."""
        problems = _layout_problems(self) + _cover_problems(self)
        if problems:
            raise WeightSyncError("\n  ".join(["the bucket plan is faulty:", *problems]), cause="a fault in its shards")


_known: WeakValueDictionary[str, BucketPlan] = WeakValueDictionary()
"""Plans that came from other processes, by their digests."""


def _received(digest: str, packed: bytes) -> BucketPlan:
    plan = _known.get(digest)
    if plan is None:
        plan = BucketPlan.from_dict(pickle.loads(packed))
        if plan.digest != digest:
            raise WeightSyncError(f"a bucket plan arrived damaged: it is {plan.digest}, not {digest}")
        _known[digest] = plan
    return plan


def plan_buckets(
    parameters: Iterable[ParameterSpec], *, bucket_bytes: int = 64 * 2**20, shards: Shards | None = None
) -> BucketPlan:
    """Plan the transfer of `parameters`; `shards` says who holds what (default: rank 0 holds everything).

    Raises WeightSyncError for a duplicate name, an unknown dtype, or shards that leave a hole or overlap.
    """
    specs = tuple(parameters)
    _refuse_bad_specs(specs, bucket_bytes)
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end = align(end + spec.nbytes)
    pieces: dict[int, list[Piece]] = defaultdict(list)
    slots: dict[int, int] = defaultdict(int)
    for spec, offset in zip(specs, offsets, strict=True):
        name, size = spec.name, spec.itemsize
        for rank, start, stop in shards(spec) if shards else ((0, 0, spec.numel),):
            source, nbytes = slots[rank], (stop - start) * size
            pieces[rank].append(Piece(name, start, stop, source, offset + start * size, nbytes))
            slots[rank] = align(source + nbytes)
    plan = BucketPlan(specs, tuple(offsets), tuple(_cut(pieces, {s.name: s.itemsize for s in specs}, bucket_bytes)), bucket_bytes)
    plan.check()
    return plan


def pull_order(buckets: Sequence[Bucket], lane: int) -> Iterator[Bucket]:
    """Every bucket once, from the place of lane number `lane` on and around, so that lanes do not queue at one policy rank."""
    first = place_of(lane, len(buckets))
    return chain(buckets[first:], buckets[:first])


def place_of(lane: int, places: int) -> int:
    """Where lane number `lane` begins. Steps of the golden ratio spread any number of lanes evenly, without knowing it."""
    return int(lane * GOLDEN_RATIO % 1 * places)


def coverage_problems(plan: BucketPlan, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Compare a plan with the names and shapes that an engine takes, in both directions; one line for each difference."""
    sent = {p.name: p.shape for p in plan.parameters}
    absent = [(name, shape) for name, shape in expected.items() if name not in sent]
    problems = [f"the engine needs {name} {list(shape)}, which is not in the plan" for name, shape in absent]
    for name, shape in sent.items():
        if name not in expected:
            problems.append(f"the plan sends {name} {list(shape)}, which the engine does not have")
        elif tuple(expected[name]) != shape:
            problems.append(f"{name}: the plan sends {list(shape)}, the engine has {list(expected[name])}")
    return problems


def align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _refuse_bad_specs(specs: Sequence[ParameterSpec], bucket_bytes: int) -> None:
    problems = [f"{name} is there {count} times" for name, count in Counter(s.name for s in specs).items() if count > 1]
    problems += [f"{s.name} has dtype {s.dtype}, which cannot be sent" for s in specs if s.dtype not in ITEM_BYTES]
    if not specs:
        problems.append("there is no parameter")
    if bucket_bytes < max(ITEM_BYTES.values()):
        problems.append(f"weights.bucket_bytes={bucket_bytes} is smaller than one element")
    if problems:
        raise WeightSyncError("these weights cannot be planned:\n  " + "\n  ".join(problems))


def _cut(pieces: Mapping[int, Sequence[Piece]], itemsize: Mapping[str, int], limit: int) -> Iterable[Bucket]:
    """Fill buckets rank by rank in order; a piece larger than a bucket is cut at an element border."""
    index = 0
    for rank in sorted(pieces):
        current: list[Piece] = []
        room = limit
        for piece in pieces[rank]:
            size = itemsize[piece.name]
            if piece.nbytes > room and piece.nbytes <= limit and current:
                yield Bucket(index, rank, tuple(current))
                index, current, room = index + 1, [], limit
            while piece.nbytes > room:
                head = (room // size) * size
                if head:
                    current.append(_slice(piece, 0, head, size))
                    piece = _slice(piece, head, piece.nbytes, size)
                yield Bucket(index, rank, tuple(current))
                index, current, room = index + 1, [], limit
            current.append(piece)
            room -= piece.nbytes
        if current:
            yield Bucket(index, rank, tuple(current))
            index += 1


def _slice(piece: Piece, begin: int, end: int, size: int) -> Piece:
    start = piece.start + begin // size
    return Piece(piece.name, start, piece.start + end // size, piece.source + begin, piece.target + begin, end - begin)


def _layout_problems(plan: BucketPlan) -> list[str]:
    problems, end = [], 0
    for spec, offset in sorted(zip(plan.parameters, plan.offsets, strict=True), key=lambda pair: pair[1]):
        if offset < end:
            problems.append(f"{spec.name} overlaps the parameter before it in staging")
        end = offset + spec.nbytes
    large = [b for b in plan.buckets if b.nbytes > plan.bucket_bytes]
    problems += [f"bucket {b.index} moves {b.nbytes} bytes, the limit is {plan.bucket_bytes}" for b in large]
    return problems


def _cover_problems(plan: BucketPlan) -> list[str]:
    problems: list[str] = []
    ranges: dict[str, list[Piece]] = defaultdict(list)
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            ranges[piece.name].append(piece)
    for spec, offset in zip(plan.parameters, plan.offsets, strict=True):
        at, size = 0, spec.itemsize
        for piece in sorted(ranges.pop(spec.name, [])):
            if piece.start != at:
                low, high = sorted((at, piece.start))
                problems.append(f"{spec.name}: elements [{low}, {high}) are moved {'never' if piece.start > at else 'twice'}")
            place = (offset + piece.start * size, (piece.stop - piece.start) * size)
            if (piece.target, piece.nbytes) != place:
                problems.append(f"{spec.name}: elements [{piece.start}, {piece.stop}) go to the wrong place")
            at = max(at, piece.stop)
        if at != spec.numel:
            problems.append(f"{spec.name}: {spec.numel} elements, the pieces end at {at}")
    problems += [f"{name} is moved but not a parameter of the plan" for name in ranges]
    return problems
