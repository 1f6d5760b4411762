"""How weights travel in the simulation: the real plane and the real receivers; what is copied is the policy's hash.

The publisher keeps two snapshots, as the pool does: a third replaces one that nobody holds, versions only advance.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from posttrain.errors import WeightSyncError
from posttrain.loop.sim.engine import Injected, SimEngine
from posttrain.weights.deadline import in_thread
from posttrain.weights.plan import BucketPlan, ParameterSpec, plan_buckets
from posttrain.weights.publication import SLOTS, Opened, Publication, nobody
from posttrain.weights.receiver import Receiver

if TYPE_CHECKING:
    from posttrain.loop.sim.ends import SimPolicy
    from posttrain.loop.sim.trace import Trace

DIGEST = "as it is"
FAULTS = ("pull raises", "pull stalls", "pause raises", "pause stalls", "apply raises", "apply stalls")


@cache
def _plan() -> BucketPlan:
    return plan_buckets([ParameterSpec("first", "float32", (8,)), ParameterSpec("second", "float32", (8,))], bucket_bytes=32)


@dataclass
class _Staging:
    """What a lane has pulled."""

    weights: str = ""

    def release(self) -> None: ...


class _Transport:
    def fresh(self) -> _Transport:
        return self

    def warm(self, end: str) -> None: ...

    def close(self) -> None: ...


class SimLane(Receiver):
    """The real receiver without memory. stalls: virtual seconds of a pull that hangs are the loop's business (`takes`).

    dies: ends its process, where it has one of its own, which is one more way to fail.
    """

    def __init__(
        self, engine: SimEngine, number: int, faults: float, rng: random.Random, dies: Callable[[], None] | None = None
    ) -> None:
        super().__init__(engine, _Transport(), name=engine.label, number=number, grace_s=0.5)  # type: ignore[arg-type]
        self._faults, self._rng, self._dies = faults, rng, dies
        self.stalls = self.failing = False
        self.injected = 0

    async def _open_and_pull(self, publication: Publication) -> Any:
        assert isinstance(self.engine, SimEngine)
        if self._rng.random() < self._faults:
            fault = self._rng.choice(FAULTS if self._dies is None else (*FAULTS, "dies"))
            self.injected += 1
            if fault == "dies" and self._dies is not None:
                self._dies()
            self.stalls, self.failing = fault == "pull stalls", fault == "pull raises"
            self.engine.fault = "" if fault.startswith(("pull", "dies")) else fault
        return await super()._open_and_pull(publication)

    def _staging_for(self, nbytes: int) -> Any:
        if self._staging is None:
            self._staging = _Staging()  # type: ignore[assignment]
        return self._staging

    async def _next(self, left: Any, known: Any, publication: Publication, staging: Any) -> Any:
        return left.popleft()  # what is published is written

    def _pull(self, publication: Publication, bucket: Any, known: Any, staging: Any) -> None:
        if self.failing:
            self.failing = False
            raise Injected("pull raises")
        staging.weights = publication.handles[0]

    def _digest(self, bucket: Any, staging: Any) -> str:
        return DIGEST


class SimPublisher:
    """`snapshots`: version → weights.   `published`: all that ever were."""

    def __init__(self, policy: SimPolicy, trace: Trace) -> None:
        self._policy, self._trace = policy, trace
        self.snapshots: dict[int, str] = {}
        self.published: dict[int, str] = {}
        self._held: dict[int, int] = {}
        self._last = -1

    async def publish(self, version: int, opened: Opened = nobody) -> Publication:
        if version <= self._last:
            raise WeightSyncError(f"version {version} does not advance past {self._last}")
        publication = await in_thread(self._publish, version)
        opened(publication)
        return publication

    def _publish(self, version: int) -> Publication:
        assert not self._policy.busy, f"version {version} is copied while the policy trains"
        if len(self.snapshots) == SLOTS:
            free = [one for one in sorted(self.snapshots) if not self._held.get(one)]
            if not free:
                raise WeightSyncError("both snapshots are held")
            del self.snapshots[free[0]]
        self.snapshots[version], self._last = self._policy.weights, version
        self.published[version] = self._policy.weights
        self._trace("publisher", f"version {version} is {self._policy.weights[:6]}")
        return Publication(version, _plan(), {0: self._policy.weights})  # type: ignore[dict-item]

    async def digests(self, version: int) -> dict[int, str]:
        return dict.fromkeys(range(len(_plan().buckets)), DIGEST)

    async def hold(self, version: int) -> None:
        if version not in self.snapshots:
            raise WeightSyncError(f"version {version} is not in the pool")
        self._held[version] = self._held.get(version, 0) + 1

    async def release(self, version: int) -> None:
        self._held[version] -= 1

    async def retract(self, version: int) -> None:
        self.snapshots.pop(version, None)
        self._last = max(self.snapshots, default=-1)

    async def close(self) -> None:
        self.snapshots.clear()
