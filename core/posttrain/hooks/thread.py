"""One thread of a hook: its calls run one after the other, away from the event loop, each with a deadline.

A thread that is stuck is left behind: it is a daemon, so it does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias

Outcome: TypeAlias = "tuple[Any, BaseException | None]"
_Job: TypeAlias = "tuple[Future[Outcome], Callable[..., Any], Mapping[str, Any]]"


class HookThread:
    """Runs functions in a thread that starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._turn = asyncio.Lock()

    async def run(self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float) -> Outcome:
        """Its result and None, or None and what it raised. Raises TimeoutError when it has not come back in `timeout` seconds."""
        async with self._turn:  # so that a deadline does not count the calls before it
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            future: Future[Outcome] = Future()
            self._jobs.put((future, function, arguments))
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)

    def stop(self) -> None:
        """End the thread after the calls that it has; does not wait."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, arguments = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                outcome: Outcome = (function(**arguments), None)
            except BaseException as exc:  # a SystemExit of a hook, too, is the hook's failure
                outcome = (None, exc)
            future.set_result(outcome)
            del future, function, arguments, outcome
