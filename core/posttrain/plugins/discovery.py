"""What is installed, from entry-point metadata alone. Nothing is imported.

`POSTTRAIN_PLUGINS` decides what is visible before anything is imported: unset, everything; `none`, only what posttrain itself
brings; `a,b`, that and the plug-ins or distributions named (`name`, `distribution`, or `distribution/name`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING

from posttrain.plugins.kinds import KINDS, kind_of

if TYPE_CHECKING:
    from posttrain.plugins.card import Card

BUILTIN = "posttrain"
ALLOW_VARIABLE = "POSTTRAIN_PLUGINS"


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One installed plug-in: plain data, picklable. `value` is `module:attr` (or a module, for experiment catalogs)."""

    kind: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def full_name(self) -> str:
        """The name that is never ambiguous; it travels to workers together with the version."""
        return f"{self.distribution}/{self.name}"

    @property
    def owner(self) -> str:
        return f"{self.distribution} {self.version}"

    @property
    def builtin(self) -> bool:
        return self.distribution == BUILTIN

    @property
    def module(self) -> str:
        return self.value.partition(":")[0]

    @property
    def card(self) -> Card:
        """Help, `api`, options and capabilities, read from the source file without importing it."""
        from posttrain.plugins.card import read_card

        return read_card(self.value, self.kind)


def discover(kind: str) -> list[PluginInfo]:
    """The visible plug-ins of a kind, sorted by name, then distribution. Names may clash; only resolving such a one fails."""
    return [info for info in installed(kind) if allowed(info)]


def installed(kind: str) -> list[PluginInfo]:
    """All plug-ins of a kind, those that POSTTRAIN_PLUGINS hides included."""
    group = kind_of(kind).group
    return [info for info in _scan(_path_key()) if f"posttrain.{info.kind}" == group]


def allowed(info: PluginInfo) -> bool:
    """Whether POSTTRAIN_PLUGINS lets this plug-in be seen."""
    setting = os.environ.get(ALLOW_VARIABLE)
    if setting is None or info.builtin:
        return True
    names = {part.strip() for part in setting.split(",")}
    return bool(names & {info.name, info.distribution, normalised(info.distribution), info.full_name})


def normalised(distribution: str) -> str:
    """A distribution's name as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _path_key() -> tuple[tuple[str, int], ...]:
    """Changes when `sys.path` does, or when something is installed into one of its folders."""
    key = []
    for path in sys.path:
        try:
            key.append((path, os.stat(path or ".").st_mtime_ns))
        except OSError:
            continue
    return tuple(key)


@lru_cache(maxsize=2)
def _scan(_key: tuple[tuple[str, int], ...]) -> tuple[PluginInfo, ...]:
    kinds = {kind.group: name for name, kind in KINDS.items()}
    found = set()
    for owner in _owners():
        points = [point for point in owner.entry_points if point.group in kinds]
        if points:
            about = owner.metadata  # parsed at each access
            name, version = about["Name"] or "unknown", about["Version"] or "0"
            found |= {PluginInfo(kinds[point.group], point.name, point.value, name, version) for point in points}
    return tuple(sorted(found, key=lambda info: (info.kind, info.name, info.distribution)))


def _owners() -> Iterator[metadata.Distribution]:
    """The distributions on `sys.path` that name a group of ours; of several of one name the first, as an import would choose.

    Asking `importlib.metadata` for all entry points parses those of every distribution, which takes several times as long.
    """
    seen: set[str] = set()
    for path in dict.fromkeys(sys.path):
        if path.endswith((".whl", ".zip", ".egg")) and os.path.isfile(path):
            yield from metadata.distributions(path=[path])
            continue
        try:
            names = os.listdir(path or ".")
        except OSError:
            continue
        for name in names:
            stem, extension = os.path.splitext(name)
            distribution = normalised(stem.partition("-")[0])
            if extension not in (".dist-info", ".egg-info") or distribution in seen:
                continue
            seen.add(distribution)
            folder = os.path.join(path, name)
            if _mentions_us(os.path.join(folder, "entry_points.txt")):
                yield metadata.Distribution.at(folder)


def _mentions_us(file: str) -> bool:
    try:
        with open(file, "rb") as opened:
            return b"posttrain." in opened.read()
    except OSError:
        return False
