"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071).

    A_i = as GRPO
    s_i = exp(mean over trained tokens of (log π − log π_old))
    ℓ_i = max(−s_i·A_i, −clip(s_i, 1 − clip_low, 1 + clip_high)·A_i)
    L   = Σ_i ℓ_i / (sequences of the optimizer step)

Deviations from the paper:
- none in the term. It is written per token, with one s_i for all tokens of a sequence, so that advantages may differ within a
  sequence and the shared terms apply; under `loss_aggregation=sequence` that is the formula above;
- the sample standard deviation (ddof = 1) in the advantages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from posttrain.objective import Algorithm, ClipOptions, terms
from posttrain.objective.groups import Floats, Rewards, normalised
from posttrain.objective.options import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.types import TokenBatch


class GSPO(Algorithm):
    """GSPO: the ratio, and its clip, of whole sequences."""

    api = 1
    clips_ratio = True
    needs_groups = True

    @dataclass(frozen=True, kw_only=True)
    class Options(ClipOptions):
        loss_aggregation: Aggregation = "sequence"  # every sequence weighs the same
        clip_low: float = 3e-4  # how far a sequence's ratio may fall below 1
        clip_high: float = 4e-4  # how far a sequence's ratio may rise above 1

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
        return normalised(rewards, groups, trained, self.token_options.advantage_norm)

    def ratio(self, batch: TokenBatch) -> Tensor:
        """The ratio of each token's sequence, with gradient; `[T]`."""
        mean = terms.sequence_means(batch.logprobs - self.proximal(batch), batch)
        return mean.clamp(-terms.LOG_RATIO_BOUND, terms.LOG_RATIO_BOUND).exp()[batch.sequence]

    def policy_loss(self, batch: TokenBatch) -> Tensor:
        options = cast(ClipOptions, self.options)
        loss = terms.clipped_loss(self.ratio(batch), batch.advantages, options.clip_low, options.clip_high)
        return terms.dual_clip(loss, batch.advantages, options.clip_ratio_c)

    def clipped(self, batch: TokenBatch) -> Tensor:
        options, ratio = cast(ClipOptions, self.options), self.ratio(batch)
        return terms.clip_binds(ratio, batch.advantages, options.clip_low, options.clip_high, options.clip_ratio_c)
