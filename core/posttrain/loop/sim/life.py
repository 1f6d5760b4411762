"""One process of a simulated run: it starts or resumes as `posttrain train` does, and ends, fails or is killed."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from posttrain.data.dataset import PromptSampler, Source
from posttrain.errors import RunAborted, RunInterrupted, WaitExpired, WeightSyncError
from posttrain.loop import checkpoint
from posttrain.loop.controller import Controller, LoopState
from posttrain.loop.ledger import Ledger
from posttrain.loop.parts import Parts
from posttrain.loop.rollouts import Rollouts
from posttrain.loop.run import cut_ledger
from posttrain.loop.sim import laws
from posttrain.loop.sim.bodies import SimReplicas
from posttrain.loop.sim.disk import Disk
from posttrain.loop.sim.ends import Records, SimEnvironment, SimObjective, SimPacker, SimPolicy, SimTracker
from posttrain.loop.sim.fleet import SimFleet
from posttrain.loop.sim.trace import Trace
from posttrain.loop.sim.virtual_time import Killed, Stuck, VirtualLoop
from posttrain.loop.sim.weights import SimPublisher
from posttrain.loop.sim.world import Faults, World
from posttrain.loop.wait_graph import render
from posttrain.loop.waits import guarded
from posttrain.plugins.state import Keeper
from posttrain.rollout.scoring import Scorer
from posttrain.weights.plane import Update, WeightPlane

PATIENCE = 6
"""Lives in which something may go wrong by chance; after them nothing does, so that a run ends."""
AHEAD = 8
"""Draws that are read ahead: few, so that reading has to wait."""
MOST_TURNS, MOST_SECONDS = 200_000, 200_000.0


@dataclass(frozen=True, slots=True)
class SimRunDir:
    """Where the run's files are."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


@dataclass(slots=True)
class Run:
    """What outlives a process: the folder, the tracker's records, and what the laws remember of it.

    lineage   weights after each batch step, of the lives that count
    """

    world: World
    folder: Path
    trace: Trace
    records: Records = field(default_factory=Records)
    lineage: dict[int, str] = field(default_factory=dict)
    rows: dict[int, list[str]] = field(default_factory=dict)
    lives: int = 0
    turns: int = 0
    seconds: float = 0.0
    resumes: list[int] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)


class SimPlane(WeightPlane):
    """The real one, looked at after each update."""

    def __init__(self, life: Life) -> None:
        super().__init__(life.publisher, life.fleet.lanes, life.world.config.weights)
        self._life = life

    async def deliver(self, update: Update) -> dict[str, float]:
        version, failed = update.publication.version, True
        try:
            metrics = await super().deliver(update)
            failed = False
            return metrics
        finally:
            laws.of_an_update(self._life, version, failed)


