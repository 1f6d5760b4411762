"""From per-token terms to a loss: the shared terms in their order, on a batch whose masked positions cannot matter.

Order: sequence mask → policy term (the algorithm's, clips included) → TIS weight → KL to the reference → entropy bonus →
aggregation. Every mask here fills rather than multiplies: NaN · 0 would be NaN, in the value and in the gradient.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from posttrain.errors import BatchError
from posttrain.objective import terms

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.objective.algorithm import Algorithm
    from posttrain.objective.options import TokenOptions
    from posttrain.types import TokenBatch

PER_TOKEN = ("logprobs", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy")


def clean(batch: TokenBatch) -> TokenBatch:
    """The batch with 0 at every masked position and for every sequence without a trained token.

    Raises BatchError when per-token fields differ in length.
    """
    shape = batch.logprobs.shape
    fields: dict[str, Tensor] = {name: value for name in PER_TOKEN if (value := getattr(batch, name)) is not None}
    shapes = {name: tuple(value.shape) for name, value in [*fields.items(), ("mask", batch.mask), ("sequence", batch.sequence)]}
    if len(shape) != 1 or any(other != tuple(shape) for other in shapes.values()):
        raise BatchError(f"the per-token fields of a TokenBatch must all have shape [T], got {shapes}")
    masked = ~batch.mask
    changes: dict[str, Any] = {name: value.masked_fill(masked, 0.0) for name, value in fields.items()}
    empty = terms.sequence_lengths(batch) == 0
    changes["rewards"] = batch.rewards.masked_fill(empty, 0.0)
    changes["baselines"] = batch.baselines.masked_fill(empty, 0.0)
    return dataclasses.replace(batch, **changes)


def without_masked_sequences(batch: TokenBatch, options: TokenOptions) -> TokenBatch:
    """The batch without the tokens of sequences that `seq_is_masking` removes; the totals stay."""
    if not options.seq_is_masking:
        return batch
    kept = terms.kept_sequences(batch, options.seq_is_mask_low, options.seq_is_mask_high)
    return clean(dataclasses.replace(batch, mask=batch.mask & kept[batch.sequence]))


def token_loss(algorithm: Algorithm, batch: TokenBatch) -> Tensor:
    """The contribution of a clean `batch` to the step's loss, by the algorithm's policy term and the shared terms; scalar."""
    options = algorithm.token_options
    batch = without_masked_sequences(batch, options)
    per_token = algorithm.policy_loss(batch)
    if options.use_tis:
        per_token = per_token * terms.importance_weights(batch, options.tis_mode, options.tis_cap, options.tis_floor)
    if options.kl_coef:
        per_token = per_token + options.kl_coef * terms.kl(batch, options.kl_estimator)
    if options.entropy_coef:
        entropy = terms.require(batch, "entropy", "entropy_coef > 0 needs the entropy of each position")
        per_token = per_token - options.entropy_coef * entropy
    return terms.aggregate(per_token, batch, options.loss_aggregation, options.max_tokens)
