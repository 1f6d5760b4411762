"""The types that a tool's parameters may have: each as JSON schema, and as the check of a value that a model wrote.

    describe(list[int])                      # {"type": "array", "items": {"type": "integer"}}
    accept(float, 3, "x")                    # 3.0
    accept(int, "3", "x")                    # BadArgument: x must be a whole number, it is "3"

int, float, str, bool, None, Any, list, dict (keys are text), Literal, Enum (by its values), dataclasses (as objects), unions of
these, and `Annotated[type, "what it is for"]`. One thing is converted silently: a whole number where a float is asked for.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

_PLAIN: dict[Any, tuple[str, str]] = {
    int: ("integer", "a whole number"),
    float: ("number", "a number"),
    str: ("string", "text"),
    bool: ("boolean", "true or false"),
    type(None): ("null", "null"),
}
_FIELDS = "__posttrain_fields__"
_SHOWN = 80  # characters of a wrong value in a message


class BadArgument(ValueError):
    """What a model gave a tool does not fit. kind: `missing_argument` or `wrong_argument`."""

    def __init__(self, message: str, kind: str = "wrong_argument") -> None:
        super().__init__(message)
        self.kind = kind


def describe(annotation: Any) -> dict[str, Any]:
    """The JSON schema of a type. Raises TypeError for one that a tool cannot take, with the reason."""
    return _describe(annotation, ())


def _describe(annotation: Any, inside: tuple[type, ...]) -> dict[str, Any]:
    bare, note = without_note(annotation)
    if note:
        return {**_describe(bare, inside), "description": note}
    annotation, origin, parts = bare, typing.get_origin(bare), typing.get_args(bare)
    if annotation is Any:
        return {}
    if annotation in _PLAIN:
        return {"type": _PLAIN[annotation][0]}
    if origin is Literal:
        return _choices(parts)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_describe(part, inside) for part in parts]}
    if annotation is list or origin is list:
        return {"type": "array", **({"items": _describe(parts[0], inside)} if parts else {})}
    if annotation is dict or origin is dict:
        if parts and parts[0] is not str:
            raise TypeError("the keys of a dict are text: write dict[str, …]")
        return {"type": "object", **({"additionalProperties": _describe(parts[1], inside)} if parts else {})}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _choices([member.value for member in annotation])
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        if annotation in inside:
            raise TypeError(f"{annotation.__name__} holds itself, which a schema without references cannot say")
        return _object(annotation, (*inside, annotation))
    raise TypeError(
        f"{name_of(annotation)} is no type of JSON: int, float, str, bool, list, dict, Literal, Enum, dataclasses and unions are"
    )


def accept(annotation: Any, value: Any, path: str) -> Any:
    """The value as the type, for the parameter or field `path`. Raises BadArgument, whose text is for the model."""
    annotation = without_note(annotation)[0]
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if annotation is float and type(value) is int:
        return _as_float(value, path)
    if annotation in _PLAIN:
        if type(value) is annotation and not (annotation is float and not math.isfinite(value)):
            return value
        raise BadArgument(f"{path} must be {_PLAIN[annotation][1]}, it is {shown(value)}")
    if origin is Literal:
        return _chosen([(part, part) for part in parts], value, path)
    if origin in (Union, types.UnionType):
        return _any_of(parts, value, path)
    if annotation is list or origin is list:
        if not isinstance(value, list):
            raise BadArgument(f"{path} must be a list, it is {shown(value)}")
        return [accept(parts[0], item, f"{path}[{i}]") for i, item in enumerate(value)] if parts else value
    if annotation is dict or origin is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise BadArgument(f"{path} must be an object, it is {shown(value)}")
        return {key: accept(parts[1], item, f"{path}.{key}") for key, item in value.items()} if parts else value
    if issubclass(annotation, enum.Enum):
        return _chosen([(member.value, member) for member in annotation], value, path)
    return _built(annotation, value, path)


def accept_all(wanted: Mapping[str, tuple[Any, bool]], given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every given value as its type. wanted: the type, and whether it must be given. Raises BadArgument for the first fault."""
    absent = [name for name, (_, required) in wanted.items() if required and name not in given]
    if absent:
        raise BadArgument(f"{', '.join(prefix + name for name in absent)} must be given", "missing_argument")
    for name in given:
        if name not in wanted:
            raise BadArgument(f"there is no {prefix}{name[:_SHOWN]}: {', '.join(wanted) or 'nothing'} can be given")
    return {name: accept(wanted[name][0], value, prefix + name) for name, value in given.items()}


