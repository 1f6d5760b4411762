"""The transport between processes of one host: slots are shared memory, a pull maps the slot and copies.

A slot is unlinked when its owner closes the transport; what a dead owner left is removed by the next one (`memory.sweep`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from posttrain.weights.memory import Region, attach, shared_region
from posttrain.weights.plan import Piece
from posttrain.weights.transport import Handle, Transport, copy_pieces


class ShmTransport(Transport):
    """POSIX shared memory between processes of one host."""

    name: ClassVar[str] = "shm"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._owned: list[Region] = []
        self._attached: dict[str, Region] = {}

    def allocate(self, nbytes: int) -> tuple[Region, Handle]:
        region = shared_region(nbytes)
        self._owned.append(region)
        return region, {"path": region.path}

    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        path = handle["path"]
        if path not in self._attached:
            self._attached[path] = attach(path)
        copy_pieces(self._attached[path].buffer, pieces, into.buffer)

    def close(self) -> None:
        for region in (*self._owned, *self._attached.values()):
            region.release()
        self._owned.clear()
        self._attached.clear()
