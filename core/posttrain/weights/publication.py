"""Immutable, versioned snapshots of the policy's weights, in a pool of two slots.

A publication is frozen while a lane holds it; training goes on meanwhile. With both slots taken, the next publication replaces
one that nobody has pulled yet; when both are held it is refused. The second slot is only allocated when it is first needed.

Lanes may pull a publication while it is being written: `opened` tells of it, and its slot says how far it is (`progress`).

What proves a publication are digests of the policy's own memory, cast anew where it was cast into the slot, and not of the slot:
so a copy that went wrong, or a slot that was overwritten, is found. They are made after the copy, while lanes pull already, and
until then the policy's memory must not change: `settle` waits for them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from posttrain.errors import WeightSyncError
from posttrain.weights.digest import Digests, Part
from posttrain.weights.failure import PeerFailure, first_exception, out_of_memory_fix
from posttrain.weights.memory import Region, copy
from posttrain.weights.plan import Bucket, BucketPlan, ParameterSpec, Piece, Shards, plan_buckets
from posttrain.weights.progress import Written, slot_bytes
from posttrain.weights.transport import Handle, Transport

SLOTS = 2


@dataclass(frozen=True, slots=True)
class LocalWeight:
    """What one policy rank holds of a parameter: elements `[start, start + values.numel())` of the full `shape`, flattened.

    Every rank names every parameter, in the same order, also one of which it holds nothing: so every rank makes the same plan.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor

    def spec(self, dtype: str | None) -> ParameterSpec:
        """As it travels: floating values in `dtype` (None: their own)."""
        return ParameterSpec(self.name, self._travels(dtype), tuple(self.shape))

    def is_of(self, spec: ParameterSpec, dtype: str | None) -> bool:
        """Whether `spec` is what it says it is: asked of every parameter of every publication."""
        return self.name == spec.name and self.shape == spec.shape and self._travels(dtype) == spec.dtype

    def _travels(self, dtype: str | None) -> str:
        return dtype if dtype and self.values.is_floating_point() else _name(self.values.dtype)


_NOTHING = LocalWeight("nothing", (0,), 0, torch.empty(0))
"""What a stream that ended too early has next."""

