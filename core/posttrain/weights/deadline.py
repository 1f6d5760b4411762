"""Waits that end: work in threads that nobody has to wait for, and awaitables with a deadline that holds.

`asyncio.to_thread` shares an executor whose threads are joined when the interpreter ends, and `asyncio.wait_for` waits for the
work that it cancels. Neither may be trusted with a pull from a peer that has stopped.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

PROGRESS_S = 0.05
"""How often `moving` looks."""

END_S = 5.0
"""For how long the end of the interpreter waits for threads that work."""

_working: set[threading.Thread] = set()


def start_thread(work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Run `work` in a daemon thread; whatever it raises ends up in the future. Cancelling the future does not stop the thread.

    A loop of simulated time brings its own `start_thread`, which is asked instead.
    """
    loop = asyncio.get_running_loop()
    if (simulated := getattr(loop, "start_thread", None)) is not None:
        return simulated(work, *args)  # type: ignore[no-any-return]
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
        _working.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=f"posttrain-{getattr(work, '__name__', 'work')}", daemon=True)
    _working.add(thread)
    thread.start()
    return future


def still_working(timeout: float = 0.0) -> list[threading.Thread]:
    """The threads that are at work, after at most `timeout` seconds for them to end.

    A daemon thread that comes back from torch while the interpreter is ending aborts the process (the end of a thread may not
    unwind C++), so the end waits for them a little; whoever must have an exit code of its own leaves with `os._exit` after that.
    """
    end = time.monotonic() + timeout
    for thread in list(_working):
        thread.join(max(0.0, end - time.monotonic()))
    return [thread for thread in list(_working) if thread.is_alive()]


@atexit.register
def at_exit() -> None:
    still_working(END_S)


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


async def moving(work: Awaitable[T], at: Callable[[], int | None]) -> AsyncIterator[int | T]:
    """Where `work` is, whenever that has changed, and its result at last, if it has one: for whoever is far away, to know where
    it died. Raises what it raised; to close the iterator cancels it."""
    task, last = asyncio.ensure_future(work), None
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=PROGRESS_S)
            if (now := at()) is not None and now != last:
                last = now
                yield now
        if (result := await task) is not None:
            yield result
    finally:
        task.cancel()


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancel, and never ask again."""
    task.cancel()
    quiet(task)


def quiet(task: asyncio.Future[Any]) -> None:
    """What goes wrong with it is told elsewhere, or nobody's: it is not logged when nobody asks."""
    task.add_done_callback(_ask)


def _ask(future: asyncio.Future[Any]) -> None:
    # an exception that nobody asked for would be logged; a late failure is nobody's
    if not future.cancelled():
        future.exception()
