"""The grid: how many replicas and ranks each role has, `[replicas, ranks]`, and the rules that hold before anything starts.

`local` is this process: one replica of everything, tensor parallelism 1. `ray` hosts one actor per rank.
The policy has no replica axis: it scales by HSDP, `dp_replicate * dp_shard`, inside its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.config.walker import Problem
from posttrain.errors import error

if TYPE_CHECKING:
    from posttrain.config.schema import GridConfig, RunConfig

EMBEDDED = ("hf",)
"""Engines that live in the driver's process: weights reach them by a copy."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The resolved shapes. `dp_world` = dp_replicate * dp_shard, the policy's data-parallel ranks."""

    backend: str
    policy: tuple[int, int]
    rollout: tuple[int, int]
    dp_replicate: int
    dp_shard: int
    gpu_placement: str

    @property
    def dp_world(self) -> int:
        return self.dp_replicate * self.dp_shard


def transport_of(config: RunConfig) -> str:
    """The transport of the weights by name; `auto` is decided by where the roles live."""
    if config.weights.transport != "auto":
        return config.weights.transport
    if config.grid.backend == "ray":
        return "nixl"
    return "inproc" if config.rollout.engine in EMBEDDED else "shm"


def resolve_grid(config: GridConfig) -> Grid:
    """The shapes that a config means: given ones, else `grid.num_replicas` rollout replicas of `grid.ranks` ranks."""
    dp_world = config.dp_replicate * config.dp_shard
    return Grid(
        backend=config.backend,
        policy=config.shapes.policy or (1, max(dp_world, 1)),
        rollout=config.shapes.rollout or (config.num_replicas, config.ranks),
        dp_replicate=config.dp_replicate,
        dp_shard=config.dp_shard,
        gpu_placement=config.gpu_placement,
    )


def check_grid(config: GridConfig, tensor_parallel_size: int) -> list[Problem]:
    """Every rule of placement that a config breaks: E1 to E4 and the policy's ranks; empty when all hold."""
    sizes = {"grid.ranks": config.ranks, "grid.dp_replicate": config.dp_replicate, "grid.dp_shard": config.dp_shard}
    for role in ("policy", "rollout"):
        sizes |= {f"grid.shapes.{role}[{i}]": size for i, size in enumerate(getattr(config.shapes, role) or ())}
    small = [Problem(path, f"is {size}, must be at least 1") for path, size in sizes.items() if size < 1]
    return small or [*_shapes(config, resolve_grid(config), tensor_parallel_size), *_policy(config, resolve_grid(config))]


def _shapes(config: GridConfig, grid: Grid, tensor_parallel_size: int) -> Iterator[Problem]:
    local = config.backend == "local"
    ranks = grid.rollout[1]
    if local and (config.shapes.policy or config.shapes.rollout):
        yield documented("grid.shapes", "E3")
    if local and tensor_parallel_size > 1:
        yield documented("rollout.tensor_parallel_size", "E4")
    if ranks != tensor_parallel_size and not (local and ranks == 1):
        yield documented(
            "grid.shapes.rollout" if config.shapes.rollout else "grid.ranks", "E1", ranks=ranks, tp=tensor_parallel_size
        )
    yield from _one_process(config) if local else _processes(config)
    if grid.policy[0] != 1:
        yield documented("grid.shapes.policy", "E2", replicas=grid.policy[0])


def _one_process(config: GridConfig) -> Iterator[Problem]:
    """What is asked for and needs more than this process."""
    wanted = {
        "grid.num_replicas": (config.num_replicas, 1),
        "grid.grouping": ("single" if config.grouping == "auto" else config.grouping, "single"),
        "grid.gpu_placement": (config.gpu_placement, "colocated"),
    }
    for path, (value, one) in wanted.items():
        if value != one:
            yield Problem(
                path, f"{value} under grid.backend=local, which is one process", f"set grid.backend=ray, or {path}={one}"
            )


def _processes(config: GridConfig) -> Iterator[Problem]:
    """What is asked for and needs fewer processes than one for each role."""
    if config.grouping == "single":
        yield Problem(
            "grid.grouping",
            "single under grid.backend=ray, where every role has processes of its own",
            "set grid.grouping=auto; whether roles share devices is grid.gpu_placement",
        )


def _policy(config: GridConfig, grid: Grid) -> Iterator[Problem]:
    if config.backend == "local" and grid.dp_world > 1:
        yield Problem(
            "grid.dp_shard",
            f"dp_replicate * dp_shard = {grid.dp_world} under grid.backend=local, which is one process",
            "set grid.backend=ray, or grid.dp_replicate=1 grid.dp_shard=1",
        )
    elif config.shapes.policy and grid.policy[1] != grid.dp_world:
        yield Problem(
            "grid.shapes.policy",
            f"POLICY_RANKS={grid.policy[1]} must equal dp_replicate * dp_shard = {grid.dp_world}",
            f"set grid.shapes.policy=[1,{grid.dp_world}], or grid.dp_shard={max(grid.policy[1] // config.dp_replicate, 1)}",
        )


def documented(path: str, code: str, **values: object) -> Problem:
    """A documented message as a problem of one key."""
    exc = error(code, **values)
    return Problem(path, exc.message, exc.fix, exc)
