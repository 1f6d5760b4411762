"""What a grid means on machines: which roles share a process (ActorGroup) and which share devices (DeviceGroup)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.placement.grid import Grid


@dataclass(frozen=True, slots=True)
class ActorGroup:
    """`processes` processes, each of which hosts all of `roles`. `ranks`: ranks of one process's role."""

    name: str
    roles: tuple[str, ...]
    processes: int
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """`devices` devices, each of which serves all of `roles`."""

    name: str
    roles: tuple[str, ...]
    devices: int


def actor_groups(grid: Grid) -> list[ActorGroup]:
    """Under `local` one process hosts every role; under `ray` a role has actors of its own: one for a policy rank or a body."""
    if grid.backend == "local":
        return [ActorGroup("this process", ("controller", "policy", "rollout"), 1)]
    return [
        ActorGroup("driver", ("controller", "rewards"), 1),
        ActorGroup("policy", ("policy",), grid.policy[0] * grid.policy[1]),
        ActorGroup("rollout", ("rollout",), grid.rollout[0], grid.rollout[1]),
    ]


def device_groups(grid: Grid) -> list[DeviceGroup]:
    """Colocated roles share devices, a rollout replica those of as many policy ranks; disaggregated ones have their own."""
    policy, (replicas, width) = grid.policy[0] * grid.policy[1], grid.rollout
    if grid.backend == "local" or grid.gpu_placement == "colocated":
        return [DeviceGroup("shared", ("policy", "rollout"), max(-(-policy // width), replicas) * width)]
    return [DeviceGroup("policy", ("policy",), policy), DeviceGroup("rollout", ("rollout",), replicas * width)]
