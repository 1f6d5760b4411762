"""What the process of a role left in its log: its last words, and what UCX announced before it crashed or froze.

The log is appended to: the process before `--resume`, or before a replacement, wrote to the same file, and what the NIXL
processes beside a role print is in it too. Only what the process printed itself explains its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import WeightSyncError

LOG_LINES = 5

_BESIDE = re.compile(r"nixl process \d+: ")
"""A line of a NIXL process: its end is told by `weights.nixl_process`, and the role goes on with another one."""

_PID = re.compile(r"\bpid: (\d+)")


@dataclass(frozen=True)
class RoleLog:
    """The part of the file from byte `start`: that of one process."""

    path: Path
    start: int = 0

    @classmethod
    def from_now(cls, path: Path) -> RoleLog:
        """What will be appended from here on."""
        try:
            return cls(path, path.stat().st_size)
        except OSError:
            return cls(path)

    def text(self) -> str:
        """Empty when there is no log on this machine."""
        try:
            with self.path.open("rb") as log:
                log.seek(self.start)
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def last_lines(self, count: int = LOG_LINES) -> list[str]:
        """The last lines that say something."""
        return [line.strip() for line in self.text().splitlines() if line.strip()][-count:]

    def announced(self, death: str = "") -> WeightSyncError | None:
        """The failure that UCX or NIXL announced in this process, None when there is none.

        death: what Ray says of its end. A process that died before it opened this log is looked for in Ray's own of this node.
        """
        from posttrain.weights.ucx import scan_ucx_log

        text = self.text() or "\n".join(log.text() for log in self._of_ray(death))
        return scan_ucx_log("\n".join(line for line in text.splitlines() if not _BESIDE.search(line)))

    def _of_ray(self, death: str) -> Iterator[RoleLog]:
        for pid in _PID.findall(death):
            yield from map(RoleLog, (self.path.parent / "ray").glob(f"worker-*-{pid}.err"))
