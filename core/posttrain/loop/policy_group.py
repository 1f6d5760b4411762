"""The ranks of a sharded policy in other processes, as one policy: the same methods as `Policy`, called on all ranks together.

Every method is collective: one call goes to all ranks with the same arguments, and the first rank's result is everybody's. A rank
that fails takes the others with it, because they wait for it in a collective; but a snapshot that cannot be written, which
every rank is told, does not: what trains meanwhile is not to blame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.placement.remote import Remote, each, free_port, together
from posttrain.policy.snapshot import Snapshots
from posttrain.weights.publication import nobody

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.policy.rows import Row
    from posttrain.policy.step import StepResult
    from posttrain.weights.publication import Digested, Opened, Publication

GRACE_S = 10.0

OBJECTIVE = "posttrain.loop.prepare:build_run_objective"
"""What builds a rank's objective from the config."""


class PolicyGroup:
    """ranks: in rank order.   timeout: seconds that a collective call may take (`loop.train_timeout_s`)."""

    def __init__(self, ranks: Sequence[Remote], timeout: float) -> None:
        self._ranks, self._timeout = list(ranks), timeout
        self.notes: list[str] = []
        self.vocab_size = 0
        self._snapshots = Snapshots()

    def start(self, config: RunConfig, model: str, *, transport: str) -> None:
        """Bring the process group up and build the policy on every rank. Raises what a rank raised."""
        timeout = config.grid.start_timeout_s
        address, port = free_port(self._ranks[0], GRACE_S)
        common = (len(self._ranks), address, port, config, model, OBJECTIVE, transport, timeout, self._timeout)
        args = [(rank, *common) for rank in range(len(self._ranks))]
        started = each(self._ranks, "start", args, timeout=timeout + GRACE_S)[0]
        self.notes, self.vocab_size = list(started.notes), started.vocab_size

    def train_step(self, rows: list[Row]) -> StepResult:
        return self._all("train_step", rows)  # type: ignore[no-any-return]

    def evaluate(self, rows: list[Row]) -> dict[str, float]:
        return self._all("evaluate", rows)  # type: ignore[no-any-return]

    def logprobs(self, rows: list[Row]) -> list[list[float]]:
        return self._all("logprobs", rows)  # type: ignore[no-any-return]

    def score(self, sequences: Sequence[Sequence[int]], dtype: str) -> list[list[float]]:
        return self._all("score", sequences, dtype)  # type: ignore[no-any-return]

    def save(self, folder: str | Path) -> None:
        self.snapshot()(Path(folder))

    def snapshot(self) -> Callable[[Path], None]:
        """As `Policy.snapshot`: the copy is in the ranks, and what is returned writes it on all of them, in any thread."""
        return self._snapshots.take(self._copied)

    def _copied(self) -> Callable[[Path], object]:
        number = self._all("snapshot")
        return lambda folder: together(self._ranks, "write", number, str(folder), timeout=self._timeout, kill=False)

    def load(self, folder: str | Path) -> None:
        self._all("load", str(folder))

    def _all(self, method: str, *args: Any) -> Any:
        return together(self._ranks, method, *args, timeout=self._timeout)[0]


class RemoteRank:
    """One rank as the publisher of its part (`weights.publisher.RankEnd`). timeout: seconds of one publication."""

    def __init__(self, remote: Remote, timeout: float) -> None:
        self._remote, self._timeout, self.name = remote, timeout, remote.name
        self.at: int | None = None

    async def publish(self, version: int, opened: Opened = nobody) -> Publication:
        self.at, part = None, None
        try:
            async with asyncio.timeout(self._timeout):
                async for said in self._remote.stream("publish", version):
                    if isinstance(said, int):
                        self.at = said
                    else:
                        part = said
                        opened(part)
        except TimeoutError as exc:
            raise await self._remote.late("publish", self._timeout) from exc
        assert part is not None
        return part

    async def digests(self, version: int) -> Digested:
        found: Digested = await self._remote.call("digests", version, timeout=self._timeout)
        return found

    async def retract(self, version: int) -> None:
        await self._remote.call("retract", version, timeout=GRACE_S)

    async def hold(self, version: int) -> None:
        await self._remote.call("hold", version, timeout=GRACE_S)

    async def release(self, version: int) -> None:
        await self._remote.call("release", version, timeout=GRACE_S)

    async def close(self) -> None:
        await self._remote.call("close", timeout=GRACE_S)
