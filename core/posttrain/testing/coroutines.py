"""What a coroutine of a plug-in does to the event loop: how long it keeps it, and whether it can be cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def longest_pause(call: Callable[[], Any]) -> float:
    """Seconds during which nothing else ran on the event loop while `call` did."""
    pauses = [0.0]

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            pauses.append(time.perf_counter() - before)

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0.02)
    await call()
    await asyncio.sleep(0.02)
    ticker.cancel()
    return max(pauses)


async def cancelled(call: Callable[[], Any], turns: int) -> str:
    """What is wrong after the call was cancelled when it had `turns` turns on the event loop; "" for nothing."""
    task = asyncio.ensure_future(call())
    for _ in range(turns):
        await asyncio.sleep(0)
    if task.done():
        return ""
    task.cancel()
    _, pending = await asyncio.wait({task}, timeout=5.0)
    if pending:
        return "it goes on for more than 5 s. Let CancelledError through"
    if not task.cancelled() and task.exception() is None:
        return "it went on and gave a result. Let CancelledError through: catch Exception, not BaseException"
    for _ in range(3):
        await asyncio.sleep(0)
    left = [other for other in asyncio.all_tasks() if other is not asyncio.current_task()]
    for other in left:
        other.cancel()
    return f"it left {len(left)} task(s) running. End them in a finally, or use asyncio.TaskGroup" if left else ""
