"""What a seed means: a small config, and everything that will go wrong, drawn before anything runs.

    world = World.of(seed=17, order="arrival")      # ahead=None, faults=True
    world.calm                                      # the same run, undisturbed

What a sample is (length, tokens, reward) depends on the run's seed, its draw and its number, never on the schedule; when
things happen depends on the schedule alone. So two worlds of one run may be compared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from posttrain.config.schema import (
    CheckpointConfig,
    DataConfig,
    EnvironmentConfig,
    GridConfig,
    LoopConfig,
    ModelConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    ValidationConfig,
    WeightsConfig,
)

Order = Literal["logical", "arrival"]
SIBLINGS = 8
"""Neighbouring seeds that are one run under different schedules, so that they share its undisturbed one."""

REMOTE = 0.5
"""Share of the runs whose engines are in processes of their own."""
_WITH_BODIES: tuple[Literal["raise", "rebuild_and_retry", "drop_lane"], ...] = ("raise", "rebuild_and_retry", "drop_lane")


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Chances are per event; counts are per run.

    kills       (life, share of a calm life's turns) at which the driver dies        torn   (life, disk step) inside a write
    deaths      (life, completions) after which an engine is gone and the run ends with RunInterrupted
    full        (life, disk step) at which the disk is full
    updates     chance that a lane fails an update, with how: raise, stall, apply, pause
    duplicate   chance that an engine says a completion twice        late   chance that a completion is long under way
    thread      chance that a thread takes long
    deadline    rollout.generate_timeout_s under `arrival`, so short that the longest samples miss it; 0: the config's
    """

    kills: tuple[tuple[int, float], ...] = ()
    torn: tuple[tuple[int, int], ...] = ()
    deaths: tuple[tuple[int, int], ...] = ()
    full: tuple[tuple[int, int], ...] = ()
    updates: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0
    thread: float = 0.0
    deadline: float = 0.0


@dataclass(frozen=True, slots=True)
class Traits:
    """What the environment is like. Chances are per sample, and fixed by its name.

    hang, crash, none, nan   rewards that never come, raise, are None, are not a number        tie   groups whose rewards agree
    bad                      share of rows that cannot be asked about
    stateful                 whether prompts depend on how many episodes were scored
    """

    hang: float = 0.0
    crash: float = 0.0
    none: float = 0.0
    nan: float = 0.0
    tie: float = 0.0
    bad: float = 0.0
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """One simulated run. seed: of the schedule; the run's own is `config.seed`.

    tail      share of the samples that are ten times as long       train_s   longest step of the policy, seconds
    remote    whether each engine is in a process of its own, which can die alone
    """

    seed: int
    config: RunConfig
    rows: int
    engines: int
    tail: float
    train_s: float
    traits: Traits = field(default_factory=Traits)
    faults: Faults = field(default_factory=Faults)
    remote: bool = False

    @classmethod
    def of(cls, seed: int, *, order: Order | None = None, ahead: int | None = None, faults: bool = True) -> World:
        rng = random.Random(f"run {seed // SIBLINGS}")
        drawn: Order = rng.choice(("logical", "arrival"))
        order = order or drawn
        ahead = rng.choice([0, 1, 1, 2, 3]) if ahead is None else ahead
        traits = _traits(rng, order)
        engines = rng.choice([1, 1, 2, 3])
        rows, tail, train_s = rng.randint(3, 30), rng.choice([0.0, 0.1, 0.3]), rng.choice([0.2, 0.2, 2.0, 20.0])
        made = cls(seed, _config(rng, order, ahead, traits), rows, engines, tail, train_s, traits)
        if rng.random() < REMOTE:
            weights = replace(made.config.weights, on_failure=rng.choice(_WITH_BODIES))
            made = replace(made, remote=True, config=replace(made.config, weights=weights))
        return replace(made, faults=_faults(random.Random(f"faults {seed}"), made)) if faults else made

    def with_faults(self, faults: Faults) -> World:
        """The same run under other faults."""
        return replace(self, faults=faults)

    @property
    def calm(self) -> World:
        """The same run, in which nothing dies, fails or is late; its schedule is that of all its siblings."""
        return replace(self, seed=2**32 + self.seed // SIBLINGS, faults=Faults())

    @property
    def summary(self) -> str:
        """The run and its faults, on two lines."""
        c, traits = self.config, ", ".join(f"{n}={v}" for n, v in _set(self.traits).items())
        run = (
            f"{self.order}, {c.rl.steps} steps of {self.per_step} x {c.rl.group_size}, max_async_rollout={self.ahead}, "
            f"max_off_policy_steps={c.rollout.max_off_policy_steps}, {self.engines} {'bodies' if self.remote else 'engines'} of "
            f"{c.rollout.max_num_seqs}, "
            f"min_informative_groups={c.rl.min_informative_groups}, checkpoint.every={c.checkpoint.every}, "
            f"weights.on_failure={c.weights.on_failure}, {self.rows} rows"
        )
        faults = ", ".join(f"{n}={v}" for n, v in _set(self.faults).items())
        return f"run: {run}{f'; rewards and rows: {traits}' if traits else ''}\nfaults: {faults or 'none'}"

    @property
    def order(self) -> Order:
        return "logical" if self.config.loop.commit_order == "logical" else "arrival"

    @property
    def ahead(self) -> int:
        return self.config.rollout.max_async_rollout

    @property
    def per_step(self) -> int:
        return self.config.rl.batch_per_replica // self.config.rl.group_size

    @property
    def exact(self) -> bool:
        """Whether an uninterrupted run trains and drops the same draws, whatever the schedule."""
        rl = self.config.rl
        return self.order == "logical" or not rl.min_informative_groups


def _set(values: Traits | Faults) -> dict[str, object]:
    """What is not at its default, rounded."""
    found = {one.name: getattr(values, one.name) for one in fields(values)}
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in found.items() if v}


