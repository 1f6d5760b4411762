"""Dynamic sampling: which prompts a batch step still asks for, and which of its groups train. Pure bookkeeping of one step.

    gathering = Gathering(step, Quotas.of(config), groups)
    while n := gathering.wanted():                                  # the base draw, then extra rounds
        draws = sampler.draw(n)
        gathering.expect([draw.group_id for draw in draws])         # in draw order
        for group in …: gathering.add(group)                        # as they come
    taken = gathering.take()

**Cells.** The groups of a batch are dealt to the data cells in draw order, contiguously (`policy.partition.deal`), and each cell
has a quota of informative groups: groups whose rewards disagree, and of which something may train. Which cell a group counts for
is fixed when its prompt is asked for, so the order in which groups arrive changes nothing.

**Rounds.** A round is a barrier: the next one is asked for when all groups of the last have come, at most `1 + extra_rounds` in
all. In an extra round every cell below its quota draws its whole share of the batch again, in the order of the cells: a round
has the shapes of the first one, and a cell that lacks one group does not need a round for every further tied one. Other cells
draw nothing. The batch is settled as soon as every cell meets its quota, or the rounds are spent.

**What trains.** The batch always has its full shape. A cell takes its informative groups first, then tied ones as filler of
advantage zero, then groups without any reward; each kind in draw order. What is left over ends as `surplus` (informative),
`uninformative` or `unscorable`: it is counted, and never trained later, when it would be older than the batch is allowed to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from posttrain.config.rules import batch_plan, informative_minimum
from posttrain.errors import PosttrainError, RunAborted, error
from posttrain.loop.filters import compared, trains
from posttrain.objective.groups import GroupStats, group_stats
from posttrain.policy.partition import deal
from posttrain.types import Group

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig

Cause = Literal["surplus", "uninformative", "unscorable"]
CAUSES: tuple[Cause, ...] = ("surplus", "uninformative", "unscorable")
OnExhausted = Literal["raise", "proceed"]

ONE_ROUND: dict[str, float] = {
    "train/dynamic_sampling_rounds": 1,
    "train/dynamic_sampling_shortfall": 0,
    "train/dynamic_sampling_extra_prompts": 0,
}
"""The metrics of a batch that takes its base draw as it is."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """What dynamic sampling asks of a batch.

    groups         groups of the batch, per data cell       informative   how many of them must be informative, per data cell
    extra_rounds   rounds beyond the base draw              on_exhausted   what to do when they are spent and a cell is short
    """

    groups: tuple[int, ...]
    informative: tuple[int, ...]
    extra_rounds: int = 0
    on_exhausted: OnExhausted = "raise"

    @classmethod
    def of(cls, config: RunConfig, groups: Sequence[int] | None = None) -> Quotas | None:
        """The quotas that a checked config means; None when dynamic sampling is off. groups: per data cell, else by the grid."""
        if not (minimum := informative_minimum(config)):
            return None
        rl, groups = config.rl, tuple(groups or cell_groups(config))
        quotas = tuple(len(share) for share in deal(minimum, len(groups)))
        return cls(groups, quotas, rl.dynamic_sampling_max_extra_rollouts, rl.dynamic_sampling_on_budget_exhausted)

    def gathered(self, rounds: int) -> Quotas:
        """Of a batch that a checkpoint brought along: it took this many rounds, whatever the budget is by now."""
        return replace(self, extra_rounds=rounds - 1, on_exhausted="proceed")


def cell_groups(config: RunConfig) -> tuple[int, ...]:
    """The groups of a batch per data cell, one cell for each rollout replica."""
    plan = batch_plan(config)
    return tuple(len(share) for share in deal(plan.groups, plan.rollout_replicas))


def stats_of(group: Group, *, pairs: bool = False) -> GroupStats:
    """What kind of group it is, by the rewards that enter its baseline; `pairs`: that a preference pair is made of."""
    rows = group.trajectories
    return group_stats(group.rewards, [group.group_id] * len(rows), compared(rows, pairs=pairs))


@dataclass(frozen=True, slots=True)
class Taken:
    """What a batch step came to.

    groups     of the batch, in draw order; its full shape
    surplus    the other groups, in draw order, each with why it does not train
    metrics    rounds, shortfall and extra prompts, without quotas as `ONE_ROUND`; what kinds of groups there were is counted by
               `make_batch`
    informative   groups of the batch whose rewards disagree
    """

    groups: list[Group]
    surplus: list[tuple[Group, Cause]]
    metrics: dict[str, float]
    informative: int


@dataclass(slots=True)
class _Cell:
    """One data cell: its share of the batch, its quota, and how many informative groups have come for it."""

    size: int
    quota: int
    informative: int = 0

    @property
    def short(self) -> bool:
        return self.informative < self.quota


@dataclass(slots=True)
class _Slot:
    """One prompt that was asked for: by which cell, and what came."""

    cell: _Cell
    group: Group | None = None
    stats: GroupStats | None = None

    @property
    def rank(self) -> int:
        """What a cell takes first: informative groups, then tied ones, then those of which nothing can train."""
        if self.stats is not None and self.stats.informative:
            return 0
        return 1 if self.group is not None and any(map(trains, self.group.trajectories)) else 2


class Gathering:
    """The groups of batch step `step` as they come, each with its rewards as they enter the baseline (`loop.filters`).

    groups   of the batch, per data cell        pairs   whether the objective learns from preference pairs
    Without quotas there is one round, and all of it is taken. The state is what was expected and added: replaying both in their
    order gives an equal gathering.
    """

    def __init__(self, step: int, quotas: Quotas | None, groups: Sequence[int], *, pairs: bool = False) -> None:
        self.step, self.quotas, self.rounds, self._pairs = step, quotas, 0, pairs
        informative = quotas.informative if quotas else (0,) * len(groups)
        self._cells = [_Cell(size, quota) for size, quota in zip(groups, informative, strict=True)]
        self._slots: dict[str, _Slot] = {}
        self._open: set[str] = set()

    @property
    def settled(self) -> bool:
        """Whether nothing more is asked for: `take` may be called."""
        return self.rounds > 0 and not self._open and not self._asking()

    def wanted(self) -> int:
        """Prompts to draw now: those of the base draw first, then of an extra round; 0 while a round runs and when settled."""
        return 0 if self._open else sum(cell.size for cell in self._asking())

    def expect(self, group_ids: Sequence[str]) -> None:
        """The round that `wanted` asked for, in draw order. Raises ValueError for another number, or an id that was asked for."""
        cells = [] if self._open else self._asking()
        if len(group_ids) != sum(cell.size for cell in cells):
            raise ValueError(f"batch step {self.step} wants {self.wanted()} prompt(s), {len(group_ids)} were drawn")
        if len({*group_ids, *self._slots}) != len(group_ids) + len(self._slots):
            raise ValueError(f"batch step {self.step}: a prompt was drawn twice")
        asking = (cell for cell in cells for _ in range(cell.size))
        self._slots |= {group_id: _Slot(cell) for group_id, cell in zip(group_ids, asking, strict=True)}
        self._open = set(group_ids)
        self.rounds += 1

    def add(self, group: Group) -> None:
        """A group that was expected. Raises RunAborted for one that was not, or that came before."""
        if group.group_id not in self._open:
            why = "it came before" if group.group_id in self._slots else "nobody asked for it"
            raise RunAborted(
                f"batch step {self.step} cannot take group {group.group_id}: {why}",
                cause="a group belongs to one batch step and comes once",
                code="group-twice",
            )
        self._open.remove(group.group_id)
        slot = self._slots[group.group_id]
        slot.group, slot.stats = group, stats_of(group, pairs=self._pairs)
        slot.cell.informative += slot.stats.informative

    def take(self) -> Taken:
        """The batch. Raises E7 where a cell is short and the quotas say `raise`; RuntimeError while groups are missing."""
        if not self.settled:
            raise RuntimeError(f"batch step {self.step} is not settled: {len(self._open)} group(s) are missing")
        short = [cell for cell in self._cells if cell.short]
        if short and self.quotas and self.quotas.on_exhausted == "raise":
            raise self._exhausted()
        chosen: set[int] = set()
        for cell in self._cells:
            own = [slot for slot in self._slots.values() if slot.cell is cell]
            chosen.update(id(slot) for slot in sorted(own, key=lambda slot: slot.rank)[: cell.size])
        slots = [(slot, slot.group) for slot in self._slots.values() if slot.group is not None]
        return Taken(
            groups=[group for slot, group in slots if id(slot) in chosen],
            surplus=[(group, CAUSES[slot.rank]) for slot, group in slots if id(slot) not in chosen],
            metrics=self._metrics(short),
            informative=sum(slot.rank == 0 for slot, _ in slots if id(slot) in chosen),
        )

    def _asking(self) -> list[_Cell]:
        """The cells that draw in the next round."""
        if self.rounds == 0:
            return self._cells
        over = self.quotas is None or self.rounds > self.quotas.extra_rounds
        return [] if over else [cell for cell in self._cells if cell.short]

    def _metrics(self, short: Sequence[_Cell]) -> dict[str, float]:
        return {
            "train/dynamic_sampling_rounds": self.rounds,
            "train/dynamic_sampling_shortfall": sum(cell.quota - cell.informative for cell in short),
            "train/dynamic_sampling_extra_prompts": len(self._slots) - sum(cell.size for cell in self._cells),
        }

    def _exhausted(self) -> PosttrainError:
        stats = [slot.stats for slot in self._slots.values() if slot.stats is not None]
        short = [(number, cell) for number, cell in enumerate(self._cells) if cell.short]
        each = max((len(slot.group.trajectories) for slot in self._slots.values() if slot.group), default=0)
        return error(
            "E7",
            step=self.step,
            cells=[number for number, _ in short],
            quotas=[cell.quota * each for _, cell in short],
            held=", ".join(f"cell {number} has {cell.informative} of {cell.quota}" for number, cell in short),
            each=each,
            rounds=self.rounds,
            prompts=len(stats),
            zero=sum(found.all_zero for found in stats),
            one=sum(found.all_one for found in stats),
        )
