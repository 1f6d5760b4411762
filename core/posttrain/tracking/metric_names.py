"""Every metric of a run: name, unit, meaning, who emits it. `docs/reference/metrics.md` is generated from this file.

A name with `<…>` stands for a family (`reward/<part>`: one metric for each part that the environment names). `find(name)` gives
the definition of a concrete name, or None; a test holds that the code emits no name without one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HELD_OUT = "validation/reward/mean"


@dataclass(frozen=True, slots=True)
class Score:
    """What a run is judged by, called `name`: `trained` in metrics.jsonl, `held_out` in validation.jsonl, perhaps an accuracy."""

    name: str
    trained: str
    held_out: str
    accuracy: str = ""

    def text(self, metrics: Mapping[str, Any], *, held_out: bool = False) -> str:
        """`0.75`, or `2.31 (accuracy 0.98)`."""
        from posttrain.tracking.text import number

        accuracy = metrics.get(f"validation/{self.accuracy}" if held_out else self.accuracy) if self.accuracy else None
        value = number(metrics.get(self.held_out if held_out else self.trained))
        return value if accuracy is None else f"{value} (accuracy {number(accuracy)})"


SCORES = (Score("reward", "reward/mean", HELD_OUT), Score("margin", "dpo/margin", "validation/dpo/margin", "dpo/accuracy"))


def score_of(*rows: Mapping[str, Any]) -> Score:
    """The score of a run with such rows of metrics: the reward, unless only another one is in them."""
    return next((s for s in SCORES if any(row.get(n) is not None for row in rows for n in (s.trained, s.held_out))), SCORES[0])


@dataclass(frozen=True, slots=True)
class Metric:
    """One definition. `emitter` is the part that computes it; all values are over the whole batch step unless said."""

    name: str
    unit: str
    emitter: str
    meaning: str

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("".join("[^/]+" if p.startswith("<") else re.escape(p) for p in re.split(r"(<\w+>)", self.name)))


SECTIONS: dict[str, list[Metric]] = {}
"""Section title -> definitions, in the order of the page."""


def _define(section: str, emitter: str, *rows: tuple[str, str, str]) -> None:
    SECTIONS.setdefault(section, []).extend(Metric(name, unit, emitter, meaning) for name, unit, meaning in rows)


_define(
    "Reward", "loop",
    ("reward/mean", "reward", "Mean over the batch's scorable trajectories, trained or not."),
    ("reward/std", "reward", "Standard deviation of the same (population form)."),
    ("reward/min", "reward", "Smallest of the same."),
    ("reward/max", "reward", "Largest of the same."),
    ("reward/<part>", "reward", "Mean of one named part of the reward, over the trajectories that have it."),
    ("reward/<env>/mean", "reward", "Of one environment, by its label, as the lengths and counts below that name one."),
    ("reward/<env>/std", "reward", "Standard deviation of the same (population form)."),
    ("reward/<env>/min", "reward", "Smallest of the same."),
    ("reward/<env>/max", "reward", "Largest of the same."),
    ("reward/<env>/<part>", "reward", "Mean of one part of the reward of one environment."),
    ("rollout/unscorable_count", "trajectories", "Trajectories without a usable reward: in no baseline, and not trained."),
    (
        "rollout/unscorable/<cause>", "trajectories",
        "By cause: raised, timeout, died, not_finite, none, wrong_type; env_raised, agent_raised, judge_timeout and the like; "
        "of pairs identical, empty, too_long.",
    ),
    ("rollout/<env>/unscorable_count", "trajectories", "Trajectories of one environment without a usable reward."),
    ("rollout/<env>/out_of_range_count", "trajectories", "Rewards outside the `reward_range` of their environment."),
)
_define(
    "Prompts", "loop",
    ("rollout/aborted_count", "prompts", "Under `arrival`, since the batch before: generated in vain; again, or dropped."),
    (
        "rollout/aborted/<cause>", "prompts",
        "By cause: stale (max_off_policy_steps), timeout (generate_timeout_s), aborted (by the engine), engine (replaced).",
    ),
    ("rollout/dropped_count", "prompts", "Of them, those that had their three tries and were dropped for another prompt."),
    ("data/bad_rows", "rows", "Rows passed over so far (rl.data.max_bad_rows), from the first on; up to the batch's last draw."),
)
_define(
    "Groups", "loop",
    ("train/informative_group_count", "groups", "Groups whose rewards disagree: the ones that there is something to learn from."),
    ("train/uninformative_group_count", "groups", "The other groups: rewards agree, or fewer than two are usable."),
    ("train/grpo_all_zero_group_count", "groups", "Uninformative groups with every reward 0. Many: the task is too hard."),
    ("train/grpo_all_one_group_count", "groups", "Uninformative groups with every reward 1. Many: the task is too easy."),
    ("train/dynamic_sampling_rounds", "rounds", "Rounds of prompts that the batch took: 1 without dynamic sampling."),
    ("train/dynamic_sampling_shortfall", "groups", "Informative groups that lack to the quotas of all cells, with `proceed`."),
    ("train/dynamic_sampling_extra_prompts", "prompts", "Prompts that extra rounds drew beyond the batch's own."),
    ("train/effective_batch", "trajectories", "Trajectories that trained, after uninformative groups were left out."),
)
_define(
    "Filters (only those that are on)", "loop",
    ("filter/overlong_frac", "share", "Trajectories that rl.filter_overlong took out: cut by the token limit."),
    ("filter/gibberish_frac", "share", "Trajectories that rl.filter_gibberish took out: a rare token, where it was improbable."),
    ("filter/repetition_frac", "share", "Trajectories that rl.filter_repetition took out: the text shrinks too well."),
)
_define(
    "Lengths and tokens", "loop",
    ("length/mean", "tokens", "Mean completion length (environment tokens included)."),
    ("length/min", "tokens", "Shortest completion."),
    ("length/max", "tokens", "Longest completion."),
    ("length/<env>/mean", "tokens", "Mean completion length of one environment."),
    ("length/<env>/min", "tokens", "Shortest of the same."),
    ("length/<env>/max", "tokens", "Longest of the same."),
    ("rollout/<env>/count", "trajectories", "Trajectories of one environment."),
    ("rollout/truncated_share", "share", "Trajectories that hit rollout.max_tokens instead of stopping."),
    ("rollout/<env>/truncated_share", "share", "The same, of one environment."),
    ("rollout/turns/mean", "turns", "Mean number of model turns of an episode; where there are several."),
    ("rollout/turns/max", "turns", "Most of the same."),
    ("rollout/rows", "rows", "Rows that the episodes became: one each, more where a template rewrites history."),
    ("rollout/<env>/turns/mean", "turns", "Mean number of model turns in one environment, where there are several."),
    ("rollout/<env>/turns/max", "turns", "Most of the same."),
    ("tokens/generated", "tokens", "Tokens that the model sampled in this step."),
)
_define(
    "Training", "policy",
    ("loss", "", "Loss of an optimizer step, mean over the optimizer steps of the batch; null when nothing trained."),
    ("grad_norm", "", "Global gradient norm before clipping, mean over the optimizer steps whose norm is finite."),
    ("lr", "", "Learning rate of the last optimizer step."),
    ("optimizer_steps", "steps", "Optimizer steps that moved the weights."),
    ("tokens/trained", "tokens", "Tokens with mask true in the rows that trained."),
    ("policy/skipped_steps", "steps", "Optimizer steps skipped because their gradient was not finite."),
    ("policy/entropy", "nats", "Mean entropy of the policy's distribution at trained tokens."),
    ("policy/clip_fraction", "share", "Trained tokens where the clip binds; 0 against π_old with one optimizer step per batch."),
    ("policy/kl", "nats", "Mean KL to the reference model, by kl_estimator, when there is one."),
    ("policy/tis_weight", "", "Mean truncated importance weight, with use_tis."),
    ("policy/seq_masked_share", "share", "Trained tokens in sequences that seq_is_masking took out."),
    ("policy/ratio_min", "", "Smallest ratio of trainer to engine probability of a token, at the first optimizer step."),
    ("policy/ratio_mean", "", "Mean of the same."),
    ("policy/ratio_max", "", "Largest of the same."),
    ("policy/logprob_gap", "nats", "Mean absolute difference of the same log-probs: how far engine and trainer disagree."),
    ("policy/logprob_gap_max", "nats", "Largest of the same."),
)
_define(
    "Staleness", "loop",
    ("staleness/mean", "batch steps", "Mean lag of trained tokens behind the version that the batch updates."),
    ("staleness/p95", "batch steps", "95% of the trained tokens are at most that old."),
    ("staleness/max", "batch steps", "The oldest trained token."),
    ("staleness/oldest", "batch steps", "Mean over trajectories of their oldest trained token."),
)
_define(
    "Preferences", "dpo",
    ("dpo/margin", "", "Implicit reward of the chosen minus that of the rejected completion, mean over pairs. 0 at the start."),
    ("dpo/accuracy", "share", "Pairs whose margin is positive; one of exactly 0 counts one half, so the start is 0.5."),
    ("dpo/chosen_reward", "", "β·(log π − log π_ref) of the chosen completion, summed over its tokens, mean over pairs."),
    ("dpo/rejected_reward", "", "The same of the rejected completions."),
    ("dpo/chosen_logprob", "nats", "Log-prob of the whole chosen completion, mean over pairs. Falling: the policy forgets it."),
    ("dpo/rejected_logprob", "nats", "The same of the rejected completions."),
)
_define(
    "Time", "loop",
    ("time/step_s", "s", "The whole batch step; not what the loop waited for a validation or a checkpoint after it."),
    ("time/wall_s", "s", "Since training began, with everything; goes on where a resumed run was cut."),
    ("time/rollout_s", "s", "Generation and scoring; under `arrival`, where batches overlap, since the batch before was there."),
    ("time/generate_s", "s", "Generation alone: until the engine's last completion."),
    ("time/train_s", "s", "Everything in the policy."),
    ("time/pack_s", "s", "Laying out rows. A part of time/train_s, like the four below."),
    ("time/old_logprobs_s", "s", "The ahead pass: log-probs before the first of several optimizer steps."),
    ("time/reference_s", "s", "Log-probs of the reference model."),
    ("time/forward_backward_s", "s", "Forward and backward of all micro-batches."),
    ("time/optimizer_s", "s", "Gradient clipping and the optimizer."),
    ("time/sync_s", "s", "Publishing the new weights and bringing the engine to them."),
)
_define(
    "Weights", "weights",
    ("weights/bytes", "bytes", "Size of a publication."),
    ("weights/canary_max", "nats", "Largest difference between engine and trainer on the probe, when it ran."),
    ("weights/canary_mean", "nats", "Mean of the same."),
    ("time/publish_s", "s", "Snapshot of the policy's weights. A part of time/sync_s, like the three below."),
    ("time/stage_s", "s", "What was left of copying and verifying it when it was to be delivered. Engines generate meanwhile."),
    ("time/apply_s", "s", "Pause, take the weights, drop the caches, resume."),
    ("time/canary_s", "s", "The canary."),
)
_define(
    "Hooks (only with hooks)", "hooks",
    ("hook/<hook>/<metric>", "", "What a hook adds to a batch step."),
    ("hook/<hook>/errors", "calls", "Calls of this hook that failed since this start of the run."),
    ("time/hooks_s", "s", "What calls of hooks took since the last step; those of trajectory_scored run beside generation."),
)
_define(
    "Evals (evals/summary.json; step 0 is before training)", "evals",
    ("eval/<eval>/accuracy", "share", "Correct completions; those that failed or have no reward count as wrong."),
    ("eval/<eval>/reward/mean", "reward", "Mean reward; a completion without one counts 0, or the least reward below it."),
    ("eval/<eval>/pass@<k>", "share", "Unbiased estimate that at least one of k completions of a prompt is correct."),
    ("eval/<eval>/pass^<k>", "share", "Unbiased estimate that all of k completions of a prompt are correct."),
    ("eval/<eval>/prompts", "prompts", "How many were asked."),
    ("eval/<eval>/unscorable_count", "trajectories", "Completions without a usable reward."),
    ("eval/<eval>/length/mean", "tokens", "Mean number of tokens that the model sampled for a completion."),
    ("eval/<eval>/truncated_share", "share", "Completions that hit the token limit instead of stopping."),
    ("eval/<eval>/failed", "", "1 when the eval failed as a whole and has no result, else 0."),
    ("eval/<eval>/time_s", "s", "What the eval took."),
)
_define(
    "Held-out validation (validation.jsonl; step 0 is before training)", "loop",
    (HELD_OUT, "reward", "Mean reward on prompts that training never draws; unscorable samples are left out."),
    ("validation/<env>/reward/mean", "reward", "The same, for one environment."),
    ("validation/<env>/unscorable_count", "trajectories", "Its samples without a usable reward."),
    ("validation/<env>/length/mean", "tokens", "Its mean completion length."),
    ("validation/prompts", "prompts", "How many held-out prompts."),
    ("validation/unscorable_count", "trajectories", "Samples without a usable reward."),
    ("validation/length/mean", "tokens", "Mean completion length."),
    ("validation/truncated_share", "share", "Samples that hit the length limit."),
    ("validation/time_s", "s", "Duration of the validation."),
    ("validation/loss", "", "Loss on held-out preference pairs."),
    ("validation/dpo/<measure>", "", "A measure of the section Preferences, on held-out pairs."),
)


def definitions() -> list[Metric]:
    """All definitions, in the order of the page."""
    return [metric for section in SECTIONS.values() for metric in section]


def find(name: str) -> Metric | None:
    """The definition of a concrete metric name; exact names win over families."""
    exact = next((m for m in definitions() if m.name == name), None)
    return exact or next((m for m in definitions() if "<" in m.name and m.pattern.fullmatch(name)), None)
