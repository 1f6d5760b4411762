"""What keys mean together: rules that join several of them. All violations are told at once, each with its fix.

A rule names the keys that it reads; it is skipped when one of them has a problem already. Rules of other parts of the library
(sampling, batch, grid) are theirs and are looked up here when they run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from posttrain.config.bounds import check_bounds
from posttrain.config.entries import check_entries
from posttrain.config.eval_rules import check_evals
from posttrain.config.schema import MISSING, NO_ENGINE, RLConfig, RunConfig
from posttrain.config.walker import Problem, show

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
    yield from check_entries("environments", config.environments)


def _sampling(config: RunConfig) -> Iterator[Problem]:
    from posttrain.rollout.engine import check_training_sampling

    r = config.rollout
    for text in check_training_sampling(temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p):
        key, _, rest = text.partition("=")
        what, _, fix = rest.rpartition("; ")
        yield Problem(key, what, fix)
    if "" in r.stop:
        yield Problem("rollout.stop", "holds an empty text, which ends every turn at its first token", "leave it out")


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


def _ports(config: RunConfig) -> Iterable[Problem]:
    first, replicas = config.rollout.base_port, batch_plan(config).rollout_replicas
    if first + replicas - 1 > 65535:
        yield Problem(
            "rollout.base_port",
            f"{first} leaves no ports for {replicas} replicas, each of which has one of its own",
            f"set rollout.base_port to {65536 - replicas} or less",
        )


def _grid(config: RunConfig) -> Iterable[Problem]:
    from posttrain.placement.grid import check_grid

    return check_grid(config.grid, config.rollout.tensor_parallel_size)


def informative_minimum(config: RunConfig) -> int:
    """How many groups of a batch must be informative; 0: dynamic sampling is off. A share is rounded up, in exact arithmetic."""
    rl = config.rl
    if rl.min_informative_groups_frac is None:
        return rl.min_informative_groups
    return math.ceil(Fraction(str(rl.min_informative_groups_frac)) * (rl.batch_per_replica // rl.group_size))


def _dynamic_sampling(config: RunConfig) -> Iterator[Problem]:
    rl, count, share = config.rl, "rl.min_informative_groups", "rl.min_informative_groups_frac"
    if rl.min_informative_groups and rl.min_informative_groups_frac is not None:
        yield Problem(share, f"is another way to write {count}, and both are set", "unset one of them")
        return
    set_by = count if rl.min_informative_groups_frac is None else share
    groups = rl.batch_per_replica // rl.group_size if rl.group_size > 0 else 0
    if groups < 1:  # the rule of the batch tells
        return
    minimum = informative_minimum(config)
    if minimum and config.rollout.engine == NO_ENGINE:
        yield Problem(set_by, "nothing is sampled with rollout.engine=none", f"remove {set_by}, or choose an engine")
    elif minimum and rl.group_size == 1:
        yield Problem(set_by, "no group of one is informative: its rewards cannot disagree", "set rl.group_size to 2 or more")
    elif minimum > groups:
        what = f"{minimum} informative groups in a batch of {groups} (rl.batch_per_replica / rl.group_size)"
        yield Problem(count, what, f"set at most {groups}, or raise rl.batch_per_replica")
    for key, default in (
        ("dynamic_sampling_max_extra_rollouts", 0),
        ("dynamic_sampling_on_budget_exhausted", "raise"),
    ):
        if not minimum and (value := getattr(rl, key)) != default:
            what = f"{value} has no effect: no informative groups are asked for"
            yield Problem(f"rl.{key}", what, f"set {count} or {share}, or leave rl.{key} out")


SCREENING = {
    "overlong_penalty_factor": ("overlong_buffer_tokens",),
    "filter_overlong": (),
    "filter_gibberish": ("gibberish_logprob_offset", "gibberish_token_threshold"),
    "filter_repetition": ("repetition_compression_threshold",),
}
"""Key of `rl` that turns a penalty or a filter on → keys that only mean something then."""


def _screening(config: RunConfig) -> Iterator[Problem]:
    rl, default = config.rl, RLConfig()
    for switch, belonging in SCREENING.items():
        on = bool(getattr(rl, switch))
        if on and config.rollout.engine == NO_ENGINE:
            what = "completions come with the data (rollout.engine=none): there is no policy to keep from long or odd answers"
            yield Problem(f"rl.{switch}", what, f"remove rl.{switch}, or choose an engine")
        for key in belonging:
            if not on and (value := getattr(rl, key)) != getattr(default, key):
                fix = f"set rl.{switch}{'=true' if switch.startswith('filter') else ' above 0'}, or leave rl.{key} out"
                yield Problem(f"rl.{key}", f"{value} has no effect: rl.{switch} is off", fix)
    if rl.overlong_penalty_factor and rl.overlong_buffer_tokens > config.rollout.max_tokens:
        what = f"{rl.overlong_buffer_tokens} is more than rollout.max_tokens={config.rollout.max_tokens}: every answer would lose"
        yield Problem("rl.overlong_buffer_tokens", what, "lower it, or raise rollout.max_tokens")


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


def commit_order(config: RunConfig) -> str:
    """`loop.commit_order` with `auto` resolved: engines in this process are deterministic, others are not."""
    from posttrain.placement.grid import EMBEDDED

    chosen = config.loop.commit_order
    if chosen == "auto":
        return "logical" if config.rollout.engine in (*EMBEDDED, NO_ENGINE) else "arrival"
    return chosen


def _asynchrony(config: RunConfig) -> Iterator[Problem]:
    ahead, lag = config.rollout.max_async_rollout, config.rollout.max_off_policy_steps
    if config.rollout.engine == NO_ENGINE:
        if ahead:
            yield Problem("rollout.max_async_rollout", f"{ahead} has no effect: nothing is generated", "set it to 0")
        if config.loop.commit_order == "arrival":
            yield Problem("loop.commit_order", "arrival has no effect: nothing is generated", "set loop.commit_order=auto")
    elif commit_order(config) == "arrival" and lag < ahead:
        yield Problem(
            "rollout.max_off_policy_steps",
            f"{lag} is below rollout.max_async_rollout={ahead}: every trajectory would grow too old before its batch trains",
            f"set rollout.max_off_policy_steps={ahead} or more, or a smaller rollout.max_async_rollout",
        )


@dataclass(frozen=True, slots=True)
class NotYet:
    """Why a key takes no value but its default and `works` yet."""

    reason: str
    works: tuple[object, ...] = ()


_NO_ROUTES = (
    "no engine returns the experts that it chose: hf does not record them, and vLLM does in its Model Runner V2 only, "
    "which requires Triton, so not on a CPU; on a GPU posttrain does not ask for them yet"
)

NOT_YET: dict[str, NotYet] = {
    "rl.routing_replay": NotYet(_NO_ROUTES),
}
"""Keys whose feature is not there yet: valid, and refused with the reason. The reference is generated from it, too."""


def _not_yet(path: str, why: NotYet) -> tuple[tuple[str, ...], Rule]:
    read = attrgetter(path)
    default = read(RunConfig())
    typed = default if isinstance(default, str) else "[]" if default == () else show(default)

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
    (("grid", "rollout.base_port"), _ports),
    (
        (
            "rl.min_informative_groups",
            "rl.min_informative_groups_frac",
            "rl.dynamic_sampling_max_extra_rollouts",
            "rl.dynamic_sampling_on_budget_exhausted",
            "rl.batch_per_replica",
            "rl.group_size",
            "rollout.engine",
        ),
        _dynamic_sampling,
    ),
    (
        (*(f"rl.{key}" for pair in SCREENING.items() for key in (pair[0], *pair[1])), "rollout.max_tokens", "rollout.engine"),
        _screening,
    ),
    (("rl.lr_scheduler", "rl.steps", "rl.batch_per_replica", "rl.mini_batch_per_replica"), _optimizer),
    (("model.attn_implementation", "rl.shared_prefix"), _attention),
    (("rollout.max_async_rollout", "rollout.max_off_policy_steps", "rollout.engine", "loop.commit_order"), _asynchrony),
    (("evals", "rollout.engine", "rollout.max_tokens", "rollout.max_model_len"), check_evals),
    *(_not_yet(path, why) for path, why in NOT_YET.items()),
)
"""Each rule with the keys that it reads."""
