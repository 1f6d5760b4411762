"""The ends of the loop, as small as they can be and still tell when the loop is wrong.

The policy's weights are one hash over the weights before and every row that trained, in order: a different draw, token, log-prob,
advantage or order anywhere before gives another one. The algorithm and (where the world says so) the environment keep a state
that enters advantages and prompts, so that a state of the wrong moment shows in the weights.
"""

from __future__ import annotations

import asyncio
import marshal
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.data.environment import Environment, EpisodeState
from posttrain.data.packer import DataPacker
from posttrain.loop.sim import laws
from posttrain.policy.step import StepResult

if TYPE_CHECKING:
    from posttrain.loop.sim.disk import Disk
    from posttrain.loop.sim.life import Life
    from posttrain.loop.sim.trace import Trace
    from posttrain.loop.sim.world import World
    from posttrain.policy.rows import Row
    from posttrain.types import Group, Trajectory

VOCABULARY = 1000
FIRST = "0" * 16
"""The weights before the first step."""


def chance(*names: object) -> float:
    """A number in [0, 1) that the names determine."""
    return int.from_bytes(blake2b("/".join(map(str, names)).encode(), digest_size=7).digest(), "big") / 2**56


class SimEnvironment(Environment):
    """Rewards are decided by the sample's seed. `episodes`: scored in training; where the world says so, prompts show it.

    takes: virtual seconds of the next reward
    """

    def __init__(self, world: World, takes: Callable[[], float]) -> None:
        self.world, self.takes, self.episodes = world, takes, 0

    def dataset(self, split: str) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"id": f"{split[1]}{number}", "number": number} for number in range(self.world.rows if split == "train" else 4)]

    def format_prompt(self, task: Mapping[str, Any]) -> list[int]:  # type: ignore[override]
        if task["id"].startswith("r") and chance(self.world.config.seed, "bad", task["id"]) < self.world.traits.bad:
            raise ValueError("this row cannot be asked about")
        return [1, 2 + task["number"], *([self.episodes] if self.world.traits.stateful else [])]

    async def compute_reward(self, state: EpisodeState) -> float | None:  # type: ignore[override]
        traits, trajectory = self.world.traits, state.trajectory
        assert trajectory is not None
        luck = chance(state.seed, "luck")
        await asyncio.sleep(self.takes())
        if state.task["id"].startswith("r"):
            self.episodes += 1
        for name in ("hang", "crash", "none", "nan"):
            if luck < (limit := getattr(traits, name)):
                if name == "hang":
                    await asyncio.sleep(1e9)
                if name == "crash":
                    raise ValueError("the reward crashed")
                return None if name == "none" else float("nan")
            luck -= limit
        if chance(self.world.config.seed, "tie", trajectory.group_id) < traits.tie:
            return float(chance(self.world.config.seed, "tied", trajectory.group_id) < 0.5)
        return round(chance(state.seed, "reward"), 3)

    def state_dict(self) -> dict[str, Any]:
        return {"episodes": self.episodes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.episodes = state["episodes"]


class SimPacker(DataPacker):
    """Ids are ids; no model reads them."""

    def get_rollout_input(self, prompt: Any) -> dict[str, Any]:
        return {"prompt_ids": list(prompt)}

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def get_policy_input(self, trajectory: Trajectory) -> dict[str, Any]:
        prompt = list(trajectory.prompt_ids)
        return {"input_ids": prompt + list(trajectory.token_ids), "mask": [False] * len(prompt) + list(trajectory.mask)}

    def policy_compute_max_len(self, items: Sequence[Mapping[str, Any]]) -> int:
        raise NotImplementedError

    def policy_collate_fn(self, items: Sequence[Mapping[str, Any]], max_len: int) -> dict[str, Any]:
        raise NotImplementedError


class SimAlgorithm:
    """Counts the batches that it saw."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = state["batches"]


class SimObjective:
    """Reward minus the group's mean, and a trace of how many batches came before."""

    name = "sim"

    def __init__(self) -> None:
        self.algorithm = SimAlgorithm()

    def advantages(self, rewards: Sequence[float | None], groups: Sequence[str], keep: Sequence[bool]) -> list[float]:
        self.algorithm.batches += 1
        sums: dict[str, list[float]] = {}
        for reward, group, kept in zip(rewards, groups, keep, strict=True):
            if kept and reward is not None:
                sums.setdefault(group, []).append(reward)
        more = self.algorithm.batches / 1024
        values = zip(rewards, groups, keep, strict=True)
        return [(r or 0.0) - sum(sums[g]) / len(sums[g]) + more if k else 0.0 for r, g, k in values]

    def pairs(self, *args: Any) -> list[tuple[int, int]]:
        return []


class SimPolicy:
    """`weights`: the hash.   `trained`: ids of the rows of the last step.   `busy`: while a step runs."""

    notes: ClassVar[list[str]] = []
    vocab_size = VOCABULARY

    def __init__(self, disk: Disk, trace: Trace) -> None:
        self.weights, self._disk, self._trace = FIRST, disk, trace
        self.trained: list[str] = []
        self.busy = False

    def begin(self) -> None:
        """A thread begins a step: until it ends the weights are neither the old ones nor the new."""
        assert not self.busy, "two steps at once"
        self.busy = True

    def train_step(self, rows: list[Row]) -> StepResult:
        self.busy = False
        digest = blake2b(self.weights.encode(), digest_size=8)
        for row in rows:  # marshal: as exact as repr, in a tenth of the time; version 2 has no references, which may differ
            digest.update(marshal.dumps((row.id, row.input_ids, row.mask, row.rollout_logprobs, row.advantage, row.reward), 2))
        self.weights = digest.hexdigest()
        self.trained = [row.id for row in rows]
        self._trace("policy", f"trained {len(rows)} rows → {self.weights[:6]}")
        return StepResult({"loss": 0.0}, 1, False, {})

    def snapshot(self) -> Callable[[Path], None]:
        assert not self.busy, "a checkpoint copies the policy while it trains"
        weights = self.weights

        def save(folder: Path) -> None:
            for name in ("model", "optimizer"):
                self._disk.step(folder)
                (folder / name).write_text(weights)

        return save

    def load(self, folder: str | Path) -> None:
        values = {(Path(folder) / name).read_text() for name in ("model", "optimizer")}
        (self.weights,) = values

    def evaluate(self, rows: list[Row]) -> dict[str, float]:
        raise NotImplementedError

    logprobs = score = evaluate  # type: ignore[assignment]


class SimTracker:
    """Keeps what a run directory would, over all lives."""

    def __init__(self, life: Life, records: Records, trace: Trace) -> None:
        self._life, self.records, self._trace = life, records, trace

    def note(self, text: str) -> None:
        self._trace("note", text.splitlines()[0])

    @contextmanager
    def span(self, role: str, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        yield {}

    def step(self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group], advantages: Mapping[str, float]) -> None:
        self._trace("tracker", f"step {step} reported")
        policy, run = self._life.policy, self._life.run
        laws.of_a_step(self._life, step, groups)
        run.lineage[step] = policy.weights
        run.rows[step] = policy.trained if metrics["optimizer_steps"] else []
        self.records.steps.append((step, list(groups)))

    def validation(self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        self._trace("tracker", f"version {step} validated")
        self.records.validations.append((step, {v for g in groups for t in g.trajectories for v in t.weight_versions}))

    def has_validation(self, step: int) -> bool:
        return any(done == step for done, _ in self.records.validations)


class Records:
    """What the tracker wrote, with what a resume cuts off."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[Group]]] = []
        self.validations: list[tuple[int, set[int]]] = []

    def cut_after(self, step: int) -> None:
        self.steps = [one for one in self.steps if one[0] <= step]
        self.validations = [one for one in self.validations if one[0] <= step]


@cache
def length(seed: int, index: int, tail: float) -> int:
    """Tokens of a sample: short ones, and some that are ten times as long."""
    rng = random.Random(f"length {seed} {index}")
    return rng.randint(1, 6) if rng.random() >= tail else rng.randint(30, 90)
