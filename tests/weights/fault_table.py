"""Runs the fault matrix and prints it as a table: `python tests/weights/fault_table.py [inproc] [shm] [nixl]`.

With `--write` the tables replace those in docs/reference/weights.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from fault_matrix import Matrix, Row, cells, sample

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "weights.md"
BEGIN, END = "<!-- the fault matrix as run -->", "<!-- end of the fault matrix -->"
HEAD = "| peer | phase | bucket | fault | ended after | first exception, as named | then | rebuild_and_retry | drop_lane |"


def table(rows: Iterable[Row]) -> list[str]:
    """One line for each cell, in the order of the run."""
    lines = [HEAD, "|" + "---|" * 9]
    for row in rows:
        cell = row.cell
        bucket = f"{cell.bucket} ({cell.where})" if cell.bucket >= 0 else cell.where
        first = row.first.replace("|", "\\|")
        fields = (cell.peer, cell.phase, bucket, cell.kind, f"{row.seconds:.2f} s", first, row.after, row.retry, row.drop)
        lines.append("| " + " | ".join(fields) + " |")
    return lines


def run(transport: str) -> list[str]:
    chosen = sample() if transport == "nixl" else list(cells())
    began, matrix = time.perf_counter(), Matrix(transport)
    try:
        rows = [matrix.run(cell) for cell in chosen]
    finally:
        matrix.close()
    seconds = time.perf_counter() - began
    title = (
        f"`{transport}`: {len(rows)} faults, {2 * len(rows) + sum(r.drop != '-' for r in rows)} failed updates, {seconds:.0f} s"
    )
    return [f"#### {title}", "", *table(rows), ""]


def write(lines: Sequence[str]) -> None:
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    PAGE.write_text("\n".join([head + BEGIN, "", *lines, END]) + rest.split(END)[1])


if __name__ == "__main__":
    transports = [name for name in sys.argv[1:] if not name.startswith("-")] or ["inproc", "shm", "nixl"]
    lines = [line for transport in transports for line in run(transport)]
    print("\n".join(lines))
    if "--write" in sys.argv:
        write(lines)
