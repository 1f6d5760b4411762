"""Any order of publications, deliveries, faults, aborts and rebuilds, in virtual time: what the plane promises always holds.

The invariants: a version is advertised only when every lane that is left has every byte of it; a lane serves the bytes of one
publication or refuses; every session ends in bounded time; an abort after a commit does nothing; late acknowledgements are
ignored; a publication that is held never changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from weight_toys import ToyEngine, Weights, trained

from posttrain.config.schema import WeightsConfig
from posttrain.errors import RunAborted, WeightSyncError
from posttrain.loop.sim.virtual_time import VirtualLoop
from posttrain.policy.sharding import chunk, fsdp_shards
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.plane import Update, WeightPlane
from posttrain.weights.progress import WORD
from posttrain.weights.publication import LocalWeight, PublicationPool
from posttrain.weights.publisher import GroupPublisher, LocalPublisher
from posttrain.weights.receiver import Receiver

LANES, RANKS, BUCKETS = 3, 2, 6
CONFIG = WeightsConfig(stage_timeout_s=10.0, apply_timeout_s=10.0, abort_timeout_s=1.0, rebuild_timeout_s=5.0)
STALL = 1000.0
PUBLISH_S = 2 * (CONFIG.stage_timeout_s + CONFIG.abort_timeout_s)
ATTEMPT_S = CONFIG.stage_timeout_s + 4 * CONFIG.abort_timeout_s
DELIVER_S = (
    LANES * 2 * ATTEMPT_S + CONFIG.apply_timeout_s + LANES * (CONFIG.rebuild_timeout_s + CONFIG.apply_timeout_s + ATTEMPT_S)
)

STAGE_FAULTS = ("raise", "stall", "slow", "corrupt", "wrong epoch")
APPLY_FAULTS = ("apply raises", "apply stalls", "apply dies")
faults = st.dictionaries(  # of at most two lanes
    st.integers(0, LANES - 1), st.tuples(st.sampled_from(STAGE_FAULTS + APPLY_FAULTS), st.integers(0, BUCKETS - 1)), max_size=2
)
policies = st.sampled_from(["raise", "raise", "rebuild_and_retry", "drop_lane"])


class FaultyTransport(InprocTransport):
    """`fault`: (kind, bucket) of the lane that owns this end, shared by all ends that it ever has."""

    lane: FaultyLane

    def fresh(self) -> FaultyTransport:
        end = FaultyTransport()
        end.lane = self.lane
        return end

    def pull(self, handle, pieces, into) -> None:
        kind = None if pieces[0].name == WORD else self.lane.fires("raise", "corrupt")
        if kind == "raise":
            raise RuntimeError("injected fault")
        super().pull(handle, pieces, into)
        if kind == "corrupt":
            into.buffer[pieces[0].target] ^= 1


class FaultyLane(Receiver):
    """The real receiver, with one fault at a time."""

    def __init__(self, name: str) -> None:
        self.fault: tuple[str, int] | None = None
        end = FaultyTransport()
        end.lane = self
        super().__init__(ToyEngine(), end, name=name, grace_s=0.5)
        self.engine.on_write = self._on_write  # type: ignore[attr-defined]
        stage = self.lane.stage

        def late(epoch: int, bucket: int) -> bool:
            # by the bucket that is acknowledged: the transport may be at a later one already
            wrong = self.fault == ("wrong epoch", bucket)
            if wrong:
                self.fault = None
            return stage(epoch - 1 if wrong else epoch, bucket)

        self.lane.stage = late  # type: ignore[method-assign]

    def fires(self, *kinds: str) -> str | None:
        if self.fault is None or self.fault[0] not in kinds or self.fault[1] != self.at:
            return None
        kind, self.fault = self.fault[0], None
        return kind

    def _on_write(self, position: int, name: str) -> Any:
        if position != 2 or self.fault is None or self.fault[0] not in APPLY_FAULTS:
            return None
        kind, self.fault = self.fault[0], None
        if kind == "apply raises":
            raise RuntimeError("injected fault")
        if kind == "apply dies":
            raise asyncio.CancelledError
        return asyncio.sleep(STALL)


class PlaneMachine(RuleBasedStateMachine):
    """`snapshots`: what was published, by version."""

    @initialize()
    def start(self) -> None:
        self.loop = VirtualLoop(takes=self._takes)
        self.weights: Weights = {name: tensor.clone() for name, tensor in trained(0).items()}
        self.steps = 0
        self.version = 0
        self.snapshots: dict[int, Weights] = {}
        self.waiting: list[Update] = []
        pools = [
            PublicationPool(InprocTransport(), bucket_bytes=1024, shards=fsdp_shards(1, RANKS), rank=rank)
            for rank in range(RANKS)
        ]
        self.pools = pools
        ranks = [LocalPublisher(pool, self._source(rank), timeout_s=CONFIG.stage_timeout_s) for rank, pool in enumerate(pools)]
        self.all_lanes = [FaultyLane(f"rollout-{i}") for i in range(LANES)]
        self.plane = WeightPlane(GroupPublisher(ranks, stop_timeout_s=1.0), self.all_lanes, CONFIG)
        self.advertised: list[int] = []
        self.current: FaultyLane | None = None

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.run(self.plane.close(), 10)
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()

    def _source(self, rank: int):
        def local():
            for name, tensor in self.weights.items():
                start, stop = chunk(tuple(tensor.shape), RANKS, rank)
                yield LocalWeight(name, tuple(tensor.shape), start, tensor.reshape(-1)[start:stop])

        return local

    def _takes(self, name: str) -> float:
        if name != "_pull":
            return 0.01
        for lane in self.all_lanes:  # whoever starts a pull now is at the bucket of its fault
            if lane._thread is None or lane._thread.done():
                if lane.fires("stall"):
                    return STALL
                if lane.fires("slow"):
                    return CONFIG.stage_timeout_s / 3
        return 0.1

    def run(self, work: Any, bound: float) -> Any:
        """Every session ends in bounded virtual time."""
        began = self.loop.now
        try:
            return self.loop.run_until_complete(work)
        finally:
            assert self.loop.now - began <= bound, f"{self.loop.now - began:.0f} s, at most {bound:.0f} s are allowed"

    def arm(self, chosen: dict[int, tuple[str, int]]) -> None:
        for number, lane in enumerate(self.all_lanes):
            lane.fault = chosen.get(number)

    # ---- what may happen

    def train(self) -> None:
        """The weights change in place, whatever lanes are pulling."""
        self.steps += 1
        for name, tensor in trained(self.steps).items():
            self.weights[name].copy_(tensor)

    @rule()
    def publish(self) -> None:
        self.run(self._publish(), PUBLISH_S)

    async def _publish(self) -> None:
        self.version += 1
        self.snapshots[self.version] = {name: tensor.clone() for name, tensor in self.weights.items()}
        self.waiting.append(await self.plane.publish(self.version))

    @rule(chosen=faults, policy=policies)
    def update_while_training_waits(self, chosen: dict[int, tuple[str, int]], policy: str) -> None:
        self.update(chosen, policy, 0)

    @rule(chosen=faults, policy=policies, meanwhile=st.integers(1, 2))
    def update_while_training_goes_on(self, chosen: dict[int, tuple[str, int]], policy: str, meanwhile: int) -> None:
        self.update(chosen, policy, meanwhile)

    def update(self, chosen: dict[int, tuple[str, int]], policy: str, meanwhile: int) -> None:
        """A new publication to all lanes, healed ones too, while the trainer goes on and publishes."""
        for index, lane in enumerate(self.all_lanes):
            if lane.lane.state == "invalid" or lane not in self.plane.lanes:
                self.rebuild(index)
        self.train()
        self.publish()
        self._deliver(self.waiting[-1], chosen, policy, meanwhile)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 3))
    def deliver_late(self, which: int) -> None:
        """An older publication: it may be replaced, or older than what lanes have."""
        self._deliver(self.waiting[max(0, len(self.waiting) - 1 - which)], {}, "raise", 0)

    def _deliver(self, update: Update, chosen: dict[int, tuple[str, int]], policy: str, meanwhile: int) -> None:
        self.plane.config = dataclasses.replace(CONFIG, on_failure=policy)
        self.arm(chosen)
        version, before, lanes = update.publication.version, self.plane.version, list(self.plane.lanes)
        excused = bool(chosen) or any(lane.lane.state == "invalid" for lane in lanes)
        excused |= any(lane.lane.version is not None and version <= lane.lane.version for lane in lanes)

        async def deliver() -> None:
            delivery = asyncio.ensure_future(self.plane.deliver(update))
            for _ in range(meanwhile):
                await asyncio.sleep(0.15)
                self.train()
                await self._publish()
            await delivery

        try:
            self.run(deliver(), DELIVER_S + PUBLISH_S)
        except (WeightSyncError, RunAborted) as exc:
            assert excused or "is not in the pool" in str(exc), f"it failed without a fault: {exc}"
            assert self.plane.version == before, "a failed update was advertised"
            assert policy != "rebuild_and_retry" or len(chosen) != 1, f"one fault was not healed: {chosen}: {exc}"
        else:
            assert self.plane.version == version
            assert policy != "raise" or all(kind == "slow" for kind, _ in chosen.values()), "a fault went unnoticed"
            for lane in self.plane.lanes:
                assert lane.engine.version == version and self._has(lane, version), "advertised, but a lane does not have it"
        self.arm({})

    @rule(index=st.integers(0, LANES - 1))
    def abort(self, index: int) -> None:
        """Outside of an update an abort changes nothing; what a lane pulled ahead, it will pull again."""
        lane = self.all_lanes[index]
        ahead, was = lane.lane.under_way, (lane.lane.state, lane.lane.version, lane.engine.version, lane.engine.invalid)
        self.run(lane.abort("test"), 1.0)
        wanted = ("aborted", *was[1:]) if ahead else was
        assert (lane.lane.state, lane.lane.version, lane.engine.version, lane.engine.invalid) == wanted

    @rule(index=st.integers(0, LANES - 1), late=st.integers(0, 3), bucket=st.integers(0, BUCKETS - 1))
    def acknowledge_late(self, index: int, late: int, bucket: int) -> None:
        lane = self.all_lanes[index].lane
        was, late = lane.state, late + lane.under_way
        assert not lane.stage(lane.epoch - late, bucket), "an acknowledgement of a closed epoch counted"
        assert lane.state == was

    @rule(index=st.integers(0, LANES - 1))
    def rebuild(self, index: int) -> None:
        """As an operator does it; the lane takes part again."""
        lane = self.all_lanes[index]
        self.run(lane.rebuild(), CONFIG.rebuild_timeout_s)
        if lane not in self.plane.lanes:
            self.plane.lanes.append(lane)

    # ---- what always holds

    def _has(self, lane: FaultyLane, version: int) -> bool:
        wanted = self.snapshots[version]
        return lane.engine.weights.keys() == wanted.keys() and all(torch.equal(lane.engine.weights[n], wanted[n]) for n in wanted)

    @invariant()
    def a_lane_serves_one_publication_or_refuses(self) -> None:
        if not hasattr(self, "all_lanes"):
            return
        for lane in self.all_lanes:
            answer = None
            with contextlib.suppress(WeightSyncError):
                answer = self.run(lane.engine.ask([1, 2]), 0.1)
            if answer is not None:
                assert self._has(lane, answer[1]), f"{lane.name} says version {answer[1]} and serves something else"
            else:
                assert lane.engine.invalid or lane.engine.version is None

    @invariant()
    def nothing_is_held_between_updates(self) -> None:
        if hasattr(self, "pools"):
            assert all(slot.holders == 0 for pool in self.pools for slot in pool._slots)

    @invariant()
    def versions_advance(self) -> None:
        if hasattr(self, "plane") and self.plane.version is not None:
            if not self.advertised or self.advertised[-1] != self.plane.version:
                self.advertised.append(self.plane.version)
            assert self.advertised == sorted(set(self.advertised))


TestPlaneMachine = PlaneMachine.TestCase
TestPlaneMachine.settings = settings(derandomize=True, max_examples=50, stateful_step_count=12, deadline=None)
