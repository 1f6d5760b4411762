"""A folder whose content is an adversary's: nothing is followed out of it, and it can always be emptied.

A program may leave symbolic links to the host's files where results are looked for, pipes that nobody writes to, folders that
nobody may enter, and a thousand of them in each other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from posttrain.sandbox.provider import inside

_NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Folder:
    """`path` and what is in it. owner: the user to whom written files are given; None: this one."""

    def __init__(self, path: Path, owner: int | None = None) -> None:
        self.path, self._owner = path, owner

    def make(self) -> None:
        self.path.mkdir(mode=0o700)
        if self._owner is not None:
            os.chown(self.path, self._owner, self._owner)

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file, in the place of whatever is there. Raises ValueError for a path out of the folder, OSError."""
        content = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        with self._parent(path, make=True) as (folder, name):
            with contextlib.suppress(FileNotFoundError):
                try:
                    os.unlink(name, dir_fd=folder)
                except IsADirectoryError:
                    shutil.rmtree(name, dir_fd=folder)
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, 0o600, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                self._give(descriptor)

    def read(self, path: str, at_most: int) -> bytes:
        """The first bytes of a regular file. Raises OSError for anything else."""
        with self._parent(path) as (folder, name):
            descriptor = os.open(name, os.O_RDONLY | _NO_LINKS, dir_fd=folder)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(f"{path} is not a file")
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    return file.read(at_most)
            finally:
                os.close(descriptor)

    def clear(self) -> None:
        """Empty it. Raises OSError when that cannot be done."""
        self.remove()
        self.make()

    def remove(self) -> None:
        """Delete it with all that is in it; idempotent."""
        with contextlib.suppress(FileNotFoundError):
            try:
                shutil.rmtree(self.path)
            except FileNotFoundError:
                raise
            except (OSError, RecursionError):  # folders without permissions, or too deep for Python
                command = 'chmod -R u+rwX -- "$1" 2>/dev/null; rm -rf -- "$1"'
                done = subprocess.run(["sh", "-c", command, "sh", str(self.path)], capture_output=True, text=True, check=False)
                if os.path.lexists(self.path):
                    raise OSError(f"{self.path} cannot be deleted: {done.stderr.strip()[-200:]}") from None

    def holds(self, *, bytes_at_most: int, entries_at_most: int) -> bool:
        """Whether no more than that is in it, looking no further than to the first entry that is too many.

        A folder that cannot be looked into (too deep, or closed) is too many: programs could hide what they write in it.
        """
        size, entries, todo = 0, 0, [self.path]
        while todo:
            try:
                with os.scandir(todo.pop()) as found:
                    for entry in found:
                        entries += 1
                        with contextlib.suppress(FileNotFoundError):
                            size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if size > bytes_at_most or entries > entries_at_most:
                            return False
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(Path(entry.path))
            except (FileNotFoundError, NotADirectoryError):  # just deleted
                continue
            except OSError:
                return False
        return True

    @contextlib.contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The folder of a path, opened without following any link below ours, and the name in it."""
        parts = inside(path).parts
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS)
        try:
            for part in parts[:-1]:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=descriptor)
                        made = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS, dir_fd=descriptor)
                        self._give(made)
                        os.close(made)
                deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = deeper
            yield descriptor, parts[-1]
        finally:
            os.close(descriptor)

    def _give(self, descriptor: int) -> None:
        if self._owner is not None:
            os.chown(descriptor, self._owner, self._owner)
