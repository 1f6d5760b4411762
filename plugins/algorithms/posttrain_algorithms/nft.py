"""NFT: Negative-aware Fine-Tuning ("Bridging Supervised Learning and Reinforcement Learning", arXiv 2505.18116).

    R_t = π(y_t) / π_old(y_t)                    r̂ = mean reward of the group, rewards are 0 or 1
    ℓ_t = −ω(r̂)·[r·log R_t + (1 − r)·log max_v((1 − r̂·R_t) / (1 − r̂), nft_eps)]
    max_v(x, ε) = sg[max(x, ε) − x] + x          the value is capped, the gradient is not
    L   = Σ_t ℓ_t / (trained tokens of the optimizer step)

Completions that are right are learned by maximum likelihood, those that are wrong through the implicit negative policy.
Groups that are all right or all wrong contribute 0. Advantages are GRPO's and serve logging only.

Deviations from the paper:
- `nft_weight=sqrt` is ω = sqrt((1 − r̂)/r̂), the weight that makes NFT equal GRPO on policy (one printed formula lacks the root);
- the log-ratio is clamped to ±20, like every ratio here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from posttrain.errors import DataError
from posttrain.objective import Algorithm, Problem, TokenOptions, bound, terms
from posttrain.objective.groups import Floats, Rewards, normalised, scored

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.types import TokenBatch

_FIX = "use an environment whose rewards are 0 or 1, or an algorithm that takes any reward, such as grpo"


class NFT(Algorithm):
    """NFT: maximum likelihood on right completions, the implicit negative policy on wrong ones."""

    api = 1
    needs = ("binary_rewards",)
    needs_groups = True

    @dataclass(frozen=True, kw_only=True)
    class Options(TokenOptions):
        nft_weight: Literal["one_minus", "sqrt", "none"] = "one_minus"  # weight of a prompt: 1 − r̂, sqrt((1 − r̂)/r̂), or 1
        nft_eps: float = 1.0  # floor of the implicit negative ratio

        def check(self) -> Iterator[Problem]:
            yield from super().check()
            yield from bound(self, "nft_eps", gt=0)

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> Floats:
        values, counts = scored(rewards, groups, trained)
        for index, (reward, count) in enumerate(zip(values, counts, strict=True)):
            if count and reward not in (0.0, 1.0):
                where = f"sample {index} of group {groups[index]!r}"
                raise DataError(f"nft needs rewards of 0 or 1; {where} has {reward:g}", fix=_FIX)
        return normalised(rewards, groups, trained, self.token_options.advantage_norm)

    def policy_loss(self, batch: TokenBatch) -> Tensor:
        options = cast(NFT.Options, self.options)
        right = batch.rewards == 1
        if bad := (~right & (batch.rewards != 0)).nonzero().flatten().tolist():
            raise DataError(f"nft needs rewards of 0 or 1; sequence {bad[0]} has {batch.rewards[bad[0]].item():g}", fix=_FIX)
        live = (batch.baselines > 0) & (batch.baselines < 1)
        mean = batch.baselines.masked_fill(~live, 0.5)
        weights = {"one_minus": 1 - mean, "sqrt": ((1 - mean) / mean).sqrt(), "none": mean.new_ones(mean.shape)}
        weight = weights[options.nft_weight].masked_fill(~live, 0.0)[batch.sequence]
        mean, right = mean[batch.sequence], right[batch.sequence]
        log_ratio = terms.log_ratio(batch.logprobs, self.proximal(batch))
        negative = (1 - mean * log_ratio.exp()) / (1 - mean)
        floored = negative.detach().clamp(min=options.nft_eps)
        log_negative = floored.log() + (negative - negative.detach()) / floored  # the value of the cap, the gradient of the ratio
        return -weight * log_ratio.where(right, log_negative)
