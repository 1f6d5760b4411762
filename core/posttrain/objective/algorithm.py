"""The contract of an algorithm plug-in: how rewards become advantages, and one loss term per token.

The smallest one:

    class MyAlgorithm(Algorithm):
        '''REINFORCE with the group's mean as baseline.'''

        def advantages(self, rewards, groups, trained):
            return centred(rewards, groups, trained)

        def policy_loss(self, batch):
            return -self.ratio(batch) * batch.advantages

Everything else (masking, importance weights, KL, entropy, aggregation) is the core's and happens around `policy_loss`.
A class variable says what the algorithm does with ratios, so that combinations that cannot work are refused before a run.
`PreferenceAlgorithm` is the base of algorithms that learn from pairs; `PolicyGradient` of the four that take PPO's clip.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import numpy as np

from posttrain.config.walker import Problem
from posttrain.objective import options as option
from posttrain.objective import terms
from posttrain.objective.groups import Floats, Rewards, best_and_worst
from posttrain.objective.loss import token_loss
from posttrain.objective.options import ClipOptions, TokenOptions
from posttrain.types import Declares

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.types import TokenBatch


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the run around an objective looks like. `group_size` None: unknown."""

    group_size: int | None = None
    n_mini: int = 1
    temperature: float = 1.0
    asynchronous: bool = False


class Algorithm(Declares, ABC):
    """An algorithm over tokens. Subclasses nest their `Options` and implement `advantages` and `policy_loss`."""

    api: ClassVar[int] = 1
    Options: ClassVar[type[option.Options]] = TokenOptions

    handles_ratio: ClassVar[Literal["ppo", "own", "none"]] = "own"
    """`ppo`: takes `use_ppo_clip`; `own`: uses a ratio in its own way; `none`: uses no ratio, so one optimizer step per batch."""
    clips_ratio: ClassVar[bool] = False
    """Whether the ratio is clipped to [1 − clip_low, 1 + clip_high] (with `use_ppo_clip`, for `ppo`)."""
    advantage_norms: ClassVar[tuple[option.AdvantageNorm, ...]] = ("group", "batch")
    """The legal values of `advantage_norm`."""
    needs_groups: ClassVar[bool] = False
    """Whether a group of one completion teaches nothing."""

    def __init__(self, options: option.Options, context: Context) -> None:
        self.options = options
        self.context = context

    @property
    def token_options(self) -> TokenOptions:
        """The options, seen as those of a token objective."""
        return cast(TokenOptions, self.options)

    @classmethod
    def check(cls, options: option.Options, context: Context) -> Iterator[Problem]:
        """Problems of these options in this run, beyond the shared rules. For subclasses to extend."""
        yield from ()

    @abstractmethod
    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
        """One advantage per trajectory, `[N]` float64 in input order; exactly 0 for rows that are unscorable or not trained."""

    @abstractmethod
    def policy_loss(self, batch: TokenBatch) -> Tensor:
        """The per-token term to minimise, `[T]`. Masked positions hold 0 in all fields, and what is returned there is ignored."""

    def loss(self, batch: TokenBatch) -> Tensor:
        """The contribution of a clean batch to the step's loss; scalar. Token algorithms keep this one."""
        return token_loss(self, batch)

    def pairs(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> list[tuple[int, int]]:
        """(chosen, rejected) rows to train on. Empty unless the algorithm learns from preferences."""
        return []

    def ratio(self, batch: TokenBatch) -> Tensor:
        """exp(logπ − prox), with gradient, prox by `ppo_clip_ref_logprobs`; `[T]`."""
        return terms.log_ratio(batch.logprobs, self.proximal(batch)).exp()

    def proximal(self, batch: TokenBatch) -> Tensor:
        """The log-probs that the ratio compares with; `[T]`."""
        return terms.proximal(batch, self.token_options.ppo_clip_ref_logprobs)

    def clipped(self, batch: TokenBatch) -> Tensor | None:
        """Where the clip binds, `[T]` bool, for the metrics. None when there is no clip."""
        return None

    def measures(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Metrics of the algorithm's own on a clean batch, by full name: arrays whose mean over the batch step is reported.

        One entry per thing counted (`dpo/margin` has one per pair), so that the mean does not depend on micro-batches.
        """
        return {}

    @classmethod
    def uses_ratio(cls, options: option.Options) -> bool:
        """Whether the policy term depends on a ratio under these options."""
        return cls.handles_ratio == "own" or (cls.handles_ratio == "ppo" and getattr(options, "use_ppo_clip", None) is not False)

    @classmethod
    def uses_clip(cls, options: option.Options) -> bool:
        """Whether the policy term clips a ratio under these options."""
        return cls.clips_ratio and cls.uses_ratio(options)

    def notes(self) -> Iterator[str]:
        """What to say when a run starts: settings that cannot have the effect they are set for."""
        if self.uses_clip(self.options) and self.context.n_mini == 1 and self.token_options.ppo_clip_ref_logprobs == "old":
            yield (
                "the clip cannot bind: with one optimizer step per batch the ratio to the old log-probs is 1 "
                "(set rl.mini_batch_per_replica below the batch, or ppo_clip_ref_logprobs=rollout)"
            )

    def needs_old_logprobs(self) -> bool:
        """Whether the trainer must record log-probs before the first of several optimizer steps."""
        options = self.token_options
        against_old = self.uses_ratio(options) and options.ppo_clip_ref_logprobs == "old"
        return self.context.n_mini > 1 and (against_old or options.use_tis or options.seq_is_masking)

    def needs_reference(self) -> bool:
        """Whether a frozen reference model must score the batch."""
        return self.token_options.kl_coef > 0


class PolicyGradient(Algorithm):
    """Base of algorithms whose policy term is PPO's clipped ratio, or −A·logπ with `use_ppo_clip=false`."""

    Options: ClassVar[type[option.Options]] = ClipOptions
    handles_ratio = "ppo"
    clips_ratio = True
    needs_groups = True

    def policy_loss(self, batch: TokenBatch) -> Tensor:
        options = cast(ClipOptions, self.options)
        if not options.use_ppo_clip:
            return -batch.advantages * batch.logprobs
        loss = terms.clipped_loss(self.ratio(batch), batch.advantages, options.clip_low, options.clip_high)
        return terms.dual_clip(loss, batch.advantages, options.clip_ratio_c)

    def clipped(self, batch: TokenBatch) -> Tensor | None:
        options = cast(ClipOptions, self.options)
        if not options.use_ppo_clip:
            return None
        ratio = self.ratio(batch)
        return terms.clip_binds(ratio, batch.advantages, options.clip_low, options.clip_high, options.clip_ratio_c)


class PreferenceAlgorithm(Algorithm):
    """Base of algorithms that learn from pairs: they implement `loss`, and take no shared terms and no advantages."""

    Options: ClassVar[type[option.Options]] = option.Options
    provides: tuple[str, ...] = ("pairs",)
    handles_ratio = "none"

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
        return np.zeros(len(rewards))

    def pairs(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> list[tuple[int, int]]:
        """The best and the worst row of every group whose rewards disagree."""
        return best_and_worst(rewards, groups, trained)

    def policy_loss(self, batch: TokenBatch) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} scores pairs, not tokens: call loss")

    @abstractmethod
    def loss(self, batch: TokenBatch) -> Tensor:
        """The contribution of a clean batch to the step's loss: its pairs' share; scalar."""

    def needs_old_logprobs(self) -> bool:
        return False

    def needs_reference(self) -> bool:
        return True
