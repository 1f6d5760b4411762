"""Which UCX and which NCCL this process has loaded, and the order in which NIXL may be started: first.

A second UCX in the process, or NCCL started before NIXL, ends in a segmentation fault at the first registration of memory, long
after the mistake. So it is looked for before NIXL's first agent is made, and refused. What UCX then prints is read for the lines
that announce the fault (`scan_ucx_log`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from posttrain.errors import WeightSyncError
from posttrain.weights.nixl_agent import Agent, package

_LIBRARY = re.compile(r"(/\S*)/lib(ucp|ucs|nccl)\b[^/\s]*\.so[^/\s]*(?: \(deleted\))?$")
_ANCHOR = "howto/transports.md"
_agent: Agent | None = None


@dataclass(frozen=True)
class Loaded:
    """ucx, nccl: the directories that they were loaded from     started: signs that NCCL is in use, in words."""

    ucx: frozenset[str]
    nccl: frozenset[str]
    started: tuple[str, ...] = ()


def loaded_now() -> Loaded:
    """What this process has loaded. Where there is no /proc: nothing can be seen, and nothing is."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
        threads = [Path(task, "comm").read_text(errors="replace") for task in Path("/proc/self/task").iterdir()]
    except OSError:
        maps, threads = "", []
    found = in_maps(maps)
    return Loaded(found.ucx, found.nccl, tuple(nccl_in_use(threads)))


def in_maps(maps: str) -> Loaded:
    """The libraries in the text of a /proc/<pid>/maps."""
    found: dict[str, set[str]] = {"ucx": set(), "nccl": set()}
    for line in maps.splitlines():
        if match := _LIBRARY.search(line):
            found["nccl" if match[2] == "nccl" else "ucx"].add(os.path.realpath(match[1]))
    return Loaded(frozenset(found["ucx"]), frozenset(found["nccl"]))


def nccl_in_use(threads: Iterable[str]) -> Iterable[str]:
    """Process groups over NCCL, and threads (by name) that NCCL started itself.

    That libnccl is mapped says nothing: importing torch does that where torch is built for CUDA.
    """
    groups = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    for backend, *_ in dict(getattr(groups, "pg_map", {})).values():
        if "nccl" in str(backend):
            yield f"a process group over {backend}"
    yield from sorted({f"a thread named {name.strip()}" for name in threads if name.startswith("NCCL")})


def order_problem(loaded: Loaded, own: str | None) -> WeightSyncError | None:
    """Why NIXL must not be started in a process with `loaded`; `own` is the directory of the UCX that comes with NIXL."""
    foreign = sorted(directory for directory in loaded.ucx if own is not None and directory != own)
    if loaded.started:
        what, cause = "NCCL is already in use in this process", "; ".join(loaded.started)
        fix = "call warm_nixl() first: before init_process_group, and before anything that makes an NCCL communicator"
    elif foreign or len(loaded.ucx) > 1:
        what, cause = "another UCX is loaded in this process", f"{', '.join(foreign or sorted(loaded.ucx))} beside NIXL's own"
        fix = "take it out of LD_LIBRARY_PATH and LD_PRELOAD, and import what brings it (MPI, ucx-py) in another process"
    else:
        return None
    return WeightSyncError(
        f"NIXL cannot be started: {what}", cause=f"{cause}; registering memory would then end in a segmentation fault", fix=fix,
        anchor=f"{_ANCHOR}#start-up-order", code="nixl-order", retryable=False,
    )  # fmt: skip


def warm_nixl(name: str = "", build: str | None = None, *, serve: bool = True) -> Agent:
    """This process's NIXL agent, made on the first call: before any process group, NCCL communicator or other UCX.

    Looks at what is loaded, before and after. Raises WeightSyncError (code `nixl-order`) when the order is wrong. Takes about
    half a second once. `build`: the package of NIXL, else the one that fits the installed torch. `serve`: see `Agent`.
    """
    global _agent
    if _agent is None:
        build = build or package(_cuda())
        spec = find_spec(build)
        own = os.path.realpath(f"{Path(spec.origin).parent}.libs") if spec is not None and spec.origin else None
        problem = order_problem(loaded_now(), own if own is not None and os.path.isdir(own) else None)
        if problem is not None:
            raise problem
        agent = Agent(name or f"posttrain-{os.getpid()}", build, serve=serve)
        problem = order_problem(loaded_now(), None)
        if problem is not None:
            raise problem
        _agent = agent
    return _agent


def _cuda() -> str | None:
    import torch

    return torch.version.cuda


@dataclass(frozen=True)
class _Sign:
    pattern: re.Pattern[str]
    what: str
    cause: str
    fix: str


_OF_UCX = r"(?:\[(?!\d+:)[^\s\[\]:]+:\d+ *:\w+(?::\d+)?\]|\buc[mpst]_\w|\bucx_\w).*"
"""The beginning of a line that UCX prints, `[host:pid:thread:n]`, or a function or file of UCX."""

_SIGNS = (
    _Sign(
        re.compile(r"UCX CUDA support was not found|VRAM memory is detected as host by UCX"),
        "UCX does not see this machine's GPUs",
        "a UCX without CUDA was loaded before NIXL's own; the next registration of GPU memory is a segmentation fault",
        "start NIXL first (warm_nixl), and take other UCX builds out of LD_LIBRARY_PATH",
    ),
    _Sign(
        re.compile(r"ucp_mem_unmap|nixlAgent::registerMem"),
        "NIXL crashed while it registered memory",
        "a second UCX in the process, or NCCL started before NIXL",
        "start NIXL first (warm_nixl), and take other UCX builds out of LD_LIBRARY_PATH",
    ),
    _Sign(
        re.compile(_OF_UCX + r"(?:Caught signal \d+|Process frozen)"),
        "UCX's handler caught a crash of the process",
        "with UCX_HANDLE_ERRORS=freeze it then holds the process, which looks like a hang",
        "read the backtrace below that line; frames of registerMem mean that UCX or NCCL came before NIXL (posttrain doctor)",
    ),
    _Sign(
        re.compile(_OF_UCX + r"(?:Assertion .* failed|Fatal: unexpected error)"),
        "UCX ended its own process",
        "over TCP, UCX does not survive a peer that gave up in the middle of a read",
        "the next publication is served by a new process; on one machine allow CMA, between machines use RDMA",
    ),
)


def scan_ucx_log(text: str) -> WeightSyncError | None:
    """The failure that UCX or NIXL announce in `text` (of a Ray worker's .err file), with the line; None when there is none."""
    for sign in _SIGNS:
        for line in text.splitlines():
            if sign.pattern.search(line):
                return WeightSyncError(
                    f"{sign.what}: {line.strip()[:200]}", cause=sign.cause, fix=sign.fix,
                    anchor=f"{_ANCHOR}#what-ucx-prints", code="ucx",
                )  # fmt: skip
    return None
