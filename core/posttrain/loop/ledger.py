"""The ledger: where every draw of a prompt is, and how it ended.

Each draw moves  drawn → dispatched → finished → admitted → trained  or ends as  dropped(cause); one whose generation was lost or
grew too old goes back to  drawn. A draw reaches exactly one end; a move that is not in `MOVES` is a bug and raises.
`ledger.jsonl` in the run directory gets one line per ended draw, with the batch step in which it ended; a checkpoint holds the
draws that have not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from posttrain.data.dataset import Draw
from posttrain.errors import RunAborted
from posttrain.tracking.files import sync, writing

MOVES: dict[str, tuple[str, ...]] = {
    "drawn": ("dispatched", "dropped"),
    "dispatched": ("finished", "drawn", "dropped"),
    "finished": ("admitted", "drawn", "dropped"),
    "admitted": ("trained", "dropped"),
}
ENDS = ("trained", "dropped")


class Ledger:
    """Tracks the open draws in memory and appends ended ones to `path` (None: memory only)."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.open: dict[int, dict[str, Any]] = {}
        self._file: IO[str] | None = None

    def drawn(self, draw: Draw, state: str = "drawn") -> None:
        """A draw that the ledger does not know yet. state: of one that a checkpoint brought along."""
        if draw.index in self.open:
            raise RunAborted(f"draw {draw.index} was drawn twice", cause="a sampler repeated a draw index", code="ledger")
        self.open[draw.index] = {
            "draw": draw.index, "epoch": draw.epoch, "env": draw.env, "row": draw.row_id, "state": state,
        }  # fmt: skip

    def move(self, index: int, state: str, cause: str = "", *, step: int = 0) -> None:
        """Move a draw. step: the batch step in which it ends.

        Raises RunAborted for a draw that is not open or a move that does not exist.
        """
        entry = self.open.get(index)
        if entry is None or state not in MOVES.get(entry["state"], ()):
            now = "not open" if entry is None else entry["state"]
            raise RunAborted(f"draw {index} cannot become {state}: it is {now}", cause="a draw may end only once", code="ledger")
        entry["state"] = state
        if state in ENDS:
            self._end(self.open.pop(index), cause, step)

    def _end(self, entry: dict[str, Any], cause: str, step: int) -> None:
        entry["step"] = step
        if cause:
            entry["cause"] = cause
        if self.path is not None:
            with writing(self.path):
                if self._file is None:
                    self._file = self.path.open("a", encoding="utf-8")
                self._file.write(json.dumps(entry) + "\n")

    def flush(self) -> None:
        """Hand what is written to the operating system. Raises RunInterrupted when the disk is full."""
        if self._file is not None:
            with writing(Path(self._file.name)):
                self._file.flush()

    def sync(self) -> None:
        """Bring what was flushed to the disk; before a checkpoint that relies on it becomes valid."""
        if self.path is not None and self.path.exists():
            with writing(self.path):
                sync(self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def cut_after(self, step: int, drawn: int, pending: Iterable[int] = ()) -> None:
        """Before a resume from the checkpoint of `step`: drop the lines of draws that will end again.

        Those are of later steps, and of draws that the checkpoint does not know as ended: pending in it, or not among the first
        `drawn`. They are kept in `ledger.jsonl.superseded`.
        """
        if self.path is None or not self.path.exists():
            return
        kept, late = _split(self.path.read_text(encoding="utf-8").splitlines(), step, drawn, set(pending))
        if late:
            with self.path.with_suffix(".jsonl.superseded").open("a", encoding="utf-8") as aside:
                aside.write("\n".join(late) + "\n")
        fresh = self.path.with_suffix(".jsonl.tmp")
        fresh.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        sync(fresh)
        fresh.replace(self.path)


def _split(lines: Iterable[str], step: int, drawn: int, pending: set[int]) -> tuple[list[str], list[str]]:
    """The lines that stay, and those that go or are torn."""
    kept: list[str] = []
    late: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            ended = entry["step"] <= step or (entry["draw"] < drawn and entry["draw"] not in pending)
            (kept if ended else late).append(line)
        except (json.JSONDecodeError, KeyError):
            late.append(line)
    return kept, late