def _traits(rng: random.Random, order: Order) -> Traits:
    def now_and_then(share: float, most: float) -> float:
        return rng.uniform(0, most) if rng.random() < share else 0.0

    return Traits(
        hang=now_and_then(0.2, 0.1), crash=now_and_then(0.2, 0.2), none=now_and_then(0.2, 0.2), nan=now_and_then(0.1, 0.1),
        tie=now_and_then(0.5, 0.5), bad=now_and_then(0.2, 0.1), stateful=order == "logical" and rng.random() < 0.5,
    )  # fmt: skip


def _config(rng: random.Random, order: Order, ahead: int, traits: Traits) -> RunConfig:
    replicas = rng.choice([1, 1, 2])
    group, groups = rng.randint(2, 4), replicas * rng.randint(1, 4 - replicas)
    sampling = rng.random() < 0.3
    informative = rng.randint(1, groups) if sampling else 0
    return RunConfig(
        name="sim", seed=rng.randrange(1000), model=ModelConfig(name_or_path="sim"),
        environments=(EnvironmentConfig(name="sim"),),
        rl=RLConfig(
            steps=rng.choice([2, 3, 3, 4, 4, 5, 6]), group_size=group, batch_per_replica=group * groups,
            discard_group_zero_advantage=rng.random() < 0.5, max_uninformative_batches=1000,
            min_informative_groups=informative, dynamic_sampling_max_extra_rollouts=rng.randint(1, 3) if sampling else 0,
            dynamic_sampling_on_budget_exhausted="proceed",
            data=DataConfig(shuffle=rng.random() < 0.7, max_bad_rows=10_000 if traits.bad else 0),
        ),
        rollout=RolloutConfig(
            engine="hf", max_tokens=200, max_model_len=1000, max_num_seqs=rng.choice([1, 2, 4, 8, 64]), max_async_rollout=ahead,
            max_off_policy_steps=max(ahead, rng.choice([0, 0, 1, 8])), reward_timeout_s=30.0,
            generate_timeout_s=1800.0 if order == "arrival" else 1e5,
        ),
        grid=GridConfig(num_replicas=replicas),
        validation=ValidationConfig(every=rng.choice([0, 1, 2]), prompts=rng.choice([0, 0, 2])),
        weights=WeightsConfig(
            stage_timeout_s=5.0, apply_timeout_s=5.0, abort_timeout_s=1.0, rebuild_timeout_s=10.0, canary_every=0,
            on_failure=rng.choice(["raise", "rebuild_and_retry"]),
        ),
        loop=LoopConfig(commit_order=order),
        checkpoint=CheckpointConfig(every=rng.choice([1, 1, 2, 3]), keep_last=rng.choice([1, 2, None])),
    )  # fmt: skip


def _faults(rng: random.Random, world: World) -> Faults:
    def times(most: int) -> int:
        return rng.choice([0, 0, *range(1, most + 1)])

    return Faults(
        kills=tuple((life, rng.random()) for life in range(times(3))),
        torn=tuple((life, rng.randint(0, 30)) for life in range(3) if rng.random() < 0.15),
        deaths=tuple((life, rng.randint(0, 60)) for life in range(4) if rng.random() < (0.5 if world.remote else 0.15)),
        full=tuple((life, rng.randint(0, 30)) for life in range(3) if rng.random() < 0.05),
        updates=0.2 if world.config.weights.on_failure == "drop_lane" else rng.choice([0.0, 0.0, 0.05, 0.2]),
        duplicate=rng.choice([0.0, 0.1]),
        late=rng.choice([0.0, 0.1]),
        thread=rng.choice([0.0, 0.1]),
        deadline=rng.choice([0.0, 0.0, 12.0]),
    )
