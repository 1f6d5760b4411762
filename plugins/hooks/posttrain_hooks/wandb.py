"""Weights & Biases: every metric and the config. Offline unless asked otherwise: no account, nothing leaves the machine.

    posttrain train experiment=arithmetic_grpo 'hooks=[{name: wandb}]'
    wandb sync outputs/*/wandb/offline-run-*                               # later, to show them on the site

A resumed run goes on under the same run id. The curves are over `step`, the batch step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import wandb

from posttrain.hooks import Hook
from posttrain_hooks.values import plotted


class Wandb(Hook):
    """Every metric of the run and its config in Weights & Biases; offline by default, in RUN/wandb."""

    api = 1

    @dataclass(frozen=True, kw_only=True)
    class Options:
        project: str = "posttrain"  # W&B project
        entity: str | None = None  # team or user; null: your default one
        group: str | None = None  # W&B group of related runs
        tags: tuple[str, ...] = ()  # labels of the run
        mode: Literal["offline", "online"] = "offline"  # online needs `wandb login` first

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._id: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]

    def run_start(self, path: Path, config: Mapping[str, Any]) -> None:
        chosen = self.options
        self._run = wandb.init(
            project=chosen.project, entity=chosen.entity, group=chosen.group, tags=list(chosen.tags), mode=chosen.mode,
            name=path.name, dir=str(path), config=dict(config), id=self._id, resume="allow",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_job_creation=True),
        )  # fmt: skip
        self._id = self._run.id
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **plotted(metrics)})

    def validation_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **plotted(metrics)})

    def eval_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **plotted(metrics)})

    def run_end(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == "done" else 1)
