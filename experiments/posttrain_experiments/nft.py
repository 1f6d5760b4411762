"""Learning from verdicts: a tiny model that adds carelessly is told right or wrong, and learns from both by NFT.

    posttrain train experiment=arithmetic_nft

Rewards are 0 or 1, which is what NFT needs. The recipe stands alone: it needs no optional dependency and inherits from no other
catalog.
"""

from __future__ import annotations

from typing import Any

PROBLEMS = {"operations": ["+"], "largest": 19, "test_size": 80}

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "arithmetic_nft": {
        "name": "arithmetic-nft",
        "model": {
            "name_or_path": "tiny-adder",
            "factory": "posttrain_experiments.tiny:build",
            "factory_kwargs": {"environment": PROBLEMS},
        },
        "environments": [{"name": "arithmetic", "options": PROBLEMS}],
        "rl": {
            "steps": 60,
            "objective": {"name": "nft"},
            "group_size": 8,
            "batch_per_replica": 256,
            # two optimizer steps on each batch: from the second on the ratio leaves 1, and the negative policy differs from
            # plain policy gradient
            "mini_batch_per_replica": 128,
            "optimizer": {"name": "adamw", "lr": 2e-4},
        },
        "grid": {"threads": 1},
        "rollout": {"engine": "hf", "max_tokens": 6, "max_model_len": 32, "max_num_seqs": 256},
        "validation": {"prompts": 80, "every": 15},
    },
}
