"""Named waits. Every wait of the loop says who waits, for what, on whom and how long at most; one that expires ends the run.

    completions = await waits.bounded(engine.run(requests), name="completions of step 3", owner="rollout engine hf", timeout=600)

`wait_graph` shows them, `hang` adds the stacks. Time is the event loop's, so that a simulated clock drives the deadlines.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from posttrain.errors import RunAborted, WaitExpired
from posttrain.loop.wait_graph import Wait, ends, render
from posttrain.weights.deadline import abandon

T = TypeVar("T")

LOOPS = ("prompts", "rollouts", "batches", "train")
ANCHOR = "troubleshooting.md#waited-n-s-for-name"
SETTLE_S = 5.0
"""How long work may take to end once it is cancelled; what ignores that is left behind."""


@dataclass(slots=True, eq=False)
class Waits:
    """The open waits of one controller.

    changed   when one was last opened or ended: the last sign of progress
    examine   takes the stacks of all roles, while whoever is late is still where it hangs; it must not raise
    """

    open: dict[Wait, None] = field(default_factory=dict)
    changed: float = 0.0
    examine: Callable[[], Awaitable[str]] | None = None

    async def bounded(self, awaitable: Awaitable[T], *, name: str, owner: str, timeout: float, key: str = "", who: str = "") -> T:
        """Await with a deadline in seconds. Raises WaitExpired with the owner, the graph and the key to change."""
        who = who or current()
        with self.named(name, owner, timeout, who=who):
            work = awaitable if asyncio.isfuture(awaitable) else asyncio.create_task(_awaited(awaitable), name=who)
            try:
                done, _ = await asyncio.wait({work}, timeout=timeout)
                if not done:
                    slow = f"raise {key} if it is only slow; " if key else ""
                    raise await self.expired(f"waited {timeout:g} s for {name}", owner=owner, fix=f"{slow}see its log in logs/")
            except BaseException:
                abandon(work)
                await asyncio.wait({work}, timeout=SETTLE_S)
                raise
            return work.result()

    @contextmanager
    def named(self, name: str, owner: str, timeout: float = math.inf, *, who: str = "") -> Iterator[None]:
        """Show a wait in the graph while the block runs; its deadline is kept elsewhere. who: else the task's name."""
        loop = asyncio.get_running_loop()
        self.changed = loop.time()
        wait = Wait(who or current(), name, owner, self.changed, timeout)
        self.open[wait] = None
        try:
            yield
        finally:
            self.open.pop(wait, None)
            self.changed = loop.time()

    def graph(self) -> str:
        """Who waits for whom now."""
        return render(list(self.open), asyncio.get_running_loop().time())

    async def expired(self, message: str, *, owner: str = "", fix: str) -> WaitExpired:
        """The error of a deadline that has passed: the graph as its cause, the stacks of all roles as `examined`."""
        blamed = ", ".join(ends(list(self.open), owner or None))
        summary = f"the chain of waits ends at {blamed}" if blamed else "the waits form a ring"
        failure = WaitExpired(
            message,
            where=f"owner: {owner}" if owner else "",
            cause="\n    ".join([summary, *self.graph().split("\n")]),
            fix=fix,
            anchor=ANCHOR,
        )
        if self.examine is not None:
            failure.examined = await self.examine()  # type: ignore[attr-defined]  # for the report, which `hang` writes
        return failure


def loop_name(method: str) -> str:
    """What the waits call the task of a loop: `Controller._prompt_loop` is the prompts loop."""
    word = method.rpartition(".")[2].strip("_").removesuffix("_loop")
    return next((f"{name} loop" for name in LOOPS if name.startswith(word)), method)


async def run_together(*loops: Coroutine[Any, Any, None]) -> None:
    """Run all; the first exception cancels the rest and is raised itself, not inside a group.

    Raises RunAborted for one that ends as cancelled though nobody cancelled it: what it had to do is not done.
    """
    tasks = [asyncio.create_task(loop, name=loop_name(getattr(loop, "__qualname__", "loop"))) for loop in loops]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.index):
                if task.cancelled():
                    raise RunAborted(
                        f"the {task.get_name()} was cancelled", cause="something that it waited for was cancelled by its owner",
                        fix="this is a bug in posttrain or in a plug-in that the loop calls: report it", code="cancelled",
                    )  # fmt: skip
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def guarded(work: Coroutine[Any, Any, T], guard: Coroutine[Any, Any, None]) -> T:
    """The result of `work`; what `guard` raises meanwhile cancels it and is raised instead."""
    doing, guarding = asyncio.create_task(work, name="controller"), asyncio.create_task(guard, name="watch")
    try:
        await asyncio.wait({doing, guarding}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            guarding.result()
        return await doing
    finally:
        for task in (doing, guarding):
            task.cancel()
        await asyncio.gather(doing, guarding, return_exceptions=True)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def current() -> str:
    """The name of the running task."""
    task = asyncio.current_task()
    return task.get_name() if task else "nobody"
