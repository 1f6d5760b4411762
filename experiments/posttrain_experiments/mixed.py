"""Two environments in one run: a tiny model that is careless at sums and at countdown gets better at both.

    posttrain train experiment=mixed_envs
"""

from __future__ import annotations

from typing import Any

SUMS = {"operations": ["+"], "largest": 19, "test_size": 80}
COUNTDOWN = {
    "numbers": [2, 3],
    "largest": 12,
    "largest_target": 24,
    "operations": ["+", "-"],
    "size": 4000,
    "test_size": 100,
    "style": "text",
    "prompt": "{nums}={target}:",
}

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "mixed_envs": {
        "name": "mixed-envs",
        "model": {
            "name_or_path": "tiny-mixed",
            "factory": "posttrain_experiments.tiny_mixed:build",
            "factory_kwargs": {"sums": SUMS, "countdown": COUNTDOWN},
        },
        "environments": [
            {"name": "arithmetic", "label": "sums", "weight": 1.0, "options": SUMS},
            {"name": "countdown", "weight": 2.0, "options": COUNTDOWN},
        ],
        "rl": {
            "steps": 60,
            "objective": {"name": "grpo"},
            "group_size": 8,
            "batch_per_replica": 384,
            "optimizer": {"name": "adamw", "lr": 5e-4},
        },
        "grid": {"threads": 1},
        "rollout": {"engine": "hf", "max_tokens": 12, "max_model_len": 40, "max_num_seqs": 384},
        "validation": {"prompts": 160, "every": 15, "temperature": 1.0},
    },
}
