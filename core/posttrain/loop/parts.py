"""The parts of a run, built from its config, cheapest first, so that what cannot work ends before a model loads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from posttrain.data.dataset import FINGERPRINT_ROWS, FIRST_FINGERPRINT_ROWS
from posttrain.errors import DataError
from posttrain.hooks import RunHooks
from posttrain.loop import checkpoint, pending, states
from posttrain.loop.controller import LoopState
from posttrain.loop.ledger import Ledger
from posttrain.loop.pairs import Pairs
from posttrain.loop.rollouts import Rollouts

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import PromptSampler
    from posttrain.data.environment import Environment
    from posttrain.data.packer import DataPacker
    from posttrain.evals.build import Eval
    from posttrain.loop.agents import Agents
    from posttrain.loop.cluster import Hosting
    from posttrain.loop.pending import Pending
    from posttrain.objective.objective import Objective
    from posttrain.plugins.origin import Origin
    from posttrain.plugins.state import Keeper, SavedState
    from posttrain.policy.rows import Row
    from posttrain.policy.step import StepResult
    from posttrain.rollout.engine import Generates
    from posttrain.rollout.scoring import Scorer
    from posttrain.tracking.run_dir import RunDir
    from posttrain.tracking.tracker import Tracker
    from posttrain.weights.plane import WeightPlane


class PolicyEnd(Protocol):
    """The controller's view of the policy: `Policy` in this process, or `PolicyGroup` for its ranks in others."""

    notes: list[str]

    @property
    def vocab_size(self) -> int: ...
    def train_step(self, rows: list[Row]) -> StepResult: ...
    def evaluate(self, rows: list[Row]) -> dict[str, float]: ...
    def logprobs(self, rows: list[Row]) -> list[list[float]]: ...
    def score(self, sequences: Sequence[Sequence[int]], dtype: str) -> list[list[float]]: ...
    def snapshot(self) -> Callable[[Path], None]: ...
    def load(self, folder: str | Path) -> None: ...


@dataclass(slots=True)
class Parts:
    """Everything the controller drives. Without an engine there is no weight plane and no scorer either.

    keepers: what training depends on and keeps a state. origins: where the plug-ins come from.
    `close` ends engines and workers; safe to call after a failed start.
    """

    config: RunConfig
    run_dir: RunDir
    tracker: Tracker
    objective: Objective
    environments: dict[str, Environment]
    sampler: PromptSampler
    packer: DataPacker
    policy: PolicyEnd
    rollouts: Rollouts | Pairs
    ledger: Ledger
    engine: Generates | None = None
    plane: WeightPlane | None = None
    scorer: Scorer | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    hooks: RunHooks = field(default_factory=RunHooks)
    keepers: list[Keeper] = field(default_factory=list)
    hosting: Hosting | None = None
    evals: list[Eval] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)

    async def start(self) -> None:
        """Start what listens for agents, the engine, and the workers that score."""
        for part in (self.agents, self.engine, self.scorer):
            if part is not None:
                await part.start()

    @property
    def agents(self) -> Agents | None:
        """Who plays the episodes of agents, where an environment brings one."""
        return getattr(self.rollouts, "agents", None)

    async def watch(self) -> None:
        """Raises when a role in another process is dead or stuck; returns never."""
        if self.hosting is not None:
            await self.hosting.fleet.watch()
        await asyncio.Event().wait()

    @property
    def stateful_environments(self) -> list[str]:
        """Names of the environments whose prompts depend on a state: their own, or the packer's."""
        if any(keeper.kind == "datapackers" for keeper in self.keepers):
            return list(self.environments)
        return [keeper.name for keeper in self.keepers if keeper.kind == "envs"]

    def algorithm_states(self) -> list[SavedState]:
        """The state of the algorithm. Raises PluginError when it cannot give one."""
        return [keeper.save() for keeper in self.keepers if keeper.kind == "algorithms"]

    def generating_states(self) -> list[SavedState]:
        """The states of what generates and scores: environments and the packer. Raises PluginError naming who cannot."""
        return [keeper.save() for keeper in self.keepers if keeper.kind != "algorithms"]

    async def hook_states(self) -> list[SavedState]:
        """The states of the hooks."""
        return states.save([], states.hook_keepers(self.hooks), await self.hooks.state_dict())

    def load(self, found: checkpoint.Checkpoint) -> tuple[LoopState, Pending]:
        """Bring every part to the checkpoint, and say what has changed of plug-ins. Returns the counters and what was pending.

        Raises DataError when the dataset is not the one it was made with, PluginError for states that do not fit.
        """
        saved = found.loop_state()
        most = saved.get("fingerprint_rows", FIRST_FINGERPRINT_ROWS)
        fingerprints = self.fingerprints if most == FINGERPRINT_ROWS else self.sampler.fingerprints(most)
        for name, was in saved["fingerprints"].items():
            now = fingerprints.get(name)
            if now != was:
                raise DataError(
                    f"the dataset of {name} is not the one that {found.path} was made with",
                    cause=f"fingerprint {was} then, {now} now",
                    fix="restore the data, or start a new run",
                    code="fingerprint",
                )
        of_hooks, notes = states.load(self.keepers, states.hook_keepers(self.hooks), found.plugin_states(), found.path)
        changed, told = states.changed(self.origins, found.origins(), notes)
        for note in [*notes, *told]:
            self.tracker.note(note)
        if changed:
            self.run_dir.add_changed(changed)
        self.policy.load(found.policy)
        self.sampler.load_state_dict(saved["sampler"])
        self.hooks.load_state_dict(of_hooks)
        ahead = pending.read(found.pending, self.sampler)
        ahead.bad_rows = tuple(saved["sampler"].get("bad_rows", ()))
        ahead.cells = tuple(saved.get("cells", ()))
        again = {draw.index for draw in ahead.again}
        for draw in ahead.draws:
            self.ledger.drawn(draw, "drawn" if draw.index in again else "finished")
        return LoopState(**{name: value for name, value in saved["state"].items() if name in LoopState.__slots__}), ahead

    async def close(self) -> None:
        """Close every part, also when one of them fails or hangs; what failed is said, and never hides why the run ended."""
        timeout = self.config.loop.shutdown_timeout_s
        for name, part in (("agents", self.agents), ("engine", self.engine), ("rewards", self.scorer)):
            try:
                if part is not None:
                    await asyncio.wait_for(part.close(), timeout)
            except Exception as exc:
                self.tracker.note(f"closing the {name} failed: {type(exc).__name__}: {exc} (see logs/)")
        if self.plane is not None:
            await self.plane.close()
        if self.hosting is not None:
            self.hosting.close()
        self.ledger.close()
