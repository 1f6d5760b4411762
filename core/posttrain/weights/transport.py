"""How buckets travel from a policy rank's slot to a lane's staging.

A transport allocates the slots that publications live in and pulls one bucket at a time; it knows nothing of models, versions
or engines. The smallest one implements `allocate` and `pull`; `posttrain.testing.TransportContract` states the laws as tests.

Each lane has a transport of its own (`fresh()`): an overdue pull is abandoned by closing it, and the staging that it may still
write to is dropped with it, never reused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from posttrain.types import Declares
from posttrain.weights.memory import Region, copy, private_region, shared_region
from posttrain.weights.plan import BucketPlan, Piece

Handle = dict[str, Any]
"""Where a slot is, as plain picklable data; only the transport that made it can read it."""


End = Literal["serve", "pull"]
"""What an end does: a policy rank's serves its slots, a rollout body's pulls from them."""


class Transport(Declares, ABC):
    """One end of the way that weights travel."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = ""

    @dataclass(frozen=True)
    class Options:
        """Options of the transport."""

    def __init__(self, options: Any = None) -> None:
        self.options = options if options is not None else type(self).Options()

    @classmethod
    def preflight(cls) -> None:
        """What every end would refuse: packages that are absent, or of other versions. Called where a run is prepared; starts
        nothing. Raises WeightSyncError with the fix."""

    def fresh(self) -> Transport:
        """A new end with the same options, for one lane."""
        return type(self)(self.options)

    def warm(self, end: End) -> None:
        """Start now what this end would start at its first slot or pull: called before a model loads, so that what cannot start
        is told then. Blocks. Raises WeightSyncError with the fix."""

    @abstractmethod
    def allocate(self, nbytes: int) -> tuple[Region, Handle]:
        """Memory for one slot, and the handle under which lanes pull from it. Raises WeightSyncError when there is none."""

    def renew(self, handle: Handle) -> Handle:
        """The handle of a slot for its next publication: another one when whatever served it is gone and was replaced."""
        return handle

    def staging(self, nbytes: int, *, shared: bool = False) -> Region:
        """Memory that this end can pull into; `shared`: that other processes can map. The caller releases it, after `close`."""
        return shared_region(nbytes) if shared else private_region(nbytes)

    def register(self, region: Region) -> None:
        """Prepare a lane's staging for pulls; called once for each region before the first."""

    @abstractmethod
    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        """Copy the pieces of one bucket from the slot to `into`. Blocks; runs in a thread; at most `bucket_bytes`.

        Raises WeightSyncError when the slot or its owner is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back everything this end holds, the slots it allocated included; ends running pulls if it can. Idempotent."""


def room(transport: Transport, nbytes: int, kept: Region | None, *, shared: bool = False) -> Region:
    """Registered staging of at least `nbytes`: what is kept, or another in its place."""
    if kept is None or kept.nbytes < nbytes:
        if kept is not None:
            kept.release()
        kept = transport.staging(nbytes, shared=shared)
        transport.register(kept)
    return kept


@dataclass(frozen=True)
class Staged:
    """A publication in the staging memory of one lane, every bucket verified: what `Engine.apply` takes.

    `digests` are those of the publication, one for each bucket of the plan.
    """

    version: int
    epoch: int
    plan: BucketPlan
    digests: tuple[str, ...]
    region: Region

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and views on the staging memory, in plan order. Copy them: the next update overwrites it."""
        return views(self.plan, self.region.buffer)


def views(plan: BucketPlan, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of `plan` as views on `buffer` (uint8 `[nbytes]`, laid out as the plan says)."""
    for spec, offset in zip(plan.parameters, plan.offsets, strict=True):
        data = buffer[offset : offset + spec.nbytes]
        yield spec.name, data.view(getattr(torch, spec.dtype)).view(spec.shape)


def copy_pieces(source: torch.Tensor, pieces: Sequence[Piece], into: torch.Tensor) -> None:
    """Copy pieces between two uint8 buffers of this process; pieces that are neighbours on both sides go as one."""
    for begin, target, nbytes in runs(pieces):
        copy(source[begin : begin + nbytes], into[target : target + nbytes])


def runs(pieces: Sequence[Piece]) -> Iterator[tuple[int, int, int]]:
    """(source, target, bytes) of pieces, neighbours on both sides as one."""
    run: tuple[int, int, int] | None = None
    for piece in pieces:
        if run and piece.source == run[0] + run[2] and piece.target == run[1] + run[2]:
            run = (run[0], run[1], run[2] + piece.nbytes)
            continue
        if run:
            yield run
        run = (piece.source, piece.target, piece.nbytes)
    if run:
        yield run
