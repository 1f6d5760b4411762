"""A tool-using agent on a laptop: a tiny model that guesses products learns to ask the calculator, and to read its answer.

    posttrain train experiment=calculator_agent
"""

from __future__ import annotations

from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
)
"""Every message as it is, the model's turns ended. It only appends, so an episode is one row."""
QUESTIONS = {"calls": "short", "terms": [2], "digits": 2, "size": 3000, "test_size": 100, "max_turns": 2}

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "calculator_agent": {
        "name": "calculator-agent",
        "model": {
            "name_or_path": "tiny-calculator",
            "factory": "posttrain_experiments.tiny_calculator:build",
            "factory_kwargs": {"environment": QUESTIONS},
            "chat_template": TEMPLATE,
        },
        "environments": [{"name": "calculator", "options": QUESTIONS}],
        "rl": {
            "steps": 24,
            "objective": {"name": "grpo"},
            "group_size": 8,
            "batch_per_replica": 192,
            "optimizer": {"name": "adamw", "lr": 5e-4},
        },
        "grid": {"threads": 1},
        "rollout": {"engine": "hf", "max_tokens": 12, "max_model_len": 48, "max_num_seqs": 192},
        "validation": {"prompts": 100, "every": 8, "temperature": 1.0},
    },
}
