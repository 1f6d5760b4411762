"""Where processes are: the threads and tasks of this one, and what others write of themselves when they are asked by a signal.

    stacks.threads(), stacks.tasks()            # of this process
    stacks.answer()                             # in another process, once: from then on it can be asked
    await stacks.ask([pid, …], timeout=2.0)     # by its owner, on the same machine

A process that is asked needs no Python to answer: faulthandler writes from the signal handler, whoever holds the interpreter
and in whatever native call. It writes to a file in memory that is found by its name: a process without one is never signalled.
Only who gives a process up asks it: faulthandler reads the frames of threads that run on meanwhile, which ends it once in
some hundred times where they are busy with Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

FILE = "posttrain-stacks"
POLL_S, STILL = 0.02, 3
"""What has not grown in so many looks is complete."""
FRAMES = 30
STOPPED = "TtZ"
STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "in a system call that cannot be interrupted", "Z": "ended"}
_FRAME, _AWAITED = ("cr_frame", "gi_frame", "ag_frame"), ("cr_await", "gi_yieldfrom", "ag_await")


@dataclass(frozen=True, slots=True)
class Stack:
    """name: of a thread or a task.   frames: (function, file, line), where it is now first."""

    name: str
    frames: tuple[tuple[str, str, int], ...]

    def line(self, count: int = 5) -> str:
        """In one line, the deepest frames only."""
        shown = (f"{function} ({file.rsplit('/', 1)[-1]}:{line})" for function, file, line in self.frames[:count])
        return f"{self.name}: {' < '.join(shown)}"

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"    {function}  {file}:{line}" for function, file, line in self.frames)])


def threads() -> list[Stack]:
    """All Python threads of this process; the caller's own ends here."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        summary = traceback.extract_stack(frame)[: -FRAMES - 1 : -1]
        found.append(Stack(f"thread {names.get(ident, ident)}", tuple((f.name, f.filename, f.lineno or 0) for f in summary)))
    return found


def tasks(loop: asyncio.AbstractEventLoop | None = None) -> list[Stack]:
    """All tasks of the event loop (the running one), each down to where it is suspended."""
    found = []
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        frames = [(f.f_code.co_name, f.f_code.co_filename, f.f_lineno) for f in _suspended(task.get_coro())]
        found.append(Stack(f"task {task.get_name()}", tuple(reversed(frames))[:FRAMES]))
    return found


def _suspended(work: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of what it awaits, from the outside in; `Task.get_stack` knows the first one only."""
    for _ in range(100):
        frame = next((frame for name in _FRAME if (frame := getattr(work, name, None)) is not None), None)
        if frame is not None:
            yield frame
        inner = next((one for name in _AWAITED if (one := getattr(work, name, None)) is not None), None)
        if inner is None and frame is None:  # a step of an asynchronous generator, a compiled coroutine
            inner = next((one for one in gc.get_referents(work) if any(hasattr(one, name) for name in _FRAME)), None)
        if inner is None:
            return
        work = inner


def answer() -> None:
    """From here on this process can be asked for its stacks. Linux; does nothing elsewhere."""
    if not hasattr(os, "memfd_create"):
        return
    descriptor = os.memfd_create(FILE)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True, chain=False)


async def ask(pids: Sequence[int], timeout: float) -> dict[int, str]:
    """What these processes of this machine write of themselves; of one that cannot or does not answer in time, why.

    One that is stopped is not signalled: it would answer whoever lets it go on, while all its threads run.
    """
    begun = {pid: (file, _size(file)) for pid in pids if _letter(pid) not in STOPPED and (file := _file_of(pid)) is not None}
    for pid in begun:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    deadline, sizes = time.monotonic() + timeout, list[list[int]]()
    while time.monotonic() < deadline and not (sizes[STILL:] and all(sizes[-1]) and sizes[-1] == sizes[-STILL]):
        await asyncio.sleep(POLL_S)
        sizes.append([_size(file) - before for file, before in begun.values()])
    return {pid: (_text(*begun[pid]) if pid in begun else "") or f"silent: {_state(pid)}" for pid in pids}


def _file_of(pid: int) -> Path | None:
    """The file that a process writes its stacks to."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith(f"/memfd:{FILE}"):
                    return link
    return None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _text(file: Path, begin: int) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(begin)
            return stream.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _state(pid: int) -> str:
    letter = _letter(pid)
    if not letter:
        return "it has ended"
    return f"its process is {STATES[letter]}" if letter in STATES else "it does not answer the signal"


def _letter(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""
