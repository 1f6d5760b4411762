"""The fault matrix: every peer, every bucket, every fault, and what must hold after each. `Matrix.run` returns what happened."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import psutil
from fault_rig import (
    LANES,
    LONG_S,
    PROMPT,
    RANKS,
    STALL_S,
    Fault,
    Here,
    LaneRole,
    RankRole,
    Worker,
    expected_answer,
    expected_logprobs,
    own_files,
)

from posttrain.config.schema import WeightsConfig
from posttrain.errors import WeightSyncError
from posttrain.weights.canary import Canary
from posttrain.weights.plane import WeightPlane
from posttrain.weights.publisher import GroupPublisher

KINDS = ("raise", "die", "stall", "corrupt", "wrong epoch", "partial")
FIRST_RANK, OTHER_RANK = "policy rank 0", "policy rank 1"
"""The other ranks' parts are compared with what the first one published."""
PEERS = (FIRST_RANK, OTHER_RANK, "rollout-0", "rollout-1")
BUCKETS = {
    FIRST_RANK: {"first": 0, "middle": 1, "last": 2},
    OTHER_RANK: {"first": 3, "middle": 4, "last": 5},
    "rollout-0": {"first": 0, "middle": 3, "last": 5},
    "rollout-1": {"first": 0, "middle": 3, "last": 5},
}
PRELOAD = [
    "torch", "posttrain.policy.sharding", "posttrain.rollout.engine", "posttrain.types", "posttrain.weights.plane",
    "posttrain.weights.shm",
]  # fmt: skip
SLACK_S = 5.0
"""What a busy machine may add to a deadline."""


@dataclass(frozen=True)
class Cell:
    """One fault: who, where (first, middle, last; half-way for a fault while applying; digest), what."""

    peer: str
    where: str
    kind: str
    phase: str

    def __str__(self) -> str:
        return f"{self.phase}-{self.peer}-{self.where}-{self.kind}".replace(" ", "_")

    @property
    def bucket(self) -> int:
        return BUCKETS[self.peer].get(self.where, -1)

    @property
    def of_lane(self) -> bool:
        return self.peer.startswith("rollout")


@dataclass(frozen=True)
class Row:
    """What a cell did. seconds: of the update that failed; first: the first exception as the message has it."""

    cell: Cell
    seconds: float
    first: str
    after: str
    retry: str
    drop: str


def cells() -> Iterator[Cell]:
    """Every cell: 72 before the vote, 6 more for a rank that dies while lanes pull from it, 6 while a rank makes its digests, 12
    while an engine applies."""
    for peer in PEERS:
        for where in ("first", "middle", "last"):
            for kind in KINDS:
                yield Cell(peer, where, kind, "stage" if peer.startswith("rollout") else "publish")
    for peer in PEERS[:RANKS]:
        for where in ("first", "middle", "last"):
            yield Cell(peer, where, "owner dies", "stage")
        for kind in ("raise", "die", "stall"):
            yield Cell(peer, "digest", kind, "publish")
    for peer in PEERS[RANKS:]:
        for kind in KINDS:
            yield Cell(peer, "half-way", kind, "apply")


def sample() -> list[Cell]:
    """24 cells that cover every pair of peer, bucket and fault, of the second rank and the lanes, and the deaths of a rank: of
    either while it writes and while lanes pull."""
    chosen = []
    for cell in cells():
        if cell.phase == "apply":
            taken = (cell.peer, cell.kind) in {("rollout-0", "die"), ("rollout-1", "stall")}
        elif cell.where == "digest":
            taken = (cell.peer, cell.kind) == (OTHER_RANK, "die")
        else:
            number = PEERS.index(cell.peer) + (KINDS.index(cell.kind) if cell.kind in KINDS else 0)
            taken = ("last", "first", "middle")[number % 3] == cell.where
            taken &= cell.peer != FIRST_RANK or cell.kind in ("die", "owner dies")
        chosen += [cell] if taken else []
    return chosen


