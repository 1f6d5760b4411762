"""The layers of a config, lowest first, and which of them set a key: default, experiments, file, command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class _Absent:
    def __repr__(self) -> str:
        return "–"


ABSENT: Any = _Absent()
"""The value of a key that is not there: equal to no value."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of values. typed: written for this run (file, command line), not inherited. lines: of a file, by path."""

    name: str
    tree: Mapping[str, Any]
    typed: bool = False
    lines: Mapping[str, int] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """What the layer gives at `path`; a value of its own, equal to no other, when nothing."""
        node: Any = self.tree
        for key in segments(path):
            if isinstance(node, Mapping) and key in node:
                node = node[key]
            elif isinstance(node, (list, tuple)) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                return ABSENT
        return node

    def sets(self, path: str) -> bool:
        """Whether the layer gives `path`, something inside it, or the whole that it is in."""
        return self.get(path) is not ABSENT

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


def put(tree: Any, keys: Sequence[str], value: Any) -> Any:
    """`tree` with `value` merged in at `keys`, which may lead through lists by index; the argument is not changed."""
    if not keys:
        return merge(tree, value) if isinstance(tree, Mapping) and isinstance(value, Mapping) else value
    key, *rest = keys
    if isinstance(tree, list) and key.isdigit() and int(key) < len(tree):
        return [put(item, rest, value) if i == int(key) else item for i, item in enumerate(tree)]
    known = tree if isinstance(tree, Mapping) else {}
    return {**known, key: put(known.get(key), rest, value)}


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """`(path, value)` of everything in a plain tree; an empty mapping and a list of plain values are one leaf."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, (list, tuple)) and tree and isinstance(tree[0], Mapping):
        for i, value in enumerate(tree):
            yield from leaves(value, f"{path}[{i}]")
    else:
        yield path, list(tree) if isinstance(tree, tuple) else tree


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """`path: (old value, new value)` of everything that differs, in the order of the trees; what one side lacks is `ABSENT`."""
    before, after = dict(leaves(old)), dict(leaves(new))
    both = ((path, (before.get(path, ABSENT), after.get(path, ABSENT))) for path in {**before, **after})
    return {path: values for path, values in both if values[0] != values[1] or type(values[0]) is not type(values[1])}
