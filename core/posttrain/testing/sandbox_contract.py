"""The laws of a sandbox provider as tests: subclass and give one fixture.

    class TestMine(SandboxContract):
        @pytest.fixture
        def provider(self):
            return MyProvider()

What a provider says it keeps from programs (`Sandbox.isolation`) is tested too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from posttrain.errors import SandboxError
from posttrain.sandbox.provider import HOLDS, Limits, Provider, Sandbox

_BEATS = "import time, sys\nfor n in range(10**6):\n    open('beat', 'w').write(str(n)); time.sleep(0.02)"
_DETACHED = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {_BEATS!r}], start_new_session=True)\n"
_CONNECTS = """
import socket
try:
    socket.create_connection(("1.1.1.1", 53), timeout=3)
    print("connected")
except OSError:
    print("no network")
"""


class SandboxContract:
    """What every provider and its sandboxes do."""

    patience_s = 60.0
    """A time that no program of these tests takes on its own."""

    @pytest.fixture
    def provider(self) -> Provider:
        raise NotImplementedError("give the contract a fixture `provider`")

    def within(self, provider: Provider, work: Callable[[Sandbox], Awaitable[Any]]) -> Any:
        """What `work(sandbox)` gives."""

        async def whole() -> Any:
            try:
                sandbox = await provider.create()
                try:
                    return await work(sandbox)
                finally:
                    await sandbox.close()
            finally:
                await provider.close()

        return asyncio.run(whole())

    def ran(self, provider: Provider, program: str, *, timeout: float | None = None, **options: Any) -> Any:
        async def work(sandbox: Sandbox) -> Any:
            return await sandbox.run([sandbox.python, "-c", program], timeout=timeout or self.patience_s, **options)

        return self.within(provider, work)

    # --- programs ---------------------------------------------------------------------------------------------------------

    def test_a_program_gets_its_input_and_files_and_is_heard(self, provider: Provider) -> None:
        program = "import sys; print(input().upper() + open('in/a').read()); print('no', file=sys.stderr); sys.exit(3)"
        found = self.ran(provider, program, stdin="hé\n", files={"in/a": "file"})
        assert (found.stdout, found.stderr, found.exit_code, found.outcome) == ("HÉfile\n", "no\n", 3, "exited"), found
        assert not found.ok and found.seconds >= 0

    def test_what_a_program_does_is_an_answer(self, provider: Provider) -> None:
        """SandboxError is for what the sandbox does; these must not raise."""
        for program in ("raise ValueError", "import os; os.abort()", "import os; os.close(1); os.close(0)"):
            assert self.ran(provider, program).outcome == "exited"
        absent = self.within(provider, lambda sandbox: sandbox.run(["no-such-program"], timeout=self.patience_s))
        assert absent.exit_code != 0 and absent.outcome == "exited"

    def test_a_program_that_does_not_end_is_ended(self, provider: Provider) -> None:
        async def work(sandbox: Sandbox) -> None:
            program = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(10**6)"
            found = await sandbox.run([sandbox.python, "-c", program], timeout=1.0)
            assert found.outcome == "timeout", found
            again = await sandbox.run([sandbox.python, "-c", "print(1)"], timeout=self.patience_s)
            assert again.stdout == "1\n", "a sandbox can be used after a time-out"

        self.within(provider, work)

    def test_output_is_bounded(self, provider: Provider) -> None:
        found = self.ran(provider, "while True: print('x' * 1000)", limits=Limits(output=5000))
        assert found.outcome == "output" and len(found.stdout) <= 5000, (found.outcome, len(found.stdout))

    def test_a_cancelled_program_runs_no_further(self, provider: Provider) -> None:
        async def work(sandbox: Sandbox) -> None:
            task = asyncio.create_task(sandbox.run([sandbox.python, "-c", _BEATS], timeout=self.patience_s))
            await _beating(sandbox, self.patience_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not await _moves(sandbox), "it still writes its file"

        self.within(provider, work)

    # --- the work folder --------------------------------------------------------------------------------------------------

    def test_files_come_and_go(self, provider: Provider) -> None:
        async def work(sandbox: Sandbox) -> None:
            await sandbox.write("a/b/c.bin", bytes(range(256)))
            assert await sandbox.read("a/b/c.bin") == bytes(range(256))
            assert await sandbox.read("a/b/c.bin", at_most=2) == b"\0\1"
            await sandbox.write("a/b/c.bin", "é")
            assert await sandbox.read("a/b/c.bin") == "é".encode()
            await sandbox.clear()
            for path in ("a/b/c.bin", "never"):
                with pytest.raises(OSError):
                    await sandbox.read(path)
            found = await sandbox.run([sandbox.python, "-c", "import os; print(os.listdir())"], timeout=self.patience_s)
            assert found.stdout == "[]\n", "a cleared folder is empty"

        self.within(provider, work)

    def test_paths_stay_in_the_folder(self, provider: Provider) -> None:
        async def work(sandbox: Sandbox) -> None:
            for path in ("../x", "/x", ""):
                with pytest.raises(ValueError):
                    await sandbox.write(path, "x")
                with pytest.raises(ValueError):
                    await sandbox.read(path)

        self.within(provider, work)

    # --- its life -----------------------------------------------------------------------------------------------------------

    def test_two_are_apart(self, provider: Provider) -> None:
        async def work(one: Sandbox) -> None:
            two = await provider.create()
            try:
                await one.write("mine", "1")
                with pytest.raises(OSError):
                    await two.read("mine")
            finally:
                await two.close()
            assert await one.read("mine") == b"1"

        self.within(provider, work)

    def test_a_closed_one_says_so(self, provider: Provider) -> None:
        async def work(sandbox: Sandbox) -> None:
            assert sandbox.alive
            await sandbox.close()
            await sandbox.close()
            assert not sandbox.alive
            for call in (sandbox.run([sandbox.python, "-c", ""]), sandbox.write("a", "b"), sandbox.read("a")):
                with pytest.raises(SandboxError):
                    await call

        self.within(provider, work)

    def test_what_it_says_it_keeps_it_keeps(self, provider: Provider) -> None:
        async def work(sandbox: Sandbox) -> None:
            assert sandbox.isolation <= set(HOLDS), f"isolation names {sorted(sandbox.isolation - set(HOLDS))}"
            if "network" in sandbox.isolation:
                found = await sandbox.run([sandbox.python, "-c", _CONNECTS], timeout=self.patience_s)
                assert found.stdout == "no network\n", found
            if "processes" in sandbox.isolation:
                await sandbox.run([sandbox.python, "-c", _DETACHED + "import time; time.sleep(1)"], timeout=self.patience_s)
                assert not await _moves(sandbox), "a process outlives the run that started it"
            if "limits" in sandbox.isolation:
                program = "x = []\nwhile True: x.append(bytearray(1 << 20))"
                command = [sandbox.python, "-c", program]
                found = await sandbox.run(command, limits=Limits(memory=256 << 20), timeout=self.patience_s)
                assert not found.ok and found.outcome in ("exited", "memory"), found

        self.within(provider, work)


async def _beating(sandbox: Sandbox, patience: float) -> None:
    """Until the program writes."""
    async with asyncio.timeout(patience):
        while not await _beat(sandbox):
            await asyncio.sleep(0.05)


async def _moves(sandbox: Sandbox) -> bool:
    before = await _beat(sandbox)
    await asyncio.sleep(0.3)
    return await _beat(sandbox) != before


async def _beat(sandbox: Sandbox) -> bytes:
    try:
        return await sandbox.read("beat")
    except OSError:
        return b""