class Matrix:
    """The four peers on one transport, and the driver's plane over them."""

    def __init__(self, transport: str) -> None:
        self.transport, self.runner = transport, asyncio.Runner()
        make: Any = Here if transport == "inproc" else Worker
        if transport != "inproc":
            multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
        self.ranks = [make(f"policy rank {r}", RankRole, transport, r) for r in range(RANKS)]
        self.lanes = [make(f"rollout-{i}", LaneRole, transport, f"rollout-{i}") for i in range(LANES)]
        self.pids: set[int] = set()
        self.helpers: set[psutil.Process] = set()
        self.version = 0
        canary = Canary(
            lambda probe: expected_logprobs(self.version, probe), [list(PROMPT)], self._config("raise"), dtype="float32"
        )
        self.plane = WeightPlane(GroupPublisher(self.ranks, stop_timeout_s=0.1), self.lanes, self._config("raise"), canary=canary)
        self.call(self._begin())

    def call(self, work: Any) -> Any:
        return self.runner.run(asyncio.wait_for(work, 60))

    def run(self, cell: Cell) -> Row:
        return self.call(self._run(cell))  # type: ignore[no-any-return]

    def close(self) -> set[int]:
        """End everything; the processes that were ever started."""
        self.call(self.plane.close())
        for peer in (*self.ranks, *self.lanes):
            peer.end()
        self.runner.close()
        _, left = psutil.wait_procs(self.helpers, timeout=5)
        assert not left, f"processes are left: {left}"
        return self.pids

    # ---- one cell

    async def _run(self, cell: Cell) -> Row:
        seconds, first = await self._raises(cell)
        after = await self._after_a_failure(cell)
        await self._heal(cell)
        retry = await self._retries(cell)
        drop = await self._drops(cell) if cell.of_lane else await self._drops_nobody(cell)
        return Row(cell, seconds, first, after, retry, drop)

    async def _raises(self, cell: Cell) -> tuple[float, str]:
        """on_failure=raise: ends in time and names peer, bucket and first exception; the version stays the old one."""
        before = self.version
        await self._arm(cell, "raise")
        self.writes = [await lane.writes() for lane in self.lanes]
        began = time.perf_counter()
        try:
            await self._sync()
        except WeightSyncError as exc:
            seconds, text = time.perf_counter() - began, str(exc)
        else:
            raise AssertionError(f"{cell}: the update went through")
        limit = (STALL_S if cell.kind == "stall" else 0.0) + SLACK_S
        assert seconds < limit, f"{cell} took {seconds:.2f} s"
        assert cell.peer in text, f"{cell}: the peer is not named:\n{text}"
        # the bucket at which either lane first found the rank dead; every other fault is at one bucket of one peer
        buckets = set(BUCKETS[cell.peer].values()) if cell.kind == "owner dies" else {cell.bucket}
        if cell.bucket >= 0:
            named = {int(number) for number in re.findall(r"bucket (\d+)\b", text)}
            assert named & buckets, f"{cell}: the bucket is not named:\n{text}"
        found = re.search(FIRST[cell.phase, cell.kind], text)
        assert found, f"{cell}: the first exception is not named:\n{text}"
        failure = self.plane.last_failure
        assert failure is not None and (cell.bucket < 0 or failure.bucket in buckets), (cell, failure and failure.bucket)
        assert self.plane.version == before, "a version was advertised that not everybody has, or that was not proved"
        return seconds, found.group(0)

    async def _after_a_failure(self, cell: Cell) -> str:
        """Who serves what, and that nothing is left: no pull, no slot that is held, no memory of the dead."""
        dead = {peer.pid for peer in (*self.ranks, *self.lanes) if not _alive(peer)}
        serving = []
        for lane, writes in zip(self.lanes, self.writes, strict=True):
            failed = lane.name == cell.peer
            if not _alive(lane):
                serving.append(f"{lane.name} dead")
                continue
            if cell.phase == "apply" and failed:
                try:
                    await lane.ask()
                except WeightSyncError as exc:
                    assert "invalid" in exc.message, exc
                else:
                    raise AssertionError(f"{cell}: an invalid lane generates")
                serving.append(f"{lane.name} refuses")
                continue
            wanted = self.version if cell.phase == "apply" else self.plane.version
            assert await lane.ask() == (expected_answer(wanted), wanted), f"{cell}: {lane.name} does not serve version {wanted}"
            if cell.phase != "apply":
                assert await lane.writes() == writes, f"{cell}: the engine of {lane.name} was touched before the vote"
            serving.append(f"{lane.name} {'new' if cell.phase == 'apply' else 'old'}")
        await self._disarm()
        for lane in self.lanes:
            if _alive(lane):
                report = await lane.report()
                assert report["pulls"] == 0 and not report["staged"], (cell, lane.name, report)
                assert report["serve"] == 0 and report["pull"] <= 1, (cell, lane.name, report)
                assert self.transport != "nixl" or not report["gone"], (cell, lane.name, report)
        for rank in self.ranks:
            if _alive(rank):
                report = await rank.report()
                assert report["held"] == 0 and report["serve"] <= report["slots"] <= 2, (cell, rank.name, report)
                assert report["pull"] == 0 and not report["gone"], (cell, rank.name, report)
        files = own_files({pid for pid in self.pids if pid})
        assert not dead & files.keys(), f"{cell}: memory of the dead is left: {files}"
        limits = {peer.pid: 2 if peer in self.ranks else 1 for peer in (*self.ranks, *self.lanes)}
        assert all(count <= limits.get(pid, 0) for pid, count in files.items()), (cell, files)
        return ", ".join(serving)

    async def _heal(self, cell: Cell) -> None:
        """What broke is started again, and the next update brings everybody to it."""
        for rank in self.ranks:
            if not _alive(rank) or (cell.kind == "owner dies" and rank.name == cell.peer):
                rank.start_process()
                self._remember()
        for lane in self.lanes:
            if not _alive(lane) or (cell.phase == "apply" and lane.name == cell.peer):
                await lane.rebuild()
                self._remember()
        self.plane.lanes = list(self.lanes)
        await self._works("raise")
        for peer in (*self.ranks, *self.lanes):
            report = await peer.report()
            assert not report["gone"], f"{cell}: {peer.name} still maps memory that is gone, or of a dead rank"
            if self.transport == "nixl":
                assert report["serve"] + report["pull"] > 0, f"{cell}: {peer.name} says that nothing is mapped"

    async def _works(self, policy: str) -> None:
        await self._train(policy)
        await self._sync()
        await self._all_serve(self.lanes)

    async def _retries(self, cell: Cell) -> str:
        """on_failure=rebuild_and_retry heals to exactly the trainer's weights what a retry can heal, and raises for the rest."""
        await self._arm(cell, "rebuild_and_retry")
        gone = ("stall",) if self.transport == "inproc" else ("stall", "die", "owner dies")
        lasting = not cell.of_lane and cell.kind in gone  # a policy rank is not rebuilt: the run resumes
        lasting &= (cell.where, cell.kind) != ("digest", "stall")  # a digest that hangs is made anew
        try:
            await self._sync()
        except WeightSyncError as exc:
            assert lasting, f"{cell}: rebuild_and_retry did not heal:\n{exc}"
            await self._disarm()
            await self._heal(cell)
            return "raises"
        assert not lasting, f"{cell}: healed unexpectedly"
        assert self.plane.last_failure is not None
        self._remember()
        await self._all_serve(self.lanes)
        await self._disarm()
        return "heals"

    async def _drops(self, cell: Cell) -> str:
        """on_failure=drop_lane goes on with the rest, and what was dropped does not generate."""
        await self._arm(cell, "drop_lane")
        dropped = next(lane for lane in self.lanes if lane.name == cell.peer)
        rest = [lane for lane in self.lanes if lane is not dropped]
        await self._sync()
        assert self.plane.lanes == rest
        await self._all_serve(rest)
        if _alive(dropped):
            try:
                await dropped.ask()
            except WeightSyncError:
                pass
            else:
                raise AssertionError(f"{cell}: a dropped lane generates")
        await self._disarm()
        await dropped.rebuild()
        self._remember()
        self.plane.lanes = list(self.lanes)
        await self._works("raise")
        return "goes on"

    async def _drops_nobody(self, cell: Cell) -> str:
        """on_failure=drop_lane blames no lane for what a policy rank did: the update fails, and every lane stays and serves."""
        await self._arm(cell, "drop_lane")
        before = self.plane.version
        try:
            await self._sync()
        except WeightSyncError as exc:
            assert cell.peer in str(exc), f"{cell}: the peer is not named:\n{exc}"
        else:
            raise AssertionError(f"{cell}: the update went through")
        assert self.plane.lanes == self.lanes, f"{cell}: a lane was dropped"
        for lane in self.lanes:
            assert await lane.ask() == (expected_answer(before), before)
        await self._disarm()
        await self._heal(cell)
        return "raises"

    # ---- steps

    async def _begin(self) -> None:
        for lane in self.lanes:
            await lane.start()
        self._remember()
        await self._works("raise")

    async def _sync(self) -> None:
        await self.plane.sync(self.version)

    async def _train(self, policy: str) -> None:
        """The policy moves on: the weights of the next version are nothing like those before."""
        self.version += 1
        self.plane.config = self._config(policy)
        for rank in self.ranks:
            await rank.train(self.version)

    async def _arm(self, cell: Cell, policy: str) -> None:
        await self._train(policy)
        fault = Fault(cell.kind, cell.phase, cell.bucket)
        peer = next(p for p in (*self.ranks, *self.lanes) if p.name == cell.peer)
        if cell.kind == "owner dies":  # the first lane sees it: it pulls, and the rank is gone
            fault, peer = replace(fault, pid=peer.pid), self.lanes[0]
        await peer.arm(fault)

    async def _disarm(self) -> None:
        for peer in (*self.ranks, *self.lanes):
            if _alive(peer):
                await peer.disarm()

    async def _all_serve(self, lanes: list[Any]) -> None:
        for lane in lanes:
            assert await lane.ask() == (expected_answer(self.version), self.version)
            found, wanted = await lane.logprobs([list(PROMPT)]), expected_logprobs(self.version, [list(PROMPT)])
            assert found == wanted, "not exactly the trainer's weights"

    def _config(self, policy: str) -> WeightsConfig:
        return WeightsConfig(
            on_failure=policy, stage_timeout_s=LONG_S, apply_timeout_s=LONG_S, abort_timeout_s=1.0, rebuild_timeout_s=LONG_S,
            canary_every=1,
        )  # fmt: skip

    def _remember(self) -> None:
        self.pids |= {peer.pid for peer in (*self.ranks, *self.lanes) if peer.pid}
        for peer in (*self.ranks, *self.lanes):
            if peer.pid and _alive(peer):
                self.helpers |= set(psutil.Process(peer.pid).children(recursive=True))