class Life:
    """kill_at: the turn of the loop in which the process is killed."""

    def __init__(self, run: Run, *, kill_at: int | None) -> None:
        self.run, self.world, self.number, trace = run, run.world, run.lives, run.trace
        world, config = self.world, self.world.config
        self.rng = random.Random(f"life {world.seed} {self.number}")
        faults = self.faults = world.faults if self.number < PATIENCE else Faults()
        if faults.deadline and world.order == "arrival":
            config = replace(config, rollout=replace(config.rollout, generate_timeout_s=faults.deadline))
        self.disk = Disk(self.rng, torn=dict(faults.torn).get(self.number), full=dict(faults.full).get(self.number))
        self.loop = VirtualLoop(
            seed=self.rng.getrandbits(32), takes=self._takes, kill_at=kill_at, most_turns=MOST_TURNS, most_seconds=MOST_SECONDS
        )
        trace.life, trace.clock = self.number, self.loop.time
        self.odd: list[str] = []
        self.loop.set_exception_handler(
            lambda loop, context: self.odd.append(f"{context.get('exception') or context['message']}")
        )
        self.environment = SimEnvironment(world, lambda: self.rng.random() * 2)
        self.policy = SimPolicy(self.disk, trace)
        deadly = dict(faults.deaths).get(self.number)
        made = SimReplicas if world.remote else SimFleet
        self.fleet: SimReplicas | SimFleet = made(replace(world, faults=faults), self.rng, trace, deadly)
        self.fleet.dispatched = lambda asked, samples: laws.of_a_dispatch(self, asked, samples)
        self.publisher = SimPublisher(self.policy, trace)
        environments: dict[str, Any] = {"sim": self.environment}
        packer: Any = SimPacker()
        scorer = Scorer(environments, timeout_s=config.rollout.reward_timeout_s)
        self.objective: Any = SimObjective()
        self.sampler = PromptSampler(
            [Source("sim", self.environment.dataset("train"))],
            seed=config.seed,
            shuffle=config.rl.data.shuffle,
            batch=world.per_step,
        )
        run_dir: Any = SimRunDir(run.folder)
        self.parts = Parts(
            config=config, run_dir=run_dir, tracker=SimTracker(self, run.records, trace),  # type: ignore[arg-type]
            objective=self.objective, environments=environments, sampler=self.sampler, packer=packer, policy=self.policy,  # type: ignore[arg-type]
            rollouts=Rollouts(self.fleet, packer, environments, scorer, config.rollout.max_model_len, config.seed),
            ledger=Ledger(run.folder / "ledger.jsonl"), engine=self.fleet, scorer=scorer,
            plane=SimPlane(self), keepers=self._keepers(),
        )  # fmt: skip
        self.controller: Controller | None = None

    def _keepers(self) -> list[Keeper]:
        found = [Keeper("algorithms", "sim", self.objective.algorithm)]
        return found + ([Keeper("envs", "sim", self.environment)] if self.world.traits.stateful else [])

    def live(self) -> bool:
        """Whether the run is done. Raises what is nobody's fault but the loop's."""
        try:
            found = self._found()
            with self.disk.mounted(), mock.patch("posttrain.loop.prompts.AHEAD", AHEAD):
                self.loop.run_until_complete(self._work(found))
            laws.after_a_life(self)
        except Killed:
            self._die("killed")
            return False
        except Exception as exc:
            if isinstance(exc, Stuck) and self.controller is not None:
                raise Stuck(f"{exc}\n{render(list(self.controller.waits.open), self.loop.now)}") from exc
            if not self._expected(exc):
                raise
            laws.of_a_failure(self)
            self._die(f"ends with {type(exc).__name__}: {str(exc).splitlines()[0]}")
            return False
        finally:
            self.run.turns += self.loop.turns
            self.run.seconds += self.loop.now
            self.run.lives += 1
            self.loop.bury()
        return True

    async def _work(self, found: checkpoint.Checkpoint | None) -> None:
        """`run._run` without the hang doctor: that everything waits is known at once here."""
        parts = self.parts
        try:
            state, ahead = (LoopState(), None) if found is None else parts.load(found)
            async with parts.hooks.running(parts.tracker, path=self.run.folder, config={}, step=state.step, steps=0):  # type: ignore[arg-type]
                await parts.start()
                self.controller = Controller(parts, state, ahead)
                laws.at_the_start(self, self.controller)
                await guarded(self.controller.run(), parts.watch())
        finally:
            await parts.close()

    def _found(self) -> checkpoint.Checkpoint | None:
        """The newest checkpoint, everything after it put aside; without one the run begins anew."""
        run, folder = self.run, self.run.folder
        if not checkpoint.find(folder / "checkpoints"):
            run.records.cut_after(-1)
            run.lineage.clear()
            (folder / "ledger.jsonl").unlink(missing_ok=True)
            (folder / "ledger.jsonl.superseded").unlink(missing_ok=True)
            return None
        _, found = checkpoint.locate(folder)
        run.trace("run", f"resumes from step {found.step}")
        run.resumes.append(found.step)
        run.records.cut_after(found.step)
        cut_ledger(folder, found)
        return found

    def _die(self, how: str) -> None:
        """The process is gone: what it had not handed to the operating system never was."""
        how = how.replace(str(self.run.folder), "the run's folder")  # whose name is of no seed
        self.run.trace("run", how)
        self.run.causes.append(how)
        path, ledger = self.run.folder / "ledger.jsonl", self.parts.ledger
        if ledger._file is not None:
            size = os.stat(path).st_size
            ledger._file.close()
            os.truncate(path, size)
        ledger._file, ledger.path = None, None

    def _expected(self, exc: Exception) -> bool:
        """Whether it is what was injected: of the loop's own complaints nothing is."""
        injected = self.fleet.died or self.disk.is_full or any(lane.injected for lane in self.fleet.receivers)
        if isinstance(exc, WaitExpired):
            return self.faults.deadline > 0 and f"waited {self.faults.deadline:g} s for " in str(exc)
        lost_all = isinstance(exc, RunAborted) and exc.code == "weights"  # every lane was dropped
        return injected and (lost_all or isinstance(exc, (RunInterrupted, WeightSyncError)))

    def _takes(self, name: str) -> float:
        if name == "train_step":
            self.policy.begin()
        if name == "_pull" and any(lane.stalls for lane in self.fleet.receivers):
            for lane in self.fleet.receivers:
                lane.stalls = False
            return 1e9
        slow = self.rng.random() < self.faults.thread
        most = {"train_step": self.world.train_s, "_on_disk": 30.0, "_pull": 0.1, "_verify": 0.05}.get(name, 0.1)
        return self.rng.random() * most * (10 if slow else 1)
