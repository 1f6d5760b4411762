"""Fills the generated parts of the docs from the code: `python docs/_generate.py` (`--check` only compares).

A page holds a block between two marks; what is between them is replaced:

    <!-- generated: errors E1 E2 -->  …  <!-- end -->       messages, causes and fixes of errors.CATALOGUE
    <!-- generated: options grpo -->  …  <!-- end -->       an algorithm's own options
    <!-- generated: shared-options -->  …  <!-- end -->     the options that all token objectives take
    <!-- generated: config -->  …  <!-- end -->             every key of config/schema.py
    <!-- generated: metrics -->  …  <!-- end -->            every metric of tracking/metric_names.py
    <!-- generated: cli train show -->  …  <!-- end -->     `--help` of commands; without a command, of the program
    <!-- generated: exit-codes -->  …  <!-- end -->         exit codes and the error classes that end with them
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from posttrain import errors
from posttrain.cli.main import COMMANDS, HELP
from posttrain.config import schema
from posttrain.objective import options
from posttrain.plugins.card import Option
from posttrain.plugins.discovery import discover
from posttrain.tracking.metric_names import SECTIONS

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- generated: ([\w-]+)((?: [\w.]+)*) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return "\n".join([row(head), row(["---"] * len(head)), *map(row, rows)]) + "\n"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def error_table(*codes: str) -> str:
    rows = []
    for name in codes:
        entry = errors.CATALOGUE[name]
        rows.append((name, code(_fields(entry.text, "{}")), _prose(entry.cause), _prose(entry.fix)))
    return table(("", "Message", "Cause", "Fix"), rows)


def _prose(text: str) -> str:
    return "the message gives it" if re.fullmatch(r"\{\w+\}", text) else _fields(text, "*{}*")


def _fields(text: str, form: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: form.format(m[1].upper() if form == "{}" else m[1]), text)


def exit_codes(*_: str) -> str:
    meaning = {
        errors.EXIT_OK: "done, also when nothing was left to do",
        errors.EXIT_UNEXPECTED: "unexpected: a bug in posttrain or in a plug-in",
        errors.EXIT_CONFIG: "the configuration or a plug-in cannot work",
        errors.EXIT_DATA: "the data cannot be read or does not fit",
        errors.EXIT_ENGINE: "a model or an engine did not start",
        errors.EXIT_ABORTED: "the run stopped and would stop again in the same way",
        errors.EXIT_RETRYABLE: "the run stopped for a reason that may pass: resume it",
        errors.EXIT_INTERRUPT: "Ctrl-C",
        errors.EXIT_TERMINATED: "SIGTERM",
    }
    classes: dict[int, list[str]] = {}
    for cls in _subclasses(errors.PosttrainError):
        classes.setdefault(cls.exit_code, []).append(code(cls.__name__))
    return table(("Exit code", "Meaning", "Errors"), [(str(c), m, ", ".join(classes.get(c, []))) for c, m in meaning.items()])


def _subclasses(cls: type[errors.PosttrainError]) -> Iterator[type[errors.PosttrainError]]:
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from _subclasses(child)


def cli(*commands: str) -> str:
    os.environ["COLUMNS"] = "100"
    texts = [importlib.import_module(COMMANDS[name]).parser().format_help() for name in commands] or [HELP]
    return "".join(f"```text\n{text.rstrip()}\n```\n" for text in texts)


def metrics(*_: str) -> str:
    parts = []
    for title, section in SECTIONS.items():
        rows = [(code(m.name), m.unit or "–", m.meaning, m.emitter) for m in section]
        parts.append(f"## {title}\n\n" + table(("Metric", "Unit", "Meaning", "From"), rows))
    return "\n".join(parts)


def own_options(algorithm: str) -> str:
    """What an algorithm adds to the shared options, or sets to another default."""
    shared = _shared()
    own = [o for o in _card_options(algorithm) if shared.get(o.name) != o]
    return _option_table(own) if own else "No options of its own.\n"


def shared_options(*_: str) -> str:
    return _option_table(list(_shared().values()))


def _shared() -> dict[str, Option]:
    """Options of every token objective, as grpo has them: it overrides none."""
    names = {field.name for field in dataclasses.fields(options.TokenOptions)}
    return {o.name: o for o in _card_options("grpo") if o.name in names}


def _card_options(algorithm: str) -> tuple[Option, ...]:
    return next(p for p in discover("algorithms") if p.name == algorithm).card.options


def _option_table(entries: Sequence[Option]) -> str:
    rows = [(code(o.name), code(_kind(o.type)), _yaml(o.default), o.help) for o in entries]
    return table(("Option", "Type", "Default", "Meaning"), rows)


def config(*_: str) -> str:
    """Every key by its full path, one table for each group, read from the source of the schema."""
    path = Path(schema.__file__)
    source = path.read_text(encoding="utf-8")
    classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    lines = source.splitlines()
    parts: list[str] = []
    _config_group("RunConfig", "", classes, lines, parts)
    return "\n".join(parts)


def _config_group(name: str, prefix: str, classes: dict[str, ast.ClassDef], lines: Sequence[str], parts: list[str]) -> None:
    rows, nested = [], []
    for node in classes[name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        key, kind = prefix + node.target.id, ast.unparse(node.annotation)
        comment = lines[node.lineno - 1].partition("  # ")[2]
        if kind in classes and kind != "Plugin":
            nested.append((kind, key))
        else:
            rows.append((code(key), code(_kind(kind)), _yaml(_default(node.value)), comment))
        if "EnvironmentConfig" in kind:
            nested.append(("EnvironmentConfig", f"{key}[i]"))
    if rows:
        parts.append(f"## `{prefix[:-1] or 'top level'}`\n\n" + table(("Key", "Type", "Default", "Meaning"), rows))
    for kind, key in nested:
        _config_group(kind, f"{key}.", classes, lines, parts)


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call):
        factory = next((k.value for k in value.keywords if k.arg == "default_factory"), None)
        return {"dict": "{}", "list": "[]"}.get(ast.unparse(factory), "") if factory else ""
    return "" if value is None else ast.unparse(value)


def _kind(annotation: str) -> str:
    """A type as a reader of YAML knows it: the values of a Literal, [a, b] for tuples, null for None."""
    for module in (schema, options):
        for name, value in vars(module).items():
            if typing.get_origin(value) is typing.Literal:
                annotation = re.sub(rf"\b{name}\b", " | ".join(map(str, typing.get_args(value))), annotation)
    annotation = re.sub(r"Literal\[(.*?)\]", lambda m: " | ".join(v.strip(" '\"") for v in m[1].split(",")), annotation)
    annotation = re.sub(r"tuple\[\w+, \.\.\.\]", "list", annotation)
    return annotation.replace("tuple[", "[").replace("None", "null").replace("dict[str, Any]", "mapping")


def _yaml(default: str | None) -> str:
    """A default as one would write it in YAML; "required" for a key without one."""
    if default in (None, "MISSING"):
        return "required"
    plain = {"None": "null", "True": "true", "False": "false", "()": "[]"}
    value = plain.get(default or "", (default or "").strip("'\""))
    return code(value.replace("(", "[").replace(")", "]") if value.startswith("(") else value)


GENERATORS: dict[str, Callable[..., str]] = {
    "errors": error_table,
    "exit-codes": exit_codes,
    "options": own_options,
    "shared-options": shared_options,
    "cli": cli,
    "config": config,
    "metrics": metrics,
}


def regenerate(text: str) -> str:
    """The page with every generated block filled anew. Raises KeyError for a block or a message that does not exist."""
    return BLOCK.sub(lambda m: f"{m[1]}{GENERATORS[m[2]](*m[3].split())}{m[4]}", text)


def pages() -> list[Path]:
    return sorted(p for p in DOCS.rglob("*.md") if "examples" not in p.parts)


def main() -> int:
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := regenerate(text)) != text:
            stale.append(page.relative_to(DOCS))
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    print("\n".join(f"{'stale' if '--check' in sys.argv else 'written'}: {page}" for page in stale) or "all pages are current")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
