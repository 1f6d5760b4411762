"""Arrays for the metrics: what the loss did, without gradient. Reductions happen once per step, in the policy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from posttrain.objective import terms
from posttrain.objective.options import TokenOptions

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.objective.algorithm import Algorithm
    from posttrain.types import TokenBatch


def token_stats(algorithm: Algorithm, batch: TokenBatch) -> dict[str, Tensor]:
    """Detached arrays of a clean batch, those that exist. Of `[T]` ones only trained positions mean anything.

    ratio          exp(current − prox), what the clip sees
    rollout_ratio  exp(current − rollout), trainer against engine
    clipped        bool: the clip binds
    kl             KL to the reference, by `kl_estimator`; only of sampled tokens, on others it estimates nothing
    tis_weight     importance weight
    seq_masked     bool: the token's sequence was masked out
    entropy        nats
    <name>/<name>  `Algorithm.measures`, of any length
    """
    detached = {
        field.name: value.detach()
        for field in dataclasses.fields(batch)
        if hasattr(value := getattr(batch, field.name), "detach")
    }
    batch = dataclasses.replace(batch, **detached)
    stats: dict[str, Tensor] = {}
    if batch.rollout_logprobs is not None:
        stats["rollout_ratio"] = terms.log_ratio(batch.logprobs, batch.rollout_logprobs).exp()
    if batch.entropy is not None:
        stats["entropy"] = batch.entropy
    options = algorithm.options
    if batch.ref_logprobs is not None and batch.rollout_logprobs is not None:
        stats["kl"] = terms.kl(batch, options.kl_estimator if isinstance(options, TokenOptions) else "k3")
    if isinstance(options, TokenOptions):
        stats |= _ratio_stats(algorithm, options, batch)
    return stats | algorithm.measures(batch)


def _ratio_stats(algorithm: Algorithm, options: TokenOptions, batch: TokenBatch) -> dict[str, Tensor]:
    stats = {"ratio": algorithm.ratio(batch)}
    if (clipped := algorithm.clipped(batch)) is not None:
        stats["clipped"] = clipped
    if options.use_tis:
        stats["tis_weight"] = terms.importance_weights(batch, options.tis_mode, options.tis_cap, options.tis_floor)
    if options.seq_is_masking:
        kept = terms.kept_sequences(batch, options.seq_is_mask_low, options.seq_is_mask_high)
        stats["seq_masked"] = ~kept[batch.sequence]
    return stats
