"""The kinds of plug-ins: entry-point group, base class and what a person calls them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from posttrain.errors import ConfigError

SUPPORTED_APIS = (1,)
"""Versions of the plug-in contracts that this posttrain can drive. A plug-in that names none means 1."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of plug-in.

    name      as in `discover(name)` and in the group `posttrain.<name>`
    noun      as in a sentence
    base      `module:Class` that a plug-in subclasses; imported only to check one. None: not a class (experiment catalogs)
    factory   whether a zero-argument callable that returns an instance is accepted too
    """

    name: str
    noun: str
    base: str | None
    factory: bool = False

    @property
    def group(self) -> str:
        return f"posttrain.{self.name}"

    @property
    def base_class(self) -> type:
        """The base class itself. Importing it may be slow."""
        assert self.base is not None
        module, _, attr = self.base.partition(":")
        cls: type = getattr(importlib.import_module(module), attr)
        return cls


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("algorithms", "algorithm", "posttrain.objective.algorithm:Algorithm"),
        Kind("datapackers", "DataPacker", "posttrain.data.packer:DataPacker", factory=True),
        Kind("envs", "environment", "posttrain.data.environment:Environment"),
        Kind("engines", "engine", "posttrain.rollout.engine:Engine"),
        Kind("transports", "transport", "posttrain.weights.transport:Transport"),
        Kind("experiments", "experiment catalog", None),
    )
}


def kind_of(name: str) -> Kind:
    """The kind called `name`. Raises ConfigError with the known ones."""
    if name not in KINDS:
        raise ConfigError(f"no kind of plug-in is called {name!r}", fix=f"one of: {', '.join(KINDS)}", code="plugin-kind")
    return KINDS[name]
