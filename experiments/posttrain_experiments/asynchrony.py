"""The demo with generation and training side by side: vLLM generates the next batch while the policy learns from this one.

    posttrain train experiment=async_grpo
    posttrain train experiment=async_grpo grid.backend=ray grid.gpu_placement=disaggregated     # each role a process of a cluster
    posttrain train experiment=async_grpo rollout.engine=hf                                     # the same bits each time
"""

from __future__ import annotations

from typing import Any

from posttrain_experiments.arithmetic import EXPERIMENTS as ARITHMETIC

DEMO = ARITHMETIC["arithmetic_grpo"]

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "async_grpo": {
        **DEMO,
        "name": "async-grpo",
        "rl": {**DEMO["rl"], "steps": 60, "objective": {"name": "grpo", "use_tis": True}},
        "rollout": {**DEMO["rollout"], "engine": "vllm", "max_num_seqs": 256, "max_async_rollout": 1, "max_off_policy_steps": 4},
        "checkpoint": {"every": 20},
        "validation": {"prompts": 80, "every": 20},
    },
}
