"""Grade-school math on one GPU: Qwen2.5-0.5B-Instruct learns on GSM8K by GRPO.

    posttrain train experiment=gsm8k_grpo

Model and data come from the Hugging Face hub; folders and files of one's own take their place:

    posttrain train experiment=gsm8k_grpo model.name_or_path=my-model environments.0.options.data=my.jsonl
"""

from __future__ import annotations

from typing import Any

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "gsm8k_grpo": {
        "name": "gsm8k-grpo",
        "model": {"name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"},
        "environments": [{"name": "math", "options": {"data": "openai/gsm8k", "data_config": "main"}}],
        "rl": {
            "steps": 116,  # one pass over the 7,473 training problems
            "objective": {"name": "grpo"},
            "group_size": 8,
            "batch_per_replica": 512,
            "micro_batch_tokens": 8192,
            # fp32 masters, because an update at this learning rate is smaller than the resolution of bf16 and would be lost
            "master_dtype": "float32",
            # bf16 compute, as in the engine: both round the same masters, so the engine samples from what is trained
            "param_dtype": "bfloat16",
            "optimizer": {"name": "adamw", "impl": "fused", "lr": 1e-6, "weight_decay": 0.0, "grad_clip": 1.0},
            "lr_scheduler": {"name": "constant", "warmup_steps": 10},
        },
        "rollout": {
            "engine": "vllm",
            "dtype": "bfloat16",
            "max_tokens": 512,
            "max_model_len": 1024,
            "max_num_seqs": 256,
            "gpu_memory_utilization": 0.35,  # the policy, its moments and its activations need the rest
        },
        "validation": {"prompts": 256, "every": 20},
        "checkpoint": {"every": 40},
    },
}
