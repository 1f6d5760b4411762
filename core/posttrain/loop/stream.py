"""The rollouts loop of `loop.commit_order=arrival`: each prompt is dispatched as slots come free, versions change in flight.

Run-ahead is bounded in prompts: those of batch step `k` may be dispatched once version `k-1-N` is delivered, N =
`rollout.max_async_rollout`; what a batch lost or refills with may be dispatched at once. After each delivery, prompts in flight
whose oldest token would lag by more than `rollout.max_off_policy_steps` versions are aborted in the engine and generated again
with the same seeds, as are those that miss `rollout.generate_timeout_s`; after `flights.TRIES` dispatches a draw is dropped.
The run ends when as many are dropped as `rl.max_uninformative_batches` batches have, and none was trained on meanwhile.
The run ends when the engine does not take a prompt back, or has nothing for two of them in all the time since it got them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any

from posttrain.errors import RunAborted
from posttrain.loop.cohort import Round
from posttrain.loop.flights import TRIES, Flight, Flights
from posttrain.loop.pending import Pending
from posttrain.loop.source import Cut, Desk
from posttrain.loop.waits import SETTLE_S
from posttrain.rollout.replicas import LOST
from posttrain.weights.deadline import abandon

if TYPE_CHECKING:
    from posttrain.data.dataset import Draw
    from posttrain.types import Group

GRACE_S = 10.0
"""How long an aborted prompt may take to come back."""
DROPPED = "dropped"
"""Not a cause: counts those that had all their tries."""


class Stream:
    """pending: the groups that a checkpoint brought along.   slots: samples in all engines at once."""

    def __init__(self, desk: Desk, pending: Pending, *, slots: int) -> None:
        self.desk, self.flights = desk, Flights(slots, pending.tries)
        self._given = [one for rounds in pending.rounds.values() for generated in rounds for one in generated]
        self._samples = desk.config.rl.group_size
        self._ahead, self._limit = desk.config.rollout.max_async_rollout, desk.config.rollout.max_off_policy_steps
        self._arrived: dict[int, Round] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._taken, self._extra = len(self._given), 0
        self._free = asyncio.Event()
        self._last_generated = 0.0
        self._delivering = self._broken = False  # an update is under way; and an engine was lost in it
        self._silent: set[int] = set()
        self._lost: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()  # since a batch was trained on

    async def run(self) -> None:
        for draw, group in self._given:
            self._arrive(Round(0, [draw], [group]))
        delivering = asyncio.create_task(self._deliver(), name="weights loop")
        dispatching = asyncio.create_task(self._dispatch(), name="rollouts loop")
        try:
            await asyncio.wait({delivering, dispatching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (delivering, dispatching):
                if task.done():
                    task.result()
        finally:
            flying = list(self.flights.open.values())
            for task in (delivering, dispatching, *self._tasks):
                task.cancel()
            try:
                await asyncio.gather(delivering, dispatching, *self._tasks, return_exceptions=True)
            finally:  # also when it is cancelled a second time
                for flight in flying:
                    self.flights.end(flight)  # one that was cancelled before it began did not end itself
        unused = [*(flight.draw for flight in flying), *self.desk.prompts.waiting_again()]
        for index in dict.fromkeys([*self._arrived, *(draw.index for draw in unused)]):
            self.desk.ledger.move(index, "dropped", "unused", step=self.desk.config.rl.steps + 1)

    def ask(self, round: Round, more: int) -> None:
        self._extra += more
        self._free.set()

    def keep(self, step: int, round: Round) -> list[tuple[Draw, Group]]:
        """One that grew too old while it waited for its batch is generated again."""
        kept = []
        for draw, group in zip(round.draws, round.groups, strict=True):
            if step - 1 - oldest(group) > self._limit:
                del self._arrived[draw.index]
                self._again(draw, "stale")
            else:
                self.flights.forget(draw)
                kept.append((draw, group))
        return kept

    def cut(self, step: int) -> Awaitable[Cut]:
        """Prompts in flight are generated again by whoever resumes."""
        again = [*self.desk.prompts.waiting_again(), *(flight.draw for flight in self.flights.open.values())]
        again.sort(key=lambda draw: draw.index)
        found: asyncio.Future[Cut] = asyncio.get_running_loop().create_future()
        pending = Pending.of(self._arrived.values(), again, self.flights.in_vain())
        found.set_result(Cut(self.desk.prompts.position, pending, self.desk.states()))
        return found

    def lost(self) -> dict[str, float]:
        lost, self._lost = self._lost, Counter()
        dropped = lost.pop(DROPPED, 0)
        found: dict[str, float] = {"rollout/aborted_count": lost.total(), "rollout/dropped_count": dropped}
        return found | {f"rollout/aborted/{cause}": count for cause, count in sorted(lost.items())}

    def trained(self, step: int, ended: Iterable[int]) -> None:
        self._dropped.clear()
        for index in ended:
            self._arrived.pop(index, None)

    @property
    def _allowed(self) -> int:
        """Prompts that may have been taken by now."""
        steps = min(self.desk.versions.delivered + 1 + self._ahead, self.desk.config.rl.steps)
        return (steps - (self.desk.first - 1)) * self.desk.per_step + self._extra

    async def _dispatch(self) -> None:
        """Ends only when cancelled: any batch may want more."""
        while True:
            if self._taken >= self._allowed or self._broken:
                self._free.clear()
                with self.desk.waits.named(f"version {self.desk.versions.delivered + 1} to dispatch prompts", "weights loop"):
                    await self._free.wait()
                continue
            with self.desk.waits.named("slots for a prompt", f"rollout engine {self.desk.config.rollout.engine}"):
                await self.flights.room(self._samples)
            draw = await self.desk.take(self.desk.versions.published + 1)
            self._taken += 1
            flight = self.flights.begin(draw, self._samples, self.desk.versions.delivered)
            task = asyncio.create_task(self._fly(flight), name=f"flight {draw.index}")
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def _deliver(self) -> None:
        """Bring the engines to the newest version again and again; older ones in between without validation are passed over."""
        versions, last = self.desk.versions, self.desk.config.rl.steps
        while versions.delivered < last:
            await versions.wait_published(versions.delivered + 1)
            self._delivering = True
            await versions.bring(versions.next, delivered=self._delivered)

    async def _delivered(self) -> None:
        """The engines have the next version: more may be dispatched, also while they are validated, and what is too old ends."""
        self._delivering = self._broken = False
        self._free.set()
        old = self.flights.older_than(self.desk.versions.delivered - self._limit)
        await asyncio.gather(*(self._abort(flight, "stale") for flight in old))

    async def _fly(self, flight: Flight) -> None:
        """One prompt from dispatch to its scored group, or back among those to be dispatched; never raises."""
        desk, began = self.desk, flight.began
        clock = asyncio.get_running_loop().time
        last = began

        def generated() -> None:
            nonlocal last
            last = clock()
            if not flight.ending:
                self._last_generated = last
                self._silent.clear()
            self.flights.left_engine(flight)

        try:
            with desk.tracker.span("rollout", "generate and score", draw=flight.draw.index):
                groups = await self._within(flight, desk.rollouts.run(
                    [flight.draw], n=self._samples, sampling=desk.sampling, generated=generated,
                    scored=desk.scored(flight.version + 1), screening=desk.screening,
                ))  # fmt: skip
            if not flight.ending and any(t.finish_reason == "aborted" for t in groups[0].trajectories):
                flight.ending = "aborted"
            self.flights.end(flight)
            if flight.ending:
                self._again(flight.draw, flight.ending)
                return
            desk.ledger.move(flight.draw.index, "finished")
            self._arrive(Round(0, [flight.draw], groups, began, last - began, clock() - began))
        except Exception as exc:
            if self._is_healed(flight, exc):
                self.flights.end(flight)
                self.flights.not_its_fault(flight.draw)
                self._again(flight.draw, "engine")
            else:
                desk.rounds.put_nowait(exc)
        finally:
            self.flights.give_slots_back(flight)

    def _is_healed(self, flight: Flight, exc: Exception) -> bool:
        """Whether the engine is being replaced, or was since the prompt was dispatched: then it is asked again."""
        heals = self.desk.config.weights.on_failure != "raise" and getattr(exc, "code", "") in LOST
        self._broken = self._broken or (heals and self._delivering)
        return heals and (self._delivering or flight.version < self.desk.versions.delivered)

    async def _within(self, flight: Flight, work: Any) -> list[Group]:
        """Abort the prompt at its deadline. Raises WaitExpired when it is not this prompt, but the engine that hangs.

        The deadline is the engine's; a prompt that is only being scored has those of its rewards.
        """
        r = self.desk.config.rollout
        limit, owner = r.generate_timeout_s, f"rollout engine {r.engine}"
        name, waits = f"completions of draw {flight.draw.index}", self.desk.waits
        task = asyncio.create_task(work, name=f"prompt {flight.draw.index}")
        try:
            with waits.named(name, owner, limit, who="rollouts loop"):
                done, _ = await asyncio.wait({task}, timeout=limit)
                if not done and flight.slots and not self._hangs(flight):
                    await self._abort(flight, "timeout")
                    done, _ = await asyncio.wait({task}, timeout=min(GRACE_S, limit))
                if not done and not flight.slots:
                    done, _ = await asyncio.wait({task}, timeout=self.desk.scoring_s)
                if not done:
                    raise await waits.expired(
                        f"waited {limit:g} s for {name}", owner=owner,
                        fix="raise rollout.generate_timeout_s if it is only slow; see its log in logs/",
                    )  # fmt: skip
            groups: list[Group] = task.result()
            return groups
        finally:
            if not task.done():
                abandon(task)
                await asyncio.wait({task}, timeout=SETTLE_S)

    def _hangs(self, flight: Flight) -> bool:
        """Whether nothing has come since the first dispatch of this prompt, nor of another one before it. One may be at fault
        itself, and those that were dispatched again may be alone in the engine."""
        if self._last_generated <= flight.began and self.flights.tries(flight.draw) == 1:
            self._silent.add(flight.draw.index)
        return len(self._silent) > 1

    async def _abort(self, flight: Flight, cause: str) -> None:
        flight.ending = cause
        await self.desk.rollouts.abort(flight.draw)

    def _again(self, draw: Draw, cause: str) -> None:
        """Back to those to be dispatched, or, after its last try, dropped for another one."""
        self._lost[cause] += 1
        if self.flights.tries(draw) >= TRIES:
            self._lost[DROPPED] += 1
            self.flights.forget(draw)
            self.desk.ledger.move(draw.index, "dropped", cause, step=self.desk.versions.published + 1)
            self.desk.tracker.note(f"draw {draw.index} was dropped after {TRIES} tries: {cause}")
            self._extra += 1
            self._refuse_to_drop_all(cause)
        else:
            self.desk.ledger.move(draw.index, "drawn")
            self.desk.prompts.give_back(draw)
            self._taken -= 1
        self._free.set()

    def _refuse_to_drop_all(self, cause: str) -> None:
        """Another prompt takes the place of one that is dropped: without a limit that could go on for ever."""
        self._dropped[cause] += 1
        limit = self.desk.config.rl.max_uninformative_batches
        if (dropped := self._dropped.total()) < limit * self.desk.per_step:
            return
        raise RunAborted(
            f"{dropped} prompts in a row were dropped after {TRIES} tries each, and no batch came together",
            cause=", ".join(f"{why}: {count}" for why, count in self._dropped.most_common()),
            fix="timeout: raise rollout.generate_timeout_s, lower rollout.max_tokens; stale: raise rollout.max_off_policy_steps; "
            "aborted, engine: read the engine's log; rl.max_uninformative_batches sets the limit, in prompts of so many batches",
            anchor="troubleshooting.md#n-prompts-in-a-row-were-dropped", code="dropped",
        )  # fmt: skip

    def _arrive(self, round: Round) -> None:
        for draw in round.draws:
            self._arrived[draw.index] = round
        self.desk.rounds.put_nowait(round)


def oldest(group: Group) -> int:
    """The oldest version that sampled a token of the group; the newest possible for one without such tokens."""
    rows = [row for t in group.trajectories for row in t.rows]
    versions = [v for row in rows for v, sampled in zip(row.weight_versions, row.mask, strict=True) if sampled]
    return min(versions, default=2**62)
