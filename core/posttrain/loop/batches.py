"""From a scored cohort to a batch: which groups train, with what advantage. Pure functions; the policy sees only rows.

The order is the contract (design of the tied-group rule): penalty and filters (`loop.filters`) → count groups by kind → leave
out groups whose rewards agree (`rl.discard_group_zero_advantage`) → advantages over what is left → rows. A trajectory that is
unscorable, has no trained token or was filtered never becomes a row; only a filtered one is in its group's baseline. Preference
algorithms get pairs instead of advantages. `surplus`, what dynamic sampling generated and did not take, is in every count.

`ranges` are those of environments with a `reward_range`, by label: what trains sees their rewards as 0 to 1, so that a task whose
rewards go to 100 does not drown the others. A reward outside its range is outside 0 to 1, and counted. Metrics and records keep
rewards as the environment gave them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from posttrain.data.packed_row import packed_row
from posttrain.errors import RunAborted
from posttrain.loop.cohort import Batch, Cohort
from posttrain.loop.filters import Screening, compared, trains
from posttrain.objective.algorithm import PreferenceAlgorithm
from posttrain.objective.groups import baselines, group_stats, informative_rows
from posttrain.policy.rows import Row

if TYPE_CHECKING:
    from posttrain.data.packer import DataPacker
    from posttrain.objective.objective import Objective
    from posttrain.types import Group, Trajectory


def make_batch(
    cohort: Cohort,
    objective: Objective,
    packer: DataPacker,
    *,
    discard_tied: bool,
    screening: Screening | None = None,
    surplus: Sequence[Group] = (),
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> Batch:
    """Turn a cohort into a batch. Raises PackerError when the packer's row is not the trajectory, to the token."""
    groups_seen = [*cohort.groups, *surplus]
    seen = [trajectory for group in groups_seen for trajectory in group.trajectories]
    if screening is not None:
        for trajectory in seen:
            screening.screen(trajectory, packer.decode)
    preferences = isinstance(objective.algorithm, PreferenceAlgorithm)
    ranges = ranges or {}
    metrics = cohort_metrics(seen) | range_metrics(seen, ranges) | group_metrics(seen, pairs=preferences, ranges=ranges)
    if screening is not None:
        metrics |= screening.metrics(seen)

    rows = [trajectory for group in cohort.groups for trajectory in group.trajectories]
    rewards, groups = reward_columns(rows, ranges)
    keep = compared(rows, pairs=preferences)
    if discard_tied:
        keep = [bool(flag) for flag in informative_rows(rewards, groups, keep)]
    advantages = objective.advantages(rewards, groups, keep)
    means = baselines(rewards, groups, keep)
    out: list[Row] = []
    if preferences:
        refuse_split(rows)
        for number, (chosen, rejected) in enumerate(objective.pairs(rewards, groups, keep)):
            for i, won in ((chosen, True), (rejected, False)):
                out.append(make_row(rows[i], packer, 0.0, float(means[i]), reward=rewards[i], pair=number, chosen=won))
    else:
        chosen_rows = [i for i in range(len(rows)) if keep[i] and trains(rows[i])]
        out = [
            make_row(row, packer, float(advantages[i]), float(means[i]), reward=rewards[i], shared=not rows[i].earlier)
            for i in chosen_rows for row in rows[i].rows if any(row.mask)
        ]  # fmt: skip
    metrics["train/effective_batch"] = len(out)
    named = {r.sample_id: float(a) if trains(t) else 0.0 for t, a in zip(rows, advantages, strict=True) for r in t.rows}
    named |= {row.sample_id: 0.0 for t in seen[len(rows) :] for row in t.rows}
    return Batch(cohort.step, out, groups_seen, named, metrics)


def refuse_split(rows: Sequence[Trajectory]) -> None:
    """Raises RunAborted for an episode of several rows: a pair has one row on each side."""
    if split := [t.sample_id for t in rows if t.earlier]:
        raise RunAborted(
            f"the episode {split[0]} has several rows, and pairs compare one row with another",
            cause="the chat template rewrites earlier turns, so the episode was split",
            fix="set rollout.keep_history_verbatim=true, or a model.chat_template that only appends (posttrain template-check)",
            code="split-pair",
        )


def reward_columns(rows: Sequence[Trajectory], ranges: Mapping[str, tuple[float, float]]) -> tuple[list[float | None], list[str]]:
    """The reward of each trajectory within the range of its environment, None when unscorable, and its group."""
    return [_within(t, ranges) if t.scorable else None for t in rows], [t.group_id for t in rows]


def _within(trajectory: Trajectory, ranges: Mapping[str, tuple[float, float]]) -> float | None:
    reward = trajectory.reward
    if reward is None or trajectory.env not in ranges:
        return reward
    low, high = ranges[trajectory.env]
    return (reward - low) / (high - low)


