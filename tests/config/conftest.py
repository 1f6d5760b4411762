"""Plug-ins and a catalog for config tests, so that they need nothing that may change."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

ENV = '''
"""Toy environments."""
from dataclasses import dataclass
from typing import Literal
from posttrain.data.environment import Environment

class Toy(Environment):
    """A toy."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        size: int = 3  # of a task
        mode: Literal["easy", "hard"] = "easy"
        api_key: str = ""

        def __post_init__(self):
            if self.size < 1:
                raise ValueError("size must be at least 1")

    def dataset(self, split): return []
    def compute_reward(self, state): return 0.0
'''
CATALOG = '''
"""Toy experiments."""
EXPERIMENTS = {
    "toy_grpo": {
        "model": {"name_or_path": "/models/toy"},
        "rl": {
            "steps": 5, "group_size": 4, "batch_per_replica": 16,
            "objective": {"name": "grpo", "clip_low": 0.1, "use_ppo_clip": True},
        },
        "environments": [{"name": "toy", "options": {"size": 2}}],
    },
    "toy_long": {"defaults": ["toy_grpo"], "rl": {"steps": 50}},
    "toy_orphan": {"defaults": ["toy_gone"]},
    "toy_cycle": {"defaults": ["toy_cycle_b"]},
    "toy_cycle_b": {"defaults": ["toy_cycle"]},
}
'''


@pytest.fixture(autouse=True)
def toys(fake_distribution: Callable[..., object]) -> None:
    fake_distribution(
        "toys",
        points={"posttrain.envs": {"toy": "toy_env:Toy"}, "posttrain.experiments": {"toys": "toy_experiments"}},
        files={"toy_env.py": ENV, "toy_experiments.py": CATALOG},
    )
    for name in ("toy_env", "toy_experiments"):
        sys.modules.pop(name, None)
