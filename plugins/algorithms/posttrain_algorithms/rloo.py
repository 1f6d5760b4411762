"""RLOO: REINFORCE Leave-One-Out (Kool et al. 2019; "Back to Basics", arXiv 2402.14740).

    A_i = r_i − mean of the other rewards of the group
    ℓ_t = max(−ρ_t·A, −clip(ρ_t, 1 − clip_low, 1 + clip_high)·A)
    L   = Σ_t ℓ_t / (trained tokens of the optimizer step)

Deviations from the paper:
- the paper takes −A·log π of the whole sequence, without ratio or clip: that is `use_ppo_clip=false`;
- the paper averages over sequences and does not divide by length; here tokens weigh the same over the step;
- the paper puts the KL penalty into the reward; here it is a loss term (`kl_coef`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from posttrain.objective import ClipOptions, PolicyGradient
from posttrain.objective.groups import Floats, Rewards, leave_one_out


class RLOO(PolicyGradient):
    """RLOO: the other completions of the prompt are the baseline."""

    api = 1
    advantage_norms = ("group",)

    @dataclass(frozen=True, kw_only=True)
    class Options(ClipOptions):
        pass

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
        return leave_one_out(rewards, groups, trained)
