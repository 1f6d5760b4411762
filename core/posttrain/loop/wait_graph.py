"""Who waits for whom: the open waits of a run as a graph, for people. Pure functions over the waits and the time.

    train loop waits for batches loop: a batch to train on (12.1 s)
      batches loop waits for rollouts loop: a group to batch (12.1 s)
        rollouts loop waits for rollout engine hf: completions of step 3 (12.0 of 12 s, over)
          rollout engine hf waits for nobody here: look there first

Who is waited for and waits for nobody is the end of a chain: it works, hangs, or waits for something that has no name here. A
chain without an end is a deadlock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

SHOWN = 3
"""Of those who wait for the same one, how many are shown."""


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """`who` waits for `what`, which `owner` brings, since `since`, for `limit` seconds at most."""

    who: str
    what: str
    owner: str
    since: float
    limit: float = math.inf

    def over(self, now: float) -> bool:
        return now - self.since >= self.limit


def cycle(waits: Sequence[Wait]) -> list[str]:
    """A deadlock: names of which each waits for the next, the first repeated at the end. Empty when there is none."""
    owners: dict[str, dict[str, None]] = {}
    for wait in sorted(waits, key=lambda wait: wait.since):
        owners.setdefault(wait.who, {})[wait.owner] = None
    try:
        TopologicalSorter(owners).prepare()
    except CycleError as exc:
        ring = list(reversed(exc.args[1][1:]))
        oldest = next(ring.index(who) for who in owners if who in ring)
        return [*ring[oldest:], *ring[: oldest + 1]]
    return []


def endless(waits: Sequence[Wait]) -> list[Wait]:
    """The waits of those who wait without a deadline for all that they wait for: the others go on, one way or the other."""
    moving = {wait.who for wait in waits if not math.isinf(wait.limit)}
    return [wait for wait in waits if wait.who not in moving]


def within(waits: Sequence[Wait], names: Sequence[str]) -> list[Wait]:
    """The waits that make up a cycle."""
    steps = set(pairwise(names))
    return [wait for wait in waits if (wait.who, wait.owner) in steps]


def ends(waits: Sequence[Wait], start: str | None = None) -> list[str]:
    """Where the chains end: those who are waited for and wait for nobody. start: only of the chains that begin there."""
    owners: dict[str, list[str]] = {}
    for wait in waits:
        owners.setdefault(wait.who, []).append(wait.owner)
    todo = [wait.owner for wait in waits] if start is None else [start]
    seen: dict[str, None] = {}
    while todo:
        name = todo.pop(0)
        if name not in seen:
            seen[name] = None
            todo += owners.get(name, [])
    return [name for name in seen if name not in owners]


def render(waits: Sequence[Wait], now: float) -> str:
    """The graph, a line for each wait, whoever is waited for under those who wait; the end of each chain; a deadlock."""
    if not waits:
        return "nobody waits"
    lines = list(_Tree(waits, now).lines())
    if deadlock := cycle(endless(waits)):
        lines.append(f"deadlock: {' → '.join(deadlock)}")
    return "\n".join(lines)


class _Tree:
    def __init__(self, waits: Sequence[Wait], now: float) -> None:
        self._now, self._told = now, set[str]()
        self._of: dict[str, list[Wait]] = {}
        self._alike: Counter[tuple[str, str]] = Counter()
        for wait in sorted(waits, key=lambda wait: wait.since):
            self._alike[wait.who, wait.owner] += 1
            if self._alike[wait.who, wait.owner] == 1:
                self._of.setdefault(wait.who, []).append(wait)
        self._owners = {wait.owner for wait in waits}

    def lines(self) -> Iterator[str]:
        roots: dict[frozenset[str], list[str]] = {}
        for who, waits in self._of.items():
            if who not in self._owners:
                roots.setdefault(frozenset(wait.owner for wait in waits), []).append(who)
        for owners, alike in roots.items():
            for who in alike[:SHOWN]:
                yield from self._chain(who)
            if more := alike[SHOWN:]:
                self._told.update(more)
                yield f"and {len(more)} more wait for {', '.join(sorted(owners))}"
        for who in self._of:  # what no root leads to is a cycle
            if who not in self._told:
                yield from self._chain(who)

    def _chain(self, who: str) -> Iterator[str]:
        # not recursive: a chain may be as long as there are names
        todo: list[tuple[int, str | Wait]] = [(0, wait) for wait in reversed(self._of[who])]
        self._told.add(who)
        while todo:
            depth, item = todo.pop()
            if isinstance(item, str):
                yield f"{'  ' * depth}{item} waits for nobody here: look there first"
                continue
            yield f"{'  ' * depth}{self._line(item)}"
            if item.owner in self._told:
                continue
            self._told.add(item.owner)
            below: Sequence[str | Wait] = self._of.get(item.owner) or [item.owner]
            todo += [(depth + 1, one) for one in reversed(below)]

    def _line(self, wait: Wait) -> str:
        age = self._now - wait.since
        limit = "" if math.isinf(wait.limit) else f" of {wait.limit:g}"
        over = ", over" if wait.over(self._now) else ""
        over += f", and {others} more" if (others := self._alike[wait.who, wait.owner] - 1) else ""
        return f"{wait.who} waits for {wait.owner}: {wait.what} ({age:.1f}{limit} s{over})"
