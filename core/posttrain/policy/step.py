"""The measurements of one batch step, reduced over the arrays of all micro-batches and ranks: no mean of means."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.policy.optimizer import StepOutcome
from posttrain.policy.ranks import ALONE, Ranks

MEANS = {
    "policy/entropy": "entropy",
    "policy/clip_fraction": "clipped",
    "policy/kl": "kl",
    "policy/tis_weight": "tis_weight",
    "policy/seq_masked_share": "seq_masked",
}
"""Metric name to the per-token array of `Objective.score` whose mean it is; arrays named `…/…` are metrics already."""


@dataclass(slots=True)
class StepResult:
    """What a batch step did.

    metrics          see the metrics page of the docs
    optimizer_steps  that moved the weights
    skipped          whether an optimizer step was skipped because its gradient was not finite
    seconds          by phase, `time/…_s`
    """

    metrics: dict[str, float]
    optimizer_steps: int
    skipped: bool
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank measured, by metric. sums: (sum, number) of a mean.   lows, highs: the smallest, the largest."""

    sums: dict[str, tuple[float, int]]
    lows: dict[str, float]
    highs: dict[str, float]
    losses: list[float]
    tokens: int
    seconds: dict[str, float]


@dataclass(slots=True)
class StepMeasures:
    """Collects while a batch step runs; `result` reduces over the arrays of all ranks."""

    arrays: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    losses: list[float] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: int = 0
    lr: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[f"time/{name}_s"] += time.perf_counter() - began

    def add(self, stats: dict[str, Tensor], logprobs: Tensor, rollout: Tensor | None, *, first: bool) -> None:
        """One micro-batch. `rollout` None: nobody sampled it. `first`: of the first optimizer step, whose weights sampled it."""
        self.tokens += len(logprobs)
        self.add_stats(stats)
        if first and rollout is not None:
            self.arrays["gap"].append(logprobs.to("cpu", torch.float64) - rollout.to("cpu", torch.float64))

    def add_stats(self, stats: dict[str, Tensor]) -> None:
        """Arrays of one micro-batch whose means are metrics."""
        for name, array in stats.items():
            self.arrays[name].append(array.to("cpu", torch.float64))

    def result(self, ranks: Ranks = ALONE) -> StepResult:
        """Everything at once, in Python floats; seconds are the slowest rank's. Collective, the same on every rank."""
        shares = ranks.gather(self.share())
        norms = [outcome.grad_norm for outcome in self.outcomes]
        skipped = sum(outcome.skipped for outcome in self.outcomes)
        metrics = {
            "loss": _mean([sum(parts) for parts in zip(*(share.losses for share in shares), strict=True)]),
            "grad_norm": _mean([norm for norm in norms if math.isfinite(norm)] or norms),
            "lr": self.lr,
            "tokens/trained": sum(share.tokens for share in shares),
            "policy/skipped_steps": skipped,
        }
        seconds = {name: max(share.seconds[name] for share in shares) for name in self.seconds}
        return StepResult(metrics | means(shares), len(norms) - skipped, skipped > 0, seconds)

    def share(self) -> Share:
        """What this rank adds to the metrics."""
        arrays = {name: torch.cat(parts) for name, parts in self.arrays.items()}
        found = {metric: arrays[name] for metric, name in MEANS.items() if name in arrays}
        found |= {name: array for name, array in arrays.items() if "/" in name}
        lows, highs = dict[str, float](), dict[str, float]()
        if (gap := arrays.get("gap")) is not None:
            ratio = gap.clamp(-20, 20).exp()
            found |= {"policy/logprob_gap": gap.abs(), "policy/ratio_mean": ratio}
            lows["policy/ratio_min"], highs["policy/ratio_max"] = ratio.min().item(), ratio.max().item()
            highs["policy/logprob_gap_max"] = gap.abs().max().item()
        sums = {name: (array.sum().item(), len(array)) for name, array in found.items()}
        return Share(sums, lows, highs, self.losses, self.tokens, dict(self.seconds))


def means(shares: Sequence[Share]) -> dict[str, float]:
    """The metrics that are means or extremes of arrays: over everything that any rank has, whatever each has of it."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for share in shares for name in share.sums):
        totals, numbers = zip(*(share.sums[name] for share in shares if name in share.sums), strict=True)
        if number := sum(numbers):
            metrics[name] = sum(totals) / number
    for name in dict.fromkeys(name for share in shares for name in share.lows):
        metrics[name] = min(share.lows[name] for share in shares if name in share.lows)
    for name in dict.fromkeys(name for share in shares for name in share.highs):
        metrics[name] = max(share.highs[name] for share in shares if name in share.highs)
    return metrics


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