def plain(value: Any) -> Any:
    """A default or a result as JSON has it: an Enum as its value, a dataclass as an object. Anything else as it is."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key.value if isinstance(key, enum.Enum) else key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def fields_of(cls: type) -> dict[str, tuple[Any, bool]]:
    """The type of each field that a dataclass is built from, and whether it must be given.

    Kept on the class: where it has travelled to, the names in its annotations may be unknown.
    """
    if _FIELDS not in cls.__dict__:
        hints, missing = typing.get_type_hints(cls, include_extras=True), dataclasses.MISSING
        setattr(cls, _FIELDS, {
            field.name: (hints[field.name], field.default is missing and field.default_factory is missing)
            for field in dataclasses.fields(cls)
            if field.init
        })  # fmt: skip
    return cls.__dict__[_FIELDS]  # type: ignore[no-any-return]


def without_note(annotation: Any) -> tuple[Any, str]:
    """The type of an `Annotated`, and the first text of it; "" for any other type."""
    if typing.get_origin(annotation) is not typing.Annotated:
        return annotation, ""
    bare, *notes = typing.get_args(annotation)
    return bare, next((note for note in notes if isinstance(note, str)), "")


def name_of(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def shown(value: Any) -> str:
    """A value as a model wrote it, cut."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _as_float(value: int, path: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise BadArgument(f"{path} is too large for a number") from None


def _choices(values: Any) -> dict[str, Any]:
    if not values or not all(type(value) in _PLAIN for value in values):
        raise TypeError(f"choices are text, numbers, true, false or null, not {', '.join(map(repr, values)) or 'none at all'}")
    kinds = {_PLAIN[type(value)][0] for value in values}
    return {**({"type": kinds.pop()} if len(kinds) == 1 else {}), "enum": list(values)}


def _chosen(choices: list[tuple[Any, Any]], value: Any, path: str) -> Any:
    """What is meant by the choice that the value is; `True` is not 1."""
    for choice, meant in choices:
        if type(choice) is type(value) and choice == value:
            return meant
    raise BadArgument(f"{path} must be one of {', '.join(shown(choice) for choice, _ in choices)}, it is {shown(value)}")


def _any_of(parts: tuple[Any, ...], value: Any, path: str) -> Any:
    """The first part that fits; int before float, so that a whole number stays one where both may be."""
    problems = []
    for part in sorted(parts, key=lambda part: without_note(part)[0] is float):
        try:
            return accept(part, value, path)
        except BadArgument as exc:
            problems.append(exc)
    wanted = [_PLAIN[part][1] for part in parts if part in _PLAIN]
    if len(wanted) == len(parts):
        raise BadArgument(f"{path} must be {' or '.join(wanted)}, it is {shown(value)}")
    raise problems[0]


def _object(cls: type, inside: tuple[type, ...]) -> dict[str, Any]:
    fields = fields_of(cls)
    return {
        "type": "object",
        "properties": {name: _describe(annotation, inside) for name, (annotation, _) in fields.items()},
        "required": [name for name, (_, required) in fields.items() if required],
        "additionalProperties": False,
    }


def _built(cls: type, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise BadArgument(f"{path} must be an object, it is {shown(value)}")
    fields = fields_of(cls)
    given = accept_all(fields, value, f"{path}.")
    try:
        return cls(**given)
    except (ValueError, TypeError) as exc:
        raise BadArgument(f"{path} cannot be {shown(value)}: {exc}") from exc
