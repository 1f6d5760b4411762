"""The parts of a run whose roles live in a Ray cluster: one actor for each policy rank and each rollout replica.

    hosting = open_cluster(config, run_dir, plugins_of(config), say)
    policy = hosting.policy(config, model)                    # all ranks are up and hold the model when this returns
    engine, lanes = hosting.rollouts(config, spec)

The driver keeps what is light: the controller, the data, the rewards. A role is placed, begun and checked before its model loads:
that the folder for runs is shared, and that each node has the plug-ins that the driver has.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.errors import ConfigError
from posttrain.loop.policy_group import PolicyGroup, RemoteRank
from posttrain.placement.cluster import Cluster, Seat, Seats, connect, cpus_of, seats
from posttrain.placement.grid import resolve_grid, transport_of
from posttrain.placement.host import Place, PluginRef, RoleSpec, boot_id
from posttrain.placement.remote import Fleet
from posttrain.placement.shared_root import check, written
from posttrain.plugins.objects import PREFIX
from posttrain.rollout.replicas import RemoteLane, Replicas
from posttrain.weights.owner import ProcessId
from posttrain.weights.publisher import GroupPublisher
from posttrain.weights.shared_files import sweep

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.placement.remote import Remote
    from posttrain.rollout.engine import EngineSpec
    from posttrain.tracking.run_dir import RunDir

GONE_S = 5.0
"""How long killed roles may take to be gone."""


@dataclass(eq=False)
class Hosting:
    """A connected cluster with the roles of one run. `close` ends every role and leaves, or ends, the cluster."""

    config: RunConfig
    cluster: Cluster
    seats: Seats
    fleet: Fleet
    _stack: ExitStack
    _common: dict[str, Any]
    _say: Callable[[str], None]
    _ranks: list[Any] = field(default_factory=list)

    def policy(self, model: str) -> PolicyGroup:
        """The policy, sharded over its ranks. Raises what a rank raised, or what the nodes have not in common."""
        for seat in self.seats.of("policy"):
            self._add(seat, "posttrain.policy.rank:PolicyRank", {}, ["algorithms"])
        self._ranks = self._begin("policy")
        group = PolicyGroup(self._ranks, self.config.loop.train_timeout_s)
        group.start(self.config, model, transport=transport_of(self.config))
        return group

    def publisher(self) -> GroupPublisher:
        """The ranks of `policy`, as those who publish."""
        timeout = self.config.weights.stage_timeout_s + self.config.weights.abort_timeout_s / 2  # a rank keeps the first itself
        return GroupPublisher([RemoteRank(rank, timeout) for rank in self._ranks])

    def rollouts(self, spec: EngineSpec) -> Replicas:
        """The rollout replicas; their engines are not started."""
        config = self.config
        for seat in self.seats.of("rollout"):
            logs = Path(self._common["logs"]) / seat.name
            kwargs = {
                "name": seat.name, "number": seat.index, "engine": config.rollout.engine, "options": config.rollout.options,
                "spec": replace(spec, log_dir=logs), "transport": transport_of(config),
                "transport_options": config.weights.options, "compare_bytes": config.weights.verify_weight_values,
            }  # fmt: skip
            self._add(seat, "posttrain.rollout.body:RolloutBody", kwargs, ["engines"])
        may_lose = config.weights.on_failure != "raise"
        lanes = []
        for remote in self._begin("rollout"):
            remote.spare = may_lose
            lanes.append(RemoteLane(remote, config.weights.rebuild_timeout_s, functools.partial(self._respawn, remote.name)))
        return Replicas(lanes, start_timeout_s=config.rollout.start_timeout_s, may_lose=may_lose, say=self._say)

    def close(self) -> None:
        """End every role, then the connection; nothing of theirs is left on this machine. Idempotent."""
        self.fleet.close()
        self._stack.close()
        self.fleet.wait_gone(GONE_S)
        sweep()

    def _add(self, seat: Seat, factory: str, kwargs: dict[str, Any], kinds: Sequence[str]) -> None:
        refs = tuple(ref for ref in plugin_refs(self.config) if ref.kind in (*kinds, "datapackers", "transports"))
        places = [self._ranks[rank].place for rank in seat.shares]
        devices = tuple(device for place in places for device in place.devices)
        spec = RoleSpec(seat.name, factory, kwargs, plugins=refs, devices=devices, **self._common)
        self.fleet.add(spec, seat)

    def _respawn(self, name: str) -> None:
        self.fleet.replace(name, self.config.grid.start_timeout_s)
        self._write_roles()
        self._check_places([self.fleet.roles[name]])
        self._say(f"{name} runs again, in a new process")

    def _write_roles(self) -> None:
        """`logs/roles.json`: who runs where, for whoever looks at a process or a log."""
        placed = {name: role.place for name, role in self.fleet.roles.items() if role.place}
        shown = {n: {"node": p.node, "address": p.address, "pid": p.pid, "log": p.log} for n, p in placed.items()}
        (Path(self._common["logs"]) / "roles.json").write_text(json.dumps(shown, indent=2) + "\n", encoding="utf-8")

    def _begin(self, role: str) -> list[Any]:
        names = [seat.name for seat in self.seats.of(role)]
        self.fleet.begin(names, self.config.grid.start_timeout_s)
        remotes = [self.fleet.roles[name] for name in names]
        self._write_roles()
        self._check_places(remotes)
        return remotes

    def _check_places(self, roles: Sequence[Remote]) -> None:
        """Raise SharedRootError where a node does not see the run's folder, and what `check_machines` raises."""
        check(self._common["nonce"], [role.place.sighting for role in roles if role.place and role.place.sighting])
        check_machines(transport_of(self.config), [role.place for role in self.fleet.roles.values() if role.place])


