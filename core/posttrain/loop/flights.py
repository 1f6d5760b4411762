"""Prompts whose completions are being generated one by one (`loop.commit_order=arrival`): slots, ages, second tries.

A slot is one sample in an engine. A prompt is dispatched when all its samples have a slot; each is free again when its sample
leaves the engine, before it is scored, whatever becomes of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.data.dataset import Draw

TRIES = 3
"""Dispatches of one draw before it is dropped."""


@dataclass(slots=True, eq=False)
class Flight:
    """One dispatched prompt.

    version   that the engines had when it was dispatched: none of its tokens is older
    began     seconds of the event loop's clock
    slots     samples still in an engine
    ending    why it is to be generated again: "stale", "timeout"; "" while it is well
    """

    draw: Draw
    version: int
    began: float
    slots: int
    ending: str = ""


class Flights:
    """capacity: samples in the engines at once; a prompt with more goes alone.   used: slots that are taken.
    tries: what `in_vain` said, by draw index, in the process that is gone on from."""

    def __init__(self, capacity: int, tries: Mapping[int, int] | None = None) -> None:
        self.capacity = capacity
        self.used = 0
        self.open: dict[int, Flight] = {}
        self._tries: Counter[int] = Counter(tries)
        self._room = asyncio.Event()

    async def room(self, samples: int) -> None:
        """Wait until this many samples have a slot."""
        while self.used and self.used + samples > self.capacity:
            self._room.clear()
            await self._room.wait()

    def begin(self, draw: Draw, samples: int, version: int) -> Flight:
        """Take the slots."""
        self.used += samples
        self._tries[draw.index] += 1
        flight = self.open[draw.index] = Flight(draw, version, asyncio.get_running_loop().time(), samples)
        return flight

    def left_engine(self, flight: Flight) -> None:
        """One of its samples gives its slot back."""
        self._free(flight, min(flight.slots, 1))

    def give_slots_back(self, flight: Flight) -> None:
        """However it ended. It stays open until its draw has another place: a cut must find it."""
        self._free(flight, flight.slots)

    def end(self, flight: Flight) -> None:
        """Its draw goes to another place now."""
        self._free(flight, flight.slots)
        self.open.pop(flight.draw.index, None)

    def not_its_fault(self, draw: Draw) -> None:
        """Its try does not count."""
        self._tries[draw.index] -= 1

    def tries(self, draw: Draw) -> int:
        """How often a draw was dispatched."""
        return self._tries[draw.index]

    def in_vain(self) -> dict[int, int]:
        """The tries of draws that have not come to their end, for a checkpoint: what is well in flight has not failed yet."""
        well = Counter(index for index, flight in self.open.items() if not flight.ending)
        return dict(self._tries - well)

    def forget(self, draw: Draw) -> None:
        """A draw that has come to its end."""
        self._tries.pop(draw.index, None)

    def older_than(self, version: int) -> list[Flight]:
        """Flights with a token that an older version than `version` may have sampled."""
        return [flight for flight in self.open.values() if flight.version < version and not flight.ending]

    def _free(self, flight: Flight, slots: int) -> None:
        flight.slots -= slots
        self.used -= slots
        self._room.set()
