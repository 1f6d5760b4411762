"""The demo: a tiny model that adds carelessly learns to add, within minutes on two CPU cores.

    posttrain train experiment=arithmetic_grpo
"""

from __future__ import annotations

from typing import Any

PROBLEMS = {"operations": ["+"], "largest": 19, "test_size": 80}

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "arithmetic_grpo": {
        "name": "arithmetic-grpo",
        "model": {
            "name_or_path": "tiny-adder",
            "factory": "posttrain_experiments.tiny:build",
            "factory_kwargs": {"environment": PROBLEMS},
        },
        "environments": [{"name": "arithmetic", "options": PROBLEMS}],
        "rl": {
            "steps": 80,
            "objective": {"name": "grpo"},
            "group_size": 8,
            "batch_per_replica": 512,
            "optimizer": {"name": "adamw", "lr": 2e-4},
        },
        "grid": {"threads": 1},
        "rollout": {"engine": "hf", "max_tokens": 6, "max_model_len": 32, "max_num_seqs": 512},
        "validation": {"prompts": 80, "every": 20},
    },
}