def check_machines(transport: str, places: Sequence[Place]) -> None:
    """Raise ConfigError where shared memory would have to reach from one machine to another."""
    machines = {place.boot: place.node for place in places}
    if transport == "shm" and len(machines) > 1:
        raise ConfigError(
            f"weights.transport=shm is memory of one machine, and the roles are on {', '.join(sorted(machines.values()))}",
            fix="set weights.transport=nixl, or a grid that fits on one machine",
            where="weights.transport",
        )


def open_cluster(config: RunConfig, run_dir: RunDir, say: Callable[[str], None]) -> Hosting:
    """Join or start the cluster and reserve what the grid needs. Raises EngineStartError; nothing is left then."""
    grid = resolve_grid(config.grid)
    with ExitStack() as stack:
        cluster = stack.enter_context(connect(logs=run_dir.logs, cpus=cpus_of(grid)))
        plan = seats(grid, gpu=cluster.gpus > 0)
        cluster.reserve(plan, timeout=config.grid.start_timeout_s)
        nonce = stack.enter_context(written(run_dir.path))
        common = {
            "logs": str(run_dir.logs), "nonce": nonce, "session": cluster.processes,
            "driver": ProcessId.current(), "driver_boot": boot_id(),
            "threads": config.grid.threads or 1, "paths": tuple(path for path in sys.path if path), "folder": os.getcwd(),
        }  # fmt: skip
        owner = "its own Ray cluster" if cluster.own else f"the Ray cluster at {cluster.address}"
        say(f"grid: {grid.policy[1]} policy rank(s), {grid.rollout[0]} rollout replica(s) on {cluster.nodes} node(s) of {owner}")
        return Hosting(config, cluster, plan, Fleet(cluster, config.grid.heartbeat_timeout_s), stack.pop_all(), common, say)


def plugin_refs(config: RunConfig) -> list[PluginRef]:
    """The plug-ins that roles load, as they are installed here. The data's and the environments' stay on the driver."""
    wanted = [
        ("algorithms", config.rl.objective.name), ("engines", config.rollout.engine), ("transports", transport_of(config)),
    ]  # fmt: skip
    if config.rl.data.packer and not config.rl.data.packer.startswith(PREFIX):  # an object of this process needs no node
        wanted.append(("datapackers", config.rl.data.packer))
    refs = []
    for kind, name in wanted:
        found = [info for info in plugins.discover(kind) if name in (info.name, f"{info.distribution}/{info.name}")]
        refs.append(PluginRef(kind, name, found[0].distribution, found[0].version) if len(found) == 1 else PluginRef(kind, name))
    return refs
