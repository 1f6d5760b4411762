"""Unbiased estimates from `n` completions of one prompt, `c` of them correct, for `k` of them drawn without replacement.

    pass_at_k(10, 3, 5)     # 0.916667: the chance that at least one of five is correct, 1 − C(n−c,k)/C(n,k)
    pass_hat_k(10, 3, 2)    # 0.066667: the chance that two of two are correct, C(c,k)/C(n,k)

With n = k the first would be "was any of them correct?" and the second "were all?", a coin instead of an estimate: n > k is
required. A completion that failed or could not be scored counts in n as a wrong one; leaving it out would raise the estimate.
"""

from __future__ import annotations

import math

from posttrain.errors import ConfigError


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one or more of `k` completions are correct. Raises ConfigError unless 0 ≤ c ≤ n and n > k ≥ 1."""
    refuse_few(n, c, k)
    if n - c < k:
        return 1.0
    return -math.expm1(math.fsum(math.log1p(-c / (n - i)) for i in range(k)))


def pass_hat_k(n: int, c: int, k: int) -> float:
    """The chance that all of `k` completions are correct. Raises ConfigError unless 0 ≤ c ≤ n and n > k ≥ 1."""
    refuse_few(n, c, k)
    return math.prod((c - i) / (n - i) for i in range(k)) if c >= k else 0.0


def refuse_few(n: int, c: int, k: int) -> None:
    """Raise ConfigError for numbers of which there is no estimate."""
    if k < 1 or not 0 <= c <= n:
        fix = "k at least 1, and 0 to n correct"
        raise ConfigError(f"pass@{k} of {c} correct among {n} means nothing", fix=fix, code="pass-k")
    if n <= k:
        raise ConfigError(
            f"pass@{k} needs more than {k} completions of a prompt, and there are {n}",
            cause="of exactly k it is whether any was correct, not an estimate of how often one is",
            fix=f"samples={2 * k} or more, or a smaller k",
            code="pass-k",
        )
