"""Trackio: every metric and the config in a local database. `trackio show --project posttrain` opens its dashboard.

    posttrain train experiment=arithmetic_grpo 'hooks=[{name: trackio}]'

A resumed run goes on under the same name. The database lies where Trackio keeps it (TRACKIO_DIR), not in the run's directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trackio

from posttrain.hooks import Hook
from posttrain_hooks.values import plotted


class Trackio(Hook):
    """Every metric of the run and its config in Trackio's local database."""

    api = 1

    @dataclass(frozen=True, kw_only=True)
    class Options:
        project: str = "posttrain"  # Trackio project
        group: str | None = None  # group of related runs
        space_id: str | None = None  # a Hugging Face Space to log to instead of this machine

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._name: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._name = state["name"]

    def run_start(self, path: Path, config: Mapping[str, Any]) -> None:
        chosen, self._name = self.options, self._name or path.name
        self._run = trackio.init(
            project=chosen.project, name=self._name, group=chosen.group, space_id=chosen.space_id, config=dict(config),
            resume="allow", embed=False,
        )  # fmt: skip

    def step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(plotted(metrics), step=step)

    def validation_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(plotted(metrics), step=step)

    def eval_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(plotted(metrics), step=step)

    def run_end(self) -> None:
        self._run.finish()
