"""The transport between processes of one host: slots are shared memory, a pull maps the slot and copies.

A slot is unlinked when its owner closes the transport; what a dead owner left is removed by whoever allocates, closes or finds
the owner dead next (`shared_files.sweep`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from posttrain.errors import WeightSyncError
from posttrain.weights.memory import Region, attach, shared_region
from posttrain.weights.owner import ProcessId
from posttrain.weights.plan import Piece
from posttrain.weights.shared_files import shared_folder, sweep
from posttrain.weights.transport import Handle, Transport, copy_pieces


class ShmTransport(Transport):
    """POSIX shared memory between processes of one host."""

    name: ClassVar[str] = "shm"
    provides: tuple[str, ...] = ("between_processes",)

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._owned: list[Region] = []
        self._attached: dict[str, Region] = {}

    def allocate(self, nbytes: int) -> tuple[Region, Handle]:
        region = shared_region(nbytes)
        self._owned.append(region)
        return region, {"path": region.path, "owner": str(ProcessId.current())}

    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        path, owner = handle["path"], ProcessId.parse(handle["owner"])
        if owner is not None and not owner.alive():
            self._forget_gone()
            raise WeightSyncError(f"was not pulled: its process died (from process {owner.pid})", code="peer")
        if path not in self._attached:
            self._forget_gone()
            self._attached[path] = attach(path)
        copy_pieces(self._attached[path].buffer, pieces, into.buffer)

    def _forget_gone(self) -> None:
        """Unmap what is unlinked: the slots of owners that closed, and of dead ones."""
        sweep(shared_folder())
        for path in [path for path in self._attached if not os.path.exists(path)]:
            self._attached.pop(path).release()

    def close(self) -> None:
        for region in (*self._owned, *self._attached.values()):
            region.release()
        self._owned.clear()
        self._attached.clear()
        sweep(shared_folder())
