"""The loop replaced by a function of the test, and the toys of the config tests."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

EXPERIMENT = """'''Toy experiments.'''
EXPERIMENTS = {"toy": {"model": {"name_or_path": "/m"}, "rl": {"steps": 2, "objective": {"name": "grpo"}},
                       "environments": [{"name": "toy"}]}}
"""
ENV = """'''Toys.'''
from posttrain.data.environment import Environment
class Toy(Environment):
    '''A toy.'''
    def dataset(self, split): return []
    def compute_reward(self, state): return 0.0
"""


@pytest.fixture(autouse=True)
def toys(fake_distribution: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    root = fake_distribution(
        "toys",
        points={"posttrain.envs": {"toy": "cli_toy_env:Toy"}, "posttrain.experiments": {"toys": "cli_toy_experiments"}},
        files={"cli_toy_env.py": ENV, "cli_toy_experiments.py": EXPERIMENT},
    )
    monkeypatch.setenv("PYTHONPATH", str(root))
    return root


@pytest.fixture
def fake_train(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Installs a stand-in for `posttrain.loop.run.train`."""

    def install(function: Callable[..., Any]) -> None:
        module = types.ModuleType("posttrain.loop.run")
        module.train = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "posttrain.loop.run", module)

    return install
