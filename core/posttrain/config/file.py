"""A config file (YAML, or JSON by its suffix) as a layer: its tree, and the line of every key.

Stricter than YAML: a key given twice is refused with both lines (YAML would take the last), and so is one of our keys written
with dots (`rl.steps: 3`), which YAML takes for a name with a dot in it. Paths inside the file are relative to the working
directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config.layers import Layer
from posttrain.config.schema import RunConfig
from posttrain.config.walker import paths_of
from posttrain.errors import ConfigError


def read_file(path: Path) -> Layer:
    """A config file as a layer. Raises ConfigError when it cannot be read, with the line where there is one."""
    from omegaconf import OmegaConf

    text = _text(path)
    if path.suffix == ".json":
        text = _checked_json(path, text).expandtabs(2)  # outside strings, tabs are the one thing of JSON that YAML refuses
    root = _parsed(path, text)
    if root is None or root.id != "mapping":
        cause = "it is empty" if root is None else f"it holds a {root.id}"
        raise ConfigError(f"{path} must hold a mapping of keys", cause=cause, fix="write key: value lines", code="config-file")
    _refuse_loops(path, root)
    _refuse_twice(path, root)
    _refuse_dotted(path, root)
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as exc:
        cause = " ".join(str(exc).split())
        raise ConfigError(f"{path} is not a config file", cause=cause, fix="correct the value named", code="config-file") from exc
    assert isinstance(tree, dict)
    return Layer(path.name, {str(key): value for key, value in tree.items()}, typed=True, lines=dict(_lines(root)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        line = exc.object[: exc.start].count(b"\n") + 1
        raise ConfigError(
            f"{path} is not UTF-8 text", cause=exc.reason, fix="save it as UTF-8", where=f"{path}:{line}", code="config-file"
        ) from exc
    except OSError as exc:
        fix = f"--config {path}/config.yaml" if (path / "config.yaml").is_file() else "check the path of --config"
        raise ConfigError(f"cannot read config file {path}", cause=exc.strerror or str(exc), fix=fix) from exc


def _checked_json(path: Path, text: str) -> str:
    try:
        json.loads(text or "{}")
    except json.JSONDecodeError as exc:
        raise _invalid(path, "JSON", exc.lineno, exc.msg, text) from exc
    return text


def _parsed(path: Path, text: str) -> Any:
    """The document's node tree; None for an empty one."""
    import yaml

    try:
        return yaml.compose(text)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        raise _invalid(path, "YAML", mark.line + 1 if mark else 1, exc.problem or exc.context or "", text) from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path} is not valid YAML", cause=" ".join(str(exc).split()), where=str(path)) from exc


def _invalid(path: Path, kind: str, line: int, problem: str, text: str) -> ConfigError:
    lines = text.splitlines()
    shown = lines[line - 1] if 0 < line <= len(lines) else "the end of the file"
    tab = kind == "YAML" and "\t" in shown[: len(shown) - len(shown.lstrip())]
    return ConfigError(
        f"{path} is not valid {kind}",
        cause=f"{problem}: {shown.strip()}",
        fix="indent with spaces: YAML takes no tabs" if tab else "correct that line, or the one above",
        where=f"{path}:{line}",
        code="config-file",
    )


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """`(path, node whose line counts, value node)` of every key and list item, in the order of the file."""
    children = (
        [(str(i), item, item) for i, item in enumerate(node.value)]
        if node.id == "sequence"
        else [(str(key.value), key, item) for key, item in (node.value if node.id == "mapping" else ())]
    )
    for name, key, item in children:
        path = f"{prefix}.{name}" if prefix else name
        yield path, key, item
        if item.id in ("mapping", "sequence"):
            yield from _walk(item, path)


def _lines(root: Any) -> Iterator[tuple[str, int]]:
    return ((path, key.start_mark.line + 1) for path, key, _ in _walk(root))


def _refuse_loops(path: Path, node: Any, above: tuple[Any, ...] = ()) -> None:
    """Refuse an anchor that is inside itself (`a: &a [*a]`): it has no end."""
    if any(node is one for one in above):
        raise ConfigError(
            f"{path} holds a value that contains itself",
            cause="an alias (*NAME) stands inside its own anchor (&NAME)",
            fix="write the value out",
            where=f"{path}:{node.start_mark.line + 1}",
            code="config-file",
        )
    if node.id in ("mapping", "sequence"):
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                _refuse_loops(path, part, (*above, node))


def _refuse_twice(path: Path, root: Any) -> None:
    seen: dict[str, int] = {}
    for key, line in _lines(root):
        if key in seen:
            raise ConfigError(
                f"{key} is given twice, in lines {seen[key]} and {line}",
                cause="YAML would take the last and say nothing",
                fix="keep one of them",
                where=f"{path}:{line}",
                code="config-file",
            )
        seen[key] = line


def _refuse_dotted(path: Path, root: Any) -> None:
    known = set(paths_of(RunConfig))
    found = [
        (str(key.value), key.start_mark.line + 1)
        for full, key, item in _walk(root)
        if key is not item and "." in str(key.value) and (full in known or full.startswith("rl.objective."))
    ]
    if found:
        name, line = found[0]
        keys = name.split(".")
        raise ConfigError(
            "\n  ".join([f"{path} has dotted keys, which belong on the command line:", *(f"line {n}: {k}" for k, n in found)]),
            cause="in a file, a dot is part of the name",
            fix=f"nest them: {': {'.join(keys)}: …{'}' * (len(keys) - 1)}",
            where=f"{path}:{line}",
            code="config-file",
        )
