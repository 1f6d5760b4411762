"""The stream of draws: one order for the whole run, whoever takes them.

Rows are read ahead in a thread and their prompts formatted ahead of dispatch, at most `AHEAD` of them; those of environments
that keep a state are formatted when they are taken, because they may ask by it. What was read and not taken is drawn again after
a resume: the checkpoint holds the sampler's position behind the last draw taken. A row that cannot be read or asked about is an
error when its turn comes, not before; up to `rl.data.max_bad_rows` of the latter are passed over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError
from posttrain.weights.deadline import in_thread

if TYPE_CHECKING:
    from posttrain.data.dataset import Draw, PromptSampler

AHEAD = 64
"""Draws read ahead of their taking."""


@dataclass(slots=True)
class _Read:
    """A draw, the sampler's state behind it, and why it cannot be asked; without a draw: why no more can be read."""

    draw: Draw | None
    position: dict[str, Any]
    problem: Exception | None = None


class Prompts:
    """sampler    where new draws come from
    prepare       formats the prompt of a draw; raises DataError for one that cannot be asked
    late          environments whose prompts are not formatted ahead
    again         draws that were taken before and have to be dispatched anew, first
    max_bad       rows that may be passed over; `bad_rows` were before
    bad           called with each of them, why, and the batch step that it was taken for
    """

    def __init__(
        self,
        sampler: PromptSampler,
        *,
        prepare: Callable[[Draw], object],
        late: Collection[str] = (),
        again: Iterable[Draw] = (),
        max_bad: int = 0,
        bad: Callable[[Draw, Exception, int], None] = lambda draw, problem, step: None,
        bad_rows: Iterable[int] = (),
    ) -> None:
        self._sampler, self._prepare, self._max_bad, self._bad = sampler, prepare, max_bad, bad
        self._late = frozenset(late)
        self._again = deque(again)
        self._read: deque[_Read] = deque()
        self._more, self._room = asyncio.Event(), asyncio.Event()
        self.bad_rows = tuple(bad_rows)
        """Draw indices of the rows passed over."""
        self.position = sampler.state_dict() | {"bad_rows": self.bad_rows}
        """The sampler's state behind the last draw taken, with the rows passed over until then."""

    async def run(self) -> None:
        """Read ahead, until cancelled or a row cannot be read."""
        while True:
            while len(self._read) >= AHEAD // 2:
                self._room.clear()
                await self._room.wait()
            found = await in_thread(self._some, AHEAD // 2)
            for item in found:
                if item.draw is not None and item.draw.env not in self._late:
                    item.problem = self._problem(item.draw)
                self._read.append(item)
                self._more.set()
                await asyncio.sleep(0)  # a tokenizer takes its time, and so may everybody else
            if found[-1].draw is None:
                return

    async def take(self, step: int) -> Draw:
        """The next draw, for batch step `step`. Raises DataError for one that cannot be read, or that is one bad row too many."""
        while True:
            if self._again:
                return self._again.popleft()
            if not self._read:
                self._more.clear()
                await self._more.wait()
                continue
            item = self._read[0]
            if item.draw is not None and item.draw.env in self._late:
                item.problem = self._problem(item.draw)
            if item.problem is not None and (item.draw is None or not self._passes(item.problem)):
                raise item.problem  # it stays: whoever asks next is told the same
            assert item.draw is not None
            self._read.popleft()
            self._room.set()
            self.bad_rows += (item.draw.index,) * (item.problem is not None)
            self.position = item.position | {"bad_rows": self.bad_rows}
            if item.problem is None:
                return item.draw
            self._bad(item.draw, item.problem, step)

    def give_back(self, draw: Draw) -> None:
        """A draw that has to be dispatched anew, before any new one."""
        self._again.append(draw)
        self._more.set()

    def waiting_again(self) -> list[Draw]:
        """Draws that were given back and not taken since."""
        return list(self._again)

    def _passes(self, problem: Exception) -> bool:
        """Whether a row that cannot be asked about is passed over; whatever a packer or an environment raises else is not."""
        return isinstance(problem, DataError) and len(self.bad_rows) < self._max_bad

    def _problem(self, draw: Draw) -> Exception | None:
        try:
            self._prepare(draw)
        except Exception as exc:
            return exc
        return None

    def _some(self, count: int) -> list[_Read]:
        """Runs in a thread."""
        found: list[_Read] = []
        try:
            for _ in range(count):
                found.append(_Read(self._sampler.draw(1)[0], self._sampler.state_dict()))
        except Exception as exc:
            found.append(_Read(None, self._sampler.state_dict(), exc))
        return found
