"""Where the plug-ins of a run come from: whose each is, its version and digests of its source. A checkpoint holds them.

    was, now = Origin.of(Keeper("envs", "sums", env), {"reward": "/mine/reward.py:exact"}), …
    now.change_from(was)                   # ("source 1b2f…", "source 90c4…"), or None: it is what it was

A plug-in without a state goes on in any version; what its results were made by is only said.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.plugins.discovery import discover
from posttrain.plugins.functions import without_folders
from posttrain.plugins.objects import PREFIX, held
from posttrain.plugins.state import Identity, Keeper, source_digest, source_files

SHOWN = 12
"""Digits of a digest in a message."""


@dataclass(frozen=True, slots=True)
class Origin(Identity):
    """One plug-in of a run. functions: SHA-256 of the source of each function of a person that its options name, such as a
    reward."""

    functions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, keeper: Keeper, options: Any = None) -> Origin:
        """Where a plug-in comes from, as it is on disk now. options: those that the config gives it."""
        own = {file.resolve() for file in source_files(keeper.cls)}
        named = (*strings(options), keeper.ref)  # a factory is not of the class that it makes
        functions = {ref: digest for ref in named if (digest := _digest(ref, own))}
        # the script that trains is edited by whoever resumes from it: of what it defines, its own lines count
        source = "" if keeper.cls.__module__ == "__main__" else source_digest(keeper.cls)
        return cls(keeper.kind, keeper.name, *_owner(keeper), keeper.class_name, source, functions)

    def change_from(self, was: Origin) -> tuple[str, str] | None:
        """What differs, as it was and as it is; None when nothing does. A version speaks for the source that came with it."""
        if (was.distribution, was.version) != (self.distribution, self.version):
            return was.whose, self.whose
        pairs = []
        if was._qualname != self._qualname:  # not the module: a file that was imported otherwise is the same
            pairs.append((was.class_name, self.class_name))
        if was.source and self.source and was.source != self.source:
            pairs.append((f"source {was.source[:SHOWN]}", f"source {self.source[:SHOWN]}"))
        for ref, digest in self.functions.items():
            before = was.functions.get(ref, digest)
            if before != digest:
                name = without_folders(ref)
                pairs.append((f"{name} {before[:SHOWN]}", f"{name} {digest[:SHOWN]}"))
        return (", ".join(old for old, _ in pairs), ", ".join(new for _, new in pairs)) if pairs else None

    @property
    def _qualname(self) -> str:
        return self.class_name.rpartition(":")[2]


def changes(now: Iterable[Origin], was: Iterable[Origin]) -> dict[str, tuple[str, str]]:
    """By its subject, what changed of each plug-in that is in both."""
    before = {(one.kind, one.name): one for one in was}
    found = {one.subject: one.change_from(before[one.kind, one.name]) for one in now if (one.kind, one.name) in before}
    return {subject: change for subject, change in found.items() if change is not None}


def strings(options: Any) -> Iterator[str]:
    """Every text in the options of a plug-in."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, (Mapping, list, tuple)):
        for value in options.values() if isinstance(options, Mapping) else options:
            yield from strings(value)


def _owner(keeper: Keeper) -> tuple[str, str]:
    """Distribution and version, also of one that the config does not name, such as the DataPacker of a model's type."""
    if keeper.owner[0]:
        return keeper.owner
    info = next((info for info in discover(keeper.kind) if info.value == keeper.class_name), None)
    return (info.distribution, info.version) if info else ("", "")


def _digest(ref: str, own: set[Path]) -> str:
    """SHA-256 of the source of what a text names; "" when it names no code, or code of the files `own`."""
    with contextlib.suppress(Exception):  # most texts name none, and some code has no source
        if ref.startswith(PREFIX):
            made = held(ref)
            code = made if inspect.isroutine(made) or isinstance(made, type) else type(made)
            return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()
        module, _, name = ref.rpartition(":") if ":" in ref else (ref, "", "")
        if not module.endswith(".py"):
            loaded = sys.modules[module]
            module = str(loaded.__file__) if hasattr(loaded, name.partition(".")[0]) else ""
        file = Path(module).expanduser().resolve()
        return "" if file in own else hashlib.sha256(file.read_bytes()).hexdigest()
    return ""
