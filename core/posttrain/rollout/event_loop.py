"""Run a coroutine to its end from ordinary code, also where an event loop already runs, as in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or what it raises. Ctrl-C cancels it, waits until it has closed everything, and is raised again."""
    return _in_thread(work) if _inside_a_loop() else asyncio.run(work)


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(work: Coroutine[Any, Any, T]) -> T:
    outcome: list[T] = []
    failure: list[BaseException] = []
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def main() -> T:
        task = asyncio.ensure_future(work)
        started.append((asyncio.get_running_loop(), task))
        return await task

    def target() -> None:
        try:
            outcome.append(asyncio.run(main()))
        except BaseException as exc:
            failure.append(exc)
        finally:
            done.set()

    done = threading.Event()  # not thread.join: one that Ctrl-C interrupts takes the thread for ended
    thread = threading.Thread(target=target, name="posttrain")
    thread.start()
    try:
        with _interruptible():
            done.wait()
    except BaseException:
        while not done.is_set() and not started:
            time.sleep(0.01)
        for loop, task in started:
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                loop.call_soon_threadsafe(task.cancel)
        done.wait()
        thread.join()
        raise
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here at once: `asyncio.run` further out would only cancel its task, which waits for us."""
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
