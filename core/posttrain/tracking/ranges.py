"""The ranges of the parts of a run's rewards, in its directory: `reward_parts.json`, by the name of the metric.

    write_ranges(run, {"reward/format": Range(0, 1)})
    read_ranges(run)["reward/format"].better
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from posttrain.data.reward_range import Range
from posttrain.errors import ConfigError

FILE = "reward_parts.json"


def write_ranges(run: Path, ranges: Mapping[str, Range]) -> None:
    """Nothing where there are none."""
    if ranges:
        plain = {name: one.plain() for name, one in ranges.items()}
        (run / FILE).write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_ranges(run: Path) -> dict[str, Range]:
    """Empty for a run without any, and for what is no run."""
    try:
        found = json.loads((run / FILE).read_text(encoding="utf-8"))
        return {str(name): Range(**plain) for name, plain in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, ConfigError):
        return {}
