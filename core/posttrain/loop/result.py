"""What a run came to, with the ways to look at it from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.tracking.summary import Summary


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to.

    run          its directory: `posttrain show RUN`, `posttrain train --resume RUN`
    steps_done   batch steps of this call; a resume with nothing left does 0
    summary      held-out reward before and after, times
    """

    run: Path
    steps_done: int
    summary: Summary

    def metrics(self) -> list[dict[str, Any]]:
        """One row per batch step: `step`, `reward/mean`, `loss`, … (docs/reference/metrics.md)."""
        from posttrain.tracking.metrics import read_metrics

        return read_metrics(self.run)

    def validation(self) -> list[dict[str, Any]]:
        """One row per held-out validation; `step` 0 is before training."""
        from posttrain.tracking.metrics import read_validation

        return read_validation(self.run)

    def evals(self) -> list[dict[str, Any]]:
        """One entry per eval and step, as in evals/summary.json: label, step, accuracy, reward, … with their intervals."""
        from posttrain.evals.result import FOLDER, Results

        return [one.summary() for one in Results(self.run / FOLDER).read()]

    def rollouts(self, step: int | None = None) -> list[dict[str, Any]]:
        """The completions of a batch step (default: the last): `prompt`, `completion`, `reward`, `reward_parts`, …"""
        from posttrain.tracking.rollouts import read_rollouts

        return read_rollouts(self.run, step)

    def export(self, out: str | Path, *, step: int | None = None, dtype: str | None = None) -> Path:
        """Write the model as a Hugging Face folder. step: of a checkpoint (default: the last). dtype: as it was trained."""
        from posttrain.loop.export import export

        return export(self.run, out, step=step, dtype=dtype)

    def __str__(self) -> str:
        return "\n".join(self.summary.lines())
