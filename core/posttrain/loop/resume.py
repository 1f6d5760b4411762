"""What may change between a run and its resume, and what was cut off. Pure functions over config trees.

A resumed run goes on in the same directory. Keys that only say how long to go on or what to report may change; any other
change would make the rest of the run another run, so it is refused with the key, the old and the new value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.errors import ConfigError

MAY_CHANGE = (
    "rl.steps",
    "rl.max_uninformative_batches",
    "rl.dynamic_sampling_max_extra_rollouts",
    "rl.dynamic_sampling_on_budget_exhausted",
    "rl.data.max_bad_rows",
    "checkpoint.",
    "tracking.",
    "hooks",
    "validation.",
    "evals",
    "loop.shutdown_timeout_s",
    "loop.train_timeout_s",
    "grid.",
    "rollout.start_timeout_s",
    "rollout.generate_timeout_s",
    "rollout.env_timeout_s",
    "rollout.reward_timeout_s",
    "rollout.reward_workers",
    "rollout.strict_rewards",
    "rl.micro_batch_per_replica",
    "rl.micro_batch_tokens",
    "weights.",
)
"""Keys (or prefixes ending in a dot) that an override after `--resume` may change."""


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`(dotted key, value)` of every leaf; lists and empty mappings are leaves."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}{key}.")
    else:
        yield prefix[:-1], list(tree) if isinstance(tree, tuple) else tree


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """`(key, old value, new value)` of everything that differs; a key that one side lacks counts as None there."""
    before, after = dict(flatten(old)), dict(flatten(new))
    return [(key, before.get(key), after.get(key)) for key in sorted({*before, *after}) if before.get(key) != after.get(key)]


def check_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines that explain the allowed changes. Raises ConfigError naming every change that is not allowed, all at once."""
    notes: list[str] = []
    refused: list[str] = []
    for key, was, now in changed_keys(old, new):
        allowed = any(key == rule or (rule.endswith(".") and key.startswith(rule)) for rule in MAY_CHANGE)
        (notes if allowed else refused).append(f"{key}: {was!r} → {now!r}")
    scheduler = new.get("rl", {}).get("lr_scheduler", {}).get("name")
    if scheduler in ("linear", "cosine") and any(line.startswith("rl.steps:") for line in notes):
        notes.append(f"rl.steps changed under a {scheduler} schedule: the learning rate follows the new length from here on")
    if refused:
        raise ConfigError(
            "a resumed run cannot change these keys:\n  " + "\n  ".join(refused),
            cause="the rest of the run would not be the same run",
            fix="drop these overrides, or start a new run with them; allowed are " + ", ".join(MAY_CHANGE),
            code="resume",
        )
    return notes
