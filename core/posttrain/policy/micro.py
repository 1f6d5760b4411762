"""A micro-batch of the policy: its rows laid out for the model, what was recorded about them, and what the loss reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.objective.objective import TokenInputs
from posttrain.policy.packing import PackedRows
from posttrain.policy.rows import Row


@dataclass(frozen=True, slots=True)
class Totals:
    """What the loss of one optimizer step is divided by: all micro-batches, all ranks."""

    tokens: float
    sequences: float
    pairs: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Totals:
        pairs = {row.pair for row in rows} - {None}
        return cls(float(sum(len(row.trained) for row in rows)), float(len(rows)), float(len(pairs)))


@dataclass(slots=True)
class MicroBatch:
    """One forward and backward. `old` and `reference` are log-probs `[T]` recorded before the first optimizer step.

    indices: of its rows in the batch; none: an idle one, which only keeps this rank beside others that have one more.
    """

    rows: list[Row]
    packed: PackedRows
    indices: list[int]
    old: Tensor | None = field(default=None)
    reference: Tensor | None = field(default=None)

    @property
    def idle(self) -> bool:
        """Whether it weighs nothing."""
        return not self.indices

    def inputs(self, totals: Totals) -> TokenInputs:
        """What `Objective.score` takes: `T` trained tokens, so its mask is true everywhere."""
        rows, lengths, device = self.rows, torch.tensor(self.packed.lengths), self.packed.targets.device

        def floats(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64)

        sampled = [row.rollout_logprobs[t] for row in rows if row.rollout_logprobs is not None for t in row.trained]
        given = any(row.rollout_logprobs is None for row in rows)
        paired = any(row.pair is not None for row in rows)
        return TokenInputs(
            rows=self.packed,
            mask=torch.ones(int(lengths.sum()), dtype=torch.bool, device=device),
            sequence=torch.arange(len(rows)).repeat_interleave(lengths).to(device),
            advantages=floats([row.advantage for row in rows]).repeat_interleave(lengths),
            rewards=floats([row.reward for row in rows]),
            baselines=floats([row.baseline for row in rows]),
            total_tokens=totals.tokens,
            total_sequences=totals.sequences,
            total_pairs=totals.pairs,
            old_logprobs=self.old,
            rollout_logprobs=None if given else floats(sampled),
            ref_logprobs=self.reference,
            pair=torch.tensor([-1 if row.pair is None else row.pair for row in rows], device=device) if paired else None,
            chosen=torch.tensor([bool(row.chosen) for row in rows], device=device) if paired else None,
        )
