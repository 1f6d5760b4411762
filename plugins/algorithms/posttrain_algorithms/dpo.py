"""DPO: Direct Preference Optimization (arXiv 2305.18290), and IPO (arXiv 2310.12036).

    Δ = Σ_t (log π − log π_ref) of the chosen − the same of the rejected   over trained tokens
    sigmoid: ℓ = −(1 − ε)·logσ(β·Δ) − ε·logσ(−β·Δ)                         ε = label_smoothing
    ipo:     ℓ = (Δ − 1/(2β))²
    L = Σ ℓ / (pairs of the optimizer step)

Pairs come with the data, or online from the best and the worst completion of each group whose rewards disagree.
A pair counts when both of its rows have a trained token. Takes no shared terms.

Deviations from the paper:
- `length_normalised` divides each sum by the trained tokens of its sequence; off by default, as in the paper;
- label smoothing is that of conservative DPO; 0 is the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from posttrain import objective
from posttrain.errors import BatchError
from posttrain.objective import PreferenceAlgorithm, Problem, bound, terms

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.types import TokenBatch


ROUNDING = 1e-6
"""A margin within this share of the log-probs is none: the pair counts one half in the accuracy, as a coin toss would."""


class DPO(PreferenceAlgorithm):
    """DPO: learns from pairs of a chosen and a rejected completion."""

    api = 1
    needs_groups = True

    @dataclass(frozen=True, kw_only=True)
    class Options(objective.Options):
        beta: float = 0.1  # how closely the policy is held to the reference
        label_smoothing: float = 0.0  # assumed share of swapped labels
        loss_type: Literal["sigmoid", "ipo"] = "sigmoid"  # logistic (DPO) or squared (IPO)
        length_normalised: bool = False  # mean instead of sum over a sequence's tokens

        def check(self) -> Iterator[Problem]:
            yield from super().check()
            yield from bound(self, "beta", gt=0)
            yield from bound(self, "label_smoothing", ge=0, lt=0.5)
            if self.label_smoothing and self.loss_type == "ipo":
                smoothing = self.label_smoothing
                yield Problem(
                    "label_smoothing",
                    f"{smoothing} has no effect with loss_type=ipo",
                    "set label_smoothing=0, or loss_type=sigmoid",
                )

    def loss(self, batch: TokenBatch) -> Tensor:
        from torch.nn.functional import logsigmoid

        options = cast(DPO.Options, self.options)
        margins = self.margins(batch)
        if options.loss_type == "ipo":
            losses = (margins - 1 / (2 * options.beta)).square()
        else:
            logits, smoothing = options.beta * margins, options.label_smoothing
            losses = -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)
        return losses.sum() / max(batch.total_pairs, 1.0)

    def measures(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Implicit rewards β·(log π − log π_ref), their differences, and log-probs of whole completions; `[P]` each."""
        beta, (chosen, rejected) = cast(DPO.Options, self.options).beta, sides(batch)
        gains, logprobs = self.gains(batch), terms.sequence_sums(batch.logprobs, batch)
        margins = gains[chosen] - gains[rejected]
        noise = ROUNDING * (logprobs[chosen].abs() + logprobs[rejected].abs())
        return {
            "dpo/margin": beta * margins,
            "dpo/accuracy": (margins.masked_fill(margins.abs() <= noise, 0.0).sign() + 1) / 2,
            "dpo/chosen_reward": beta * gains[chosen],
            "dpo/rejected_reward": beta * gains[rejected],
            "dpo/chosen_logprob": logprobs[chosen],
            "dpo/rejected_logprob": logprobs[rejected],
        }

    def margins(self, batch: TokenBatch) -> Tensor:
        """Δ of each pair that counts; `[P]`. Raises BatchError unless each is one chosen and one rejected row."""
        chosen, rejected = sides(batch)
        gains = self.gains(batch)
        return gains[chosen] - gains[rejected]

    def gains(self, batch: TokenBatch) -> Tensor:
        """log π − log π_ref of each row, summed over its trained tokens (or their mean, `length_normalised`); `[S]`."""
        gains = batch.logprobs - terms.require(batch, "ref_logprobs", "dpo compares with the reference model")
        mean = cast(DPO.Options, self.options).length_normalised
        return terms.sequence_means(gains, batch) if mean else terms.sequence_sums(gains, batch)


def sides(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The chosen and the rejected row of each pair that counts, as indices; `[P]` each, by pair number.

    Raises BatchError unless each pair is one chosen and one rejected row.
    """
    pair = terms.require(batch, "pair", "dpo scores pairs")
    chosen = terms.require(batch, "chosen", "dpo scores pairs").bool()
    ids, place = pair.unique(return_inverse=True)
    where, counted = (chosen.long(), place), pair.new_zeros(2, len(ids))
    if broken := ids[((counted.index_put(where, pair.new_ones(len(pair)), accumulate=True) != 1).any(0)) & (ids >= 0)].tolist():
        raise BatchError(f"pairs {broken} are not one chosen and one rejected row", fix="keep a pair in one batch")
    rows = counted.index_put(where, pair.new_ones(len(pair)).cumsum(0) - 1)
    trained = terms.sequence_lengths(batch) > 0
    counts = trained[rows].all(0) & (ids >= 0)
    return rows[1, counts], rows[0, counts]
