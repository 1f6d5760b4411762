"""The states of plug-ins in a checkpoint: who keeps one, and whether those of a checkpoint fit this run.

What training depends on (algorithm, environments, DataPacker) must find its own state again, or the rest would be another run:
that is refused. Hooks only watch, so what does not fit there is said and the run goes on. Another version, or a changed source,
is only said everywhere: corrections must be possible. So it is of plug-ins that keep nothing; `origins` are of all of them.

`checkpointer` takes them where no work of their plug-in is under way: an algorithm's between two batches, those of an environment
and a packer between two cohorts; under `loop.commit_order=arrival` episodes are open whenever they are taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.errors import PluginError, PosttrainError
from posttrain.placement.grid import transport_of
from posttrain.plugins.origin import Origin
from posttrain.plugins.origin import changes as origin_changes
from posttrain.plugins.state import ANCHOR, Keeper, SavedState

if TYPE_CHECKING:
    from pathlib import Path

    from posttrain.config.schema import RunConfig
    from posttrain.data.environment import Environment
    from posttrain.data.packer import DataPacker
    from posttrain.evals.build import Eval
    from posttrain.hooks import RunHooks
    from posttrain.objective.objective import Objective
    from posttrain.rollout.engine import Engine


def training_keepers(
    config: RunConfig, objective: Objective, environments: Mapping[str, Environment], packer: DataPacker | None
) -> list[Keeper]:
    """What training depends on and keeps a state. Raises PluginError for one that has only half of the contract."""
    return [keeper for keeper in _training(config, objective, environments, packer) if keeper.stateful]


def _training(
    config: RunConfig, objective: Objective, environments: Mapping[str, Environment], packer: DataPacker | None
) -> list[Keeper]:
    found = [Keeper("algorithms", objective.name, objective.algorithm, ref=config.rl.objective.name, where="rl.objective.name")]
    for position, (entry, (name, env)) in enumerate(zip(config.environments, environments.items(), strict=True)):
        found.append(Keeper("envs", name, env, ref=entry.name, where=f"environments[{position}].name"))
    if packer is not None:
        named = config.rl.data.packer or ""
        found.append(Keeper("datapackers", named or type(packer).__name__, packer, ref=named, where="rl.data.packer"))
    return found


def hook_keepers(hooks: RunHooks) -> list[Keeper]:
    """The hooks that keep a state."""
    return [keeper for keeper in _hooks(hooks) if keeper.stateful]


def _hooks(hooks: RunHooks) -> list[Keeper]:
    return [Keeper("hooks", entry.label, entry.hook, ref=entry.config.name, where=entry.where) for entry in hooks.active]


def origins(
    config: RunConfig, objective: Objective, environments: Mapping[str, Environment], packer: DataPacker | None,
    engine: Engine | None, hooks: RunHooks, evals: Sequence[Eval] = (),
) -> list[Origin]:
    """Where every plug-in that the config selects comes from, whether it keeps a state or not."""
    options: list[Any] = [config.rl.objective.options, *(entry.options for entry in config.environments), {}]
    found = [*zip(_training(config, objective, environments, packer), options, strict=False)]  # a packer may be missing
    if engine is not None:
        name, transport = config.rollout.engine, transport_of(config)
        found.append((Keeper("engines", name, engine, ref=name), config.rollout.options))
        with contextlib.suppress(PosttrainError):  # under Ray it need not load here: the roles that use it tell
            cls = plugins.resolve("transports", transport)
            found.append((Keeper("transports", transport, cls, ref=transport), config.weights.options))
    trained = {entry.name for entry in config.environments}  # which are there already
    asked = [one for one in evals if one.entry.name not in trained]
    found += [(Keeper("envs", one.key, one.env, ref=str(one.entry.name)), one.entry.options) for one in asked]
    found += [*zip(_hooks(hooks), [entry.config.options for entry in hooks.active], strict=True)]
    return [Origin.of(keeper, given) for keeper, given in found]


def changed(now: Sequence[Origin], was: Sequence[Origin], said: Sequence[str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """What is another now of the plug-ins that a checkpoint was made with, and a line for each of which none is `said`."""
    found = origin_changes(now, was)
    lines = {one: f"{one} goes on from the checkpoint, but it has changed: {old} → {new}" for one, (old, new) in found.items()}
    told = [line for one, line in lines.items() if not any(note.startswith(one.partition(" (")[0] + " (") for note in said)]
    return found, told


def save(training: Sequence[Keeper], hooks: Sequence[Keeper], of_hooks: Mapping[str, Any]) -> list[SavedState]:
    """What a checkpoint holds. of_hooks: what the hooks gave, by label. Raises PluginError naming who cannot give its state."""
    return [*(one.save() for one in training), *(one.saved(of_hooks[one.name]) for one in hooks if one.name in of_hooks)]


def load(
    training: Sequence[Keeper], hooks: Sequence[Keeper], saved: Sequence[SavedState], path: Path
) -> tuple[dict[str, Any], list[str]]:
    """Give what training depends on its state. Returns the states of hooks by label, for when they start, and what to say.

    path: of the checkpoint. Raises PluginError with everything that is refused, and what would only be said.
    """
    keepers = {(one.kind, one.name): one for one in (*training, *hooks)}
    states = {(one.kind, one.name): one for one in saved}
    of_hooks: dict[str, Any] = {}
    refused: list[str] = []
    notes: list[str] = []
    raised: Exception | None = None
    for key in dict.fromkeys([*keepers, *states]):
        now, was = keepers.get(key), states.get(key)
        unfit = misfit(now, was)
        if now is None or was is None or unfit:
            watches = key[0] == "hooks"
            (notes if watches else refused).append(unfit + ("" if watches else f"\n      fix: {remedy(was)}"))
            continue
        notes += changes(now, was)
        if now.kind == "hooks":
            of_hooks[now.name] = was.state
            continue
        try:
            now.value.load_state_dict(was.state)
        except Exception as exc:
            raised = raised or exc
            at = f"{now.raised_in(exc)}{type(exc).__name__}: {exc}"
            refused.append(f"{now.subject} does not take its state back: {at}\n      fix: {remedy(was, now)}")
    if refused:
        raise PluginError(
            f"plug-ins cannot go on from {path}"
            + "".join(f"\n  - {line}" for line in refused) + "".join(f"\n  - also: {note}" for note in notes),
            cause="without what they kept, the rest would not be the same run; the checkpoint is untouched",
            fix="resume with the plug-ins that the run had, or start a new run",
            code="plugin-state", anchor=ANCHOR,
        ) from raised  # fmt: skip
    return of_hooks, notes


def misfit(now: Keeper | None, was: SavedState | None) -> str:
    """Why a plug-in does not go on from a state; "" when it does."""
    if was is None:
        return f"{now.subject} keeps a state, and the checkpoint has none of it" if now else ""
    if now is None:
        return f"{was.subject} left a state, and nothing in this run takes it"
    if was.distribution != now.owner[0]:
        return f"{now.subject} is not the one whose state the checkpoint has: that is {was.subject}"
    return ""


def changes(now: Keeper, was: SavedState) -> list[str]:
    """What is to be said of a plug-in that goes on from a state: none, or one line."""
    fresh = now.saved(was.state)
    if was.version != fresh.version:
        what = f"its state was saved by version {was.version}"
    elif was.class_name != fresh.class_name:
        what = f"its state was saved by class {was.class_name}, it is {fresh.class_name} now"
    elif was.source and fresh.source and was.source != fresh.source:
        what = "its source is not the one that saved its state"
    else:
        return []
    return [f"{now.subject} goes on from the checkpoint, but {what}"]


def remedy(was: SavedState | None, now: Keeper | None = None) -> str:
    """What to type or change, so that a state is taken."""
    if was is None:
        return "install the version that the run began with, or start a new run"
    install = f"pip install '{was.distribution}=={was.version}'" if was.distribution else f"bring back {was.class_name}"
    return "correct its load_state_dict" if now is not None and now.owner == (was.distribution, was.version) else install
