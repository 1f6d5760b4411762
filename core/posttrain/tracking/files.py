"""Writing files of a run: aside and renamed, with a full disk told as one clear error.

Every writer of the run directory goes through `writing`, so that a full disk, wherever it strikes, is the same
`RunInterrupted` that names the path, and never a half-written file under a final name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import RunInterrupted

FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn "no space left" and "quota exceeded" inside the block into RunInterrupted; other errors pass."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        raise RunInterrupted(
            f"the disk is full: cannot write {path}",
            cause=exc.strerror or str(exc),
            fix="free space there (checkpoint.keep_last and tracking.rollouts_every decide how much a run keeps), "
            "then go on with posttrain train --resume RUN",
            where=str(path),
            anchor="troubleshooting.md#the-disk-is-full",
            code="disk_full",
        ) from exc


@contextmanager
def aside(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well, rename it onto `path`.

    A reader sees the old file or the whole new one. `durable` flushes it to the disk first, so that it also survives a power
    cut. When the block raises, the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            yield temporary
            if durable:
                sync(temporary)
            temporary.replace(path)
            if durable:
                sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small text file whole or not at all."""
    with aside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def superseded_name(path: Path) -> Path:
    """A free name for what a resume takes out of the way: `<name>.superseded`, numbered when that exists."""
    target = path.with_name(path.name + ".superseded")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{number}.superseded")
    return target
