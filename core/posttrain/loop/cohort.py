"""What travels between the four loops: draws, cohorts and batches. Plain values, no behaviour beyond counting.

The draws of batch step `k` are the cohort `k`. Its groups become a batch; the optimizer steps of that batch turn version
`k-1` of the weights into version `k`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from posttrain.data.dataset import Draw

if TYPE_CHECKING:
    from posttrain.policy.rows import Row
    from posttrain.types import Group


@dataclass(slots=True)
class Cohort:
    """The draws of one batch step and, once generated and scored, their groups in draw order.

    seconds      of generation and scoring      generate_s   of generation alone
    """

    step: int
    draws: list[Draw]
    groups: list[Group] = field(default_factory=list)
    seconds: float = 0.0
    generate_s: float = 0.0


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
