"""Whether the parts that a config selects fit together: which they are, and what each needs and provides.

    check_fit      when a config is checked: from classes, or the source of what is not imported before it is made
    refuse_misfits before the model loads, and in a dry run: from the objects, whose options may change what they need

The rule itself, and what can be needed, is in `plugins.capabilities`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from posttrain.config.schema import MISSING, NO_ENGINE, RunConfig
from posttrain.config.walker import Problem
from posttrain.errors import PluginError, PosttrainError
from posttrain.plugins.capabilities import Declared, Part, added, capability_fault, declared, misfit, misfits
from posttrain.plugins.discovery import discover
from posttrain.plugins.functions import without_folders
from posttrain.plugins.kinds import KINDS
from posttrain.plugins.problems import ANCHOR, subject
from posttrain.plugins.resolution import find, resolve

if TYPE_CHECKING:
    from posttrain.objective.algorithm import Algorithm

FROM_SOURCE = ("engines", "transports", "datapackers", "hooks")
"""Kinds whose built-in plug-ins are imported when they are made, so that a config is checked without torch."""

_NONE = Declared(needs=("pairs",), provides=("no_sampling",))
"""Of a run without an engine."""


def check_fit(config: RunConfig, earlier: Iterable[Problem] = ()) -> list[Problem]:
    """One problem with the table of everything that does not fit, or none. Keys with an earlier problem are left out."""
    found = misfits(selected(config, bad={problem.path for problem in earlier}))
    if not found:
        return []
    exc = misfit(found, offers)
    return [Problem("", f"{exc.message}\n         {exc.cause}", exc.fix, exc)]


def refuse_misfits(config: RunConfig, made: Mapping[str, Any]) -> None:
    """Raise ConfigError (misfit) with the table when the parts do not fit, PluginError when one names no capability.

    made: the objects by the key that selects them; what is not among them is taken from the config.
    """
    if found := misfits(selected(config, made)):
        raise misfit(found, offers)


def selected(config: RunConfig, made: Mapping[str, Any] = {}, bad: Iterable[str] = ()) -> Iterator[Part]:
    """Every part that a config selects and that can be told; `bad`: keys that mean nothing because they have a problem."""
    bad = set(bad)
    groups = ("groups",) if config.rl.group_size > 1 or "rl.group_size" in bad else ()
    yield Part("run", "a run of posttrain", "", "", Declared(provides=("old_logprobs", "reference", *groups)))
    yield grid(config.grid.backend)
    width = config.rollout.tensor_parallel_size
    if width > 1 and "rollout.tensor_parallel_size" not in bad:
        where = "rollout.tensor_parallel_size"
        yield Part("config", f"{where}={width}", "", where, Declared(needs=("tensor_parallel",)))
    if config.rl.overlong_penalty_factor and "rl.overlong_penalty_factor" not in bad:
        where = "rl.overlong_penalty_factor"
        yield Part("config", f"{where}={config.rl.overlong_penalty_factor:g}", "", where, Declared(lacks=("binary_rewards",)))
    for kind, name, where in plugins_of(config):
        if name == NO_ENGINE and kind == "engines":
            yield Part("engines", NO_ENGINE, "", where, _NONE)
        elif where in made or where not in bad:
            yield from _part(kind, name, where, made.get(where))


def plugins_of(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """`(kind, name, key)` of every plug-in that a config names. A transport that is `auto` fits its engine."""
    yield "algorithms", config.rl.objective.name, "rl.objective.name"
    for i, environment in enumerate(config.environments):
        yield "envs", environment.name, f"environments[{i}].name"
    yield "engines", config.rollout.engine, "rollout.engine"
    if config.rollout.engine != NO_ENGINE and config.weights.transport != "auto":
        yield "transports", config.weights.transport, "weights.transport"
    yield "datapackers", config.rl.data.packer or MISSING, "rl.data.packer"
    for i, hook in enumerate(config.hooks):
        yield "hooks", hook.name, f"hooks[{i}].name"


def grid(backend: str) -> Part:
    """The grid: under Ray roles are processes of their own."""
    ray = Declared(needs=("between_processes",), provides=("tensor_parallel",))
    return Part("grid", f"grid.backend={backend}", "", "grid.backend", ray if backend == "ray" else Declared())


def offers(role: str) -> Iterator[Part]:
    """What else could be selected in a role, as far as its source tells."""
    if role == "grid":
        yield grid("ray")
    if role == "engines":
        yield Part("engines", NO_ENGINE, "", "", _NONE)
    for info in discover(role) if role in KINDS else ():
        yield Part(role, info.name, info.owner, "", info.card.declared)


def _part(kind: str, name: str, where: str, made: Any) -> Iterator[Part]:
    """The part, unless nothing is known of it: it cannot be loaded, which others tell, or a function will make it."""
    try:
        info = None if name == MISSING else find(kind, name)
        if made is not None:
            said = _of_object(kind, name if name != MISSING else type(made).__name__, made, where)
        elif name == MISSING:
            return
        elif info is not None and info.builtin and kind in FROM_SOURCE:
            said = info.card.declared
        else:
            loaded = resolve(kind, name)
            if not isinstance(loaded, (type, KINDS[kind].base_class)):
                return
            said = declared(kind, loaded)
    except PosttrainError:
        if made is not None:
            raise
        return
    label = type(made).__name__ if name == MISSING else without_folders(name)
    yield Part(kind, label, info.owner if info else "", where, said)


def _of_object(kind: str, name: str, made: Any, where: str) -> Declared:
    if wrong := capability_fault(kind, made):
        raise PluginError(
            f"{subject(KINDS[kind], name, None)} {wrong[0]}", fix=wrong[1], where=where, code="plugin-capability", anchor=ANCHOR
        )
    said = declared(kind, made)
    return added(said, "needs", *algorithm_needs(made)) if kind == "algorithms" else said


def algorithm_needs(algorithm: Algorithm) -> Iterator[str]:
    """What an algorithm needs with its options."""
    options = algorithm.options
    if algorithm.needs_reference():
        yield "reference"
    if algorithm.needs_old_logprobs():
        yield "old_logprobs"
    weighs = getattr(options, "use_tis", False) or getattr(options, "seq_is_masking", False)
    if weighs or getattr(options, "ppo_clip_ref_logprobs", None) == "rollout":
        yield "rollout_logprobs"
