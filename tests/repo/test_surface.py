"""What users build on is frozen: names, signatures, config keys, options, flags, checkpoint fields, metrics, errors, plug-ins.

tests/data/surface.json lists all of it. A change there is a decision: something that goes away or changes its meaning breaks
somebody's code, and follows docs/reference/stability.md. After such a decision, or when something was added:

    UPDATE_SURFACE=1 pytest tests/repo/test_surface.py
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import posttrain
from posttrain import deprecation, errors
from posttrain.cli.main import COMMANDS
from posttrain.config.schema import RunConfig
from posttrain.config.walker import REQUIRED, fields_of, join, spell
from posttrain.plugins import kinds
from posttrain.plugins.card import find_source
from posttrain.plugins.discovery import discover
from posttrain.plugins.kinds import KINDS, supported_apis
from posttrain.plugins.state import SavedState
from posttrain.tracking.metric_names import SECTIONS

FILE = Path(__file__).parents[1] / "data" / "surface.json"
UPDATE = "UPDATE_SURFACE=1 pytest tests/repo/test_surface.py"
CORE = Path(posttrain.__file__).parent
MODULES = ("posttrain", "posttrain.deprecation", "posttrain.errors", "posttrain.hooks", "posttrain.plugins", "posttrain.testing")

Surface = dict[str, str]


def names() -> Surface:
    """Public names with their signatures, read from the source."""
    found = {}
    for module in MODULES:
        loaded = importlib.import_module(module)
        listed = getattr(loaded, "__all__", None) or [n for n, v in vars(loaded).items() if _defined_in(v, module)]
        for name in listed:
            found[f"{module}.{name}"] = "value"
            for key, text in _described(module, name):
                found[f"{module}.{name}{key}"] = text
    return found


def _defined_in(value: Any, module: str) -> bool:
    return getattr(value, "__module__", None) == module and not value.__name__.startswith("_")


def _described(module: str, name: str) -> Iterator[tuple[str, str]]:
    """What a name is: a function's arguments, a class's fields, methods and properties."""
    home = _home(module, name)
    file = home and find_source(home)
    tree = ast.parse(file.read_text(encoding="utf-8")) if file else ast.Module([], [])
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            yield "", _signature(node)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            yield "", f"class({', '.join(map(ast.unparse, node.bases))})"
            for one in node.body:
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and _public(one.name):
                    yield f".{one.name}", _signature(one)
                elif isinstance(one, ast.AnnAssign) and _public(field := ast.unparse(one.target)):
                    yield f".{field}", ast.unparse(one.annotation) + (f" = {ast.unparse(one.value)}" if one.value else "")


def _public(name: str) -> bool:
    """Whether users call it; the laws of a contract suite may grow."""
    return name == "__init__" or not name.startswith(("_", "test_"))


def _home(module: str, name: str) -> str | None:
    """The module whose source defines a public name, from the imports that type checkers read."""
    file = find_source(module)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file else ():
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return node.module
    return module


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    marks = [f"@{ast.unparse(d)} " for d in node.decorator_list if ast.unparse(d) in ("property", "classmethod", "staticmethod")]
    return f"{''.join(marks)}{kind}({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def config() -> Surface:
    """Every key of a config with its type and default."""
    return dict(_keys(RunConfig, ""))


def _keys(cls: type, path: str) -> Iterator[tuple[str, str]]:
    for field in fields_of(cls):
        key = join(path, field.name)
        nested = field.type if isinstance(field.type, type) and hasattr(field.type, "__dataclass_fields__") else None
        inner = next((arg for arg in getattr(field.type, "__args__", ()) if hasattr(arg, "__dataclass_fields__")), None)
        if nested is not None:
            yield from _keys(nested, key)
        elif inner is not None:
            yield key, "a list of" if "tuple" in str(field.type) else spell(field.type)
            yield from _keys(inner, f"{key}[]")
        else:
            default = "must be given" if field.default is REQUIRED else f"= {field.default!r}"
            yield key, f"{spell(field.type)} {default}"


def options() -> Surface:
    """The options of everything that posttrain brings, as the source has them."""
    return {
        f"{kind}.{info.name}.{option.name}": option.type + ("" if option.default is None else f" = {option.default}")
        for kind in KINDS
        for info in discover(kind)
        if info.builtin
        for option in info.card.options
    }


def plugins() -> Surface:
    """Names in the entry-point groups, and the api that plug-ins may be written for."""
    known = {f"{KINDS[kind].group}: {info.name}": "" for kind in KINDS for info in discover(kind) if info.builtin}
    catalogs = (importlib.import_module(info.module) for info in discover("experiments") if info.builtin)
    known |= {f"experiment={name}": "" for catalog in catalogs for name in catalog.EXPERIMENTS}
    return {**known, "api": " and ".join(map(str, supported_apis()))}


def flags() -> Surface:
    """Commands, their arguments and flags."""
    found = {}
    for command, module in COMMANDS.items():
        found[command] = ""
        for action in importlib.import_module(module).parser()._actions:
            called = ", ".join(action.option_strings) or action.dest
            takes = f" {{{','.join(map(str, action.choices))}}}" if action.choices else "" if action.nargs == 0 else " VALUE"
            found[f"{command} {called}"] = takes.strip() + (f" x{action.nargs}" if action.nargs not in (None, 0) else "")
    return found


def metrics() -> Surface:
    return {metric.name: metric.unit for section in SECTIONS.values() for metric in section}


def messages() -> Surface:
    """Documented messages, and the codes, exit codes and bases of the classes."""
    found = {code: f"{entry.cls.__name__}: {entry.text}" for code, entry in errors.CATALOGUE.items()}
    for cls in [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.PosttrainError)]:
        bases = ", ".join(base.__name__ for base in cls.__mro__[1:-1] if base is not BaseException)
        found[cls.__name__] = f"code {cls.code}, exit {cls.exit_code}, {'retryable' if cls.retryable else 'final'}; {bases}"
    for file in CORE.rglob("*.py"):
        for code in re.findall(r"""\bcode=["']([\w-]+)["']""", file.read_text(encoding="utf-8")):
            found.setdefault(f"code {code}", "")
    return found


def variables() -> Surface:
    """Environment variables that posttrain reads."""
    text = "".join(file.read_text(encoding="utf-8") for file in CORE.rglob("*.py"))
    named = re.findall(r"\b(?:POSTTRAIN|IMAGINAIRE)_[A-Z_]+[A-Z]\b", text)
    return {name: "" for name in named if not name.startswith("POSTTRAIN_ENGINE_")}  # from one process to its child


def files(run: Path) -> Surface:
    """What lies in a run directory, and in a checkpoint to the fields."""
    found = {}
    for path in run.rglob("*"):
        found[re.sub(r"\d+", "N", str(path.relative_to(run)))] = "folder" if path.is_dir() else "file"
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    for key, value in json.loads((checkpoint / "loop.json").read_text()).items():
        found[f"loop.json: {key}"] = _shape(value)
    found |= {f"loop.json: plugins[].{field.name}": field.type for field in dataclasses.fields(SavedState)}
    for key in torch.load(checkpoint / "policy" / "policy.pt", weights_only=True, map_location="cpu"):
        found[f"policy.pt: {key}"] = ""
    return found


def _shape(value: Any) -> str:
    return f"{{{', '.join(sorted(value))}}}" if isinstance(value, dict) else type(value).__name__


def compare(section: str, found: Surface) -> None:
    found = dict(sorted(found.items()))
    listed = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    if os.environ.get("UPDATE_SURFACE"):
        listed[section] = found
        FILE.write_text(json.dumps(dict(sorted(listed.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    frozen = listed[section]
    lines = [f"  gone     {key}: {frozen[key]}" for key in frozen if key not in found]
    lines += [f"  changed  {key}: {frozen[key]}  ->  {found[key]}" for key in found if frozen.get(key, found[key]) != found[key]]
    lines += [f"  added    {key}: {found[key]}" for key in found if key not in frozen]
    if lines:
        broken = any(not line.startswith("  added") for line in lines)
        rule = "what is gone or changed breaks somebody's code (docs/reference/stability.md); " if broken else ""
        pytest.fail(f"{section} is not as listed:\n" + "\n".join(lines) + f"\n{rule}if it is meant: {UPDATE}", pytrace=False)


SECTIONS_OF_THE_LIST = [names, config, options, plugins, flags, metrics, messages, variables]


@pytest.mark.parametrize("section", SECTIONS_OF_THE_LIST, ids=lambda section: section.__name__)
def test_the_surface_is_as_listed(section: Callable[[], Surface]) -> None:
    compare(section.__name__, section())


def test_runs_and_checkpoints_are_as_listed(ended_run: Path) -> None:
    compare("files", files(ended_run))


def test_the_page_says_what_the_code_does() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/stability.md").read_text(encoding="utf-8")
    assert f"It is {kinds.API}." in page and (deprecation.WARNS, deprecation.ENDS) == (2, 3)
    assert deprecation.ALLOW_VARIABLE in page and deprecation.PosttrainDeprecationWarning.__name__ in page
    assert set(re.findall(r"`(posttrain\.[a-z]+)`", page)) == set(MODULES[1:])


def test_a_difference_says_what_it_is_and_the_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UPDATE_SURFACE", raising=False)
    found = json.loads(FILE.read_text(encoding="utf-8"))["config"]
    found["new.key"] = found.pop("rl.steps")
    found["seed"] = "text = 'x'"
    with pytest.raises(pytest.fail.Exception) as caught:
        compare("config", found)
    text = str(caught.value)
    assert "  gone     rl.steps: " in text and "  added    new.key: " in text
    assert "  changed  seed: an integer = 0  ->  text = 'x'" in text
    assert "stability.md" in text and text.endswith(UPDATE)
