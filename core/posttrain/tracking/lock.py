"""The lock of a run directory: two processes never write one run.

An exclusive `flock` on `run.lock`, which the kernel drops when the process dies, however it dies. The file names its holder,
for the message. Forked children let go of it, so an orphaned worker cannot keep a dead run locked. On a file system without
`flock` the holder's process id decides instead.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError
from posttrain.tracking.files import writing

_NO_FLOCK = {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}
_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """Held from construction until `release()`. Raises ConfigError when another live process holds it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.lock"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._acquire()
            self._sign()
        except BaseException:
            os.close(self._fd)
            raise
        _held.add(self)

    def _acquire(self) -> None:
        holder = self._holder()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in _NO_FLOCK and not _alive(holder):
                return
            raise ConfigError(
                f"the run directory {self.path.parent} is in use",
                cause=f"process {holder.get('pid', '?')} on {holder.get('host', '?')} has been writing to it since "
                f"{holder.get('since', '?')}",
                fix="wait for that run, stop it, or start a new run (each gets its own directory)",
                anchor="troubleshooting.md#the-run-directory-is-in-use",
                code="run_in_use",
            ) from exc

    def _holder(self) -> dict[str, Any]:
        try:
            holder = json.loads(os.pread(self._fd, 4096, 0) or b"{}")
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}

    def _sign(self) -> None:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with writing(self.path):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(holder).encode(), 0)

    def release(self) -> None:
        """Let go; idempotent. The file stays, empty, so that nobody can hold a lock on a removed inode."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
        self._drop()

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _alive(holder: dict[str, Any]) -> bool:
    """Whether the process that signed the file may still run; unknown on another host, so yes there."""
    if "pid" not in holder:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _forget_in_child() -> None:
    for lock in list(_held):
        lock._drop()


os.register_at_fork(after_in_child=_forget_in_child)
