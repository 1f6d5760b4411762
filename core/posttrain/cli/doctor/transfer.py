"""What weights travel over: which UCX a process would load, what it is told to use, and whether processes may read each other."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.cli.doctor.snapshot import Finding, Snapshot

_SHARED_MEMORY = {"all", "sm", "shm", "cma", "shared_memory"}
_CUDA = {"all", "cuda", "gpu", "cuda_copy", "cuda_ipc"}


def ucx(snapshot: Snapshot) -> Iterator[Finding]:
    """A second UCX in one process ends in a segmentation fault at the first registration of memory, or in a silent hang."""
    foreign = [copy for copy in snapshot.ucx if copy.found_by != "nixl"]
    for copy in foreign:
        preloaded = copy.found_by == "LD_PRELOAD"
        yield Finding(
            "ucx",
            "fail" if preloaded else "warn",
            f"another UCX in {copy.folder}, by {copy.found_by}" + (": every process has two" if preloaded else ""),
            f"take it out of {copy.found_by}"
            if copy.found_by.startswith("LD_")
            else "nothing while NIXL starts first, as warm_nixl does; import what brings it (MPI, ucx-py) in another process",
        )
    if not foreign:
        yield Finding("ucx", "ok", "NIXL's own and no other" if snapshot.ucx else "none; weights.transport=nixl needs nixl")


def ucx_variables(snapshot: Snapshot) -> Iterator[Finding]:
    environ = snapshot.environ
    devices = [name.strip() for name in environ.get("UCX_NET_DEVICES", "").split(",")]
    if "lo" in devices:
        yield Finding(
            "UCX_NET_DEVICES",
            "fail",
            f"{environ['UCX_NET_DEVICES']}: it hides that NIXL starts too late, and no other node can be reached over it",
            "unset UCX_NET_DEVICES; the order of the start is what matters, and warm_nixl keeps it",
        )
    transports = environ.get("UCX_TLS", "")
    if transports:
        yield from _transports(transports, bool(snapshot.devices))


def _transports(value: str, gpu: bool) -> Iterator[Finding]:
    names = {name.strip().partition(":")[0] for name in value.lstrip("^").split(",")}
    excluded = value.startswith("^")

    def absent(group: set[str]) -> bool:
        return bool(names & (group - {"all"})) if excluded else not names & group

    lost = ["between processes of one machine weights then go over TCP, several times slower"] if absent(_SHARED_MEMORY) else []
    lost += ["GPU memory cannot be read"] if gpu and absent(_CUDA) else []
    yield Finding("UCX_TLS", "warn" if lost else "ok", "; ".join([value, *lost]), "unset UCX_TLS: UCX chooses" if lost else "")


def cma(snapshot: Snapshot) -> Iterator[Finding]:
    """Cross-memory attach: one process reads another's memory, which is how weights reach an engine on the same machine."""
    if snapshot.cma is None:
        yield Finding("cma", "warn", "not on this system: weights go over TCP between processes")
    elif snapshot.cma:
        yield Finding(
            "cma",
            "warn",
            f"one process cannot read another's memory ({snapshot.cma}): weights go over TCP, several times slower",
            "in a container: docker run --cap-add=SYS_PTRACE; on a host: sysctl kernel.yama.ptrace_scope=0; "
            "or weights.transport=shm, which does not need it",
        )
    else:
        yield Finding("cma", "ok", "one process reads another's memory")
