"""The transport between processes and machines: NIXL over UCX, one read for each bucket.

Each end has a process of its own in which NIXL runs (`nixl_process`); slots and staging are shared memory that it maps too, or,
with `device="cuda:0"`, GPU memory that this process registers itself. UCX picks the way: RDMA on a cluster, CMA (the kernel
copies from process to process) on one machine, TCP otherwise. A pull has a deadline; one that is overdue, or whose lane is
closed, is ended with its process, and only then is the staging memory given back.
"""

from __future__ import annotations

import base64
import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from posttrain.errors import WeightSyncError
from posttrain.weights.memory import Region, shared_region
from posttrain.weights.nixl_agent import check_version, package
from posttrain.weights.nixl_process import NixlProcess
from posttrain.weights.owner import ProcessId, pid_namespace
from posttrain.weights.plan import Piece
from posttrain.weights.transport import End, Handle, Transport, runs
from posttrain.weights.ucx import warm_nixl

GRACE_S = 1.0
"""How much longer this process waits for an answer than the NIXL process waits for the peer."""


class NixlTransport(Transport):
    """NIXL over UCX: RDMA between machines, CMA or TCP on one."""

    name: ClassVar[str] = "nixl"
    provides: tuple[str, ...] = ("between_processes",)

    @dataclass(frozen=True)
    class Options:
        timeout_s: float = 60.0  # seconds that one bucket may take
        device: str = "cpu"  # where a policy rank keeps its slots: cpu, or cuda:<index>

    options: Options

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._slots: dict[int, Region] = {}  # by the number that is in their handles
        self._registered: dict[int, Any] = {}  # by the same: slots of a GPU, which this process registers itself
        self._processes: dict[End, NixlProcess] = {}
        self._closed = False
        self._starting = threading.Lock()
        if torch.device(self.options.device).type == "cuda" and torch.cuda.is_available():
            warm_nixl()  # this process will register its slots itself: before a process group brings NCCL in

    @classmethod
    def preflight(cls) -> None:
        check_version(package(torch.version.cuda))

    def warm(self, end: End) -> None:
        if end == "pull" or torch.device(self.options.device).type == "cpu":  # NIXL for slots of a GPU is started already
            self._process(end)

    def _process(self, end: End) -> NixlProcess:
        """The NIXL process of this end, started if need be. Raises WeightSyncError when it cannot be started."""
        with self._starting:
            process = self._processes.get(end)
            if self._closed:
                raise WeightSyncError("the lane was closed", code="stopped")
            if process is None or not process.alive:
                if process is not None:
                    process.close()
                process = self._processes[end] = NixlProcess(package(torch.version.cuda), serve=end == "serve")
            return process

    def staging(self, nbytes: int, *, shared: bool = False) -> Region:
        return shared_region(nbytes)

    def allocate(self, nbytes: int) -> tuple[Region, Handle]:
        device = torch.device(self.options.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise WeightSyncError(
                f"no slot can be allocated on {device}", cause="torch sees no GPU", fix="leave the transport's device at cpu",
                code="nixl", retryable=False,
            )  # fmt: skip
        region = shared_region(nbytes) if device.type == "cpu" else Region(torch.empty(nbytes, dtype=torch.uint8, device=device))
        number = len(self._slots)
        self._slots[number] = region
        return region, self._serve(number)

    def renew(self, handle: Handle) -> Handle:
        process = self._processes.get("serve")
        served = process is not None and process.alive and handle["server"] == str(process.id)
        return handle if served or handle["device"] is not None else self._serve(handle["slot"])

    def register(self, region: Region) -> None:
        self._ask("pull", "map", path=_path(region), nbytes=region.nbytes)

    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        here = handle["place"] == _place()
        owner, server = ProcessId.parse(handle["owner"]), ProcessId.parse(handle["server"])
        assert owner is not None and server is not None
        try:
            if here and not (owner.alive() and server.alive()):
                raise WeightSyncError("its process died", code="peer")
            self._ask(
                "pull", "pull",
                agent=handle["agent"], metadata=handle["metadata"], device=handle["device"], owner=str(server) if here else None,
                into=_path(into), nbytes=into.nbytes,
                runs=[(handle["address"] + at, to, nbytes) for at, to, nbytes in runs(pieces)], timeout=self.options.timeout_s,
            )  # fmt: skip
        except WeightSyncError as exc:
            exc.message = f"was not pulled from {handle['peer']}: {exc.message}"
            raise

    def close(self) -> None:
        self._closed = True
        for process in list(self._processes.values()):
            process.end()
        with self._starting:  # one that was just being started
            for process in self._processes.values():
                process.end()
        while self._registered:  # before the memory is given back: the agent outlives this end
            warm_nixl().deregister(self._registered.popitem()[1])
        for region in self._slots.values():
            region.release()
        self._slots.clear()

    def _serve(self, number: int) -> Handle:
        region = self._slots[number]
        where: dict[str, Any]
        if region.path is not None:
            where = self._ask("serve", "serve", path=region.path, nbytes=region.nbytes)
            where |= {"server": str(self._processes["serve"].id), "device": None}
        else:  # another process cannot register this one's GPU memory
            agent, index = warm_nixl(), region.buffer.get_device()
            torch.cuda.synchronize(index)
            self._registered[number] = agent.register(region.buffer.data_ptr(), region.nbytes, index)
            where = {"agent": agent.name, "metadata": base64.b64encode(agent.metadata()).decode(), "device": index}
            where |= {"address": region.buffer.data_ptr(), "server": str(ProcessId.current())}
        peer = f"process {os.getpid()} on {platform.node()}"
        return {**where, "slot": number, "place": _place(), "owner": str(ProcessId.current()), "peer": peer}

    def _ask(self, end: End, what: str, **details: Any) -> dict[str, Any]:
        return self._process(end).ask({"do": what, **details}, self.options.timeout_s + GRACE_S)


def _path(staging: Region) -> str:
    if staging.path is None:
        raise WeightSyncError(
            "the NIXL process cannot write to private memory", fix="take it from staging() of the transport",
            code="nixl", retryable=False,
        )  # fmt: skip
    return staging.path


@cache
def _place() -> str:
    """Where process ids mean the same: this boot of this machine, in this container."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {pid_namespace()}"
    except OSError:
        return platform.node()
