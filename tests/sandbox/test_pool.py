"""The pool in virtual time, with sandboxes that die, come late, or not at all: no place is lost and none is counted twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import ConfigError, SandboxError
from posttrain.loop.sim.virtual_time import VirtualLoop
from posttrain.sandbox import Provider, Ran, Sandbox, SandboxPool


class Fake(Sandbox):
    """A sandbox of virtual time. Its files are those of the lease; `run` takes as long as its time-out says."""

    def __init__(self, world: World) -> None:
        self.world, self.files, self.dead, self.closed, self.leases = world, {}, False, 0, 0

    @property
    def alive(self) -> bool:
        return not self.dead and not self.closed

    async def run(self, command: Any, *, timeout: float = 1.0, **options: Any) -> Ran:
        await asyncio.sleep(timeout)
        if not self.alive:
            raise SandboxError("gone")
        return Ran(0, "", "", "exited", timeout)

    async def write(self, path: str, data: Any) -> None:
        self.files[path] = data

    async def read(self, path: str, *, at_most: int = 0) -> bytes:
        return bytes(self.files[path])

    async def clear(self) -> None:
        await asyncio.sleep(self.world.takes("clear"))
        if self.world.fails("clear"):
            raise SandboxError("cannot be cleared")
        self.files.clear()

    async def close(self) -> None:
        self.closed += 1
        assert self.closed == 1, "closed twice"
        await asyncio.sleep(self.world.takes("close"))
        self.world.living.discard(self)
        if self.world.fails("close"):
            raise OSError("cannot be closed well")


class World(Provider):
    """A provider whose calls take the time and fail as often as `rng` says; nothing of it ever exceeds `most`."""

    def __init__(self, rng: random.Random, most: int, *, trouble: float = 0.0, life: float | None = None) -> None:
        self.rng, self.most, self.trouble, self.lifetime_s = rng, most, trouble, life  # type: ignore[misc]
        self.living: set[Fake] = set()
        self.made: list[Fake] = []
        self.born: dict[Fake, float] = {}
        self.closed = 0

    def takes(self, what: str) -> float:
        return 1e5 if what != "close" and self.rng.random() < self.trouble / 4 else self.rng.random() * 3

    def fails(self, what: str) -> bool:
        return self.rng.random() < self.trouble

    async def create(self) -> Sandbox:
        born = asyncio.get_running_loop().time()
        await asyncio.sleep(self.takes("create"))
        if self.fails("create"):
            raise SandboxError("no room")
        made = Fake(self)
        self.living.add(made)
        self.made.append(made)
        self.born[made] = born
        assert len(self.living) <= self.most, "more sandboxes than may exist"
        return made

    async def close(self) -> None:
        self.closed += 1


def virtually(work: Callable[[], Awaitable[None]], seed: int | None = None) -> None:
    loop = VirtualLoop(seed=seed, most_turns=100_000, most_seconds=1e7)
    try:
        loop.run_until_complete(work())
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        assert not left, f"left behind: {left}"
    finally:
        loop.close()


USERS = st.lists(
    st.tuples(st.floats(0, 20), st.floats(0, 6), st.sampled_from(("well", "raises", "dies", "cancelled", "keeps"))), max_size=25
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    users=USERS, most=st.integers(1, 4), size=st.integers(0, 4), trouble=st.sampled_from((0.0, 0.1, 0.4)),
    life=st.sampled_from((None, 8.0, 30.0)), seed=st.integers(0, 2**16), end=st.sampled_from((None, 3.0, 12.0)),
)  # fmt: skip
def test_whatever_happens_no_place_is_lost(
    users: list[tuple[float, float, str]], most: int, size: int, trouble: float, life: float | None, seed: int, end: float | None
) -> None:
    """Leases that end in every way, at every moment, also while the pool is closed; then all places are there again."""
    world = World(random.Random(seed), most, trouble=trouble, life=life)
    held: set[Sandbox] = set()

    async def user(pool: SandboxPool, start: float, takes: float, how: str) -> None:
        await asyncio.sleep(start)
        async with pool.lease() as sandbox:
            assert isinstance(sandbox, Fake) and sandbox not in held, "two leases of one sandbox"
            held.add(sandbox)
            try:
                assert not sandbox.files, "the work folder is not fresh"
                now = asyncio.get_running_loop().time()
                assert life is None or now - world.born[sandbox] <= 0.9 * life, "too old"
                await sandbox.write("file", b"x")
                sandbox.dead = sandbox.dead or how == "dies"
                await sandbox.run([], timeout=takes)
                if how == "raises":
                    raise KeyError("the caller's own")
            finally:
                held.discard(sandbox)

    async def work() -> None:
        pool = SandboxPool(world, size=min(size, most), most=most, create_s=20.0, close_s=10.0)
        tasks = [asyncio.create_task(user(pool, *one)) for one in users]
        for task, (start, takes, how) in zip(tasks, users, strict=True):
            if how == "cancelled":
                asyncio.get_running_loop().call_later(start + takes / 2 + world.rng.random(), task.cancel)
        if end is not None:
            await asyncio.sleep(end)
            await pool.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, SandboxError | KeyError | asyncio.CancelledError) for r in results), results
        assert not held
        if end is None:
            world.trouble = 0.0
            await asyncio.sleep(100)  # what hung has been given up
            await asyncio.wait_for(all_places(pool, most), 1000)
        await pool.close()
        await pool.close()
        await asyncio.sleep(2e5)  # what comes although it was given up is closed too
        assert not world.living, "a sandbox was never closed"
        assert pool.count == 0 and world.closed >= 1

    virtually(work, seed)


async def all_places(pool: SandboxPool, most: int) -> None:
    """`most` leases at the same time."""
    together = asyncio.Barrier(most)

    async def one() -> None:
        async with pool.lease():
            await together.wait()

    await asyncio.gather(*(one() for _ in range(most)))


def test_a_cancellation_at_any_turn_leaves_the_place() -> None:
    """A9: telescope lost a sandbox for ever when a rollout was cancelled in its reward."""

    async def work() -> None:
        for turns in range(60):
            world = World(random.Random(turns), 1)
            pool = SandboxPool(world, size=0, most=1)

            async def reward(pool: SandboxPool = pool) -> None:
                async with pool.lease() as sandbox:
                    await sandbox.run([], timeout=0.01)

            task = asyncio.create_task(reward())
            for _ in range(turns):
                await asyncio.sleep(0.1 if turns % 2 else 0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.wait_for(all_places(pool, 1), 30)
            await pool.close()
            assert not world.living

    virtually(work)


def test_first_come_first_served_and_never_more_than_most() -> None:
    async def work() -> None:
        world, order = World(random.Random(0), 2), []
        pool = SandboxPool(world, size=0, most=2)

        async def user(number: int) -> None:
            async with pool.lease() as sandbox:
                order.append(number)
                await sandbox.run([], timeout=1.0)

        await asyncio.gather(*(user(number) for number in range(20)))
        assert order == list(range(20))
        assert len(world.made) == 2, "sandboxes are used again"
        await pool.close()

    virtually(work)


def test_some_are_made_ahead() -> None:
    async def work() -> None:
        world = World(random.Random(0), 8)
        pool = SandboxPool(world, size=3, most=8)
        await pool.start()
        await asyncio.sleep(10)
        assert len(world.living) == 3
        async with pool.lease(), pool.lease(), pool.lease(), pool.lease():
            assert len(world.living) == 4
        await pool.close()

    virtually(work)


def test_the_old_are_retired() -> None:
    async def work() -> None:
        world = World(random.Random(0), 2, life=100.0)
        pool = SandboxPool(world, size=0, most=1)
        found = []
        for wait in (10, 60, 15, 0):  # at release: young, 70 %, over 80 %
            async with pool.lease() as sandbox:
                found.append(sandbox)
                await asyncio.sleep(wait)
        assert found[0] is found[1] is found[2] and found[3] is not found[2], "retired when it was given back"
        await asyncio.sleep(95)
        async with pool.lease() as sandbox:
            assert sandbox is not found[3], "retired when it was to be taken"
        await pool.close()

    virtually(work)


def test_what_keeps_them_from_being_made_is_raised() -> None:
    class Refuses(World):
        async def create(self) -> Sandbox:
            raise ConfigError("no bubblewrap")

    async def work() -> None:
        world = Refuses(random.Random(0), 2)
        pool = SandboxPool(world, size=2, most=2)
        with pytest.raises(ConfigError, match="no bubblewrap"):
            await pool.start()
        assert world.closed and pool.count == 0
        with pytest.raises(SandboxError, match="closed"):
            async with pool.lease():
                pass

    virtually(work)


def test_who_waits_when_it_is_closed_is_told() -> None:
    async def work() -> None:
        world = World(random.Random(0), 1)
        pool = SandboxPool(world, size=0, most=1)

        async def user() -> None:
            async with pool.lease() as sandbox:
                await sandbox.run([], timeout=50.0)

        tasks = [asyncio.create_task(user()) for _ in range(3)]
        await asyncio.sleep(10)
        await pool.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, SandboxError) for result in results), results

    virtually(work)


@pytest.mark.parametrize(("size", "most"), [(-1, 1), (2, 1), (0, 0)])
def test_numbers_that_mean_nothing_are_refused(size: int, most: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        SandboxPool(World(random.Random(0), 1), size=size, most=most)
