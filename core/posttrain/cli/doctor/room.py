"""Room: shared memory, disk, open files, and whether runs can be written where they go."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.cli.doctor.snapshot import GIB, Finding, Snapshot, State, gib
from posttrain.placement.shared_root import node_local

SHM, SHM_LEAST = 16 * GIB, 256 * 2**20
DISK, DISK_LEAST = 10 * GIB, GIB
OPEN_FILES = 8192


def shared_memory(snapshot: Snapshot) -> Iterator[Finding]:
    space = snapshot.shm
    fix = "docker run --shm-size=16g, or --ipc=host; on a host: mount -o remount,size=16g /dev/shm"
    if space is None:
        yield Finding("/dev/shm", "fail", "not there: vLLM and weights.transport=shm need it", fix)
    elif space.total < SHM:
        state: State = "fail" if space.free < SHM_LEAST else "warn"
        yield Finding("/dev/shm", state, f"{gib(space.total)}, {gib(space.free)} free; 16 GiB are recommended", fix)
    else:
        full = space.free < GIB
        clean = "ls -l /dev/shm shows whose files fill it" if full else ""
        yield Finding("/dev/shm", "warn" if full else "ok", f"{gib(space.total)}, {gib(space.free)} free", clean)


def disk(snapshot: Snapshot) -> Iterator[Finding]:
    space = snapshot.disk
    if space is not None:
        state: State = "fail" if space.free < DISK_LEAST else "warn" if space.free < DISK else "ok"
        fix = "" if state == "ok" else "free some space, or --run FOLDER; a checkpoint takes 12 bytes for each parameter"
        yield Finding("disk", state, f"{gib(space.free)} free where runs go", fix)


def root(snapshot: Snapshot) -> Iterator[Finding]:
    environ = snapshot.environ
    several = "RAY_ADDRESS" in environ or int(environ.get("SLURM_JOB_NUM_NODES", "1") or 1) > 1
    if snapshot.root_problem:
        fix = "--run FOLDER that you may write to, or set POSTTRAIN_OUTPUT_ROOT"
        yield Finding("runs", "fail", f"{snapshot.root} cannot be written: {snapshot.root_problem}", fix)
    elif several and node_local(snapshot.root):
        fix = "--run FOLDER on storage that all nodes share; the start of a run proves it"
        yield Finding("runs", "warn", f"{snapshot.root} is local to a node by its name, and there are several", fix)
    else:
        yield Finding("runs", "ok", f"{snapshot.root} can be written")


def open_files(snapshot: Snapshot) -> Iterator[Finding]:
    limit = snapshot.open_files
    if limit is not None:
        low = limit < OPEN_FILES
        fix = "ulimit -n 65536 before the start; docker run --ulimit nofile=65536:65536" if low else ""
        yield Finding(
            "open files", "warn" if low else "ok", f"limit {limit:,}" + (": Ray and vLLM may need more" if low else ""), fix
        )
