"""The policy as the loops use it: one at a time, seen by whoever waits, and never for longer than `loop.train_timeout_s`.

    async with policy.turn():                                # who waits is seen to wait for whoever is before it
        result = await policy.call("the optimizer steps", parts.policy.train_step, rows)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

from posttrain.loop.waits import Waits, current
from posttrain.weights.deadline import in_thread

T = TypeVar("T")

KEY = "loop.train_timeout_s"

RANKS_FIRST_S = 30.0
"""How much longer than ranks in other processes, which have the same deadline: theirs says which rank is late, and where."""


class PolicyTurn:
    """timeout: `loop.train_timeout_s`.   ranks: whether the policy is in other processes, whose calls have that deadline too."""

    def __init__(self, waits: Waits, timeout: float, *, ranks: bool = False) -> None:
        self._waits, self._timeout, self._lock = waits, timeout + (RANKS_FIRST_S if ranks else 0.0), asyncio.Lock()
        self._line: list[str] = []  # who has the policy, and behind it who waits, in the order in which they will have it

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Nobody else uses the policy inside."""
        who, before = current(), self._line[-1:]
        self._line.append(who)
        try:
            with self._waits.named("its turn with the policy", before[0]) if before else nullcontext():
                await self._lock.acquire()
            try:
                yield
            finally:
                self._lock.release()
        finally:
            self._line.remove(who)

    async def call(self, name: str, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` in a thread. Raises WaitExpired, naming the key, when it takes too long; the thread is left behind."""
        return await self._waits.bounded(in_thread(work, *args), name=name, owner="policy", timeout=self._timeout, key=KEY)
