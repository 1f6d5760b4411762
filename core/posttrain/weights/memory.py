"""Host memory that publications and staging live in: private to this process, or a shared file that others map (`shared_files`).

Shared memory is reserved when it is created: too small a /dev/shm is an error with a fix here, not a bus error later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import WeightSyncError
from posttrain.weights.shared_files import new_path, sweep


@dataclass(eq=False)
class Region:
    """`buffer` is a uint8 tensor `[nbytes]`; `path` is the file that other processes map, None for private memory."""

    buffer: torch.Tensor
    path: str | None = None
    _unlink: Any = None

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    def release(self) -> None:
        """Unlink the file (the owner's part) and drop the memory; views that still exist keep it mapped. Idempotent."""
        if self._unlink is not None:
            self._unlink()
        # never close the map itself: a tensor on it keeps the object alive but would read unmapped memory
        self.buffer = torch.empty(0, dtype=torch.uint8)


def copy(values: torch.Tensor, into: torch.Tensor) -> None:
    """`into.copy_(values)`. What one thread copies as it is goes by memcpy: a fifth faster than torch's loop, measured."""
    same = values.dtype == into.dtype and values.shape == into.shape and values.is_cpu and into.is_cpu
    if same and values.is_contiguous() and into.is_contiguous() and torch.get_num_threads() == 1:
        ctypes.memmove(into.data_ptr(), values.data_ptr(), into.nbytes)
    else:
        into.copy_(values)


def private_region(nbytes: int) -> Region:
    """Memory of this process only."""
    return Region(torch.empty(nbytes, dtype=torch.uint8))


def shared_region(nbytes: int) -> Region:
    """Reserve `nbytes` of shared memory owned by this process. Raises WeightSyncError when there is not enough."""
    sweep()
    path = new_path()
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        _reserve(fd, nbytes)
        region = _map_region(fd, nbytes, str(path))
        region._unlink = weakref.finalize(region, _unlink_own, str(path), os.getpid())
        return region
    except BaseException as exc:
        os.unlink(path)
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise _no_space(path.parent, nbytes) from exc
        raise
    finally:
        os.close(fd)


def attach(path: str) -> Region:
    """Map the shared memory that another process owns. Raises WeightSyncError when its owner has removed it."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError as exc:
        raise WeightSyncError(
            f"was not pulled: shared memory {path} is gone", cause="its owner closed it or died", code="peer"
        ) from exc
    try:
        return _map_region(fd, os.fstat(fd).st_size, path)
    finally:
        os.close(fd)


def _reserve(fd: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, max(nbytes, 1))
    else:
        os.ftruncate(fd, max(nbytes, 1))


def _map_region(fd: int, nbytes: int, path: str) -> Region:
    mapped = mmap.mmap(fd, max(nbytes, 1))
    return Region(torch.frombuffer(mapped, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes], path)


def _unlink_own(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child that inherited the finalizer
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _no_space(folder: Path, nbytes: int) -> WeightSyncError:
    stat = os.statvfs(folder)
    return WeightSyncError(
        f"{folder} has {stat.f_bavail * stat.f_frsize / 2**20:.0f} MiB free, the weights need {nbytes / 2**20:.0f} MiB",
        cause="a publication, its successor and each engine's staging are one copy of the weights each, in shared memory",
        fix="give the machine a larger /dev/shm (container: --shm-size, else mount -o remount,size=… /dev/shm), "
        "or use rollout.dtype=bfloat16",
        code="shm",
        retryable=False,
    )
