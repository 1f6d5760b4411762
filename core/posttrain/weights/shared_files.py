"""Files of shared memory: where they are, whose they are, and the removal of what the dead left. Free of torch: the NIXL process
uses it too.

A file lies under /dev/shm (elsewhere: in the temporary folder) and is named after its owner,
`posttrain-<pid namespace>-<pid.start>-<serial>`, so that whoever comes next can remove what a dead owner left. Who is alive in
another container that shares the folder cannot be told from here: its files are left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from pathlib import Path

from posttrain.weights.owner import ProcessId, pid_namespace

_PREFIX = "posttrain-"
_serial = itertools.count()


def shared_folder() -> Path:
    """Where shared memory files live on this machine."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def new_path() -> Path:
    """For a file of this process that does not exist yet."""
    return shared_folder() / f"{_own()}{next(_serial)}"


def sweep(folder: Path | None = None) -> list[Path]:
    """Unlink the shared memory of processes of this pid namespace that are no longer alive; returns what was removed."""
    removed = []
    for path in (folder or shared_folder()).glob(f"{_PREFIX}*"):
        owner = owner_of(path)
        if owner is not None and not owner.alive():
            with contextlib.suppress(OSError):  # somebody else was faster, or it is another user's
                path.unlink()
                removed.append(path)
    return removed


def owner_of(path: Path) -> ProcessId | None:
    """Whose file it is. None: no shared memory of ours, or of another pid namespace, where the same id is another process."""
    namespace, _, rest = path.name.removeprefix(_PREFIX).partition("-")
    return ProcessId.parse(rest.rpartition("-")[0]) if namespace == pid_namespace() else None


def release_own() -> None:
    """Unlink all shared memory of this process: the last thing that it does. What is mapped stays mapped."""
    for path in shared_folder().glob(f"{_own()}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _own() -> str:
    """What the names of this process's files begin with."""
    return f"{_PREFIX}{pid_namespace()}-{ProcessId.current()}-"
