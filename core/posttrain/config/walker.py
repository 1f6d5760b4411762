"""From a plain tree to frozen dataclasses, strictly, with every problem found in one pass.

Unknown keys (with the nearest valid one), wrong types, values outside a choice and missing values are collected as `Problem`s,
never raised one by one. Values are not coerced beyond what cannot be misread: an integer where a number is wanted, an integer
where text is wanted, a list where a tuple is wanted.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from posttrain.config.schema import MISSING, Plugin
from posttrain.errors import PosttrainError

REQUIRED: Any = object()
"""The default of a field that must be given."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that cannot work. `path` is the config key; `error` the exception to raise when it is the only problem."""

    path: str
    what: str
    fix: str = ""
    error: PosttrainError | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """One key of a mapping: its type (an annotation, resolved) and its default, or REQUIRED."""

    name: str
    type: Any
    default: Any = REQUIRED


class Walker:
    """Collects `problems` while it turns trees into values.

    vocabulary: all valid paths, to suggest from. hint: `(path of an unknown key, its value) -> fix`, "" for none.
    """

    def __init__(self, vocabulary: Iterable[str] = (), hint: Callable[[str, Any], str] | None = None) -> None:
        self.problems: list[Problem] = []
        self._vocabulary = list(vocabulary)
        self._hint = hint

    def build(self, cls: type, tree: Any, path: str = "") -> Any:
        """An instance of dataclass `cls`. Keys with problems keep their default, so that later rules can go on.

        An entry of a list may be the name alone: `hooks=[tensorboard]`.
        """
        if isinstance(tree, str) and path.endswith("]") and dataclasses.fields(cls)[0].name == "name":
            tree = {"name": tree}
        if not isinstance(tree, Mapping):
            keys = [field.name for field in dataclasses.fields(cls)]
            fix = f"write {typed(path)}.{keys[0]}={tree}" if isinstance(tree, str) and "name" in keys[0] else ""
            self.report(path, f"must be a mapping, not {show(tree)}", fix or f"its keys: {', '.join(keys)}")
            tree = {}
        if cls is Plugin:
            name = self.convert(str, tree.get("name", MISSING), join(path, "name"), MISSING)
            return Plugin(name=name, options={key: value for key, value in tree.items() if key != "name"})
        return cls(**self.fields(fields_of(cls), tree, path))

    def fields(self, fields: Sequence[Field], tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        """The values of `fields` out of `tree`, defaults included."""
        known = {field.name: field for field in fields}
        for key in tree:
            if key not in known:
                hint = self._hint(join(path, str(key)), tree[key]) if self._hint else ""
                self.report(join(path, str(key)), "unknown key", hint or self._suggest(str(key), path, known))
        values = {}
        for name, field in known.items():
            given = tree.get(name, MISSING if field.default is REQUIRED else field.default)
            values[name] = (
                given
                if name not in tree and given is not MISSING
                else self.convert(field.type, given, join(path, name), field.default)
            )
        return values

    def convert(self, hint: Any, value: Any, path: str, default: Any = None) -> Any:
        """`value` as an instance of `hint`; `default` and a problem when it is not one."""
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.build(hint, value, path)
        if isinstance(value, str) and value == MISSING:
            self.report(path, "missing value", f"give it: {typed(path)}={sample(hint)}")
            return MISSING
        return self._convert(hint, value, path, default)

    def report(self, path: str, what: str, fix: str = "") -> None:
        self.problems.append(Problem(path, what, fix))

    def _convert(self, hint: Any, value: Any, path: str, default: Any) -> Any:
        origin, args = get_origin(hint), get_args(hint)
        if hint is Any:
            return value
        if origin in (Union, types.UnionType):
            return self._convert_union(hint, value, path, default)
        if origin is Literal:
            return self._choose(args, value, path, default)
        if origin in (tuple, list, dict) or hint in (tuple, list, dict):
            return self._container(hint, value, path, default)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if hint is str and isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(hint, type) or (isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)):
            return value
        self.report(path, f"must be {spell(hint)}, not {show(value)}", _hint_for(hint, value, path))
        return default

    def _convert_union(self, hint: Any, value: Any, path: str, default: Any) -> Any:
        for part in get_args(hint):
            if part is type(None):
                if value is None:
                    return None
                continue
            attempt = Walker(self._vocabulary)
            converted = attempt.convert(part, value, path, default)
            if not attempt.problems:
                return converted
        self.report(path, f"must be {spell(hint)}, not {show(value)}", _hint_for(hint, value, path))
        return default

    def _choose(self, choices: tuple[Any, ...], value: Any, path: str, default: Any) -> Any:
        if value is False and "off" in choices:  # what YAML makes of a bare off
            return "off"
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        self.report(
            path, f"must be {' | '.join(map(str, choices))}, not {show(value)}", f"did you mean {near[0]}?" if near else ""
        )
        return default

    def _container(self, hint: Any, value: Any, path: str, default: Any) -> Any:
        kind, args = get_origin(hint) or hint, get_args(hint)
        if kind is dict:
            if not isinstance(value, Mapping):
                self.report(path, f"must be a mapping, not {show(value)}")
                return default
            part = args[1] if args else Any
            return {str(key): self.convert(part, item, join(path, str(key))) for key, item in value.items()}
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            self.report(path, f"must be a list, not {show(value)}", f"write {path}=[{show(value)}]")
            return default
        if kind is tuple and args and args[-1] is not Ellipsis:
            if len(value) != len(args):
                self.report(path, f"must have {len(args)} entries, not {len(value)}: {show(value)}")
                return default
            return tuple(self.convert(part, item, f"{path}[{i}]") for i, (part, item) in enumerate(zip(args, value, strict=True)))
        part = args[0] if args else Any
        return kind(self.convert(part, item, f"{path}[{i}]") for i, item in enumerate(value))

    def _suggest(self, key: str, path: str, known: Mapping[str, Field]) -> str:
        near = difflib.get_close_matches(key, list(known), n=1)
        if near:
            return f"did you mean {join(path, near[0])}?"
        same = [full for full in self._vocabulary if full.rpartition(".")[2] == key]
        if same:
            return f"did you mean {' or '.join(same[:3])}?"
        return f"valid keys{f' of {path}' if path else ''}: {', '.join(known)}" if known else f"{path} takes no keys"


