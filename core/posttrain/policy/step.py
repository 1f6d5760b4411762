"""The measurements of one batch step, reduced over whole arrays: no mean of means, whatever the micro-batches."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.policy.optimizer import StepOutcome

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


@dataclass(slots=True)
class StepMeasures:
    """Collects while a batch step runs; `result` reduces."""

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
        for name, array in stats.items():
            self.arrays[name].append(array.to("cpu", torch.float64))
        if first and rollout is not None:
            self.arrays["gap"].append(logprobs.to("cpu", torch.float64) - rollout.to("cpu", torch.float64))

    def result(self) -> StepResult:
        """Everything at once, in Python floats."""
        norms = [outcome.grad_norm for outcome in self.outcomes]
        skipped = sum(outcome.skipped for outcome in self.outcomes)
        metrics = {
            "loss": _mean(self.losses),
            "grad_norm": _mean([norm for norm in norms if math.isfinite(norm)] or norms),
            "lr": self.lr,
            "tokens/trained": self.tokens,
            "policy/skipped_steps": skipped,
        }
        return StepResult(metrics | self.means(), len(norms) - skipped, skipped > 0, dict(self.seconds))

    def means(self) -> dict[str, float]:
        """The metrics that are means of the arrays collected so far: sum over everything, divided by its number."""
        arrays = {name: torch.cat(parts) for name, parts in self.arrays.items()}
        found = {metric: arrays[name] for metric, name in MEANS.items() if name in arrays}
        found |= {name: array for name, array in arrays.items() if "/" in name}
        metrics = {name: array.mean().item() for name, array in found.items() if len(array)}
        if (gap := arrays.get("gap")) is not None:
            ratio = gap.clamp(-20, 20).exp()
            metrics["policy/logprob_gap"] = gap.abs().mean().item()
            metrics["policy/ratio_min"] = ratio.min().item()
            metrics["policy/ratio_mean"] = ratio.mean().item()
            metrics["policy/ratio_max"] = ratio.max().item()
        return metrics


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
