"""Where a checkpoint's write may be interrupted: before each fsync, each file of the policy, each folder that is deleted."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from posttrain.loop.sim.virtual_time import Killed


class Disk:
    """torn: the step at which the process dies, a file of the folder cut at a random byte.   full: that finds no space left."""

    def __init__(self, rng: random.Random, *, torn: int | None = None, full: int | None = None) -> None:
        self._rng, self._torn, self._full = rng, torn, full
        self.steps = 0
        self.is_full = False

    def step(self, path: Path, *, deleting: bool = False) -> None:
        """One more step of a write. Raises Killed or OSError when it is the one."""
        self.steps += 1
        if self.steps == self._torn:
            files = sorted(p for p in (path if path.is_dir() else path.parent).rglob("*") if p.is_file()) if path.exists() else []
            aside = [p for p in files if any(part.startswith("tmp_step") for part in p.parts)]
            if aside:
                victim = self._rng.choice(aside)
                with victim.open("r+b") as file:
                    file.truncate(self._rng.randint(0, victim.stat().st_size))
            raise Killed
        if self.steps == self._full and not deleting:
            self.is_full = True
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """The checkpoints' and the ledger's files are of this disk. Nothing is fsynced: virtual power does not fail."""

        def rmtree(path: Path, ignore_errors: bool = False) -> None:
            if not ignore_errors:
                self.step(path, deleting=True)
            shutil.rmtree(path, ignore_errors=ignore_errors)

        tools = SimpleNamespace(rmtree=rmtree, disk_usage=lambda path: SimpleNamespace(free=2**40))
        with (
            mock.patch("posttrain.loop.checkpoint.sync", self.step),
            mock.patch("posttrain.loop.ledger.sync", self.step),
            mock.patch("posttrain.loop.checkpoint.shutil", tools),
        ):
            yield
