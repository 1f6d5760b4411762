"""CISPO: Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv 2506.13585).

    A_i = as GRPO
    ℓ_t = −sg[clip(ρ_t, 1 − clip_low, 1 + clip_high)]·A·log π(y_t)        sg: no gradient
    L   = Σ_t ℓ_t / (trained tokens of the optimizer step)

The weight is clipped, not the token's update: every token keeps a gradient.

Deviations from the paper:
- none in the term: `clip_low=1` leaves the lower side open, as the paper does; `clip_high=4` caps the weight at 5;
- other libraries take the cap itself as their upper ε; here it is the distance from 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from posttrain.objective import Algorithm, ClipOptions
from posttrain.objective.groups import Floats, Rewards, normalised

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.types import TokenBatch


class CISPO(Algorithm):
    """CISPO: a clipped, detached importance weight on the policy gradient of every token."""

    api = 1
    clips_ratio = True
    needs_groups = True

    @dataclass(frozen=True, kw_only=True)
    class Options(ClipOptions):
        clip_low: float = 1.0  # how far the weight may fall below 1; 1 leaves it open
        clip_high: float = 4.0  # how far the weight may rise above 1

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
        return normalised(rewards, groups, trained, self.token_options.advantage_norm)

    def policy_loss(self, batch: TokenBatch) -> Tensor:
        options = cast(ClipOptions, self.options)
        weights = self.ratio(batch).detach().clamp(1 - options.clip_low, 1 + options.clip_high)
        return -weights * batch.advantages * batch.logprobs

    def clipped(self, batch: TokenBatch) -> Tensor:
        options, ratio = cast(ClipOptions, self.options), self.ratio(batch)
        return (ratio < 1 - options.clip_low) | (ratio > 1 + options.clip_high)

    def notes(self) -> Iterator[str]:
        yield from super().notes()
        if self.token_options.clip_ratio_c is not None:
            yield "clip_ratio_c cannot bind: where the advantage is negative the loss, |A|·w·logπ, is never above 0"
