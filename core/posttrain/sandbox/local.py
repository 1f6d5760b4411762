"""Sandboxes on this machine: a work folder, and each program in a cage of its own (see `sandbox.cage`).

    provider = LocalProvider()
    sandbox = await provider.create()
    ran = await sandbox.run([sandbox.python, "program.py"], files={"program.py": "print(input())"}, stdin="hello", timeout=5)

Without bubblewrap programs could read and write whatever this user can, so it is refused unless `allow_unisolated` says that the
machine, or the container, has nothing to lose. Limits hold in any case; `Sandbox.isolation` says what else does. The memory and
disk of all processes together are looked at ten times a second, the other limits are the kernel's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from posttrain.errors import ConfigError, SandboxError
from posttrain.sandbox.cage import BUBBLEWRAP, PYTHON, Cage, best, new_user
from posttrain.sandbox.execution import execute, to_the_end
from posttrain.sandbox.folder import Folder
from posttrain.sandbox.provider import MIB, Limits, Provider, Ran, Sandbox

T = TypeVar("T")

_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EROFS, errno.ENOMEM)
"""What no program brings about: it has limits of its own."""
_PREFIX = "posttrain-sandboxes-"
_INSTALL = "apt-get install bubblewrap (dnf, apk: the same name), 0.7 or newer, or pip install 'posttrain[sandbox]'"


class LocalProvider(Provider):
    """Sandboxes on this machine.

    allow_unisolated   run programs also where bubblewrap does not work
    packages           folders of Python packages that programs may import; every user must be able to read them
    root               where work folders are; None: the system's folder for temporary files
    cage               how programs are shut in; None: the best way that works here
    """

    def __init__(
        self, *, allow_unisolated: bool = False, packages: Sequence[str] = (), root: str | None = None, cage: Cage | None = None
    ) -> None:
        if isinstance(packages, str):
            raise ConfigError(f"packages={packages!r} is a text", fix=f"a list: packages=[{packages}]", code="sandbox")
        self._allow, self._packages, self._cage = allow_unisolated, [os.path.abspath(path) for path in packages], cage
        self._parent = root
        self._root: tuple[Path, int] | None = None  # and the descriptor that holds it
        self._numbers = itertools.count()

    async def create(self) -> Sandbox:
        """A new sandbox. Raises ConfigError where programs cannot be shut in, SandboxError when the disk is full, say."""
        if self._cage is None:
            self._cage = await asyncio.to_thread(best)
        cage = self._cage
        if "files" not in cage.isolation and not self._allow:
            raise ConfigError(
                f"programs that a model wrote would not be isolated on this machine: {BUBBLEWRAP.problem() or cage.name}",
                cause="without bubblewrap they can read and write all that this user can",
                fix=f"{_INSTALL}; or, where there is nothing to lose, sandbox_options={{allow_unisolated: true}}",
                code="sandbox-isolation", anchor="howto/sandboxes.md#what-holds-on-this-machine",
            )  # fmt: skip
        user = new_user() if cage is BUBBLEWRAP else None
        sandbox = LocalSandbox(cage, self._new_path(), user, self._packages)
        await to_the_end(sandbox.clear())
        return sandbox

    async def close(self) -> None:
        if self._root is not None:
            root, lock = self._root
            self._root = None
            await to_the_end(asyncio.to_thread(Folder(root).remove))
            os.close(lock)

    def _new_path(self) -> Path:
        try:
            if self._root is None:
                _sweep(Path(self._parent or tempfile.gettempdir()))
                made = tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent)
                self._root = Path(made), _lock(made)
        except OSError as exc:
            raise SandboxError("there is no place for work folders", cause=str(exc), fix="root=FOLDER") from exc
        return self._root[0] / str(next(self._numbers))


def _lock(folder: str | Path) -> int:
    """Hold a folder for as long as this process lives. Raises OSError when another one does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(parent: Path) -> None:
    """Delete what processes that were killed have left; a folder younger than a minute may be about to be held."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > 60:
                lock = _lock(folder)
                Folder(folder).remove()
                os.close(lock)


class LocalSandbox(Sandbox):
    """A work folder on this machine. Nothing runs between two programs, so there is nothing in it that could die."""

    python = PYTHON

    def __init__(self, cage: Cage, path: Path, user: int | None, packages: Sequence[str]) -> None:
        self.isolation = cage.isolation
        self._cage, self._user, self._packages = cage, user, packages
        self._folder, self._closed = Folder(path, user), False
        self._running: asyncio.Task[Ran] | None = None

    @property
    def alive(self) -> bool:
        return not self._closed

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        timeout: float = 10.0,
    ) -> Ran:
        if self._running is not None:
            raise RuntimeError("a sandbox runs one program at a time")
        given = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
        self._running = asyncio.create_task(self._run(command, given, files or {}, limits, timeout))
        try:
            return await self._running
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise SandboxError("the sandbox was closed while a program ran in it") from None
            raise
        finally:
            self._running = None

    async def _run(
        self, command: Sequence[str], stdin: bytes, files: Mapping[str, str | bytes], limits: Limits, timeout: float
    ) -> Ran:
        for name, content in files.items():
            await self.write(name, content)
        self._check()
        path, cage = self._folder.path, self._cage
        return await execute(
            lambda report: cage.command(path, self._user, self._packages, limits, timeout, report, command),
            environment=cage.environment(path, self._packages), stdin=stdin, limits=limits, timeout=timeout,
            folder=self._folder, caged="processes" in cage.isolation,
        )  # fmt: skip

    async def write(self, path: str, data: str | bytes) -> None:
        await self._do(self._folder.write, path, data)

    async def read(self, path: str, *, at_most: int = MIB) -> bytes:
        return await self._do(self._folder.read, path, at_most)

    async def clear(self) -> None:
        await self._do(self._folder.clear, all_ours=True)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._running is not None:
                self._running.cancel()
                await asyncio.wait({self._running})
            await to_the_end(asyncio.to_thread(self._folder.remove))

    def _check(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox has been closed")

    async def _do(self, work: Callable[..., T], *args: Any, all_ours: bool = False) -> T:
        """`work(*args)` in a thread, to its end. all_ours: whatever OSError it raises is the sandbox's failure."""
        self._check()
        try:
            return await to_the_end(asyncio.to_thread(work, *args))
        except OSError as exc:
            if all_ours or exc.errno in _OURS:
                raise SandboxError("the work folder of a sandbox failed", cause=str(exc)) from exc
            raise
