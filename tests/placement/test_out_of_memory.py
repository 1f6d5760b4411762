"""Out of memory is known whoever says it, and what is offered is legal for the run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from posttrain.config.load import load_config
from posttrain.config.rules import check_rules
from posttrain.config.schema import RunConfig
from posttrain.errors import EngineStartError, OutOfMemory, RunAborted, WeightSyncError
from posttrain.placement.out_of_memory import explain, memory_explained, ran_out, recovery_steps
from posttrain.policy.memory import memory_guard

BASE = ["model.name_or_path=/m", "rl.steps=1", "environments=[{name: arithmetic}]", "rl.batch_per_replica=64"]


def config(*overrides: str) -> RunConfig:
    return load_config([*BASE, *overrides]).config


FAILURES = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"),
    "cuda alias": torch.cuda.OutOfMemoryError("CUDA out of memory."),
    "host allocator": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 B. "
        "Error code 12 (Cannot allocate memory)"
    ),
    "python": MemoryError(),
    "vllm cache": RuntimeError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    "vllm device": ValueError("Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory"),
    "fork": OSError(12, "Cannot allocate memory"),
    "group": ExceptionGroup("workers", [ValueError("other"), MemoryError()]),
    "ours": OutOfMemory("the policy ran out of memory while training", cause="CUDA out of memory"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_every_form_becomes_the_one_error_with_five_steps_in_order(name: str) -> None:
    found = explain(FAILURES[name], config())
    assert isinstance(found, OutOfMemory) and found.cause and found.code == "oom"
    steps = re.findall(r"^ {9}(\d) (\S+)", found.fix, re.MULTILINE)
    assert [number for number, _ in steps] == ["1", "2", "3", "4", "5"]
    first = ["rollout.gpu_memory_utilization:", "rl.micro_batch_per_replica=2,", "rollout.max_tokens=128"]
    assert [word for _, word in steps][:3] == first
    assert len(str(found).splitlines()) < 15


def test_it_is_found_behind_other_errors_and_with_their_message() -> None:
    try:
        try:
            raise FAILURES["cuda"]
        except torch.OutOfMemoryError as exc:
            raise RuntimeError("the actor failed") from exc
    except RuntimeError as exc:
        assert "CUDA out of memory" in str(ran_out(exc))


OTHERS = (ValueError("a value"), RunAborted("stopped"), WeightSyncError("/dev/shm has no space", code="shm"), KeyError("memory"),
          RuntimeError("the memory of the group"))  # fmt: skip


@pytest.mark.parametrize("exc", OTHERS, ids=repr)
def test_other_errors_pass_as_they_are(exc: Exception) -> None:
    with pytest.raises(type(exc)) as caught, memory_explained(config()):
        raise exc
    assert caught.value is exc


def test_a_weight_update_names_its_lanes_and_keeps_its_peer() -> None:
    failure = WeightSyncError("lane rollout-1: publication 3 was not staged", cause="MemoryError: bad_alloc, out of memory")
    found = explain(failure, config())
    assert found is not None and found.message == failure.message
    assert "weights.max_concurrent_lanes" in found.fix.split("\n")[1]


def test_an_engine_that_does_not_fit_names_its_three_knobs_and_ends_as_an_engine() -> None:
    failure = EngineStartError("the KV cache does not fit", cause="No available memory for the cache blocks", code="kv-cache")
    found = explain(failure, config("rollout.engine=vllm"))
    assert found is not None and found.exit_code == 4
    for knob in ("rollout.gpu_memory_utilization", "rollout.max_model_len", "rollout.max_num_seqs"):
        assert knob in found.fix.split("\n")[1]


@pytest.mark.parametrize("overrides", [(), ("rl.micro_batch_per_replica=32",), ("rl.mini_batch_per_replica=16",),
                                       ("rollout.max_tokens=2", "rollout.max_model_len=3"),
                                       ("validation.max_tokens=5",), ("rollout.engine=vllm",)])  # fmt: skip
def test_every_value_that_is_offered_is_legal(overrides: tuple[str, ...]) -> None:
    before = config(*overrides)
    offered = [
        (key, value)
        for line in recovery_steps(before)
        for key, values in re.findall(r"((?:rl|rollout|validation)\.[a-z_]+)=([\d., then]+)", line)
        for value in re.findall(r"\d[\d.]*", values)
    ]
    assert offered
    for key, value in offered:
        changed = [f"{key}={value}"]
        if key == "rollout.max_model_len":  # it comes after the shorter completions
            changed += [f"{k}={v}" for k, v in offered if k.endswith("max_tokens")]
        assert check_rules(load_config([*BASE, *overrides, *changed]).config) == []


def test_a_micro_batch_that_cannot_be_smaller_is_not_offered() -> None:
    _, line, *_ = recovery_steps(config("rl.micro_batch_per_replica=1"))
    assert line == "2 rl.micro_batch_per_replica=1 is the least that dp_world=1 allows"
    line, *_ = recovery_steps(config("rollout.engine=vllm", "rollout.gpu_memory_utilization=0.3"))
    assert "=0.25, then 0.2" in line and "0.4" not in line


def test_images_are_lowered_together_where_the_data_has_a_ceiling() -> None:
    line = recovery_steps(config("rl.data.factory_kwargs={max_image_side: 512}"))[3]
    assert "rl.data.factory_kwargs.max_image_side=256" in line


def test_a_real_allocation_failure_is_known() -> None:
    code = """
import resource, torch
from posttrain.placement.out_of_memory import ran_out
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
for allocate in (lambda: torch.empty(2**35, dtype=torch.uint8), lambda: bytearray(2**35)):
    try:
        allocate()
    except (RuntimeError, MemoryError) as exc:
        print(type(exc).__name__, "|", ran_out(exc))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and not any(line.endswith("None") for line in lines)
    assert "can't allocate memory" in lines[0] or "not enough memory" in lines[0]


def test_the_policys_own_error_gets_the_steps_of_the_run() -> None:
    with pytest.raises(OutOfMemory, match="while training") as caught, memory_explained(config()), memory_guard("training"):
        raise FAILURES["host allocator"]
    assert "1 rollout.gpu_memory_utilization" in caught.value.fix and "5 stop" in caught.value.fix
