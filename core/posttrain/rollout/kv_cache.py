"""Keys and values of a batch that decodes in lockstep: allocated once, written in place, attended without copies.

Transformers' own dynamic cache concatenates at every token, and its attention copies grouped-query keys to every head; both
cost more than the arithmetic on a CPU. `attend` is registered with transformers as `posttrain_decode`; it takes the explicit
`[B, 1, Q, K]` mask that the engine always passes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

ATTENTION = "posttrain_decode"


class FixedLayer(DynamicLayer):
    """One layer's keys and values with room for `capacity` columns, `length` of them written."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append `[B, heads, q, D]`; returns views on everything written so far."""
        end = self.length + key_states.shape[2]
        if self.keys is None or self.values is None:
            self.keys, self.values = _room(key_states, self.capacity), _room(value_states, self.capacity)
            self.is_initialized = True
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = _take(self.keys, rows, self.length), _take(self.values, rows, self.length)


def new_cache(layers: int, capacity: int) -> Cache:
    """An empty cache for `layers` layers and `capacity` columns."""
    return Cache(layers=[FixedLayer(capacity) for _ in range(layers)])


def select_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Reorder, repeat or drop rows of the whole cache; rows int64 `[B']`."""
    for layer in cache.layers:
        layer.select(rows)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query `[B, heads, Q, D]` over key `[B, kv_heads, K, D]`; returns `[B, Q, heads, D]`.

    For one new token the query heads of a key head are folded into the query axis, so no key is copied or read twice.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    if length == 1 and kv_heads != heads:
        folded = query.reshape(batch, kv_heads, heads // kv_heads, width)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=kv_heads != heads
    )
    return out.transpose(1, 2), None


def _room(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, width = states.shape
    return states.new_empty(batch, heads, capacity, width)


def _take(states: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    taken = states.new_empty(len(rows), *states.shape[1:])
    taken[:, :, :length] = states[rows, :, :length]
    return taken


AttentionInterface.register(ATTENTION, attend)
