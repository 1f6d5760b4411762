"""The processes that a process has started, as /proc shows them."""

from __future__ import annotations

import contextlib
import os
import signal


def below(pid: int) -> list[int]:
    """All processes below `pid`, without itself."""
    found, todo = [], [pid]
    while todo:
        children = _children(todo.pop())
        found += children
        todo += children
    return found


def resident(pids: list[int]) -> int:
    """Bytes of memory that they have together, without files; what they share counts for each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "RssShmem:")))
    return total * 1024


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found
