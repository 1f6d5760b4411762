"""Immutable, versioned snapshots of the policy's weights, in a pool of two slots.

A publication is frozen while a lane holds it; training goes on meanwhile. With both slots taken, the next publication replaces
one that nobody has pulled yet; when both are held it is refused. The second slot is only allocated when it is first needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from posttrain.errors import WeightSyncError
from posttrain.weights.memory import Region
from posttrain.weights.plan import BucketPlan, ParameterSpec, Piece, Shards, plan_buckets
from posttrain.weights.transport import Handle, Transport

SLOTS = 2


@dataclass(frozen=True)
class Publication:
    """What lanes need to pull: plain data.

    digests   one for each bucket of the plan     handles   policy rank → where its slot is
    """

    version: int
    plan: BucketPlan
    digests: tuple[str, ...]
    handles: dict[int, Handle]


@dataclass
class _Slot:
    region: Region
    handle: Handle
    publication: Publication | None = None
    holders: int = 0
    pulled: bool = field(default=False)


class PublicationPool:
    """The slots of one policy rank (rank 0 holds every parameter until the policy is sharded).

    dtype: of floating parameters on the wire; they are cast while they are copied. None: as they come.
    """

    def __init__(
        self, transport: Transport, *, bucket_bytes: int, dtype: str | None = None, shards: Shards | None = None, rank: int = 0
    ) -> None:
        self._transport, self._bucket_bytes, self._dtype, self._shards, self.rank = transport, bucket_bytes, dtype, shards, rank
        self._slots: list[_Slot] = []
        self.plan: BucketPlan | None = None
        self.version = -1

    def plan_for(self, weights: Iterable[tuple[str, torch.Tensor]]) -> BucketPlan:
        """The plan of these parameters, made on the first call; consumes the stream without keeping a tensor."""
        if self.plan is None:
            specs = (_spec(name, tensor, self._dtype) for name, tensor in weights)
            self.plan = plan_buckets(specs, bucket_bytes=self._bucket_bytes, shards=self._shards)
        return self.plan

    def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Publication:
        """Snapshot `weights` (full tensors in plan order) as `version`; copies, so the caller may go on training.

        Raises WeightSyncError when the version does not advance, both slots are held, or the stream is not the plan's.
        """
        if self.plan is None:
            raise WeightSyncError("publish before plan_for")
        if version <= self.version:
            raise WeightSyncError(f"publication {version} does not advance past {self.version}", cause="versions are monotonic")
        slot = self._free_slot()
        slot.publication, slot.pulled = None, False
        self._fill(slot.region.buffer, self.plan, weights)
        digests = tuple(
            bucket_digest(slot.region.buffer, [(p.source, p.nbytes) for p in bucket.pieces])
            for bucket in self.plan.buckets
            if bucket.rank == self.rank
        )
        slot.publication = Publication(version, self.plan, digests, {self.rank: slot.handle})
        self.version = version
        return slot.publication

    def hold(self, version: int) -> None:
        """A lane starts to pull `version`: its slot stays as it is until released."""
        slot = self._slot_of(version)
        slot.holders, slot.pulled = slot.holders + 1, True

    def release(self, version: int) -> None:
        """The inverse of `hold`."""
        slot = self._slot_of(version)
        slot.holders = max(0, slot.holders - 1)

    def close(self) -> None:
        self._slots.clear()
        self._transport.close()

    def _fill(self, buffer: torch.Tensor, plan: BucketPlan, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        pieces: dict[str, list[Piece]] = {}
        for piece in (p for bucket in plan.buckets if bucket.rank == self.rank for p in bucket.pieces):
            pieces.setdefault(piece.name, []).append(piece)
        stream: Iterator[tuple[str, torch.Tensor]] = iter(weights)
        for spec in plan.parameters:
            name, tensor = next(stream, ("nothing", torch.empty(0)))
            if _spec(name, tensor, self._dtype) != spec:
                raise WeightSyncError(
                    f"the policy published {name} {list(tensor.shape)} {tensor.dtype}, "
                    f"the plan has {spec.name} {list(spec.shape)} {spec.dtype} there",
                    cause="the policy's parameters changed after the plan was made",
                )
            flat = tensor.detach().reshape(-1)
            for piece in pieces.get(name, ()):
                target = buffer[piece.source : piece.source + piece.nbytes].view(getattr(torch, spec.dtype))
                target.copy_(flat[piece.start : piece.stop])
        extra = next(stream, None)
        if extra is not None:
            raise WeightSyncError(f"the policy published {extra[0]}, which is not in the plan", cause="its parameters changed")

    def _slot_of(self, version: int) -> _Slot:
        for slot in self._slots:
            if slot.publication is not None and slot.publication.version == version:
                return slot
        raise WeightSyncError(f"publication {version} is not in the pool", cause="a newer one replaced it before it was pulled")

    def _free_slot(self) -> _Slot:
        """An empty or new slot, else the older of the free ones, one that was never pulled last."""
        assert self.plan is not None
        free = [s for s in self._slots if s.holders == 0]
        done = [s for s in free if s.publication is None or s.pulled]
        if done:
            return done[0]
        if len(self._slots) < SLOTS:
            region, handle = self._transport.allocate(self.plan.slot_bytes(self.rank))
            self._slots.append(_Slot(region, handle))
            return self._slots[-1]
        if free:
            return min(free, key=lambda s: s.publication.version if s.publication else -1)
        versions = sorted(s.publication.version for s in self._slots if s.publication)
        raise WeightSyncError(f"publications {versions} are both still being pulled", cause="a lane is slower than the trainer")


def bucket_digest(buffer: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> str:
    """Digest of `(offset, nbytes)` ranges of a uint8 host buffer, in order. Detects corruption, not malice."""
    digest, data = xxhash.xxh3_128(), memoryview(buffer.numpy())  # type: ignore[arg-type]
    for offset, nbytes in ranges:
        digest.update(data[offset : offset + nbytes])
    return digest.hexdigest()


def _spec(name: str, tensor: torch.Tensor, dtype: str | None) -> ParameterSpec:
    own = str(tensor.dtype).removeprefix("torch.")
    return ParameterSpec(name, dtype if dtype and tensor.is_floating_point() else own, tuple(tensor.shape))
