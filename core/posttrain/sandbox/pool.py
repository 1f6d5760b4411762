"""A pool of sandboxes on one event loop: made ahead, bounded in number, used again, retired by age, and never lost.

    pool = SandboxPool(LocalProvider(), size=2, most=8)
    await pool.start()                        # raises what keeps every sandbox from being made
    async with pool.lease() as sandbox:       # waits for its turn; first come, first served
        ran = await sandbox.run(["python3", "-c", "print(1)"])
    await pool.close()

Sandboxes are made by tasks of the pool, never by who waits, and given back by a plain function, which cannot be cancelled: so
however a lease ends (a return, an exception, a cancellation, the death of its sandbox), its place is free again. A sandbox is
used again, with a fresh work folder, after a lease that ended well; after any other it is closed. `most` counts every sandbox
that may exist, also those that are being made or closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from posttrain.errors import SandboxError
from posttrain.sandbox.provider import Provider, Sandbox

_log = logging.getLogger("posttrain.sandbox")

TOO_OLD_TO_TAKE, TOO_OLD_TO_KEEP = 0.9, 0.8
"""Shares of the lifetime, after which a sandbox is not leased, or not kept for the next lease."""
PATIENCE_S = 10.0
"""After a sandbox could not be made, and nobody waits for one, the next try is so much later."""


@dataclass(slots=True, eq=False)
class _Made:
    """A sandbox and when it was made, by the clock of the loop."""

    sandbox: Sandbox
    born: float


class SandboxPool:
    """Leases of sandboxes of `provider`.

    size        so many exist at least, made before they are asked for
    most        so many exist at a time
    lifetime_s  from the making of a sandbox to its end; None: the provider's
    create_s    a sandbox that is not there after so many seconds is given up
    close_s     for how long `close` waits, and any closing of a sandbox
    """

    def __init__(
        self, provider: Provider, *, size: int = 1, most: int = 4, lifetime_s: float | None = None, create_s: float = 120.0,
        close_s: float = 30.0,
    ) -> None:  # fmt: skip
        if not 0 <= size <= most or most < 1:
            raise ValueError(f"size={size} and most={most}: at least one, and no more ready than there may be")
        self.provider, self.size, self.most = provider, size, most
        self._lifetime = provider.lifetime_s if lifetime_s is None else lifetime_s
        self._create_s, self._close_s = create_s, close_s
        self._ready: deque[_Made] = deque()
        self._leased: set[_Made] = set()
        self._waiting: deque[asyncio.Future[_Made]] = deque()
        self._making = self._ending = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewals: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def count(self) -> int:
        """Sandboxes that may exist now."""
        return len(self._ready) + len(self._leased) + self._making + self._ending

    @property
    def closed(self) -> bool:
        return self._closed

    async def start(self) -> None:
        """Make the first sandbox, and begin to make the others ready. Raises ConfigError or SandboxError when it cannot be."""
        try:
            async with self.lease():
                pass
        except BaseException:
            await self.close()
            raise

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """A sandbox of one's own, with a fresh work folder. Raises what kept it from being made, SandboxError after `close`."""
        made = await self._take()
        well = False
        try:
            yield made.sandbox
            well = True
        finally:
            self._give_back(made, well)

    async def close(self) -> None:
        """End all sandboxes, also those in use, and the provider. Whoever waits gets a SandboxError. Idempotent."""
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        while self._waiting:
            _fail(self._waiting.popleft(), SandboxError("the pool of sandboxes has been closed"))
        for renewal in self._renewals:
            renewal.cancel()
        for made in (*self._ready, *self._leased):
            self._end(made)
        end = asyncio.get_running_loop().time() + self._close_s
        while self._tasks and (left := end - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._tasks, timeout=left)  # what was being made is closed by a task of its own
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        await self.provider.close()

    # --- leases: nothing here waits, but for the future ----------------------------------------------------------------

    async def _take(self) -> _Made:
        if self._closed:
            raise SandboxError("the pool of sandboxes has been closed")
        place: asyncio.Future[_Made] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._settle()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._give_back(place.result(), True)  # it came in the same moment
            elif place in self._waiting:
                self._waiting.remove(place)
            raise

    def _give_back(self, made: _Made, well: bool) -> None:
        if made not in self._leased:
            return  # the pool was closed, and has ended it
        if well and made.sandbox.alive and not self._closed and self._age(made) < TOO_OLD_TO_KEEP:
            self._leased.remove(made)
            self._making += 1
            task = self._do(self._renew(made))
            self._renewals.add(task)
            task.add_done_callback(lambda done: self._renewed(made, done))
        else:
            self._end(made)
        self._settle()

    def _settle(self) -> None:
        """Give what is ready to who waits, and have made what is lacking."""
        while self._ready and self._waiting:
            made = self._ready.popleft()
            if not made.sandbox.alive or self._age(made) >= TOO_OLD_TO_TAKE:
                self._end(made)
            elif not (place := self._waiting.popleft()).done():
                self._leased.add(made)
                place.set_result(made)
            else:
                self._ready.appendleft(made)
        if self._closed:
            return
        lacking = max(len(self._waiting) - self._making, 0 if self._pause else self.size - self.count)
        for _ in range(min(lacking, self.most - self.count)):
            self._making += 1
            self._do(self._make())

    def _age(self, made: _Made) -> float:
        """Share of its life that is over."""
        return 0.0 if self._lifetime is None else (asyncio.get_running_loop().time() - made.born) / self._lifetime

    # --- tasks of the pool: each leaves `count` as it must be, however it ends -------------------------------------------

    async def _make(self) -> None:
        born = asyncio.get_running_loop().time()
        creation = asyncio.ensure_future(self.provider.create())
        try:
            await asyncio.wait({creation}, timeout=self._create_s)
            if not creation.done():
                raise SandboxError("a sandbox was not made in time", cause=f"not within {self._create_s:g} s")
            if creation.cancelled():
                raise SandboxError("the making of a sandbox was cancelled")
            made: _Made | Exception = _Made(creation.result(), born)
        except Exception as exc:
            made = exc
        finally:
            self._making -= 1
            if not creation.done():
                creation.cancel()
                creation.add_done_callback(self._late)
        self._arrived(made)

    async def _renew(self, made: _Made) -> None:
        """Make the work folder fresh for the next lease."""
        async with asyncio.timeout(self._create_s):
            await made.sandbox.clear()

    def _renewed(self, made: _Made, task: asyncio.Task[None]) -> None:
        """However that ended, also when it was cancelled before it began."""
        self._renewals.discard(task)
        self._making -= 1
        if not task.cancelled() and (exc := task.exception()) is None:
            self._arrived(made)
            return
        if not task.cancelled():
            _log.warning("a sandbox is closed, because it could not be made fresh: %s", str(exc) or type(exc).__name__)
        self._end(made)
        self._settle()

    def _arrived(self, made: _Made | Exception) -> None:
        """Ready, or who waits longest is told why not."""
        if isinstance(made, _Made):
            self._end(made) if self._closed else self._ready.append(made)
        elif self._waiting:
            _fail(self._waiting.popleft(), made)
        elif not self._closed and self._pause is None:
            _log.warning("a sandbox could not be made: %s", made)
            self._pause = asyncio.get_running_loop().call_later(PATIENCE_S, self._try_again)
        self._settle()

    def _try_again(self) -> None:
        self._pause = None
        self._settle()

    def _late(self, creation: asyncio.Future[Sandbox]) -> None:
        """A sandbox that came although it had been given up."""
        if not creation.cancelled() and creation.exception() is None:
            self._end(_Made(creation.result(), 0.0))

    def _end(self, made: _Made) -> None:
        """Close a sandbox in the background; until it is closed it counts."""
        if made in self._ready:
            self._ready.remove(made)
        self._leased.discard(made)
        self._ending += 1
        self._do(self._close(made))

    async def _close(self, made: _Made) -> None:
        try:
            async with asyncio.timeout(self._close_s):
                await made.sandbox.close()
        except Exception as exc:
            _log.warning("a sandbox could not be closed: %s: %s", type(exc).__name__, exc)
        finally:
            self._ending -= 1
        self._settle()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _fail(place: asyncio.Future[_Made], exc: Exception) -> None:
    if not place.done():
        place.set_exception(exc)
