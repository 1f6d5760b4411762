"""Waits that end: work in threads that nobody has to wait for, and awaitables with a deadline that holds.

`asyncio.to_thread` shares an executor whose threads are joined when the interpreter ends, and `asyncio.wait_for` waits for the
work that it cancels. Neither may be trusted with a pull from a peer that has stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


def start_thread(work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Run `work` in a daemon thread; whatever it raises ends up in the future. Cancelling the future does not stop the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    future.add_done_callback(_ask)

    def settle(result: Any, exc: BaseException | None) -> None:
        if future.done():
            return
        if exc is None:
            future.set_result(result)
        else:  # an exit or an interrupt raised inside ends this work, not the loop
            plain = isinstance(exc, Exception) and not isinstance(exc, StopIteration)
            future.set_exception(exc if plain else RuntimeError(f"{type(exc).__name__}: {exc}"))

    def run() -> None:
        result, failure = None, None
        try:
            result = work(*args)
        except BaseException as exc:
            failure = exc
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is waiting any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=f"posttrain-{getattr(work, '__name__', 'work')}", daemon=True).start()
    return future


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Await `work(*args)` in a daemon thread; a cancellation ends the wait at once and leaves the thread behind."""
    return await start_thread(work, *args)


async def within(work: Awaitable[T], timeout: float) -> T:
    """The result of `work`. Raises TimeoutError after `timeout` seconds; work that ignores its cancellation is left behind."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        abandon(task)
        raise
    if not done:
        abandon(task)
        raise TimeoutError
    return task.result()


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancel, and never ask again."""
    task.cancel()
    task.add_done_callback(_ask)


def _ask(future: asyncio.Future[Any]) -> None:
    # an exception that nobody asked for would be logged; a late failure is nobody's
    if not future.cancelled():
        future.exception()
