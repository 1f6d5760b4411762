"""Checkpoints that do not stop the loop: a short copy at the cut, then a writer beside it.

    await checkpoints.begin(state)      # between two batch steps: copies the policy and the counters; returns
    ...                                 # the writer waits for the cohorts in flight, writes aside, fsyncs, renames
    await checkpoints.written()

The cut of step `k`: policy, optimizer, counters and hooks as they are after step `k`; the algorithm as it was when batch `k` was
made; sampler, environments and packer as they were when the last of what is pending was scored; the ledger's ends up to `k`.
One is written at a time: `begin` waits for the one before.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.dataset import FINGERPRINT_ROWS
from posttrain.loop import checkpoint
from posttrain.loop.gathering import cell_groups
from posttrain.weights.deadline import in_thread

if TYPE_CHECKING:
    from posttrain.loop.controller import LoopState
    from posttrain.loop.parts import Parts
    from posttrain.loop.pending import Pending
    from posttrain.loop.policy_turn import PolicyTurn
    from posttrain.loop.source import Cut, Source
    from posttrain.loop.versions import Versions
    from posttrain.loop.waits import Waits
    from posttrain.plugins.state import SavedState


MOMENT_S = 0.1
"""How long a writer whose run has just failed may take to find that it has all it needs."""

Saver = Callable[[Path], None]
"""What writes the policy as it was at the cut."""


class Checkpointer:
    """Writes the checkpoints of one run."""

    def __init__(self, parts: Parts, source: Source, versions: Versions, waits: Waits, policy: PolicyTurn) -> None:
        self._parts, self._source, self._versions, self._waits, self._policy = parts, source, versions, waits, policy
        self._algorithm: dict[int, list[SavedState]] = {}
        self._writing: asyncio.Task[None] | None = None
        self._ready = False  # all that it needs is there
        self._given_up = threading.Event()

    def batch_made(self, step: int) -> None:
        """The algorithm has seen the batch of `step` and not the next one; called between the two."""
        self._algorithm[step] = self._parts.algorithm_states()

    def trained(self, step: int) -> None:
        """What checkpoints of earlier steps would have needed may go."""
        self._algorithm = {one: states for one, states in self._algorithm.items() if one >= step}

    async def begin(self, state: LoopState) -> None:
        """Cut here. Raises what the writer before raised, and PluginError for a state that cannot be saved."""
        await self.written()
        step = state.step
        algorithm = self._algorithm[step]
        hooks = await self._parts.hook_states()
        async with self._policy.turn():  # not before: what the writer waited for may have needed it
            saver = await self._policy.call("a copy of the policy", self._parts.policy.snapshot)
        self._ready = False
        fixed = {
            "state": asdict(state),
            "fingerprints": self._parts.fingerprints,
            "fingerprint_rows": FINGERPRINT_ROWS,
            "origins": [asdict(one) for one in self._parts.origins],
            "cells": cell_groups(self._parts.config),
        }
        cutting = self._source.cut(step)
        self._writing = asyncio.create_task(self._write(step, saver, cutting, fixed, [*algorithm, *hooks]), name="checkpoints")

    async def written(self) -> None:
        """Wait for the writer. Raises what it raised."""
        if self._writing is not None:
            with self._waits.named("the checkpoint before", "checkpoints"):
                await self._writing

    def raise_failure(self) -> None:
        """Raise what a writer that has ended raised."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def close(self, timeout: float = 0.0) -> None:
        """Let a writer end that has all it needs, for `timeout` s; what is not done then is no checkpoint. Idempotent."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=MOMENT_S)
            if self._ready:
                await asyncio.wait({self._writing}, timeout=timeout)
            self._given_up.set()
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(
        self, step: int, saver: Saver, cutting: Awaitable[Cut], fixed: dict[str, Any], states: list[SavedState]
    ) -> None:
        parts, limits = self._parts, self._parts.config.checkpoint
        cut = await cutting
        parts.ledger.flush()  # with every draw that the cut knows as ended
        await self._versions.wait_validated(step - 1)  # whoever resumes has no weights that are older than this step's
        self._ready = True
        loop_state = fixed | {"sampler": cut.position, "plugins": [asdict(one) for one in (*states, *cut.states)]}
        with parts.tracker.span("loop", "checkpoint", step=step), self._waits.named(f"the checkpoint of step {step}", "disk"):
            saved = await in_thread(self._on_disk, step, saver, loop_state, cut.pending)
        await in_thread(lambda: checkpoint.prune(
            parts.run_dir.checkpoints, keep_last=limits.keep_last, keep_every=limits.keep_every
        ))  # fmt: skip
        await parts.hooks.call("checkpoint_saved", step=saved.step, path=saved.path)

    def _on_disk(self, step: int, saver: Saver, loop_state: dict[str, Any], pending: Pending) -> checkpoint.Checkpoint:
        """Runs in a thread."""
        self._parts.ledger.sync()
        folder, wanted = self._parts.run_dir.checkpoints, lambda: not self._given_up.is_set()
        return checkpoint.write(folder, step, saver, loop_state, pending, wanted=wanted)
