"""The options of an objective: what can be set, within which bounds, and how a bad value is told.

`Options` is the base of every algorithm's nested `Options`; `TokenOptions` adds the shared terms of token objectives, and
`ClipOptions` the bounds of a clipped ratio. A subclass adds its own fields, overrides defaults, and extends `check`:

    @dataclass(frozen=True, kw_only=True)
    class Options(TokenOptions):
        delta: float = 0.1  # the comment is the help text

        def check(self) -> Iterator[Problem]:
            yield from super().check()
            yield from bound(self, "delta", gt=0)

Rules that join options with the algorithm or the run are in `rules.py`. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from posttrain.config.report import refuse
from posttrain.config.walker import Problem

Aggregation = Literal["token", "sequence", "constant"]
AdvantageNorm = Literal["group", "batch"]
RatioReference = Literal["old", "rollout", "auto"]
TISMode = Literal["truncate", "icepop"]
KLEstimator = Literal["k1", "k2", "k3"]


def bound(
    options: object,
    name: str,
    *,
    ge: float = -math.inf,
    gt: float = -math.inf,
    le: float = math.inf,
    lt: float = math.inf,
) -> Iterator[Problem]:
    """A problem when field `name` is set and outside the bounds. NaN is outside of all."""
    value = getattr(options, name)
    if value is None or (ge <= value <= le and (gt < value or gt == -math.inf) and (value < lt or lt == math.inf)):
        return
    limits = [f"{sign} {limit:g}" for sign, limit in (("≥", ge), (">", gt), ("≤", le), ("<", lt)) if math.isfinite(limit)]
    yield Problem(name, f"{value} is out of bounds", f"{name} must be {' and '.join(limits) or 'a number'}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all algorithm options. Raises ConfigError, naming all problems at once, when built with impossible values."""

    def check(self) -> Iterator[Problem]:
        """The problems of these values alone."""
        yield from ()

    def __post_init__(self) -> None:
        if problems := list(self.check()):
            raise refuse(problems, subject="these options cannot work")


@dataclass(frozen=True, kw_only=True)
class TokenOptions(Options):
    """Options that every token objective takes: aggregation, advantages, ratio reference and the shared terms."""

    loss_aggregation: Aggregation = "token"  # mean over tokens, over sequences, or Σ/(sequences·max_tokens)
    max_tokens: int | None = None  # the constant of loss_aggregation=constant; a run passes rollout.max_tokens
    advantage_norm: AdvantageNorm = "group"  # divide by the group's standard deviation, or whiten over the batch
    use_ppo_clip: bool | None = None  # PPO's clipped ratio; null: true for grpo, rloo, dr_grpo, reinforce_pp
    clip_ratio_c: float | None = None  # dual clip: the loss of a negative advantage is at most c·|A|; null: off
    ppo_clip_ref_logprobs: RatioReference = "old"  # of the ratio; auto: rollout if asynchronous without TIS
    use_tis: bool = False  # weight each token by its clipped importance weight, old over rollout
    tis_mode: TISMode = "truncate"  # truncate: min(w, cap); icepop: 0 outside [floor, cap]
    tis_cap: float = 2.0  # largest importance weight
    tis_floor: float = 0.0  # smallest importance weight (icepop)
    seq_is_masking: bool = False  # drop sequences whose geometric-mean ratio, old over rollout, leaves [low, high]
    seq_is_mask_low: float = 0.8  # lower end of that range
    seq_is_mask_high: float = 1.2  # upper end of that range
    kl_coef: float = 0.0  # weight of the KL term to the reference model; 0: no reference model
    kl_estimator: KLEstimator = "k3"  # k1: δ; k2: δ²/2; k3: exp(−δ)−1+δ, with δ = logπ − ref
    entropy_coef: float = 0.0  # weight of the entropy bonus

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        for name in ("kl_coef", "entropy_coef", "tis_floor"):
            yield from bound(self, name, ge=0)
        yield from bound(self, "tis_cap", gt=0)
        yield from bound(self, "seq_is_mask_low", gt=0, lt=1)
        yield from bound(self, "seq_is_mask_high", gt=1)
        yield from bound(self, "max_tokens", ge=1)
        if self.clip_ratio_c is not None and not self.clip_ratio_c > 1:
            yield Problem(
                "clip_ratio_c",
                f"{self.clip_ratio_c}: the dual clip must exceed 1, or it caps the loss of tokens on policy",
                "set clip_ratio_c above 1 (3 is usual), or null",
            )
        if self.tis_floor > self.tis_cap > 0:
            yield Problem(
                "tis_floor",
                f"{self.tis_floor} exceeds tis_cap={self.tis_cap}: every token would be dropped",
                "set tis_floor below tis_cap",
            )
        if self.tis_floor > 0 and self.tis_mode == "truncate":
            yield Problem(
                "tis_floor",
                f"{self.tis_floor} has no effect with tis_mode=truncate, which only caps",
                "set tis_mode=icepop, or tis_floor=0",
            )


@dataclass(frozen=True, kw_only=True)
class ClipOptions(TokenOptions):
    """Options of token objectives that clip their ratio to [1 − clip_low, 1 + clip_high]."""

    clip_low: float = 0.2  # how far the ratio may fall below 1
    clip_high: float = 0.28  # how far the ratio may rise above 1

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        yield from bound(self, "clip_low", ge=0, le=1)
        yield from bound(self, "clip_high", ge=0)
