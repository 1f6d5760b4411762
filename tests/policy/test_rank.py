"""One policy rank in one process: it meets the others, trains, publishes its shards, and says when the others are gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config.schema import GridConfig, ModelConfig, OptimizerConfig, RLConfig, RolloutConfig, RunConfig, WeightsConfig
from posttrain.errors import OutOfMemory, RunInterrupted
from posttrain.policy.memory import memory_guard
from posttrain.weights.digest import bucket_digest
from posttrain.weights.publication import Publication, complete_digests, merge_publications
from posttrain.weights.shm import ShmTransport
from posttrain.weights.transport import views

OBJECTIVE = "posttrain.loop.prepare:build_run_objective"


@pytest.fixture(scope="module")
def pair(rank_processes: Any) -> Iterator[Any]:
    with rank_processes.RankProcesses(2, connected=False) as processes:
        yield processes


def make_config(model: Path) -> RunConfig:
    rl = RLConfig(steps=4, group_size=4, batch_per_replica=8, optimizer=OptimizerConfig(lr=0.1))
    return RunConfig(
        model=ModelConfig(name_or_path=str(model)), rl=rl, rollout=RolloutConfig(dtype="bfloat16"),
        grid=GridConfig(backend="ray", dp_shard=2), weights=WeightsConfig(bucket_bytes=2**12),
    )  # fmt: skip


def pulled(publication: Publication) -> dict[str, torch.Tensor]:
    """Every parameter as a lane would hold it after staging."""
    transport, plan = ShmTransport(), publication.plan
    staging = transport.staging(plan.nbytes)
    transport.register(staging)
    for bucket in plan.buckets:
        transport.pull(publication.handles[bucket.rank], bucket.pieces, staging)
    found = {
        spec.name: staging.buffer[offset : offset + spec.nbytes].clone().view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, offset in zip(plan.parameters, plan.offsets, strict=True)
    }
    transport.close()
    staging.release()
    return found


def digests_of(publication: Publication, found: dict[str, torch.Tensor]) -> tuple[str, ...]:
    buffer = torch.empty(publication.plan.nbytes, dtype=torch.uint8)
    for name, view in views(publication.plan, buffer):
        view.copy_(found[name])
    return tuple(bucket_digest(buffer, [(p.target, p.nbytes) for p in b.pieces]) for b in publication.plan.buckets)


def test_a_rank_trains_publishes_saves_and_is_lost(pair, rank_processes, uneven_model, rows_of_groups, tmp_path):
    config, rows = make_config(uneven_model(dtype="float32")), rows_of_groups([4, 4])
    where = ("127.0.0.1", rank_processes.free_port())
    refused = pair("start_alone", *where, config, config.model.name_or_path, OBJECTIVE)[0]
    assert isinstance(refused, RunInterrupted) and "policy rank 0 of 2 did not meet the others" in str(refused)
    assert refused.code == "rendezvous" and refused.retryable

    where = ("127.0.0.1", rank_processes.free_port())
    started = pair("rank_call", "start", "RANK", 2, *where, config, config.model.name_or_path, OBJECTIVE)
    assert [one.rank for one in started] == [0, 1] and dataclasses.replace(started[1], rank=0) == started[0]
    assert started[0].vocab_size == 61 and not started[0].needs_old_logprobs

    steps = pair("rank_call", "train_step", rows)
    assert steps[0].metrics == steps[1].metrics and steps[0].optimizer_steps == 1
    parts = pair("rank_call", "publish", 1)
    exact = pair("whole_weights")[0]
    pair("rank_call", "hold", 1)
    pair("rank_call", "train_step", rows)
    publication = merge_publications(parts)
    found = pulled(publication)
    assert {bucket.rank for bucket in publication.plan.buckets} == {0, 1}
    for name, value in exact.items():
        assert torch.equal(found[name], value.to(torch.bfloat16)), name  # as published, though training went on
    digests = {bucket: digest for part in pair("rank_call", "digests", 1) for bucket, digest in part.items()}
    assert complete_digests(publication, digests) == digests_of(publication, found), "and digested before it did"
    pair("rank_call", "release", 1)
    assert any(not torch.equal(value, exact[name]) for name, value in pair("whole_weights")[0].items())

    assert pair("rank_call", "snapshot") == [1, 1] and pair("rank_call", "snapshot") == [2, 2]  # nobody wrote the first
    with pytest.raises(RuntimeError, match="of 2 holds no snapshot 1"):
        pair("rank_call", "write", 1, str(tmp_path / "saved"))
    later = pair("train_and_write", 2, str(tmp_path / "saved"), rows)[0]
    with pytest.raises(RuntimeError, match="of 2 holds no snapshot 2"):
        pair("rank_call", "write", 2, str(tmp_path / "saved"))
    pair("rank_call", "load", str(tmp_path / "saved"))
    assert pair("rank_call", "train_step", rows)[0].metrics == later[0].metrics
    assert pair("rank_call", "train_step", rows)[0].metrics == later[1].metrics

    said = pair("die", 1, "train_step", rows)
    assert said[1] == "dead"
    lost, seconds = said[0]
    assert isinstance(lost, RunInterrupted) and "policy rank 0 of 2 lost the others in train_step" in str(lost)
    assert lost.code == "policy-rank-lost" and lost.retryable and seconds < 10
    assert pair("rank_call", "close")[0] is None


def test_running_out_of_memory_is_one_typed_error_whoever_says_it():
    said = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried …"),
    ]  # fmt: skip
    for exc in said:
        with pytest.raises(OutOfMemory, match="the policy ran out of memory while training") as caught, memory_guard("training"):
            raise exc
        assert caught.value.__cause__ is exc and "rl.micro_batch_per_replica" in caught.value.fix
    with pytest.raises(RuntimeError, match="shape"), memory_guard("training"):
        raise RuntimeError("shape mismatch")


def test_a_batch_that_does_not_fit_says_so(make_policy, rows_of_groups, monkeypatch):
    policy = make_policy()
    monkeypatch.setattr(policy.module.model.model.layers[1], "forward", lambda *args, **options: torch.empty(2**60))
    with pytest.raises(OutOfMemory, match="ran out of memory while training"):
        policy.train_step(rows_of_groups([4, 4]))
