"""The versions of the weights on their way from the policy to the engines.

    await versions.publish(7)     # train loop: snapshot; training may go on when this returns
    await versions.bring(7)       # whoever owns the engines' time: they generate with version 7 when this returns

`published` is the newest snapshot, `delivered` the version that all engines generate with, `validated` the last one whose
held-out validation (where one is due) is over, `evaluated` the last one whose evals are; then the next version is brought.
Versions only grow, also over a resume. The plane keeps two snapshots, and none that an engine still waits for may be replaced: a
snapshot waits until the one two before it is delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from posttrain.weights.failure import PeerFailure

if TYPE_CHECKING:
    from posttrain.hooks import RunHooks
    from posttrain.loop.policy_turn import PolicyTurn
    from posttrain.loop.waits import Waits
    from posttrain.tracking.tracker import Tracker
    from posttrain.weights.plane import Update, WeightPlane

KEPT = 2
"""Snapshots that the plane holds at once."""


class Versions:
    """start: the version that the policy has now.   policy: one at a time uses it   current: the version that it has
    due: whether a version is to be validated or evaluated; validate, evaluate: what does it.
    bringer: the loop that calls `bring`."""

    def __init__(
        self,
        plane: WeightPlane | None,
        start: int,
        *,
        policy: PolicyTurn,
        current: Callable[[], int],
        due: Callable[[int], bool],
        validate: Callable[[int], Awaitable[None]],
        hooks: RunHooks,
        tracker: Tracker,
        waits: Waits,
        evaluate: Callable[[int], Awaitable[None]] | None = None,
        bringer: str = "rollouts loop",
    ) -> None:
        self._bringer = bringer
        self.published = self.delivered = self.validated = self.evaluated = start - 1
        self._plane, self._policy, self._current, self._due, self._validate = plane, policy, current, due, validate
        self._hooks, self._tracker, self._waits, self._evaluate = hooks, tracker, waits, evaluate
        self._updates: dict[int, Update] = {}
        self._moved = asyncio.Condition()
        self._timings: dict[str, float] = {}

    async def publish(self, version: int) -> None:
        """Snapshot the policy's weights as `version`. Raises WeightSyncError."""
        await self.wait_delivered(version - KEPT)
        async with self._policy.turn():
            await self._publish(version)
        await self._move(published=version)

    async def _publish(self, version: int) -> None:
        if self._plane is not None:
            await self._hooks.call("before_publish", version=version)
            began = _now()
            with self._tracker.span("weights", "publish", version=version), self._waits.named(f"snapshot {version}", "policy"):
                update = await self._plane.publish(version)
            self._note({"time/sync_s": _now() - began})
            self._updates = {kept: u for kept, u in self._updates.items() if kept > version - KEPT} | {version: update}

    async def bring(self, version: int, delivered: Callable[[], Awaitable[None]] | None = None) -> None:
        """Bring the engines to `version`, which is published by now or will be, and validate and evaluate where that is due.

        delivered: called when they have it, before the validation.

        Raises WeightSyncError naming the lane or the policy rank; the engines that could not be healed refuse to generate.
        """
        await self.wait_published(version)
        if self._plane is not None:
            update = self._updates.pop(version)
            began = _now()
            waiting = self._waits.named(f"version {version}", "weight plane")
            with self._tracker.span("weights", "deliver", version=version), waiting:
                timings = await self._delivered(self._plane, update)
            timings["time/sync_s"] = _now() - began
            self._note(timings)
            await self._hooks.call("after_publish", version=version, metrics=timings)
        await self._move(delivered=version)
        if delivered is not None:
            await delivered()
        await self._validate(version)
        await self._move(validated=version)
        if self._evaluate is not None:
            await self._evaluate(version)
        await self._move(evaluated=version)

    async def _delivered(self, plane: WeightPlane, update: Update) -> dict[str, float]:
        """Deliver; where no lane could read the snapshot, and the policy still has those weights, take another one."""
        try:
            return await plane.deliver(update)
        except PeerFailure as exc:
            version = update.publication.version
            async with self._policy.turn():
                if not plane.may_publish_again(exc) or self._current() != version:
                    raise
                update = await plane.publish_again(version)
        return await plane.deliver(update)

    @property
    def next(self) -> int:
        """The published version to bring next: the newest, unless an older one is to be validated or evaluated first."""
        between = range(self.delivered + 1, self.published)
        return next((version for version in between if self._due(version)), self.published)

    def timings(self) -> dict[str, float]:
        """Of what was published and delivered since the last call: seconds by phase (sums), bytes and canary (the last)."""
        found, self._timings = self._timings, {}
        return found

    def _note(self, timings: Mapping[str, float]) -> None:
        for name, value in timings.items():
            self._timings[name] = value + (self._timings.get(name, 0.0) if name.startswith("time/") else 0.0)

    async def wait_published(self, version: int) -> None:
        await self._wait(lambda: self.published >= version, f"weights of version {version}", "train loop")

    async def wait_delivered(self, version: int) -> None:
        await self._wait(lambda: self.delivered >= version, f"engines to have version {version}", self._bringer)

    async def wait_validated(self, version: int) -> None:
        await self._wait(lambda: self.validated >= version, f"the validation of version {version}", self._bringer)

    async def wait_evaluated(self, version: int) -> None:
        await self._wait(lambda: self.evaluated >= version, f"the evals of version {version}", self._bringer)

    async def _wait(self, ready: Callable[[], bool], name: str, owner: str) -> None:
        async with self._moved:
            if not ready():
                with self._waits.named(name, owner):
                    await self._moved.wait_for(ready)

    async def _move(self, **versions: int) -> None:
        async with self._moved:
            for name, version in versions.items():
                setattr(self, name, version)
            self._moved.notify_all()


def _now() -> float:
    return asyncio.get_running_loop().time()
