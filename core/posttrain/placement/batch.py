"""The batch contract: how the completions of one batch step are cut into groups, optimizer steps and micro-batches.

    batch  %  (group_size · rollout_replicas) = 0    whole groups for each rollout replica
    batch  %  dp_world = 0,  batch % mini = 0        n_mini = batch / mini optimizer steps
    mini   %  dp_world = 0,  mini % micro = 0        micro changes memory, never results
    micro  %  dp_world = 0

Every violation names the legal values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from posttrain.config.walker import Problem


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The numbers of one batch step, in completions. `mini` None: the whole batch; `micro` None: by token budget."""

    batch: int
    group_size: int
    mini: int | None = None
    micro: int | None = None
    rollout_replicas: int = 1
    dp_world: int = 1

    @property
    def n_mini(self) -> int:
        """Optimizer steps per batch step."""
        return self.batch // (self.mini or self.batch)

    @property
    def groups(self) -> int:
        """Prompts per batch step."""
        return self.batch // self.group_size

    @property
    def smallest_batch(self) -> int:
        """The smallest legal batch; every multiple of it is legal too."""
        return math.lcm(self.group_size * self.rollout_replicas, self.dp_world)

    @property
    def legal_minis(self) -> list[int]:
        """Every legal `mini` of this batch, ascending."""
        return divisors(self.batch, self.dp_world)

    @property
    def legal_micros(self) -> list[int]:
        """Every legal `micro` of this mini-batch, ascending."""
        return divisors(self.mini or self.batch, self.dp_world)


def check_batch(plan: BatchPlan) -> list[Problem]:
    """Every violation of the contract, each with the legal values; empty when it holds."""
    sizes = {
        "rl.group_size": plan.group_size,
        "rl.batch_per_replica": plan.batch,
        "rl.mini_batch_per_replica": plan.mini,
        "rl.micro_batch_per_replica": plan.micro,
    }
    small = [Problem(path, f"is {size}, must be at least 1") for path, size in sizes.items() if size is not None and size < 1]
    return small or [*_batch(plan), *_mini(plan), *_micro(plan)]


def divisors(number: int, multiple_of: int = 1) -> list[int]:
    """The divisors of `number` that are multiples of `multiple_of`, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [d for d in sorted({*small, *(number // d for d in small)}) if d % multiple_of == 0]


def _batch(plan: BatchPlan) -> Iterator[Problem]:
    step = plan.smallest_batch
    below = plan.batch // step * step
    near = " or ".join(str(value) for value in (below, below + step) if value)
    reasons = []
    if plan.batch % (plan.group_size * plan.rollout_replicas):
        over = f" over {plan.rollout_replicas} rollout replicas" if plan.rollout_replicas > 1 else ""
        reasons.append(f"is not whole groups of {plan.group_size}{over}")
    if plan.batch % plan.dp_world:
        reasons.append(f"does not divide over dp_world={plan.dp_world} policy ranks")
    if reasons:
        yield Problem("rl.batch_per_replica", f"{plan.batch} {' and '.join(reasons)}", f"legal: multiples of {step}, here {near}")


def _mini(plan: BatchPlan) -> Iterator[Problem]:
    if plan.mini is not None and plan.mini not in plan.legal_minis:
        reason = (
            f"does not divide rl.batch_per_replica={plan.batch}"
            if plan.batch % plan.mini
            else f"is not a multiple of dp_world={plan.dp_world}"
        )
        yield Problem("rl.mini_batch_per_replica", f"{plan.mini} {reason}", _legal(plan.legal_minis) + ", or null for one step")


def _micro(plan: BatchPlan) -> Iterator[Problem]:
    if plan.micro is not None and plan.micro not in plan.legal_micros:
        whole = "rl.mini_batch_per_replica" if plan.mini else "rl.batch_per_replica"
        reason = (
            f"does not divide {whole}={plan.mini or plan.batch}"
            if (plan.mini or plan.batch) % plan.micro
            else f"is not a multiple of dp_world={plan.dp_world}"
        )
        yield Problem(
            "rl.micro_batch_per_replica", f"{plan.micro} {reason}", _legal(plan.legal_micros) + ", or null for a token budget"
        )


def _legal(values: list[int]) -> str:
    return f"legal: {', '.join(map(str, values))}" if values else "legal: none with this batch; change it first"
