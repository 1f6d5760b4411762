"""The tables of `reference/config.md`: every key of the schema and every option of a plug-in, with type, default and bounds."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import typing
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from types import ModuleType

from _markdown import code, prose, table

from posttrain.config import rules, schema
from posttrain.config.bounds import BOUNDS, EVAL_BOUNDS
from posttrain.config.flat_keys import ABSENT, FAMILIES, FLAT_KEYS
from posttrain.data.source import DataOptions
from posttrain.objective import options
from posttrain.plugins.card import Option
from posttrain.plugins.discovery import discover

RULED: dict[str, tuple[str, str]] = {
    "rl.group_size": ("at least 1", "0"),
    "rl.batch_per_replica": ("a multiple of `rl.group_size` × rollout replicas, and of `dp_world`", "12"),
    "rl.mini_batch_per_replica": ("divides the batch; a multiple of `dp_world`", "48"),
    "rl.micro_batch_per_replica": ("divides the mini-batch; a multiple of `dp_world`", "48"),
    "rollout.temperature": ("above 0", "0"),
    "rollout.top_p": ("1", "0.9"),
    "rollout.top_k": ("0", "5"),
    "rollout.min_p": ("0", "0.1"),
    "grid.ranks": ("at least 1", "0"),
    "grid.dp_replicate": ("at least 1", "0"),
    "grid.dp_shard": ("at least 1", "0"),
    "grid.shapes.policy": ("`[1, dp_world]`", "[2,1]"),
    "grid.shapes.rollout": ("each at least 1", "[0,1]"),
    "environments[i].weight": ("above 0", "0"),
    "hooks[i].timeout_s": ("above 0", "0"),
}
"""Bounds of numbers that `config/rules.py` holds to, and a value that it refuses (a test tries each)."""


def config(*_: str) -> str:
    """Every key by its full path, one table for each group, read from the source of the schema."""
    path = Path(schema.__file__)
    source = path.read_text(encoding="utf-8")
    classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    parts: list[str] = []
    _group("RunConfig", "", classes, source.splitlines(), parts)
    return "\n".join(parts)


def _group(name: str, prefix: str, classes: dict[str, ast.ClassDef], lines: Sequence[str], parts: list[str]) -> None:
    rows, nested = [], []
    for node in classes[name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        key, kind = prefix + node.target.id, ast.unparse(node.annotation)
        comment = lines[node.lineno - 1].partition("  # ")[2]
        if kind in classes and kind != "Plugin":
            nested.append((kind, key))
        else:
            rows.append((code(key), kind_of(kind), yaml(_default(node.value)), bounds(key), prose(comment)))
        if entry := re.fullmatch(r"tuple\[(\w+Config), \.\.\.\]", kind):
            nested.append((entry[1], f"{key}[i]"))
    if rows:
        title = f"`{prefix[:-1]}`" if prefix else "Top level"
        parts.append(f"## {title}\n\n" + table(("Key", "Type", "Default", "Bounds", "Meaning"), rows))
    for kind, key in nested:
        _group(kind, f"{key}.", classes, lines, parts)


def bounds(key: str) -> str:
    """What a value may be, beside its type; whether its feature is there."""
    if key in rules.NOT_YET:
        return "[not yet](#not-yet)"
    if key in RULED:
        return RULED[key][0]
    if f"{key}[0]" in BOUNDS:
        return f"each {BOUNDS[f'{key}[0]']}"
    if key.startswith("evals[i]."):
        return str(EVAL_BOUNDS.get(key.removeprefix("evals[i]."), ""))
    return str(BOUNDS.get(key, ""))


def not_yet(*_: str) -> str:
    """Keys that are valid and take no other value than these."""
    rows = [(code(key), ", ".join(map(code, _works(key))), prose(why.reason)) for key, why in rules.NOT_YET.items()]
    return table(("Key", "Takes", "Why"), rows)


def _works(key: str) -> Iterator[str]:
    for value in (attrgetter(key)(schema.RunConfig()), *rules.NOT_YET[key].works):
        yield {None: "null", (): "[]"}.get(value, str(value))


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call):
        factory = next((k.value for k in value.keywords if k.arg == "default_factory"), None)
        made = ast.unparse(factory) if factory else ""
        named = re.search(r"Plugin\(name='(\w+)'\)", made)
        return named[1] if named else {"dict": "{}", "list": "[]"}.get(made, "")
    if isinstance(value, ast.BinOp):
        return str(eval(ast.unparse(value), {}))
    return "" if value is None else ast.unparse(value)


def kind_of(annotation: str, *modules: ModuleType) -> str:
    """A type as a reader of YAML knows it: values of a Literal, [a, b] for tuples, null for None; no bars, which end cells."""
    for module in (schema, options, *modules):
        for name, value in vars(module).items():
            if typing.get_origin(value) is typing.Literal:
                annotation = re.sub(rf"\b{name}\b", " | ".join(map(str, typing.get_args(value))), annotation)
    annotation = re.sub(r"Literal\[(.*?)\]", lambda m: " | ".join(v.strip(" '\"") for v in m[1].split(",")), annotation)
    annotation = re.sub(r"tuple\[[^\[\]]+, \.\.\.\]|\blist\[[^\[\]]+\]", "list", annotation)
    annotation = re.sub(r"\b(?:dict|Mapping)\[[^\[\]]+\]", "mapping", annotation)
    annotation = annotation.replace("tuple[", "[").replace("None", "null").replace("Plugin", "plug-in").replace("Any", "anything")
    *first, last = [code(part) for part in annotation.split(" | ")]
    return f"{', '.join(first)} or {last}" if first else last


def yaml(default: str | None) -> str:
    """A default as one would write it in YAML; "required" for a key without one."""
    if default in (None, "MISSING"):
        return "required"
    if default == "built in":
        return default
    plain = {"None": "null", "True": "true", "False": "false", "()": "[]", "dict()": "{}", "list()": "[]"}
    value = plain.get(default or "", (default or "").strip("'\""))
    if value.startswith("("):
        value = "[" + ", ".join(map(str, ast.literal_eval(value))) + "]"
    return code(value)


def own_options(algorithm: str) -> str:
    """What an algorithm adds to the shared options, or sets to another default."""
    own = _own(algorithm)
    return _option_table(own) if own else "No options of its own.\n"


def shared_options(*_: str) -> str:
    return _option_table(list(_shared().values()))


def plugin_options(kind: str) -> str:
    """A section for each built-in plug-in that has options; what every reader of data takes stands in one of its own."""
    infos = [p for p in discover(kind) if p.distribution == "posttrain"]
    own = {p.name: _own(p.name) if kind == "algorithms" else list(p.card.options) for p in infos}
    names = {field.name for field in dataclasses.fields(DataOptions)} if kind == "envs" else set()
    every = [o for entries in own.values() for o in entries if o.name in names]
    common = list(dict.fromkeys(o for o in every if every.count(o) > 1))
    reading = "### Reading data\n\nOf every environment that reads rows from files or a hub.\n\n"
    parts = [reading + _option_table(common)] if common else []
    for info in infos:
        modules = [] if info.card.missing else [importlib.import_module(info.value.partition(":")[0])]
        rest = [_resolved(o, info.value) for o in own[info.name] if o not in common]
        if rest:
            parts.append(f"### `{info.name}`\n\n{info.card.help}\n\n{_option_table(rest, *modules)}")
    return "\n".join(parts)


def _resolved(option: Option, target: str) -> Option:
    """An option whose default is written as the name of a constant, with the constant's value."""
    if option.default is None or option.default in ("None", "True", "False") or not option.default.isidentifier():
        return option
    module, _, attr = target.partition(":")
    value = getattr(getattr(importlib.import_module(module), attr).Options, option.name)
    return dataclasses.replace(option, default="built in" if isinstance(value, str) and len(value) > 40 else repr(value))


