"""The sandbox contract: a place where programs that a model wrote run, bounded, and where they come from.

A `Provider` makes sandboxes; a `Sandbox` has a work folder and runs commands in it. What a program does, however bad, is an
answer (`Ran`, or OSError from `read`); what the sandbox itself fails to do is a `SandboxError`. The difference decides rewards:
the first is the model's fault, the second is nobody's, and such an episode is unscorable. The smallest provider, of containers
say:

    class Mine(Provider):
        async def create(self) -> Sandbox:
            return MySandbox(await client.start(image="python:3.12"))      # a SandboxError when it cannot

    class MySandbox(Sandbox):
        async def run(self, command, *, stdin="", files=None, limits=Limits(), timeout=10.0) -> Ran: ...
        async def write(self, path, data): ...
        async def read(self, path, *, at_most=MIB) -> bytes: ...
        async def clear(self): ...
        async def close(self): ...

Environments lease sandboxes from a pool (`sandbox.pool`, `sandbox.options`). docs/howto/sandboxes.md has a whole provider.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar, Literal, TypeAlias

MIB = 1 << 20

Outcome: TypeAlias = Literal["exited", "timeout", "output", "memory", "processes", "disk"]
"""exited: the program ended by itself, or by a signal; the others: it was ended because it went beyond that limit."""

HOLDS = ("files", "network", "processes", "limits")
"""What a sandbox may keep from its programs. files: they see none of the host's but what Python needs, and write in their work
folder alone; network: there is none; processes: they see and signal only their own, and none outlives its run; limits: time,
memory, output and sizes are bounded."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run. Sizes in bytes.

    memory      address space of each process, and resident memory of all together
    processes   processes and threads at once
    open_files  of each process
    file_size   of each file
    disk        all files of the work folder together
    entries     files and folders in it
    output      standard output, and standard error, each
    """

    memory: int = 1024 * MIB
    processes: int = 64
    open_files: int = 256
    file_size: int = 64 * MIB
    disk: int = 256 * MIB
    entries: int = 10_000
    output: int = MIB


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program.

    exit_code   its own; 128 + the signal's number when a signal ended it; 127 when there is no such program
    stdout      up to `Limits.output`, as text (what is no UTF-8 is replaced); the same for stderr
    seconds     from its start to its end
    """

    exit_code: int
    stdout: str
    stderr: str
    outcome: Outcome
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and well."""
        return self.outcome == "exited" and self.exit_code == 0


class Sandbox(ABC):
    """A work folder and what runs in it: one program at a time. Paths are relative to the work folder.

    Every method raises SandboxError when the sandbox fails, or has ended.
    """

    python: str = "python3"
    """The command of Python there."""
    isolation: frozenset[str] = frozenset()
    """What it keeps from its programs (of `HOLDS`)."""

    @property
    def alive(self) -> bool:
        """False once it is known that it has ended. Costs nothing."""
        return True

    @abstractmethod
    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits = Limits(),
        timeout: float = 10.0,
    ) -> Ran:
        """Write `files`, then run `command` in the work folder for at most `timeout` seconds.

        When this returns, raises or is cancelled, nothing of the program runs any more.
        """

    @abstractmethod
    async def write(self, path: str, data: str | bytes) -> None:
        """Write a file; folders on the way are made. Raises ValueError for a path that leads out, OSError when something that a
        program left is in the way."""

    @abstractmethod
    async def read(self, path: str, *, at_most: int = MIB) -> bytes:
        """The first `at_most` bytes of a file. Raises OSError when a program left none there, or something that is no file."""

    @abstractmethod
    async def clear(self) -> None:
        """Make the work folder fresh: empty, and nothing of the last program in it."""

    @abstractmethod
    async def close(self) -> None:
        """End it and give back what it held; idempotent."""


class Provider(ABC):
    """Makes sandboxes. Options are the arguments of the constructor."""

    lifetime_s: ClassVar[float | None] = None
    """For how long a sandbox lives, where somebody else ends it. A pool retires it before."""

    @abstractmethod
    async def create(self) -> Sandbox:
        """A new sandbox. Raises SandboxError (`retryable` when another try may do), ConfigError when none can be had here."""

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Give back what the provider itself holds; idempotent. Its sandboxes have been closed."""


def inside(path: str) -> PurePosixPath:
    """A path that stays in the work folder. Raises ValueError for any other."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or not parts.parts or ".." in parts.parts or "\0" in path:
        raise ValueError(f"{path!r} is not a path inside of the work folder")
    return parts
