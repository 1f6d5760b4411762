"""What a model's attention is made of beyond softmax(q k): soft caps, windows, sinks; and the arithmetic that our own needs.

transformers' `sdpa` attention drops a soft cap without a word (the tests' Gemma 2: log-probs off by up to 2.5 nats), so a model
that has one is computed by the formula here, or by transformers' `eager`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
"""Values of a config's `layer_types` whose layers are plain attention, over everything before or over a window of it."""

UNKNOWN_TERMS = ("s_aux", "position_bias")
"""Arguments of transformers' attention functions that change the result and that `attention` does not compute."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None = None
) -> Tensor:
    """`[n, heads, queries, d]` on `[n, key_heads, keys, d]`; causal when there is no mask.

    mask: `[n, 1, queries, keys]`, bool (true: seen) or additive; no row may be empty.
    softcap: scores become `softcap * tanh(scores / softcap)` before the mask; softmax then in float32 or wider.
    """
    groups = query.shape[1] // key.shape[1]
    if softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = query.unflatten(1, (-1, groups))
    scores = grouped @ key[:, :, None].transpose(-1, -2) * scale
    scores = (scores / softcap).tanh() * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()[None, None]
    mask = mask[:, :, None]  # the same for all heads of a group
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


def plain_attention(model: Any) -> str:
    """transformers' own attention that computes all of the model's terms: `sdpa`, or `eager` where that would drop one."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not drops_terms(model.config, "sdpa") else "eager"


def drops_terms(config: Any, attn_implementation: str) -> bool:
    """Whether transformers' attention of this name computes other scores than the config asks for."""
    text = config.get_text_config()
    return attn_implementation == "sdpa" and getattr(text, "attn_logit_softcapping", None) is not None


def head_softcap(config: Any) -> float | None:
    """The model's logits are `cap * tanh(logits / cap)`; None: as the head computes them."""
    return getattr(config.get_text_config(), "final_logit_softcapping", None)


def has_sinks(model: Any) -> bool:
    """Whether its attention has learned sinks beside the keys."""
    return any(name.rsplit(".", 1)[-1] == "sinks" for name, _ in model.named_parameters())
