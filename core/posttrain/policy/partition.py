"""How the rows of a batch become optimizer steps and micro-batches. Pure and deterministic: equal inputs, equal parts.

    for part in deal_atoms(rows, range(len(rows)), n_mini):                                   # one optimizer step each
        own = deal_atoms(rows, part, dp_world)[rank]                                          # this rank's share of it
        for micro in micro_batches(rows, own, count=None, tokens=4096, keep_groups=True):     # one forward and backward each
            ...

Everything is lists of indices into `rows`. An atom, a row or the rows of one preference pair, is never split. No part of
this changes a loss beyond rounding; the old log-probs are computed over the same micro-batches as the update itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from posttrain.policy.rows import Row

Indices = list[int]


def deal(n_items: int, parts: int) -> list[range]:
    """Contiguous shares of `n_items` in order, the first `n_items % parts` of them one longer; some are empty if items lack.

    Raises ValueError for less than one part.
    """
    if parts < 1:
        raise ValueError(f"parts={parts} must be at least 1")
    share, longer = divmod(n_items, parts)
    starts = [part * share + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def atoms(rows: Sequence[Row], indices: Sequence[int]) -> list[Indices]:
    """What must stay together, in order of first appearance: each row alone, the rows of a preference pair as one."""
    return _gather(indices, lambda i: ("row", i) if rows[i].pair is None else ("pair", rows[i].pair))


def deal_atoms(rows: Sequence[Row], indices: Sequence[int], parts: int) -> list[Indices]:
    """`indices` dealt by whole atoms, in order, to optimizer steps or to ranks; empty where there are fewer atoms than parts."""
    whole = atoms(rows, indices)
    return [[i for k in share for i in whole[k]] for share in deal(len(whole), parts)]


def micro_batches(
    rows: Sequence[Row],
    indices: Sequence[int],
    *,
    count: int | None,
    tokens: int,
    keep_groups: bool,
    cost: Callable[[Sequence[Row]], int] | None = None,
) -> list[Indices]:
    """Split `indices` into pieces of at most `count` rows, in order, or (count None) of at most `tokens`, longest row first.

    keep_groups: the rows of a group stay together where they fit, so that a shared prompt is computed once; a group over
    the limit is split between atoms.   cost: tokens that the model computes for some rows; default: their lengths, with
    `keep_groups` each group's prefix once. Costs of different groups add up.
    Every index comes out once; only a piece that is a single atom exceeds the limit. Raises ValueError for a limit below 1.
    """
    limit = tokens if count is None else count
    if limit < 1:
        raise ValueError(f"a micro-batch of at most {limit} {'tokens' if count is None else 'rows'} holds nothing")
    measure = len if count is not None else cost or (shared_tokens if keep_groups else total_tokens)

    def size(piece: Sequence[int]) -> int:
        return measure([rows[i] for i in piece])

    units = atoms(rows, indices)
    if count is None:
        units.sort(key=lambda atom: -max(len(rows[i].input_ids) for i in atom))
    if keep_groups:
        units = _by_group(rows, units, limit, size)
    return _fill(units, limit, size)


def total_tokens(rows: Sequence[Row]) -> int:
    """Tokens of the rows, each computed by itself."""
    return sum(len(row.input_ids) for row in rows)


def shared_tokens(rows: Sequence[Row]) -> int:
    """Tokens of the rows when the prefix of each group among them is computed once."""
    prefixes = {row.group: row.prefix for row in rows}
    return sum(prefixes.values()) + sum(len(row.input_ids) - row.prefix for row in rows)


def _by_group(rows: Sequence[Row], units: list[Indices], limit: int, size: Callable[[Indices], int]) -> list[Indices]:
    """Atoms joined into their groups, a group over the limit into pieces that fit."""
    groups = _gather(range(len(units)), lambda k: rows[units[k][0]].group)
    out: list[Indices] = []
    for group in groups:
        piece: Indices = []
        for unit in (units[k] for k in group):
            if piece and size(piece + unit) > limit:
                out.append(piece)
                piece = []
            piece = piece + unit
        out.append(piece)
    return out


def _fill(units: list[Indices], limit: int, size: Callable[[Indices], int]) -> list[Indices]:
    """Units put into pieces one after the other; a piece closes when the next unit does not fit."""
    out: list[Indices] = []
    room = 0
    for unit in units:
        needed = size(unit)
        if not out or needed > room:
            out.append([])
            room = limit
        out[-1].extend(unit)
        room -= needed
    return out


def _gather(items: Sequence[int], key: Callable[[int], Hashable]) -> list[Indices]:
    """Items with equal keys together, everything in order of first appearance."""
    out: dict[Hashable, Indices] = {}
    for item in items:
        out.setdefault(key(item), []).append(item)
    return list(out.values())
