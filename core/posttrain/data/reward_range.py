"""What a part of a reward is like: between which values it lies, which end is the good one, and what it counts in the total.

It changes no reward; it is how the part is shown: on the console, in `posttrain show`, in drawings, and in the verdict of a
comparison. (`environments[i].reward_range` is something else: it changes what trains.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.errors import ConfigError

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Range:
    """min, max: None where there is no bound, or none is known.   weight: what the part counts in the total, if that is a sum.

    Raises ConfigError for bounds that are no finite numbers, or in the wrong order.
    """

    min: float | None = None
    max: float | None = None
    better: Better = "higher"
    weight: float | None = None

    def __post_init__(self) -> None:
        for name in ("min", "max", "weight"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
                raise ConfigError(f"{name}={value!r:.20} of a part of a reward is no finite number", fix=f"write {name}: 1.0")
        if self.min is not None and self.max is not None and not self.min < self.max:
            raise ConfigError(f"[{self.min:g}, {self.max:g}] is no range of a part of a reward", fix="give min and then max")
        if self.better not in ("higher", "lower"):
            raise ConfigError(f"better={self.better!r} of a part of a reward", fix="write better: higher, or better: lower")

    @property
    def mark(self) -> str:
        """`↑ 0–1`: which end is the good one, and the bounds."""
        if self.min is None and self.max is None:
            bounds = ""
        elif self.min is None or self.max is None:
            bounds = f" ≤{self.max:g}" if self.max is not None else f" ≥{self.min:g}"
        else:
            bounds = f" {self.min:g}–{self.max:g}"
        return ("↑" if self.better == "higher" else "↓") + bounds

    def plain(self) -> dict[str, Any]:
        """As a file holds it; what is not said is not there."""
        found = {"min": self.min, "max": self.max, "better": self.better, "weight": self.weight}
        return {name: value for name, value in found.items() if value is not None}


def by_metric(metrics: Mapping[str, Mapping[str, Range]]) -> dict[str, Range]:
    """The ranges of `{environment: {part: range}}` by the names of the metrics that the loop makes of the parts.

    `reward/<part>` is over all environments: it has a range where those that declare the part agree.
    """
    out = {f"reward/{env}/{part}": one for env, parts in metrics.items() for part, one in parts.items()}
    for part in dict.fromkeys(part for parts in metrics.values() for part in parts):
        found = {parts[part] for parts in metrics.values() if part in parts}
        if len(found) == 1:
            out[f"reward/{part}"] = found.pop()
    return out
