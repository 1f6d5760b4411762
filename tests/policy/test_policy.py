"""One batch step of the policy: the same weights whatever the micro-batches, frozen old log-probs, exact resumption."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from posttrain.config.schema import LRSchedulerConfig, OptimizerConfig
from posttrain.errors import ConfigError, DataError, RunAborted
from posttrain.policy import prefix
from posttrain.policy.module import PolicyModule
from posttrain.policy.policy import Policy
from posttrain.policy.probe import check_forward


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in policy.named_weights(torch.float64)}


def largest_gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def pairs(rows: list[Any]) -> list[Any]:
    """Each row paired with its neighbour."""
    import dataclasses

    return [dataclasses.replace(row, pair=number // 2, chosen=number % 2 == 0) for number, row in enumerate(rows)]


SGD_LIKE = OptimizerConfig(lr=1e-2, impl="forloop", eps=1.0)
"""Adam's division by a tiny second moment magnifies rounding; a large eps makes the step nearly linear in the gradient."""


@pytest.mark.parametrize("objective", ["grpo", "gspo", "dr_grpo", "dpo"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_micro_batches_change_nothing_but_rounding(make_policy, rows_of_groups, objective, dtype, tolerance):
    rows = rows_of_groups([4, 4, 4, 4])
    options = {"max_tokens": 9} if objective == "dr_grpo" else {}
    rows = pairs(rows) if objective == "dpo" else rows
    splits = [
        {"micro_batch_per_replica": 16}, {"micro_batch_per_replica": 2}, {"micro_batch_per_replica": 3, "shared_prefix": False},
        {"micro_batch_per_replica": None, "micro_batch_tokens": 30}, {"logprob_chunk_tokens": 5, "gradient_checkpointing": True},
    ]  # fmt: skip
    results = []
    for split in splits:
        rl = {"master_dtype": dtype, "param_dtype": dtype, "optimizer": SGD_LIKE}
        policy = make_policy(objective, rl=rl | split, **options)
        first, second = policy.train_step(rows), policy.train_step(rows)
        results.append((weights(policy), first.metrics, second.metrics))
    for got, *metrics in results[1:]:
        assert largest_gap(got, results[0][0]) < tolerance
        for mine, reference in zip(metrics, results[0][1:], strict=True):
            assert mine == pytest.approx(reference, rel=100 * tolerance, abs=100 * tolerance)
    assert results[0][2]["policy/entropy"] != results[0][1]["policy/entropy"]  # the first step did move the weights


def test_metrics_are_of_the_whole_batch(make_policy, rows_of_groups):
    rows = rows_of_groups([4, 4])
    policy = make_policy(temperature=0.8, rl={"micro_batch_per_replica": 3})
    before = torch.tensor([value for row in policy.logprobs(rows) for value in row], dtype=torch.float64)
    rollout = torch.tensor([row.rollout_logprobs[t] for row in rows for t in row.trained], dtype=torch.float64)
    result = policy.train_step(rows)
    ratio = (before - rollout).exp()
    assert result.metrics["tokens/trained"] == len(rollout)
    assert result.metrics["policy/ratio_min"] == pytest.approx(ratio.min().item(), abs=1e-12)
    assert result.metrics["policy/ratio_mean"] == pytest.approx(ratio.mean().item(), abs=1e-12)
    assert result.metrics["policy/ratio_max"] == pytest.approx(ratio.max().item(), abs=1e-12)
    assert result.metrics["policy/logprob_gap"] == pytest.approx((before - rollout).abs().mean().item(), abs=1e-12)
    assert result.metrics["policy/logprob_gap_max"] == pytest.approx((before - rollout).abs().max().item(), abs=1e-12)
    assert 0 < result.metrics["policy/entropy"] < math.log(61)
    assert result.metrics["policy/clip_fraction"] == 0.0  # one step: the ratio is 1
    assert result.metrics["lr"] == 1e-2 and result.metrics["grad_norm"] > 0
    assert (result.optimizer_steps, result.skipped, policy.version) == (1, False, 1)
    assert result.seconds["time/forward_backward_s"] > 0


def test_whoever_reads_the_weights_is_asked_before_each_change(make_policy, rows_of_groups, tmp_path):
    policy = make_policy(rl={"batch_per_replica": 16, "mini_batch_per_replica": 8})
    seen, before = [], weights(policy)
    policy.before_change = lambda: seen.append(weights(policy))
    policy.train_step(rows_of_groups([4, 4, 4, 4]))
    assert len(seen) == 2 and largest_gap(seen[0], before) == 0
    assert 0 < largest_gap(seen[1], before) < largest_gap(weights(policy), before)
    policy.save(tmp_path)
    after = weights(policy)
    policy.load(tmp_path)
    assert len(seen) == 3 and largest_gap(seen[2], after) == 0


def test_several_optimizer_steps_share_frozen_old_logprobs(make_policy, rows_of_groups):
    """With two identical parts the second sees the first one's move: its ratio is not 1 and the clip can bind."""
    half = rows_of_groups([4, 4], seed=3)
    rl = {"batch_per_replica": 16, "mini_batch_per_replica": 8, "optimizer": OptimizerConfig(lr=0.2, impl="forloop")}
    policy = make_policy(rl=rl)
    result = policy.train_step(half + half)
    assert result.optimizer_steps == 2 and policy.updates == 2
    assert "time/old_logprobs_s" in result.seconds
    assert 0 < result.metrics["policy/clip_fraction"] < 0.5


def test_old_logprobs_that_do_not_describe_the_update_stop_the_run(make_policy, rows_of_groups, monkeypatch):
    policy = make_policy(rl={"mini_batch_per_replica": 8})
    before = weights(policy)
    layer = policy.module.model.model.layers[0].mlp
    layer.register_forward_hook(lambda *args: args[-1] + 1e-6 * torch.randn_like(args[-1]))  # a stochastic layer
    with pytest.raises(RunAborted, match="π_old ahead-pass determinism probe") as caught:
        policy.train_step(rows_of_groups([4, 4, 4, 4]))
    assert caught.value.code == "E8" and not caught.value.retryable
    assert "PINNED" in str(caught.value) and "dropout" in caught.value.fix
    assert largest_gap(before, weights(policy)) == 0
    policy.module.model.config.num_experts = 8
    with pytest.raises(RunAborted, match="NATURAL") as caught:
        policy.train_step(rows_of_groups([4, 4, 4, 4]))
    assert "rl.routing_replay" in caught.value.fix


def test_the_reference_model_stays_where_it_began(make_policy, rows_of_groups):
    rows = rows_of_groups([4, 4, 4, 4])
    policy = make_policy(kl_coef=0.1, rl={"micro_batch_per_replica": 4})
    first, second = policy.train_step(rows), policy.train_step(rows)
    assert first.metrics["policy/kl"] == pytest.approx(0, abs=1e-15)
    assert second.metrics["policy/kl"] > 1e-6
    assert policy.reference is not None and not any(p.requires_grad for p in policy.reference.parameters())


def test_evaluation_is_what_a_step_would_say_and_moves_nothing(make_policy, rows_of_groups):
    rows = pairs(rows_of_groups([4, 4, 4, 4]))
    whole = make_policy("dpo", rl={"micro_batch_per_replica": 16})
    whole.train_step(rows)
    before = weights(whole)
    found = whole.evaluate(rows)
    assert largest_gap(before, weights(whole)) == 0
    for split in ({"micro_batch_per_replica": 2}, {"micro_batch_per_replica": 6, "shared_prefix": False}):
        policy = make_policy("dpo", rl=split)
        policy.train_step(rows)
        assert policy.evaluate(rows) == pytest.approx(found, abs=1e-9)
    step = whole.train_step(rows).metrics
    assert {name: step[name] for name in found} == pytest.approx(found, abs=1e-9)
    assert found["dpo/margin"] != 0 and set(found) >= {"loss", "dpo/accuracy"}


def test_rows_that_nobody_sampled_have_no_ratio_to_an_engine(make_policy, rows_of_groups):
    import dataclasses

    rows = pairs(rows_of_groups([4, 4]))
    given = [dataclasses.replace(row, rollout_logprobs=None) for row in rows]
    sampled, result = make_policy("dpo").train_step(rows).metrics, make_policy("dpo").train_step(given).metrics
    ratios = {"policy/ratio_min", "policy/ratio_mean", "policy/ratio_max"}
    gone = {"policy/kl", "policy/logprob_gap", "policy/logprob_gap_max", *ratios}
    assert set(sampled) - set(result) == gone and result == {name: sampled[name] for name in result}


def test_after_a_resume_the_reference_is_the_model_that_the_run_began_with(make_policy, rows_of_groups, tmp_path):
    rows = pairs(rows_of_groups([4, 4, 4, 4]))
    policy = make_policy("dpo")
    first = weights(policy)
    policy.train_step(rows)
    policy.save(tmp_path / "saved")
    resumed = make_policy("dpo")
    resumed.load(tmp_path / "saved")
    assert largest_gap(weights(policy), weights(resumed)) == 0 and largest_gap(first, weights(resumed)) > 1e-4
    reference = {name: value.detach() for name, value in resumed.reference.model.named_parameters()}
    assert largest_gap(first, reference) == 0
    assert resumed.evaluate(rows) == policy.evaluate(rows) and resumed.evaluate(rows)["dpo/margin"] != 0


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_said(make_policy, rows_of_groups, caplog):
    import dataclasses

    rows = rows_of_groups([4, 4])
    policy = make_policy()
    policy.train_step(rows)
    before = weights(policy)
    broken = [dataclasses.replace(rows[0], advantage=math.inf), *rows[1:]]
    with caplog.at_level(logging.WARNING, "posttrain.policy"):
        result = policy.train_step(broken)
    assert result.skipped and result.optimizer_steps == 0 and result.metrics["policy/skipped_steps"] == 1
    assert largest_gap(before, weights(policy)) == 0
    assert "skipped" in caplog.text
    assert not policy.train_step(rows).skipped
    assert largest_gap(before, weights(policy)) > 0


def test_the_learning_rate_follows_the_optimizer_steps(make_policy, rows_of_groups):
    schedule = LRSchedulerConfig(name="cosine", warmup_steps=2, min_lr_ratio=0.1)
    policy = make_policy(rl={"steps": 3, "mini_batch_per_replica": 8, "lr_scheduler": schedule})
    seen = [policy.train_step(rows_of_groups([4, 4, 4, 4])).metrics["lr"] for _ in range(3)]
    assert seen[0] == pytest.approx(1e-2)  # the second step ends the warm-up
    assert seen[0] > seen[1] > seen[2] > 1e-3


@pytest.mark.parametrize(
    "rl",
    [
        {},
        {"master_dtype": "float32", "param_dtype": "bfloat16"},
        {"master_dtype": "bfloat16", "param_dtype": "bfloat16", "optimizer": OptimizerConfig(name="adamw_master", lr=1e-2)},
    ],
    ids=["wide", "bf16-compute", "bf16-storage"],
)
def test_save_and_load_continue_bit_for_bit(make_policy, rows_of_groups, tmp_path, rl):
    rows = rows_of_groups([4, 4, 4, 4])
    rl = {"lr_scheduler": LRSchedulerConfig(name="linear", warmup_steps=1)} | rl
    policy = make_policy(rl=rl)
    policy.train_step(rows)
    policy.save(tmp_path / "saved")
    expected = policy.train_step(rows).metrics
    resumed = make_policy(rl=rl)
    resumed.load(tmp_path / "saved")
    assert (resumed.version, resumed.updates) == (1, 1)
    assert resumed.train_step(rows).metrics == expected
    assert largest_gap(weights(policy), weights(resumed)) == 0


def test_what_a_model_or_an_algorithm_draws_from_torch_follows_from_the_seed(make_policy):
    drawn = []
    for before in (1, 2):
        torch.manual_seed(before)
        make_policy()
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[1]


def test_another_models_state_is_refused(make_policy, tmp_path):
    policy = make_policy()
    policy.save(tmp_path / "saved")
    other = make_policy(rl={"master_dtype": "float32", "param_dtype": "float32"})
    with pytest.raises(DataError, match="another model"):
        other.load(tmp_path / "saved")


@pytest.mark.parametrize("tied", [True, False])
def test_named_weights_are_the_models_parameters_once(make_policy, tiny, tied):
    policy = make_policy(model=tiny("Llama", tie_word_embeddings=tied))
    names = [name for name, _ in policy.named_weights("float32")]
    assert len(names) == len(set(names)) and "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) is not tied
    assert all(value.dtype == torch.bfloat16 and not value.requires_grad for _, value in policy.named_weights("bfloat16"))


def test_bf16_compute_keeps_float32_storage_gradients_and_logprobs(make_policy, rows_of_groups):
    rows = rows_of_groups([4, 4])
    wide = make_policy(rl={"master_dtype": "float32", "param_dtype": "float32"})
    mixed = make_policy(rl={"master_dtype": "float32", "param_dtype": "bfloat16"})
    packed = mixed.module.pack(rows)
    logprobs, _ = mixed.module(packed)
    assert logprobs.dtype == torch.float32
    gap = (logprobs - wide.module(packed)[0]).abs().max().item()
    assert 1e-5 < gap < 0.5  # the body did compute in bfloat16
    logprobs.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in mixed.module.parameters() if p.grad is not None)


def test_compute_wider_than_storage_is_refused(make_policy):
    with pytest.raises(ConfigError, match="wider") as caught:
        make_policy(rl={"master_dtype": "bfloat16", "param_dtype": "float32"})
    assert "rl.param_dtype=bfloat16" in caught.value.fix


def test_an_empty_batch_is_refused(make_policy):
    with pytest.raises(ValueError, match="no rows"):
        make_policy().train_step([])


def test_the_start_up_probe_refuses_what_this_policy_would_compute_wrongly(make_policy, tiny, monkeypatch):
    """A head that scales its logits, which the log-prob kernel does not know, and rows that see each other."""
    with pytest.raises(ConfigError, match="granite") as caught:
        make_policy(model=tiny("Granite", logits_scaling=4.0))
    assert "cannot be trained here yet" in caught.value.fix and caught.value.where == "model.name_or_path"

    def leaking(*args: Any, **terms: Any) -> torch.Tensor:
        return torch.zeros_like(honest(*args, **terms))

    honest = prefix.visible
    monkeypatch.setattr(prefix, "visible", leaking)
    with pytest.raises(ConfigError, match="largest difference") as caught:
        check_forward(PolicyModule(tiny("Llama"), shared_prefix=True))
    assert caught.value.fix == "set rl.shared_prefix=false"


def test_scores_for_the_canary_are_of_the_rounded_weights_and_leave_the_exact_ones(make_policy):
    policy = make_policy()
    before = {name: tensor.clone() for name, tensor in policy.named_weights("float32")}
    exact = policy.score([[5, 6, 7, 8]], "float32")
    rounded = policy.score([[5, 6, 7, 8]], "bfloat16")
    assert len(exact[0]) == 3 and exact != rounded
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.named_weights("float32"))
    assert policy.score([[5, 6, 7, 8]], "float32") == exact
