"""What belongs together in a run on preference pairs: `rollout.engine=none`, environments of pairs, an algorithm of pairs.

    rollout.engine   environments                objective
    none             all of pairs (preference)   learns from pairs (dpo); rl.group_size=2, rollout.temperature=1
    any other        none of pairs               any; dpo takes the best and the worst of a group
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.schema import MISSING, NO_ENGINE, RunConfig
from posttrain.config.walker import Problem
from posttrain.errors import PosttrainError
from posttrain.plugins.resolution import resolve


def check_preference(config: RunConfig) -> Iterator[Problem]:
    """Everything that does not fit `rollout.engine`. Plug-ins that cannot be loaded are reported by others."""
    from posttrain.data.preference import PreferenceEnvironment
    from posttrain.objective.algorithm import PreferenceAlgorithm

    offline = config.rollout.engine == NO_ENGINE
    for i, entry in enumerate(config.environments):
        of_pairs = _is_a("envs", entry.name, PreferenceEnvironment)
        if of_pairs is not None and of_pairs != offline:
            yield Problem(f"environments[{i}].name", *(_asks if offline else _brings)(entry.name, config.rollout.engine))
    if not offline:
        return
    if _is_a("algorithms", config.rl.objective.name, PreferenceAlgorithm) is False:
        name = config.rl.objective.name
        what = f"{name} learns from sampled completions, and rollout.engine=none samples nothing"
        yield Problem("rl.objective.name", what, "set rl.objective.name=dpo, or choose an engine such as rollout.engine=hf")
    if config.rl.group_size != 2:
        what = f"{config.rl.group_size} with rollout.engine=none: a pair is a group of two"
        yield Problem("rl.group_size", what, "set rl.group_size=2; rl.batch_per_replica counts two completions for each pair")
    if config.rollout.temperature != 1:
        what = f"{config.rollout.temperature} with rollout.engine=none: it would only distort the log-probs, nothing is sampled"
        yield Problem("rollout.temperature", what, "set rollout.temperature=1")
    if (packer := config.rl.data.packer) and _shapes_no_pairs(packer):
        what = f"{packer} cannot shape preference pairs: it has no get_preference_input"
        yield Problem("rl.data.packer", what, "unset it, or subclass posttrain_datapackers.preference:PreferencePacker")
    if config.rollout.options:
        yield Problem("rollout.options", "there is no engine to take them", "remove rollout.options, or choose an engine")


def _asks(name: str, engine: str) -> tuple[str, str]:
    return (
        f"{name} only asks: its prompts need an engine to answer them, and rollout.engine={engine} has none",
        "use an environment of pairs (name: preference), or choose an engine such as rollout.engine=hf",
    )


def _brings(name: str, engine: str) -> tuple[str, str]:
    return (
        f"{name} brings its completions with it, and rollout.engine={engine} would sample others",
        "set rollout.engine=none rl.objective.name=dpo rl.group_size=2, or use an environment that scores completions",
    )


def _shapes_no_pairs(packer: str) -> bool:
    """Whether a packer class is known to take no pairs; a factory is asked when it is used."""
    from posttrain.data.packer import DataPacker

    try:
        found = resolve("datapackers", packer)
    except PosttrainError:
        return False
    return isinstance(found, type) and getattr(found, "get_preference_input", None) is DataPacker.get_preference_input


def _is_a(kind: str, name: str, base: type) -> bool | None:
    """Whether a plug-in is of a kind; None when it cannot be loaded."""
    if name == MISSING:
        return None
    try:
        found = resolve(kind, name)
    except PosttrainError:
        return None
    return issubclass(found, base) if isinstance(found, type) else isinstance(found, base)
