"""Out of memory is known whoever says it, and what is offered is legal for the run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from posttrain.config.catalog import load_catalog
from posttrain.config.load import load_config
from posttrain.config.schema import EvalConfig, RunConfig
from posttrain.errors import EngineStartError, OutOfMemory, RunAborted, RunInterrupted, WeightSyncError
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


def test_a_wider_engine_is_offered_where_the_grid_can_have_one() -> None:
    failure = EngineStartError("the KV cache does not fit", cause="No available memory for the cache blocks", code="kv-cache")
    ray = ("rollout.engine=vllm", "grid.backend=ray", "grid.gpu_placement=disaggregated")

    def first(*overrides: str, asked: Sequence[EvalConfig] | None = None) -> str:
        return recovery_steps(config("rollout.engine=vllm", *overrides), failure, asked)[0]

    wider = "or raise rollout.tensor_parallel_size (now 1) and {} together: more devices for one engine"
    assert wider.format("grid.ranks") in first(*ray)
    assert wider.format("the second number of grid.shapes.rollout") in first(*ray, "grid.shapes.rollout=[2,1]")
    config(*ray, "rollout.tensor_parallel_size=2", "grid.ranks=2")
    config(*ray, "rollout.tensor_parallel_size=2", "grid.shapes.rollout=[2,2]")
    assert "tensor_parallel_size" not in first() and "tensor_parallel_size" not in first(*ray, asked=[])


OFFER = re.compile(r"([a-z]+\.[a-z_.]+)=(\[[\d,]+\]|[\d.]+(?:, (?:then )?[\d.]+)*)")


def offered(line: str) -> list[list[str]]:
    """The overrides that a step offers, as printed: what stands side by side goes together; of a list the first and the last."""
    found = []
    for part in re.split(r" or |: ", re.sub(r" \([^)]*\)", "", line)):
        first, _, after = part.partition(" together")  # what comes after it is typed beside it
        for keys, beside in ((first, ""), (after, first)):
            pairs = OFFER.findall(keys)
            kept = [f"{key}={value}" for key, value in OFFER.findall(beside)]
            values = [value if value.startswith("[") else re.split(r", (?:then )?", value) for _, value in pairs]
            many = [value for value in values if isinstance(value, list) and len(value) > 1]
            for i in (0, -1) if many else (0,) if pairs else ():
                chosen = [value if isinstance(value, str) else value[i] for value in values]
                found.append([*kept, *(f"{key}={value}" for (key, _), value in zip(pairs, chosen, strict=True))])
    return found


def all_legal(*overrides: str, asked: Sequence[EvalConfig] | None = None) -> list[str]:
    """Load what every step offers, and the last offers of all steps together. Returns all that was offered."""
    before, told = [], []
    for line in recovery_steps(load_config(overrides).config, asked=asked):
        offers = offered(line)
        for offer in offers:
            load_config([*overrides, *offer])
            told += offer
        before += offers[-1] if offers else []
    load_config([*overrides, *before])
    return told


def test_what_is_printed_is_read_as_offers() -> None:
    line = "3 rollout.max_tokens=3 rl.overlong_buffer_tokens=3 together, then rollout.max_model_len=9: only if acceptable"
    first = ["rollout.max_tokens=3", "rl.overlong_buffer_tokens=3"]
    assert offered(line) == [first, [*first, "rollout.max_model_len=9"]]
    assert offered("2 rl.micro_batch_per_replica=4, 3, 2 (now 8; x=1) or rl.micro_batch_tokens=5 (now 9): the same") == [
        ["rl.micro_batch_per_replica=4"], ["rl.micro_batch_per_replica=2"], ["rl.micro_batch_tokens=5"]
    ]  # fmt: skip
    assert offered("5 stop; more: grid.dp_shard=4 grid.shapes.policy=[1,4]") == [["grid.dp_shard=4", "grid.shapes.policy=[1,4]"]]


RAY = ("grid.backend=ray", "rollout.engine=vllm")
TOPOLOGIES = {
    "local": (),
    "a micro-batch": ("rl.micro_batch_per_replica=32",),
    "mini-batches": ("rl.mini_batch_per_replica=16",),
    "short": ("rollout.max_tokens=2", "rollout.max_model_len=3"),
    "held out": ("validation.max_tokens=5",),
    "overlong": ("rl.overlong_penalty_factor=1", "rl.overlong_buffer_tokens=6", "rollout.max_tokens=7"),
    "evals": ("evals=[{name: arithmetic, max_tokens: 250}]", "rollout.max_model_len=260", "rollout.max_tokens=200"),
    "vllm": ("rollout.engine=vllm",),
    "two shards": (*RAY, "grid.dp_shard=2"),
    "shapes": (*RAY, "grid.dp_shard=2", "grid.shapes={policy: [1, 2], rollout: [2, 1]}", "rl.micro_batch_per_replica=2"),
    "HSDP": (*RAY, "grid.dp_replicate=2", "grid.dp_shard=2", "grid.shapes.policy=[1,4]", "rl.mini_batch_per_replica=32"),
    "an odd batch": (*RAY, "grid.dp_shard=2", "rl.batch_per_replica=24", "rl.mini_batch_per_replica=6", "rl.group_size=4"),
    "no wider one": (*RAY, "grid.dp_shard=64"),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_value_that_is_offered_loads(name: str) -> None:
    told = all_legal(*BASE, *TOPOLOGIES[name])
    assert told
    wider = [one for one in told if one.startswith("grid.")]
    assert bool(wider) == ("grid.backend=ray" in TOPOLOGIES[name] and name != "no wider one")


@pytest.mark.parametrize("name", sorted(load_catalog().experiments))
def test_every_value_that_is_offered_to_an_experiment_loads(name: str) -> None:
    assert all_legal(f"experiment={name}")


def test_the_cluster_is_offered_more_ranks_with_all_that_goes_with_them() -> None:
    told = all_legal("experiment=cluster_grpo", "rl.micro_batch_per_replica=2")
    assert told[-3:] == ["grid.dp_shard=4", "grid.shapes.policy=[1,4]", "rl.micro_batch_per_replica=4"]


def test_an_eval_is_offered_what_its_command_takes() -> None:
    before = config("rollout.max_tokens=100", "evals=[{name: arithmetic, max_tokens: 60}]", *RAY, "grid.dp_shard=2")
    short = recovery_steps(before, asked=[EvalConfig(name="arithmetic", max_tokens=40)])
    assert short[1] == "2 rl.micro_batch_per_replica: nothing to lower, nothing trains here"
    assert short[2].startswith("3 --max-tokens 20, then rollout.max_model_len=")
    assert "policy ranks" not in short[4]
    all_legal(*BASE, asked=[EvalConfig(name="arithmetic")])


DIED = RunInterrupted("rollout-0 died", where="rollout-0, pid 7 on a", cause="the node was running low on memory")


@pytest.mark.parametrize(("exc", "said"), [
    (None, "nothing to gain for the policy"),
    (OutOfMemory("the policy ran out of memory while training"), "nothing to gain for the policy"),
    (DIED, "=0.4, then 0.25, then 0.2"),
    (EngineStartError("the device has less free memory than the engine may take", code="device-memory"), "=0.4, then 0.25"),
    (EngineStartError("the KV cache does not fit", code="kv-cache"), "nothing to lower, the KV cache lacks room"),
])  # fmt: skip
def test_where_engines_have_devices_of_their_own_it_matters_who_ran_out(exc: Exception | None, said: str) -> None:
    apart = config(*RAY, "grid.gpu_placement=disaggregated")
    assert said in next(line for line in recovery_steps(apart, exc) if line.startswith("1 "))


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
