"""One NIXL agent over UCX, and nothing else: the only file that knows NIXL's names. Free of torch.

It talks to NIXL's bindings, not to its Python class: that one asks for a progress thread without a pause, which keeps a core busy
for each idle agent, and prints to the standard output. What is used is checked against the installed version when it is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from posttrain.errors import WeightSyncError

SUPPORTED = ("1.5", "1.6")
"""NIXL versions from the first, below the second."""

PAUSE_US = 1000
"""How long NIXL's progress thread sleeps when nothing arrives. An arriving message wakes it; 0 would be a busy loop."""

_USED = {
    "nixlAgentConfig": ("useProgThread", "pthrDelay", "useListenThread", "syncMode"),
    "nixlAgent": (
        "createBackend", "registerMem", "deregisterMem", "getLocalMD", "loadRemoteMD", "invalidateRemoteMD", "createXferReq",
        "postXferReq", "getXferStatus", "releaseXferReq", "getAvailPlugins",
    ),
    "nixlRegDList": (), "nixlXferDList": (), "DRAM_SEG": (), "VRAM_SEG": (), "NIXL_READ": (), "NIXL_SUCCESS": (),
    "NIXL_IN_PROG": (), "NIXL_THREAD_SYNC_NONE": (), "nixlRemoteDisconnectError": (),
}  # fmt: skip

Run = tuple[int, int, int]
"""(address at the peer, address here, bytes)."""


class PeerGone(WeightSyncError):
    """The other side of a transfer closed the connection or died."""


def package(cuda: str | None) -> str:
    """The NIXL build for a torch built for CUDA version `cuda` (None: for none), by the rule of the `nixl` package.

    Asking `nixl` itself would import torch where torch knows no CUDA. Raises WeightSyncError when there is none.
    """
    wanted = [f"nixl_cu{cuda.split('.')[0]}"] if cuda else ["nixl_cu13", "nixl_cu12", "nixl_rocm"]
    found = next((name for name in wanted if find_spec(name) is not None), None)
    if found is None:
        raise WeightSyncError(
            "the nixl transport needs NIXL, which is not installed", cause=f"none of {', '.join(wanted)} can be imported",
            fix="pip install 'posttrain[ray]', or use weights.transport=shm where policy and rollout share a machine",
            code="nixl", retryable=False,
        )  # fmt: skip
    return found


def check_version(package: str) -> str:
    """The version of this NIXL build. Raises WeightSyncError unless this adapter was written for it; loads nothing of NIXL."""
    try:
        installed = version(package.replace("_", "-"))
    except PackageNotFoundError:
        installed = "unknown"
    low, high = ([int(part) for part in bound.split(".")] for bound in SUPPORTED)
    release = [int(part) for part in installed.split(".")[:2] if part.isdigit()]
    if not low <= release < high:
        raise _unfit(installed, "other versions were not tried")
    return installed


def bindings(package: str) -> Any:
    """The bindings of this NIXL build. Raises WeightSyncError unless it is what this adapter was written for."""
    installed = check_version(package)
    found = import_module(f"{package}._bindings")
    if absent := list(_absent(found)):
        raise _unfit(installed, f"it lacks {', '.join(absent)}")
    return found


def _unfit(installed: str, cause: str) -> WeightSyncError:
    return WeightSyncError(
        f"NIXL {installed} is installed, posttrain's adapter is for {SUPPORTED[0]} up to, not including, {SUPPORTED[1]}",
        cause=cause, fix=f"pip install 'nixl>={SUPPORTED[0]},<{SUPPORTED[1]}'", code="nixl", retryable=False,
    )  # fmt: skip


def _absent(found: Any) -> Iterator[str]:
    for name, members in _USED.items():
        if not hasattr(found, name):
            yield name
        yield from (f"{name}.{member}" for member in members if not hasattr(getattr(found, name, None), member))


