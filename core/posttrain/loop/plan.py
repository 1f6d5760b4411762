"""`posttrain plan`: what a config means before anything starts: grid, batch, memory by role and term, and the transfer plan.

Reads the model folder's config and builds the model on the meta device, so parameters, their sizes and who publishes what are
those of the run. Reads no weights and no data, starts no engine and no Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config.rules import batch_plan
from posttrain.config.schema import NO_ENGINE
from posttrain.placement.grid import Grid, resolve_grid, transport_of
from posttrain.placement.layout import actor_groups, device_groups
from posttrain.placement.memory import ModelShape, Term, policy_memory, rollout_memory, shape_of
from posttrain.tracking.run_dir import output_root
from posttrain.tracking.text import near
from posttrain.weights.makespan import limit, makespan
from posttrain.weights.plan import BucketPlan, ParameterSpec, place_of, plan_buckets
from posttrain.weights.slices import least_bytes, megatron_cuts

if TYPE_CHECKING:
    from posttrain.config.load import LoadedConfig
    from posttrain.config.schema import RunConfig
    from posttrain.placement.batch import BatchPlan

ONE_HOST = 5.0
"""GB/s that is assumed between processes of one machine, unless told otherwise."""
NETWORK = 50.0
"""GB/s that is assumed between machines: one port of 400 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """How weights travel. Bytes are of one update.

    lane_bytes   into each rollout body: every parameter once, in rollout.dtype
    slice_bytes  the least for the tensor-parallel rank that needs most, if it took its slice alone
    rank_bytes   from the policy rank that publishes most      slot_bytes   its slot, with the gaps of alignment
    makespan_s   of lanes that pull as those of a run do, all at once or `concurrent` at a time   limit_s   no order is faster
    """

    transport: str
    parameters: int
    buckets: int
    bucket_bytes: int
    policy_ranks: int
    lanes: int
    concurrent: int
    lane_bytes: int
    slice_bytes: int
    rank_bytes: int
    slot_bytes: int
    link: float
    makespan_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All of it as data. transfer: None where completions come with the data."""

    name: str
    grid: Grid
    batch: BatchPlan
    model: str
    parameters: int
    policy: list[Term]
    rollout: list[Term]
    transfer: Transfer | None
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, sizes in bytes, times in seconds."""
        grid, batch = self.grid, self.batch
        return {
            "name": self.name,
            "grid": {
                **asdict(grid), "dp_world": grid.dp_world,
                "actor_groups": [asdict(group) for group in actor_groups(grid)],
                "device_groups": [asdict(group) for group in device_groups(grid)],
            },
            "batch": {
                **asdict(batch), "groups": batch.groups, "n_mini": batch.n_mini, "smallest_batch": batch.smallest_batch,
                "legal_minis": batch.legal_minis, "legal_micros": batch.legal_micros,
            },
            "model": {"path": self.model, "parameters": self.parameters},
            "memory": {
                "policy_rank": [asdict(term) for term in self.policy], "rollout_rank": [asdict(term) for term in self.rollout]
            },
            "transfer": None if self.transfer is None else asdict(self.transfer),
            "notes": self.notes,
        }  # fmt: skip


def plan_run(
    loaded: LoadedConfig, *, root: str | Path | None = None, link: float | None = None, say: Callable[[str], None] = print
) -> RunPlan:
    """The plan of a checked config. root: folder for runs. link: GB/s, see `makespan`.

    A model that `model.factory` makes is made, once, where the run will find it; `say` tells of it. Raises what a run raises for
    its optimizer, objective, packer and model's config.
    """
    from posttrain.loop.model_folder import model_folder
    from posttrain.loop.prepare import build_packer, build_run_objective
    from posttrain.policy.optimizer import check_optimizer

    config, notes = loaded.config, list(loaded.notes)
    objective = build_run_objective(config)
    notes += [*objective.notes, *check_optimizer(config.rl)]
    path = model_folder(config.model, output_root(root), say)
    build_packer(config, path)
    specs, shape = model_shape(config, path)
    plan = transfer_plan(config, specs)
    sampled = config.rollout.engine != NO_ENGINE
    return RunPlan(
        name=config.name,
        grid=resolve_grid(config.grid),
        batch=batch_plan(config),
        model=near(path),
        parameters=shape.numel,
        policy=policy_memory(
            config, shape, needs_reference=objective.needs_reference(), slot_bytes=_largest_slot(plan) if sampled else None
        ),
        rollout=rollout_memory(config, shape, staging_bytes=plan.nbytes) if sampled else [],
        transfer=transfer(config, plan, shape, link) if sampled else None,
        notes=notes,
    )


def model_shape(config: RunConfig, path: str) -> tuple[list[ParameterSpec], ModelShape]:
    """What the policy publishes, in `rollout.dtype`, and what its memory depends on; nothing but the model's config is read."""
    import torch

    from posttrain.policy.load import model_from_config

    with torch.device("meta"):
        model = model_from_config(path, torch.float32, trust_remote_code=config.model.trust_remote_code)
    named = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    specs = [ParameterSpec(name, config.rollout.dtype, shape) for name, shape in named]
    return specs, shape_of(named, model.config.get_text_config().to_dict())


def transfer_plan(config: RunConfig, specs: list[ParameterSpec]) -> BucketPlan:
    """Who publishes which bytes in which buckets."""
    from posttrain.policy.sharding import fsdp_shards

    grid = config.grid
    return plan_buckets(specs, bucket_bytes=config.weights.bucket_bytes, shards=fsdp_shards(grid.dp_replicate, grid.dp_shard))


def transfer(config: RunConfig, plan: BucketPlan, shape: ModelShape, link: float | None = None) -> Transfer:
    """What an update moves, and how long the links alone make it."""
    grid, tp = resolve_grid(config.grid), config.rollout.tensor_parallel_size
    link = link or (NETWORK if grid.backend == "ray" else ONE_HOST)
    sent = rank_bytes(plan, grid.dp_world)
    lanes = grid.rollout[0]
    starts = [place_of(lane, grid.dp_world) for lane in range(lanes)]
    concurrent = min(config.weights.max_concurrent_lanes or lanes, lanes)
    return Transfer(
        transport=transport_of(config),
        parameters=len(plan.parameters),
        buckets=len(plan.buckets),
        bucket_bytes=plan.bucket_bytes,
        policy_ranks=grid.dp_world,
        lanes=lanes,
        concurrent=concurrent,
        lane_bytes=sum(sent),
        slice_bytes=max(least_bytes(plan.parameters, megatron_cuts(tp, shape.kv_heads), tp)),
        rank_bytes=max(sent),
        slot_bytes=_largest_slot(plan),
        link=link * 1e9,
        makespan_s=makespan([sent] * lanes, link * 1e9, starts=starts, concurrent=concurrent),
        limit_s=limit([sent] * lanes, link * 1e9),
    )


def rank_bytes(plan: BucketPlan, ranks: int) -> list[int]:
    """Bytes that each policy rank publishes, without the gaps of alignment."""
    sent = [0] * ranks
    for bucket in plan.buckets:
        sent[bucket.rank] += bucket.nbytes
    return sent


def _largest_slot(plan: BucketPlan) -> int:
    return max(plan.slot_bytes(rank) for rank in {bucket.rank for bucket in plan.buckets})
