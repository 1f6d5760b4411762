"""The process beside a policy rank or a rollout body in which NIXL and UCX run, and the line protocol that it is driven by.

A process of its own because UCX may end the process that it runs in (over TCP, when a reader gives up half-way), because only
the end of a process surely ends a read that is overdue, and because NCCL and UCX then never meet in one. It maps the shared
memory of its owner, so nothing is copied twice; it does not import torch; and it dies with its owner.

    owner → {"do": "serve" | "map" | "pull" | "report", …}        process → {} | {"…": …} | {"error": what, …}

One JSON object a line. What UCX prints arrives as log records of `posttrain.weights`.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import logging
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO, Any

from posttrain.errors import WeightSyncError
from posttrain.weights.nixl_agent import Agent
from posttrain.weights.owner import ProcessId, end_with
from posttrain.weights.shared_files import sweep
from posttrain.weights.ucx import scan_ucx_log, warm_nixl

log = logging.getLogger("posttrain.weights")

START_S = 180.0
"""How long the process may take to start: about a second on an idle machine, and more beside ranks that load a model."""


class NixlProcess:
    """The owner's side. Requests are made one at a time; `end` may be called by any thread, also during one.

    build: the package of NIXL     serve: whether others read from it (see `nixl_agent.Agent`), or it only pulls
    """

    def __init__(self, build: str, *, serve: bool) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, build, str(ProcessId.current()), "serve" if serve else "pull"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=environment,
        )  # fmt: skip
        self._printed: deque[str] = deque(maxlen=50)
        self._reader = threading.Thread(target=self._read_log, name="posttrain-nixl-log", daemon=True)
        self._reader.start()
        self._ended = False
        try:
            started = ProcessId.parse(self.ask({"do": "start"}, START_S)["id"])
        except BaseException:
            self.close()  # nobody else can: there is no object
            raise
        assert started is not None
        self.id = started

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to `request`. Raises WeightSyncError when it is an error, when there is none within `timeout` seconds (the
        process is then ended), or when the process ended."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):  # it ended: the end of its answers says so
            process.stdin.write(json.dumps(request).encode() + b"\n")
        line, deadline = b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.end()
                raise self._why_silent(timeout)
            part = os.read(process.stdout.fileno(), 2**16)
            if not part:
                raise self._why_ended()
            line += part
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WeightSyncError(
                answer["error"], cause=answer["cause"], fix=answer["fix"], code=answer["code"], retryable=answer["retryable"]
            )
        return answer

    @property
    def alive(self) -> bool:
        # not poll(): a process with threads is not reaped until the last of them has ended, some time after it died
        return not self._ended and self.id.alive()

    def end(self) -> None:
        """Kill the process: from here on it neither reads nor writes memory. Idempotent."""
        self._ended = True
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and give back the pipes to it. Not during a request of another thread: `end` first."""
        self.end()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._printed.append(text)
            log.info("nixl process %d: %s", self._process.pid, text)

    def _why_silent(self, timeout: float) -> WeightSyncError:
        sign = scan_ucx_log("\n".join(self._printed.copy()))  # a crash that UCX's handler holds
        return WeightSyncError(
            f"the NIXL process did not answer within {timeout:.3g} s" + (f": {sign.message}" if sign else ""),
            cause=sign.cause if sign else "", fix=sign.fix if sign else "", code="deadline", anchor=sign.anchor if sign else "",
        )  # fmt: skip

    def _why_ended(self) -> WeightSyncError:
        if self._ended:
            return WeightSyncError("the lane was closed", code="stopped")
        status = self._process.wait()
        self._reader.join(1.0)
        sign = scan_ucx_log("\n".join(self._printed))
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        said = next((line for line in reversed(self._printed) if line.strip()), "it printed nothing")
        return WeightSyncError(
            f"the NIXL process ended ({how})" + (f": {sign.message}" if sign else ""),
            cause=sign.cause if sign else said, fix=sign.fix if sign else "read logs/weights.log",
            code=sign.code if sign else "nixl", anchor=sign.anchor if sign else "",
        )  # fmt: skip


# ---- in the process itself


class _Server:
    """What the requests do. Files are mapped once, and forgotten when their owner has unlinked them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._mapped: dict[str, tuple[mmap.mmap, int, Any]] = {}

    def start(self) -> dict[str, Any]:
        return {"id": str(ProcessId.current())}

    def serve(self, path: str, nbytes: int) -> dict[str, Any]:
        """Let others read the file; the answer is what they need for it."""
        address = self._address(path, nbytes)
        metadata = base64.b64encode(self._agent.metadata()).decode()
        return {"agent": self._agent.name, "metadata": metadata, "address": address}

    def map(self, path: str, nbytes: int) -> dict[str, Any]:
        """Get ready to write to the file."""
        self._address(path, nbytes)
        return {}

    def pull(
        self, agent: str, metadata: str, device: int | None, owner: str | None, into: str, nbytes: int, runs: list[list[int]],
        timeout: float,
    ) -> dict[str, Any]:  # fmt: skip
        """Read `runs` (address at the peer, offset in `into`, bytes). `owner`: the process that must live, if on this host."""
        here, serving = self._address(into, nbytes), ProcessId.parse(owner) if owner else None
        self._agent.read(
            agent, base64.b64decode(metadata), [(at, here + offset, size) for at, offset, size in runs],
            device=device, timeout=timeout, go_on=_alive(serving),
        )  # fmt: skip
        return {}

    def report(self) -> dict[str, Any]:
        """The files that are mapped, and registered."""
        return {"mapped": list(self._mapped)}

    def _address(self, path: str, nbytes: int) -> int:
        if path not in self._mapped:
            for gone in [known for known in self._mapped if not os.path.exists(known)]:
                self._agent.deregister(self._mapped.pop(gone)[2])
            fd = os.open(path, os.O_RDWR)
            try:
                shared = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            finally:
                os.close(fd)
            address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
            self._mapped[path] = shared, address, self._agent.register(address, nbytes)
        return self._mapped[path][1]


def _alive(process: ProcessId | None) -> Callable[[], None]:
    """A check for the wait of a read: raises as soon as `process` is gone. Looks at most 50 times a second."""
    last = 0.0

    def check() -> None:
        nonlocal last
        now = time.monotonic()
        if process is not None and now - last > 0.02:
            last = now
            if not process.alive():
                raise WeightSyncError("the process that served it died", code="peer")

    return check


def main(build: str, owner: str, role: str) -> None:
    """Answer requests until the owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the owner decides
    watched = ProcessId.parse(owner)
    assert watched is not None
    end_with(watched, last=sweep)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # UCX prints to the standard output
    server: _Server | None = None
    for request in _requests(sys.stdin.buffer):
        try:
            if server is None:
                server = _Server(warm_nixl(f"posttrain-{watched}-{os.getpid()}", build, serve=role == "serve"))
            answer = getattr(server, request.pop("do"))(**request)
        except Exception as exc:
            answer = _failure(exc)
        answers.write(json.dumps(answer).encode() + b"\n")


def _requests(lines: IO[bytes]) -> Iterator[dict[str, Any]]:
    for line in iter(lines.readline, b""):
        yield json.loads(line)


def _failure(exc: Exception) -> dict[str, Any]:
    known = exc if isinstance(exc, WeightSyncError) else WeightSyncError("NIXL failed", cause=f"{type(exc).__name__}: {exc}")
    if isinstance(exc, TimeoutError):
        known = WeightSyncError("the peer does not answer", cause="the deadline of one bucket", code="deadline")
    return {
        "error": known.message, "cause": known.cause, "fix": known.fix, "code": known.code, "retryable": known.retryable,
    }  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
