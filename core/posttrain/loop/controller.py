"""The controller: four named loops and the versions that link them.

    prompts   reads draws ahead and formats them                                  → self.prompts
    rollouts  dispatches, generates and scores (`cohorts` or `stream`)             → self.desk.rounds
    batches   admission: staleness, dynamic sampling, what trains with what weight  → self._batches
    train     optimizer steps, snapshot of the weights, report, checkpoint          → version k is published

The optimizer steps of batch step `k` (k counts from 1) turn version `k-1` into version `k`. Prompts of batch step `k` may be
dispatched once version `k - 1 - rollout.max_async_rollout` is delivered; with 0 every token of a batch was sampled by exactly the
version that the batch updates. The controller knows no backend: token ids and log-probs travel as plain values, model tensors
never pass through it. Time is the event loop's, and what threads do comes in through `weights.deadline.in_thread` alone.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from posttrain.config.entries import reward_ranges
from posttrain.config.rules import commit_order
from posttrain.errors import RunAborted
from posttrain.evals.during import RunEvals
from posttrain.loop import batches, validation
from posttrain.loop.checkpointer import Checkpointer
from posttrain.loop.cohort import Batch, Cohort, Round
from posttrain.loop.cohorts import Cohorts
from posttrain.loop.filters import Screening, trains
from posttrain.loop.gathering import Gathering, Quotas, Taken, cell_groups
from posttrain.loop.mismatch import Setup, attribute
from posttrain.loop.pairs import Pairs
from posttrain.loop.pairs import validate as validate_pairs
from posttrain.loop.pending import Pending
from posttrain.loop.policy_turn import PolicyTurn
from posttrain.loop.prompts import Prompts
from posttrain.loop.source import Desk, Source
from posttrain.loop.staleness import refuse_off_policy, staleness_metrics
from posttrain.loop.stream import Stream
from posttrain.loop.versions import Versions
from posttrain.loop.waits import Waits, guarded, run_together
from posttrain.objective.algorithm import PreferenceAlgorithm
from posttrain.placement.grid import resolve_grid
from posttrain.weights.deadline import in_thread

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import Draw
    from posttrain.loop.parts import Parts
    from posttrain.types import Group, Trajectory


LARGE_GAP = 0.1
"""Mean difference of engine's and trainer's log-probs, in nats, that a run explains; what rounding makes is below it."""


@dataclass(slots=True)
class LoopState:
    """The counters that a checkpoint carries. `step` is the last batch step done, which is also the version of the policy;
    `seconds` of training so far, also of runs before."""

    step: int = 0
    optimizer_steps: int = 0
    uninformative_in_a_row: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Admitted:
    """A batch with what became of every group that came for it."""

    batch: Batch
    taken: Taken
    ended: list[int] = field(default_factory=list)


class Controller:
    """Runs the batch steps `state.step + 1 … rl.steps`. pending: what the checkpoint that is resumed from brought along."""

    def __init__(self, parts: Parts, state: LoopState, pending: Pending | None = None) -> None:
        self.parts, self.state, self.config, self.hooks = parts, state, parts.config, parts.hooks
        self.waits = Waits()
        self._policy = PolicyTurn(self.waits, self.config.loop.train_timeout_s, ranks=parts.hosting is not None)
        self._pending = pending = pending or Pending()
        self.prompts = Prompts(
            parts.sampler, prepare=parts.rollouts.prepare, again=pending.again, late=parts.stateful_environments,
            max_bad=self.config.rl.data.max_bad_rows, bad=self._bad_row, bad_rows=pending.bad_rows,
        )  # fmt: skip
        logical = commit_order(self.config) == "logical"
        self._one_after_the_other = logical and not self.config.rollout.max_async_rollout
        self.evals = RunEvals(parts, self.waits)
        self.versions = Versions(
            parts.plane, state.step, policy=self._policy, current=lambda: self.state.step,
            due=lambda version: self._validates(version) or bool(self.evals.due(version)),
            validate=self._validate, evaluate=self.evals.run, hooks=parts.hooks, tracker=parts.tracker, waits=self.waits,
            bringer="rollouts loop" if logical else "weights loop",
        )  # fmt: skip
        self.desk = Desk(
            config=self.config, first=state.step + 1, prompts=self.prompts, rollouts=parts.rollouts, versions=self.versions,
            ledger=parts.ledger, waits=self.waits, tracker=parts.tracker, states=parts.generating_states,
            scored=self._scored, screening=Screening.of(self.config, parts.policy.vocab_size),
        )  # fmt: skip
        self.source: Source = Cohorts(self.desk, pending) if logical else Stream(self.desk, pending, slots=slots(self.config))
        self.checkpoints = Checkpointer(parts, self.source, self.versions, self.waits, self._policy)
        self._quotas = Quotas.of(self.config)
        self._gathered = {step: len(rounds) for step, rounds in pending.rounds.items()} if logical else {}
        self._pairs = isinstance(parts.objective.algorithm, PreferenceAlgorithm)
        self._batches: asyncio.Queue[_Admitted] = asyncio.Queue()  # as many as max_async_rollout lets be under way
        self._gap_report: Literal["", "due", "given"] = ""
        self._draws = validation.held_out_draws(parts.sampler.sources, parts.environments, self.config.validation.prompts)

    async def run(self) -> LoopState:
        """Run to the last step. The first exception of any loop ends all of them and is raised as it is."""
        await self.versions.publish(self.state.step)
        await self.versions.bring(self.state.step)
        self.versions.timings()  # of no batch step
        self.hooks.raise_failure()
        try:
            loops = run_together(self._rollout_loop(), self._batch_loop(), self._train_loop())
            await guarded(loops, self.prompts.run())
            await self.evals.finish()
        finally:
            await self.checkpoints.close(self.config.loop.shutdown_timeout_s)
        return self.state

    async def _rollout_loop(self) -> None:
        await self.source.run()

    async def _batch_loop(self) -> None:
        drawn, ended = -1, 0.0
        for step in range(self.state.step + 1, self.config.rl.steps + 1):
            gathering = self._gathering(step)
            rounds: list[Round] = []
            draws: list[Draw] = []
            while wanted := gathering.wanted():
                found, of = await self._gather(step, wanted)
                rounds += of
                draws += [draw for draw, _ in found]
                gathering.expect([draw.group_id for draw, _ in found])
                for _, group in found:
                    gathering.add(group)
                if more := gathering.wanted():
                    self.source.ask(of[-1], more)
            taken = gathering.take()  # a batch that ends the run is in no checkpoint: whoever resumes has another budget
            drawn = max([drawn, *(draw.index for draw in draws)])
            counts = self.source.lost() | self._bad_rows(drawn)
            with self.waits.named("a batch to be made", "a thread"):
                admitted = await in_thread(self._make_batch, step, draws, taken)
            self.checkpoints.batch_made(step)
            self.source.ask(of[-1], 0)
            self._admit(admitted)
            admitted.batch.metrics |= counts
            admitted.batch.seconds = seconds_of(rounds, ended)
            ended = max([ended, *(one.ended for one in rounds)])
            self._batches.put_nowait(admitted)

    def _gathering(self, step: int) -> Gathering:
        """A batch to be gathered; one that a checkpoint brought along keeps the cells and the rounds that it had."""
        before = self._gathered.get(step)
        cells = (self._pending.cells if before else ()) or cell_groups(self.config)
        quotas = Quotas.of(self.config, cells)
        return Gathering(step, quotas.gathered(before) if quotas and before else quotas, cells, pairs=self._pairs)

    async def _gather(self, step: int, wanted: int) -> tuple[list[tuple[Draw, Group]], list[Round]]:
        """As many groups as the batch wants, in draw order, and the rounds that they came in."""
        found: list[tuple[Draw, Group]] = []
        rounds: list[Round] = []
        while len(found) < wanted:
            with self.waits.named("a group to batch", "rollouts loop"):
                item = await self.desk.rounds.get()
            if isinstance(item, Exception):
                raise item
            rounds.append(item)
            found += self.source.keep(step, item)
        return sorted(found, key=lambda one: one[0].index), rounds

    def _make_batch(self, step: int, draws: Sequence[Draw], taken: Taken) -> _Admitted:
        """Runs in a thread."""
        batch = batches.make_batch(
            Cohort(step, draws, taken.groups), self.parts.objective, self.parts.packer,
            discard_tied=self.config.rl.discard_group_zero_advantage and self._quotas is None,
            screening=self.desk.screening, surplus=[group for group, _ in taken.surplus],
            ranges=reward_ranges(self.config.environments),
        )  # fmt: skip
        trajectories = [t for group in batch.groups for t in group.trajectories]
        batch.metrics |= taken.metrics | staleness_metrics(trajectories, step)
        if not self.config.rollout.max_async_rollout:
            refuse_off_policy(taken.groups, step - 1)
        return _Admitted(batch, taken)

    def _admit(self, admitted: _Admitted) -> None:
        """Write into the ledger what will train and what will not."""
        step, rows = admitted.batch.step, {row.group for row in admitted.batch.rows}
        for group in admitted.taken.groups:
            index = draw_index(group)
            admitted.ended.append(index)
            if group.group_id in rows:
                self.parts.ledger.move(index, "admitted")
            else:
                self.parts.ledger.move(index, "dropped", _cause(group), step=step)
        for group, cause in admitted.taken.surplus:
            admitted.ended.append(draw_index(group))
            self.parts.ledger.move(draw_index(group), "dropped", cause, step=step)

    async def _train_loop(self) -> None:
        clock = asyncio.get_running_loop().time
        began = started = clock()
        before = self.state.seconds
        for step in range(self.state.step + 1, self.config.rl.steps + 1):
            with self.waits.named("a batch to train on", "batches loop"):
                admitted = await self._batches.get()
            batch = admitted.batch
            metrics = {**batch.metrics, **batch.seconds, **await self._train(admitted)}
            self._finish_draws(admitted)
            await self.versions.publish(step)
            await self.versions.wait_delivered(step - self.config.rollout.max_async_rollout)
            metrics |= self.versions.timings()
            now = clock()
            metrics["time/step_s"] = now - began
            metrics["time/wall_s"] = self.state.seconds = before + now - started
            await self._report(batch, metrics)
            last = step == self.config.rl.steps
            if last or not self.config.rollout.max_async_rollout:
                await self.versions.wait_validated(step)
            if last or self.hooks.failing or _due(step, self.config.checkpoint.every):
                await self._checkpoint()
            if last or self.hooks.failing:
                await self.checkpoints.written()
            self.checkpoints.raise_failure()
            self.hooks.raise_failure()
            if self._one_after_the_other:
                await self.versions.wait_evaluated(step)  # what the next prompts wait for is no time of their step
            began = clock()

    async def _train(self, admitted: _Admitted) -> dict[str, float]:
        """The optimizer steps of a batch, in a thread; a batch without rows trains no step."""
        batch = admitted.batch
        if batch.rows and (self._quotas is None or admitted.taken.informative):
            self.state.uninformative_in_a_row = 0
        else:
            self.state.uninformative_in_a_row += 1
            self._stop_if_stuck(batch)
        if not batch.rows:
            return {"optimizer_steps": 0, "tokens/trained": 0, "time/train_s": 0.0}
        clock = asyncio.get_running_loop().time
        async with self._policy.turn():
            began = clock()
            with self.parts.tracker.span("policy", "train", step=batch.step):
                if self._gap_report == "due":
                    await self._explain_gap(batch)
                result = await self._policy.call("the optimizer steps", self.parts.policy.train_step, batch.rows)
        if self._gap_report == "" and result.metrics.get("policy/logprob_gap", 0.0) > LARGE_GAP:
            self._gap_report = "due"
        self.state.optimizer_steps += result.optimizer_steps
        if result.skipped:
            self.parts.tracker.note(
                f"step {batch.step}: an optimizer step was skipped, its gradient was not finite; no weight moved"
            )
        seconds = clock() - began
        return {**result.metrics, **result.seconds, "optimizer_steps": result.optimizer_steps, "time/train_s": seconds}

    async def _explain_gap(self, batch: Batch) -> None:
        """Say, once in a run, why engine and trainer differ as much as they did in the step before."""
        self._gap_report = "given"
        logprobs = await self._policy.call("log-probs of the batch", self.parts.policy.logprobs, batch.rows)
        rows = {row.sample_id: row for group in batch.groups for t in group.trajectories for row in t.rows}
        chosen, setup = [rows[row.id] for row in batch.rows], Setup.of(self.config)
        try:
            lines = attribute(chosen, logprobs, version=batch.step - 1, setup=setup).lines
        except ValueError as exc:
            lines = (f"engine and trainer differ, and why cannot be told: {exc}",)
        for line in lines:
            self.parts.tracker.note(line)

    def _finish_draws(self, admitted: _Admitted) -> None:
        """The step is done: no await between this and the cut of a checkpoint may leave a draw in two places."""
        step, trained = admitted.batch.step, {row.group for row in admitted.batch.rows}
        for group in admitted.taken.groups:
            if group.group_id in trained:
                self.parts.ledger.move(draw_index(group), "trained", step=step)
        self.parts.ledger.flush()
        self.state.step = step
        self.source.trained(step, admitted.ended)
        self.checkpoints.trained(step)

    async def _report(self, batch: Batch, metrics: dict[str, float]) -> None:
        metrics |= await self.hooks.metrics(batch.step, batch.groups)
        self.parts.tracker.step(batch.step, metrics, batch.groups, batch.advantages)
        await self.hooks.step_end(
            batch.step, metrics={"loss": None, **metrics}, groups=batch.groups, advantages=batch.advantages
        )

    async def _checkpoint(self) -> None:
        """Copy what the next step would change; the rest is written while the loops go on."""
        with self.parts.tracker.span("loop", "snapshot", step=self.state.step):
            await self.checkpoints.begin(self.state)

    def _validates(self, version: int) -> bool:
        """Whether held-out prompts are still to be asked of a version."""
        due = version in (0, self.config.rl.steps) or _due(version, self.config.validation.every)
        return due and bool(self._draws) and not self.parts.tracker.has_validation(version)

    async def _validate(self, version: int) -> None:
        """What is due at a version, while the engines have it."""
        if not self._validates(version):
            return
        clock = asyncio.get_running_loop().time
        began = clock()
        with self.parts.tracker.span("rollout", "validate", step=version):
            metrics, groups = await self.waits.bounded(
                self._measure(),
                name=f"validation after step {version}",
                owner=f"rollout engine {self.config.rollout.engine}",
                timeout=self.config.rollout.generate_timeout_s,
                key="rollout.generate_timeout_s",
            )
        metrics["validation/time_s"] = clock() - began
        self.parts.tracker.validation(version, metrics, groups)
        await self.hooks.call("validation_end", step=version, metrics=metrics, groups=groups)

    async def _measure(self) -> tuple[dict[str, float], list[Group]]:
        parts = self.parts
        if isinstance(parts.rollouts, Pairs):
            async with self._policy.turn():
                return await validate_pairs(parts.rollouts, self._draws, parts.objective, parts.policy)
        return await validation.validate(parts.rollouts, self._draws, self.config)

    def _scored(self, step: int) -> Callable[[Trajectory], Awaitable[Any]] | None:
        """What tells the hooks of a trajectory that has its reward; None where there is no hook."""
        return functools.partial(self._tell, step) if self.hooks.active else None

    async def _tell(self, step: int, trajectory: Trajectory) -> None:
        await self.hooks.call("trajectory_scored", step=step, trajectory=trajectory)

    def _bad_row(self, draw: Draw, problem: Exception, step: int) -> None:
        self.parts.ledger.drawn(draw)
        self.parts.ledger.move(draw.index, "dropped", "bad_row", step=step)
        self.parts.tracker.note(f"passed over: {str(problem).splitlines()[0]}")

    def _bad_rows(self, drawn: int) -> dict[str, float]:
        """Rows passed over up to a draw: the same whoever has read ahead, and however far."""
        found = sum(index < drawn for index in self.prompts.bad_rows)
        return {"data/bad_rows": found} if found else {}

    def _stop_if_stuck(self, batch: Batch) -> None:
        limit = self.config.rl.max_uninformative_batches
        if self.state.uninformative_in_a_row < limit:
            return
        zero, one = batch.metrics["train/grpo_all_zero_group_count"], batch.metrics["train/grpo_all_one_group_count"]
        raise RunAborted(
            f"{limit} batches in a row had nothing to learn from (step {batch.step})",
            cause=f"in every group all rewards agree; in the last batch {zero:g} group(s) were all 0, {one:g} all 1, of "
            f"{len(batch.groups)}; unscorable samples: {batch.metrics['rollout/unscorable_count']:g}{_causes(batch)}",
            fix="all 0: an easier task, a partial reward or a larger rl.group_size; all 1: a harder task; "
            "look at samples with `posttrain show`; rl.max_uninformative_batches sets the limit",
            anchor="troubleshooting.md#no-learning-signal",
            code="uninformative",
        )


def slots(config: RunConfig) -> int:
    """Samples that may be in all engines at once: twice what they decode together, so that none waits for the dispatch."""
    return 2 * config.rollout.max_num_seqs * resolve_grid(config.grid).rollout[0]


def draw_index(group: Group) -> int:
    """The draw that a group is of."""
    return int(group.group_id.split(":", 1)[0])


def _cause(group: Group) -> str:
    """Why a group of a batch does not train."""
    if any(trains(t) for t in group.trajectories):
        return "uninformative"
    return "filtered" if any(t.trained for t in group.trajectories) else "unscorable"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def seconds_of(rounds: Sequence[Round], past: float = 0.0) -> dict[str, float]:
    """Seconds of generating and scoring a batch: the sum of rounds that ran one after the other. Prompts that run side by side do
    so with those of other batches too: from the first dispatch, or from `past`, when the batch before was complete."""
    if all(one.step for one in rounds):
        return {"time/rollout_s": sum(r.seconds for r in rounds), "time/generate_s": sum(r.generate_s for r in rounds)}
    own = [one for one in rounds if one.seconds]
    began = max(past, min((one.began for one in own), default=past))
    return {
        "time/rollout_s": max([one.ended - began for one in own] + [0.0]),
        "time/generate_s": max([one.began + one.generate_s - began for one in own] + [0.0]),
    }


def _causes(batch: Batch) -> str:
    """` (too_long 12)`: why trajectories of a batch have no reward."""
    prefix = "rollout/unscorable/"
    causes = [f"{name.removeprefix(prefix)} {n:g}" for name, n in batch.metrics.items() if name.startswith(prefix)]
    return f" ({', '.join(causes)})" if causes else ""
