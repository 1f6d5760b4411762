"""From a plug-in and its options to an instance, strictly: unknown options, wrong types and missing ones are told together."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

from posttrain.errors import ConfigError, PluginError, PosttrainError, error
from posttrain.plugins.construction import travel_fault
from posttrain.plugins.problems import ANCHOR
from posttrain.plugins.resolution import resolve

if TYPE_CHECKING:
    from posttrain.config.walker import Field
    from posttrain.plugins.card import Card, Option

_ANNOTATIONS: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "Any": Any,
    "Literal": Literal,
    "Optional": Optional,
    "Union": Union,
    "None": None,
}


def load(kind: str, ref: Any, /, **options: Any) -> Any:
    """An instance of a plug-in for anyone's own loop: `load("envs", "arithmetic", digits=2)`.

    kind: "envs" | "algorithms" | "datapackers" | "engines" | "transports" | "hooks". ref: as in `resolve`.
    A keyword that the constructor takes besides its options (`spec` of an engine, `context` of an algorithm) is handed to it;
    every other one is an option. Raises PluginError, ConfigError.
    """
    cls = resolve(kind, ref)
    taken = _parameters(cls)
    init = {name: value for name, value in options.items() if name in taken}
    return build(kind, cls, {name: value for name, value in options.items() if name not in taken}, name=ref, **init)


def build(
    kind: str, ref: Any, options: Mapping[str, Any] | None = None, *, name: Any = None, where: str = "", **init: Any
) -> Any:
    """An instance of a plug-in from a mapping of options. `where` is the config path to name in errors; `init` as in `load`."""
    options = dict(options or {})
    cls = resolve(kind, ref, where=where)
    label = str(name if isinstance(name, str) else ref if isinstance(ref, str) else getattr(cls, "__name__", ref))
    if kind == "algorithms":
        from posttrain.objective.algorithm import Context
        from posttrain.objective.build import build_algorithm

        return build_algorithm(label, cls, init.get("context") or Context(), options)
    if kind == "datapackers":
        return build_packer(label, cls, options)
    if not isinstance(cls, type):
        return _must_travel(kind, _as_given(cls, options, label, where), label, where)
    absent = [p for p, required in _parameters(cls).items() if required and p not in init]
    if absent:
        raise ConfigError(f"{kind} {label!r} needs {', '.join(absent)} to be built", fix=f"pass {absent[0]}=…", where=where)
    return _must_travel(kind, cls(**init, options=build_options(cls, options, label, where)), label, where)


def build_packer(label: str, factory: Any, options: Mapping[str, Any] | None = None) -> Any:
    """A fresh DataPacker from its class or zero-argument factory. Raises E10 when something else comes back."""
    from posttrain.data.packer import DataPacker

    packer = factory(**(options or {}))
    if not isinstance(packer, DataPacker):
        raise error("E10", path=label, got=f"a {type(packer).__name__}")
    return packer


def _as_given(instance: Any, options: Mapping[str, Any], label: str, where: str) -> Any:
    """An environment or a hook that a person built. Its options are set already."""
    if options:
        fix = "set them where the object is made, or give its class"
        raise ConfigError(f"{label!r} is an object, options {', '.join(options)} have no place", fix=fix, where=where)
    return instance


def _must_travel(kind: str, instance: Any, label: str, where: str) -> Any:
    """The instance itself. Raises PluginError for an environment that the reward workers cannot get."""
    fault = travel_fault(instance) if kind == "envs" else None
    if fault:
        raise PluginError(f"environment {label!r} {fault[0]}", fix=fault[1], where=where, code="plugin-pickle", anchor=ANCHOR)
    return instance


def build_options(cls: type, options: Mapping[str, Any], label: str, where: str = "") -> Any:
    """The nested `Options` of a class from a mapping. Raises ConfigError naming every problem at once."""
    from posttrain.config.walker import Walker, fields_of

    walker = Walker()
    values = walker.fields(fields_of(cls.Options), options, where)  # type: ignore[attr-defined]
    if walker.problems:
        from posttrain.config.report import refuse

        raise refuse(walker.problems, subject=f"the options of {label!r} cannot work")
    try:
        return cls.Options(**values)  # type: ignore[attr-defined]
    except PosttrainError:
        raise
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"the options of {label!r} cannot work: {exc}", where=where) from exc


def option_fields(card: Card) -> list[Field] | None:
    """The option fields of a card, for checks without an import; None when the card does not know them all.

    A type that cannot be told from the source alone is let through.
    """
    if not card.complete or card.problem:
        return None
    return [_field(option) for option in card.options]


def _field(option: Option) -> Field:
    from posttrain.config.walker import REQUIRED, Field

    default: Any = REQUIRED
    if option.default is not None:
        try:
            default = ast.literal_eval(option.default)
        except (ValueError, SyntaxError):
            default = None
    return Field(option.name, _type(option.type), default)


def _type(text: str) -> Any:
    """The annotation that a source text stands for; Any when it uses names that only an import would know."""
    tree = ast.parse(text, mode="eval")
    allowed = (ast.Expression, ast.Name, ast.Load, ast.Subscript, ast.BinOp, ast.BitOr, ast.Constant, ast.Tuple, ast.List)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if not all(isinstance(node, allowed) for node in ast.walk(tree)) or not names <= set(_ANNOTATIONS):
        return Any
    return eval(compile(tree, "<annotation>", "eval"), {"__builtins__": {}, **_ANNOTATIONS})


def _parameters(cls: Any) -> dict[str, bool]:
    """The constructor's parameters besides `options`, and whether each is required."""
    if not isinstance(cls, type) or dataclasses.is_dataclass(cls):
        return {}
    signature = inspect.signature(cls)
    named = (p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {p.name: p.default is p.empty for p in named if p.name != "options"}
