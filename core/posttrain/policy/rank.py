"""One rank of a sharded policy in one process: the process group, the policy, and the slots that it publishes from.

    end = PolicyRank()
    end.start(rank, world, "10.0.0.1", 29400, config, "path/of/a/model", "posttrain.loop.prepare:build_run_objective")
    end.train_step(rows)                     # collective: the driver calls it on all ranks, each with the whole batch
    async for bucket_or_part in end.publish(3): ...     # not collective: each rank writes its own shards, at its own pace

It knows nothing of who hosts it; a plain process will do. A rank that loses another one in a collective call says so at once,
and which: it can only be started anew, together with the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from posttrain import plugins
from posttrain.errors import RunInterrupted
from posttrain.plugins.resolution import import_target, target_of
from posttrain.policy.load import quiet_libraries
from posttrain.policy.policy import Policy
from posttrain.policy.ranks import MESH_AXES
from posttrain.policy.rows import Row
from posttrain.policy.sharding import fsdp_shards
from posttrain.policy.step import StepResult
from posttrain.weights.deadline import moving
from posttrain.weights.publication import Digested, Publication, PublicationPool
from posttrain.weights.publisher import LocalPublisher

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from posttrain.config.schema import RunConfig

COLLECTIVE_TIMEOUT_S = 1800.0
"""Default deadline of one collective operation; a rank that dies is noticed at once, this is for one that hangs."""


@dataclass(frozen=True, slots=True)
class RankStarted:
    """What the driver needs to know of a rank: plain data, the same from every rank but for `rank` and `device`."""

    rank: int
    device: str
    notes: tuple[str, ...]
    vocab_size: int
    needs_old_logprobs: bool


class PolicyRank:
    """Everything that one policy rank does; `start` comes first. Errors of `Policy` are raised as they are."""

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self._policy: Policy | None = None
        self._publisher: LocalPublisher | None = None
        self._snapshot: Callable[[Path], None] | None = None
        self._serial = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def start(
        self, rank: int, world: int, address: str, port: int, config: RunConfig, model_path: str, objective: str,
        transport: str = "shm", timeout_s: float = 300.0, collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> RankStarted:  # fmt: skip
        """Meet the other ranks at `address:port`, where rank 0 listens, and build this rank's share of the policy.

        world: `dp_replicate * dp_shard`; 1 needs no address and no process group.
        objective: `module:function` that makes it from the config.   transport: of the weights, by name.
        timeout_s: for all ranks to arrive.   collective_timeout_s: of one operation between them.
        Raises RunInterrupted when the ranks do not meet, WeightSyncError when the transport does not start.
        """
        quiet_libraries()
        self.rank, self.world = rank, world
        end = plugins.build("transports", transport, config.weights.options, where="weights.options")  # NIXL before NCCL
        end.warm("serve")
        with self._named("start"):
            if torch.cuda.is_available():
                torch.cuda.set_device(0)  # the one device that this process was given
            if world > 1:
                _meet(rank, world, address, port, timeout_s, collective_timeout_s)
            built = import_target(target_of(objective))(config)
            deadline = timedelta(seconds=collective_timeout_s)
            writers = dist.new_group(timeout=deadline, backend="gloo") if world > 1 else None
            policy = self._policy = Policy(config, model_path, built, mesh=_mesh(config, world), writers=writers)
        grid, weights = config.grid, config.weights
        pool = PublicationPool(
            end,
            bucket_bytes=weights.bucket_bytes,
            dtype=config.rollout.dtype,
            shards=fsdp_shards(grid.dp_replicate, grid.dp_shard),
            rank=rank,
        )
        self._publisher = LocalPublisher(pool, policy.local_weights, timeout_s=weights.stage_timeout_s)
        policy.before_change = pool.settle
        return RankStarted(rank, str(policy.module.device), tuple(policy.notes), policy.vocab_size, policy.needs_old_logprobs())

    @property
    def policy(self) -> Policy:
        assert self._policy is not None, "start comes first"
        return self._policy

    @property
    def publisher(self) -> LocalPublisher:
        """This rank's end of the weight plane."""
        assert self._publisher is not None, "start comes first"
        return self._publisher

    def train_step(self, rows: list[Row]) -> StepResult:
        """`Policy.train_step`; collective."""
        with self._named("train_step"):
            return self.policy.train_step(rows)

    def evaluate(self, rows: list[Row]) -> dict[str, float]:
        """`Policy.evaluate`; collective."""
        with self._named("evaluate"):
            return self.policy.evaluate(rows)

    def logprobs(self, rows: list[Row]) -> list[list[float]]:
        """`Policy.logprobs`; collective."""
        with self._named("logprobs"):
            return self.policy.logprobs(rows)

    def score(self, sequences: Sequence[Sequence[int]], dtype: str) -> list[list[float]]:
        """`Policy.score`; collective."""
        with self._named("score"):
            return self.policy.score(sequences, dtype)

    def snapshot(self) -> int:
        """`Policy.snapshot`, kept here for `write` under the number that is returned. One that nobody wrote is let go first."""
        with self._named("snapshot"):
            self._snapshot = None
            self._snapshot = self.policy.snapshot()
            self._serial += 1
            return self._serial

    async def write(self, number: int, folder: str | Path) -> None:
        """Write snapshot `number`, in a thread of its own; collective. Returns when every rank has written, or raises on all.

        The caller makes the folder final.
        """
        snapshot = self._snapshot
        if snapshot is None or number != self._serial:
            raise RuntimeError(f"policy rank {self.rank} of {self.world} holds no snapshot {number}")
        self._snapshot = None
        with self._named("write"):
            await asyncio.get_running_loop().run_in_executor(self._writer, snapshot, Path(folder))

    def load(self, folder: str | Path) -> None:
        """`Policy.load`; collective."""
        with self._named("load"):
            self.policy.load(folder)

    async def publish(self, version: int) -> AsyncIterator[int | Publication]:
        """This rank's part of publication `version`, see `weights.publisher`, as soon as lanes may pull it; then, until it is
        written, the bucket that it is at while it moves on, so that whoever looks knows where a rank died."""
        opened: asyncio.Future[Publication] = asyncio.get_running_loop().create_future()
        writing = asyncio.ensure_future(self.publisher.publish(version, opened.set_result))
        try:
            await asyncio.wait({opened, writing}, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                await writing  # it failed
            yield await opened
            async for at in moving(writing, lambda: self.publisher.at):
                if isinstance(at, int):
                    yield at
        finally:
            writing.cancel()

    async def digests(self, version: int) -> Digested:
        """Of this rank's part of publication `version`, which it makes meanwhile."""
        return await self.publisher.digests(version)

    async def hold(self, version: int) -> None:
        await self.publisher.hold(version)

    async def release(self, version: int) -> None:
        await self.publisher.release(version)

    async def retract(self, version: int) -> None:
        await self.publisher.retract(version)

    async def close(self) -> None:
        """Give back the slots, let a write come to its end and leave the process group; idempotent."""
        if self._publisher is not None:
            await self._publisher.close()
        await asyncio.to_thread(self._writer.shutdown)
        self._publisher = self._policy = self._snapshot = None
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Say what goes on meanwhile. A collective operation that failed becomes RunInterrupted, with rank and call."""
        try:
            yield
        except RuntimeError as exc:
            if not is_peer_failure(exc):
                raise
            raise RunInterrupted(
                f"policy rank {self.rank} of {self.world} lost the others in {doing}",
                cause=" ".join(str(exc).split())[:300],
                fix="the rank that died or hangs is the one to look at; then resume the run",
                code="policy-rank-lost",
            ) from exc


def is_peer_failure(exc: BaseException) -> bool:
    """Whether a collective operation failed because of another rank or the network; gloo says so in plain RuntimeErrors."""
    return isinstance(exc, dist.DistError) or (type(exc) is RuntimeError and "gloo" in str(exc).lower())


def _meet(rank: int, world: int, address: str, port: int, timeout_s: float, collective_timeout_s: float) -> None:
    try:
        store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=timedelta(seconds=timeout_s))
        store.set_timeout(timedelta(seconds=timeout_s))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        timeout = timedelta(seconds=collective_timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except (RuntimeError, OSError) as exc:
        raise RunInterrupted(
            f"policy rank {rank} of {world} did not meet the others at {address}:{port} within {timeout_s:.3g} s",
            cause=" ".join(str(exc).split())[:300],
            fix="a rank that failed has its reason in its own log; else the port is taken or closed, or rank 0 is elsewhere",
            code="rendezvous",
        ) from exc


def _mesh(config: RunConfig, world: int) -> DeviceMesh | None:
    from torch.distributed.device_mesh import init_device_mesh

    grid = config.grid
    if grid.dp_replicate * grid.dp_shard != world:
        raise ValueError(f"{world} policy ranks for grid.dp_replicate={grid.dp_replicate} * grid.dp_shard={grid.dp_shard}")
    if world == 1:
        return None
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (grid.dp_replicate, grid.dp_shard), mesh_dim_names=MESH_AXES)
