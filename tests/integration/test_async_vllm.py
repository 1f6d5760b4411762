"""`async_grpo` for real: vLLM generates while the policy trains, weights change under prompts in flight, without a cluster and on
one. One run each."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.load import load_config
from posttrain.loop.run import train
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.rollouts import read_rollouts

pytestmark = pytest.mark.integration

SMALL = [
    "experiment=async_grpo",
    "rl.steps=12",
    "rl.batch_per_replica=64",
    "rl.group_size=8",
    "rl.discard_group_zero_advantage=false",
    "rollout.max_num_seqs=16",
    "rollout.max_tokens=24",
    "rollout.max_model_len=64",
    "rollout.ignore_eos=true",
    "validation.prompts=8",
    "validation.every=6",
    "checkpoint.every=4",
    "weights.canary_every=3",
    "tracking.display=none",
]
RAY = [
    "grid.backend=ray",
    "grid.gpu_placement=disaggregated",
    "grid.shapes.rollout=[2,1]",
    "rl.steps=6",
    "checkpoint.every=2",
    "rollout.start_timeout_s=600",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


def check(run: Path, steps: int, ahead: int) -> list[dict[str, Any]]:
    """What holds of any asynchronous run; returns its rollouts."""
    metrics = read_metrics(run)
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert max(Counter(line["draw"] for line in lines).values()) == 1
    assert Counter(line["step"] for line in lines if line["state"] == "trained") == dict.fromkeys(range(1, steps + 1), 8)
    rows = [row for step in range(1, steps + 1) for row in read_rollouts(run, step)]
    assert all(row["staleness/max"] <= 4 for row in metrics) and any(row["staleness/mean"] > 0 for row in metrics)
    assert all(max(row["weight_versions"]) < row["step"] for row in rows)
    assert max(row.get("weights/canary_max", 0.0) for row in metrics) < 1e-4
    return rows


def test_weights_change_under_prompts_in_flight_and_every_token_says_which_it_had(root: Path) -> None:
    run = train(load_config(SMALL), run_dir=root).run
    rows = check(run, 12, 1)
    mixed = [row for row in rows if len(set(row["weight_versions"])) > 1]
    assert mixed, "no completion saw an update in flight"
    assert all(row["weight_versions"] == sorted(row["weight_versions"]) for row in mixed)
    assert {row["step"] for row in read_validation(run)} == {0, 6, 12}
    # the trainer's log-probs at the version that a batch updates are the engine's where a token is of that very version
    first = next(row for row in read_metrics(run) if row["step"] == 1)
    assert first["policy/logprob_gap_max"] < 1e-3


def test_on_a_ray_cluster_with_two_replicas(root: Path) -> None:
    run = train(load_config([*SMALL, *RAY]), run_dir=root).run
    check(run, 6, 1)
    names = {json.loads(line).get("name") for line in (run / "events.jsonl").read_text().splitlines()}
    assert {"snapshot", "checkpoint", "publish", "deliver"} <= names
