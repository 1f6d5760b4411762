"""What a plug-in says about itself, read from its source without importing it.

The file that an entry point names is found on `sys.path` and parsed with `ast`: the first line of the docstring is the help, a
class variable `api = 1` the contract's version, the annotated fields of the nested `Options` its options, and the names in
`needs`, `provides` and `lacks` its capabilities, those of base classes in other files included. So a card exists for broken
plug-ins and for plug-ins whose dependencies are absent, too.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from posttrain.plugins.capabilities import FIELDS, SIGNS, Declared
from posttrain.plugins.kinds import KINDS
from posttrain.plugins.source import Scope, open_module


@dataclass(frozen=True, slots=True)
class Option:
    """One option as written: `type` and `default` are source text; `default` None means that it must be given."""

    name: str
    type: str
    default: str | None
    help: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """help, api, options and capabilities of a plug-in. `complete` is false when a base class could not be read, so options may
    be missing.

    `problem` says why the source could not be read; `missing` names top-level imports of the file that are not installed.
    """

    file: str = ""
    line: int = 0
    help: str = ""
    api: int = 1
    options: tuple[Option, ...] = ()
    complete: bool = True
    problem: str = ""
    missing: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def declared(self) -> Declared:
        return Declared(self.needs, self.provides, self.lacks)


def find_source(module: str) -> Path | None:
    """The file of a module, found without importing it or its packages."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def read_card(value: str, kind: str = "") -> Card:
    """The card of `module:attr`, or of a module, as a plug-in of `kind`.

    Never raises for a broken plug-in: `problem` says what is wrong.
    """
    module, _, attr = value.partition(":")
    file = find_source(module)
    if file is None:
        return Card(problem=f"there is no source file of module {module!r}")
    try:
        scope = open_module(module, file, find_source)
    except (OSError, SyntaxError, ValueError) as exc:
        return Card(file=str(file), problem=f"{type(exc).__name__}: {exc}")
    missing = _missing_imports(scope, module)
    if not attr:
        return Card(str(file), 1, _first_line(ast.get_docstring(scope.tree)), missing=missing)
    found = scope.find(attr)
    if found is None:
        return Card(
            str(file),
            1,
            _first_line(ast.get_docstring(scope.tree)),
            complete=False,
            missing=missing,
            problem="" if scope.has_name(attr) else f"{file} does not define {attr!r}",
        )
    owner, node = found
    if isinstance(node, ast.FunctionDef):
        return Card(str(file), node.lineno, _first_line(ast.get_docstring(node)), complete=False, missing=missing)
    fields, complete = _option_fields(owner, node)
    said = Declared.of(_words(owner, node, kind))
    return Card(
        file=str(owner.file),
        line=node.lineno,
        help=_first_line(ast.get_docstring(node) or ast.get_docstring(owner.tree)),
        api=_api(node),
        options=tuple(fields.values()),
        complete=complete,
        problem=_options_problem(node),
        missing=missing,
        needs=said.needs,
        provides=said.provides,
        lacks=said.lacks,
    )


def _first_line(docstring: str | None) -> str:
    return docstring.strip().partition("\n")[0].strip() if docstring else ""


def _api(node: ast.ClassDef) -> Any:
    """The literal assigned to `api` in the class body; 1 when there is none."""
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if any(isinstance(t, ast.Name) and t.id == "api" for t in targets) and isinstance(value, ast.Constant):
            return value.value
    return 1


def _options_problem(node: ast.ClassDef) -> str:
    """Why the nested `Options`, as written, are no options; "" when nothing is seen. `construction` checks the class itself."""
    options = next((one for one in node.body if isinstance(one, ast.ClassDef) and one.name == "Options"), None)
    if options is None:
        return ""
    if not options.decorator_list and any(isinstance(one, ast.AnnAssign) for one in options.body):
        return "its Options are not a dataclass"
    for one in options.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.value, (ast.List, ast.Dict, ast.Set)):
            return f"its option {ast.unparse(one.target)} has a mutable default"
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and isinstance(one.value, ast.Constant):
            name = one.targets[0].id
            if not name.startswith("_") and not name.isupper():
                return f"its option {name} has no type"
    return ""


def _option_fields(scope: Scope, node: ast.ClassDef) -> tuple[dict[str, Option], bool]:
    """The fields of the `Options` that `node` nests, assigns or inherits, and whether all of its bases could be read."""
    nested = scope.member(node, "Options")
    if nested is None:
        return {}, not node.bases
    return _fields_of(*nested, depth=0)


def _fields_of(scope: Scope, node: ast.ClassDef, depth: int) -> tuple[dict[str, Option], bool]:
    fields: dict[str, Option] = {}
    complete = depth < 20
    for base in reversed(node.bases) if complete else ():
        found = scope.resolve_class(base)
        if found is None:
            complete = complete and isinstance(base, ast.Name) and base.id in ("object", "Generic", "Protocol")
            continue
        inherited, known = _fields_of(*found, depth=depth + 1)
        fields |= inherited
        complete = complete and known
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotation = ast.unparse(statement.annotation)
            if not annotation.startswith(("ClassVar", "typing.ClassVar")):
                fields[statement.target.id] = Option(
                    statement.target.id,
                    annotation,
                    _default(statement.value),
                    scope.comment(statement.lineno, statement.end_lineno),
                )
    return fields, complete


def _words(scope: Scope, node: ast.ClassDef, kind: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """`(field, capability)` of everything that a class and its bases say or show, as far as they can be read."""
    base = KINDS[kind].base if kind in KINDS else None
    signs = {} if f"{scope.module}:{node.name}" == base else SIGNS.get(kind, {})
    for statement in node.body:
        name, value = _bound(statement)
        if name in FIELDS and isinstance(value, (ast.Tuple, ast.List, ast.Set)):
            yield from (
                (name, item.value) for item in value.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)
            )
        if name in signs and (value is None or (isinstance(value, ast.Constant) and value.value is True)):
            yield signs[name]
    for found in map(scope.resolve_class, node.bases) if depth < 20 else ():
        if found is not None:
            yield from _words(*found, kind, depth + 1)


def _bound(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """The name that a statement of a class body binds, "" for none, and its value; a method has none."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return statement.name, None
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        return statement.target.id, statement.value
    return "", None


def _default(value: ast.expr | None) -> str | None:
    """The source text of a field's default, seen through `field(default=…)`."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default" in given:
            return ast.unparse(given["default"])
        return f"{ast.unparse(given['default_factory'])}()" if "default_factory" in given else None
    return None if value is None else ast.unparse(value)


def _missing_imports(scope: Scope, module: str) -> tuple[str, ...]:
    """Top-level modules that the file imports unconditionally and that are not installed."""
    wanted = set()
    for statement in scope.tree.body:
        if isinstance(statement, ast.Import):
            wanted |= {alias.name.partition(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            wanted.add(statement.module.partition(".")[0])
    own = module.partition(".")[0]
    return tuple(sorted(name for name in wanted if name != own and name not in sys.modules and not _installed(name)))


def _installed(top: str) -> bool:
    try:
        return top in sys.builtin_module_names or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
