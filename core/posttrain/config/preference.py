"""What belongs together in a run on preference pairs: `rollout.engine=none`, environments of pairs, an algorithm of pairs.

    rollout.engine   environments                objective
    none             all of pairs (preference)   learns from pairs (dpo); rl.group_size=2, rollout.temperature=1
    any other        none of pairs               any; dpo takes the best and the worst of a group

The plug-ins say themselves which they are (`pairs` and `no_sampling` of `plugins.capabilities`); the other keys are held to here.
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.schema import NO_ENGINE, RunConfig
from posttrain.config.walker import Problem


def check_preference(config: RunConfig) -> Iterator[Problem]:
    """The keys that do not fit `rollout.engine=none`."""
    if config.rollout.engine != NO_ENGINE:
        return
    if config.rl.group_size != 2:
        what = f"{config.rl.group_size} with rollout.engine=none: a pair is a group of two"
        yield Problem("rl.group_size", what, "set rl.group_size=2; rl.batch_per_replica counts two completions for each pair")
    if config.rollout.temperature != 1:
        what = f"{config.rollout.temperature} with rollout.engine=none: it would only distort the log-probs, nothing is sampled"
        yield Problem("rollout.temperature", what, "set rollout.temperature=1")
    if config.rollout.options:
        yield Problem("rollout.options", "there is no engine to take them", "remove rollout.options, or choose an engine")
