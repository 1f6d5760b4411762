"""Roles for the tests of hosting: they sleep, fail, die and count."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator
from multiprocessing import shared_memory
from typing import Any

from posttrain.errors import WeightSyncError


class Toy:
    def __init__(self, *, answer: int = 0, fail: str = "", processes: dict[str, str] | None = None) -> None:
        if fail:
            raise WeightSyncError(f"the toy cannot be built: {fail}", fix="build another")
        self.answer, self.processes = answer, processes or {}

    async def stacks(self) -> dict[str, str]:
        return self.processes

    def add(self, number: int) -> int:
        return self.answer + number

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"

    def fail(self) -> None:
        raise ValueError("seven is not even")

    def fail_known(self) -> None:
        raise WeightSyncError("bucket 3 arrived damaged", fix="look at the network")

    def fail_unpicklable(self) -> None:
        exc = WeightSyncError("held by a lock")
        exc.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
        raise exc

    def die(self) -> None:
        print("about to die", flush=True)
        os.kill(os.getpid(), 9)

    def die_of_ucx(self) -> None:
        """What UCX prints where a second one without CUDA was loaded before it, from native code."""
        os.write(2, b"E ucx_utils.cpp:582] VRAM memory is detected as host by UCX, UCX CUDA support was not found!\n")
        os.abort()

    def meet(self, dying: int) -> str:
        """A collective: the dying one dies, the others learn of it by a lost connection, before Ray learns of the death."""
        if self.answer == dying:
            time.sleep(0.5)
            self.die()
        raise RuntimeError("connection closed by peer")

    async def count(self, upto: int, fail_at: int = -1) -> AsyncIterator[int]:
        for number in range(upto):
            if number == fail_at:
                raise ValueError(f"cannot say {number}")
            yield number

    def pid(self) -> int:
        return os.getpid()

    def share(self) -> str:
        """The name of shared memory of a process of this role that takes its time to end, as an engine does."""
        context = multiprocessing.get_context("spawn")
        names = context.Queue()
        context.Process(target=_share, args=(names, os.getpid())).start()
        return str(names.get(timeout=30))


def _share(names: Any, owner: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held = shared_memory.SharedMemory(create=True, size=4096)
    names.put(held.name)
    while os.getppid() == owner:
        time.sleep(0.05)
    time.sleep(60)
