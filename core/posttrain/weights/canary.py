"""The canary: proof of meaning. After a commit the engine's log-probs of a fixed probe equal the trainer's.

Digests prove that the bytes arrived; they do not prove that the engine computes the policy's function with them (a tied head
that keeps its packed old weights passes every digest). Limits: fp32 by the largest difference; bf16 by mean and largest,
because kernels round differently.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from posttrain.errors import WeightSyncError

if TYPE_CHECKING:
    from posttrain.config.schema import WeightsConfig

Score = Callable[[Sequence[Sequence[int]]], list[list[float]]]
"""The trainer's log-probs at temperature 1 of each token given those before it, from the second token on."""


class Scores(Protocol):
    """Whatever computes log-probs with the weights in place: an engine, or the driver's end of a lane."""

    async def logprobs(self, sequences: Sequence[Sequence[int]], /) -> list[list[float]]:
        """Log-prob at temperature 1 of each token given those before it, from the second token on."""


def make_probe(vocab_size: int, *, rows: int = 4, length: int = 16, seed: int = 0) -> list[list[int]]:
    """A fixed probe: `rows` random sequences of `length` token ids."""
    draw = random.Random(f"canary/{seed}")
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(rows)]


class Canary:
    """probe: token ids `[rows][length]`; score: the trainer's; dtype: the engine's, which decides the limits."""

    def __init__(self, score: Score, probe: Sequence[Sequence[int]], config: WeightsConfig, *, dtype: str) -> None:
        self._score, self.probe, self._config, self._dtype = score, [list(ids) for ids in probe], config, dtype

    def expect(self) -> list[list[float]]:
        """The trainer's log-probs of the probe now; call it between publishing and the next optimizer step."""
        return self._score(self.probe)

    async def check(self, engine: Scores, expected: Sequence[Sequence[float]]) -> dict[str, float]:
        """Compare an engine with `expected`. Raises WeightSyncError naming the biggest difference."""
        found = await engine.logprobs(self.probe)
        gaps = [
            (abs(a - b), row, t + 1, a, b)
            for row, (mine, theirs) in enumerate(zip(found, expected, strict=True))
            for t, (a, b) in enumerate(zip(mine, theirs, strict=True))
        ]
        worst = max(gaps, key=lambda gap: (gap[0] != gap[0], gap[0]))
        mean = sum(gap[0] for gap in gaps) / len(gaps)
        metrics = {"weights/canary_max": worst[0], "weights/canary_mean": mean}
        problem = self._problem(worst[0], mean)
        if problem:
            gap, row, token, a, b = worst
            raise WeightSyncError(
                f"the engine does not compute the policy's function: {problem}. Biggest difference: {gap:.4g} nats at row {row}, "
                f"token {token} (id {self.probe[row][token]}): engine {a:.4f}, trainer {b:.4f}",
                cause="the bytes arrived (digests agree), so the engine uses them differently: a tied or fused weight "
                "that was not rebuilt, another model class, or another config",
                fix="check that policy and engine are built from the same folder; report the model if they are; "
                "the limits are weights.canary_*",
                code="canary",
                retryable=False,
            )
        return metrics

    def _problem(self, worst: float, mean: float) -> str:
        c = self._config
        checks = [("largest", worst, "canary_max_fp32", c.canary_max_fp32)]
        if self._dtype != "float32":
            checks = [("mean", mean, "canary_mean_bf16", c.canary_mean_bf16)]
            checks += [("largest", worst, "canary_max_bf16", c.canary_max_bf16)]
        failed = [f"{what} gap {gap:.4g} > weights.{key}={limit:g}" for what, gap, key, limit in checks if not gap <= limit]
        return "; ".join(failed)
