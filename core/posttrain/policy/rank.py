"""One rank of a sharded policy in a process of its own, whoever hosts the process: its share of the policy, and its publications.

    rank = PolicyRank(config=config, model_path=path, rank=0, world=2, objective="my_pkg:make_objective", transport="nixl")
    rank.start(*rank.rendezvous(), timeout=300)       # rank 0 opens the rendezvous, every rank starts with its address
    rank.train_step(rows)                             # collective, like every method of `Policy`

Publishing is not collective: a rank copies its own shards, waits for nobody, and trains on while lanes pull.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.errors import EngineStartError
from posttrain.policy.ranks import MESH_AXES
from posttrain.weights.publication import Publication, PublicationPool
from posttrain.weights.publisher import LocalPublisher

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from posttrain.config.schema import RunConfig
    from posttrain.objective.objective import Objective
    from posttrain.policy.policy import Policy
    from posttrain.policy.rows import Row
    from posttrain.policy.step import StepResult


class PolicyRank:
    """objective: `module:attribute` of what builds the run's Objective from its config.   transport: plug-in, by name."""

    def __init__(self, *, config: RunConfig, model_path: str, rank: int, world: int, objective: str, transport: str) -> None:
        module, _, attribute = objective.partition(":")
        build: Callable[[RunConfig], Objective] = getattr(importlib.import_module(module), attribute)
        self.config, self.rank, self.world = config, rank, world
        self._model_path, self._objective, self._transport = model_path, build(config), transport
        self._store: dist.TCPStore | None = None
        self._policy: Policy | None = None
        self._publisher: LocalPublisher | None = None

    def rendezvous(self) -> tuple[str, int]:
        """Address and port where the ranks meet, on this rank's machine."""
        import torch.distributed as dist

        address = _own_address()
        self._store = dist.TCPStore(address, 0, self.world, is_master=True, wait_for_workers=False)
        return address, int(self._store.port)

    def start(self, address: str, port: int, timeout: float) -> dict[str, Any]:
        """Meet the other ranks and build the policy. Returns what the driver says about it.

        Raises EngineStartError when the ranks do not meet within `timeout` seconds, and what `Policy` raises.
        """
        from posttrain.policy.policy import Policy

        self._policy = Policy(self.config, self._model_path, self._objective, mesh=self._mesh(address, port, timeout))
        self._publisher = LocalPublisher(self._pool(self._policy), self._policy.local_weights)
        return {"notes": self._policy.notes, "vocab_size": self._policy.vocab_size}

    # ---- the policy

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise RuntimeError(f"policy rank {self.rank} has not been started")
        return self._policy

    def train_step(self, rows: list[Row]) -> StepResult:
        return self.policy.train_step(rows)

    def evaluate(self, rows: list[Row]) -> dict[str, float]:
        return self.policy.evaluate(rows)

    def logprobs(self, rows: list[Row]) -> list[list[float]]:
        return self.policy.logprobs(rows)

    def score(self, sequences: Sequence[Sequence[int]], dtype: str) -> list[list[float]]:
        return self.policy.score(sequences, dtype)

    def save(self, folder: str) -> None:
        self.policy.save(folder)

    def load(self, folder: str) -> None:
        self.policy.load(folder)

    # ---- its part of a publication, as `weights.publisher.RankEnd`

    @property
    def publisher(self) -> LocalPublisher:
        if self._publisher is None:
            raise RuntimeError(f"policy rank {self.rank} has not been started")
        return self._publisher

    async def publish(self, version: int) -> Publication:
        return await self.publisher.publish(version)

    async def retract(self, version: int) -> None:
        await self.publisher.retract(version)

    async def hold(self, version: int) -> None:
        await self.publisher.hold(version)

    async def release(self, version: int) -> None:
        await self.publisher.release(version)

    async def close_publications(self) -> None:
        await self.publisher.close()

    def _pool(self, policy: Policy) -> PublicationPool:
        from posttrain.policy.sharding import fsdp_shards

        transport = plugins.build("transports", self._transport, where="weights.transport")
        grid, weights = self.config.grid, self.config.weights
        return PublicationPool(
            transport,
            bucket_bytes=weights.bucket_bytes,
            dtype=self.config.rollout.dtype,
            shards=fsdp_shards(grid.dp_replicate, grid.dp_shard) if self.world > 1 else None,
            rank=self.rank,
        )

    def _mesh(self, address: str, port: int, timeout: float) -> DeviceMesh | None:
        if self.world == 1:
            return None
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
        if device == "cuda":
            torch.cuda.set_device(0)  # the actor sees its own device only
        limit = timedelta(seconds=timeout)
        try:
            store = self._store or dist.TCPStore(address, port, self.world, is_master=False, timeout=limit)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=limit)
        except Exception as exc:
            raise EngineStartError(
                f"policy rank {self.rank} did not meet the other {self.world - 1} rank(s) at {address}:{port} "
                f"within {timeout:.0f} s",
                cause=f"{type(exc).__name__}: {str(exc).splitlines()[0]}",
                fix="a firewall between the nodes, or the wrong network interface: GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME "
                "names the right one; `posttrain doctor` lists them",
                code="rendezvous",
            ) from exc
        grid = self.config.grid
        return init_device_mesh(device, (grid.dp_replicate, grid.dp_shard), mesh_dim_names=MESH_AXES)


def _own_address() -> str:
    """The address under which other nodes reach this one."""
    import ray

    if ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    return socket.gethostbyname(socket.gethostname())
