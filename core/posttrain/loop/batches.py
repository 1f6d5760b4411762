"""From a scored cohort to a batch: which groups train, with what advantage. Pure functions; the policy sees only rows.

The order is the contract (design of the tied-group rule): count groups by kind → leave out groups whose rewards agree
(`rl.discard_group_zero_advantage`) → advantages over what is left → rows. A trajectory that is unscorable or has no trained
token never becomes a row. Preference algorithms get pairs instead of advantages.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.data.packed_row import packed_row
from posttrain.loop.cohort import Batch, Cohort
from posttrain.objective.algorithm import PreferenceAlgorithm
from posttrain.objective.groups import baselines, group_stats, informative_rows
from posttrain.policy.rows import Row

if TYPE_CHECKING:
    from posttrain.data.packer import DataPacker
    from posttrain.objective.objective import Objective
    from posttrain.types import Trajectory


def make_batch(cohort: Cohort, objective: Objective, packer: DataPacker, *, discard_tied: bool) -> Batch:
    """Turn a cohort into a batch. Raises PackerError when the packer's row is not the trajectory, to the token."""
    rows = [trajectory for group in cohort.groups for trajectory in group.trajectories]
    rewards = [t.reward if t.scorable else None for t in rows]
    groups = [t.group_id for t in rows]
    trained = [t.trained for t in rows]
    metrics = cohort_metrics(rows)
    stats = group_stats(rewards, groups, trained)
    metrics["train/grpo_all_zero_group_count"] = stats.all_zero
    metrics["train/grpo_all_one_group_count"] = stats.all_one
    metrics["train/informative_group_count"] = stats.informative
    metrics["train/uninformative_group_count"] = stats.uninformative

    keep = trained
    if discard_tied:
        keep = [bool(flag) for flag in informative_rows(rewards, groups, trained)]
    advantages = objective.advantages(rewards, groups, keep)
    means = baselines(rewards, groups, keep)
    pairs = objective.pairs(rewards, groups, keep) if isinstance(objective.algorithm, PreferenceAlgorithm) else None
    out: list[Row] = []
    if pairs is None:
        out = [make_row(rows[i], packer, float(advantages[i]), float(means[i])) for i in range(len(rows)) if keep[i]]
    else:
        for number, (chosen, rejected) in enumerate(pairs):
            for i, won in ((chosen, True), (rejected, False)):
                out.append(make_row(rows[i], packer, 0.0, float(means[i]), pair=number, chosen=won))
    metrics["train/effective_batch"] = len(out)
    named = {t.sample_id: float(a) for t, a in zip(rows, advantages, strict=True)}
    return Batch(cohort.step, out, cohort.groups, named, metrics)


def make_row(
    trajectory: Trajectory,
    packer: DataPacker,
    advantage: float,
    baseline: float,
    *,
    pair: int | None = None,
    chosen: bool | None = None,
) -> Row:
    """One row of the policy's input: ids and mask from the packer, the rest from the trajectory, aligned to the token.

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
        reward=float(trajectory.reward or 0.0),
        baseline=baseline,
        group=trajectory.group_id,
        prefix=prompt,
        pair=pair,
        chosen=chosen,
        id=trajectory.sample_id,
    )


def cohort_metrics(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards and lengths of everything in the cohort, trained or not. What came with the data has labels, not rewards."""
    rewards = [float(t.reward) for t in rows if t.scorable and t.reward is not None and not t.given]
    lengths = [len(t.token_ids) for t in rows]
    out: dict[str, float] = {"rollout/unscorable_count": sum(not t.scorable for t in rows)}
    for name, values in (("reward", rewards), ("length", [float(n) for n in lengths])):
        if values:
            out |= {f"{name}/mean": statistics.fmean(values), f"{name}/min": min(values), f"{name}/max": max(values)}
    if rewards:
        out["reward/std"] = statistics.pstdev(rewards)
    parts: dict[str, list[float]] = {}
    for trajectory in rows:
        for part, value in trajectory.reward_parts.items():
            parts.setdefault(part, []).append(value)
    out |= {f"reward/{part}": statistics.fmean(values) for part, values in parts.items()}
    for cause in sorted({str(t.info["cause"]) for t in rows if "cause" in t.info}):
        out[f"rollout/unscorable/{cause}"] = sum(t.info.get("cause") == cause for t in rows)
    if rows:
        out["rollout/truncated_share"] = sum(t.truncated for t in rows) / len(rows)
    out["tokens/generated"] = sum(sum(t.mask) for t in rows if not t.given)
    return out