LocalSource = Callable[[], Iterable[LocalWeight]]
"""What a policy rank holds now: every parameter in the same order, its own elements, tied duplicates omitted. Given in the
dtype that they are stored in; the pool casts them while it copies."""


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def whole(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[LocalWeight]:
    """Full tensors as what the only policy rank holds."""
    for name, tensor in weights:
        yield LocalWeight(name, tuple(tensor.shape), 0, tensor.detach().reshape(-1))


@dataclass(frozen=True)
class Publication:
    """What lanes need to pull: plain data. A policy rank makes a part of it, `merge_publications` the whole.

    handles   policy rank → where its slot is
    """

    version: int
    plan: BucketPlan
    handles: dict[int, Handle]


Digested = Mapping[int, str]
"""bucket → digest"""

Opened = Callable[[Publication], None]
"""Told of a publication when lanes may begin to pull it, before it is written."""


def nobody(publication: Publication) -> None:
    """Nobody wants to know."""


def merge_publications(parts: Sequence[Publication]) -> Publication:
    """One publication of what each policy rank published. Raises WeightSyncError naming the rank that does not fit the others."""
    first, rest = parts[0], parts[1:]
    handles = dict(first.handles)
    for part in rest:
        rank, other = min(part.handles), min(first.handles)
        if part.version != first.version:
            raise _unfit(
                f"policy rank {rank} published version {part.version}, rank {other} version {first.version}",
                "the ranks are not at the same step", rank,
            )  # fmt: skip
        if part.plan.digest != first.plan.digest:
            raise _unfit(
                f"policy rank {rank} cut its weights by another plan than rank {other}",
                "the ranks hold other parameters, or another order of them", rank,
            )  # fmt: skip
        handles |= part.handles
    whole = Publication(first.version, first.plan, handles)
    _all_there(whole, [b for b in first.plan.buckets if b.rank not in handles], "bucket")
    return whole


def complete_digests(publication: Publication, found: Digested) -> tuple[str, ...]:
    """One digest for each bucket of the plan. Raises WeightSyncError naming the rank that did not make one."""
    _all_there(publication, [b for b in publication.plan.buckets if not found.get(b.index)], "the digest of bucket")
    return tuple(found[b.index] for b in publication.plan.buckets)


def _all_there(publication: Publication, absent: Sequence[Bucket], what: str) -> None:
    if absent:
        bucket, more = absent[0], f" and {len(absent) - 1} more" if absent[1:] else ""
        raise _unfit(
            f"publication {publication.version} lacks {what} {bucket.index} of policy rank {bucket.rank} "
            f"({bucket.pieces[0].name} …){more}",
            "the rank did not publish everything that the plan wants from it", bucket.rank, bucket.index,
        )  # fmt: skip


def _unfit(message: str, cause: str, rank: int, bucket: int | None = None) -> PeerFailure:
    return PeerFailure(message, peer=f"policy rank {rank}", phase="publish", bucket=bucket, cause=cause)


Place = tuple[int, Piece, torch.Tensor]
"""The bucket of a piece, the piece, and where it is to lie: a view of the slot in the dtype that travels."""


@dataclass
class _Slot:
    """places: of the pieces of each parameter."""

    region: Region
    handle: Handle
    written: Written
    places: dict[str, list[Place]]
    publication: Publication | None = None
    digests: Digests = field(default_factory=lambda: Digests(()))
    holders: int = 0
    pulled: bool = field(default=False)


class PublicationPool:
    """The slots of one policy rank; `shards` says what each rank publishes (default: rank 0 everything).

    dtype: of floating parameters on the wire; they are cast while they are copied. None: as they come.
    """

    def __init__(
        self, transport: Transport, *, bucket_bytes: int, dtype: str | None = None, shards: Shards | None = None, rank: int = 0
    ) -> None:
        self._transport, self._bucket_bytes, self._dtype, self._shards, self.rank = transport, bucket_bytes, dtype, shards, rank
        self._slots: list[_Slot] = []
        self._state, self._idle = threading.Lock(), threading.Event()
        self._idle.set()
        self._unwanted: int | None = None
        self.plan: BucketPlan | None = None
        self.version = -1
        self.at: int | None = None  # the bucket that is being written, or was last

    @property
    def peer(self) -> str:
        """What messages call this rank."""
        return f"policy rank {self.rank}"

    def plan_for(self, weights: Iterable[LocalWeight]) -> BucketPlan:
        """The plan of these parameters, made on the first call; consumes the stream without keeping a tensor."""
        if self.plan is None:
            specs = (weight.spec(self._dtype) for weight in weights)
            self.plan = plan_buckets(specs, bucket_bytes=self._bucket_bytes, shards=self._shards)
        return self.plan

    def publish(self, version: int, weights: Iterable[LocalWeight]) -> Publication:
        """Snapshot this rank's share of `weights` (in plan order) as `version`; copies, so the caller may go on, and change the
        weights after `settle`.

        Raises WeightSyncError when the version does not advance, both slots are held, or the stream is not the plan's.
        """
        if self.plan is None:
            raise WeightSyncError(f"{self.peer}: publish before plan_for")
        self.begin(version)
        return self.write(version, lambda: weights)

    def begin(self, version: int) -> None:
        """`write` follows, perhaps in a thread that has yet to start: from now on `retract` finds what it has to stop."""
        if version <= self.version:
            raise WeightSyncError(
                f"{self.peer}: publication {version} does not advance past {self.version}", cause="versions are monotonic"
            )
        with self._state:
            if not self._idle.is_set():
                raise WeightSyncError(f"{self.peer}: the publication before {version} is still being written")
            self._idle.clear()
            self._unwanted = self.at = None

    def write(self, version: int, source: LocalSource, opened: Opened = nobody) -> Publication:
        """The publication that has begun; the first makes the plan. Raises as `publish` does, also after `opened` was told."""
        try:
            plan = self.plan or self.plan_for(source())
            slot = self._take_slot()
            slot.handle = self._transport.renew(slot.handle)
            slot.written.begin(version)
            publication = Publication(version, plan, {self.rank: slot.handle})
            opened(publication)
            with torch.no_grad():
                parts = list(self._copied(slot, version, source()))
            with self._state:
                self._go_on(version)
                slot.publication, slot.digests, self.version = publication, Digests(parts), version
            return publication
        finally:
            self._idle.set()

    def digests(self, version: int) -> Digested:
        """Of this rank's buckets of `version`. Blocks until they are made, by this call or another."""
        with self._state:
            digests = self._slot_of(version).digests
        return digests.found()

    def settle(self) -> None:
        """Return when nobody reads the weights that were published: call it before they change."""
        with self._state:
            every = [slot.digests for slot in self._slots if slot.publication is not None]
        for digests in every:
            digests.settle()

    def retract(self, version: int, *, timeout: float = 0.0) -> None:
        """Take back `version`, which nobody was told of: its slot is free again, and one that is being written stops.

        Waits at most `timeout` seconds for the writer, so that the version can be published again.
        """
        with self._state:
            self._unwanted = version
            for slot in self._slots:
                if slot.publication is not None and slot.publication.version == version and not slot.holders:
                    slot.publication, self.version = None, version - 1
        self._idle.wait(timeout)

    def hold(self, version: int) -> None:
        """A lane starts to pull `version`: its slot stays as it is until released."""
        with self._state:
            slot = self._slot_of(version)
            slot.holders, slot.pulled = slot.holders + 1, True

    def release(self, version: int) -> None:
        """The inverse of `hold`."""
        with self._state:
            slot = self._slot_of(version)
            slot.holders = max(0, slot.holders - 1)

    def close(self) -> None:
        """Give back the slots and what the transport holds; idempotent."""
        self._slots.clear()
        self._transport.close()

    def _copied(self, slot: _Slot, version: int, weights: Iterable[LocalWeight]) -> Iterator[Part]:
        """Copy the stream; yields each piece of this rank, of whose digest the proof is, once it is copied."""
        assert self.plan is not None
        stream = iter(weights)
        for spec in self.plan.parameters:
            weight = next(stream, _NOTHING)
            if not weight.is_of(spec, self._dtype):
                raise self._changed(weight, spec)
            for index, piece, place in slot.places.get(spec.name, ()):
                self._go_on(version)
                self.at = index
                try:
                    own = self._write(place, piece, weight)
                    slot.written.piece(index)
                except Exception as exc:
                    raise self._not_written(version, index, spec.name, exc) from exc
                yield index, own, place.dtype
        extra = next(stream, None)
        if extra is not None:
            raise WeightSyncError(
                f"{self.peer} published {extra.name}, which is not in the plan", cause="its parameters changed after the plan"
            )

    def _write(self, place: torch.Tensor, piece: Piece, weight: LocalWeight) -> torch.Tensor:
        """Copy a piece to its place in the slot. Returns the policy's own values."""
        begin, end = piece.start - weight.start, piece.stop - weight.start
        if begin < 0 or end > weight.values.numel():
            held = f"[{weight.start}, {weight.start + weight.values.numel()})"
            raise WeightSyncError(
                f"{self.peer} holds elements {held} of {piece.name}, the plan wants [{piece.start}, {piece.stop}) from it",
                cause="the plan's shards are not how the policy is sharded",
            )
        values = weight.values
        if begin or end != values.numel() or values.dim() != 1:
            values = values.reshape(-1)[begin:end]
        copy(values, place)
        return values

    def _go_on(self, version: int) -> None:
        if version == self._unwanted:
            raise WeightSyncError(f"{self.peer}: publication {version} was stopped", code="stopped")

    def _not_written(self, version: int, index: int, name: str, exc: Exception) -> PeerFailure:
        known = exc if isinstance(exc, WeightSyncError) else None
        return PeerFailure(
            known.message if known else f"{self.peer}: bucket {index} of publication {version} was not written",
            peer=self.peer,
            phase="publish",
            bucket=index,
            where=f"bucket {index} ({name})",
            cause=known.cause if known else first_exception(exc),
            fix="" if known else out_of_memory_fix(exc),
        )

    def _changed(self, weight: LocalWeight, spec: ParameterSpec) -> WeightSyncError:
        return WeightSyncError(
            f"{self.peer} published {weight.name} {list(weight.shape)} {weight.values.dtype}, "
            f"the plan has {spec.name} {list(spec.shape)} {spec.dtype} there",
            cause="the policy's parameters changed after the plan was made",
        )

    def _slot_of(self, version: int) -> _Slot:
        for slot in self._slots:
            if slot.publication is not None and slot.publication.version == version:
                return slot
        raise WeightSyncError(
            f"{self.peer}: publication {version} is not in the pool", cause="a newer one replaced it before it was pulled"
        )

    def _take_slot(self) -> _Slot:
        """A slot that nobody can hold any more: chosen and emptied in one, so that a lane holds it before that or is refused."""
        assert self.plan is not None
        with self._state:
            slot = self._free_slot()
            if slot is not None:
                slot.publication, slot.pulled = None, False
                return slot
        region, handle = self._transport.allocate(slot_bytes(self.plan, self.rank))  # not under the lock: it may take long
        slot = _Slot(region, handle, Written(self.plan, self.rank, region.buffer), self._places(region.buffer))
        with self._state:
            self._slots.append(slot)
        return slot

    def _places(self, buffer: torch.Tensor) -> dict[str, list[Place]]:
        assert self.plan is not None
        places: dict[str, list[Place]] = defaultdict(list)
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in self.plan.parameters}
        for bucket in self.plan.buckets:
            if bucket.rank == self.rank:
                for piece in bucket.pieces:
                    place = buffer[piece.source : piece.source + piece.nbytes].view(dtypes[piece.name])
                    places[piece.name].append((bucket.index, piece, place))
        return dict(places)

    def _free_slot(self) -> _Slot | None:
        """An empty slot, None where a new one is to be made, else the older of the free ones, one that was never pulled last."""
        free = [s for s in self._slots if s.holders == 0]
        done = [s for s in free if s.publication is None or s.pulled]
        if done:
            return done[0]
        if len(self._slots) < SLOTS:
            return None
        if free:
            return min(free, key=lambda s: s.publication.version if s.publication else -1)
        versions = sorted(s.publication.version for s in self._slots if s.publication)
        raise WeightSyncError(
            f"{self.peer}: publications {versions} are both still being pulled", cause="a lane is slower than the trainer"
        )
