"""An event loop whose clock jumps to whatever comes next, and threads that take virtual time: hours pass in milliseconds.

    loop = VirtualLoop(seed=7, takes=lambda name: 0.1)
    loop.run_until_complete(work)

With a seed, what is ready runs in an order drawn from it; without, in asyncio's. `weights.deadline.start_thread` asks the running
loop for `start_thread`: the one port through which threads come in, and the one place where they are replaced.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from heapq import heappop, heappush
from typing import Any


class Stuck(AssertionError):
    """Everything waits for something that will never come, or nothing ever ends."""


class Killed(KeyboardInterrupt):
    """The process dies here: nothing below catches it, and no cleaning up is done."""


class _Handle:
    """A call that is due: asyncio's handle without what debugging asks for."""

    __slots__ = ("args", "callback", "context", "dead")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context | None) -> None:
        self.callback, self.args, self.dead = callback, args, False
        self.context = copy_context() if context is None else context

    def cancel(self) -> None:
        self.dead, self.args = True, ()

    def cancelled(self) -> bool:
        return self.dead


class VirtualLoop(asyncio.BaseEventLoop):
    """`now`: virtual seconds since it began.   `turns`: how often it has run what was ready.

    Its queues are its own, which are faster than asyncio's: no file, no socket and no thread can wake it. It knows its tasks in
    the order in which they were made: asyncio has a set of them, whose order changes with their addresses.

    takes: virtual seconds of a thread, by the name of its function   kill_at: the turn in which the process dies
    most_turns, most_seconds: raise Stuck beyond
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        takes: Callable[[str], float] = lambda name: 0.01,
        kill_at: int | None = None,
        most_turns: int | None = None,
        most_seconds: float | None = None,
    ) -> None:
        self.now = 0.0
        self.turns = 0
        self.dead = False
        self.takes = takes
        self._shuffle = random.Random(seed).random if seed is not None else None
        self._kill_at: float = math.inf if kill_at is None else kill_at
        self._most_turns: float = most_turns or math.inf
        self._most_seconds: float = most_seconds or math.inf
        self._due: deque[_Handle] = deque()
        self._later: list[tuple[float, int, _Handle]] = []
        self._timers = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._stopping: bool  # asyncio's
        super().__init__()

    get_debug = staticmethod(bool)  # type: ignore[assignment]  # False, at no cost: every future asks

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        self._due.append(handle := _Handle(callback, args, context))
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # which asynchronous generators that nobody has any more come through

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        self._timers += 1  # of two at the same time the first comes first
        heappush(self._later, (when, self._timers, handle := _Handle(callback, args, context)))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def start_thread(self, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """`work(*args)` happens at once, when its virtual time is over."""
        future: asyncio.Future[Any] = self.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

        def finish() -> None:
            if self.dead:
                return
            try:
                result, failure = work(*args), None
            except Exception as exc:
                result, failure = None, exc
            if not future.done():
                future.set_result(result) if failure is None else future.set_exception(failure)

        self.call_later(self.takes(getattr(work, "__name__", "work")), finish)
        return future

    def settle(self, seconds: float) -> list[asyncio.Task[Any]]:
        """Let what was cancelled and left behind end. Returns the tasks that have not."""
        self._kill_at = math.inf
        if tasks := self._unfinished():
            self.run_until_complete(asyncio.wait(tasks, timeout=seconds))
        return [task for task in tasks if not task.done()]

    def bury(self) -> None:
        """End what a dead process left behind, so that none of it runs later."""
        self.dead, self._kill_at, self._most_turns, self._most_seconds = True, math.inf, self.turns + 10_000, math.inf
        self.set_exception_handler(lambda loop, context: None)
        tasks = self._unfinished()
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                self.run_until_complete(asyncio.wait(tasks, timeout=1e6))
        except Stuck:
            pass
        finally:
            for task in tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            self.close()

    def create_task(self, *args: Any, **options: Any) -> asyncio.Task[Any]:
        self._tasks.append(task := super().create_task(*args, **options))
        return task

    def _unfinished(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks if not task.done()]

    def close(self) -> None:
        super().close()
        self._tasks.clear()
        self._due.clear()
        self._later.clear()

    def _run_once(self) -> None:
        """Turn after turn until it is to stop, where asyncio's own runs one."""
        due, later, shuffle, stopping = self._due, self._later, self._shuffle, False
        while not stopping:
            self.turns += 1
            if self.turns >= self._kill_at:
                raise Killed
            if self.turns > self._most_turns:
                raise Stuck(f"no end after {self._most_turns} turns of the loop")
            if self.now > self._most_seconds:
                raise Stuck(f"no end after {self._most_seconds:g} virtual seconds")
            if shuffle is not None and len(due) > 1:
                mixed = sorted(due, key=lambda _: shuffle())
                due.clear()
                due.extend(mixed)
            while later and later[0][2].dead:
                heappop(later)
            if not due and not self._stopping:
                if not later:
                    raise Stuck("everything waits for something that will never come")
                self.now = max(self.now, later[0][0])
            while later and later[0][0] <= self.now:
                due.append(heappop(later)[2])
            for _ in range(len(due)):  # one by one: what dies here leaves the others for `bury`
                handle = due.popleft()
                if handle.dead:
                    continue
                try:
                    handle.context.run(handle.callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as exc:
                    self.call_exception_handler({"message": f"{handle.callback} failed", "exception": exc})
            stopping = self._stopping
