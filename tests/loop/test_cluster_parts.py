"""What is decided about a cluster without one."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from posttrain.config import load_config
from posttrain.errors import ConfigError, RunInterrupted, WeightSyncError
from posttrain.loop.build import build_transport
from posttrain.loop.cluster import check_machines
from posttrain.placement.host import Place
from posttrain.placement.out_of_memory import ran_out
from posttrain.policy import rank
from posttrain.rollout.body import RolloutBody
from posttrain.rollout.engine import EngineSpec
from posttrain.weights import nixl
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.nixl import NixlTransport
from posttrain.weights.owner import ProcessId


def place(node: str, boot: str) -> Place:
    return Place(node, "192.0.2.1", ProcessId.current(), boot, "log")


def test_shared_memory_does_not_cross_machines() -> None:
    check_machines("shm", [place("a", "1"), place("a", "1")])
    check_machines("nixl", [place("a", "1"), place("b", "2")])
    with pytest.raises(ConfigError, match="is memory of one machine, and the roles are on a, b") as caught:
        check_machines("shm", [place("a", "1"), place("b", "2")])
    assert "weights.transport=nixl" in caught.value.fix


def test_the_options_of_the_transport_reach_every_end(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["experiment=arithmetic_grpo", "weights.transport=nixl", "weights.options.timeout_s=7"]).config
    assert build_transport(config).options.timeout_s == 7.0  # type: ignore[attr-defined]

    spec = EngineSpec(model_path="", dtype="float32", max_model_len=8, max_num_seqs=1, eos_token_ids=())
    body = RolloutBody(
        "rollout-0", engine="hf", options={}, spec=spec, transport="nixl", transport_options=config.weights.options
    )
    assert body.receiver._transport.options.timeout_s == 7.0  # type: ignore[attr-defined]

    monkeypatch.setattr(rank, "Policy", MagicMock())
    monkeypatch.setattr(NixlTransport, "warm", lambda end, what: None)
    end = rank.PolicyRank()
    end.start(0, 1, "", 0, config, "", "posttrain.loop.prepare:build_run_objective", "nixl")
    assert end.publisher.pool._transport.options.timeout_s == 7.0  # type: ignore[attr-defined]


class ColdTransport(InprocTransport):
    """Of others: it cannot be started."""

    def warm(self, end: Any) -> None:
        raise WeightSyncError(f"cold at {end}")


def test_a_transport_that_does_not_start_is_told_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["experiment=arithmetic_grpo"]).config
    monkeypatch.setattr(rank, "Policy", lambda *_, **__: pytest.fail("the policy was loaded first"))
    cold: Any = ColdTransport
    with pytest.raises(WeightSyncError, match="cold at serve"):
        rank.PolicyRank().start(0, 1, "", 0, config, "", "posttrain.loop.prepare:build_run_objective", cold)
    spec = EngineSpec(model_path="", dtype="float32", max_model_len=8, max_num_seqs=1, eos_token_ids=())
    body = RolloutBody("rollout-0", engine="hf", options={}, spec=spec, transport=cold)
    monkeypatch.setattr(body.engine, "start", lambda: pytest.fail("the engine was started first"))
    with pytest.raises(WeightSyncError, match="cold at pull"):
        asyncio.run(body.start())


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_nixl_is_started_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """NCCL comes in with the process group, and started before NIXL it ends in a segmentation fault."""
    config = load_config(
        ["experiment=arithmetic_grpo", "weights.transport=nixl", f"weights.options.device={device}", "grid.backend=ray",
         "grid.dp_shard=2"],
    ).config  # fmt: skip
    seen: list[str] = []

    def policy(*_: Any, **__: Any) -> MagicMock:
        seen.append("policy")
        return MagicMock()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: device != "cpu")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(nixl, "warm_nixl", lambda: seen.append("nixl of this process"))
    monkeypatch.setattr(NixlTransport, "warm", lambda end, what: seen.append(f"warm {what}"))
    monkeypatch.setattr(rank, "_meet", lambda *_: seen.append("meet"))
    monkeypatch.setattr(rank.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(rank, "_mesh", lambda *_: None)
    monkeypatch.setattr(rank, "Policy", policy)
    rank.PolicyRank().start(1, 2, "192.0.2.1", 1, config, "", "posttrain.loop.prepare:build_run_objective", "nixl")
    here = ["nixl of this process"] if device != "cpu" else []
    assert seen == [*here, "warm serve", "meet", "policy"]


def test_a_role_that_ray_ended_for_its_memory_ran_out_of_it() -> None:
    killed = "Task was killed due to the node running low on memory."
    assert ran_out(RunInterrupted("policy-0 died", cause=killed)) is not None
    assert ran_out(RunInterrupted("policy-0 died", cause="exit type NODE_OUT_OF_MEMORY")) is not None
    assert ran_out(RunInterrupted("policy-0 died", cause="a connection error")) is None
