"""Shared-prefix training: the prompt of a group is computed once, exactly.

A micro-batch becomes one row of tokens without any padding, in three sections:

    [stem 1 | stem 2 | … | whole row 1 | … | branch 1a | branch 1b | branch 2a | …]

A stem is a prompt that several rows share; a branch is what one row adds to its stem, with position ids that go on from the
stem's end; a whole row shares nothing. All layers but attention act on single tokens, so only attention must know the
layout: `prefix_attention`, registered with transformers under `ATTENTION`, lets stems and whole rows see themselves and a
branch see its stem and itself, causally, within the layer's sliding window and under its soft cap. A model whose layers mix
tokens in other ways, or whose attention has terms unknown here, has a reason not to (`why_not`); its rows are then computed
separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import ConfigError
from posttrain.policy.attention import KNOWN_LAYERS, UNKNOWN_TERMS, attention, has_sinks

ATTENTION = "posttrain_shared_prefix"
FIX = "set rl.shared_prefix=false: rows are then computed separately, as padded batches"


@dataclass(slots=True)
class Spans:
    """`n` pieces that follow each other, of `lengths` `[n]`: how to pad them to `[n, width]` and back without a scatter.

    pad    `[n * width]` indexes tokens; padding points at token 0    (None when all pieces have one length)
    unpad  `[tokens]` indexes the padded table
    """

    lengths: Tensor
    width: int
    pad: Tensor | None
    unpad: Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | None = None) -> Spans:
        sizes, width = torch.tensor(lengths, dtype=torch.long, device=device), max(lengths, default=0)
        if all(length == width for length in lengths):
            return cls(sizes, width, None, None)
        real = torch.arange(width, device=device) < sizes[:, None]
        pad = torch.zeros(real.shape, dtype=torch.long, device=device)
        pad[real] = torch.arange(sum(lengths), device=device)
        return cls(sizes, width, pad.flatten(), real.flatten().nonzero().squeeze(1))

    @property
    def tokens(self) -> int:
        return len(self.lengths) * self.width if self.unpad is None else len(self.unpad)

    def padded(self, tokens: Tensor) -> Tensor:
        """`[tokens, …]` to `[n, width, …]`."""
        if self.pad is not None:
            tokens = _Select.apply(tokens, self.pad, self.unpad)
        return tokens.unflatten(0, (len(self.lengths), self.width))

    def unpadded(self, table: Tensor) -> Tensor:
        """`[n, width, …]` to `[tokens, …]`."""
        table = table.flatten(0, 1)
        return table if self.unpad is None else _Select.apply(table, self.unpad, self.pad, self.unpad)


class _Select(torch.autograd.Function):
    """`x[index]` whose backward is `grad[inverse]`, zero outside `only`: faster than the general scatter-add.

    Right because each token has one real slot, and the gradient of a padded slot is zero: no real query sees it as a key,
    and its own output is dropped.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, only: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(inverse, only)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        inverse, only = ctx.saved_tensors
        if only is None:
            return grad.index_select(0, inverse), None, None, None
        spread = grad.new_zeros(len(inverse), *grad.shape[1:])
        return spread.index_copy_(0, only, grad), None, None, None


@dataclass(slots=True)
class PrefixLayout:
    """Where stems, whole rows and branches lie in the row of tokens; `stem_of` `[branches]` is each branch's stem."""

    stems: Spans
    wholes: Spans
    branches: Spans
    stem_of: Tensor
    _masks: dict[tuple[Any, ...], list[Tensor | None]] = field(default_factory=dict)

    def masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor | None]:
        """Additive masks `[·, 1, queries, keys]` of stems, whole rows and branches; None: plain causal. Made once."""
        if (window, dtype) not in self._masks:
            stem, whole, branch = (
                torch.arange(spans.width, device=self.stem_of.device)[None] for spans in (self.stems, self.wholes, self.branches)
            )
            starts = self.stems.lengths[self.stem_of][:, None]
            keys = torch.cat([stem.expand(len(starts), -1), starts + branch], dim=1)
            real = torch.cat([stem < starts, torch.ones_like(starts + branch, dtype=torch.bool)], dim=1)
            causal = (
                None if window is None or window >= positions.shape[1] else visible(positions, positions, None, window, dtype)
                for positions in (stem, whole)
            )
            self._masks[window, dtype] = [*causal, visible(starts + branch, keys, real, window, dtype)]
        return self._masks[window, dtype]


def visible(queries: Tensor, keys: Tensor, real: Tensor | None, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where position `queries[n, i]` may see position `keys[n, j]`, -inf elsewhere; `[n, 1, queries, keys]`."""
    seen = keys[:, None] <= queries[:, :, None]
    if window is not None:
        seen = seen & (keys[:, None] > queries[:, :, None] - window)
    if real is not None:
        seen = seen & real[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]


def prefix_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    layout: PrefixLayout | None = None,
    **terms: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' interface over a `PrefixLayout`: `[1, heads, T, d]` in, `[1, T, heads, d]` out."""
    refuse_unknown(module, layout, dropout, terms)
    assert layout is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    sections = (layout.stems, layout.wholes, layout.branches)
    masks = layout.masks(sliding_window, q.dtype)
    sizes = [spans.tokens for spans in sections]
    outputs, stem_keys_values = [], []
    for number, (spans, mask, *parts) in enumerate(zip(sections, masks, *(x.split(sizes) for x in (q, k, v)), strict=True)):
        if not spans.tokens:
            continue
        queries, keys, values = (spans.padded(x) for x in parts)
        if number == 0:
            stem_keys_values = [keys, values]
        if number == 2:
            keys, values = (
                torch.cat([stem.index_select(0, layout.stem_of), own], dim=1)
                for stem, own in zip(stem_keys_values, (keys, values), strict=True)
            )
        q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (queries, keys, values))
        outputs.append(spans.unpadded(attention(q_heads, k_heads, v_heads, mask, scaling, softcap).transpose(1, 2)))
    return torch.cat(outputs)[None], None


def refuse_unknown(module: Any, layout: PrefixLayout | None, dropout: float, terms: dict[str, Any]) -> None:
    """Raise ConfigError for an attention that this one would compute wrongly."""
    name, problem = type(module).__name__, ""
    if layout is None:
        problem = "does not hand its extra arguments on to the attention function"
    elif dropout:
        problem = f"applies a dropout of {dropout}"
    elif not getattr(module, "is_causal", True) or terms.get("is_causal") is False:
        problem = "is not causal"
    elif found := [term for term in UNKNOWN_TERMS if terms.get(term) is not None]:
        problem = f"has the term {found[0]}"
    if problem:
        raise ConfigError(f"a shared prefix cannot be computed exactly: {name} {problem}", fix=FIX, where="rl.shared_prefix")


def why_not(model: Any) -> str:
    """Why this model's prompts cannot be shared exactly; empty when they can."""
    config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention is not pluggable in transformers"
    if foreign := set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS:
        return f"it has layers of type {', '.join(sorted(foreign))}"
    if has_sinks(model):
        return "its attention has sinks"
    return ""


def install(model: Any) -> None:
    """Switch the model to `prefix_attention`, for good. Raises ConfigError when there is a reason not to."""
    from transformers import AttentionInterface

    if problem := why_not(model):
        raise ConfigError(
            f"a shared prefix cannot be computed exactly on model_type={model.config.model_type!r}: {problem}",
            fix=FIX, where="rl.shared_prefix",
        )  # fmt: skip
    AttentionInterface.register(ATTENTION, prefix_attention)
    model.set_attn_implementation(ATTENTION)
