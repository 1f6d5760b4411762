"""The options of the selected plug-ins, checked as strictly as the rest: objective, environments, engine, transport, hooks.

Names are looked up, source is read; algorithms and environments are imported, too, because their classes know what their options
mean together. posttrain's own engines, transports, hooks and packers are checked from their source, and imported when they are
made; those of others are imported here, so that a broken one is told before there is a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain.config.layers import Layers
from posttrain.config.preference import check_preference
from posttrain.config.schema import (
    MISSING,
    NO_ENGINE,
    EnvironmentConfig,
    EvalConfig,
    HookConfig,
    Plugin,
    RunConfig,
    WeightsConfig,
)
from posttrain.config.walker import Field, Problem, Walker, fields_of, join, show
from posttrain.errors import PosttrainError
from posttrain.plugins.build import option_fields
from posttrain.plugins.resolution import find, resolve

if TYPE_CHECKING:
    from posttrain.objective.algorithm import Context

_IMPORTED = ("algorithms", "envs")
_CONTEXT_KEYS = {"n_mini": "rl.mini_batch_per_replica", "group_size": "rl.group_size", "temperature": "rollout.temperature"}


@dataclass(slots=True)
class PluginCheck:
    """Checks all selected plug-ins of one config; what it finds is in `walker.problems` and `notes`."""

    layers: Layers
    walker: Walker
    notes: list[str]

    def run(self, config: RunConfig) -> RunConfig:
        """The config with the options of its plug-ins checked and completed."""
        objective = self.objective(config)
        engine = {}
        if config.rollout.engine != NO_ENGINE:
            engine = self.options("engines", config.rollout.engine, config.rollout.options, "rollout.engine", "rollout.options")
        environments = tuple(self.environment(e, f"environments[{i}]") for i, e in enumerate(config.environments))
        evals = tuple(self.evaluation(e, f"evals[{i}]", environments) for i, e in enumerate(config.evals))
        hooks = tuple(self.hook(h, f"hooks[{i}]") for i, h in enumerate(config.hooks))
        transport = self.transport(config.weights)
        if config.rl.data.packer:
            self.options("datapackers", config.rl.data.packer, {}, "rl.data.packer", "rl.data")
        self.walker.problems += check_preference(config)
        return replace(
            config,
            environments=environments,
            evals=evals,
            hooks=hooks,
            rl=replace(config.rl, objective=objective),
            rollout=replace(config.rollout, options=engine),
            weights=replace(config.weights, options=transport),
        )

    def transport(self, config: WeightsConfig) -> dict[str, Any]:
        """The checked options of the transport; whose they are must be said."""
        if config.transport != "auto":
            return self.options("transports", config.transport, config.options, "weights.transport", "weights.options")
        if config.options:
            self.walker.report(
                "weights.options", "are of no transport yet: weights.transport is auto", "name it: weights.transport=nixl"
            )
        return {}

    def objective(self, config: RunConfig) -> Plugin:
        """The objective with every option resolved (`auto` too), except `max_tokens`, which follows rollout.max_tokens."""
        given = config.rl.objective
        values = self.options("algorithms", given.name, given.options, "rl.objective.name", "rl.objective")
        if self.failed("rl.objective"):
            return given
        from posttrain.objective.build import check_algorithm

        cls = resolve("algorithms", given.name)
        asked = dict(values)
        if "ppo_clip_ref_logprobs" in values and "ppo_clip_ref_logprobs" not in given.options:
            asked["ppo_clip_ref_logprobs"] = "auto"
        follows = "max_tokens" in values and "max_tokens" not in given.options
        if follows:
            asked["max_tokens"] = config.rollout.max_tokens
        options, problems = check_algorithm(given.name, cls, run_context(config), asked)
        for problem in problems:
            path = _CONTEXT_KEYS.get(problem.path) or join("rl.objective", problem.path).rstrip(".")
            self.walker.report(path, problem.what, problem.fix)
        resolved = {field.name: getattr(options, field.name) for field in dataclasses.fields(cls.Options)} if options else values
        if follows:
            del resolved["max_tokens"]
        return Plugin(name=given.name, options=resolved)

    def environment(self, config: EnvironmentConfig, path: str) -> EnvironmentConfig:
        """An environment with every option resolved."""
        values = self.options("envs", config.name, config.options, f"{path}.name", f"{path}.options")
        if not self.failed(path) and isinstance(cls := resolve("envs", config.name), type):
            values = self.construct(cls.Options, values, f"{path}.options")  # type: ignore[attr-defined]
        return replace(config, options=values)

    def evaluation(self, config: EvalConfig, path: str, trained: Sequence[EnvironmentConfig]) -> EvalConfig:
        """An eval with every option of its environment resolved; what an environment that trains says is taken from there."""
        from posttrain.config.eval_rules import check_holdout, label_of, trained_entry

        entry, problem = trained_entry(config, path, trained)
        self.walker.problems += problem
        if problem:
            return config
        if entry is not None:
            config = replace(config, name=entry.name, label=label_of(config), options=dict(entry.options))
        else:
            made = self.environment(EnvironmentConfig(name=config.name, options=config.options or {}), path)
            config = replace(config, label=label_of(config), options=made.options)
        self.walker.problems += check_holdout(config, path, trained)
        return config

    def hook(self, config: HookConfig, path: str) -> HookConfig:
        """A hook with its options checked, and its methods unless it is one of posttrain's own: those are imported when made."""
        options = self.options("hooks", config.name, config.options, f"{path}.name", f"{path}.options")
        if not self.failed(path) and not ((info := find("hooks", config.name)) and info.builtin):
            from posttrain.hooks.check import check_hook, label_and_owner

            hook = resolve("hooks", config.name)
            label, owner = label_and_owner(config.name, hook)
            try:
                check_hook(hook, f"hook {label!r} ({owner})", path)
            except PosttrainError as exc:
                self.walker.problems.append(Problem(f"{path}.name", exc.message, exc.fix, exc))
        return replace(config, options=options)

    def construct(self, options: Any, values: dict[str, Any], path: str) -> dict[str, Any]:
        """Run an `Options` class's own check. The values as it keeps them: a path made absolute, a short form written out."""
        try:
            made = options(**values)
        except PosttrainError as exc:
            self.walker.problems.append(Problem(path, exc.message, exc.fix, exc))
        except (ValueError, TypeError) as exc:
            self.walker.report(path, str(exc))
        else:
            return {name: getattr(made, name) for name in values}
        return values

    def options(self, kind: str, name: str, given: Mapping[str, Any], name_path: str, path: str) -> dict[str, Any]:
        """The checked options of one plug-in; for those that are imported, with all defaults."""
        if name == MISSING:
            return dict(given)
        try:
            fields = self.fields(kind, name)
        except PosttrainError as exc:
            self.walker.problems.append(Problem(name_path, exc.message, exc.fix, exc))
            return dict(given)
        kept = self.drop_inherited(name, given, self.lacks(kind, name, fields), name_path, path)
        values = self.walker.fields(fields, kept, path)
        return values if kind in _IMPORTED else {key: values[key] for key in kept if key in values}

    def fields(self, kind: str, name: str) -> list[Field]:
        """The option fields of a plug-in: from its class, or from its source where that says it all. Raises PluginError."""
        info = find(kind, name)
        if kind not in _IMPORTED and info is not None and info.builtin and not info.card.missing:
            fields = option_fields(info.card)
            if fields is not None or kind == "datapackers":
                return fields or []
        cls = resolve(kind, name)
        options = getattr(cls, "Options", None) if isinstance(cls, type) else None
        return [] if options is None else fields_of(options)

    def lacks(self, kind: str, name: str, fields: list[Field]) -> Callable[[str, Any], bool]:
        """Whether a plug-in lacks an option, or has it in name only (`use_ppo_clip` of an algorithm without that clip)."""
        known = {field.name for field in fields}
        if kind != "algorithms":
            return lambda key, _: key not in known
        cls = resolve(kind, name)
        return lambda key, value: (
            key not in known
            or (key == "use_ppo_clip" and cls.handles_ratio != "ppo")
            or (key == "advantage_norm" and value not in cls.advantage_norms)
        )

    def drop_inherited(
        self, name: str, given: Mapping[str, Any], lacks: Callable[[str, Any], bool], name_path: str, path: str
    ) -> dict[str, Any]:
        """Leave out options that an experiment set for another plug-in and that this one lacks; say it in one line."""
        chosen_at = self.layers.index(name_path)
        inherited = [
            key for key in given if not self.layers[join(path, key)].typed and self.layers.index(join(path, key)) < chosen_at
        ]
        dropped = [key for key in inherited if lacks(key, given[key])]
        if dropped:
            kept = [f"{key}={show(given[key])}" for key in inherited if key not in dropped]
            self.notes.append(
                f"{name_path}={name}: dropped the inherited {', '.join(f'{key}={show(given[key])}' for key in dropped)}, "
                f"which it does not have" + (f"; kept {', '.join(kept)}" if kept else "")
            )
        return {key: value for key, value in given.items() if key not in dropped}

    def failed(self, path: str) -> bool:
        """Whether something below `path` has a problem already."""
        return any(problem.path.startswith(path) for problem in self.walker.problems)


def run_context(config: RunConfig) -> Context:
    """What the objective must know of the run. Sizes and a temperature that other rules refuse are replaced by harmless ones."""
    from posttrain.objective.algorithm import Context

    rl = config.rl
    batch, mini = rl.batch_per_replica, rl.mini_batch_per_replica
    return Context(
        group_size=max(rl.group_size, 1),
        n_mini=max(batch // mini, 1) if mini and mini > 0 else 1,
        temperature=config.rollout.temperature if config.rollout.temperature > 0 else 1.0,
        asynchronous=config.rollout.max_async_rollout > 0,
    )
