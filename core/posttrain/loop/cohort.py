"""What travels between the four loops: draws, cohorts and batches. Plain values, no behaviour beyond counting.

A *draw* is one taking of a dataset row by the sampler; the same row drawn in the next epoch is another draw. The draws of
batch step `k` are the cohort `k`. Its groups become a batch; the optimizer steps of that batch turn version `k-1` of the
weights into version `k`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.policy.rows import Row
    from posttrain.types import Group


@dataclass(frozen=True, slots=True)
class Draw:
    """One prompt taken from the data. `index` counts all draws of a run from 0 and names its randomness."""

    index: int
    epoch: int
    env: str
    row_id: str
    task: Mapping[str, Any]

    @property
    def group_id(self) -> str:
        return f"{self.index}:{self.env}:{self.row_id}"


@dataclass(slots=True)
class Cohort:
    """The draws of one batch step and, once generated and scored, their groups in draw order."""

    step: int
    draws: list[Draw]
    groups: list[Group] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Batch:
    """A cohort made ready to train: `rows` are what trains, `metrics` what was counted on the way.

    advantages   by sample id, for every trajectory of the cohort (0.0 for those that do not train)
    """

    step: int
    rows: list[Row]
    groups: list[Group]
    advantages: dict[str, float]
    metrics: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)
