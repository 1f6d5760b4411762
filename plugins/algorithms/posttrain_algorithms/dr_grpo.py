"""Dr. GRPO: GRPO Done Right ("Understanding R1-Zero-Like Training", arXiv 2503.20783).

    A_i = r_i − mean(r)                                                  over the group of i
    ℓ_t = max(−ρ_t·A, −clip(ρ_t, 1 − clip_low, 1 + clip_high)·A)
    L   = Σ_t ℓ_t / (sequences of the optimizer step · max_tokens)

Neither the standard deviation nor the sequence's own length divides: both bias the gradient, by difficulty and by length.

Deviations from the paper:
- the upper clip is wider, 0.28; the paper has one ε of 0.2;
- the constant is `max_tokens`, the longest completion a run allows, as in the paper's code.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from posttrain.objective import ClipOptions, PolicyGradient
from posttrain.objective.groups import Floats, Rewards, centred
from posttrain.objective.options import Aggregation


class DrGRPO(PolicyGradient):
    """Dr. GRPO: centred advantages and a constant divisor."""

    api = 1
    advantage_norms = ("group",)

    @dataclass(frozen=True, kw_only=True)
    class Options(ClipOptions):
        loss_aggregation: Aggregation = "constant"  # Σ/(sequences·max_tokens): long completions are not favoured

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
        return centred(rewards, groups, trained)
