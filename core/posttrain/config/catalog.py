"""The `experiment=` catalog: Python modules that define `EXPERIMENTS: dict[str, dict]`, found through `posttrain.experiments`.

    # my_lab/experiments.py, with the entry point  my_lab = "my_lab.experiments"
    '''Experiments of my lab.'''
    EXPERIMENTS = {
        "wordle_grpo": {"rl": {"steps": 100, "objective": {"name": "grpo"}}, "environments": [{"name": "wordle"}]},
        "wordle_rloo": {"defaults": ["wordle_grpo"], "rl": {"objective": {"name": "rloo"}}},
    }

Each module is imported on its own and must not import torch. One that needs an absent distribution is skipped with one warning;
one that fails in another way is quarantined, and its error is raised when an experiment in it, or inherited from it, is selected.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import ConfigError, PosttrainError, error
from posttrain.plugins.card import find_source
from posttrain.plugins.discovery import PluginInfo, discover
from posttrain.plugins.kinds import KINDS
from posttrain.plugins.problems import distribution_of, import_failed, install_command, missing_dependency
from posttrain.plugins.resolution import import_target


@dataclass(frozen=True, slots=True)
class Experiment:
    """One named config: its own tree, and the experiments it starts from. `help`: first line of its catalog's docstring."""

    name: str
    tree: dict[str, Any]
    parents: tuple[str, ...]
    module: PluginInfo
    help: str = ""


@dataclass(slots=True)
class Catalog:
    """All experiments by name, and the modules that could not be read.

    skipped   modules that need an absent dependency, with the absent top-level module
    broken    modules that failed otherwise, with the error
    """

    experiments: dict[str, list[Experiment]] = field(default_factory=dict)
    skipped: dict[PluginInfo, str] = field(default_factory=dict)
    broken: dict[PluginInfo, PosttrainError] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """One line for all skipped modules, one for each quarantined one."""
        lines = []
        if self.skipped:
            absent = sorted({distribution_of(module) for module in self.skipped.values()})
            lines.append(f"skipped {len(self.skipped)} experiment module(s) needing absent optional dependencies {absent}")
        return [
            *lines,
            *(f"quarantined {info.module} ({info.owner}): {exc.cause or exc.message}" for info, exc in self.broken.items()),
        ]

    def lineage(self, name: str) -> list[Experiment]:
        """The experiment and all it inherits, in the order of application, each once.

        Raises E15 for a name that is missing or skipped, the module's own error for a quarantined one.
        """
        order: list[Experiment] = []
        self._visit(name, (), order)
        return order

    def _visit(self, name: str, path: tuple[str, ...], order: list[Experiment]) -> None:
        if name in path:
            raise ConfigError(
                f"experiment {path[0]!r} inherits from itself: {' → '.join([*path, name])}",
                fix="remove one of these defaults",
                code="experiment-cycle",
            )
        experiment = self._get(name, path)
        if experiment in order:
            return
        for parent in experiment.parents:
            self._visit(parent, (*path, name), order)
        order.append(experiment)

    def _get(self, name: str, path: tuple[str, ...]) -> Experiment:
        found = self.experiments.get(name, [])
        if len(found) == 1:
            return found[0]
        if found:
            homes = " and ".join(f"{experiment.module.module} ({experiment.module.owner})" for experiment in found)
            raise ConfigError(
                f"experiment {name!r} is ambiguous: {homes} define it",
                fix="rename one of them, or hide one distribution with POSTTRAIN_PLUGINS",
                code="experiment-ambiguous",
            )
        for info, exc in self.broken.items():
            if name in names_in_source(info.module):
                exc.where = f"experiment/{name}" + (f", which {path[-1]!r} inherits" if path else "")
                raise exc
        raise self._missing(name, path)

    def _missing(self, name: str, path: tuple[str, ...]) -> PosttrainError:
        inherits = f"{path[-1]!r} inherits from it; " if path else ""
        for info, module in self.skipped.items():
            if name in names_in_source(info.module):
                absent = f"it needs {distribution_of(module)}, which is not installed"
                reason = f"{inherits}{info.module} ({info.owner}) defines it and was skipped: {absent}"
                return error("E15", name=name, reason=reason, remedy=install_command(module, info))
        known = [*self.experiments, *(n for info in self.skipped for n in names_in_source(info.module))]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        reason = f"no catalog defines it; known: {', '.join(sorted(self.experiments)) or 'none'}"
        unread = [info.module for info in (*self.skipped, *self.broken) if not names_in_source(info.module)]
        if unread:
            reason += f"; it may be in {', '.join(unread)}, which could not be read"
        remedy = f"did you mean {' or '.join(near)}?" if near else "choose one of these; posttrain experiments list shows them"
        return error("E15", name=name, reason=inherits + reason, remedy=remedy)


def load_catalog() -> Catalog:
    """Import every catalog module, each on its own. Never raises for one of them."""
    catalog = Catalog()
    for info in discover("experiments"):
        try:
            module = import_target(info.value)
            for experiment in _read(module, info):
                catalog.experiments.setdefault(experiment.name, []).append(experiment)
        except PosttrainError as exc:
            catalog.broken[info] = exc
        except (Exception, SystemExit) as exc:
            absent = missing_dependency(exc, info.value)
            if absent:
                catalog.skipped[info] = absent
            else:
                failed = import_failed(KINDS["experiments"], info.name, info.value, info, exc)
                failed.__cause__ = exc
                catalog.broken[info] = failed
    return catalog


def names_in_source(module: str) -> list[str]:
    """The experiment names that a module writes down as literal keys, read without importing it."""
    file = find_source(module)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8")) if file else None
    except (OSError, SyntaxError, ValueError):
        return []
    names = []
    for node in tree.body if tree else ():
        value = getattr(node, "value", None)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(value, ast.Dict) and any(isinstance(t, ast.Name) and t.id == "EXPERIMENTS" for t in targets):
            names += [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return names


def _read(module: Any, info: PluginInfo) -> list[Experiment]:
    entries = getattr(module, "EXPERIMENTS", None)
    if not isinstance(entries, Mapping) or not all(isinstance(v, Mapping) for v in entries.values()):
        raise ConfigError(
            f"experiment catalog {info.module} ({info.owner}) has no EXPERIMENTS: dict[str, dict]",
            fix="define EXPERIMENTS = {name: tree} in it",
            code="experiment-catalog",
        )
    doc = (module.__doc__ or "").strip().partition("\n")[0]
    found = []
    for name, entry in entries.items():
        parents = entry.get("defaults", [])
        if not isinstance(parents, (list, tuple)) or not all(isinstance(parent, str) for parent in parents):
            raise ConfigError(
                f"experiment {name!r} in {info.module} has defaults={parents!r}",
                fix="defaults is a list of experiment names: defaults: [other]",
                code="experiment-catalog",
            )
        tree = {key: value for key, value in entry.items() if key != "defaults"}
        found.append(Experiment(str(name), tree, tuple(p for p in parents if p != "_self_"), info, doc))
    return found
