"""The range of every number in the schema. A value outside is one problem; NaN is outside of all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.config.walker import Problem


@dataclass(frozen=True, slots=True)
class Range:
    """An interval; `open_low` and `open_high` leave its ends out."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        low = "" if math.isinf(self.low) else f"{'above' if self.open_low else 'at least'} {self.low:g}"
        high = "" if math.isinf(self.high) else f"{'below' if self.open_high else 'at most'} {self.high:g}"
        return " and ".join(part for part in (low, high) if part)


_NATURAL, _COUNT, _POSITIVE, _SHARE = Range(1), Range(0), Range(0, open_low=True), Range(0, 1, open_low=True)

BOUNDS: dict[str, Range] = {
    "seed": _COUNT,
    "rl.steps": _NATURAL,
    "rl.micro_batch_tokens": _NATURAL,
    "rl.logprob_chunk_tokens": _NATURAL,
    "rl.max_uninformative_batches": _NATURAL,
    "rl.min_informative_groups": _COUNT,
    "rl.min_informative_groups_frac": _SHARE,
    "rl.dynamic_sampling_max_extra_rollouts": _COUNT,
    "rl.overlong_penalty_factor": Range(0, math.inf, open_high=True),
    "rl.overlong_buffer_tokens": _NATURAL,
    "rl.gibberish_logprob_offset": _POSITIVE,
    "rl.gibberish_token_threshold": _COUNT,
    "rl.repetition_compression_threshold": Range(1, open_low=True),
    "rl.optimizer.lr": Range(0, math.inf, open_high=True),
    "rl.optimizer.eps": _POSITIVE,
    "rl.optimizer.weight_decay": _COUNT,
    "rl.optimizer.grad_clip": _POSITIVE,
    "rl.optimizer.betas[0]": Range(0, 1, open_high=True),
    "rl.optimizer.betas[1]": Range(0, 1, open_high=True),
    "rl.lr_scheduler.warmup_steps": _COUNT,
    "rl.lr_scheduler.min_lr_ratio": Range(0, 1),
    "rollout.max_tokens": _NATURAL,
    "rollout.max_model_len": Range(2),
    "rollout.max_num_seqs": _NATURAL,
    "rollout.env_timeout_s": _POSITIVE,
    "rollout.gpu_memory_utilization": _SHARE,
    "rollout.tensor_parallel_size": _NATURAL,
    "rollout.base_port": Range(1, 65535),
    "rl.data.max_bad_rows": _COUNT,
    "rollout.max_async_rollout": _COUNT,
    "rollout.max_off_policy_steps": _COUNT,
    "rollout.start_timeout_s": _POSITIVE,
    "rollout.generate_timeout_s": _POSITIVE,
    "rollout.reward_timeout_s": _POSITIVE,
    "rollout.reward_workers": _NATURAL,
    "grid.num_replicas": _NATURAL,
    "grid.threads": _COUNT,
    "grid.start_timeout_s": _POSITIVE,
    "grid.heartbeat_timeout_s": _POSITIVE,
    "validation.every": _COUNT,
    "validation.prompts": _COUNT,
    "validation.samples": _NATURAL,
    "validation.temperature": _COUNT,
    "validation.top_p": _SHARE,
    "validation.top_k": _COUNT,
    "validation.min_p": Range(0, 1),
    "validation.max_tokens": _NATURAL,
    "weights.bucket_bytes": _NATURAL,
    "weights.canary_every": _COUNT,
    "weights.canary_max_fp32": _POSITIVE,
    "weights.canary_mean_bf16": _POSITIVE,
    "weights.canary_max_bf16": _POSITIVE,
    "weights.stage_timeout_s": _POSITIVE,
    "weights.apply_timeout_s": _POSITIVE,
    "weights.abort_timeout_s": _POSITIVE,
    "weights.rebuild_timeout_s": _POSITIVE,
    "weights.max_concurrent_lanes": _NATURAL,
    "loop.shutdown_timeout_s": _POSITIVE,
    "loop.train_timeout_s": _POSITIVE,
    "checkpoint.every": _COUNT,
    "checkpoint.keep_last": _NATURAL,
    "checkpoint.keep_every": _NATURAL,
    "tracking.rollouts_every": _COUNT,
}

EVAL_BOUNDS: dict[str, Range] = {
    "prompts": _COUNT,
    "samples": _NATURAL,
    "correct_at": Range(),
    "temperature": _COUNT,
    "top_p": _SHARE,
    "top_k": _COUNT,
    "min_p": Range(0, 1),
    "max_tokens": _NATURAL,
    "every": _COUNT,
}
"""Of the numbers of each entry of `evals`."""


def check_bounds(config: Any) -> Iterator[Problem]:
    """A problem for every number outside its range; unset (null) ones are left alone."""
    for path, allowed in BOUNDS.items():
        value = config
        for part in path.replace("[", ".").replace("]", "").split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        if isinstance(value, (int, float)) and not allowed.holds(value):
            yield Problem(path, f"is {value:g}, must be {allowed}")
    for i, environment in enumerate(config.environments):
        if isinstance(environment.weight, float) and not _POSITIVE.holds(environment.weight):
            yield Problem(f"environments[{i}].weight", f"is {environment.weight:g}, must be {_POSITIVE}")
    for i, entry in enumerate(config.evals):
        for key, allowed in EVAL_BOUNDS.items():
            value = getattr(entry, key)
            if isinstance(value, (int, float)) and not allowed.holds(value):
                yield Problem(f"evals[{i}].{key}", f"is {value:g}, must be {allowed}")
    for i, hook in enumerate(config.hooks):
        if isinstance(hook.timeout_s, float) and not _POSITIVE.holds(hook.timeout_s):
            yield Problem(f"hooks[{i}].timeout_s", f"is {hook.timeout_s:g}, must be {_POSITIVE}")
