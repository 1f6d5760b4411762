"""The transport within one process: slots are private memory, a pull is a copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from posttrain.errors import WeightSyncError
from posttrain.weights.memory import Region, private_region
from posttrain.weights.plan import Piece
from posttrain.weights.transport import Handle, Transport, copy_pieces

_slots: WeakValueDictionary[int, Region] = WeakValueDictionary()
_serial = itertools.count()


class InprocTransport(Transport):
    """Copies within this process; for engines that live in it."""

    name: ClassVar[str] = "inproc"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._owned: list[Region] = []

    def allocate(self, nbytes: int) -> tuple[Region, Handle]:
        region, key = private_region(nbytes), next(_serial)
        _slots[key] = region
        self._owned.append(region)
        return region, {"slot": key}

    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        source = _slots.get(handle["slot"])
        if source is None or not source.nbytes:
            raise WeightSyncError(
                f"was not pulled: slot {handle['slot']} is not in this process",
                cause="it was closed, or is another process's",
                code="peer",
            )
        copy_pieces(source.buffer, pieces, into.buffer)

    def close(self) -> None:
        for region in self._owned:
            region.release()
        self._owned.clear()
