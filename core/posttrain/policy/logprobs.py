"""Log-probs of given tokens from hidden states, in float32 (or wider), without the `[T, V]` matrix of logits.

    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=1024, entropy=True)

Logits exist for `chunk_tokens` positions at a time. The backward pass computes them again and forms their gradient in the
same memory; only the last chunk's logits wait for it, so a batch that fits one chunk is never computed twice. Whatever the
dtype of hidden states and weight, the arithmetic is float32, or float64 when the hidden states are: a log-prob of -4 in
bfloat16 is off by up to 0.016 nats, which rounds small policy changes to a ratio of exactly 1 and moves the clip rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 2**20
"""Elements of the small temporaries: a few rows of logits that stay in the processor's cache between two operations."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    entropy: bool = False,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-softmax of `(hidden @ weight.T + bias) / temperature` at `targets`, and the entropy of each distribution.

    hidden [T, H], weight [V, H], bias [V]: any float dtype.   targets [T] int64.   temperature: divides logits, above 0.
    softcap: the model's logits are `softcap * tanh(logits / softcap)`; the temperature divides those.
    chunk_tokens: positions whose logits exist at once; memory is `chunk_tokens * V` elements beside the gradients.
    Returns log-probs `[T]` and entropies `[T]` in nats (None unless asked for), float32, or float64 for float64 hidden
    states; both can be differentiated. Raises ValueError for a temperature or a chunk size of 0 or less.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: a greedy distribution has no log-probs to train on; use a value above 0")
    if chunk_tokens <= 0:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
    with torch.autocast(hidden.device.type, enabled=False):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        scaled = hidden.to(dtype) / temperature  # dividing [T, H] divides the logits, at H/V of the cost
        offset = None if bias is None else bias.to(dtype) / temperature
        cap = None if softcap is None else softcap / temperature
        logprobs, entropies = _TokenLogprobs.apply(scaled, weight, offset, targets, chunk_tokens, entropy, cap)
    return logprobs, entropies if entropy else None


class _TokenLogprobs(torch.autograd.Function):
    """`hidden` and `bias` arrive in the dtype of the arithmetic; `weight` in its own, widened piece by piece."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, entropy: bool,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tokens = hidden.shape[0]
        logprobs, normaliser = hidden.new_empty(tokens), hidden.new_empty(tokens)
        entropies = hidden.new_empty(tokens if entropy else 0)
        logits = hidden.new_empty(min(chunk, tokens), weight.shape[0])
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            _logits_(logits, hidden[part], weight, bias, cap)
            _normalise(logits[: part.stop - start], normaliser[part], entropies[part] if entropy else None)
            chosen = logits[: part.stop - start].gather(1, targets[part, None]).squeeze(1)
            torch.sub(chosen, normaliser[part], out=logprobs[part])
        ctx.chunk, ctx.cap, ctx.last_logits = chunk, cap, logits if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropies = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=hidden.dtype, device=weight.device) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        tokens, kept = hidden.shape[0], ctx.last_logits is not None
        logits = ctx.last_logits if kept else hidden.new_empty(min(ctx.chunk, tokens), weight.shape[0])
        ctx.last_logits = None  # its memory is overwritten below
        for start in reversed(range(0, tokens, ctx.chunk)):
            part = slice(start, min(start + ctx.chunk, tokens))
            if not kept:
                _logits_(logits, hidden[part], weight, bias, ctx.cap)
            kept = False
            grad = logits[: part.stop - start]
            of_logprob = grad.new_zeros(grad.shape[0]) if grad_logprobs is None else grad_logprobs[part]
            of_entropy = None if grad_entropies is None else (grad_entropies[part], entropies[part])
            _gradient_(grad, targets[part], normaliser[part], of_logprob, of_entropy, ctx.cap)
            if grad_hidden is not None:
                _times_weight_(grad_hidden[part], grad, weight)
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias, None, None, None, None


def _logits_(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, cap: float | None) -> None:
    """Write `hidden @ weight.T + bias` into the first rows of `out` `[c, V]`, capped softly at `cap`."""
    out = out[: hidden.shape[0]]
    for piece, wide in _pieces(weight, hidden.dtype):
        torch.mm(hidden, wide.t(), out=out[:, piece])
    if bias is not None:
        out += bias
    if cap is not None:
        out.div_(cap).tanh_().mul_(cap)


def _times_weight_(out: Tensor, grad: Tensor, weight: Tensor) -> None:
    """Write `grad @ weight` into `out` `[c, H]`."""
    for number, (piece, wide) in enumerate(_pieces(weight, grad.dtype)):
        torch.addmm(out, grad[:, piece], wide, beta=float(number > 0), out=out)


def _pieces(weight: Tensor, dtype: torch.dtype) -> Iterable[tuple[slice, Tensor]]:
    """The weight's rows in `dtype`: at once when they are already, else a piece at a time, so no wide copy exists whole."""
    if weight.dtype == dtype:
        return [(slice(None), weight)]
    rows = max(1, BLOCK_ELEMENTS // weight.shape[1])
    spans = (slice(start, start + rows) for start in range(0, weight.shape[0], rows))
    return ((span, weight[span].to(dtype)) for span in spans)


def _normalise(logits: Tensor, normaliser: Tensor, entropies: Tensor | None) -> None:
    """Fill log Σ exp of each row, and its entropy log s - Σ e^x x / s with x the logits below their maximum."""
    for rows in _blocks(logits):
        top = logits[rows].amax(1)
        below = logits[rows] - top[:, None]
        weights = below.exp() if entropies is not None else below.exp_()
        total = weights.sum(1)
        torch.add(top, total.log(), out=normaliser[rows])
        if entropies is not None:
            torch.sub(total.log(), weights.mul_(below).sum(1) / total, out=entropies[rows])


def _gradient_(
    logits: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, of_entropy: tuple[Tensor, Tensor] | None,
    cap: float | None,
) -> None:  # fmt: skip
    """Replace logits by the gradient of the loss: g (1[target] - p) - g_H p (log p + H); times 1 - (logit / cap)² under a cap."""
    at_target = grad
    if cap is not None:
        at_target = grad * _cap_slope(logits.gather(1, targets[:, None]).squeeze(1), cap)
    for rows in _blocks(logits):
        capped = None if cap is None else _cap_slope(logits[rows], cap)
        block = logits[rows].sub_(normaliser[rows, None])
        if of_entropy is None:
            block.exp_().mul_(-grad[rows, None])
        else:
            grad_entropy, entropy = of_entropy
            slope = (block + entropy[rows, None]).mul_(-grad_entropy[rows, None]).sub_(grad[rows, None])
            block.exp_().mul_(slope)
        if capped is not None:
            block.mul_(capped)
    logits.scatter_add_(1, targets[:, None], at_target[:, None])


def _cap_slope(capped: Tensor, cap: float) -> Tensor:
    """d capped / d logit, from the capped logit."""
    return 1 - (capped / cap).square_()


def _blocks(logits: Tensor) -> list[slice]:
    rows = max(1, BLOCK_ELEMENTS // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
