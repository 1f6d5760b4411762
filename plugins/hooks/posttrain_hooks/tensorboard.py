"""TensorBoard: every metric as a scalar, in RUN/tensorboard. `tensorboard --logdir outputs` shows all runs.

    posttrain train experiment=arithmetic_grpo 'hooks=[{name: tensorboard}]'

A resumed run goes on in the same curves: what was recorded past the checkpoint is not shown any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorboard  # noqa: F401  (torch's writer needs it; imported here, its absence is told by its name)
import yaml
from torch.utils.tensorboard import SummaryWriter

from posttrain.hooks import Hook
from posttrain_hooks.values import plotted


class TensorBoard(Hook):
    """Every metric of the run as a TensorBoard scalar, in RUN/tensorboard."""

    api = 1

    @dataclass(frozen=True, kw_only=True)
    class Options:
        folder: str = "tensorboard"  # where the files go, from the run's directory

    def run_start(self, path: Path, config: Mapping[str, Any], step: int) -> None:
        self._writer = SummaryWriter(str(path / self.options.folder), purge_step=step + 1 if step else None)
        if not step:
            text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
            self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), 0)

    def step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._write(step, metrics)

    def validation_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._write(step, metrics)

    def eval_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._write(step, metrics)

    def run_end(self) -> None:
        self._writer.close()

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in plotted(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
