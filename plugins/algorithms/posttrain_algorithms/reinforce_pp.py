"""REINFORCE++ with a group baseline (arXiv 2501.03262).

    a_i = r_i − mean(r)                                                  over the group of i
    A_i = (a_i − mean(a)) / (std(a) + 1e-6)                              over the batch step, all environments together
    ℓ_t = max(−ρ_t·A, −clip(ρ_t, 1 − clip_low, 1 + clip_high)·A)
    L   = Σ_t ℓ_t / (trained tokens of the optimizer step)

Deviations from the paper:
- the paper's k2 KL term is off unless `kl_coef` is set; plain REINFORCE++, without the group baseline, is not offered;
- groups whose rewards agree stay at exactly 0, and count in the batch's mean and standard deviation unless a run has
  discarded them before (`rl.discard_group_zero_advantage`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from posttrain.objective import ClipOptions, PolicyGradient
from posttrain.objective.groups import Floats, Rewards, whitened
from posttrain.objective.options import AdvantageNorm


class ReinforcePP(PolicyGradient):
    """REINFORCE++: centred per group, whitened over the batch."""

    api = 1
    advantage_norms = ("batch",)

    @dataclass(frozen=True, kw_only=True)
    class Options(ClipOptions):
        advantage_norm: AdvantageNorm = "batch"  # always the batch

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
        return whitened(rewards, groups, trained)
