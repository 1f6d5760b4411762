"""The terms that token objectives share, as functions of tensors: ratios, clips, importance weights, KL, aggregation.

`[T]` tensors are per token and hold 0 at masked positions (`loss.clean` sees to it), `[S]` per sequence. Log-ratios are
clamped to ±20. Tensors bring their own operations, so this module does not import torch and a config check stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.errors import BatchError, ConfigError
from posttrain.objective.options import Aggregation, KLEstimator, RatioReference, TISMode

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.types import TokenBatch

LOG_RATIO_BOUND = 20.0


def require(batch: TokenBatch, name: str, reason: str) -> Tensor:
    """Field `name` of the batch. Raises BatchError, giving the reason, when it is None."""
    value = getattr(batch, name)
    if value is None:
        raise BatchError(f"the TokenBatch has no {name}", cause=reason, fix=f"fill TokenBatch.{name}")
    return value


def log_ratio(new: Tensor, reference: Tensor) -> Tensor:
    """new − reference, clamped to ±20; `[T]` nats."""
    return (new - reference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def before_step(batch: TokenBatch) -> Tensor:
    """The trainer's log-probs before the step: the old ones if given, else the current ones, detached; `[T]`."""
    return batch.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs


def proximal(batch: TokenBatch, reference: RatioReference) -> Tensor:
    """What the ratio compares with (`prox`): the rollout log-probs, or those before the step; `[T]`."""
    if reference == "rollout":
        return require(batch, "rollout_logprobs", "ppo_clip_ref_logprobs=rollout")
    return before_step(batch)


def sequence_sums(values: Tensor, batch: TokenBatch) -> Tensor:
    """Sum over each sequence's trained tokens; `[T] -> [S]`."""
    masked = values.masked_fill(~batch.mask, 0.0)
    return masked.new_zeros(batch.num_sequences).index_add(0, batch.sequence, masked)


def sequence_lengths(batch: TokenBatch) -> Tensor:
    """Trained tokens of each sequence, in the float dtype of the batch; `[S]`."""
    return sequence_sums(batch.logprobs.new_ones(batch.logprobs.shape), batch)


def sequence_means(values: Tensor, batch: TokenBatch) -> Tensor:
    """Mean over each sequence's trained tokens, 0 where there is none; `[T] -> [S]`."""
    return sequence_sums(values, batch) / sequence_lengths(batch).clamp(min=1)


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """PPO (arXiv 1707.06347, eq. 7), negated: max(−ratio·A, −clip(ratio, 1−low, 1+high)·A)."""
    return (-ratio * advantages).maximum(-ratio.clamp(1 - low, 1 + high) * advantages)


def clip_binds(ratio: Tensor, advantages: Tensor, low: float, high: float, c: float | None) -> Tensor:
    """Where `clipped_loss` with dual clip `c` has no gradient; bool."""
    binds = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return binds if c is None else binds | ((advantages < 0) & (ratio > c))


def dual_clip(loss: Tensor, advantages: Tensor, c: float | None) -> Tensor:
    """Dual clip (arXiv 1912.09729) of a `clipped_loss`: at most c·|A|. Where A > 0 the loss is below that anyway."""
    return loss if c is None else loss.minimum(c * advantages.abs())


def importance_weights(batch: TokenBatch, mode: TISMode, cap: float, floor: float) -> Tensor:
    """Weights without gradient, exp(before-step − rollout): capped (`truncate`), or 0 outside [floor, cap] (`icepop`); `[T]`."""
    rollout = require(batch, "rollout_logprobs", "use_tis weights each token against its rollout log-prob")
    weights = log_ratio(before_step(batch), rollout).exp()
    if mode == "truncate":
        return weights.clamp(max=cap)
    return weights.masked_fill((weights < floor) | (weights > cap), 0.0)


def kept_sequences(batch: TokenBatch, low: float, high: float) -> Tensor:
    """Which sequences have a geometric-mean ratio, before-step to rollout, inside [low, high]; `[S]` bool."""
    rollout = require(batch, "rollout_logprobs", "seq_is_masking compares each sequence with its rollout log-probs")
    ratio = sequence_means(before_step(batch) - rollout, batch).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return (ratio >= low) & (ratio <= high)


def kl(batch: TokenBatch, estimator: KLEstimator) -> Tensor:
    """KL to the reference model, per token, with δ = logπ − ref: k1 δ, k2 δ²/2, k3 exp(−δ)−1+δ; `[T]` nats."""
    delta = log_ratio(batch.logprobs, require(batch, "ref_logprobs", "kl_coef > 0 needs the reference model's log-probs"))
    if estimator == "k1":
        return delta
    return delta.square() / 2 if estimator == "k2" else (-delta).exp() - 1 + delta


def aggregate(per_token: Tensor, batch: TokenBatch, how: Aggregation, max_tokens: int | None) -> Tensor:
    """This shard's share of the step's loss: a scalar, so that shares sum. Divides by the totals of the whole step."""
    if how == "token":
        return sequence_sums(per_token, batch).sum() / max(batch.total_tokens, 1.0)
    sequences = max(batch.total_sequences, 1.0)
    if how == "sequence":
        return sequence_means(per_token, batch).sum() / sequences
    if max_tokens is None:
        raise ConfigError(
            "loss_aggregation=constant divides by max_tokens, which is not set",
            fix="pass max_tokens, the longest completion (a run passes rollout.max_tokens)",
        )
    return sequence_sums(per_token, batch).sum() / (sequences * max_tokens)
