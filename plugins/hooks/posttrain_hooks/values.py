"""What a tracker plots of a run's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plotted(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that have a value, as floats."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