class Agent:
    """Memory of this process that others may read, and reads of theirs. For one thread at a time.

    serve: answer peers in a thread of UCX's own. An agent that only reads goes without: the thread would spin for the lock that a
    copy over CMA holds, and cost as much processor time as the copy.
    """

    def __init__(self, name: str, package: str, *, serve: bool = True) -> None:
        self._nixl = nixl = bindings(package)
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = serve, PAUSE_US
        config.useListenThread, config.syncMode = False, nixl.NIXL_THREAD_SYNC_NONE
        self.name = name
        self._agent = nixl.nixlAgent(name, config)
        if "UCX" not in self._agent.getAvailPlugins():
            raise WeightSyncError(
                f"NIXL of {package} has no UCX plug-in", cause="NIXL_PLUGIN_DIR, or a damaged installation",
                fix="unset NIXL_PLUGIN_DIR, or install nixl again", code="nixl", retryable=False,
            )  # fmt: skip
        self._ucx = self._agent.createBackend("UCX", {})
        self._peers: dict[str, bytes] = {}

    def register(self, address: int, nbytes: int, device: int | None = None) -> Any:
        """Let NIXL use memory of this process: of the host, or of CUDA device `device`. Returns what `deregister` takes."""
        descriptors = self._nixl.nixlRegDList(self._segment(device), [(address, nbytes, device or 0, "")])
        self._agent.registerMem(descriptors, [self._ucx])
        return descriptors

    def deregister(self, descriptors: Any) -> None:
        self._agent.deregisterMem(descriptors, [self._ucx])

    def metadata(self) -> bytes:
        """What a peer needs to read everything registered so far."""
        return bytes(self._agent.getLocalMD())

    def read(
        self, peer: str, metadata: bytes, runs: Sequence[Run], *, device: int | None, timeout: float, go_on: Callable[[], None]
    ) -> None:
        """Copy `runs` from the registered memory of `peer` (of its CUDA device `device`) into registered host memory.

        Returns when all of it has arrived. Calls `go_on` while it waits, which may raise. Raises PeerGone, or TimeoutError:
        then the transfer may still be writing, and only the end of this agent ends it.
        """
        try:
            self._meet(peer, metadata)
            here = self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(to, nbytes, 0) for _, to, nbytes in runs])
            there = self._nixl.nixlXferDList(self._segment(device), [(at, nbytes, device or 0) for at, _, nbytes in runs])
            transfer = self._agent.createXferReq(self._nixl.NIXL_READ, here, there, peer, "", [self._ucx])
            self._wait(transfer, self._agent.postXferReq(transfer), timeout, go_on)
            self._agent.releaseXferReq(transfer)
        except self._nixl.nixlRemoteDisconnectError as exc:
            self._peers.pop(peer, None)
            raise PeerGone("the peer disconnected", cause=str(exc)) from exc

    def _meet(self, peer: str, metadata: bytes) -> None:
        if self._peers.get(peer) == metadata:
            return
        try:
            self._agent.loadRemoteMD(metadata)
        except Exception as exc:
            raise PeerGone("the peer cannot be reached", cause=f"NIXL: {exc}") from exc
        self._peers[peer] = metadata

    def _wait(self, transfer: int, state: Any, timeout: float, go_on: Callable[[], None]) -> None:
        begun = time.monotonic()
        while state == self._nixl.NIXL_IN_PROG:
            waited = time.monotonic() - begun
            if waited > timeout:
                raise TimeoutError
            go_on()
            time.sleep(min(0.001, waited / 8))  # short reads are seen at once, long ones cost no core
            state = self._agent.getXferStatus(transfer)
        if state != self._nixl.NIXL_SUCCESS:
            raise WeightSyncError("NIXL failed to read it", cause=f"NIXL: {state}")

    def _segment(self, device: int | None) -> Any:
        return self._nixl.DRAM_SEG if device is None else self._nixl.VRAM_SEG
