"""A snapshot: what a policy was at one moment, copied to host memory and written once, whatever the policy does meanwhile.

    write = policy.snapshot()                  # blocks for the copy
    thread.submit(write, folder)               # training goes on

A copy is as large as weights and optimizer state together, so a policy has one at a time: it is free when it is written, when
writing it failed, and when nobody holds its writer any more. Who wants another one awaits the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

Write = Callable[[Path], object]


class Snapshot:
    """The writer of one snapshot; may be called once, in any thread."""

    def __init__(self, write: Write) -> None:
        self._write: Write | None = write
        self.open = True

    def __call__(self, folder: str | Path) -> None:
        """Write what the policy was into `folder`. Raises RuntimeError the second time."""
        write, self._write = self._write, None
        if write is None:
            raise RuntimeError("a snapshot is written once")
        try:
            write(Path(folder))
        finally:
            del write
            self.open = False


class Snapshots:
    """Hands out the snapshots of one policy, one at a time."""

    def __init__(self) -> None:
        self._last: Callable[[], Snapshot | None] = lambda: None

    def take(self, copy: Callable[[], Write]) -> Snapshot:
        """The snapshot that `copy` makes. Raises RuntimeError while somebody holds one that is not written yet."""
        last = self._last()
        if last is not None and last.open:
            raise RuntimeError("the policy's snapshot before this one is not written yet; await its writer, or drop it")
        snapshot = Snapshot(copy())
        self._last = weakref.ref(snapshot)
        return snapshot
