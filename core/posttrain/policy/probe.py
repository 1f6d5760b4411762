"""Probes that refuse a policy whose log-probs would be wrong, before anything trains on them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError, PosttrainError, error
from posttrain.policy.attention import plain_attention
from posttrain.policy.module import PolicyModule
from posttrain.policy.prefix import ATTENTION
from posttrain.policy.ranks import ALONE, Ranks
from posttrain.policy.rows import Row

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.5}
"""Largest accepted difference in nats, by the body's dtype; a leak across rows moves log-probs by far more."""


def check_forward(module: PolicyModule, ranks: Ranks = ALONE) -> None:
    """Compare the module's log-probs of one random batch with a plain forward of its model per row. Every rank computes them all.

    Catches what a family of models may do in its own way: positions, masks, a scaled or capped head, a layer that mixes
    tokens of different rows. Raises ConfigError with the largest difference of all ranks.
    """
    rows = probe_rows(module.model.config.get_text_config())
    with torch.no_grad():
        wanted = torch.cat([plain_logprobs(module, row) for row in rows])
        gap = ranks.largest(float((module(module.pack(rows))[0] - wanted).abs().max()))
    limit = TOLERANCE[module.compute_dtype or next(module.parameters()).dtype]
    if gap <= limit:
        return
    family = module.model.config.model_type
    message = f"the policy computes other log-probs than model_type={family!r} itself: largest difference {gap:.3g} nats"
    if module.shared_prefix and ranks.largest(_padded_gap(module, rows, wanted)) <= limit:
        raise ConfigError(
            message,
            cause="its attention has a term that the shared prefix does not reproduce",
            fix="set rl.shared_prefix=false",
            where="rl.shared_prefix",
        )
    raise ConfigError(
        message,
        cause="its body, positions or head do something that the policy does not reproduce",
        fix="this family of models cannot be trained here yet; docs/reference/models.md has those that can",
        where="model.name_or_path",
    )


def _padded_gap(module: PolicyModule, rows: list[Row], wanted: Tensor) -> float:
    """The largest difference when every row is computed by itself, with transformers' own attention."""
    module.shared_prefix = False
    try:
        with torch.no_grad(), transformers_attention(module):
            return float((module(module.pack(rows))[0] - wanted).abs().max())
    finally:
        module.shared_prefix = True


@contextmanager
def transformers_attention(module: PolicyModule) -> Iterator[None]:
    """The model with the attention that transformers would give it, where it has ours."""
    installed = module.model.config._attn_implementation
    if installed != ATTENTION:
        yield
        return
    module.model.set_attn_implementation(plain_attention(module.model))
    try:
        yield
    finally:
        module.model.set_attn_implementation(installed)


def probe_rows(config: Any) -> list[Row]:
    """Two groups and a row alone, of different lengths; longer than the sliding window where that is short."""
    draw = random.Random(0)
    window = getattr(config, "sliding_window", None) or 0
    length = window + 4 if window < 256 else 12

    def row(prompt: list[int], extra: int) -> Row:
        completion = [draw.randrange(config.vocab_size) for _ in range(extra)]
        mask = [False] * len(prompt) + [True] * extra
        return Row(input_ids=prompt + completion, mask=mask, rollout_logprobs=[0.0] * len(mask), prefix=len(prompt))

    prompts = [[draw.randrange(config.vocab_size) for _ in range(size)] for size in (5, length, 3)]
    plan = ((0, 6), (1, length), (0, 1), (1, 3), (2, length))
    return [row(prompts[prompt], extra) for prompt, extra in plan]


def plain_logprobs(module: PolicyModule, row: Row) -> Tensor:
    """The row's log-probs by the Hugging Face model alone: one forward, its own logits, its own attention."""
    with transformers_attention(module):
        found = module.plain_logits(torch.tensor([row.input_ids], device=module.device))[0]
    logits = found.to(torch.promote_types(found.dtype, torch.float32)) / module.temperature
    table = torch.log_softmax(logits, -1)
    return torch.stack([table[position - 1, row.input_ids[position]] for position in row.trained])


@dataclass(frozen=True, slots=True)
class Drift:
    """Log-probs of an update's forward against the recorded ones: how many of how many moved, and by up to how many nats."""

    moved: int
    tokens: int
    gap: float

    @classmethod
    def of(cls, recorded: Tensor, current: Tensor) -> Drift:
        return cls(int((recorded != current).sum()), len(recorded), float((recorded - current).abs().max()))

    @classmethod
    def all(cls, drifts: Sequence[Drift]) -> Drift:
        """Those of several micro-batches or ranks as one."""
        gap = max((drift.gap for drift in drifts), key=lambda gap: (gap != gap, gap), default=0.0)
        return cls(sum(drift.moved for drift in drifts), sum(drift.tokens for drift in drifts), gap)


def not_deterministic(model: Any, drift: Drift) -> PosttrainError | None:
    """E8 when a forward of the update moved at unchanged weights; None when every log-prob is the recorded one."""
    if not drift.moved:
        return None
    config = model.config.get_text_config()
    experts = max(getattr(config, name, None) or 0 for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    routed = experts > 1
    return error(
        "E8",
        share=f"{drift.moved / drift.tokens:.1%}",
        tokens=drift.tokens,
        gap=f"{drift.gap:.3g}" if math.isfinite(drift.gap) else drift.gap,
        routing="NATURAL" if routed else "PINNED",
        cause="the router's top-k over near-tied scores flips with kernel jitter" if routed else "a layer is stochastic",
        fix="unset rl.mini_batch_per_replica (one optimizer step needs no ahead pass); "
        "rl.routing_replay=rollout, which would pin the routing, is not available yet"
        if routed
        else "find the layer (dropout, noise) and switch it off, or unset rl.mini_batch_per_replica",
    )
