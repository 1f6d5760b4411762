"""SAPO: Soft Adaptive Policy Optimization (arXiv 2511.20347).

    A_i = as GRPO
    ℓ_t = −A·(4/τ)·σ(τ·(ρ_t − 1))                τ = sapo_tau_pos if A > 0 else sapo_tau_neg
    L   = Σ_t ℓ_t / (trained tokens of the optimizer step)

A soft gate takes the place of the clip: on policy its gradient is that of −A·log π for any τ, and it fades as ρ leaves 1,
faster for negative advantages.

Deviations from the paper:
- tokens weigh the same over the whole step; the paper's mean per sequence is `loss_aggregation=sequence`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from posttrain.objective import Algorithm, Problem, TokenOptions, bound
from posttrain.objective.groups import Floats, Rewards, normalised

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.types import TokenBatch


class SAPO(Algorithm):
    """SAPO: a sigmoid gate on the ratio instead of a clip."""

    api = 1
    needs_groups = True

    @dataclass(frozen=True, kw_only=True)
    class Options(TokenOptions):
        sapo_tau_pos: float = 1.0  # sharpness of the gate for positive advantages
        sapo_tau_neg: float = 1.05  # sharpness of the gate for the others

        def check(self) -> Iterator[Problem]:
            yield from super().check()
            yield from bound(self, "sapo_tau_pos", gt=0)
            yield from bound(self, "sapo_tau_neg", gt=0)

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
        return normalised(rewards, groups, trained, self.token_options.advantage_norm)

    def policy_loss(self, batch: TokenBatch) -> Tensor:
        options = cast(SAPO.Options, self.options)
        ratio, advantages = self.ratio(batch), batch.advantages
        tau = ratio.new_full((), options.sapo_tau_pos).where(advantages > 0, ratio.new_full((), options.sapo_tau_neg))
        return -advantages * (4 / tau) * (tau * (ratio - 1)).sigmoid()
