"""The first batch step at which two runs differ, and in what: a metric, a token of a trajectory, a tensor.

    found = bisect("outputs/a", "outputs/b")
    found.step, found.metric, found.trajectory, found.tensors       # step None: equal to the bit up to `found.last`

Metrics and trajectories are compared step by step. Of the checkpoints that both have, halving finds the first whose weights
differ: it tells whether the runs parted in what was trained before they did in what was recorded. Times are left out, and so
are metrics that one of the runs does not have. Runs are only read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import ConfigError
from posttrain.tracking.agreement import same
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts, rollout_steps
from posttrain.tracking.run_dir import find_run, saved_config
from posttrain.tracking.text import near

if TYPE_CHECKING:
    from torch import Tensor

FIELDS = (
    "prompt_ids", "token_ids", "mask", "rollout_logprobs", "weight_versions", "finish_reason", "reward", "reward_parts",
    "advantage",
)  # fmt: skip
"""What is compared of a trajectory, in the order in which one follows from another."""
LEFT_OUT = ("time/",)


@dataclass(frozen=True, slots=True)
class Values:
    """Something that differs: what it is called, and its value in each run."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class TrajectoryDifference:
    """field: of FIELDS, or `sample` where another sample stands in this place.   position: in a list of tokens, else None."""

    place: int
    sample: str
    field: str
    position: int | None
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The first tensor of `part` (weights or optimizer) of the checkpoint of `step` that differs; None: equal to the bit.

    elements: of it that differ.   largest: absolute difference.   tensors: that differ, of `of` in all.
    """

    step: int
    part: str
    name: str | None
    largest: float = 0.0
    elements: int = 0
    tensors: int = 0
    of: int = 0


@dataclass(frozen=True, slots=True)
class Bisection:
    """step: the first that differs, None when none does.   last: the last that both have done.   steps: that each has done.

    recorded: the first step of which a metric or a trajectory differs; it is `step`, unless weights differ before.
    config: keys that differ.   metric: the first that differs at `recorded`.   only: metrics that one run does not have.
    rollouts: whether both have those of `recorded`.   tensors: of checkpoints, the last equal one and the first that differs.
    """

    a: Path
    b: Path
    config: tuple[Values, ...]
    step: int | None
    last: int
    steps: tuple[int, int]
    recorded: int | None
    metric: Values | None
    only: tuple[str, ...]
    rollouts: bool
    trajectory: TrajectoryDifference | None
    tensors: tuple[TensorDifference, ...]

    @property
    def same(self) -> bool:
        """Whether everything that was compared is equal to the bit."""
        return self.step is None


def bisect(a: str | Path, b: str | Path) -> Bisection:
    """Compare two runs from their first step on. Raises ConfigError for runs without a step in common, DataError for damage."""
    from posttrain.loop.resume import changed_keys

    runs = find_run(a), find_run(b)
    rows = [{row["step"]: row for row in read_metrics(run)} if (run / "metrics.jsonl").is_file() else {} for run in runs]
    common = sorted(set(rows[0]).intersection(rows[1]))
    if not common:
        raise ConfigError(
            f"{near(runs[0])} and {near(runs[1])} have no batch step in common",
            cause=f"the one has done {len(rows[0])}, the other {len(rows[1])}",
            fix="name two runs that have done steps",
            code="no_step",
        )
    rollouts = set(rollout_steps(runs[0])).intersection(rollout_steps(runs[1]))
    names = [{name for row in side.values() for name in row if not name.startswith(LEFT_OUT)} for side in rows]
    recorded, metric, trajectory = None, None, None
    for number in common:
        metric = first_metric(rows[0][number], rows[1][number])
        if number in rollouts:
            trajectory = first_trajectory(read_rollouts(runs[0], number), read_rollouts(runs[1], number))
        if metric or trajectory:
            recorded = number
            break
    tensors = tuple(_checkpoints(*runs, recorded, common[-1]))
    steps = [tensor.step for tensor in tensors if tensor.name is not None] + ([] if recorded is None else [recorded])
    return Bisection(
        *runs,
        config=tuple(Values(*change) for change in changed_keys(*map(saved_config, runs))),
        step=min(steps, default=None),
        last=common[-1],
        steps=(max(rows[0]), max(rows[1])),
        recorded=recorded,
        metric=metric,
        only=tuple(sorted(names[0] ^ names[1])),
        rollouts=recorded in rollouts,
        trajectory=trajectory,
        tensors=tensors,
    )


def first_metric(a: Mapping[str, Any], b: Mapping[str, Any]) -> Values | None:
    """The first metric that both rows have and that differs, in the order of the first row."""
    shared = (name for name in a if name in b and not name.startswith(LEFT_OUT))
    return next((Values(name, a[name], b[name]) for name in shared if not same(a[name], b[name])), None)


def first_trajectory(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> TrajectoryDifference | None:
    """The first place of a batch where two recorded trajectories differ, and in what."""
    for place in range(max(len(a), len(b))):
        one, other = (rows[place] if place < len(rows) else None for rows in (a, b))
        names = [None if row is None else row["sample_id"] for row in (one, other)]
        if one is None or other is None or names[0] != names[1]:
            return TrajectoryDifference(place, str(names[0] or names[1]), "sample", None, *names)
        for field in FIELDS:
            if not same(one[field], other[field]):
                return TrajectoryDifference(place, one["sample_id"], field, *_where(one[field], other[field]))
    return None


def first_tensor(step: int, part: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> TensorDifference:
    """The first tensor that differs, by name (layer 2 before layer 10); so does one that a side lacks or has in other shape."""
    names = sorted(a.keys() | b.keys(), key=_natural)
    differing = [name for name in names if not _equal(a.get(name), b.get(name))]
    if not differing:
        return TensorDifference(step, part, None, of=len(names))
    name = differing[0]
    one, other = a.get(name), b.get(name)
    if one is None or other is None or one.shape != other.shape:
        return TensorDifference(step, part, name, float("inf"), max(t.numel() for t in (one, other) if t is not None),
                                len(differing), len(names))  # fmt: skip
    gap = (one.double() - other.double()).abs()
    return TensorDifference(step, part, name, float(gap.max()), int(one.ne(other).sum()), len(differing), len(names))


def _where(a: Any, b: Any) -> tuple[int | None, Any, Any]:
    """The first place where two lists differ and their values there; else None and the values."""
    if not (isinstance(a, list) and isinstance(b, list)):
        return None, a, b
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if not same(x, y)), min(len(a), len(b)))
    x, y = (values[place] if place < len(values) else "the end" for values in (a, b))
    return place, x, y


def _checkpoints(a: Path, b: Path, recorded: int | None, last: int) -> Iterator[TensorDifference]:
    """Of the checkpoints that both have, up to the first from `recorded` on: the last that is equal, and the next one."""
    from posttrain.loop import checkpoint
    from posttrain.policy.saving import read_optimizer, read_weights

    sides = [{one.step: one.policy for one in checkpoint.find(run / "checkpoints")} for run in (a, b)]
    both = [n for n in sorted(set(sides[0]).intersection(sides[1])) if n <= last]
    if recorded is not None:
        both = both[: bisect_left(both, recorded) + 1]

    def compared(step: int, part: str, read: Callable[[Path], dict[str, Tensor]]) -> TensorDifference:
        return first_tensor(step, part, read(sides[0][step]), read(sides[1][step]))

    place = bisect_left(both, True, key=lambda step: compared(step, "weights", read_weights).name is not None)
    for step in both[max(place - 1, 0) : place + 1]:
        yield compared(step, "weights", read_weights)
        yield compared(step, "optimizer", read_optimizer)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    import torch

    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    raw = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))  # bits, so that what is no number equals itself
    return torch.equal(*raw)


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in a name count as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.replace("/", ".").split(".")]
