"""What keys mean together: rules that join several of them. All violations are told at once, each with its fix.

A rule names the keys that it reads; it is skipped when one of them has a problem already. Rules of other parts of the library
(sampling, batch, grid) are theirs and are looked up here when they run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from posttrain.config.bounds import check_bounds
from posttrain.config.schema import MISSING, NO_ENGINE, RunConfig
from posttrain.config.walker import Problem

if TYPE_CHECKING:
    from posttrain.placement.batch import BatchPlan

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


LONGEST_NAME = 200
"""Bytes of `name`: a file name has 255, and the time and a number follow."""


def name_problem(name: str) -> Problem | None:
    """Why `name` cannot begin the name of a run directory; None when it can."""
    if not re.fullmatch(r"[\w.+=@-]+", name) or name.startswith("."):
        fix = "use letters, digits and . _ - + = @ (a folder for all runs is --run)"
        return Problem("name", f"{name!r} cannot name a run directory", fix)
    if len(name.encode()) > LONGEST_NAME:
        what = f"{name[:20] + '…'!r} cannot name a run directory: it has {len(name.encode())} bytes"
        return Problem("name", what, f"use at most {LONGEST_NAME}; tracking.tags takes the rest")
    return None


def _name(config: RunConfig) -> Iterator[Problem]:
    if problem := name_problem(config.name):
        yield problem


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
    if config.rollout.engine == NO_ENGINE:
        return
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


def batch_plan(config: RunConfig) -> BatchPlan:
    """How the batches of a run are cut."""
    from posttrain.placement.batch import BatchPlan
    from posttrain.placement.grid import resolve_grid

    rl, grid = config.rl, resolve_grid(config.grid)
    return BatchPlan(
        rl.batch_per_replica, rl.group_size, rl.mini_batch_per_replica, rl.micro_batch_per_replica, grid.rollout[0], grid.dp_world
    )


def _batch(config: RunConfig) -> Iterable[Problem]:
    from posttrain.placement.batch import check_batch

    plan = batch_plan(config)
    return check_batch(plan) if min(plan.rollout_replicas, plan.dp_world) >= 1 else []  # the grid's own rule tells


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


def _attention(config: RunConfig) -> Iterator[Problem]:
    chosen = config.model.attn_implementation
    if config.rl.shared_prefix and chosen != "sdpa":
        yield Problem(
            "model.attn_implementation",
            f"{chosen} would not run: rl.shared_prefix=true brings its own attention",
            "set rl.shared_prefix=false, or model.attn_implementation=sdpa",
        )


@dataclass(frozen=True, slots=True)
class NotYet:
    """Why a key takes no value but its default and `works` yet."""

    reason: str
    works: tuple[object, ...] = ()


_NO_REFILL = "dynamic sampling does not refill batches; rl.discard_group_zero_advantage leaves tied groups out"
_NO_ROUTES = (
    "no engine returns the experts that it chose: hf does not record them, and vLLM does in its Model Runner V2 only, "
    "which requires Triton, so not on a CPU"
)

NOT_YET: dict[str, NotYet] = {
    "rl.routing_replay": NotYet(_NO_ROUTES),
    "rl.min_informative_groups": NotYet(_NO_REFILL),
    "rl.min_informative_groups_frac": NotYet(_NO_REFILL),
    "rl.dynamic_sampling_max_extra_rollouts": NotYet(_NO_REFILL),
    "rl.dynamic_sampling_on_budget_exhausted": NotYet(_NO_REFILL),
    "rollout.max_async_rollout": NotYet("batches are generated strictly on-policy"),
    "rollout.max_off_policy_steps": NotYet("no trajectory grows old: batches are generated strictly on-policy"),
    "loop.commit_order": NotYet("every batch is a whole cohort, in the order of its draws", ("logical",)),
    "evals": NotYet("held-out rewards come from validation.* only"),
}
"""Keys whose feature is not there yet: valid, and refused with the reason. The reference is generated from it, too."""


def _not_yet(path: str, why: NotYet) -> tuple[tuple[str, ...], Rule]:
    read = attrgetter(path)
    default = read(RunConfig())
    typed = {None: "null", (): "[]"}.get(default, default)

    def rule(config: RunConfig) -> Iterator[Problem]:
        if read(config) not in (default, *why.works):
            yield Problem(path, f"not available yet: {why.reason}", f"set {path}={typed}")

    return (path,), rule


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("name",), _name),
    (("model.name_or_path", "model.factory"), _model),
    (("environments",), _environments),
    (("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p"), _sampling),
    (("rollout.max_tokens", "rollout.max_model_len", "validation.max_tokens"), _lengths),
    (("rl.batch_per_replica", "rl.group_size", "rl.mini_batch_per_replica", "rl.micro_batch_per_replica", "grid"), _batch),
    (("grid", "rollout.tensor_parallel_size"), _grid),
    (("rl.min_informative_groups", "rl.min_informative_groups_frac"), _dynamic_sampling),
    (("rl.lr_scheduler", "rl.steps", "rl.batch_per_replica", "rl.mini_batch_per_replica"), _optimizer),
    (("model.attn_implementation", "rl.shared_prefix"), _attention),
    *(_not_yet(path, why) for path, why in NOT_YET.items()),
)
"""Each rule with the keys that it reads."""
