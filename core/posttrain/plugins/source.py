"""Name look-up in parsed source: where a class, its nested classes and its bases are defined, across files, without importing."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

Finder: TypeAlias = Callable[[str], "Path | None"]
Found: TypeAlias = "tuple[Scope, ast.ClassDef]"


class Scope:
    """One parsed module. Raises SyntaxError or OSError when the file cannot be read."""

    def __init__(self, module: str, file: Path, finder: Finder, seen: dict[str, Scope]) -> None:
        self.module, self.file, self._finder, self._seen = module, file, finder, seen
        self.tree, self._lines = _parse(file, file.stat().st_mtime_ns)
        seen[module] = self

    def comment(self, line: int, end_line: int | None = None) -> str:
        """The trailing comment of a statement."""
        text = self._lines[(end_line or line) - 1]
        mark = text.rfind("  # ")
        return text[mark + 4 :].strip() if mark >= 0 else ""

    def find(self, attr: str) -> tuple[Scope, ast.ClassDef | ast.FunctionDef] | None:
        """The class or function that `attr` (dots for nested ones) names in this module, seen through imports."""
        head, *rest = attr.split(".")
        for statement in self.tree.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == head and not rest:
                return self, statement
        found = self.class_named(head)
        for name in rest:
            found = found and found[0].member(found[1], name)
        return found

    def has_name(self, attr: str) -> bool:
        """Whether the module binds the first part of `attr` at its top level, in whatever way (a conditional import too)."""
        head = attr.partition(".")[0]
        return any(
            (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == head)
            or (isinstance(node, ast.alias) and (node.asname or node.name.partition(".")[0]) in (head, "*"))
            or (isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == head)
            or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
            for node in ast.walk(self.tree)
        )

    def class_named(self, name: str) -> Found | None:
        """The class bound to `name` at the top level: defined here, or imported by `from … import`."""
        for statement in reversed(self._statements()):
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return self, statement
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        other = self._open(self._absolute(statement))
                        return other.class_named(alias.name) if other else None
        return None

    def member(self, node: ast.ClassDef, name: str) -> Found | None:
        """The class that attribute `name` of class `node` is: nested in it, assigned to it, or inherited."""
        for statement in node.body:
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return self, statement
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            value = getattr(statement, "value", None)
            if value is not None and any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return self.resolve_class(value)
        for base in node.bases:
            found = self.resolve_class(base)
            inherited = found and found[0].member(found[1], name)
            if inherited:
                return inherited
        return None

    def resolve_class(self, expression: ast.expr) -> Found | None:
        """The class that an expression such as `Base`, `module.Base` or `Outer.Options` names."""
        if isinstance(expression, ast.Subscript):
            return self.resolve_class(expression.value)
        if isinstance(expression, ast.Name):
            return self.class_named(expression.id)
        if isinstance(expression, ast.Attribute):
            outer = self.resolve_class(expression.value)
            if outer:
                return outer[0].member(outer[1], expression.attr)
            module = self._module_named(ast.unparse(expression.value))
            return module.class_named(expression.attr) if module else None
        return None

    def _module_named(self, text: str) -> Scope | None:
        """The module that a dotted text names through the imports of this file."""
        for statement in self._statements():
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    if (alias.asname or alias.name) == text:
                        return self._open(alias.name)
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == text:
                        return self._open(f"{self._absolute(statement)}.{alias.name}")
        return None

    def _statements(self) -> list[ast.stmt]:
        """Those at the top level; of an `if`, such as TYPE_CHECKING, its own."""
        return [one for node in self.tree.body for one in (node.body if isinstance(node, ast.If) else [node])]

    def _absolute(self, statement: ast.ImportFrom) -> str:
        """The module that a `from … import` names, relative ones made absolute."""
        if not statement.level:
            return statement.module or ""
        parts = self.module.split(".")
        if self.file.name != "__init__.py":
            parts = parts[:-1]
        parts = parts[: len(parts) - (statement.level - 1)]
        return ".".join([*parts, statement.module] if statement.module else parts)

    def _open(self, module: str) -> Scope | None:
        if module in self._seen:
            return self._seen[module]
        file = self._finder(module)
        try:
            return Scope(module, file, self._finder, self._seen) if file else None
        except (OSError, SyntaxError, ValueError):
            return None


def open_module(module: str, file: Path, finder: Finder) -> Scope:
    """Parse one module; the modules that it refers to are parsed when looked at."""
    return Scope(module, file, finder, {})


@lru_cache(maxsize=256)
def _parse(file: Path, _changed_at: int) -> tuple[ast.Module, list[str]]:
    """Tree and lines of one version of a file; many plug-ins share their bases."""
    text = file.read_text(encoding="utf-8")
    return parsed(text, file), text.splitlines()


def parsed(text: str, file: Path, tries: int = 3) -> ast.Module:
    """`ast.parse`, again where CPython 3.11 loses count because a thread or a collection had other code parsed meanwhile."""
    while True:
        try:
            return ast.parse(text, filename=str(file))
        except SystemError:
            tries -= 1
            if not tries:
                raise
