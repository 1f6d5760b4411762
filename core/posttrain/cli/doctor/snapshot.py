"""What a machine is like, as plain data: `probe.py` fills it, the checks read it, and tests write it by hand.

Values of secret variables are not in it: `environ` has the variables that the checks and a bug report need, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from posttrain.placement.ports import Holder

GIB = 2**30
State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor. warn: works, but not everywhere or not well; fail: a run that needs it will not work."""

    check: str
    state: State
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a file system."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a run would take: the key or flag that chooses it, and who has it now."""

    chosen_by: str
    number: int
    holder: Holder | None = None


@dataclass(frozen=True, slots=True)
class UcxCopy:
    """A UCX that a process could load. found_by: nixl (its own), LD_PRELOAD, LD_LIBRARY_PATH, or the system's linker."""

    folder: str
    found_by: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    python: str = ""
    system: str = ""
    posttrain: str = ""
    cores: int = 1
    memory: int | None = None  # bytes
    environ: Mapping[str, str] = field(default_factory=dict)
    requires_python: str = ""  # of posttrain's own metadata, as are the requirements
    requirements: tuple[str, ...] = ()
    installed: Mapping[str, str] = field(default_factory=dict)  # version of every distribution that they name
    devices: tuple[str, ...] = ()  # names of the GPUs that the driver shows
    device_problem: str = ""  # why the driver did not answer
    driver_cuda: str = ""  # newest CUDA that the driver runs
    torch_cuda: str | None = None  # CUDA that torch is built for; None: a CPU build, or no torch
    vllm_cuda: str | None = None
    ucx: tuple[UcxCopy, ...] = ()
    cma: str | None = None  # "": one process read another's memory; else why not; None: not tried (no Linux)
    sandbox: str | None = None  # "": bubblewrap isolates programs; else why not; None: not tried (no Linux)
    interfaces: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()
    ray_answers: str | None = None  # what speaks at RAY_ADDRESS; "": nothing
    shm: Space | None = None
    disk: Space | None = None  # where runs go
    root: str = ""
    root_problem: str = ""  # why runs cannot be written there
    open_files: int | None = None
    hub_token: str = ""  # where it was found, never what it is
    receiver_declared: bool = True  # vLLM can find the plug-in that receives weights
    plugins: int = 0
    quarantined: tuple[tuple[str, str, str], ...] = ()  # name, problem, fix


Check = Callable[[Snapshot], Iterator[Finding]]


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"
