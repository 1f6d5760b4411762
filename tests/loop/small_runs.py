"""Runs of a few steps on the demo's model, barely taught, with the hf engine: seconds each, the same bits each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.config.load import load_config
from posttrain.loop.run import train

SMALL = [
    "experiment=arithmetic_grpo",
    "model.factory_kwargs.steps=30",
    "model.factory_kwargs.slip_steps=10",
    "rl.batch_per_replica=16",
    "rl.group_size=4",
    "rl.steps=4",
    "rl.discard_group_zero_advantage=false",
    "validation.prompts=4",
    "checkpoint.every=2",
    "checkpoint.keep_last=null",
    "grid.threads=1",
    "tracking.display=none",
]


def start(root: Path, *overrides: str, resume: Path | str | None = None) -> Any:
    """A new run under `root`, or an old one that goes on: from its newest checkpoint, or the one named."""
    if resume is None:
        return train(load_config([*SMALL, *overrides]), run_dir=root)
    config = next(path / "config.yaml" for path in (Path(resume), *Path(resume).parents) if (path / "config.yaml").exists())
    return train(load_config(list(overrides), config_file=config), resume=resume)
