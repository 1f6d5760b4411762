"""How long an update takes when only the links count: a simulation of lanes that pull from policy ranks.

Assumptions: a policy rank sends, and a lane receives, at most `link` bytes a second; a lane pulls from one policy rank at a
time, in the order of the plan from a starting point of its own; lanes that pull from the same rank share its link evenly; latency,
digests and copies at both ends are free. The result is what an update takes at least in that order; `limit` is what no order
can beat.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence


def limit(rank_bytes: Sequence[int], lanes: int, link: float) -> float:
    """Seconds that no order can beat: what the busiest lane receives, or the busiest policy rank sends, at `link` bytes/s."""
    return max(sum(rank_bytes), max(rank_bytes, default=0) * lanes) / link


def makespan(
    rank_bytes: Sequence[int], lanes: int, link: float, *, starts: Sequence[int] | None = None, concurrent: int | None = None
) -> float:
    """Seconds until every lane has all of `rank_bytes`, the bytes that each policy rank publishes.

    starts: the place in the order at which each lane begins, default 0 for all. concurrent: lanes at once, default all;
    the next lane begins when one is done.
    """
    work = [nbytes for nbytes in rank_bytes if nbytes]
    if not work:
        return 0.0
    first = [(start * len(work) // max(len(rank_bytes), 1)) % len(work) for start in (starts or [0] * lanes)]
    waiting = list(range(lanes))[::-1]
    state = _Links(work, link)
    for _ in range(min(concurrent or lanes, lanes)):
        lane = waiting.pop()
        state.begin(lane, first[lane])
    done = dict.fromkeys(range(lanes), 0)
    while state.pulling:
        lane, rank = state.finish_next()
        done[lane] += 1
        if done[lane] < len(work):
            state.begin(lane, (rank + 1) % len(work))
        elif waiting:
            lane = waiting.pop()
            state.begin(lane, first[lane])
    return state.now


class _Links:
    """Fluid flows: `k` lanes at one rank get a k-th of its link each. A rank keeps a clock of the bytes that each of them got."""

    def __init__(self, work: Sequence[int], link: float) -> None:
        self.now, self.pulling = 0.0, 0
        self._work, self._link = work, link
        self._served: dict[int, float] = defaultdict(float)  # bytes that a lane at this rank all along would have
        self._seen: dict[int, float] = defaultdict(float)  # when that was last brought up to date
        self._queue: dict[int, list[tuple[float, int]]] = defaultdict(list)  # (clock at which the lane is done, lane)
        self._events: list[tuple[float, int, int]] = []  # (time, rank, generation)
        self._generation: dict[int, int] = defaultdict(int)

    def begin(self, lane: int, rank: int) -> None:
        self._advance(rank)
        heapq.heappush(self._queue[rank], (self._served[rank] + self._work[rank], lane))
        self.pulling += 1
        self._schedule(rank)

    def finish_next(self) -> tuple[int, int]:
        """Go on to the next moment at which a lane has all of a rank; returns both."""
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
        return lane, rank

    def _advance(self, rank: int) -> None:
        if sharers := len(self._queue[rank]):
            self._served[rank] += (self.now - self._seen[rank]) * self._link / sharers
        self._seen[rank] = self.now

    def _schedule(self, rank: int) -> None:
        self._generation[rank] += 1
        if queue := self._queue[rank]:
            left = max(queue[0][0] - self._served[rank], 0.0) * len(queue) / self._link
            heapq.heappush(self._events, (self.now + left, rank, self._generation[rank]))
