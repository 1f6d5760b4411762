"""Episodes of several turns on vLLM, in order of arrival: later turns are requests of their own, weights change between turns.

Those of an environment with a tool, and those of an agent that asks over HTTP, in one run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking_agent import STEPS, WITH_VLLM

from posttrain.config.load import load_config
from posttrain.loop.run import train
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts

pytestmark = pytest.mark.integration

@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(train(load_config(WITH_VLLM), run_dir=tmp_path_factory.mktemp("outputs")).run)


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict[str, Any]]:
    return [row for step in range(1, STEPS + 1) for row in read_rollouts(run, step)]


def test_every_token_has_its_version_and_the_trainer_agrees_with_vllm(run: Path, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert all((v >= 0) == own for v, own in zip(row["weight_versions"], row["mask"], strict=True))
        assert all(v < row["step"] for v in row["weight_versions"])
        assert len(row["prompt_ids"]) + len(row["token_ids"]) <= 48
    fresh = [row for row in read_metrics(run) if row["staleness/max"] == 0]
    assert fresh and all(row["policy/logprob_gap"] < 1e-3 for row in fresh), "also of tokens after the environment's"


def test_episodes_have_turns_and_a_stop_text_ends_one(rows: list[dict[str, Any]]) -> None:
    calls = [row for row in rows if row["env"] == "calculator" and len(row["turns"]) == 3]
    assert calls and all([turn["role"] for turn in row["turns"]] == ["model", "env", "model"] for row in calls)
    called = [row["completion"] for row in calls]
    assert all(text.startswith("<") for text in called) and any(text.partition(">")[2][:1].isdigit() for text in called), (
        "the result follows the > at once: no end-of-text was sampled after it"
    )
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}


def test_an_agent_that_asks_over_http_trains_beside_it(rows: list[dict[str, Any]]) -> None:
    asked = [row for row in rows if row["env"] == "agent"]
    assert asked and {row["info"]["stop_reason"] for row in asked} == {"done"}
    assert {row["reward_parts"]["as_said"] for row in asked} == {1.0}
    assert {sum(turn["role"] == "model" for turn in row["turns"]) for row in asked} == {2}
