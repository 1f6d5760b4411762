"""Named waits. Every wait of the loop has a name, an owner and a deadline; when one expires the run stops and says who waits.

completions = await waits.bounded(engine.run(requests), name="completions of step 3", owner="rollout engine hf", timeout=600)
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
import traceback
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from posttrain.errors import WaitExpired

T = TypeVar("T")


@dataclass(slots=True)
class Waits:
    """The open waits of one controller: name → (owner, since, deadline)."""

    open: dict[str, tuple[str, float, float]] = field(default_factory=dict)

    async def bounded(self, awaitable: Awaitable[T], *, name: str, owner: str, timeout: float, key: str = "") -> T:
        """Await with a deadline in seconds. Raises WaitExpired naming the owner, the other waits and the key to change."""
        try:
            with self.named(name, owner, timeout):
                return await asyncio.wait_for(awaitable, timeout)
        except TimeoutError as exc:
            raise WaitExpired(
                f"waited {timeout:g} s for {name}",
                where=f"owner: {owner}",
                cause=self.graph(),
                fix=f"see the owner's log under logs/; raise {key or 'the deadline'} if it is only slow",
            ) from exc

    @contextmanager
    def named(self, name: str, owner: str, timeout: float = math.inf) -> Iterator[None]:
        """Show a wait in the graph while the block runs; its deadline is somebody else's (the owner's own waits have one)."""
        self.open[name] = (owner, time.monotonic(), timeout)
        try:
            yield
        finally:
            self.open.pop(name, None)

    def ranked(self) -> list[tuple[str, tuple[str, float, float]]]:
        """The open waits, those with a deadline first: they are what the others wait for."""
        return sorted(self.open.items(), key=lambda item: item[1][2])

    def graph(self) -> str:
        """Who waits for whom, one line each, with the stacks of this process's threads."""
        now = time.monotonic()
        lines = [f"{name} ← {owner}, {now - since:.1f} of {limit:g} s" for name, (owner, since, limit) in self.ranked()]
        for ident, frame in sys._current_frames().items():
            last = traceback.extract_stack(frame)[-1]
            lines.append(f"thread {ident}: {last.name} ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})")
        return "; ".join(lines)


async def run_together(*loops: Coroutine[Any, Any, None]) -> None:
    """Run all; the first exception cancels the rest and is raised itself, not inside a group."""
    tasks = [asyncio.create_task(loop, name=getattr(loop, "__qualname__", "loop")) for loop in loops]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((t for t in done if not t.cancelled() and t.exception()), None)
        if failed is not None:
            raise failed.exception()  # type: ignore[misc]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def guarded(work: Coroutine[Any, Any, T], guard: Coroutine[Any, Any, None]) -> T:
    """The result of `work`; what `guard` raises meanwhile cancels it and is raised instead."""
    doing, guarding = asyncio.create_task(work), asyncio.create_task(guard)
    try:
        await asyncio.wait({doing, guarding}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            guarding.result()
        return await doing
    finally:
        for task in (doing, guarding):
            task.cancel()
        await asyncio.gather(doing, guarding, return_exceptions=True)
