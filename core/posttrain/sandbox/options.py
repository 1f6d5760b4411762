"""Sandboxes as options of an environment, and the pool that an environment holds.

    class Mine(Environment):
        @dataclass(frozen=True, kw_only=True)
        class Options(SandboxOptions):
            ...

        def __init__(self, options=None):
            super().__init__(options)
            self.sandboxes = Sandboxes(self.options)

        async def start(self):
            await self.sandboxes.start()

        async def close(self):
            await self.sandboxes.close()

        async def compute_reward(self, state):
            ran = await self.sandboxes.use(lambda sandbox: sandbox.run([sandbox.python, "-c", state.completion]))
            return float(ran.ok)

`use` tries again in another sandbox when one fails, and raises SandboxError in the end: an unscorable reward, never 0.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from posttrain.errors import ConfigError, SandboxError
from posttrain.sandbox.execution import to_the_end
from posttrain.sandbox.pool import SandboxPool
from posttrain.sandbox.provider import Provider, Sandbox

T = TypeVar("T")

ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class SandboxOptions:
    """Where programs run, and in how many places at a time."""

    sandbox: str = "local"  # local, or a Provider of one's own: module:Class, or file.py:Class
    sandbox_options: dict[str, Any] = field(default_factory=dict)  # arguments of the provider
    sandboxes: int | None = None  # most of them at a time; null: one for each CPU core that this process may use
    sandboxes_ready: int = 1  # so many exist at least, made before they are asked for
    sandbox_lifetime_s: float | None = None  # they are retired before this age; null: the provider's

    def __post_init__(self) -> None:
        if self.sandboxes is not None and self.sandboxes < 1:
            raise ConfigError(f"sandboxes={self.sandboxes} must be at least 1", fix="null: as many as there are CPU cores")
        if self.sandboxes_ready < 0:
            raise ConfigError(
                f"sandboxes_ready={self.sandboxes_ready} must be at least 0", fix="0 makes them when they are needed"
            )
        if self.sandbox != "local":
            from posttrain.plugins.functions import absolute

            object.__setattr__(self, "sandbox", absolute(self.sandbox))  # a resume may start in another directory


def provider_of(options: SandboxOptions) -> Provider:
    """The provider that the options name. Raises ConfigError."""
    make: Callable[..., Any]
    if options.sandbox == "local":
        from posttrain.sandbox.local import LocalProvider

        make = LocalProvider
    else:
        from posttrain.plugins.functions import function_of

        make = function_of(options.sandbox, "sandbox")
    try:
        made = make(**options.sandbox_options)
    except TypeError as exc:
        raise ConfigError(
            f"the sandbox provider {options.sandbox!r} does not take sandbox_options={options.sandbox_options!r}: {exc}",
            fix="name arguments of its constructor", code="sandbox",
        ) from exc  # fmt: skip
    if not isinstance(made, Provider):
        raise ConfigError(
            f"sandbox={options.sandbox!r} gives a {type(made).__name__}, not a posttrain.sandbox.Provider",
            fix="name a subclass of Provider", code="sandbox", anchor="howto/sandboxes.md#a-provider-of-your-own",
        )  # fmt: skip
    return made


class Sandboxes:
    """What an environment holds: a pool between `start` and `close`. It does not travel to other processes.

    Where nobody called `start` (a notebook, `posttrain.score`) each lease has a sandbox of its own, made and closed for it.
    """

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options
        self._pool: SandboxPool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_pool": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    async def start(self) -> None:
        """Make the first sandbox. Raises ConfigError or SandboxError when there can be none."""
        if self._pool is None:
            self._pool = self._new(None)
            try:
                await self._pool.start()
            except BaseException:
                self._pool = None
                raise

    async def close(self) -> None:
        """End all sandboxes; idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """A sandbox of one's own; see `SandboxPool.lease`."""
        pool = self._pool
        if pool is not None:
            async with pool.lease() as sandbox:
                yield sandbox
            return
        pool = self._new(1)
        try:
            async with pool.lease() as sandbox:
                yield sandbox
        finally:
            await to_the_end(pool.close())

    async def use(self, work: Callable[[Sandbox], Awaitable[T]], *, attempts: int = ATTEMPTS) -> T:
        """What `work(sandbox)` gives. When the sandbox fails it is done again in another one, from its beginning.

        Raises the SandboxError of the last attempt, or of the first that another try will not mend.
        """
        for left in reversed(range(attempts)):
            try:
                async with self.lease() as sandbox:
                    return await work(sandbox)
            except SandboxError as exc:
                if not left or not exc.retryable or ((pool := self._pool) is not None and pool.closed):
                    raise
        raise ValueError(f"attempts={attempts} must be at least 1")

    def _new(self, most: int | None) -> SandboxPool:
        o = self._options
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        most = most or o.sandboxes or cores
        ready = 0 if most == 1 else min(o.sandboxes_ready, most)
        return SandboxPool(provider_of(o), size=ready, most=most, lifetime_s=o.sandbox_lifetime_s)
