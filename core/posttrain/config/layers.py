"""The layers of a config, lowest first, and which of them set a key: default, experiments, file, command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of values. typed: written for this run (file, command line), not inherited. lines: of a file, by path."""

    name: str
    tree: Mapping[str, Any]
    typed: bool = False
    lines: Mapping[str, int] = field(default_factory=dict)

    def sets(self, path: str) -> bool:
        """Whether the layer gives `path`, something inside it, or the whole that it is in."""
        node: Any = self.tree
        for key in segments(path):
            if isinstance(node, Mapping) and key in node:
                node = node[key]
            elif isinstance(node, (list, tuple)) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                return False
        return True

    def label(self, path: str) -> str:
        """The layer's name, with the line for a file."""
        parts = segments(path)
        known = (self.lines.get(".".join(parts[:end])) for end in range(len(parts), 0, -1))
        line = next((line for line in known if line), None)
        return f"{self.name}:{line}" if line else self.name


@dataclass(frozen=True, slots=True)
class Layers:
    """All layers of one config, lowest first."""

    layers: tuple[Layer, ...]

    def index(self, path: str) -> int:
        """The highest layer that gives `path`; 0 when only the defaults do."""
        return max((i for i, layer in enumerate(self.layers) if layer.sets(path)), default=0)

    def __getitem__(self, path: str) -> Layer:
        return self.layers[self.index(path)]

    def origin(self, path: str) -> str:
        """Where the value of `path` came from: `default`, `experiment NAME`, `FILE:LINE` or `command line`."""
        return self[path].label(path)


def segments(path: str) -> list[str]:
    """`a.b[0].c` as its keys; indices as text."""
    return [part for part in re.split(r"[.\[\]]+", path) if part]


def nest(path: str, value: Any) -> dict[str, Any]:
    """A tree with `value` at `path`."""
    tree: Any = value
    for key in reversed(segments(path)):
        tree = {key: tree}
    return tree if isinstance(tree, dict) else {}


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merged key by key, everything else replaced; neither argument is changed."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_file(path: Path) -> Layer:
    """A config file as a layer. Raises ConfigError when it is absent, not YAML or not a mapping."""
    import yaml
    from omegaconf import OmegaConf

    try:
        text = path.read_text(encoding="utf-8")
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if text.strip() else {}
        lines = _lines(yaml.compose(text)) if text.strip() else {}
    except OSError as exc:
        raise ConfigError(
            f"cannot read config file {path}", cause=exc.strerror or str(exc), fix="check the path of --config"
        ) from exc
    except Exception as exc:
        cause = " ".join(str(exc).split())
        raise ConfigError(f"{path} is not a valid YAML file", cause=cause, fix="correct the file at the line named") from exc
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must hold a mapping of keys", cause=f"it holds a {type(tree).__name__}", fix="write key: value lines"
        )
    return Layer(path.name, {str(key): value for key, value in tree.items()}, typed=True, lines=lines)


def _lines(node: Any, prefix: str = "") -> dict[str, int]:
    """The line of every key of a YAML document, by path."""
    found: dict[str, int] = {}
    children = (
        [(str(i), item, item) for i, item in enumerate(node.value)]
        if node.id == "sequence"
        else [(str(key.value), key, item) for key, item in (node.value if node.id == "mapping" else ())]
    )
    for name, key, item in children:
        path = f"{prefix}.{name}" if prefix else name
        found[path] = key.start_mark.line + 1
        if item.id in ("mapping", "sequence"):
            found |= _lines(item, path)
    return found
