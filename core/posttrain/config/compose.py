"""Hydra composes: defaults < experiments < file < call from Python < command line, as plain trees in its ConfigStore.

Nothing is checked here; `load.load_config` does that with the layers, which know where each value came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from posttrain.config.catalog import load_catalog
from posttrain.config.file import read_file
from posttrain.config.layers import Layer, Layers, merge, nest, put, segments
from posttrain.config.overrides import Typed, parse
from posttrain.config.schema import RunConfig
from posttrain.config.walker import to_tree
from posttrain.errors import ConfigError

_ROOT = "posttrain_run"


@dataclass(frozen=True, slots=True)
class Composed:
    """A merged tree (interpolations resolved, missing values as `???`), its layers, and lines to say."""

    tree: dict[str, Any]
    layers: Layers
    notes: list[str]
    experiment: str | None
    typed: list[Typed]


def compose(
    overrides: Sequence[str],
    *,
    experiment: str | None = None,
    config_file: str | Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> Composed:
    """Merge all layers. `values`: of a call from Python, by dotted path.

    Raises ConfigError for overrides, files and interpolations that cannot be read, and E15.
    """
    typed = parse(overrides)
    file = read_file(Path(config_file)) if config_file is not None else None
    selected = _selected(typed, experiment, file)
    layers, notes = [Layer("default", to_tree(RunConfig()))], []
    if selected is not None:
        catalog = load_catalog()
        notes += catalog.warnings
        try:
            layers += [Layer(f"experiment {e.name}", e.tree) for e in catalog.lineage(selected)]
        except ConfigError as exc:
            exc.add_note("\n".join(catalog.warnings))
            raise
    if file is not None:
        layers.append(Layer(file.name, {k: v for k, v in file.tree.items() if k != "experiment"}, typed=True, lines=file.lines))
    trees = [layer.tree for layer in layers]
    if values:
        merged, called = reduce(merge, trees), dict[str, Any]()
        for path, value in values.items():
            merged, called = put(merged, segments(path), value), merge(called, nest(path, value))
        trees, layers = [merged], [*layers, Layer("call", called, typed=True)]
    changes = [one for one in typed if one.key != "experiment"]
    command_line: dict[str, Any] = {}
    for one in changes:
        command_line = merge(command_line, nest(one.key, one.value))
    stack = Layers((*layers, Layer("command line", command_line, typed=True)))
    try:
        tree = hydra_compose(trees, [one.text for one in changes])
    except ConfigError as exc:
        exc.where = f"{exc.where} ({stack.origin(exc.where)})" if exc.where else ""
        raise
    return Composed(tree, stack, notes, selected, typed)


def hydra_compose(trees: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> dict[str, Any]:
    """One resolved plain tree from plain trees, lowest first, and overrides. Raises ConfigError for what Hydra refuses."""
    from hydra import compose as compose_with_hydra
    from hydra import initialize
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    store = ConfigStore.instance()
    names = [f"{_ROOT}_{i}" for i in range(len(trees))]
    for name, tree in zip(names, trees, strict=True):
        store.store(name=name, node={key: value for key, value in tree.items() if key not in ("defaults", "hydra")})
    store.store(name=_ROOT, node={"defaults": [*names, "_self_"]})
    try:
        with initialize(version_base="1.3", config_path=None):
            config = compose_with_hydra(_ROOT, overrides=list(overrides))
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except (HydraException, OmegaConfBaseException) as exc:
        raise ConfigError(
            "the configuration cannot be composed",
            cause=_cause(exc),
            fix="correct the value named",
            where=getattr(exc, "full_key", None) or "",
            code="compose",
        ) from exc
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _selected(typed: Sequence[Typed], experiment: str | None, file: Layer | None) -> str | None:
    """The experiment asked for: on the command line, else by argument, else in the file."""
    names = [one.value for one in typed if one.key == "experiment" and not one.delete]
    name = names[-1] if names else experiment if experiment is not None else file.tree.get("experiment") if file else None
    if name is not None and not isinstance(name, str):
        raise ConfigError(
            f"experiment must be one name, not {name!r}", fix="experiment=NAME; posttrain experiments list shows them"
        )
    return name or None


def _cause(exc: BaseException) -> str:
    """The innermost reason, in one line."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    text = " ".join(str(exc).split()).partition(" full_key: ")[0]  # OmegaConf adds what `where` says better
    return text.removeprefix("KeyError raised while resolving interpolation: ").strip("'\"")
