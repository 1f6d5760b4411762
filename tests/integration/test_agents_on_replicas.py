"""Agents, tools and evals on a Ray cluster: two vLLM replicas, an endpoint for each, weights over NIXL, rollouts ahead."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking_agent import STEPS, WITH_VLLM

from posttrain.config.load import load_config
from posttrain.loop.run import train
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts

pytestmark = pytest.mark.integration

PORT = 18200
ON_RAY = [
    *WITH_VLLM,
    f"rollout.base_port={PORT}",
    "grid.backend=ray",
    "grid.gpu_placement=disaggregated",
    "grid.shapes.policy=[1,1]",
    "grid.shapes.rollout=[2,1]",
    "grid.dp_shard=1",
    "grid.threads=1",
    "weights.transport=nixl",
    "evals=[{name: calculator, prompts: 20, every: 3}, {name: agent, prompts: 10, samples: 2, every: 3, correct_part: as_said}]",
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """A node of this machine with room for a policy rank and two replicas."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    before, os.environ["RAY_ADDRESS"] = os.environ.get("RAY_ADDRESS"), made.address
    yield made
    del os.environ["RAY_ADDRESS"]
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
    made.shutdown()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(train(load_config(ON_RAY), run_dir=tmp_path_factory.mktemp("outputs")).run)


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict[str, Any]]:
    return [row for step in range(1, STEPS + 1) for row in read_rollouts(run, step)]


def test_agents_ask_at_the_port_of_each_replica(rows: list[dict[str, Any]]) -> None:
    asked = [row for row in rows if row["env"] == "agent"]
    ports = Counter(int(row["reward_parts"]["port"]) for row in asked)
    assert set(ports) == {PORT, PORT + 1}, "consecutive: a port for each replica"
    assert {row["reward_parts"]["as_said"] for row in asked} == {1.0}
    assert {row["info"]["stop_reason"] for row in asked} == {"done"}
    assert {sum(turn["role"] == "model" for turn in row["turns"]) for row in asked} == {2}


def test_every_token_has_its_version_and_the_trainer_agrees_with_both_replicas(run: Path, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert all((v >= 0) == own for v, own in zip(row["weight_versions"], row["mask"], strict=True))
        assert all(v < row["step"] for v in row["weight_versions"])
    fresh = [row for row in read_metrics(run) if row["staleness/max"] == 0]
    assert fresh and all(row["policy/logprob_gap"] < 1e-3 for row in fresh)


def test_evals_before_while_and_after_are_of_one_version_and_none_fails(run: Path) -> None:
    results = [(one["label"], one["step"]) for one in json.loads((run / "evals" / "summary.json").read_text())["evals"]]
    assert sorted(results) == [(label, step) for label in ("agent", "calculator") for step in (0, 3, 6)]
