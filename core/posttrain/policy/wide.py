"""A policy computed in float64 from weights that were stored narrower: the value that rounding is measured against.

    policy.load(folder)
    with wide(policy):
        result = policy.train_step(rows)

The weights, the optimizer's moments and the reference model are those of the policy, to the bit; everything that is computed
from them is float64. transformers computes norms, soft-maxes and rotations in float32 whatever the dtype of the model, so
inside the block every request for float32 is answered with float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from posttrain.policy.optimizer import MasterWeights, build_optimizer
from posttrain.policy.sharding import local_parameters

if TYPE_CHECKING:
    from posttrain.policy.policy import Policy


@contextmanager
def wide(policy: Policy) -> Iterator[None]:
    """Make a policy in one process float64, for good, and compute so inside the block."""
    for module in (policy.module, policy.reference):
        if module is not None:
            module.to(torch.float64)
            module.compute_dtype = None
            module.model.set_experts_implementation("eager")  # the grouped kernel has no float64
    old = policy.optimizer
    state = old.state_dict()
    policy.shards = local_parameters(policy.module)
    policy.optimizer = build_optimizer(policy.rl, policy.shards)
    if isinstance(policy.optimizer, MasterWeights):  # float64 parameters are their own masters
        policy.optimizer.inner.load_state_dict(state["inner"])
    else:
        policy.optimizer.load_state_dict(state)
    with _Float64():
        yield


class _Float64(TorchFunctionMode):
    """Answers float32 with float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
