"""GRPO: Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300; defaults from DAPO, arXiv 2503.14476).

    A_i = (r_i − mean(r)) / (std(r) + 1e-6)                              over the group of i
    ℓ_t = max(−ρ_t·A, −clip(ρ_t, 1 − clip_low, 1 + clip_high)·A)          ρ_t = π(y_t) / π_old(y_t)
    L   = Σ_t ℓ_t / (trained tokens of the optimizer step)

Deviations from the paper:
- tokens weigh the same over the whole step (DAPO); the paper's mean per sequence is `loss_aggregation=sequence`;
- the upper clip is wider, 0.28 (DAPO's clip-higher); the paper has one ε;
- no KL term unless `kl_coef` is set; the paper's is `kl_estimator=k3` with `kl_coef=0.04`;
- the sample standard deviation (ddof = 1); groups whose rewards agree give exactly 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from posttrain.objective import ClipOptions, PolicyGradient
from posttrain.objective.groups import Floats, Rewards, normalised


class GRPO(PolicyGradient):
    """GRPO: advantages normalised by the group, PPO's clip, token mean."""

    api = 1

    @dataclass(frozen=True, kw_only=True)
    class Options(ClipOptions):
        pass

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
        return normalised(rewards, groups, trained, self.token_options.advantage_norm)