def _own(algorithm: str) -> list[Option]:
    shared = _shared()
    return [o for o in _card_options(algorithm) if shared.get(o.name) != o]


def _shared() -> dict[str, Option]:
    """Options of every token objective, as grpo has them: it overrides none."""
    names = {field.name for field in dataclasses.fields(options.TokenOptions)}
    return {o.name: o for o in _card_options("grpo") if o.name in names}


def _card_options(algorithm: str) -> tuple[Option, ...]:
    return next(p for p in discover("algorithms") if p.name == algorithm).card.options


def _option_table(entries: Sequence[Option], *modules: ModuleType) -> str:
    rows = [(code(o.name), kind_of(o.type, *modules), yaml(o.default), prose(o.help)) for o in entries]
    return table(("Option", "Type", "Default", "Meaning"), rows)


def other_names(*_: str) -> str:
    """Keys of other trainers, and what answers them here."""
    rows = [*_paths(), *((code(key), f"none: {prose(why)}") for key, why in ABSENT.items())]
    rows += [(code(f"{prefix}…"), f"none: {prose(why)}") for prefix, why in FAMILIES.items()]
    return table(("There", "Here"), rows)


def _paths() -> Iterator[tuple[str, str]]:
    for key, answer in FLAT_KEYS.items():
        yield code(key), prose(answer)
