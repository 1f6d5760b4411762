"""From rows to what the model's body reads, and where each trained token's log-prob comes from.

    rows = pack_rows([row, …], shared_prefix=True)
    logprobs, entropy = policy_module(rows)          # [T], trained tokens in the order of the rows

`T` counts trained tokens only. Row order, padding and sharing are an affair of this file alone: the output order is the
input order. Tokens after a row's last trained one, and that one itself, are never computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.policy.prefix import PrefixLayout, Spans
from posttrain.policy.rows import Row

PADDED_TOKENS = 1000
"""Tokens of one padded forward: activations of this many stay in a processor's cache (measured)."""


@dataclass(slots=True)
class BodyInput:
    """One forward of the body: `input_ids` `[B, L]` right-padded with 0 and no mask, or one packed row with its layout."""

    input_ids: Tensor
    position_ids: Tensor | None = None
    layout: PrefixLayout | None = None


@dataclass(slots=True)
class PackedRows:
    """A micro-batch for `PolicyModule`.

    predictors [T]  index into the hidden states of all forwards, end to end, that predicts each trained token
    targets    [T]  the trained tokens
    lengths         trained tokens of each row, summing to T
    """

    forwards: list[BodyInput]
    predictors: Tensor
    targets: Tensor
    lengths: list[int]

    def fill(self, forwards: int) -> None:
        """Add forwards of a single token that nothing reads, up to that number: ranks gather a layer's weights together."""
        device = self.targets.device
        while len(self.forwards) < forwards:
            self.forwards.append(BodyInput(torch.zeros((1, 1), dtype=torch.long, device=device)))


def pack_rows(rows: Sequence[Row], *, shared_prefix: bool, device: torch.device | None = None) -> PackedRows:
    """Lay out `rows` for the model: one row without padding, or padded batches sorted by length."""
    forwards, offsets = _packed(rows, device) if shared_prefix else _padded(rows, device)
    predictors = [offset(position - 1) for row, offset in zip(rows, offsets, strict=True) for position in row.trained]
    targets = [row.input_ids[position] for row in rows for position in row.trained]
    return PackedRows(
        forwards,
        torch.tensor(predictors, dtype=torch.long, device=device),
        torch.tensor(targets, dtype=torch.long, device=device),
        [len(row.trained) for row in rows],
    )


@dataclass(slots=True)
class _Place:
    """Where a row's tokens went: those before `branch_at` at `start`, the others at `branch`."""

    start: int
    branch_at: int
    branch: int = 0

    def __call__(self, position: int) -> int:
        return self.start + position if position < self.branch_at else self.branch + position - self.branch_at


def _padded(rows: Sequence[Row], device: torch.device | None) -> tuple[list[BodyInput], list[_Place]]:
    order = sorted(range(len(rows)), key=lambda index: rows[index].context)
    places = [_Place(0, row.context) for row in rows]
    forwards: list[BodyInput] = []
    offset = 0
    while order:
        count = 1
        while count < len(order) and (count + 1) * rows[order[count]].context <= PADDED_TOKENS:
            count += 1
        batch, order = order[:count], order[count:]
        width = rows[batch[-1]].context
        ids = [rows[index].input_ids[: rows[index].context] for index in batch]
        for number, index in enumerate(batch):
            places[index].start = offset + number * width
        table = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in ids], device=device)
        forwards.append(BodyInput(table))
        offset += table.numel()
    return forwards, places


def _packed(rows: Sequence[Row], device: torch.device | None) -> tuple[list[BodyInput], list[_Place]]:
    prompts = [tuple(row.input_ids[: row.prefix]) for row in rows]
    counts = Counter(prompts)
    stems = {prompt: 0 for prompt in prompts if prompt and counts[prompt] > 1}
    numbers = {prompt: number for number, prompt in enumerate(stems)}
    ids: list[int] = []
    positions: list[int] = []

    def add(tokens: Sequence[int], first: int = 0) -> int:
        ids.extend(tokens)
        positions.extend(range(first, first + len(tokens)))
        return len(ids) - len(tokens)

    for prompt in stems:
        stems[prompt] = add(prompt)
    wholes = [index for index, prompt in enumerate(prompts) if prompt not in stems]
    places = [_Place(stems.get(prompt, 0), row.prefix) for row, prompt in zip(rows, prompts, strict=True)]
    for index in wholes:
        places[index] = _Place(add(rows[index].input_ids[: rows[index].context]), rows[index].context)
    branches = [index for index, prompt in enumerate(prompts) if prompt in stems and rows[index].context > rows[index].prefix]
    for index in branches:
        row = rows[index]
        places[index].branch = add(row.input_ids[row.prefix : row.context], row.prefix)
    layout = PrefixLayout(
        Spans.of([len(prompt) for prompt in stems], device),
        Spans.of([rows[index].context for index in wholes], device),
        Spans.of([rows[index].context - rows[index].prefix for index in branches], device),
        torch.tensor([numbers[prompts[index]] for index in branches], dtype=torch.long, device=device),
    )
    body = BodyInput(torch.tensor([ids], device=device), torch.tensor([positions], device=device), layout)
    return [body], places
