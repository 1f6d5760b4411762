"""Plain text for terminals and pipes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under a header; on a terminal the last one is cut to its width."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    room = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else 10_000
    out = []
    for line in lines:
        start = "".join(f"{cell:<{width + 2}}" for cell, width in zip(line, widths, strict=False))
        left = max(room - len(start), 20)
        out.append((start + (line[-1] if len(line[-1]) <= left else line[-1][: left - 1] + "…")).rstrip())
    return "\n".join(out)