def fields_of(cls: type) -> list[Field]:
    """The fields of a dataclass with resolved annotations; `MISSING` defaults count as required."""
    hints = get_type_hints(cls)
    result = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        result.append(Field(field.name, hints[field.name], REQUIRED if default in (dataclasses.MISSING, MISSING) else default))
    return result


def to_tree(value: Any) -> Any:
    """Dataclasses as plain dicts, tuples as lists; a `Plugin` as one flat mapping."""
    if isinstance(value, Plugin):
        return {"name": value.name, **{key: to_tree(item) for key, item in value.options.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_tree(item) for key, item in value.items()}
    return [to_tree(item) for item in value] if isinstance(value, (list, tuple)) else value


def paths_of(cls: type, prefix: str = "") -> list[str]:
    """Every key path of a dataclass tree, leaves and branches."""
    found = []
    for field in fields_of(cls):
        path = join(prefix, field.name)
        found.append(path)
        if dataclasses.is_dataclass(field.type) and isinstance(field.type, type):
            found += ["rl.objective.name"] if field.type is Plugin else paths_of(field.type, path)
    return found


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def spell(hint: Any) -> str:
    """An annotation as a person would say it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(spell(part) for part in args)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (tuple, list) or hint in (tuple, list):
        return "a list"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null", dict: "a mapping"}
    return names.get(origin or hint, getattr(hint, "__name__", str(hint)))


def show(value: Any) -> str:
    """A value as one would type it, short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def sample(hint: Any) -> str:
    """A placeholder for a value of this type."""
    parts = (
        [part for part in get_args(hint) if part is not type(None)] if get_origin(hint) in (Union, types.UnionType) else [hint]
    )
    return {int: "N", float: "X", bool: "true", str: "TEXT"}.get(parts[0], spell(parts[0]).replace(" | ", "|"))


def typed(path: str) -> str:
    """A path as one types it: `environments[0].name` is `environments.0.name` on the command line."""
    return path.replace("[", ".").replace("]", "")


def _hint_for(hint: Any, value: Any, path: str) -> str:
    """How to type what was probably meant."""
    path = typed(path)
    wants = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, str) and {int, float} & set(wants):
        try:
            number = float(value)
        except ValueError:
            return ""
        return f"write the number without quotes: {path}={number:g}"
    if isinstance(value, float) and int in wants and value.is_integer():
        return f"write {path}={int(value)}"
    if isinstance(value, bool) and {int, float} & set(wants):
        return f"write a number: {path}={int(value)}"
    if isinstance(value, str) and bool in wants and value.lower() in ("yes", "no", "on", "off", "true", "false"):
        return f"write {path}={'true' if value.lower() in ('yes', 'on', 'true') else 'false'}"
    if isinstance(value, int) and bool in wants:
        return f"write {path}=true or {path}=false"
    if isinstance(value, (float, bool)) and str in wants:
        return f"quote it: '{path}=\"{value}\"'"
    return ""
