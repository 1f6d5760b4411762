"""From a name and options to an algorithm that can work, or to one error that names everything that cannot.

`parse` checks names and types of the options, `rules.problems` what they mean together; neither imports torch, so that a
config is checked fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from posttrain.errors import PluginError
from posttrain.objective.algorithm import Algorithm, Context, PreferenceAlgorithm
from posttrain.objective.options import Options, Problem, TokenOptions, refuse
from posttrain.objective.rules import problems

GROUP = "posttrain.algorithms"


def resolve_algorithm(name_or_class: str | type[Algorithm]) -> tuple[str, type[Algorithm]]:
    """The algorithm class and its name, from an installed plug-in's name or from the class itself. Raises PluginError."""
    if isinstance(name_or_class, str):
        found = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name_or_class not in found:
            installed = f"installed: {', '.join(sorted(found)) or 'none'}"
            raise PluginError(f"no algorithm {name_or_class!r}", fix=did_you_mean(name_or_class, found) or installed)
        name, cls = name_or_class, found[name_or_class].load()
    else:
        name, cls = getattr(name_or_class, "__name__", repr(name_or_class)), name_or_class
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise PluginError(f"algorithm {name!r} is {cls!r}", fix="subclass posttrain.objective.Algorithm")
    if not issubclass(cls.Options, Options if issubclass(cls, PreferenceAlgorithm) else TokenOptions):
        base = "Options" if issubclass(cls, PreferenceAlgorithm) else "TokenOptions"
        raise PluginError(f"{name}.Options is {cls.Options.__qualname__}", fix=f"subclass posttrain.objective.{base}")
    return name, cls


def build_algorithm(name: str, cls: type[Algorithm], context: Context, values: Mapping[str, object]) -> Algorithm:
    """The algorithm with its options and `auto` resolved. Raises ConfigError with every problem, each with its fix."""
    good, found = parse(name, cls.Options, values)
    good = resolve_auto(cls, good, context)
    found += problems(name, cls, draft(cls.Options, good), context)
    options = None
    if not found:
        try:
            options = cls.Options(**good)
        except (ValueError, TypeError) as exc:  # a plug-in's own __post_init__
            found = [Problem(str(exc), f"see the options of {name}")]
    if options is None:
        raise refuse(f"objective {name!r} cannot be built", found)
    return cls(options, context)


def parse(name: str, options: type[Options], values: Mapping[str, object]) -> tuple[dict[str, Any], list[Problem]]:
    """The values that are known and well typed, and a problem for each of the others."""
    hints = get_type_hints(options)
    known = {field.name for field in dataclasses.fields(options)}
    shared = {field.name for field in dataclasses.fields(TokenOptions)}
    good: dict[str, Any] = {}
    found: list[Problem] = []
    for key, value in values.items():
        if key not in known:
            reason = " (preference objectives take no shared terms)" if key in shared else ""
            found.append(Problem(f"{key} is not an option of {name}{reason}", did_you_mean(key, known) or f"remove {key}"))
        elif not fits(value, hints[key]):
            found.append(Problem(f"{key}={value!r} has the wrong type or value", f"{key} must be {spell(hints[key])}"))
        else:
            good[key] = value
    return good, found


def resolve_auto(cls: type[Algorithm], values: dict[str, Any], context: Context) -> dict[str, Any]:
    """`use_ppo_clip` unset and `ppo_clip_ref_logprobs=auto` replaced by what they mean in this run."""
    resolved = dict(values)
    if issubclass(cls, PreferenceAlgorithm):
        return resolved
    if cls.handles_ratio == "ppo" and values.get("use_ppo_clip") is None:
        resolved["use_ppo_clip"] = True
    options = draft(cls.Options, values)
    if isinstance(options, TokenOptions) and options.ppo_clip_ref_logprobs == "auto":
        resolved["ppo_clip_ref_logprobs"] = "rollout" if context.asynchronous and not options.use_tis else "old"
    return resolved


def draft(cls: type[Options], values: Mapping[str, object]) -> Options:
    """An instance with these values and the defaults, not yet checked: rules can then be asked about impossible values too."""
    options = object.__new__(cls)
    for field in dataclasses.fields(cls):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        object.__setattr__(options, field.name, values.get(field.name, default))
    return options


def fits(value: object, hint: Any) -> bool:
    """Whether `value` is of the annotated type: scalars, None, literals and their unions. Other types are let through."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def spell(hint: Any) -> str:
    """An annotation as a person would say it."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(spell(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    return {int: "an integer", float: "a number", bool: "true or false", type(None): "null"}.get(hint, str(hint))


def did_you_mean(word: str, known: Any) -> str:
    """A suggestion, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""
