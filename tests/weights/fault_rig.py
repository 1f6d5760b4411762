"""Two policy ranks, two lanes, and a trap in each that fires one fault at one bucket: what the fault matrix runs on.

On `inproc` all four live in this process. On other transports each is a process of its own, forked from a server that has
torch loaded, and kill -9 is kill -9. They are used from cell to cell; only what died is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

import torch
from weight_toys import LAYERS, ToyEngine, logprobs, says, trained

from posttrain.errors import WeightSyncError
from posttrain.policy.sharding import chunk, fsdp_shards
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.owner import ProcessId, end_with
from posttrain.weights.progress import WORD
from posttrain.weights.publication import LocalWeight, Publication, PublicationPool, nobody
from posttrain.weights.publisher import LocalPublisher
from posttrain.weights.receiver import Receiver
from posttrain.weights.shared_files import owner_of, shared_folder
from posttrain.weights.shm import ShmTransport
from posttrain.weights.transport import Transport

RANKS, LANES = 2, 2
BUCKET_BYTES = 1024
LONG_S, STALL_S = 20.0, 0.3
PROMPT = (3, 1, 4)

# ---- faults


@dataclass(frozen=True)
class Fault:
    """kind: raise, die, stall, corrupt, wrong epoch, partial
    phase: publish, stage or apply     bucket: -1 in apply, and while a rank digests"""

    kind: str
    phase: str
    bucket: int
    pid: int | None = None  # for the kind "owner dies"


class Trap:
    """Fires its fault once, where the role that holds it comes by."""

    def __init__(self, tell: Any = None) -> None:
        self.fault: Fault | None = None
        self.gate = threading.Event()
        self.tell = tell or (lambda bucket: None)

    def arm(self, fault: Fault) -> None:
        self.fault, self.gate = fault, threading.Event()

    def disarm(self) -> None:
        self.fault = None
        self.gate.set()

    def deadline(self, timeout: float) -> float:
        """A peer that will stall has a short one; the others keep theirs, on a busy machine too."""
        return STALL_S if self.fault is not None and self.fault.kind == "stall" else timeout

    def take(self, phase: str, bucket: int, *kinds: str) -> str | None:
        found = self.fault
        if found is None or (found.phase, found.bucket) != (phase, bucket) or found.kind not in kinds:
            return None
        self.fault = None
        return found.kind

    def spring(self, kind: str, *, in_process: bool) -> None:
        if kind == "raise":
            raise RuntimeError("injected fault")
        if kind == "die" and in_process:
            raise SystemExit("injected death")
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stall":
            self.gate.wait(30)


class TrappedTransport(Transport):
    """A lane's end with a trap in `pull`."""

    def __init__(self, inner: Transport, trap: Trap, at: Any, *, in_process: bool) -> None:
        self.inner, self.trap, self.at, self.in_process = inner, trap, at, in_process

    def fresh(self) -> TrappedTransport:
        return TrappedTransport(self.inner.fresh(), self.trap, self.at, in_process=self.in_process)

    def allocate(self, nbytes):
        return self.inner.allocate(nbytes)

    def renew(self, handle):
        return self.inner.renew(handle)

    def staging(self, nbytes, *, shared=False):
        return self.inner.staging(nbytes, shared=shared)

    def register(self, region) -> None:
        self.inner.register(region)

    def pull(self, handle, pieces, into) -> None:
        if pieces[0].name == WORD:
            return self.inner.pull(handle, pieces, into)
        bucket, owner = self.at(), self.trap.fault.pid if self.trap.fault else None
        self.trap.tell(bucket)
        kind = self.trap.take("stage", bucket, "raise", "die", "stall", "corrupt", "partial", "owner dies")
        if kind == "owner dies":
            if owner is None:
                handle = {**handle, "slot": -1}
            else:
                os.kill(owner, signal.SIGKILL)
                while ProcessId(owner, _start(owner)).alive():
                    pass
        elif kind:
            self.trap.spring(kind, in_process=self.in_process)
        if kind == "partial":
            pieces = [p._replace(stop=p.start + (p.stop - p.start) // 2, nbytes=p.nbytes // 2) for p in pieces if p.name != WORD]
        self.inner.pull(handle, pieces, into)
        if kind == "corrupt":
            into.buffer[pieces[0].target + 3] ^= 0x40

    def close(self) -> None:
        self.inner.close()


class TrappedPool(PublicationPool):
    """A policy rank's slots with a trap where each piece is written, and one in what was written."""

    trap: Trap
    in_process: bool
    trained: int
    left_out: set[int]

    def _write(self, place, piece, weight):
        self.trap.tell(self.at)
        if kind := self.trap.take("publish", self.at, "raise", "die", "stall"):
            self.trap.spring(kind, in_process=self.in_process)
        own = super()._write(place, piece, weight)  # what goes wrong now does so before a lane pulls it, and before its digest
        kind = self.trap.take("publish", self.at, "corrupt", "wrong epoch", "partial")
        if kind == "corrupt":
            place.view(torch.uint8)[5] ^= 1
        elif kind == "wrong epoch":  # the bytes of the version before
            place.copy_(trained(self.trained - 1)[piece.name].reshape(-1)[piece.start : piece.stop])
        elif kind == "partial":
            self.left_out.add(self.at)
        return own

    def write(self, version, source, opened=nobody):
        self.left_out = set()
        return super().write(version, source, opened)

    def digests(self, version):
        if kind := self.trap.take("publish", -1, "raise", "die", "stall"):
            self.trap.spring(kind, in_process=self.in_process)
        return {bucket: digest for bucket, digest in super().digests(version).items() if bucket not in self.left_out}


# ---- roles


def registered(transport: Transport) -> dict[str, Any]:
    """What is mapped for a transport: how many files its NIXL processes have, by what they do, and which files are gone.

    shm maps the slots of others; a NIXL process maps its owner's slots, to serve them, or its owner's staging, to pull into it.
    """
    processes = getattr(transport, "_processes", {})
    mapped = {role: p.ask({"do": "report"}, LONG_S)["mapped"] for role, p in processes.items() if p.alive}
    paths = [path for own in (getattr(transport, "_attached", {}), *mapped.values()) for path in own]
    return {
        "serve": len(mapped.get("serve", ())), "pull": len(mapped.get("pull", ())),
        "gone": [path for path in paths if not os.path.exists(path)],
    }  # fmt: skip


def make_transport(name: str) -> Transport:
    """By hand: the look-up of plug-ins would take longer than everything else that a new process does."""
    if name == "nixl":
        from posttrain.weights.nixl import NixlTransport

        return NixlTransport()
    return {"inproc": InprocTransport, "shm": ShmTransport}[name]()


class RankRole:
    """One policy rank: half of every parameter."""

    def __init__(self, transport: str, rank: int, *, in_process: bool, tell: Any = None) -> None:
        self.trap = Trap(tell)
        shards = fsdp_shards(1, RANKS)
        self.pool = TrappedPool(make_transport(transport), bucket_bytes=BUCKET_BYTES, shards=shards, rank=rank)
        self.pool.trap, self.pool.in_process, self.pool.trained = self.trap, in_process, 0
        self.publisher = LocalPublisher(self.pool, self._weights)

    def _weights(self):
        for name, tensor in trained(self.pool.trained).items():
            start, stop = chunk(tuple(tensor.shape), RANKS, self.pool.rank)
            yield LocalWeight(name, tuple(tensor.shape), start, tensor.reshape(-1)[start:stop])

    async def train(self, version: int) -> None:
        self.pool.trained = version

    async def publish(self, version: int, opened: Any = None):
        self.publisher.timeout_s = self.trap.deadline(LONG_S)
        return await self.publisher.publish(version, opened or self.trap.tell)

    async def digests(self, version: int):
        return await self.publisher.digests(version)

    async def retract(self, version: int) -> None:
        await self.publisher.retract(version)

    async def hold(self, version: int) -> None:
        await self.publisher.hold(version)

    async def release(self, version: int) -> None:
        await self.publisher.release(version)

    async def arm(self, fault: Fault) -> None:
        self.trap.arm(fault)

    async def disarm(self) -> None:
        self.trap.disarm()
        self.pool._idle.wait(5)

    async def report(self) -> dict[str, Any]:
        slots = self.pool._slots
        return {"held": sum(s.holders for s in slots), "slots": len(slots)} | registered(self.pool._transport)

    async def close(self) -> None:
        await self.publisher.close()


class LaneRole:
    """One rollout body: a toy engine and the receiver in front of it."""

    def __init__(self, transport: str, name: str, *, in_process: bool, tell: Any = None) -> None:
        self.trap, self.in_process = Trap(tell), in_process
        self.engine = ToyEngine()
        self.engine.on_write = self._on_write
        type(self.engine).shared_staging = not in_process
        at = lambda: self.receiver.at  # noqa: E731
        end = TrappedTransport(make_transport(transport), self.trap, at, in_process=in_process)
        self.receiver = Receiver(self.engine, end, name=name, grace_s=0.1)
        stage = self.receiver.lane.stage

        def late(epoch: int, bucket: int) -> bool:
            return stage(epoch - 1 if self.trap.take("stage", bucket, "wrong epoch") else epoch, bucket)

        self.receiver.lane.stage = late  # type: ignore[method-assign]

    def _on_write(self, position: int, name: str) -> Any:
        engine = self.engine
        if position == LAYERS - 1 and self.trap.take("apply", -1, "wrong epoch"):
            engine.stamp = -1
        kinds = ("raise", "die", "stall", "corrupt", "partial")
        kind = self.trap.take("apply", -1, *kinds) if position == LAYERS // 2 else None
        if kind == "stall":
            return asyncio.sleep(30)
        if kind == "die" and self.in_process:
            raise asyncio.CancelledError
        if kind in ("raise", "die"):
            self.trap.spring(kind, in_process=self.in_process)
        if kind == "corrupt":
            first = next(iter(engine.weights))
            engine.weights[first] = -engine.weights[first]
        return "leave out" if kind == "partial" else None

    async def start(self) -> None:
        await self.engine.start()

    async def stage(self, publication, *, timeout: float) -> None:
        await self.receiver.stage(publication, timeout=self.trap.deadline(timeout))

    async def prove(self, digests) -> None:
        await self.receiver.prove(digests)

    async def commit(self, *, timeout: float) -> None:
        await self.receiver.commit(timeout=self.trap.deadline(timeout))

    async def abort(self, cause: str) -> None:
        await self.receiver.abort(cause)

    async def rebuild(self) -> None:
        await self.receiver.rebuild()

    async def logprobs(self, sequences) -> list[list[float]]:
        return await self.receiver.logprobs(sequences)

    async def invalidate(self, cause: str) -> None:
        await self.receiver.invalidate(cause)

    async def writes(self) -> int:
        """How many parameters were ever written to the engine."""
        return self.engine.writes

    async def ask(self) -> tuple[list[int], int]:
        return await self.engine.ask(PROMPT)

    async def arm(self, fault: Fault) -> None:
        self.trap.arm(fault)

    async def disarm(self) -> None:
        self.trap.disarm()

    async def report(self) -> dict[str, Any]:
        pulls = [t for t in threading.enumerate() if t.name in ("posttrain-_pull", "posttrain-_look")]
        for thread in pulls:
            await asyncio.to_thread(thread.join, 5)
        inner = self.receiver._transport.inner  # type: ignore[attr-defined]
        staged = self.receiver._staged is not None
        return {"pulls": sum(t.is_alive() for t in pulls), "staged": staged} | registered(inner)

    async def close(self) -> None:
        await self.receiver.close()


# ---- processes


def _serve(connection: Any, parent: ProcessId, role: type, arguments: tuple[Any, ...]) -> None:
    end_with(parent)
    torch.set_num_threads(1)
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock, contextlib.suppress(OSError):
            connection.send(message)

    async def answer(hosted: Any, number: int, method: str, args: Any, kwargs: Any) -> None:
        try:
            send((number, await getattr(hosted, method)(*args, **kwargs), None))
        except Exception as exc:
            send((number, None, exc))

    async def main() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        hosted, tasks = role(*arguments, in_process=False, tell=lambda bucket: send(("at", bucket))), set()

        def begin(message: Any) -> None:
            task = loop.create_task(answer(hosted, *message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while (message := connection.recv()) is not None:
                    loop.call_soon_threadsafe(begin, message)
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=read, daemon=True).start()
        await done.wait()

    asyncio.run(main())
    os._exit(0)  # a pull that stalls is not waited for


class Worker:
    """A role in a process of its own; every method of it can be awaited. `at` is the bucket that it last said it was at."""

    def __init__(self, name: str, role: type, *arguments: Any) -> None:
        self.name, self.proved, self._role, self._arguments = name, False, role, arguments
        self.start_process()

    def start_process(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, ProcessId.current(), self._role, self._arguments), daemon=True, name=self.name
        )
        self.process.start()
        theirs.close()
        self.at: int | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._serial = 0
        threading.Thread(target=self._read, args=(self._connection, self._calls, self.process), daemon=True).start()

    @property
    def pid(self) -> int:
        return int(self.process.pid or 0)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._loop = asyncio.get_running_loop()
        future = self._loop.create_future()
        self._serial += 1
        self._calls[self._serial] = future
        try:
            self._connection.send((self._serial, method, args, kwargs))
        except OSError as exc:
            self._calls.pop(self._serial, None)  # told here; nobody asks the future
            process = self.process
            await asyncio.to_thread(process.join, 5)  # the pipe is closed before it has ended
            raise self._died(process) from exc
        return await future

    def _read(self, connection: Any, calls: dict[int, asyncio.Future[Any]], process: Any) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = connection.recv()
                if message[0] == "at" and isinstance(message[1], Publication):
                    self._soon(self._opened, message[1])
                    continue
                if message[0] == "at":
                    self.at = message[1]
                    continue
                number, value, exc = message
                self._settle(calls.pop(number), value, exc)
        process.join(5)
        for future in list(calls.values()):
            self._settle(future, None, self._died(process))

    def _died(self, process: Any) -> WeightSyncError:
        return WeightSyncError(f"{self.name} died: its process was ended by signal {-process.exitcode}")

    async def publish(self, version: int, opened: Any) -> Any:
        self._opened = opened
        return await self.call("publish", version)

    def _settle(self, future: asyncio.Future[Any], value: Any, exc: BaseException | None) -> None:
        def settle() -> None:
            if not future.done():
                future.set_result(value) if exc is None else future.set_exception(exc)

        self._soon(settle)

    def _soon(self, call: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args, **kwargs: self.call(method, *args, **kwargs)

    async def rebuild(self) -> None:
        """As a supervisor does it: a new process in place of a dead one."""
        self.proved = False
        if self.process.is_alive():
            await self.call("rebuild")
        else:
            self.start_process()
            await self.call("start")

    async def close(self) -> None:
        if self.process.is_alive():
            await self.call("close")

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self.process.join(5)
        self.process.kill()
        self.process.join(5)


class Here:
    """The same role in this process."""

    pid = None

    def __init__(self, name: str, role: type, *arguments: Any) -> None:
        self.name, self.proved, self._role, self._arguments = name, False, role, arguments
        self.start_process()

    def start_process(self) -> None:
        self.hosted = self._role(*self._arguments, in_process=True)

    @property
    def at(self) -> int | None:
        return (self.hosted.receiver if isinstance(self.hosted, LaneRole) else self.hosted.publisher).at

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return getattr(self.hosted, method)

    async def rebuild(self) -> None:
        self.proved = False
        await self.hosted.rebuild()

    def end(self) -> None: ...


def own_files(pids: set[int]) -> dict[int, int]:
    """Shared memory files by the process that owns them."""
    found: dict[int, int] = {}
    for path in shared_folder().glob("posttrain-*"):
        owner = owner_of(path)
        if owner is not None and owner.pid in pids:
            found[owner.pid] = found.get(owner.pid, 0) + 1
    return found


def expected_logprobs(version: int, sequences: Any) -> list[list[float]]:
    return logprobs(trained(version), sequences)


def expected_answer(version: int) -> list[int]:
    return says(trained(version), PROMPT)


def _start(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rsplit(b")", 1)[1].split()[19])
    return 0
