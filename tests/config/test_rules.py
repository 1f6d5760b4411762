"""Each cross-key rule fires on its own, names its key, and says what to set."""

from __future__ import annotations

import pytest

from posttrain.config import load_config
from posttrain.errors import ConfigError

TOY = "experiment=toy_grpo"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.temperature=0"], ["rollout.temperature: 0.0 is greedy", "use a value above 0"]),
        (
            ["rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_p=0.1"],
            ["rollout.top_p", "rollout.top_k", "rollout.min_p", "evals may use it"],
        ),
        (["rollout.max_tokens=1024"], ["rollout.max_tokens: 1024 leaves no room for a prompt in rollout.max_model_len=1024"]),
        (["validation.max_tokens=2000"], ["validation.max_tokens: 2000 leaves no room"]),
        (
            ["rl.mini_batch_per_replica=6"],
            ["rl.mini_batch_per_replica: 6 does not divide rl.batch_per_replica=16", "legal: 1, 2, 4, 8, 16"],
        ),
        (
            ["rl.mini_batch_per_replica=8", "rl.micro_batch_per_replica=16"],
            ["does not divide rl.mini_batch_per_replica=8", "legal: 1, 2, 4, 8"],
        ),
        (["rl.batch_per_replica=0"], ["rl.batch_per_replica: is 0, must be at least 1"]),
        (["rl.routing_replay=rollout"], ["not available yet", "set rl.routing_replay=off"]),
        (["grid.num_replicas=2"], ["grid.num_replicas: 2 under grid.backend=local", "set grid.backend=ray"]),
        (["rollout.max_async_rollout=1"], ["not available yet", "strictly on-policy"]),
        (["rl.min_informative_groups=2"], ["rl.min_informative_groups: not available yet", "rl.discard_group_zero_advantage"]),
        (["rl.min_informative_groups_frac=0.5"], ["rl.min_informative_groups_frac: not available yet"]),
        (["evals=[{name: toy}]"], ["evals: not available yet", "validation"]),
        (["rl.dynamic_sampling_max_extra_rollouts=3"], ["rl.dynamic_sampling_max_extra_rollouts: not available yet"]),
        (["rl.dynamic_sampling_on_budget_exhausted=proceed"], ["not available yet", "budget_exhausted=raise"]),
        (["rollout.max_off_policy_steps=4"], ["rollout.max_off_policy_steps: not available yet", "strictly on-policy"]),
        (["grid.gpu_placement=disaggregated"], ["disaggregated under grid.backend=local", "set grid.backend=ray"]),
        (["loop.commit_order=arrival"], ["loop.commit_order: not available yet", "whole cohort", "set loop.commit_order=auto"]),
        (["loop.commit_order=arrival", "rollout.engine=vllm"], ["loop.commit_order: not available yet"]),
        (["model.attn_implementation=eager"], ["model.attn_implementation: eager would not run", "rl.shared_prefix=false"]),
        (["grid.dp_shard=2"], ["grid.dp_shard: dp_replicate * dp_shard = 2 under grid.backend=local"]),
        (["environments=[{name: toy}, {name: toy}]"], ["environments[1]: repeats 'toy' with the same options"]),
        (["environments=[{name: toy, weight: 0}]"], ["environments[0].weight: is 0, must be above 0"]),
        (
            ["rl.lr_scheduler.name=cosine", "rl.lr_scheduler.warmup_steps=5"],
            ["5 is the whole run of 5 optimizer steps, cosine never begins"],
        ),
        (["rl.optimizer.lr=nan"], ["rl.optimizer.lr: is nan"]),
        (["rollout.base_port=70000"], ["rollout.base_port: is 70000, must be at least 1 and at most 65535"]),
        (["rl.optimizer.betas=[0.9,1.0]"], ["rl.optimizer.betas[1]: is 1, must be at least 0 and below 1"]),
        (["model.name_or_path=''"], ["model.name_or_path: missing value"]),
        (["rl.group_size=1"], ["every advantage is 0", "set rl.group_size to 2 or more"]),
        (
            ["rl.objective.use_ppo_clip=false", "rl.mini_batch_per_replica=4"],
            ["rl.mini_batch_per_replica: 4 with grpo, which here has no ratio"],
        ),
    ],
)
def test_a_rule(overrides, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([TOY, *overrides])
    text = str(caught.value)
    for part in expected:
        assert part in text
    assert text.count("  - ") == max(1, len([part for part in expected if part.startswith("rollout.") and len(overrides) == 3]))


def test_a_rule_waits_until_its_keys_are_readable() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([TOY, "rl.group_size=four", "rl.batch_per_replica=7"])
    assert "whole groups" not in str(caught.value) and "must be an integer" in str(caught.value)


def test_two_ways_to_write_the_same_count() -> None:
    with pytest.raises(ConfigError, match="both are set"):
        load_config([TOY, "rl.min_informative_groups=2", "rl.min_informative_groups_frac=0.5"])


def test_each_absent_feature_is_told_on_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([TOY, "loop.commit_order=sideways", "rl.routing_replay=rollout", "rollout.max_async_rollout=2"])
    assert str(caught.value).count("not available yet") == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["loop.commit_order=logical", "rollout.engine=vllm"],
        ["rollout.max_off_policy_steps=8"],
        ["rl.dynamic_sampling_on_budget_exhausted=raise"],
        ["model.attn_implementation=eager", "rl.shared_prefix=false"],
    ],
)
def test_what_changes_nothing_or_works_is_accepted(overrides) -> None:
    load_config([TOY, *overrides])


def test_two_environments_of_one_name_with_different_options_are_fine() -> None:
    assert len(load_config([TOY, "environments=[{name: toy}, {name: toy, options: {size: 9}}]"]).config.environments) == 2


def test_greedy_validation_and_a_nucleus_there_are_fine() -> None:
    assert load_config([TOY, "validation.temperature=0", "validation.top_p=0.9"]).config.validation.top_p == 0.9


@pytest.mark.parametrize("name", ["../../evil", ".hidden", "a b", "x" * 201, "é" * 101])
def test_a_name_that_cannot_be_a_folder_is_refused_before_there_is_a_run(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a run directory"):
        load_config([TOY], values={"name": name})
    assert load_config([TOY], values={"name": "x" * 200}).config.name == "x" * 200
