"""Small pieces of text for people: numbers, durations, sparklines, model output made safe for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BARS = "▁▂▃▄▅▆▇█"


def number(value: Any, digits: int = 3) -> str:
    """A metric for a narrow column; a dash for what is absent."""
    if value is None or isinstance(value, str):
        return "–" if value is None else value
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}" if math.isfinite(value) else str(value)
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """`4.2 s`, `1 min 12 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The last `width` finite values as bars, from the smallest to the largest of them."""
    shown = [v for v in values if math.isfinite(v)][-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    spread = (high - low) or 1.0
    return "".join(BARS[round((v - low) / spread * (len(BARS) - 1))] for v in shown)


def near(path: str | Path) -> str:
    """A path as one would type it here: relative when it lies in the working directory."""
    full = Path(path)
    return str(full.relative_to(Path.cwd()) if full.is_relative_to(Path.cwd()) else path)


def printable(text: str, limit: int = 2000) -> str:
    """Text of a model without control characters, with its middle cut out when it is longer than `limit`."""
    safe = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    if len(safe) <= limit:
        return safe
    head = limit * 2 // 3
    return f"{safe[:head]} … {len(safe) - limit:,} characters … {safe[head - limit :]}"
