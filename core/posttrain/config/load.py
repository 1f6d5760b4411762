"""`load_config`: overrides, experiment and file in, a checked RunConfig out, or one error that names everything wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.compose import Composed, compose
from posttrain.config.flat_keys import renamed
from posttrain.config.plugin_options import PluginCheck
from posttrain.config.report import refuse
from posttrain.config.rules import check_rules
from posttrain.config.schema import RunConfig
from posttrain.config.secrets import HIDDEN, conceal, conceal_text, guard
from posttrain.config.walker import Problem, Walker, paths_of, show, to_tree
from posttrain.plugins.doctor import quarantined


@dataclass(frozen=True)
class LoadedConfig:
    """A config that can work.

    config      the frozen dataclasses
    tree        the same as a plain tree, every default written out, without secrets: what a run writes down
    origins     for each key that is not a default, where its value came from
    notes       lines to say when the run starts
    overrides   as typed, without secrets
    experiment  the selected one, or None
    """

    config: RunConfig
    tree: dict[str, Any]
    origins: dict[str, str]
    notes: list[str]
    overrides: tuple[str, ...] = ()
    experiment: str | None = None

    def yaml(self) -> str:
        """The resolved config as `--config` takes it."""
        return resolved_yaml(self.config)


def load_config(
    overrides: Sequence[str] = (), *, experiment: str | None = None, config_file: str | Path | None = None
) -> LoadedConfig:
    """Compose and check a config. Loads Hydra's compose, the selected algorithm and environments, nothing of torch itself.

    overrides: `["experiment=arithmetic_grpo", "rl.steps=3"]`. Order: defaults < experiment < config_file < overrides.
    Raises ConfigError with every problem and the origin of each value; when there is one problem only and it has an error of
    its own (E1 to E4, a plug-in's), that error.
    """
    composed = compose(overrides, experiment=experiment, config_file=config_file)
    walker = Walker(paths_of(RunConfig), hint=_flat_hint)
    walker.problems += [*_reserved(composed), *_hidden(composed.tree)]
    config = walker.build(RunConfig, guard(composed.tree))
    if config.model.factory is not None:
        walker.problems = [p for p in walker.problems if (p.path, p.what) != ("model.name_or_path", "missing value")]
    notes = list(composed.notes)
    early = list(walker.problems)
    rules = check_rules(config, early)
    config = PluginCheck(composed.layers, walker, notes).run(config)
    problems = [*walker.problems, *rules]
    if problems:
        raise refuse(problems, origin=composed.layers.origin)
    notes += [f"quarantined {finding}; fix: {finding.fix}" for finding in quarantined()]
    tree = conceal(to_tree(config))
    origins = {path: origin for path in _leaves(tree) if (origin := composed.layers.origin(path)) != "default"}
    return LoadedConfig(config, tree, origins, notes, tuple(map(conceal_text, overrides)), composed.experiment)


def resolved_yaml(config: RunConfig) -> str:
    """A config as YAML that `--config` takes back unchanged. Secrets are written as `${oc.env:NAME}` or hidden."""
    import yaml

    return yaml.safe_dump(conceal(to_tree(config)), sort_keys=False, allow_unicode=True, width=120)


def _flat_hint(key: str, value: Any) -> str:
    return renamed(key, show(value).strip("'") if isinstance(value, (str, int, float, bool)) else "")


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


def _leaves(tree: Any, path: str = "") -> list[str]:
    if isinstance(tree, Mapping) and tree:
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{path}.{key}" if path else str(key))]
    if isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        return [leaf for i, value in enumerate(tree) for leaf in _leaves(value, f"{path}[{i}]")]
    return [path]
