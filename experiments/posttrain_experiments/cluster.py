"""The demo on a cluster: two policy ranks under FSDP2, two vLLM replicas, weights pulled over NIXL. It runs on two CPU cores.

    posttrain train experiment=cluster_grpo
    posttrain plan experiment=cluster_grpo
"""

from __future__ import annotations

from typing import Any

from posttrain_experiments.arithmetic import EXPERIMENTS as ARITHMETIC

DEMO = ARITHMETIC["arithmetic_grpo"]

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "cluster_grpo": {
        **DEMO,
        "name": "cluster-grpo",
        "rl": {**DEMO["rl"], "steps": 40},
        "grid": {
            "backend": "ray",
            "gpu_placement": "disaggregated",
            "shapes": {"policy": [1, 2], "rollout": [2, 1]},
            "dp_shard": 2,
            "threads": 1,
        },
        "rollout": {**DEMO["rollout"], "engine": "vllm", "max_num_seqs": 256},
        "weights": {"transport": "nixl"},
        "validation": {"prompts": 80, "every": 20},
    },
}
