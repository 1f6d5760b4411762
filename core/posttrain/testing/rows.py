"""Write sequences by hand, score them with an objective: for tests of algorithms.

    rows = [ScoredRow(group="a", reward=1.0, logprobs=[-0.5, -1.0]), ScoredRow(group="a", reward=0.0, logprobs=[-2.0])]
    result = score_rows(build_objective("grpo"), rows)
    result.loss, result.advantages, result.grads          # a float, [N], one list per row

`parts` deals the rows to micro-batches; the results do not depend on it, nor on the order of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.objective import Objective
from posttrain.types import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """One sequence: its group and reward, and per token the log-probs. `mask` None: every token is trained."""

    logprobs: Sequence[float]
    group: Hashable = 0
    reward: float | None = None
    mask: Sequence[bool] | None = None
    old: Sequence[float] | None = None
    rollout: Sequence[float] | None = None
    ref: Sequence[float] | None = None
    entropy: Sequence[float] | None = None
    pair: int | None = None
    chosen: bool | None = None

    @property
    def trained(self) -> list[bool]:
        """The mask, cleared when the reward is unscorable and the row is not one of a pair."""
        mask = [True] * len(self.logprobs) if self.mask is None else list(self.mask)
        return mask if self.pair is not None or self.scorable else [False] * len(mask)

    @property
    def scorable(self) -> bool:
        return self.reward is not None and math.isfinite(self.reward)


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """One optimizer step: advantages `[N]`, the loss, and d loss / d logprobs, one list per row."""

    advantages: list[float]
    loss: float
    grads: list[list[float]]


def score_rows(
    objective: Objective,
    rows: Sequence[ScoredRow],
    parts: Sequence[Sequence[int]] | None = None,
    *,
    advantages: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> ScoredStep:
    """Score `rows` as one optimizer step, dealt to the micro-batches `parts` (lists of row indices; None: all in one).

    `advantages` replaces those of the objective.
    """
    rewards, groups, trained = [r.reward for r in rows], [r.group for r in rows], [any(r.trained) for r in rows]
    given = list(objective.advantages(rewards, groups, trained)) if advantages is None else list(advantages)
    means = [float(m) for m in objective.baselines(rewards, groups, trained)]
    loss, grads = 0.0, [[0.0] * len(r.logprobs) for r in rows]
    for part in [range(len(rows))] if parts is None else parts:
        batch = token_batch(rows, part, given, means, dtype)
        share = objective.loss(batch)
        share.backward()
        loss += share.item()
        assert batch.logprobs.grad is not None
        for index, grad in zip(part, batch.logprobs.grad.split([len(rows[i].logprobs) for i in part]), strict=True):
            grads[index] = grad.tolist()
    return ScoredStep([float(a) for a in given], loss, grads)


def token_batch(
    rows: Sequence[ScoredRow],
    part: Sequence[int],
    advantages: Sequence[float],
    baselines: Sequence[float],
    dtype: torch.dtype = torch.float64,
) -> TokenBatch:
    """The TokenBatch of `rows[i] for i in part`, with the totals of all rows; `logprobs` is a leaf with gradient."""
    chosen = [rows[i] for i in part]
    lengths = torch.tensor([len(row.logprobs) for row in chosen], dtype=torch.int64)
    tokens = sum(sum(row.trained) for row in rows)
    paired = {row.pair for row in rows if row.pair is not None and row.pair >= 0}

    def floats(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    def flat(name: str) -> torch.Tensor | None:
        values = [getattr(row, name) for row in chosen]
        return None if any(v is None for v in values) else floats([x for v in values for x in v])

    def of_rows(values: list[Any], dtype: torch.dtype) -> torch.Tensor | None:
        return None if any(v is None for v in values) else torch.tensor(values, dtype=dtype)

    return TokenBatch(
        logprobs=floats([x for row in chosen for x in row.logprobs]).requires_grad_(),
        mask=torch.tensor([m for row in chosen for m in row.trained], dtype=torch.bool),
        sequence=torch.arange(len(chosen)).repeat_interleave(lengths),
        advantages=floats([advantages[i] for i in part]).repeat_interleave(lengths),
        rewards=floats([math.nan if row.reward is None else row.reward for row in chosen]),
        baselines=floats([baselines[i] for i in part]),
        total_tokens=float(tokens),
        total_sequences=float(sum(any(row.trained) for row in rows)),
        total_pairs=float(len(paired)),
        old_logprobs=flat("old"),
        rollout_logprobs=flat("rollout"),
        ref_logprobs=flat("ref"),
        entropy=flat("entropy"),
        pair=of_rows([row.pair for row in chosen], torch.int64),
        chosen=of_rows([row.chosen for row in chosen], torch.bool),
    )
