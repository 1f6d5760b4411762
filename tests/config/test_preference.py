"""Pairs that come with the data: no engine, and everything that follows; told each way, with the fix."""

from __future__ import annotations

import pytest

from posttrain.config.load import load_config
from posttrain.errors import ConfigError

PAIRS = ["experiment=preference_dpo"]
SUMS = ["experiment=arithmetic_grpo"]


def problems(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    return {p.path: f"{p.what}; {p.fix}" for p in caught.value.problems}


def test_the_recipe_has_no_engine_and_no_options_of_one() -> None:
    config = load_config(PAIRS).config
    assert (config.rollout.engine, config.rollout.options, config.rl.group_size) == ("none", {}, 2)
    assert config.rl.objective.name == "dpo" and config.environments[0].options["truncate"] == "keep_end"


def test_without_an_engine_everything_that_samples_is_told_at_once() -> None:
    found = problems(*SUMS, "rollout.engine=none")
    assert set(found) == {"environments[0].name", "rl.objective.name", "rl.group_size"}
    assert "'none' needs pairs" in found["environments[0].name"] and "name: preference" in found["environments[0].name"]
    assert "'none' needs pairs" in found["rl.objective.name"] and "rl.objective.name=dpo" in found["rl.objective.name"]
    assert "8 with rollout.engine=none: a pair is a group of two" in found["rl.group_size"]


def test_pairs_are_refused_where_an_engine_would_sample_others() -> None:
    found = problems(*PAIRS, "rollout.engine=hf", "rollout.max_tokens=8")
    assert list(found) == ["rollout.engine"]
    assert "'preference' (posttrain 0.1.0) needs no_sampling" in found["rollout.engine"] and "'hf'" in found["rollout.engine"]
    assert "rollout.engine=none" in found["rollout.engine"]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("rl.group_size=4", "rl.group_size"),
        ("rollout.temperature=0.7", "rollout.temperature"),
        ("rollout.options={threads: 2}", "rollout.options"),
        ("rl.objective.name=grpo", "rl.objective.name"),
        ("rl.data.packer=decoder_only", "rl.data.packer"),
        ("environments=[{name: arithmetic}]", "environments[0].name"),
    ],
)
def test_one_at_a_time(override: str, path: str) -> None:
    assert list(problems(*PAIRS, override)) == [path]


def test_keys_that_mean_nothing_without_an_engine_are_left_alone() -> None:
    load_config([*PAIRS, "rollout.max_tokens=4096", "rollout.gpu_memory_utilization=0.5", "weights.canary_every=3"])


def test_an_objective_of_pairs_also_learns_from_an_engine() -> None:
    assert load_config([*SUMS, "rl.objective.name=dpo"]).config.rollout.engine == "hf"


def test_options_of_the_environment_are_checked() -> None:
    assert "keep_end" in next(iter(problems(*PAIRS, "environments.0.options.truncate=middle").values()))
