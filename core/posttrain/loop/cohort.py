"""What travels between the loops: rounds of scored groups, and batches. Plain values, no behaviour beyond counting.

The prompts of batch step `k`, with those that dynamic sampling adds, are the cohort `k`; the optimizer steps of its batch turn
version `k-1` of the weights into version `k`. Under `loop.commit_order=logical` a cohort is generated round by round, under
`arrival` each group is a round of its own, of whichever batch it arrives for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from posttrain.data.dataset import Draw

if TYPE_CHECKING:
    from posttrain.policy.rows import Row
    from posttrain.types import Group


@dataclass(slots=True)
class Round:
    """Draws and their scored groups, in draw order.

    step         the batch step that it was generated for (`logical`); 0: whichever it arrives for
    began        when its generation began, seconds of the event loop's clock
    generate_s   until the engine's last completion          seconds   until the last reward
    more         how many further prompts the batch wants; set by the batches loop (`logical`)
    """

    step: int
    draws: Sequence[Draw]
    groups: Sequence[Group]
    began: float = 0.0
    generate_s: float = 0.0
    seconds: float = 0.0
    more: asyncio.Future[int] | None = None

    @property
    def ended(self) -> float:
        """When its last reward was there; 0 for one that a checkpoint brought along."""
        return self.began + self.seconds


@dataclass(slots=True)
class Cohort:
    """The groups that a batch is made of, with their draws, in draw order."""

    step: int
    draws: Sequence[Draw]
    groups: Sequence[Group]


@dataclass(slots=True)
class Batch:
    """Groups made ready to train: `rows` are what trains, `metrics` what was counted on the way.

    advantages   by sample id, for every trajectory of the batch (0.0 for those that do not train)
    """

    step: int
    rows: list[Row]
    groups: Sequence[Group]
    advantages: dict[str, float]
    metrics: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)
