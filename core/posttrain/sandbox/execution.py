"""One run of a program in a cage: started, fed, read within bounds, watched, and ended with all that it has started.

The caller gets `Ran` for whatever the program did, and SandboxError when the cage did not come up or was ended by somebody else,
which no program inside can bring about.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from posttrain.errors import SandboxError
from posttrain.sandbox import tree
from posttrain.sandbox.cage import PATIENCE_S
from posttrain.sandbox.folder import Folder
from posttrain.sandbox.provider import Limits, Outcome, Ran

T = TypeVar("T")

WATCH_S = 0.1
"""How often memory, processes and disk are looked at."""
END_S = 5.0
"""For how long the end of killed processes is waited for."""


async def execute(
    command: Callable[[tuple[int, int]], list[str]], *, environment: Mapping[str, str], stdin: bytes, limits: Limits,
    timeout: float, folder: Folder, caged: bool,
) -> Ran:  # fmt: skip
    """Run what `command(report)` gives (`Cage.command`). caged: the program cannot reach the first process, and dies with it.

    A cancellation ends the program first. The start is not cancelled: a cage that is killed while it comes up may leave a part.
    """
    stop: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    work = asyncio.create_task(_execute(command, environment, stdin, limits, timeout, folder, caged, stop))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if not stop.done():
            stop.set_result("timeout")
        await to_the_end(asyncio.wait({work}))
        if not work.cancelled():
            work.exception()
        raise


async def _execute(
    command: Callable[[tuple[int, int]], list[str]], environment: Mapping[str, str], stdin: bytes, limits: Limits,
    timeout: float, folder: Folder, caged: bool, stop: asyncio.Future[Outcome],
) -> Ran:  # fmt: skip
    ours, theirs = socket.socketpair()
    owner = await asyncio.open_connection(sock=ours)
    report = theirs.fileno(), os.dup(theirs.fileno())
    try:
        process = await asyncio.create_subprocess_exec(
            *command(report), cwd="/", env=dict(environment), pass_fds=report, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as exc:
        owner[1].close()
        raise SandboxError("a sandbox could not be started", cause=f"{type(exc).__name__}: {exc}") from exc
    finally:
        os.close(report[1])
        theirs.close()
    execution = _Execution(process, limits, folder, caged, stop)
    try:
        await execution.ready(*owner)
        return await execution.run(stdin, timeout)
    finally:
        owner[1].close()
        try:
            await execution.end()
        finally:
            process._transport.close()  # type: ignore[attr-defined]


class _Execution:
    """A process that has been started. `first`: descriptor of the first process in the cage, whose end is that of all.

    `outcome` may be decided from outside, to stop it.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, limits: Limits, folder: Folder, caged: bool, outcome: asyncio.Future[Outcome]
    ) -> None:
        self._process, self._limits, self._folder, self._caged, self._outcome = process, limits, folder, caged, outcome
        self._first: int | None = None
        self._kept = bytearray(), bytearray()

    async def ready(self, told: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        """Wait until the program can start, and let it. Raises SandboxError when it cannot."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                said = await _until(told, b"ready\n")
                if said is not None:
                    self._hold(said)
                    answer.write(b"go")
                    said = await _until(told, b"started\n")
        except (TimeoutError, ConnectionError) as exc:
            why = f"not within {PATIENCE_S:g} s" if isinstance(exc, TimeoutError) else str(exc)
            raise SandboxError("a sandbox did not come up", cause=why) from None
        if said is None:
            await self.end()
            assert self._process.stderr is not None
            lines = (await self._process.stderr.read(65536)).decode(errors="replace").strip().splitlines()
            raise SandboxError("a sandbox did not come up", cause=lines[-1] if lines else f"exit code {self._process.returncode}")

    def _hold(self, said: bytes) -> None:
        """Keep a descriptor of the first process in the cage: what bubblewrap says it is, else our process's child."""
        inner = re.search(rb'"child-pid"\s*:\s*(\d+)', said)
        children = [int(inner[1])] if inner else tree.below(self._process.pid)[:1]
        if self._caged and children:
            with contextlib.suppress(ProcessLookupError):
                self._first = os.pidfd_open(children[0])

    async def run(self, stdin: bytes, timeout: float) -> Ran:
        """Until the program ends, is too much, or `timeout` seconds are over."""
        loop, process = asyncio.get_running_loop(), self._process
        started = loop.time()
        streams = [asyncio.create_task(self._read(process.stdout, 0)), asyncio.create_task(self._read(process.stderr, 1))]
        others = [asyncio.create_task(work) for work in (self._feed(stdin), self._watch(), self._wait())]
        try:
            done, _ = await asyncio.wait({self._outcome}, timeout=timeout)
            outcome = self._outcome.result() if done else "timeout"
            seconds = loop.time() - started
            await self.end()
            await asyncio.wait(streams, timeout=END_S)
        finally:
            for task in (*streams, *others):
                task.cancel()
        code = process.returncode or 0
        if code < 0 and outcome == "exited" and self._caged:
            raise SandboxError("a sandbox was ended from outside", cause=f"signal {-code}")
        code = code if code >= 0 else 128 - code
        if code == 128 + signal.SIGXCPU:
            outcome = "timeout"
        stdout, stderr = (bytes(kept).decode("utf-8", "replace") for kept in self._kept)
        return Ran(code, stdout, stderr, outcome, seconds)

    async def end(self) -> None:
        """End everything that runs, and wait until it is gone. Raises SandboxError when it does not go; idempotent."""
        process = self._process
        if process.returncode is None and not self._caged:
            await self._kill_all()
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        try:
            async with asyncio.timeout(END_S):
                await self._exit()
                if self._first is not None:
                    await _gone(self._first)
        except TimeoutError:
            raise SandboxError("a sandbox does not end", cause=f"process {process.pid} is still there") from None
        finally:
            if self._first is not None:
                os.close(self._first)
                self._first = None

    async def _kill_all(self) -> None:
        """Without namespaces: everything below the first process, until nothing new is found."""
        for _ in range(100):
            pids = tree.below(self._process.pid)
            if not pids:
                return
            tree.kill(pids)
            await asyncio.sleep(0.01)

    async def _read(self, stream: asyncio.StreamReader | None, which: int) -> None:
        assert stream is not None
        kept = self._kept[which]
        while part := await stream.read(65536):
            room = self._limits.output - len(kept)
            kept += part[:room]
            if len(part) > room:  # read on, so that the pipe is empty at the end
                self._decide("output")

    async def _feed(self, data: bytes) -> None:
        writer = self._process.stdin
        assert writer is not None
        with contextlib.suppress(ConnectionError):  # a program need not read
            for start in range(0, len(data), 65536):
                writer.write(data[start : start + 65536])
                await writer.drain()
        writer.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if (over := await asyncio.to_thread(self._over)) is not None:
                self._decide(over)

    def _over(self) -> Outcome | None:
        pids = tree.below(self._process.pid)
        if len(pids) > self._limits.processes + 4:  # the cage's own
            return "processes"
        if tree.resident(pids) > self._limits.memory:
            return "memory"
        fits = self._folder.holds(bytes_at_most=self._limits.disk, entries_at_most=self._limits.entries)
        return None if fits else "disk"

    async def _wait(self) -> None:
        await self._exit()
        self._decide("exited")

    async def _exit(self) -> None:
        """The end of the first process; `Process.wait` waits for whoever holds its pipes, too."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self._process.pid)
            try:
                await _gone(descriptor)
            finally:
                os.close(descriptor)
        while self._process.returncode is None:  # it is just being asked for
            await asyncio.sleep(0.001)

    def _decide(self, outcome: Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)


async def _until(told: asyncio.StreamReader, mark: bytes) -> bytes | None:
    """What comes before the line `mark`; None when the end comes first."""
    said = b""
    while line := await told.readline():
        if line == mark:
            return said
        said += line
    return None


async def _gone(process: int) -> None:
    """Until the process of this descriptor has ended."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.add_reader(process, lambda: None if future.done() else future.set_result(None))
    try:
        await future
    finally:
        loop.remove_reader(process)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is done also when whoever waits is cancelled; the cancellation comes after it."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
        except BaseException:
            break
    if cancelled:
        task.cancelled() or task.exception()
        raise asyncio.CancelledError
    return task.result()
