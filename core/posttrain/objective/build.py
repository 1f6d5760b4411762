"""From options to an algorithm that can work, or to one error that names everything that cannot.

The config's walker checks names and types of the options, `rules.problems` what they mean together. Nothing here imports torch,
so that a config is checked fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.config.report import refuse
from posttrain.config.walker import Problem, Walker, fields_of
from posttrain.errors import PluginError
from posttrain.objective.algorithm import Algorithm, Context, PreferenceAlgorithm
from posttrain.objective.options import Options, TokenOptions
from posttrain.objective.rules import problems
from posttrain.plugins import resolve


def resolve_algorithm(name_or_class: str | type[Algorithm]) -> tuple[str, type[Algorithm]]:
    """What an algorithm is called, and its class; from a plug-in reference or the class itself. Raises PluginError."""
    cls: type[Algorithm] = resolve("algorithms", name_or_class)
    return (name_or_class if isinstance(name_or_class, str) else cls.__name__), cls


def build_algorithm(name: str, cls: type[Algorithm], context: Context, values: Mapping[str, object]) -> Algorithm:
    """The algorithm with its options resolved. Raises ConfigError, naming every problem with its fix."""
    options, found = check_algorithm(name, cls, context, values)
    if found or options is None:
        raise refuse(found, subject=f"objective {name!r} cannot be built")
    return cls(options, context)


def check_algorithm(
    name: str, cls: type[Algorithm], context: Context, values: Mapping[str, object]
) -> tuple[Options | None, list[Problem]]:
    """The resolved options, and every problem with them (then no options). A problem's `path` is the option or context key."""
    base = Options if issubclass(cls, PreferenceAlgorithm) else TokenOptions
    if not issubclass(cls.Options, base):
        raise PluginError(f"{name}: its Options are {cls.Options!r}", fix=f"subclass posttrain.objective.{base.__name__}")
    walker = Walker()
    resolved = resolve_auto(cls, walker.fields(fields_of(cls.Options), values), context)
    found = [*walker.problems, *problems(name, cls, draft(cls.Options, resolved), context)]
    if found:
        return None, found
    try:
        return cls.Options(**resolved), []
    except (ValueError, TypeError) as exc:  # a plug-in's own __post_init__
        return None, [Problem("", str(exc), f"see the options of {name}")]


def resolve_auto(cls: type[Algorithm], values: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """The values with `use_ppo_clip` unset and `ppo_clip_ref_logprobs=auto` replaced by what they mean in this run."""
    resolved = dict(values)
    if cls.handles_ratio == "ppo" and resolved.get("use_ppo_clip") is None:
        resolved["use_ppo_clip"] = True
    if resolved.get("ppo_clip_ref_logprobs") == "auto":
        resolved["ppo_clip_ref_logprobs"] = "rollout" if context.asynchronous and not resolved["use_tis"] else "old"
    return resolved


def draft(cls: type[Options], values: Mapping[str, Any]) -> Options:
    """An instance that did not check itself: rules can then be asked about impossible values too."""
    options = object.__new__(cls)
    for key, value in values.items():
        object.__setattr__(options, key, value)
    return options
