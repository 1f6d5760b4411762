"""Lanes that have nothing else to do begin to pull a publication while it is still being written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from posttrain.weights.deadline import abandon, quiet
from posttrain.weights.lane_end import LaneEnd
from posttrain.weights.publication import Publication


class Ahead:
    """version: what lanes pull ahead, None where they do not. Its delivery asks them again, and they share the outcome."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._tasks: Sequence[asyncio.Future[None]] = ()

    def begin(self, lanes: Iterable[LaneEnd], publication: Publication, *, timeout: float) -> None:
        self.version = publication.version
        self._tasks = [asyncio.ensure_future(lane.stage(publication, timeout=timeout)) for lane in lanes]
        for task in self._tasks:
            quiet(task)  # the delivery is told

    def forget(self) -> None:
        tasks, self.version, self._tasks = self._tasks, None, ()
        for task in tasks:
            abandon(task)
