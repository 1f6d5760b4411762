"""Who generates: the contract of the rollouts loop, of which there are two, and what both are given.

    cohorts.Cohorts   `loop.commit_order=logical`: cohort by cohort, each from one version; to the bit the same each time
    stream.Stream     `loop.commit_order=arrival`: prompt by prompt as slots come free, versions change in flight
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.types import Sampling

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import Draw
    from posttrain.loop.cohort import Round
    from posttrain.loop.filters import Screening
    from posttrain.loop.ledger import Ledger
    from posttrain.loop.pairs import Pairs
    from posttrain.loop.pending import Pending
    from posttrain.loop.prompts import Prompts
    from posttrain.loop.rollouts import Rollouts
    from posttrain.loop.versions import Versions
    from posttrain.loop.waits import Waits
    from posttrain.plugins.state import SavedState
    from posttrain.tracking.tracker import Tracker
    from posttrain.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Cut:
    """The rollouts' side of a checkpoint: the sampler's position, what is pending, the states of what generates and scores."""

    position: dict[str, Any]
    pending: Pending
    states: list[SavedState]


@dataclass(slots=True)
class Desk:
    """What a source works with.

    first    the first batch step to be done      states   of the plug-ins that generate and score
    scored   what tells the hooks of a trajectory of a batch step, None where there are none
    """

    config: RunConfig
    first: int
    prompts: Prompts
    rollouts: Rollouts | Pairs
    versions: Versions
    ledger: Ledger
    waits: Waits
    tracker: Tracker
    scored: Callable[[int], Callable[[Trajectory], Awaitable[Any]] | None]
    screening: Screening | None
    states: Callable[[], list[SavedState]]
    rounds: asyncio.Queue[Round | Exception] = field(default_factory=asyncio.Queue)

    @property
    def per_step(self) -> int:
        """Prompts of a batch."""
        return self.config.rl.batch_per_replica // self.config.rl.group_size

    @property
    def sampling(self) -> Sampling:
        r = self.config.rollout
        return Sampling(r.max_tokens, r.temperature, r.top_p, r.top_k, r.min_p, ignore_eos=r.ignore_eos, stop=r.stop)

    @property
    def scoring_s(self) -> float:
        """How long the rewards of a prompt may take once it has its completions: one worker has all that are generated ahead
        before it, and each takes its whole deadline."""
        rl, r = self.config.rl, self.config.rollout
        scorer = getattr(self.rollouts, "scorer", None)
        longest = getattr(scorer, "longest_s", r.reward_timeout_s)
        return rl.batch_per_replica * (1 + r.max_async_rollout) * longest

    async def take(self, step: int) -> Draw:
        """The next draw, known to the ledger. step: the batch step in which a row that has to be passed over ends."""
        with self.waits.named("a prompt", "prompts loop"):
            draw = await self.prompts.take(step)
        if draw.index not in self.ledger.open:
            self.ledger.drawn(draw)
        self.ledger.move(draw.index, "dispatched")
        return draw


class Source(Protocol):
    """A rollouts loop: puts scored rounds into `Desk.rounds`, and never runs further ahead than `rollout.max_async_rollout`."""

    async def run(self) -> None:
        """Generate until the last batch step has what it wants, then bring the engines to the last version."""

    def ask(self, round: Round, more: int) -> None:
        """The batch that `round` is of has it, and wants `more` further prompts; 0: it is settled."""

    def keep(self, step: int, round: Round) -> list[tuple[Draw, Group]]:
        """What of a round the batch of `step` may train on; the rest is generated again, or dropped."""

    def cut(self, step: int) -> Awaitable[Cut]:
        """What a checkpoint after batch step `step` needs. Called before the next step trains, and cut when this returns; what
        is awaited may take until the cohorts in flight are scored."""

    def lost(self) -> dict[str, float]:
        """Metrics of the prompts since the last call whose generation was in vain."""

    def trained(self, step: int, ended: Iterable[int]) -> None:
        """Batch step `step` is done, these draws have come to their end in it: what was kept of them may go."""
