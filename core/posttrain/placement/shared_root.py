"""Is the folder for runs one folder on every node? The driver writes a nonce there, every actor reads it back.

    with written(root) as nonce:
        check(nonce, ray.get([actor.call.remote(nonce.look) for actor in actors]))      # raises SharedRootError

A container-local `/tmp` is there on every node under the same name and holds something else: actors would read absent or
left-over files, and the run would fail late (E6), or not at all. `look` never raises, so that every node is heard.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import SharedRootError

PREFIX = ".posttrain-nonce-"
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one node sees of the nonce. problem: empty when it reads the driver's; else what is there instead."""

    node: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Nonce:
    """A token in a file of its own: a name that no node has ever looked up, so no cache can answer for it."""

    root: str
    token: str
    node: str

    @property
    def path(self) -> Path:
        return Path(self.root) / f"{PREFIX}{self.token[:16]}"

    def look(self, patience: float = 5.0) -> Sighting:
        """Read it here. patience: seconds that a network file system may take to show a new file."""
        deadline = time.monotonic() + patience
        while True:
            problem = self._problem()
            if not problem or time.monotonic() >= deadline:
                return Sighting(socket.gethostname(), problem)
            time.sleep(0.2)

    def _problem(self) -> str:
        try:
            return "" if self.path.read_text(encoding="ascii") == self.token else "the file is there and holds something else"
        except FileNotFoundError:
            return "the folder is there without the file" if Path(self.root).is_dir() else "there is no such folder"
        except (OSError, ValueError) as exc:
            return f"{type(exc).__name__}: {exc}"


@contextmanager
def written(root: str | Path) -> Iterator[Nonce]:
    """A fresh nonce in `root` for the time of the block. Raises SharedRootError when the driver cannot write there."""
    nonce = Nonce(str(Path(root).absolute()), secrets.token_hex(32), socket.gethostname())
    try:
        nonce.path.write_text(nonce.token, encoding="ascii")
    except OSError as exc:
        raise not_shared(nonce.root, [Sighting(nonce.node, f"{type(exc).__name__}: {exc}")], nonce.node) from exc
    try:
        yield nonce
    finally:
        with suppress(OSError):
            nonce.path.unlink()


def check(nonce: Nonce, sightings: Sequence[Sighting]) -> None:
    """Raise SharedRootError with every node that does not see what the driver wrote. Pure."""
    if blind := [sighting for sighting in sightings if sighting.problem]:
        raise not_shared(nonce.root, blind, nonce.node)


def not_shared(root: str, blind: Sequence[Sighting], driver: str) -> SharedRootError:
    """The error: the path, the nodes, what each sees there, and what to do."""
    nodes = tuple(sorted({sighting.node for sighting in blind}))
    seen = "; ".join(f"{sighting.node}: {sighting.problem}" for sighting in sorted(set(blind), key=lambda s: s.node)[:8])
    more = f"; and {len(nodes) - 8} more nodes" if len(nodes) > 8 else ""
    local = f"{root} is local to a node by its name; " if node_local(root) else ""
    made = SharedRootError(
        f"the folder for runs, {root}, is not shared: {len(nodes)} node(s) do not see what {driver} wrote there",
        cause=f"{seen}{more}",
        fix=f"{local}give a folder on a file system that every node mounts, and every container too: --run FOLDER",
        where=root,
        anchor="troubleshooting.md#the-folder-for-runs-is-not-shared",
    )
    made.path, made.nodes = root, nodes
    return made


def node_local(path: str | Path) -> bool:
    """Whether a path lies where each node has its own: `/tmp` and the like. A guess by name; only the nonce proves it."""
    return any(Path(path).absolute().is_relative_to(folder) for folder in NODE_LOCAL)
