"""The rollouts loop of `loop.commit_order=logical`: cohort by cohort, in the order of the draws.

The cohort of batch step `k` is generated from its first to its last token by version `max(start, k-1-N)`, N =
`rollout.max_async_rollout`, and versions change only between cohorts. So the same config gives the same bits, also when training
goes on meanwhile. A checkpoint of step `k` holds the cohorts up to `k+N`, all that versions before `k` generate: whoever resumes
from it needs no weights but its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.loop.cohort import Round
from posttrain.loop.pending import Pending
from posttrain.loop.source import Cut, Desk
from posttrain.loop.waits import SETTLE_S
from posttrain.weights.deadline import abandon

if TYPE_CHECKING:
    from posttrain.data.dataset import Draw
    from posttrain.plugins.state import SavedState
    from posttrain.types import Group


@dataclass(slots=True)
class _Mark:
    """A cohort that is complete, with what a resume behind it needs."""

    rounds: list[Round]
    position: dict[str, Any]
    states: list[SavedState]


class Cohorts:
    """pending: the cohorts that a checkpoint brought along."""

    def __init__(self, desk: Desk, pending: Pending) -> None:
        self.desk, self._pending = desk, pending
        self._ahead, self._last = desk.config.rollout.max_async_rollout, desk.config.rl.steps
        self._start = desk.first - 1
        self._marks: dict[int, _Mark] = {self._start: _Mark([], desk.prompts.position, desk.states())}
        self._cutting: set[int] = set()
        self._moved = asyncio.Condition()

    async def run(self) -> None:
        for step in range(self.desk.first, self._last + 1):
            rounds = await self._given(step) if step in self._pending.rounds else await self._generated(step)
            await self._mark(step, rounds)
        await self._bring(self._last)

    def ask(self, round: Round, more: int) -> None:
        assert round.more is not None
        round.more.set_result(more)

    def keep(self, step: int, round: Round) -> list[tuple[Draw, Group]]:
        return list(zip(round.draws, round.groups, strict=True))

    def cut(self, step: int) -> Awaitable[Cut]:
        self._cutting.add(step)  # while it waits, training goes on: what it needs stays
        return asyncio.create_task(self._cut(step), name=f"cut of step {step}")

    async def _cut(self, step: int) -> Cut:
        last = min(step + self._ahead, self._last)
        try:
            async with self._moved:
                with self.desk.waits.named(f"cohort {last} for the checkpoint of step {step}", "rollouts loop"):
                    await self._moved.wait_for(lambda: last in self._marks)
            ahead = [self._marks[later] for later in range(step + 1, last + 1)]
            mark = self._marks[last]
        finally:
            self._cutting.discard(step)
        pending = Pending.of(round for one in ahead for round in one.rounds)
        pending.rounds |= {later: rounds for later, rounds in self._pending.rounds.items() if later > last}
        return Cut(mark.position, pending, mark.states)

    def lost(self) -> dict[str, float]:
        return {}

    def trained(self, step: int, ended: Iterable[int]) -> None:
        for old in [one for one in self._marks if one < min([step, *self._cutting])]:
            del self._marks[old]

    async def _given(self, step: int) -> list[Round]:
        """A cohort that a checkpoint brought along, round by round as it was."""
        rounds = []
        for generated in self._pending.rounds[step]:  # it stays known as given: it was dealt to the cells of then
            draws, groups = [draw for draw, _ in generated], [group for _, group in generated]
            rounds.append(Round(step, draws, groups))
            await self._settled(rounds[-1])
        return rounds

    async def _generated(self, step: int) -> list[Round]:
        await self._bring(max(self._start, step - 1 - self._ahead))
        rounds, wanted = [], self.desk.per_step
        while wanted:
            draws = [await self.desk.take(step) for _ in range(wanted)]
            rounds.append(await self._round(step, draws))
            wanted = await self._settled(rounds[-1])
        return rounds

    async def _round(self, step: int, draws: list[Draw]) -> Round:
        desk, r = self.desk, self.desk.config.rollout
        clock = asyncio.get_running_loop().time
        began = last = clock()
        left, emptied = len(draws) * desk.config.rl.group_size, asyncio.Event()

        def generated() -> None:
            nonlocal last, left
            last, left = clock(), left - 1
            if not left:
                emptied.set()

        with desk.tracker.span("rollout", "generate and score", step=step):
            work = asyncio.create_task(desk.rollouts.run(
                draws, n=desk.config.rl.group_size, sampling=desk.sampling, generated=generated,
                scored=desk.scored(step), screening=desk.screening,
            ), name="rollouts loop")  # fmt: skip
            try:
                await desk.waits.bounded(
                    _either(work, emptied), name=f"completions of step {step}", owner=f"rollout engine {r.engine}",
                    timeout=r.generate_timeout_s, key="rollout.generate_timeout_s",
                )  # fmt: skip
                groups = await desk.waits.bounded(
                    work, name=f"rewards of step {step}", owner="rewards", timeout=desk.scoring_s, key="rollout.reward_timeout_s"
                )
            finally:
                if not work.done():
                    abandon(work)
                    await asyncio.wait({work}, timeout=SETTLE_S)
        for draw in draws:
            desk.ledger.move(draw.index, "finished")
        return Round(step, draws, groups, began, last - began, clock() - began)

    async def _settled(self, round: Round) -> int:
        """Hand a round to the batches loop; how many further prompts it wants."""
        round.more = asyncio.get_running_loop().create_future()
        self.desk.rounds.put_nowait(round)
        with self.desk.waits.named(f"the word on the groups of step {round.step}", "batches loop"):
            return await round.more

    async def _bring(self, version: int) -> None:
        """Every version in between as well: none is passed over, so that none waits in the plane."""
        for one in range(self.desk.versions.delivered + 1, version + 1):
            await self.desk.versions.bring(one)

    async def _mark(self, step: int, rounds: list[Round]) -> None:
        mark = _Mark(rounds, self.desk.prompts.position, self.desk.states())
        async with self._moved:
            self._marks[step] = mark
            self._moved.notify_all()


async def _either(work: asyncio.Future[list[Group]], emptied: asyncio.Event) -> None:
    """Until the engine has given all, or the work is over, however it ended."""
    waiting = asyncio.create_task(emptied.wait())
    both: set[asyncio.Future[Any]] = {work, waiting}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
