"""Keys and values of a batch that decodes in lockstep: allocated once, written in place, attended without copies.

Transformers' own dynamic cache concatenates at every token, and its attention copies grouped-query keys to every head; both
cost more than the arithmetic on a CPU. `attend` is registered with transformers as `posttrain_decode`; it takes the explicit
`[B, 1, Q, K]` mask that the engine always passes.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

from posttrain.policy.attention import UNKNOWN_TERMS, attention

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


def cache_argument(model: Any) -> str:
    """What the model's forward calls its cache: `cache` where transformers has it (5.20 on), `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def select_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Reorder, repeat or drop rows of the whole cache; rows int64 `[B']`."""
    for layer in cache.layers:
        layer.select(rows)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **terms: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query `[B, heads, Q, D]` over key `[B, kv_heads, K, D]`; returns `[B, Q, heads, D]`.

    The queries are the last `Q` of the `K` columns. A layer with a sliding window sees itself and the `sliding_window - 1`
    columns before; columns of one row lie as far apart as its positions, so the mask need not know them. For one new token
    the query heads of a key head are folded into the query axis, so no key is copied or read twice.
    """
    if found := [term for term in UNKNOWN_TERMS if terms.get(term) is not None]:
        raise NotImplementedError(f"{type(module).__name__} has the term {found[0]}, which the hf engine does not compute")
    batch, heads, length, width = query.shape
    kv_heads, columns = key.shape[1:3]
    if sliding_window is not None and sliding_window < columns:
        first = max(0, columns - length - sliding_window + 1)  # what no query sees is not read
        key, value, seen = key[:, :, first:], value[:, :, first:], attention_mask[..., first:]
        attention_mask = seen & torch.ones(seen.shape[-2:], dtype=torch.bool).triu(columns - length - first - sliding_window + 1)
    if length == 1 and kv_heads != heads:
        folded = query.reshape(batch, kv_heads, heads // kv_heads, width)
        out = attention(folded, key, value, attention_mask, scaling, softcap)
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    return attention(query, key, value, attention_mask, scaling, softcap).transpose(1, 2), None


def _room(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, width = states.shape
    return states.new_empty(batch, heads, capacity, width)


def _take(states: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    taken = states.new_empty(len(rows), *states.shape[1:])
    taken[:, :, :length] = states[rows, :, :length]
    return taken


AttentionInterface.register(ATTENTION, attend)