GONE = "its process died|the process that served it died|the peer disconnected"
"""What a lane says first, by where in a pull the death meets it."""

FIRST = {
    ("publish", "raise"): "RuntimeError: injected fault",
    ("publish", "die"): rf"ended by signal 9|SystemExit: injected death|{GONE}",
    ("publish", "stall"): r"not (written|digested) within \S+ s",
    ("publish", "corrupt"): "arrived damaged",
    ("publish", "wrong epoch"): "arrived damaged",
    ("publish", "partial"): r"lacks the digest of bucket \d of policy rank \d",
    ("stage", "raise"): "RuntimeError: injected fault",
    ("stage", "die"): r"ended by signal 9|SystemExit: injected death",
    ("stage", "stall"): r"not staged within \S+ s",
    ("stage", "corrupt"): "arrived damaged",
    ("stage", "wrong epoch"): r"epoch \d+ lacks",
    ("stage", "partial"): "arrived damaged",
    ("stage", "owner dies"): rf"ended by signal 9|is not in this process|{GONE}",
    ("apply", "raise"): "RuntimeError: injected fault",
    ("apply", "die"): r"ended by signal 9|its task was cancelled",
    ("apply", "stall"): r"not applied within \S+ s",
    ("apply", "corrupt"): "does not compute the policy's function",
    ("apply", "wrong epoch"): r"says version \d+ after applying \d+",
    ("apply", "partial"): "does not compute the policy's function",
}


def _alive(peer: Any) -> bool:
    return not isinstance(peer, Worker) or peer.process.is_alive()
