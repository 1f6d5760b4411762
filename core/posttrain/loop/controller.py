"""The controller: four named loops and the version that links them.

    prompts   draws cohort k when the weights are new enough        → self._prompts
    rollouts  generates and scores a cohort                          → self._rollouts
    batches   decides what of it trains                              → self._batches
    train     optimizer steps, publish, validate, checkpoint, report → advertises version k

The cohort of batch step k (k counts from 1) may be drawn once version `k - 1 - rollout.max_async_rollout` is advertised; with
0 every token of a batch was sampled by exactly the version that the batch updates. The controller knows no backend: token ids
and log-probs travel as plain values, model tensors never pass through it.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.errors import RunAborted
from posttrain.loop import batches, checkpoint, validation
from posttrain.loop.cohort import Batch, Cohort
from posttrain.loop.pairs import Pairs
from posttrain.loop.pairs import validate as validate_pairs
from posttrain.loop.waits import Waits, run_together
from posttrain.types import Sampling

if TYPE_CHECKING:
    from posttrain.loop.parts import Parts
    from posttrain.types import Group, Trajectory


@dataclass(slots=True)
class LoopState:
    """The counters that a checkpoint carries. `step` is the last batch step done, which is also the version in force."""

    step: int = 0
    optimizer_steps: int = 0
    uninformative_in_a_row: int = 0
    validation_first: dict[str, float] = field(default_factory=dict)
    validation_last: dict[str, float] = field(default_factory=dict)


class Controller:
    """Runs the batch steps `state.step + 1 … rl.steps`."""

    def __init__(self, parts: Parts, state: LoopState) -> None:
        self.parts, self.state, self.config, self.hooks = parts, state, parts.config, parts.hooks
        self.waits = Waits()
        self.advertised = -1
        self._moved = asyncio.Condition()
        self._prompts: asyncio.Queue[Cohort] = asyncio.Queue(1)
        self._rollouts: asyncio.Queue[Cohort] = asyncio.Queue(1)
        self._batches: asyncio.Queue[Batch] = asyncio.Queue(1)
        self._draws = validation.held_out_draws(parts.sampler.sources, parts.environments, self.config.validation.prompts)

    async def run(self) -> LoopState:
        """Run to the last step. The first exception of any loop ends all of them and is raised as it is."""
        await self._sync(self.state.step)
        if self.state.step == 0:
            await self._validate(0)
        self.hooks.raise_failure()
        await self._advertise(self.state.step)
        loops = (self._prompt_loop(), self._rollout_loop(), self._batch_loop(), self._train_loop())
        await run_together(*loops)
        return self.state

    async def _prompt_loop(self) -> None:
        per_step = self.config.rl.batch_per_replica // self.config.rl.group_size
        for step in range(self.state.step + 1, self.config.rl.steps + 1):
            await self._wait_for(step - 1 - self.config.rollout.max_async_rollout)
            cohort = Cohort(step, self.parts.sampler.draw(per_step))
            for draw in cohort.draws:
                self.parts.ledger.drawn(draw, step)
            await self._prompts.put(cohort)

    async def _rollout_loop(self) -> None:
        r = self.config.rollout
        sampling = Sampling(r.max_tokens, r.temperature, r.top_p, r.top_k, r.min_p, ignore_eos=r.ignore_eos)
        for _ in range(self.state.step, self.config.rl.steps):
            with self.waits.named("a cohort to generate", "prompts loop"):
                cohort = await self._prompts.get()
            self._move(cohort, "dispatched")
            began = time.perf_counter()
            with self.parts.tracker.span("rollout", "generate and score", step=cohort.step):
                cohort.groups = await self.waits.bounded(
                    self.parts.rollouts.run(
                        cohort.draws, n=self.config.rl.group_size, sampling=sampling, scored=self._scored(cohort.step)
                    ),
                    name=f"completions of step {cohort.step}",
                    owner=f"rollout engine {r.engine}",
                    timeout=r.generate_timeout_s,
                    key="rollout.generate_timeout_s",
                )
            cohort.seconds, cohort.generate_s = time.perf_counter() - began, self.parts.rollouts.generate_s
            self._move(cohort, "finished")
            await self._rollouts.put(cohort)

    async def _batch_loop(self) -> None:
        for _ in range(self.state.step, self.config.rl.steps):
            with self.waits.named("a cohort to batch", "rollouts loop"):
                cohort = await self._rollouts.get()
            batch = batches.make_batch(
                cohort, self.parts.objective, self.parts.packer, discard_tied=self.config.rl.discard_group_zero_advantage
            )
            self._admit(cohort, batch)
            batch.seconds = {"time/rollout_s": cohort.seconds, "time/generate_s": cohort.generate_s}
            await self._batches.put(batch)

    async def _train_loop(self) -> None:
        began = time.perf_counter()
        for _ in range(self.state.step, self.config.rl.steps):
            with self.waits.named("a batch to train on", "batches loop"):
                batch = await self._batches.get()
            metrics = {**batch.metrics, **batch.seconds, **await self._train(batch)}
            metrics |= await self._sync(batch.step)
            self._finish_draws(batch)
            self.state.step = batch.step
            now = time.perf_counter()
            metrics["time/step_s"], began = now - began, now
            metrics |= await self.hooks.metrics(batch.step, batch.groups)
            self.parts.tracker.step(batch.step, metrics, batch.groups, batch.advantages)
            await self.hooks.step_end(
                batch.step, metrics={"loss": None, **metrics}, groups=batch.groups, advantages=batch.advantages
            )
            if self._due(self.config.validation.every) or self.state.step == self.config.rl.steps:
                await self._validate(batch.step)
            if self._due(self.config.checkpoint.every) or self.state.step == self.config.rl.steps or self.hooks.failing:
                await self._checkpoint()
            self.hooks.raise_failure()
            began = time.perf_counter()
            await self._advertise(batch.step)

    async def _train(self, batch: Batch) -> dict[str, float]:
        """The optimizer steps of a batch, in a thread; a batch with nothing to learn trains no step."""
        if not batch.rows:
            self.state.uninformative_in_a_row += 1
            self._stop_if_stuck(batch)
            return {"optimizer_steps": 0, "tokens/trained": 0, "time/train_s": 0.0}
        self.state.uninformative_in_a_row = 0
        began = time.perf_counter()
        with self.parts.tracker.span("policy", "train", step=batch.step), self.waits.named("the optimizer steps", "policy"):
            result = await asyncio.to_thread(self.parts.policy.train_step, batch.rows)
        self.state.optimizer_steps += result.optimizer_steps
        if result.skipped:
            self.parts.tracker.note(
                f"step {batch.step}: an optimizer step was skipped, its gradient was not finite; no weight moved"
            )
        seconds = time.perf_counter() - began
        return {**result.metrics, **result.seconds, "optimizer_steps": result.optimizer_steps, "time/train_s": seconds}

    async def _sync(self, version: int) -> dict[str, float]:
        """Publish version `version` and bring the engine to it; nothing to do without an engine."""
        if self.parts.plane is None:
            return {}
        await self.hooks.call("before_publish", version=version)
        began = time.perf_counter()
        with self.parts.tracker.span("weights", "sync", version=version), self.waits.named(f"version {version}", "weight plane"):
            timings = await self.parts.plane.sync(version)
        timings["time/sync_s"] = time.perf_counter() - began
        await self.hooks.call("after_publish", version=version, metrics=timings)
        return timings

    async def _validate(self, step: int) -> None:
        if not self._draws:
            return
        began = time.perf_counter()
        with self.parts.tracker.span("rollout", "validate", step=step):
            metrics, groups = await self.waits.bounded(
                self._measure(),
                name=f"validation after step {step}",
                owner=f"rollout engine {self.config.rollout.engine}",
                timeout=self.config.rollout.generate_timeout_s,
                key="rollout.generate_timeout_s",
            )
        metrics["validation/time_s"] = time.perf_counter() - began
        self.state.validation_first = self.state.validation_first or metrics
        self.state.validation_last = metrics
        self.parts.tracker.validation(step, metrics, groups)
        await self.hooks.call("validation_end", step=step, metrics=metrics, groups=groups)

    async def _measure(self) -> tuple[dict[str, float], list[Group]]:
        parts = self.parts
        if isinstance(parts.rollouts, Pairs):
            return await validate_pairs(parts.rollouts, self._draws, parts.objective, parts.policy)
        return await validation.validate(parts.rollouts, self._draws, self.config)

    async def _checkpoint(self) -> None:
        with self.parts.tracker.span("loop", "checkpoint", step=self.state.step), self.waits.named("a checkpoint", "disk"):
            saved = await asyncio.to_thread(self.parts.save, self.state, await self.parts.states())
        c = self.config.checkpoint
        checkpoint.prune(self.parts.run_dir.checkpoints, keep_last=c.keep_last, keep_every=c.keep_every)
        await self.hooks.call("checkpoint_saved", step=saved.step, path=saved.path)

    def _scored(self, step: int) -> Callable[[Trajectory], Awaitable[Any]] | None:
        """What tells the hooks of a trajectory that has its reward; None where there is no hook."""
        return functools.partial(self._tell, step) if self.hooks.active else None

    async def _tell(self, step: int, trajectory: Trajectory) -> None:
        await self.hooks.call("trajectory_scored", step=step, trajectory=trajectory)

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _move(self, cohort: Cohort, state: str) -> None:
        for draw in cohort.draws:
            self.parts.ledger.move(draw.index, state)

    def _admit(self, cohort: Cohort, batch: Batch) -> None:
        admitted = {row.group for row in batch.rows}
        for draw, group in zip(cohort.draws, cohort.groups, strict=True):
            if draw.group_id in admitted:
                self.parts.ledger.move(draw.index, "admitted")
            else:
                cause = "uninformative" if any(t.trained for t in group.trajectories) else "unscorable"
                self.parts.ledger.move(draw.index, "dropped", cause)

    def _finish_draws(self, batch: Batch) -> None:
        trained = {row.group for row in batch.rows}
        for group in batch.groups:
            if group.group_id in trained:
                self.parts.ledger.move(int(group.group_id.split(":", 1)[0]), "trained")
        self.parts.ledger.flush()

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

    async def _advertise(self, version: int) -> None:
        async with self._moved:
            self.advertised = version
            self._moved.notify_all()

    async def _wait_for(self, version: int) -> None:
        async with self._moved:
            with self.waits.named(f"weights of version {version} to draw prompts", "train loop"):
                await self._moved.wait_for(lambda: self.advertised >= version)


def _causes(batch: Batch) -> str:
    """` (too_long 12)`: why trajectories of a batch have no reward."""
    prefix = "rollout/unscorable/"
    causes = [f"{name.removeprefix(prefix)} {n:g}" for name, n in batch.metrics.items() if name.startswith(prefix)]
    return f" ({', '.join(causes)})" if causes else ""