def range_metrics(rows: Sequence[Trajectory], ranges: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """How many rewards are outside the range that the config gives their environment."""
    rewards = {env: [t.reward for t in rows if t.env == env and t.reward is not None] for env in ranges}
    outside = {env: sum(not ranges[env][0] <= reward <= ranges[env][1] for reward in given) for env, given in rewards.items()}
    return {f"rollout/{env}/out_of_range_count": count for env, count in outside.items()}


def group_metrics(
    rows: Sequence[Trajectory], *, pairs: bool = False, ranges: Mapping[str, tuple[float, float]] | None = None
) -> dict[str, float]:
    """How many groups there are of each kind, before any is left out."""
    stats = group_stats(*reward_columns(rows, ranges or {}), compared(rows, pairs=pairs))
    return {
        "train/grpo_all_zero_group_count": stats.all_zero,
        "train/grpo_all_one_group_count": stats.all_one,
        "train/informative_group_count": stats.informative,
        "train/uninformative_group_count": stats.uninformative,
    }


def make_row(
    trajectory: Trajectory,
    packer: DataPacker,
    advantage: float,
    baseline: float,
    *,
    reward: float | None = None,
    pair: int | None = None,
    chosen: bool | None = None,
    shared: bool = True,
) -> Row:
    """One row of the policy's input: ids and mask from the packer, the rest from the trajectory, aligned to the token.

    reward: as it trains, where that is not the trajectory's own.
    shared: its prompt is that of the rest of its group; not so for the rows of a split episode.

    Raises PackerError when they are not, and E13 for a BOS or EOS that is doubled or missing.
    """
    ids, mask, prompt = packed_row(packer, trajectory)
    packer.special_tokens.check(ids)
    if trajectory.finish_reason == "stop":
        packer.special_tokens.check_ending(ids)
    return Row(
        input_ids=ids,
        mask=mask,
        rollout_logprobs=None if trajectory.given else [0.0] * prompt + list(trajectory.rollout_logprobs),
        advantage=advantage,
        reward=float((trajectory.reward if reward is None else reward) or 0.0),
        baseline=baseline,
        group=trajectory.group_id,
        prefix=prompt if shared else 0,
        pair=pair,
        chosen=chosen,
        id=trajectory.sample_id,
    )


def cohort_metrics(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards, lengths and turns of everything in the cohort, trained or not, and of each environment in it."""
    out = reward_metrics(rows)
    for cause in sorted({str(t.info["cause"]) for t in rows if "cause" in t.info}):
        out[f"rollout/unscorable/{cause}"] = sum(t.info.get("cause") == cause for t in rows)
    out["tokens/generated"] = sum(t.sampled for t in rows if not t.given)
    if "rollout/turns/mean" in out:
        out["rollout/rows"] = sum(len(t.rows) for t in rows)
    by_env: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in rows:
        by_env[trajectory.env].append(trajectory)
    for env in sorted(filter(None, by_env)):
        out |= reward_metrics(by_env[env], env) | {f"rollout/{env}/count": len(by_env[env])}
    return out


def reward_metrics(rows: Sequence[Trajectory], env: str = "") -> dict[str, float]:
    """Rewards with their parts, lengths, turns, what is unscorable or cut off; with `env` under its name, as `reward/<env>/mean`.

    What came with the data has labels, not rewards.
    """
    of = f"/{env}" if env else ""
    parts: dict[str, list[float]] = defaultdict(list)
    for trajectory in rows:
        for part, value in trajectory.reward_parts.items():
            parts[part].append(value)
    out = {f"reward{of}/{part}": statistics.fmean(values) for part, values in parts.items()}
    rewards = [float(t.reward) for t in rows if t.scorable and t.reward is not None and not t.given]
    lengths = [float(sum(len(row.token_ids) for row in t.rows)) for t in rows]
    for name, values in (("reward", rewards), ("length", lengths)):
        if values:
            out |= {f"{name}{of}/mean": statistics.fmean(values), f"{name}{of}/min": min(values), f"{name}{of}/max": max(values)}
    if rewards:
        mean = out[f"reward{of}/mean"]
        out[f"reward{of}/std"] = math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards))
    out[f"rollout{of}/unscorable_count"] = sum(not t.scorable for t in rows)
    if rows:
        out[f"rollout{of}/truncated_share"] = sum(t.truncated for t in rows) / len(rows)
    turns = [sum(turn.role == "model" for row in t.rows for turn in row.turns) for t in rows if not t.given]
    if max(turns, default=0) > 1:
        out |= {f"rollout{of}/turns/mean": statistics.fmean(turns), f"rollout{of}/turns/max": max(turns)}
    return out
