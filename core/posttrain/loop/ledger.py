"""The ledger: where every draw of a prompt is, and how it ended.

Each draw moves  drawn → dispatched → finished → admitted → trained  or ends as  dropped(cause).  A draw reaches exactly one
end; a move that is not in `MOVES` is a bug and raises. `ledger.jsonl` in the run directory gets one line per ended draw;
`state_dict` holds the draws that have not ended, so a checkpoint knows every prompt.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import IO, Any

from posttrain.data.dataset import Draw
from posttrain.errors import RunAborted

MOVES: dict[str, tuple[str, ...]] = {
    "drawn": ("dispatched",),
    "dispatched": ("finished", "dropped"),
    "finished": ("admitted", "dropped"),
    "admitted": ("trained", "dropped"),
}
ENDS = ("trained", "dropped")


class Ledger:
    """Tracks the open draws in memory and appends ended ones to `path` (None: memory only)."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.open: dict[int, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self._file: IO[str] | None = None

    def drawn(self, draw: Draw, step: int) -> None:
        if draw.index in self.open:
            raise RunAborted(f"draw {draw.index} was drawn twice", cause="a sampler repeated a draw index", code="ledger")
        self.open[draw.index] = {
            "draw": draw.index,
            "epoch": draw.epoch,
            "env": draw.env,
            "row": draw.row_id,
            "step": step,
            "state": "drawn",
        }
        self.counts["drawn"] += 1

    def move(self, index: int, state: str, cause: str = "") -> None:
        """Move a draw. Raises RunAborted for a draw that is not open or a move that does not exist."""
        entry = self.open.get(index)
        if entry is None or state not in MOVES.get(entry["state"], ()):
            now = "not open" if entry is None else entry["state"]
            raise RunAborted(f"draw {index} cannot become {state}: it is {now}", cause="a draw may end only once", code="ledger")
        entry["state"] = state
        self.counts[state] += 1
        if state in ENDS:
            self._end(self.open.pop(index), cause)

    def _end(self, entry: dict[str, Any], cause: str) -> None:
        if cause:
            entry["cause"] = cause
        if self.path is not None:
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(entry) + "\n")

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        return {"open": list(self.open.values()), "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.open = {entry["draw"]: dict(entry) for entry in state["open"]}
        self.counts = Counter(state["counts"])

    def cut_after(self, step: int) -> None:
        """Drop the lines of steps past `step` (before a resume); they are kept in `ledger.jsonl.superseded`."""
        if self.path is None or not self.path.exists():
            return
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        kept: list[str] = []
        late: list[str] = []
        for line in lines:
            try:
                (kept if json.loads(line)["step"] <= step else late).append(line)
            except (json.JSONDecodeError, KeyError):
                late.append(line)
        if late:
            with self.path.with_suffix(".jsonl.superseded").open("a", encoding="utf-8") as aside:
                aside.write("\n".join(late) + "\n")
        fresh = self.path.with_suffix(".jsonl.tmp")
        fresh.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        fresh.replace(self.path)
