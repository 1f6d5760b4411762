"""A watch on the event loop from a thread: while something blocks the loop, no deadline in it can pass.

    with loop_watched(waits, limit, tell):
        …

When the loop does not turn for `BLOCKED_S` although a deadline has passed, `tell` hears of it, and the error is raised in the
loop's thread, out of whatever blocks it. Code that does not come back to Python ignores that; in the main thread the process then
ends with the error's exit code. What the run had started ends with it, as after a SIGKILL.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from posttrain.errors import PosttrainError, WaitExpired
from posttrain.loop.wait_graph import render
from posttrain.loop.waits import ANCHOR, Waits
from posttrain.placement import stacks

PERIOD_S, BLOCKED_S, END_S = 1.0, 5.0, 5.0
"""How often the loop is asked; how long it may be blocked past a deadline; how long the error may take to end it."""


@contextmanager
def loop_watched(waits: Waits, limit: float, tell: Callable[[WaitExpired], object]) -> Iterator[None]:
    """Watch the running loop while the block runs. limit: seconds after which something must have moved."""
    watch = _LoopWatch(waits, limit, tell)
    watch.thread.start()
    try:
        yield
    finally:
        watch.stop.set()


class _LoopWatch:
    def __init__(self, waits: Waits, limit: float, tell: Callable[[WaitExpired], object]) -> None:
        self.waits, self.limit, self.tell = waits, limit, tell
        self.loop, self.owner, self.stop = asyncio.get_running_loop(), threading.current_thread(), threading.Event()
        self.thread = threading.Thread(target=self._run, name="posttrain-loop-watch", daemon=True)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            while not self.stop.wait(PERIOD_S):
                turned, asked = threading.Event(), self.loop.time()
                self.loop.call_soon_threadsafe(turned.set)
                while not turned.wait(PERIOD_S) and not self.stop.is_set():
                    now = self.loop.time()
                    if now - asked >= BLOCKED_S and self._overdue(now):
                        return self._end(blocked(self.waits, now, self._where()), turned)

    def _overdue(self, now: float) -> bool:
        return now - self.waits.changed >= self.limit or any(wait.over(now) for wait in list(self.waits.open))

    def _where(self) -> str:
        return next((s.line() for s in stacks.threads() if s.name == f"thread {self.owner.name}"), "")

    def _end(self, failure: WaitExpired, turned: threading.Event) -> None:
        self.tell(failure)
        if self.stop.is_set() or turned.is_set():  # it has come back by itself; its own deadlines act again
            return
        kind = ctypes.py_object(_raised(failure))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.owner.ident or 0), kind)
        if not turned.wait(END_S) and not self.stop.is_set() and self.owner is threading.main_thread():
            print(f"error: {failure}\n  docs:  docs/{failure.anchor}", file=sys.stderr, flush=True)
            os._exit(failure.exit_code)


def blocked(waits: Waits, now: float, where: str) -> WaitExpired:
    """The error of a loop that does not turn. where: the stack of its thread, in one line."""
    over = min((wait for wait in list(waits.open) if wait.over(now)), key=lambda wait: wait.since + wait.limit, default=None)
    what = f"waited {over.limit:g} s for {over.what}" if over else f"nothing has moved for {now - waits.changed:.0f} s"
    return WaitExpired(
        f"{what}, and the event loop is blocked",
        where=f"owner: {over.owner}" if over else "",
        cause="\n    ".join([f"what blocks it: {where}", *render(list(waits.open), now).split("\n")]),
        fix="code that blocks belongs in asyncio.to_thread, or in another process",
        anchor=ANCHOR,
    )


def _raised(failure: WaitExpired) -> type[WaitExpired]:
    """A class whose instance is as `failure`: only a class can be raised in another thread."""

    def init(self: WaitExpired) -> None:
        options = {key: getattr(failure, key) for key in ("where", "cause", "fix", "anchor")}
        PosttrainError.__init__(self, failure.message, **options)
        self.__dict__.update(failure.__dict__)

    return type("WaitExpired", (WaitExpired,), {"__init__": init})
