"""The determinism probe on a mixture of experts: a router that jitters is found, told apart from a stochastic layer, and said.

The jitter moves the choice of experts alone, as rounding does with near-tied scores; their weights stay the router's.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from posttrain.config.rules import NOT_YET
from posttrain.errors import RunAborted
from posttrain.policy.policy import Policy
from posttrain.policy.probe import Drift, not_deterministic

EXPERTS = {
    "num_hidden_layers": 12, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
SINGLE = {"master_dtype": "float32"}  # torch has no grouped product of experts in float64


@pytest.fixture
def policy(make_policy: Any, tiny: Any) -> Policy:
    return make_policy(model=tiny("Qwen3Moe", **EXPERTS), rl=SINGLE | {"mini_batch_per_replica": 8})


def jitter(policy: Policy, size: float) -> None:
    """Let every router choose by scores that are off by noise of `size`, another one in each forward."""
    generator = torch.Generator().manual_seed(0)

    def choose(router: Any, args: Any, output: Any) -> Any:
        logits = output[0]
        noise = size * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
        chosen = (logits + noise).topk(router.top_k).indices
        weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    routers = [layer.mlp.gate for layer in policy.module.model.model.layers]
    for router in routers:
        router.register_forward_hook(choose)
    assert len(routers) == EXPERTS["num_hidden_layers"]


def largest_gap(before: dict[str, Any], policy: Policy) -> float:
    return max(float((before[name] - p.detach()).abs().max()) for name, p in policy.module.model.named_parameters())


@pytest.mark.parametrize("size", [3e-4, 1e-3])
def test_a_router_that_jitters_stops_the_run_before_it_trains(policy, rows_of_groups, size):
    rows = rows_of_groups([4, 4, 4, 4], longest=30)
    before = {name: p.detach().clone() for name, p in policy.module.model.named_parameters()}
    jitter(policy, size)
    with pytest.raises(RunAborted, match="π_old ahead-pass determinism probe failed") as caught:
        policy.train_step(rows)
    said = re.search(r"log-prob of (\S+)% of (\d+) tokens moved, by up to (\S+) nats.* NATURAL$", caught.value.message)
    assert said, caught.value.message
    share, tokens, gap = map(float, said.groups())
    assert 0 < share < 100, "a token moves when an expert of its own, or of one that it sees, is another one"
    assert tokens < sum(len(row.trained) for row in rows), "those of the first optimizer step"
    assert gap > size, "another expert moves more than the jitter does"
    assert "top-k" in caught.value.cause
    assert caught.value.fix.startswith("unset rl.mini_batch_per_replica")
    assert ("rl.routing_replay=rollout, which would pin the routing, is not available yet" in caught.value.fix) == (
        "rl.routing_replay" in NOT_YET
    )
    assert caught.value.code == "E8" and not caught.value.retryable
    assert largest_gap(before, policy) == 0


@pytest.mark.parametrize("size", [None, 0.0])
def test_a_router_that_does_not_jitter_trains(policy, rows_of_groups, size):
    if size is not None:
        jitter(policy, size)
    result = policy.train_step(rows_of_groups([4, 4, 4, 4]))
    assert result.optimizer_steps == 2 and not result.skipped


def test_one_optimizer_step_needs_no_ahead_pass_so_jitter_is_let_through(make_policy, tiny, rows_of_groups):
    policy = make_policy(model=tiny("Qwen3Moe", **EXPERTS), rl=SINGLE)
    jitter(policy, 1e-2)
    assert policy.train_step(rows_of_groups([4, 4, 4, 4])).optimizer_steps == 1


def test_the_message_counts_what_moved_and_says_which_routing_it_was(tiny):
    recorded = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    drift = Drift.all([Drift.of(recorded, recorded), Drift.of(recorded, recorded + torch.tensor([0.0, 0.25, 0.0, -0.5]))])
    routed, dense = (not_deterministic(tiny(kind), drift) for kind in ("Qwen3Moe", "Llama"))
    for said, routing in ((routed, "NATURAL"), (dense, "PINNED")):
        assert "25.0% of 8 tokens moved, by up to 0.5 nats" in str(said) and f"the forward routing was {routing}" in str(said)
    assert "rl.routing_replay=rollout" in routed.fix and "dropout" not in routed.fix
    assert "dropout" in dense.fix and "routing_replay" not in dense.fix
    assert not_deterministic(tiny("Qwen3Moe"), Drift.of(recorded, recorded.clone())) is None
