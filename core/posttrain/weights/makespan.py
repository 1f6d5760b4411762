"""How long an update takes when only the links count: a simulation of lanes that pull from policy ranks.

Assumptions: a policy rank sends, and a lane receives, at most `link` bytes a second; a lane pulls from one policy rank at a
time, in the order of the plan from a starting point of its own; lanes that pull from the same rank share its link evenly;
latency, digests and copies are free. The result is what an update takes at least in that order; `limit` is what no order
can beat.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

Work = Sequence[Sequence[int]]
"""Bytes that each lane pulls from each policy rank: `work[lane][rank]`. Lanes that pull the same may share one sequence."""


def limit(work: Work, link: float) -> float:
    """Seconds that no order can beat: what the busiest lane receives, or the busiest policy rank sends, at `link` bytes/s."""
    return max(max(map(sum, work)), max(map(sum, zip(*work, strict=True)))) / link


def makespan(work: Work, link: float, *, starts: Sequence[int] | None = None, concurrent: int | None = None) -> float:
    """Seconds until every lane has all of its `work`.

    starts: the policy rank at which each lane begins, default 0 for all; it goes on in their order and around. concurrent: lanes
    at once, default all; the next lane begins when one is done.
    """
    waiting, links = list(range(len(work)))[::-1], _Links(link)
    route: dict[int, list[int]] = {}
    for _ in range(concurrent or len(work)):
        _next_lane(waiting, route, work, starts, links)
    while links.pulling:
        lane = links.finish_next()
        if route[lane]:
            rank = route[lane].pop()
            links.begin(lane, rank, work[lane][rank])
        else:
            _next_lane(waiting, route, work, starts, links)
    return links.now


def _next_lane(waiting: list[int], route: dict[int, list[int]], work: Work, starts: Sequence[int] | None, links: _Links) -> None:
    while waiting:
        lane = waiting.pop()
        ranks, first = len(work[lane]), starts[lane] if starts else 0
        order = ((first + step) % ranks for step in range(ranks))
        route[lane] = [rank for rank in order if work[lane][rank]][::-1]  # the last is the next
        if route[lane]:
            rank = route[lane].pop()
            return links.begin(lane, rank, work[lane][rank])


class _Links:
    """Fluid flows: `k` lanes at one rank get a k-th of its link each. A rank keeps a clock of the bytes that each of them got."""

    def __init__(self, link: float) -> None:
        self.now, self.pulling, self._link = 0.0, 0, link
        self._served: dict[int, float] = defaultdict(float)  # bytes that a lane at this rank all along would have
        self._seen: dict[int, float] = defaultdict(float)  # when that was last brought up to date
        self._queue: dict[int, list[tuple[float, int]]] = defaultdict(list)  # (clock at which the lane is done, lane)
        self._events: list[tuple[float, int, int]] = []  # (time, rank, generation)
        self._generation: dict[int, int] = defaultdict(int)

    def begin(self, lane: int, rank: int, nbytes: int) -> None:
        self._advance(rank)
        heapq.heappush(self._queue[rank], (self._served[rank] + nbytes, lane))
        self.pulling += 1
        self._schedule(rank)

    def finish_next(self) -> int:
        """Go on to the next moment at which a lane has all that it pulls from a rank; returns the lane."""
        while True:
            when, rank, generation = heapq.heappop(self._events)
            if generation == self._generation[rank]:
                break
        self.now = max(self.now, when)
        self._advance(rank)
        clock, lane = heapq.heappop(self._queue[rank])
        self._served[rank] = max(self._served[rank], clock)
        self.pulling -= 1
        self._schedule(rank)
        return lane

    def _advance(self, rank: int) -> None:
        if sharers := len(self._queue[rank]):
            self._served[rank] += (self.now - self._seen[rank]) * self._link / sharers
        self._seen[rank] = self.now

    def _schedule(self, rank: int) -> None:
        self._generation[rank] += 1
        if queue := self._queue[rank]:
            left = max(queue[0][0] - self._served[rank], 0.0) * len(queue) / self._link
            heapq.heappush(self._events, (self.now + left, rank, self._generation[rank]))
