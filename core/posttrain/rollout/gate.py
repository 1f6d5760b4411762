"""The gate between an event loop that changes weights and threads that run forwards: never two of all these at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Open: a thread may run forwards. Closed: `close` has returned, no forward is running, and none starts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = self._busy = False
        self.ended = False

    @property
    def closed(self) -> bool:
        return self._closed

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wait until the gate is open (or shut for good) and nobody else's forward runs, then hold it for one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and (not self._closed or self.ended))
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def close(self) -> None:
        """Let the running forward end, start no other. Blocks."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._busy)

    def open(self) -> None:
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    def shut(self) -> None:
        """End everything: waiting forwards are let through and must look at `ended`."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()
