"""`load_config`: overrides, experiment and file in, a checked RunConfig out, or one error that names everything wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.config.anywhere import absolute_files
from posttrain.config.call import keyword
from posttrain.config.compose import Composed, compose
from posttrain.config.fit import check_fit
from posttrain.config.flat_keys import renamed, renamed_entry
from posttrain.config.layers import ABSENT, Layers, leaves
from posttrain.config.plugin_options import PluginCheck
from posttrain.config.report import refuse
from posttrain.config.rules import check_rules
from posttrain.config.schema import Plugin, RunConfig
from posttrain.config.secrets import HIDDEN, conceal, conceal_text, guard
from posttrain.config.walker import Problem, Walker, fields_of, paths_of, show, to_tree
from posttrain.plugins.doctor import quarantined
from posttrain.plugins.resolution import resolve


@dataclass(frozen=True)
class LoadedConfig:
    """A config that can work.

    config      the frozen dataclasses
    tree        the same as a plain tree, every default written out, without secrets: what a run writes down
    origins     for each key that is not a default, where its value came from
    notes       lines to say when the run starts
    overrides   as typed, without secrets
    experiment  the selected one, or None
    changed     for each key that was typed for this run (file, call, command line): what it would have been, and what it is
    """

    config: RunConfig
    tree: dict[str, Any]
    origins: dict[str, str]
    notes: list[str]
    overrides: tuple[str, ...] = ()
    experiment: str | None = None
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def yaml(self) -> str:
        """The resolved config as `--config` takes it."""
        return resolved_yaml(self.config)


def load_config(
    overrides: Sequence[str] = (),
    *,
    experiment: str | None = None,
    config_file: str | Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Compose and check a config. Loads Hydra's compose, the selected algorithm and environments, nothing of torch itself.

    overrides: `["experiment=arithmetic_grpo", "rl.steps=3"]`. values: the same from Python, by dotted path
    (`call.call_values`). Order: defaults < experiment < config_file < values < overrides.
    Raises ConfigError with every problem and the origin of each value; when there is one problem only and it has an error of
    its own (E1 to E4, a plug-in's), that error.
    """
    composed = compose(overrides, experiment=experiment, config_file=config_file, values=values)
    walker = Walker(paths_of(RunConfig), hint=_flat_hint)
    walker.problems += [*_reserved(composed), *_hidden(composed.tree)]
    config = walker.build(RunConfig, guard(composed.tree))
    if config.model.factory is not None:
        walker.problems = [p for p in walker.problems if (p.path, p.what) != ("model.name_or_path", "missing value")]
    notes = list(composed.notes)
    early = list(walker.problems)
    rules = check_rules(config, early)
    config = PluginCheck(composed.layers, walker, notes).run(config)
    found = [*walker.problems, *rules]
    problems = [_decoded(problem, composed) for problem in (*found, *check_fit(config, found))]
    if problems:
        if values is not None:
            problems = [_in_a_call(problem) for problem in problems]
        raise refuse(problems, origin=composed.layers.origin)
    config = absolute_files(config)
    notes += [f"quarantined {finding}; fix: {finding.fix}" for finding in quarantined()]
    tree = conceal(to_tree(config))
    origins = {path: origin for path, _ in leaves(tree) if (origin := composed.layers.origin(path)) != "default"}
    origins |= _chosen(config.rl.objective, composed)
    typed = [*(f"{path}={show(value)}" for path, value in (values or {}).items()), *overrides]
    changed = _changed(tree, composed.layers)
    return LoadedConfig(config, tree, origins, notes, tuple(map(conceal_text, typed)), composed.experiment, changed)


def resolved_yaml(config: RunConfig) -> str:
    """A config as YAML that `--config` takes back unchanged. Secrets are written as `${oc.env:NAME}` or hidden."""
    import yaml

    return yaml.safe_dump(conceal(to_tree(config)), sort_keys=False, allow_unicode=True, width=120)


def _in_a_call(problem: Problem) -> Problem:
    missing = problem.what == "missing value"
    return replace(problem, fix=f"give it: {keyword(problem.path, problem.fix)}") if missing else problem


def _flat_hint(path: str, value: Any) -> str:
    if "." in path:
        return renamed_entry(path)
    return renamed(path, show(value).strip("'") if isinstance(value, (str, int, float, bool)) else "")


def _decoded(problem: Problem, composed: Composed) -> Problem:
    """A problem of a value out of an environment variable, with the fix for what is text there."""
    raw = composed.layers[problem.path].get(problem.path) if problem.path else None
    if not (isinstance(raw, str) and raw.startswith("${oc.env:") and problem.what.startswith("must be ")):
        return problem
    return Problem(problem.path, problem.what, f"an environment variable is text; write ${{oc.decode:{raw}}}")


def _changed(tree: Mapping[str, Any], layers: Layers) -> dict[str, tuple[Any, Any]]:
    """`path: (value of experiment or default, value)` of what this run was given otherwise. tree: without secrets."""
    inherited = Layers(tuple(layer for layer in layers.layers if not layer.typed))
    found = {}
    for path, value in leaves(tree):
        given = inherited[path].get(path)
        was = None if given is ABSENT else conceal(given, key=path)
        if layers[path].typed and value != was:
            found[path] = (was, value)
    return found


def _chosen(objective: Plugin, composed: Composed) -> dict[str, str]:
    """The options of the objective that were left to it, and that it chose by what the run is: their origin is `auto`."""
    defaults = {field.name: field.default for field in fields_of(resolve("algorithms", objective.name).Options)}
    found = {}
    for name, value in objective.options.items():
        path = f"rl.objective.{name}"
        given = composed.layers[path].get(path)
        if given is ABSENT and value != defaults.get(name):
            found[path] = "auto"
        elif given is not ABSENT and given in ("auto", None) and value != given:
            found[path] = f"{composed.layers.origin(path)}, auto"
    return found


def _reserved(composed: Composed) -> list[Problem]:
    """Keys that belong to Hydra or to catalogs and mean nothing in a tree."""
    fixes = {
        "defaults": "only experiments inherit by defaults; in a file write experiment: NAME",
        "hydra": "settings of Hydra are for --multirun",
    }
    found = [key for layer in composed.layers.layers for key in layer.tree if key in fixes]
    return [Problem(key, "unknown key", fixes[key]) for key in dict.fromkeys(found)]


def _hidden(tree: Any, path: str = "") -> list[Problem]:
    """Values that were hidden when the config was saved."""
    if isinstance(tree, Mapping):
        return [p for key, value in tree.items() for p in _hidden(value, f"{path}.{key}" if path else str(key))]
    if isinstance(tree, list):
        return [p for i, value in enumerate(tree) for p in _hidden(value, f"{path}[{i}]")]
    if tree == HIDDEN:
        return [Problem(path, "was hidden when the config was saved", "give it through the environment: ${oc.env:NAME}")]
    return []
