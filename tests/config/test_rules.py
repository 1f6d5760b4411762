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
        (["rollout.stop=['>','']"], ["rollout.stop: holds an empty text"]),
        (["rl.batch_per_replica=0"], ["rl.batch_per_replica: is 0, must be at least 1"]),
        (["rl.routing_replay=rollout"], ["not available yet", "set rl.routing_replay=off"]),
        (["grid.num_replicas=2"], ["grid.num_replicas: 2 under grid.backend=local", "set grid.backend=ray"]),
        (
            ["rollout.max_async_rollout=2", "rollout.max_off_policy_steps=1", "loop.commit_order=arrival"],
            ["rollout.max_off_policy_steps: 1 is below rollout.max_async_rollout=2", "set rollout.max_off_policy_steps=2"],
        ),
        (["grid.gpu_placement=disaggregated"], ["disaggregated under grid.backend=local", "set grid.backend=ray"]),
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
        (
            ["rollout.base_port=65535", "grid.backend=ray", "grid.num_replicas=2"],
            ["rollout.base_port: 65535 leaves no ports for 2 replicas", "set rollout.base_port to 65534 or less"],
        ),
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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rl.min_informative_groups=5"], "5 informative groups in a batch of 4"),
        (["rl.min_informative_groups=-1"], "is -1, must be at least 0"),
        (["rl.min_informative_groups_frac=0.0"], "is 0, must be above 0 and at most 1"),
        (["rl.min_informative_groups_frac=1.5"], "is 1.5, must be above 0 and at most 1"),
        (["rl.group_size=1", "rl.min_informative_groups=2"], "rl.min_informative_groups: no group of one is informative"),
        (["rl.dynamic_sampling_max_extra_rollouts=3"], "rl.dynamic_sampling_max_extra_rollouts: 3 has no effect"),
        (["rl.dynamic_sampling_on_budget_exhausted=proceed"], "proceed has no effect: no informative groups are asked for"),
        (["rollout.engine=none", "rl.min_informative_groups_frac=0.5"], "nothing is sampled with rollout.engine=none"),
    ],
)
def test_quotas_of_dynamic_sampling_that_cannot_work(overrides, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([TOY, *overrides])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rl.overlong_buffer_tokens=100"], "rl.overlong_buffer_tokens: 100 has no effect: rl.overlong_penalty_factor is off"),
        (["rl.gibberish_token_threshold=9"], "9 has no effect: rl.filter_gibberish is off"),
        (["rl.gibberish_logprob_offset=1.0"], "set rl.filter_gibberish=true, or leave rl.gibberish_logprob_offset out"),
        (["rl.repetition_compression_threshold=5.0"], "5.0 has no effect: rl.filter_repetition is off"),
        (["rl.repetition_compression_threshold=1.0"], "is 1, must be above 1"),
        (["rl.overlong_penalty_factor=-1.0"], "is -1, must be at least 0"),
        (["rl.filter_gibberish=true", "rl.gibberish_logprob_offset=0.0"], "is 0, must be above 0"),
        (
            ["rl.overlong_penalty_factor=0.5", "rl.overlong_buffer_tokens=257"],
            "rl.overlong_buffer_tokens: 257 is more than rollout.max_tokens=256: every answer would lose",
        ),
        (["rl.filter_overlong=true", "rollout.engine=none"], "rl.filter_overlong: completions come with the data"),
        (["rollout.max_async_rollout=1", "rollout.engine=none"], "rollout.max_async_rollout: 1 has no effect"),
        (["loop.commit_order=arrival", "rollout.engine=none"], "loop.commit_order: arrival has no effect"),
    ],
)
def test_what_cannot_work_among_other_things(overrides, expected) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([TOY, *overrides])
    assert expected in str(caught.value)


def test_each_absent_feature_is_told_on_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([TOY, "loop.commit_order=sideways", "rl.routing_replay=rollout"])
    assert str(caught.value).count("not available yet") == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["loop.commit_order=logical", "rollout.engine=vllm"],
        ["rollout.max_async_rollout=2", "rollout.max_off_policy_steps=2", "loop.commit_order=arrival"],
        ["rollout.max_async_rollout=1"],
        ["rl.min_informative_groups=2", "rl.dynamic_sampling_max_extra_rollouts=3"],
        ["rl.min_informative_groups_frac=0.5", "rl.dynamic_sampling_on_budget_exhausted=proceed"],
        ["rl.overlong_penalty_factor=0.5", "rl.overlong_buffer_tokens=128", "rl.filter_overlong=true"],
        ["rl.filter_gibberish=true", "rl.gibberish_logprob_offset=1.5", "rl.filter_repetition=true"],
        ["model.attn_implementation=eager", "rl.shared_prefix=false"],
    ],
)
def test_what_changes_nothing_or_works_is_accepted(overrides) -> None:
    load_config([TOY, *overrides])



def test_greedy_validation_and_a_nucleus_there_are_fine() -> None:
    assert load_config([TOY, "validation.temperature=0", "validation.top_p=0.9"]).config.validation.top_p == 0.9


@pytest.mark.parametrize("name", ["../../evil", ".hidden", "a b", "x" * 201, "é" * 101])
def test_a_name_that_cannot_be_a_folder_is_refused_before_there_is_a_run(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a run directory"):
        load_config([TOY], values={"name": name})
    assert load_config([TOY], values={"name": "x" * 200}).config.name == "x" * 200
