"""Countdown on a laptop: a tiny model that picks wrong signs learns to reach the target.

    posttrain train experiment=countdown_grpo
"""

from __future__ import annotations

from typing import Any

PROBLEMS = {
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
    "countdown_grpo": {
        "name": "countdown-grpo",
        "model": {
            "name_or_path": "tiny-countdown",
            "factory": "posttrain_experiments.tiny_countdown:build",
            "factory_kwargs": {"environment": PROBLEMS},
        },
        "environments": [{"name": "countdown", "options": PROBLEMS}],
        "rl": {
            "steps": 60,
            "objective": {"name": "grpo"},
            "group_size": 8,
            "batch_per_replica": 256,
            "optimizer": {"name": "adamw", "lr": 6e-4},
        },
        "grid": {"threads": 1},
        "rollout": {"engine": "hf", "max_tokens": 12, "max_model_len": 40, "max_num_seqs": 256},
        "validation": {"prompts": 100, "every": 15, "temperature": 1.0},
    },
}
