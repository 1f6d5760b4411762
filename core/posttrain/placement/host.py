"""The one actor that hosts every role: it builds a role object where Ray placed it, calls its methods, answers heartbeats.

A role object is plain Python and knows nothing of Ray: `policy.rank.PolicyRank`, `rollout.body.RolloutBody`. Its coroutines run
on this actor's event loop; its ordinary methods run one after the other in one thread of their own, so that a forward of a
minute delays no heartbeat. What a method raises goes back as a value: the driver sees the error itself and not a wrapper.

The order of `begin` is the contract: output to the role's log, the watch on the driver, devices, plug-ins, the role. NIXL is in
processes of its own (`weights.nixl_process`), so that no order between it and NCCL is left to luck.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import importlib
import inspect
import logging
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from posttrain.errors import PluginError, PosttrainError, RunAborted
from posttrain.placement.shared_root import Nonce, Sighting
from posttrain.placement.stacks import Stack
from posttrain.placement.stacks import tasks as all_tasks
from posttrain.placement.stacks import threads as all_threads
from posttrain.weights.owner import ProcessId, end_with
from posttrain.weights.shared_files import release_own

STACKS_S = 3.0
"""How long the processes of a role may take to say where they are."""


@dataclass(frozen=True, slots=True)
class PluginRef:
    """A plug-in that a role will load, as the driver found it; `distribution` "" for one that is a file or a dotted path."""

    kind: str
    name: str
    distribution: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """What a host needs to build its role; plain data.

    name      of the role and its place: `policy-0`, `rollout-1`
    factory   `module:attribute`, imported where the role lives
    kwargs    of the factory
    logs      folder for the role's log, on storage that driver and role share
    driver    ends the role with it where both are on one machine
    paths     of the driver's `sys.path`, and `folder`, its working folder: a module beside the person's script is found where the
              storage is shared, and is an error that names the node where it is not
    session   processes of the Ray cluster that the driver started, which have to go with it
    devices   GPU ids of other roles that it uses beside those that Ray gave it
    nonce     what the driver wrote into the folder for runs, to be seen here too
    """

    name: str
    factory: str
    kwargs: dict[str, Any]
    logs: str
    driver: ProcessId
    driver_boot: str
    threads: int = 1
    plugins: tuple[PluginRef, ...] = ()
    paths: tuple[str, ...] = ()
    folder: str = ""
    session: tuple[ProcessId, ...] = ()
    devices: tuple[str, ...] = ()
    nonce: Nonce | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a role runs. log_start: byte of `log` at which what its process printed begins."""

    node: str
    address: str
    process: ProcessId
    boot: str
    log: str
    devices: tuple[str, ...] = ()
    sighting: Sighting | None = None
    log_start: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat: calls under way, `(method, seconds)`, the longest first. When asked, also the stacks of all threads and
    tasks, and what the processes that the role has started say of themselves."""

    busy: tuple[tuple[str, float], ...]
    threads: tuple[Stack, ...] = ()
    tasks: tuple[Stack, ...] = ()
    processes: Mapping[str, str] = field(default_factory=dict)

    def short(self, role: str) -> str:
        """In one line, for an error: the thread in which the methods of the role run, else all."""
        own = [thread for thread in self.threads if thread.name.startswith(f"thread {role}_")]
        return "; ".join(thread.line() for thread in own or self.threads)

    def full(self) -> str:
        """Everything, for a report."""
        busy = ", ".join(f"{method} for {seconds:.1f} s" for method, seconds in self.busy) or "nothing"
        processes = (f"== {name}\n\n{text}" for name, text in self.processes.items())
        return "\n\n".join([f"in {busy}", *map(str, [*self.tasks, *self.threads]), *processes])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a method returned, or what it raised."""

    value: Any = None
    failure: BaseException | None = None


