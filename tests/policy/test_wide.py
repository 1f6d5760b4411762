"""A policy made float64: from the same bits, with nothing left in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config.schema import ModelConfig, OptimizerConfig, RLConfig, RolloutConfig, RunConfig
from posttrain.objective.objective import build_objective
from posttrain.policy.policy import Policy
from posttrain.policy.wide import wide
from posttrain.testing.tiny_model import FAMILIES, VOCABULARY, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Model folders by family, written once."""
    root = tmp_path_factory.mktemp("models")

    def of(family: str) -> Path:
        if not (root / family).exists():
            write_tiny_model(root / family, family=family)
        return Path(root / family)

    return of


def policy(path: Path, **changes: Any) -> Policy:
    """As transformers makes it: norms and soft-maxes in float32 whatever the dtype."""
    keys = {"steps": 2, "batch_per_replica": 8, "group_size": 4, "optimizer": OptimizerConfig(lr=1e-2)} | changes
    config = RunConfig(model=ModelConfig(name_or_path=str(path)), rl=RLConfig(**keys), rollout=RolloutConfig())
    return Policy(config, str(path), build_objective("grpo", group_size=4, kl_coef=0.1))


@pytest.mark.parametrize("family", sorted({"llama", "gemma2", "gemma3", "qwen3_moe", "smollm3"} & set(FAMILIES)))
def test_nothing_is_left_in_float32(family: str, folder: Any, rows_of_groups: Any) -> None:
    """Row by row or all at once: in float64 the same to 1e-12, where float32 anywhere would leave 1e-8."""
    rows = rows_of_groups([4, 4], vocabulary=VOCABULARY)
    found = []
    for rows_at_once in (1, 8):
        made = policy(folder(family), micro_batch_per_replica=rows_at_once, shared_prefix=False)
        with wide(made):
            found.append(made.train_step(rows).metrics)
    assert found[0]["grad_norm"] > 0.01 and found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert value == pytest.approx(found[1][name], rel=1e-11, abs=1e-12), name


STORAGE = {
    "float32": {},
    "bf16-compute": {"param_dtype": "bfloat16"},
    "bf16-storage": {"master_dtype": "bfloat16", "param_dtype": "bfloat16", "optimizer": OptimizerConfig(name="adamw_master")},
}


@pytest.mark.parametrize("storage", STORAGE)
def test_it_goes_on_from_the_same_weights_and_moments(storage: str, folder: Any, rows_of_groups: Any) -> None:
    rows = rows_of_groups([4, 4], vocabulary=VOCABULARY)
    made = policy(folder("llama"), **STORAGE[storage])
    made.train_step(rows)
    weights = dict(made.named_weights(torch.float64))
    moments = getattr(made.optimizer, "inner", made.optimizer).state_dict()["state"]
    with wide(made):
        now = getattr(made.optimizer, "inner", made.optimizer).state_dict()["state"]
        assert all(torch.equal(value, weights[name]) for name, value in made.named_weights(torch.float64))
        assert {p.dtype for p in made.module.parameters()} == {torch.float64} and now.keys() == moments.keys()
        for number, state in moments.items():
            assert now[number]["step"] == state["step"] and now[number]["exp_avg"].dtype == torch.float64
            assert torch.equal(now[number]["exp_avg_sq"], state["exp_avg_sq"].double())
        made.train_step(rows)
    assert any(not torch.equal(value, weights[name]) for name, value in made.named_weights(torch.float64))
