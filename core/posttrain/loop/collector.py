"""Python's cyclic garbage collector while a run goes on.

By default it looks at everything that lives again whenever a quarter more does: with 100,000 trajectories in flight that is a
third of what their bookkeeping costs. They are not garbage, and what ends is freed without it. So what was imported is left out,
and cycles are looked for only after more allocations than a batch in flight makes: what they hold stays in proportion to it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 100_000
"""Allocations (less what was freed) from one look at the young to the next, at least."""
EACH = 30
"""Containers that a trajectory in flight makes, with its share of its prompt's and its row: 18 measured, more with turns."""


@contextmanager
def few_collections(trajectories: int = 0) -> Iterator[None]:
    """As above within the block; then as it was. trajectories: in flight at once."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(YOUNG, EACH * trajectories), 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
