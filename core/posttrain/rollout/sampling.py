"""How tokens are drawn: noise ahead of time, inverse-CDF draws, and the log-probs of the distribution drawn from.

The noise of a request is one tensor, drawn from its seed before the first token: sample `i`, token `t` uses entry `[i, t]`.
What else is in the batch, and in which order it runs, therefore changes no draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.types import Request, Sampling


def request_noise(request: Request) -> torch.Tensor:
    """Uniforms in [0, 1) of one request: float64 `[n, max_tokens]`. Touches no global generator."""
    generator = torch.Generator().manual_seed(request.seed)
    return torch.rand(request.n, max(request.sampling.max_tokens, 0), dtype=torch.float64, generator=generator)


def processed_logprobs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probs `[B, V]` float32 of the distribution that `sampling` draws from; logits `[B, V]`.

    Temperature divides the logits, then min_p, top_k and top_p cut the distribution, and what is left is normalised.
    Temperature 0 reports the distribution of temperature 1.
    """
    scaled = logits.float()
    if sampling.temperature not in (0, 1):
        scaled = scaled / sampling.temperature
    if sampling.filtered:
        scaled = _cut(scaled, sampling)
    return torch.log_softmax(scaled, dim=-1)


def draw(logprobs: torch.Tensor, uniform: torch.Tensor, *, greedy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by inverse CDF: logprobs `[B, V]`, uniform `[B]` float64 → tokens int64 `[B]`, their log-probs `[B]`.

    A token of probability 0 is never drawn. `greedy` takes the most likely token (the first of equals).
    """
    if greedy:
        tokens = logprobs.argmax(dim=-1, keepdim=True)
    else:
        cdf = logprobs.double().exp_().cumsum_(dim=-1)
        total = cdf[:, -1:]
        below = torch.minimum(uniform.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cdf, below, right=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def is_stop(tokens: torch.Tensor, stop_ids: Sequence[int]) -> torch.Tensor:
    """Which of tokens `[B]` end a completion: bool `[B]`."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for stop in stop_ids:
        found |= tokens == stop
    return found


def _cut(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits with everything outside the nucleus at −inf. Ties at the border of top_k are kept."""
    if sampling.min_p > 0:
        floor = logits.max(dim=-1, keepdim=True).values + torch.log(torch.tensor(sampling.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        outside = before >= sampling.top_p
        outside[:, 0] = False
        logits = logits.masked_fill(outside.scatter(1, index, outside), -torch.inf)
    return logits
