"""What keys mean together: rules that join several of them. All violations are told at once, each with its fix.

A rule names the keys that it reads; it is skipped when one of them has a problem already. Rules of other parts of the library
(sampling, batch, grid) are theirs and are looked up here when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from posttrain.config.bounds import check_bounds
from posttrain.config.schema import MISSING, RunConfig
from posttrain.config.walker import Problem

Rule: TypeAlias = Callable[[RunConfig], Iterable[Problem]]


def check_rules(config: RunConfig, earlier: Iterable[Problem] = ()) -> list[Problem]:
    """Every violation, of keys that have no earlier problem."""
    found = list(check_bounds(config))
    bad = {problem.path for problem in (*earlier, *found)}
    for keys, rule in RULES:
        if not any(_touches(path, key) for path in bad for key in keys):
            found += rule(config)
    return found


def _touches(path: str, key: str) -> bool:
    return path == key or path.startswith((f"{key}.", f"{key}[")) or key.startswith((f"{path}.", f"{path}["))


def _model(config: RunConfig) -> Iterator[Problem]:
    if config.model.name_or_path in (MISSING, "") and config.model.factory is None:
        yield Problem("model.name_or_path", "missing value", "give a Hugging Face folder or name: model.name_or_path=PATH")


def _environments(config: RunConfig) -> Iterator[Problem]:
    if not config.environments:
        yield Problem(
            "environments", "is empty: there is nothing to learn", "give at least one: environments=[{name: arithmetic}]"
        )
    for i, environment in enumerate(config.environments):
        if environment in config.environments[:i]:
            yield Problem(
                f"environments[{i}]", f"repeats {environment.name!r} with the same options", "remove it, or raise the weight"
            )


def _sampling(config: RunConfig) -> Iterator[Problem]:
    from posttrain.rollout.engine import check_training_sampling

    r = config.rollout
    for text in check_training_sampling(temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p):
        key, _, rest = text.partition("=")
        what, _, fix = rest.rpartition("; ")
        yield Problem(key, what, fix)


def _lengths(config: RunConfig) -> Iterator[Problem]:
    limit = config.rollout.max_model_len
    for key, length in (
        ("rollout.max_tokens", config.rollout.max_tokens),
        ("validation.max_tokens", config.validation.max_tokens),
    ):
        if length is not None and length >= limit:
            yield Problem(
                key,
                f"{length} leaves no room for a prompt in rollout.max_model_len={limit}",
                f"set {key} below rollout.max_model_len, or raise that",
            )


def _batch(config: RunConfig) -> Iterable[Problem]:
    from posttrain.placement.batch import BatchPlan, check_batch
    from posttrain.placement.grid import resolve_grid

    rl, grid = config.rl, resolve_grid(config.grid)
    plan = BatchPlan(
        rl.batch_per_replica, rl.group_size, rl.mini_batch_per_replica, rl.micro_batch_per_replica, grid.rollout[0], grid.dp_world
    )
    return check_batch(plan)


def _grid(config: RunConfig) -> Iterable[Problem]:
    from posttrain.placement.grid import check_grid

    return check_grid(config.grid, config.rollout.tensor_parallel_size)


def _dynamic_sampling(config: RunConfig) -> Iterator[Problem]:
    rl = config.rl
    if rl.min_informative_groups and rl.min_informative_groups_frac is not None:
        yield Problem(
            "rl.min_informative_groups_frac",
            "is another way to write rl.min_informative_groups, and both are set",
            "unset one of them",
        )


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    scheduler = config.rl.lr_scheduler
    if scheduler.name in ("linear", "cosine") and scheduler.warmup_steps and scheduler.warmup_steps >= _updates(config):
        yield Problem(
            "rl.lr_scheduler.warmup_steps",
            f"{scheduler.warmup_steps} is the whole run of {_updates(config)} optimizer steps, {scheduler.name} never begins",
            "lower it, or raise rl.steps",
        )


def _updates(config: RunConfig) -> int:
    return config.rl.steps * max(
        config.rl.batch_per_replica // (config.rl.mini_batch_per_replica or config.rl.batch_per_replica), 1
    )


def _transport(config: RunConfig) -> Iterator[Problem]:
    if config.weights.transport == "inproc" and config.rollout.engine == "vllm":
        yield Problem(
            "weights.transport",
            "inproc copies within one process, and the vllm engine is another one",
            "set weights.transport=shm, or auto",
        )


def _order(config: RunConfig) -> Iterator[Problem]:
    if config.loop.commit_order == "arrival" and config.rollout.engine == "hf":
        yield Problem(
            "loop.commit_order",
            "arrival needs an engine that takes updates in flight, and hf generates cohort by cohort",
            "set loop.commit_order=logical (or auto), or rollout.engine=vllm",
        )


def _absent_features(config: RunConfig) -> Iterator[Problem]:
    """Keys whose feature is not there yet: valid, and refused with the reason."""
    rl, later = config.rl, "not available yet: "
    dynamic = "min_informative_groups" if rl.min_informative_groups else "min_informative_groups_frac"
    absent = [
        (rl.routing_replay != "off", "rl.routing_replay", "no engine here returns its expert routing", "off"),
        (config.grid.backend == "ray", "grid.backend", "roles run in this process and engines on this machine", "local"),
        (config.rollout.max_async_rollout > 0, "rollout.max_async_rollout", "batches are generated strictly on-policy", "0"),
        (
            bool(rl.min_informative_groups) or rl.min_informative_groups_frac is not None,
            f"rl.{dynamic}",
            "dynamic sampling does not refill batches; rl.discard_group_zero_advantage leaves tied groups out",
            "0" if rl.min_informative_groups else "null",
        ),
        (bool(config.evals), "evals", "held-out rewards come from validation.* only", "[]"),
    ]
    for used, path, reason, off in absent:
        if used:
            yield Problem(path, f"{later}{reason}", f"set {path}={off}")


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("model.name_or_path", "model.factory"), _model),
    (("environments",), _environments),
    (("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p"), _sampling),
    (("rollout.max_tokens", "rollout.max_model_len", "validation.max_tokens"), _lengths),
    (("rl.batch_per_replica", "rl.group_size", "rl.mini_batch_per_replica", "rl.micro_batch_per_replica", "grid"), _batch),
    (("grid", "rollout.tensor_parallel_size"), _grid),
    (("rl.min_informative_groups", "rl.min_informative_groups_frac"), _dynamic_sampling),
    (("rl.lr_scheduler", "rl.steps", "rl.batch_per_replica", "rl.mini_batch_per_replica"), _optimizer),
    (("weights.transport", "rollout.engine"), _transport),
    (("loop.commit_order", "rollout.engine"), _order),
    (("rl.routing_replay", "grid.backend", "rollout.max_async_rollout", "rl.min_informative_groups", "evals"), _absent_features),
)
"""Each rule with the keys that it reads."""
