"""An event loop whose clock jumps to whatever comes next, and threads that take virtual time: hours pass in milliseconds.

    loop = VirtualLoop(seed=7, takes=lambda name: 0.1)
    loop.run_until_complete(work)

With a seed, what is ready runs in an order drawn from it; without, in asyncio's. `weights.deadline.start_thread` asks the running
loop for `start_thread`: the one port through which threads come in, and the one place where they are replaced.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Callable
from typing import Any


class Stuck(AssertionError):
    """Everything waits for something that will never come, or nothing ever ends."""


class Killed(KeyboardInterrupt):
    """The process dies here: nothing below catches it, and no cleaning up is done."""


class _Jumping(selectors.DefaultSelector):
    """Never waits: nothing outside of the loop can happen."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Stuck("everything waits for something that will never come")
        self.loop.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now`: virtual seconds since it began.   `turns`: how often it has run what was ready.

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
        self._kill_at, self._most_turns, self._most_seconds = kill_at, most_turns, most_seconds
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

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
        self._kill_at = None
        if tasks := asyncio.all_tasks(self):
            self.run_until_complete(asyncio.wait(tasks, timeout=seconds))
        return [task for task in tasks if not task.done()]

    def bury(self) -> None:
        """End what a dead process left behind, so that none of it runs later."""
        self.dead, self._kill_at, self._most_turns, self._most_seconds = True, None, self.turns + 10_000, None
        self.set_exception_handler(lambda loop, context: None)
        tasks = asyncio.all_tasks(self)
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

    def _run_once(self) -> None:
        self.turns += 1
        if self._kill_at is not None and self.turns >= self._kill_at:
            raise Killed
        if self._most_turns is not None and self.turns > self._most_turns:
            raise Stuck(f"no end after {self._most_turns} turns of the loop")
        if self._most_seconds is not None and self.now > self._most_seconds:
            raise Stuck(f"no end after {self._most_seconds:g} virtual seconds")
        ready: deque[Any] = self._ready  # type: ignore[attr-defined]
        if self._shuffle is not None and len(ready) > 1:
            mixed = sorted(ready, key=lambda _: self._shuffle())  # type: ignore[misc]
            ready.clear()
            ready.extend(mixed)
        super()._run_once()  # type: ignore[misc]
