"""How FSDP2 cuts the policy over its ranks, and which elements each rank therefore owns and publishes.

Each decoder layer is one unit, gathered for its own forward and backward; the rest (embedding, last norm, head) belongs to the
root. A parameter is cut along its first axis into `dp_shard` chunks of equal size, the last ones shorter or empty; with
`dp_replicate > 1` (HSDP) every chunk has that many copies, and each copy publishes its share of it.

    shard_module(module, mesh)                             # the module's parameters are DTensors from here on
    plan_buckets(specs, shards=fsdp_shards(2, 4))          # who publishes what: pure, no process needed
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.policy.partition import deal
from posttrain.policy.ranks import Ranks
from posttrain.weights.plan import ParameterSpec, Shards
from posttrain.weights.publication import LocalWeight

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from posttrain.policy.module import PolicyModule


def fsdp_shards(dp_replicate: int, dp_shard: int) -> Shards:
    """Who publishes which elements of a parameter: every rank a part of the chunk that it holds, no element twice."""

    def shards(spec: ParameterSpec) -> list[tuple[int, int, int]]:
        pieces = []
        shares: dict[int, list[range]] = {}  # nearly all chunks of a parameter have one size
        for shard, (first, last) in enumerate(pairwise(_ends(spec.shape, dp_shard))):
            size = last - first
            if size not in shares:
                shares[size] = deal(size, dp_replicate)
            for replica, share in enumerate(shares[size]):
                if share:
                    pieces.append((replica * dp_shard + shard, first + share.start, first + share.stop))
        return pieces

    return shards


def chunk(shape: tuple[int, ...], dp_shard: int, shard: int) -> tuple[int, int]:
    """`(first element, last element + 1)` of shard `shard` of a flattened parameter: `torch.chunk` along the first axis."""
    ends = _ends(shape, dp_shard)
    return ends[shard], ends[shard + 1]


def _ends(shape: tuple[int, ...], dp_shard: int) -> list[int]:
    """Where the chunks of a parameter begin, and where the last one ends."""
    rows, row = shape[0], math.prod(shape[1:])
    size = -(-rows // dp_shard)
    return [min(shard * size, rows) * row for shard in range(dp_shard + 1)]


def shard_module(module: PolicyModule, mesh: DeviceMesh) -> None:
    """Cut the module over the mesh, in place; its parameters move to the mesh's device one unit at a time.

    Autocast, not FSDP, narrows the body's compute: the numbers are then those of one process. Gradients of narrow parameters
    are summed over ranks in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    narrow = next(module.parameters()).dtype.itemsize < torch.float32.itemsize
    options: dict[str, Any] = {
        "mesh": fsdp_mesh(mesh), "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
    }  # fmt: skip
    for layer in decoder_layers(module.model):
        fully_shard(layer, **options)
    fully_shard(module, **options)
    register_fsdp_forward_method(module, "plain_logits")


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP takes: both axes for HSDP, else the shards alone."""
    return mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]


def decoder_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that transformers can checkpoint, each a unit of its own."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return (layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer))


def release(module: nn.Module) -> None:
    """Give back what the root gathered for a forward without a backward: it would not see the next change of the weights."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        module.reshard()


def local(tensor: Tensor) -> Tensor:
    """The part of a parameter or gradient that this rank holds, sharing its memory; without a mesh all of it."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_weight(name: str, parameter: Tensor, ranks: Ranks) -> LocalWeight:
    """The part of a parameter that this rank holds, and where it lies in the whole."""
    shape = tuple(parameter.shape)
    start = chunk(shape, ranks.dp_shard, ranks.rank % ranks.dp_shard)[0] if ranks.mesh is not None else 0
    return LocalWeight(name, shape, start, local(parameter.detach()).reshape(-1))


def local_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What this rank's optimizer moves: the parameters, or parameters over the memory of their shards."""
    return [p if local(p) is p else nn.Parameter(local(p.detach()), p.requires_grad) for p in module.parameters()]


def sharded_like(parameter: DTensor, part: Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """A DTensor of which this rank holds `part`, laid out as `parameter` is. mesh: where it is, if not beside it."""
    from torch.distributed.tensor import DTensor

    where = mesh or parameter.device_mesh
    return DTensor.from_local(
        part, where, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks with the same groups, for tensors in host memory: a DTensor is moved to the device of its mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    groups = mesh.get_all_groups()
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=mesh.mesh_dim_names)
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def own_part(whole: Tensor, parameter: Tensor, ranks: Ranks) -> Tensor:
    """What this rank holds of a whole tensor that has `parameter`'s shape."""
    if ranks.mesh is None:
        return whole
    first, last = chunk(tuple(whole.shape), ranks.dp_shard, ranks.rank % ranks.dp_shard)
    return whole.reshape(-1)[first:last].view(local(parameter.detach()).shape)
