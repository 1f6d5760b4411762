"""One recorded batch step computed again: its trajectories from the rollout file, the weights before it from a checkpoint.

    found = replay("outputs/my-run", 12)
    for line in found.lines: print(line.name, line.recorded, line.recomputed, line.verdict)
    found.same                                        # False when a line DIFFERS

The code is the run's own: `make_batch` makes the rows, `Policy.train_step` the optimizer steps. Nothing is generated and
nothing is scored, so neither the engine nor the environments need to be installed; the objective and the packer do. On the
machine of the run, in one process, with its thread count, every metric is the recorded one to the bit. The run is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.config.entries import reward_ranges
from posttrain.config.report import refuse
from posttrain.config.schema import NO_ENGINE, RolloutConfig, RunConfig, WeightsConfig
from posttrain.config.walker import Walker
from posttrain.errors import ConfigError
from posttrain.loop import checkpoint, states
from posttrain.loop.batches import make_batch
from posttrain.loop.cohort import Batch, Cohort
from posttrain.loop.filters import Screening
from posttrain.loop.gathering import ONE_ROUND, Quotas
from posttrain.loop.model_folder import model_folder
from posttrain.loop.prepare import build_packer, build_run_objective
from posttrain.loop.run import set_threads
from posttrain.loop.staleness import staleness_metrics
from posttrain.tracking.agreement import BF16, DIFFERS, EQUAL, FP32, ROUNDING, Line, agreement
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts, rollout_steps, to_groups
from posttrain.tracking.run_dir import find_run, saved_config, saved_json
from posttrain.tracking.text import near

if TYPE_CHECKING:
    from posttrain.data.packer import DataPacker
    from posttrain.objective.objective import Objective
    from posttrain.policy.policy import Policy
    from posttrain.policy.rows import Row
    from posttrain.types import Group

NOT_HERE = ("time/", "weights/", "hook/")
"""Metrics of what a replay does not do."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it. before: where the weights are from.   left_out: metrics of the run that a replay does not compute."""

    run: Path
    step: int
    before: str
    dtype: str
    lines: tuple[Line, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not any(line.verdict == DIFFERS for line in self.lines)


def replay(
    run: str | Path, step: int, *, dtype: Literal["float64"] | None = None, say: Callable[[str], None] = print
) -> Replay:
    """Compute batch step `step` of a run again, in this process, and compare with what the run wrote.

    dtype: "float64" computes everything in it, from the same weights; default as the run did.
    Raises ConfigError for a step that was not recorded or has no checkpoint before it, DataError for damaged files, and what
    building the objective, the packer and the policy raises.
    """
    path = find_run(run)
    recorded = recorded_step(path, step)
    rows = read_rollouts(path, step)
    before = weights_before(path, step)
    config = replay_config(saved_config(path))
    with _threads(path, config) as notes:
        objective = build_run_objective(config)
        source = model_folder(config.model, path.parent, say)
        packer = build_packer(config, source)
        if before is not None:
            keepers = states.training_keepers(replace(config, environments=()), objective, {}, packer)
            saved = [state for state in before.plugin_states() if state.kind in ("algorithms", "datapackers")]
            notes += states.load(keepers, (), saved, before.path)[1]
        batch = recorded_batch(config, step, to_groups(rows), objective, packer)
        found = {"loss": None, **batch.metrics}
        if "staleness/mean" in recorded:
            found |= staleness_metrics((t for group in batch.groups for t in group.trajectories), step)
        if Quotas.of(config) is None and ONE_ROUND.keys() <= recorded.keys():  # older runs did not record them
            found |= ONE_ROUND
        lines = [_advantages(rows, batch.advantages)]
        if batch.rows:
            metrics, weights = _train(config, source, objective, before, batch.rows, _after(path, step, dtype), dtype)
            found |= metrics
            lines += weights
        else:
            found |= {"optimizer_steps": 0, "tokens/trained": 0}
    compared = {name: value for name, value in recorded.items() if name != "step" and not name.startswith(NOT_HERE)}
    lines = agreement(compared, found, tolerance(config)) + lines
    left = tuple(name for name in compared if name not in found)
    if unrecorded := [name for name in found if name not in recorded]:
        notes.append(f"not recorded by the run: {', '.join(unrecorded)}")
    return Replay(path, step, _named(before), dtype or config.rl.param_dtype, tuple(lines), left, tuple(notes))


def recorded_step(run: Path, step: int) -> dict[str, Any]:
    """What metrics.jsonl has of a batch step. Raises ConfigError naming the steps there are."""
    by_step = {row["step"]: row for row in (read_metrics(run) if (run / "metrics.jsonl").is_file() else [])}
    if step not in by_step:
        raise ConfigError(
            f"{near(run)} has no batch step {step}",
            cause=f"it has steps {min(by_step)} to {max(by_step)}" if by_step else "it has done none",
            fix="name one of those with --step" if by_step else "name a run that has done steps",
            code="no_step",
        )
    return by_step[step]


def weights_before(run: Path, step: int) -> checkpoint.Checkpoint | None:
    """The checkpoint that batch step `step` started from; None for the first, which starts from the model itself.

    Raises ConfigError naming the nearest steps that can be replayed.
    """
    if step == 1:
        return None
    found = {one.step: one for one in checkpoint.find(run / "checkpoints")}
    if step - 1 in found:
        return found[step - 1]
    usable = [n for n in rollout_steps(run) if n == 1 or n - 1 in found]
    nearest = [*[n for n in usable if n < step][-1:], *[n for n in usable if n > step][:1]]
    raise ConfigError(
        f"batch step {step} of {near(run)} cannot be replayed: there is no checkpoint of step {step - 1}",
        cause="a replay starts from the weights and the optimizer as they were before the step",
        fix=(f"--step {' or --step '.join(map(str, nearest))} can be; " if nearest else "")
        + "for every step, train with checkpoint.every=1 checkpoint.keep_every=1",
        anchor="howto/replay.md#what-it-needs",
        code="no_checkpoint",
    )


def replay_config(tree: Mapping[str, Any]) -> RunConfig:
    """A run's config without the parts that a replay does not need: options of environments, engine, transport and hooks.

    Raises ConfigError for one that this version cannot read.
    """
    from omegaconf import OmegaConf

    kept = {key: value for key, value in tree.items() if key not in ("evals", "hooks", "weights")}
    kept["environments"] = [{**entry, "options": {}} for entry in tree.get("environments") or ()]
    tree = OmegaConf.to_container(OmegaConf.create(kept), resolve=True)  # type: ignore[assignment]
    engine = (tree.get("rollout") or {}).get("engine")
    walker = Walker()
    config: RunConfig = walker.build(RunConfig, tree)
    if walker.problems:
        raise refuse(walker.problems, subject="the config of the run")
    rollout: RolloutConfig = replace(config.rollout, engine=NO_ENGINE if engine == NO_ENGINE else "hf", options={})
    return replace(config, rollout=rollout, weights=WeightsConfig())


def recorded_batch(
    config: RunConfig, step: int, groups: Sequence[Group], objective: Objective, packer: DataPacker
) -> Batch:
    """The batch made again. groups: as recorded, those of the batch first, then what dynamic sampling did not take."""
    size = config.rl.batch_per_replica // config.rl.group_size
    return make_batch(
        Cohort(step, [], list(groups[:size])),
        objective,
        packer,
        discard_tied=config.rl.discard_group_zero_advantage and Quotas.of(config) is None,
        screening=Screening.of(config, 1),  # recorded trajectories are screened already: only which filters are on matters
        surplus=groups[size:],
        ranges=reward_ranges(config.environments),
    )


def policy_ranks(config: RunConfig) -> int:
    """Data-parallel ranks that the run's policy had."""
    return config.grid.dp_replicate * config.grid.dp_shard


def tolerance(config: RunConfig) -> float:
    """How far a computed metric may be off where it is not equal to the bit."""
    return BF16 if "bfloat16" in (config.rl.master_dtype, config.rl.param_dtype) else FP32


def _train(
    config: RunConfig,
    source: str,
    objective: Objective,
    before: checkpoint.Checkpoint | None,
    rows: list[Row],
    after: checkpoint.Checkpoint | None,
    dtype: str | None,
) -> tuple[dict[str, Any], list[Line]]:
    """The metrics of the optimizer steps, and how the weights after them compare with a checkpoint."""
    from posttrain.policy.policy import Policy
    from posttrain.policy.wide import wide

    policy = Policy(config, source, objective)
    if before is not None:
        policy.load(before.policy)
    with wide(policy) if dtype == "float64" else nullcontext():
        result = policy.train_step(rows)
    return {**result.metrics, "optimizer_steps": result.optimizer_steps}, _weights(policy, after, result.metrics["lr"])


def _weights(policy: Policy, after: checkpoint.Checkpoint | None, lr: float) -> list[Line]:
    """A line about the weights after the step. Rounding: as a whole, off by less than 1% of what one step may move them."""
    from posttrain.policy.saving import read_weights

    if after is None:
        return []
    written = read_weights(after.policy)
    squares, elements, differing = 0.0, 0, 0
    for name, weight in policy.named_weights("float64"):
        gap = weight.cpu() - written[name].double()
        squares, elements = squares + float(gap.square().sum()), elements + gap.numel()
        differing += int(gap.ne(0).sum())
    near_enough = squares**0.5 <= 0.01 * lr * policy.n_mini * elements**0.5
    verdict = EQUAL if not differing else ROUNDING if near_enough else DIFFERS
    return [Line(f"weights after the step: elements of {elements:,} that differ", 0, differing, verdict)]


def _after(run: Path, step: int, dtype: str | None) -> checkpoint.Checkpoint | None:
    """The checkpoint of the weights after the step, where there is one and they were computed in the same dtype."""
    return None if dtype else next((one for one in checkpoint.find(run / "checkpoints") if one.step == step), None)


def _advantages(rows: list[dict[str, Any]], recomputed: Mapping[str, float]) -> Line:
    """A line about all advantages: they are float64 arithmetic on recorded rewards."""
    differing = sum(row["advantage"] != recomputed[row["sample_id"]] for row in rows)
    return Line(f"advantages: trajectories of {len(rows)} that differ", 0, differing, DIFFERS if differing else EQUAL)


def _named(before: checkpoint.Checkpoint | None) -> str:
    return "the model before training" if before is None else near(before.path)


@contextmanager
def _threads(run: Path, config: RunConfig) -> Iterator[list[str]]:
    """Compute with the run's thread count. Gives notes on why the result may not be equal to the bit."""
    import torch

    starts = saved_json(run / "provenance.json") or [{}]
    last = starts[-1]
    was = torch.get_num_threads()
    try:
        recorded = last.get("threads") if config.grid.backend == "local" else 1
        set_threads(config.grid.threads or recorded or 0)
        yield [*_surroundings(last), *_resumes(starts[1:]), *_ranks(config)]
    finally:
        torch.set_num_threads(was)


def _surroundings(last: Mapping[str, Any]) -> Iterator[str]:
    """What is not as it was when the run was made, and is known to change the last bits."""
    from posttrain.tracking.provenance import provenance

    now = provenance()
    for what, old, new in (
        ("processor", last.get("machine", {}).get("processor"), now["machine"]["processor"]),
        ("torch", last.get("libraries", {}).get("torch"), now["libraries"].get("torch")),
        ("transformers", last.get("libraries", {}).get("transformers"), now["libraries"].get("transformers")),
    ):
        if old is not None and old != new:
            yield f"{what}: {old} in the run, {new} here; expect rounding"


def _resumes(resumed: list[Mapping[str, Any]]) -> Iterator[str]:
    """Keys that a resume changed: the step may have been done before."""
    for key, change in {key: change for start in resumed for key, change in start.get("changed", {}).items()}.items():
        yield f"{key} was changed by a resume from {change['was']} to {change['is']}; the replay uses {change['is']}"


def _ranks(config: RunConfig) -> Iterator[str]:
    if (ranks := policy_ranks(config)) > 1:
        yield f"the run's policy had {ranks} ranks, the replay is one process: expect rounding"