class Host:
    """The actor class. `Remote` is its other end."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self._role: Any = None
        self._calls: dict[int, tuple[str, float]] = {}
        self._serial = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=spec.name)

    async def begin(self) -> Outcome:
        """Prepare the process and build the role. Returns its `Place`."""
        return await self._answer("begin", self._begin)

    async def call(self, method: str, *args: Any) -> Outcome:
        """Run a method of the role to its end."""
        return await self._answer(method, getattr(self._role, method), *args)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Outcome]:
        """What an asynchronous generator of the role yields, one outcome each; a failure is the last."""
        with _Busy(self, method):
            try:
                async for value in getattr(self._role, method)(*args):
                    yield Outcome(value)
            except Exception as exc:
                yield Outcome(failure=self._portable(method, exc))

    async def free_port(self) -> Outcome:
        """A port of this machine that nobody listens on now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return Outcome(probe.getsockname()[1])

    async def beat(self, stacks: bool = False) -> Beat:
        """Answer at once, whatever the role does."""
        now = time.monotonic()
        busy = sorted(((name, now - since) for name, since in self._calls.values()), key=lambda item: -item[1])
        if not stacks:
            return Beat(tuple(busy))
        threads, tasks = tuple(all_threads()), tuple(all_tasks())
        return Beat(tuple(busy), threads, tasks, await _processes(self._role))

    async def _answer(self, method: str, work: Callable[..., Any], *args: Any) -> Outcome:
        with _Busy(self, method):
            try:
                if inspect.iscoroutinefunction(work):
                    return Outcome(await work(*args))
                return Outcome(await asyncio.get_running_loop().run_in_executor(self._thread, work, *args))
            except Exception as exc:
                return Outcome(failure=self._portable(method, exc))

    def _begin(self) -> Place:
        spec = self.spec
        log, log_start = _redirect(Path(spec.logs) / f"{spec.name}.log")
        _outlive_the_group()
        if boot_id() == spec.driver_boot:
            end_with(spec.driver, last=functools.partial(_leave, spec.session))
        sys.path.extend(path for path in spec.paths if path not in sys.path)
        if spec.folder and Path(spec.folder).is_dir():
            os.chdir(spec.folder)
        devices = _devices(spec.devices)
        import torch

        torch.set_num_threads(spec.threads)
        for plugin in spec.plugins:
            check_plugin(plugin)
        module, _, attribute = spec.factory.partition(":")
        self._role = getattr(importlib.import_module(module), attribute)(**spec.kwargs)
        sighting = spec.nonce.look() if spec.nonce else None
        return Place(socket.gethostname(), _address(), ProcessId.current(), boot_id(), log, devices, sighting, log_start)

    def _portable(self, method: str, exc: Exception) -> BaseException:
        """An exception that can be sent; it is printed to the role's log with its traceback, and says which role it came from."""
        traceback.print_exception(exc, file=sys.stderr)
        sys.stderr.flush()
        if not isinstance(exc, PosttrainError):
            last = traceback.extract_tb(exc.__traceback__)[-1:]
            at = f" ({last[0].name}, {last[0].filename.rsplit('/', 1)[-1]}:{last[0].lineno})" if last else ""
            return RunAborted(
                f"{self.spec.name} failed in {method}: {type(exc).__name__}: {exc}{at}",
                where=f"{self.spec.name} on {socket.gethostname()}",
                fix=f"the traceback is in {Path(self.spec.logs) / self.spec.name}.log",
                code="role-failed",
            )
        exc.where = exc.where or f"{self.spec.name} on {socket.gethostname()}"
        try:
            pickle.loads(pickle.dumps(exc))
        except Exception:
            return type(exc)(exc.message, cause=exc.cause, fix=exc.fix, where=exc.where, code=exc.code, retryable=exc.retryable)
        return exc


class _Busy:
    """Names a call while it runs."""

    def __init__(self, host: Host, method: str) -> None:
        host._serial += 1
        self._host, self._key, self._method = host, host._serial, method

    def __enter__(self) -> None:
        self._host._calls[self._key] = (self._method, time.monotonic())

    def __exit__(self, *_: object) -> None:
        self._host._calls.pop(self._key, None)


