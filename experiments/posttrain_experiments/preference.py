"""Pairs that come with the data: a tiny model that adds carelessly is shown right sums beside slipped ones.

    posttrain train experiment=preference_dpo

Nothing is sampled: there is no engine, and no reward. The pairs are in two files of this package, JSON lines such as
`{"id": "12+7", "prompt": "12+7=", "chosen": "19", "rejected": "20"}`; the problems of `sums_test.jsonl` train nobody, the
model's warm-up included.

The labels are smoothed: the loss is then smallest at a margin of log(0.95/0.05) = 2.9, and it no longer pays to widen the margin
by making both completions unlikely, as it does with `rl.objective.label_smoothing=0`. The recipe stands alone: it needs no
optional dependency and inherits from no other catalog.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
PROBLEMS = {"operations": ["+"], "largest": 19, "test_size": 80}
"""Which sums there are, and which of them the warm-up of the model leaves out: those of the test file."""

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "preference_dpo": {
        "name": "preference-dpo",
        "model": {
            "name_or_path": "tiny-adder",
            "factory": "posttrain_experiments.tiny:build",
            "factory_kwargs": {"environment": PROBLEMS},
        },
        "environments": [
            {
                "name": "preference",
                "options": {"data": str(DATA / "sums_train.jsonl"), "test_data": str(DATA / "sums_test.jsonl")},
            }
        ],
        "rl": {
            "steps": 40,
            "objective": {"name": "dpo", "beta": 1.0, "label_smoothing": 0.05},
            "group_size": 2,
            "batch_per_replica": 64,
            "optimizer": {"name": "adamw", "lr": 1e-4},
        },
        "grid": {"threads": 1},
        "rollout": {"engine": "none", "max_model_len": 32},
        "validation": {"prompts": 80, "every": 10},
    },
}
