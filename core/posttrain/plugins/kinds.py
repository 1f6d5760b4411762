"""The kinds of plug-ins: entry-point group, base class and what a person calls them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from posttrain.errors import ConfigError

API = 1
"""The version of the plug-in contracts. This posttrain drives plug-ins of this version and of the one before it; a plug-in that
names none means 1. It changes only when a plug-in has to be changed (see docs/reference/stability.md)."""


def supported_apis() -> tuple[int, ...]:
    """The accepted versions, oldest first: the previous and the current one; there is no version before 1."""
    return tuple(range(max(API - 1, 1), API + 1))


def speaks(api: object) -> bool:
    """Whether plug-ins of this version are accepted."""
    return isinstance(api, int) and not isinstance(api, bool) and api in supported_apis()


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of plug-in.

    name      as in `discover(name)` and in the group `posttrain.<name>`
    noun      as in a sentence
    base      `module:Class` that a plug-in subclasses; imported only to check one. None: not a class (experiment catalogs)
    factory   whether a zero-argument callable that returns an instance is accepted too
    instance  whether an instance that a person made is accepted too
    init      what posttrain hands to the constructor, by name
    """

    name: str
    noun: str
    base: str | None
    factory: bool = False
    instance: bool = False
    init: tuple[str, ...] = ("options",)

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
        Kind("algorithms", "algorithm", "posttrain.objective.algorithm:Algorithm", init=("options", "context")),
        Kind("datapackers", "DataPacker", "posttrain.data.packer:DataPacker", factory=True, init=()),
        Kind("envs", "environment", "posttrain.data.environment:Environment", instance=True),
        Kind("engines", "engine", "posttrain.rollout.engine:Engine", init=("spec", "options")),
        Kind("transports", "transport", "posttrain.weights.transport:Transport"),
        Kind("hooks", "hook", "posttrain.hooks.hook:Hook", instance=True),
        Kind("experiments", "experiment catalog", None),
    )
}


def kind_of(name: str) -> Kind:
    """The kind called `name`. Raises ConfigError with the known ones."""
    if name not in KINDS:
        raise ConfigError(f"no kind of plug-in is called {name!r}", fix=f"one of: {', '.join(KINDS)}", code="plugin-kind")
    return KINDS[name]