def check_plugin(wanted: PluginRef) -> None:
    """Load a plug-in here as the driver did. Raises PluginError or PackerError (E9), naming this node, when it differs here."""
    from posttrain import plugins

    node = socket.gethostname()
    try:
        plugins.resolve(wanted.kind, wanted.name)
    except PosttrainError as exc:
        exc.where = f"node {node}" + (f", {exc.where}" if exc.where else "")
        exc.fix = f"{exc.fix}; it is installed on the driver: install or mount it identically on every node"
        raise
    if not wanted.distribution:
        return
    found = {i.distribution: i.version for i in plugins.discover(wanted.kind) if i.name == wanted.name.split("/")[-1]}
    if found.get(wanted.distribution) != wanted.version:
        raise PluginError(
            f"{wanted.kind} plug-in {wanted.name!r} is {wanted.distribution} {found.get(wanted.distribution, 'absent')} on node "
            f"{node}, and {wanted.version} on the driver",
            where=f"node {node}",
            cause="the nodes do not hold the same packages",
            fix=f"pip install {wanted.distribution}=={wanted.version} on every node",
            code="plugin-differs",
        )


def boot_id() -> str:
    """Names this machine and its boot; "" where the system has no such thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _leave(session: tuple[ProcessId, ...]) -> None:
    """The driver is gone: give back this process's shared memory, and end what is left of the cluster that was the driver's own.

    Ray's agents notice the end of their cluster after half a minute, if nobody tells them.
    """
    release_own()
    for process in session:
        if process.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def _redirect(path: Path) -> tuple[str, int]:
    """From here on what this process and its libraries print goes to the role's log, and a crash leaves its stacks there.

    What it printed before comes first: that is in files of Ray's on its own node, where the driver may not see it. Returns the
    log, and its size before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    start = os.fstat(fd).st_size
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.write(fd, _printed(number))
        os.dup2(fd, number)
    os.close(fd)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("posttrain").setLevel(logging.INFO)
    return str(path), start


def _printed(number: int) -> bytes:
    """What is in the file that this process prints to, but for the lines `:job_id:…` by which Ray tells jobs and actors apart."""
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            return b""
        lines = Path(f"/proc/self/fd/{number}").read_bytes().splitlines(keepends=True)
    except OSError:
        return b""
    return b"".join(line for line in lines if not line.startswith(b":"))


def _outlive_the_group() -> None:
    """Start Python's resource tracker, which unlinks the shared memory of processes that died, in a session of its own.

    When a worker dies, Ray ends its process group with SIGKILL: the engine's processes, and the tracker before it has cleaned up.
    It ends when the last process that shares its pipe has.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        return
    reading, tracker._fd = os.pipe()
    command = [sys.executable, "-c", f"from multiprocessing.resource_tracker import main; main({reading})"]
    process = subprocess.Popen(command, pass_fds=[reading], stdin=subprocess.DEVNULL, start_new_session=True)
    os.close(reading)
    tracker._pid = process.pid
    process.returncode = 0  # only `tracker` waits for it


def _devices(shared: tuple[str, ...]) -> tuple[str, ...]:
    """The GPUs that this process uses, made visible before anything initialises CUDA."""
    import ray

    devices = tuple(str(device) for device in ray.get_gpu_ids()) + shared
    if shared:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return devices


def _address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


async def _processes(role: Any) -> Mapping[str, str]:
    """What the processes of a role say of themselves, for a role that has some."""
    if not hasattr(role, "stacks"):
        return {}
    try:
        found: Mapping[str, str] = await asyncio.wait_for(role.stacks(), STACKS_S)
    except Exception as exc:
        return {"its processes": f"silent: {type(exc).__name__}: {exc}"}
    return found
