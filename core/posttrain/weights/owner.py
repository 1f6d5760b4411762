"""Who owns whom: a process named so that a recycled pid is not mistaken for it, and the end of those whose owner is gone."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid and its start time in clock ticks after boot (0 where /proc is absent). Written as `pid.start`."""

    pid: int
    start: int

    @classmethod
    def current(cls) -> ProcessId:
        return cls(os.getpid(), _start_time(os.getpid()) or 0)

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """A process that is alive now."""
        return cls(pid, _start_time(pid) or 0)

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """The inverse of `str`; None for text of another form."""
        pid, _, start = text.partition(".")
        return cls(int(pid), int(start)) if pid.isdigit() and start.isdigit() else None

    def alive(self) -> bool:
        if self.start:
            return _start_time(self.pid) == self.start
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def __str__(self) -> str:
        return f"{self.pid}.{self.start}"


def pid_namespace() -> str:
    """The namespace in which this process's ids mean something (its inode), "0" where there is none: containers may share memory
    but not process ids."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def end_with(owner: ProcessId, *, last: Callable[[], object] | None = None) -> None:
    """Kill this process as soon as `owner` is gone (at once, where pidfd exists). Returns immediately.

    last: what to do first, such as removing what the dead owner left; quick, and nothing that can hang.
    """
    try:
        fd = os.pidfd_open(owner.pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        fd = None
    if not owner.alive():
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_wait_and_die, args=(owner, fd, last), name="posttrain-owner-watch", daemon=True).start()


def _wait_and_die(owner: ProcessId, fd: int | None, last: Callable[[], object] | None) -> None:
    if fd is not None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll()
    else:
        while owner.alive():
            time.sleep(0.5)
    with suppress(Exception):
        if last is not None:
            last()
    # SIGKILL, not exit: the process may hang in a native call, and nothing of it is worth saving
    os.kill(os.getpid(), signal.SIGKILL)


def _start_time(pid: int) -> int | None:
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # a third of the time that a file object takes, for each pull
        try:
            fields = os.read(fd, 4096).rsplit(b")", 1)[1].split()
        finally:
            os.close(fd)
        return int(fields[19]) if fields[0] not in (b"Z", b"X") else None
    except (OSError, IndexError, ValueError):
        return None
