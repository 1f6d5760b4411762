"""A sweep over objectives compares objectives: prompts, sample seeds and the held-out start are the same for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.load import load_config
from posttrain.loop.run import train
from posttrain.tracking.metrics import read_validation
from posttrain.tracking.rollouts import read_rollouts

OBJECTIVES = ("grpo", "rloo", "dr_grpo", "reinforce_pp", "cispo", "gspo", "sapo", "dpo", "nft")
SMALL = [
    "experiment=arithmetic_grpo", "model.factory_kwargs.steps=30", "model.factory_kwargs.slip_steps=10", "rl.steps=2",
    "rl.group_size=4", "rl.batch_per_replica=16", "validation.prompts=4", "validation.temperature=1", "grid.threads=1",
    "tracking.display=none",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def first(root: Path) -> Path:
    return train(load_config([*SMALL, "name=first"]), run_dir=root).run


def drawn(run: Path, step: int) -> list[tuple[str, str]]:
    """`(group, sample)` of everything that a step sampled, in order."""
    return [(row["group_id"], row["sample_id"]) for row in read_rollouts(run, step)]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_all_objectives_see_the_same_prompts_and_start_from_the_same_samples(name: str, root: Path, first: Path) -> None:
    run = train(load_config([*SMALL, f"rl.objective.name={name}", f"name={name}"]), run_dir=root).run
    assert drawn(run, 1) == drawn(first, 1) and drawn(run, 2) == drawn(first, 2)
    tokens = [[row["token_ids"] for row in read_rollouts(one, 1)] for one in (run, first)]
    assert [list(ids) for ids in tokens[0]] == [list(ids) for ids in tokens[1]]  # before the first step they are one policy
    before = [next(row for row in read_validation(one) if row["step"] == 0)["validation/reward/mean"] for one in (run, first)]
    assert before[0] == before[1]


def test_another_seed_draws_other_prompts(root: Path, first: Path) -> None:
    run = train(load_config([*SMALL, "seed=5", "name=seed"]), run_dir=root).run
    assert drawn(run, 1) != drawn(first, 1)
