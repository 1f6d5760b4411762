"""What cannot work: rules that join an algorithm's options with the algorithm and the run. All of them are told at once."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.walker import Problem, show
from posttrain.objective.algorithm import Algorithm, Context, PreferenceAlgorithm
from posttrain.objective.options import Options, TokenOptions


def problems(name: str, cls: type[Algorithm], options: Options, context: Context) -> list[Problem]:
    """Every problem of `options` for algorithm `cls` in this run, the options' own included."""
    found = [*options.check(), *_run(name, cls, options, context)]
    if isinstance(options, TokenOptions):
        found += [*_ratio(name, cls, options), *_advantages(name, cls, options), *_importance(name, cls, options)]
    return [*found, *cls.check(options, context)]


def _run(name: str, cls: type[Algorithm], options: Options, context: Context) -> Iterator[Problem]:
    if not context.temperature > 0:
        yield Problem(
            "temperature",
            f"{context.temperature}: greedy rollouts cannot be trained on (log-probs divide the logits by it)",
            "set rollout.temperature above 0; validation.temperature=0 is fine",
        )
    if context.group_size is not None and context.group_size < 1:
        yield Problem("group_size", f"{context.group_size} is out of bounds", "set rl.group_size to 2 or more")
    elif context.group_size == 1 and cls.needs_groups:
        nothing = "there is no pair to learn from" if issubclass(cls, PreferenceAlgorithm) else "every advantage is 0"
        yield Problem(
            "group_size",
            f"1 with {name}: without other completions of the prompt {nothing}",
            "set rl.group_size to 2 or more",
        )
    if context.n_mini < 1:
        yield Problem("n_mini", f"{context.n_mini} is out of bounds", "use at least one optimizer step per batch")
    elif context.n_mini > 1 and not cls.uses_ratio(options) and not issubclass(cls, PreferenceAlgorithm):
        yield Problem(
            "n_mini",
            f"{context.n_mini} with {name}, which here has no ratio: from the second optimizer step on it is off-policy",
            "unset rl.mini_batch_per_replica (one optimizer step per batch)"
            + (", or set use_ppo_clip=true" if cls.handles_ratio == "ppo" else ""),
        )


def _ratio(name: str, cls: type[Algorithm], options: TokenOptions) -> Iterator[Problem]:
    if options.use_ppo_clip is not None and cls.handles_ratio != "ppo":
        handling = "has its own ratio handling" if cls.handles_ratio == "own" else "uses no ratio"
        yield Problem("use_ppo_clip", f"{show(options.use_ppo_clip)} with {name}, which {handling}", "remove use_ppo_clip")
    if options.clip_ratio_c is not None and not cls.uses_clip(options):
        yield Problem(
            "clip_ratio_c",
            f"{options.clip_ratio_c} with {name}, which here clips no ratio: the dual clip extends a ratio clip",
            "remove clip_ratio_c" + (", or set use_ppo_clip=true" if cls.handles_ratio == "ppo" else ""),
        )


def _advantages(name: str, cls: type[Algorithm], options: TokenOptions) -> Iterator[Problem]:
    if options.advantage_norm not in cls.advantage_norms:
        legal = cls.advantage_norms[0]
        yield Problem(
            "advantage_norm",
            f"{options.advantage_norm} with {name}, whose advantages are per {legal} by definition",
            f"remove advantage_norm, or set it to {legal}",
        )


def _importance(name: str, cls: type[Algorithm], options: TokenOptions) -> Iterator[Problem]:
    if options.use_tis and options.ppo_clip_ref_logprobs == "rollout" and cls.uses_ratio(options):
        user = "use_ppo_clip" if cls.handles_ratio == "ppo" else name
        yield Problem(
            "use_tis",
            f"true with {user} and ppo_clip_ref_logprobs=rollout: both correct for the rollout policy, so it counts twice",
            "set ppo_clip_ref_logprobs=old, or use_tis=false",
        )
