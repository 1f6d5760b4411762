"""An event loop whose clock jumps to whatever comes next, and threads that take virtual time: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


class _Jumping(selectors.DefaultSelector):
    """Never waits: nothing outside of the loop can happen."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits for something that will never come"
        self.loop.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now`: virtual seconds since it began."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


@contextlib.contextmanager
def virtual_threads(takes: Callable[[str], float]) -> Iterator[None]:
    """Work of the weight plane's threads runs on the loop, `takes(name)` virtual seconds after it was started."""

    def start_thread(work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

        def finish() -> None:
            try:
                result, failure = work(*args), None
            except Exception as exc:
                result, failure = None, exc
            if not future.done():
                future.set_result(result) if failure is None else future.set_exception(failure)

        loop.call_later(takes(work.__name__), finish)
        return future

    with contextlib.ExitStack() as stack:
        for module in ("deadline", "receiver", "publisher"):
            stack.enter_context(mock.patch(f"posttrain.weights.{module}.start_thread", start_thread))
        yield
