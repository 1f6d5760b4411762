"""The data-parallel ranks of a policy, and the one way in which they agree: every rank shows the others a small value.

    ranks = Ranks.of(init_device_mesh("cpu", (1, 4), mesh_dim_names=MESH_AXES))
    everyone = ranks.gather({"rows": 12})                  # the values of all ranks, in rank order, the same list everywhere

What is reduced is reduced from that list, in rank order, so every rank holds the same bits. Gradients and parameters do not
come this way: FSDP moves those. Without a mesh there is one rank, which agrees with itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from posttrain.errors import PosttrainError, error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

MESH_AXES = ("dp_replicate", "dp_shard")
"""Names of the mesh's axes: copies of the model, and shards of each copy. Rank = replica * dp_shard + shard."""


@dataclass(frozen=True)
class Ranks:
    """rank: this process's place in the mesh, which is the policy rank of its publications.   world: `dp_world`.

    writers: a group of the same ranks for a thread beside the one that trains; in one group their collectives would mix.
    """

    mesh: DeviceMesh | None = None
    group: Any = None
    writers: Any = None
    rank: int = 0
    world: int = 1
    dp_shard: int = 1

    @classmethod
    def of(cls, mesh: DeviceMesh | None, writers: Any = None) -> Ranks:
        """The ranks of a mesh with the axes `MESH_AXES`; collective over them. Raises ValueError for other axes."""
        if mesh is None:
            return cls()
        if tuple(mesh.mesh_dim_names or ()) != MESH_AXES:
            raise ValueError(f"the policy's mesh has the axes {mesh.mesh_dim_names}; it must have {MESH_AXES}")
        sizes = dict(zip(MESH_AXES, mesh.mesh.shape, strict=True))
        long = [axis for axis, size in sizes.items() if size > 1]
        group: Any
        if len(long) < 2:  # the mesh already has that group
            group = mesh.get_group(long[0] if long else "dp_shard")
        elif mesh.size() == dist.get_world_size():
            group = dist.group.WORLD
        else:
            group = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
        return cls(mesh, group, writers, dist.get_rank(group), mesh.size(), sizes["dp_shard"])

    @property
    def aside(self) -> Ranks:
        """The same ranks for a thread beside the one that trains; without a group for it, not while anything trains."""
        return replace(self, group=self.writers or self.group)

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order; collective. Values are pickled: keep them small."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found

    def largest(self, own: float) -> float:
        """The largest of every rank's number, or one that is none; collective."""
        return max(self.gather(own), key=lambda value: (value != value, value))

    def together(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank: the results in rank order, or on all ranks the error of the first rank that failed."""
        value: Any = None
        failure: Exception | None = None
        try:
            value = work()
        except Exception as exc:
            failure = exc
        said = failure if failure is None or isinstance(failure, PosttrainError) else OSError(repr(failure))
        found = self.gather((value, said))
        if failures := [other for _, other in found if other is not None]:
            raise failures[0] from failure
        return [value for value, _ in found]

    def norm(self, own: float) -> float:
        """The norm of a vector of which every shard holds a part of norm `own`; replicas hold the same. Collective."""
        if self.world == 1:
            return own
        return math.sqrt(sum(part * part for part in self.gather(own)[: self.dp_shard]))


ALONE = Ranks()
"""One process, which holds the whole policy."""


def agree_on_old_logprobs(answers: Sequence[bool]) -> bool:
    """What every policy rank says about `needs_old_logprobs()`, or E5: ranks that disagree were not built alike."""
    if len(set(answers)) > 1:
        raise error("E5", answers=", ".join(f"rank {rank}: {'yes' if answer else 'no'}" for rank, answer in enumerate(answers)))
    return answers[0]
