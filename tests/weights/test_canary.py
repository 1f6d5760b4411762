"""The canary in the plane: whom it is asked of, and what follows when one lane of several, or every lane, does not pass it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from weight_toys import TOKENS, ToyEngine, logprobs, run, says, trained

from posttrain.config.schema import WeightsConfig
from posttrain.errors import WeightSyncError
from posttrain.weights.canary import Canary, make_probe
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.plane import WeightPlane

PROMPT = (3, 1, 4)


class Rig:
    """A trainer, its engines, and who was asked what."""

    def __init__(self, lanes: int, **config: Any) -> None:
        self.version, self.asked = 0, list[tuple[str, int]]()
        self.engines = [ToyEngine() for _ in range(lanes)]
        settings = WeightsConfig(**config)
        canary = Canary(lambda probe: logprobs(trained(self.version), probe), make_probe(TOKENS), settings, dtype="float32")
        self.plane = WeightPlane.local(
            self.engines, InprocTransport(), settings, lambda: iter(trained(self.version).items()), canary=canary
        )
        check = canary.check

        async def listen(lane: Any, expected: Any) -> dict[str, float]:
            self.asked.append((lane.name, lane.engine.version))
            assert self.plane.version != lane.engine.version, "advertised before it is proved"
            return await check(lane, expected)

        canary.check = listen  # type: ignore[method-assign]

    def leaves_out(self, lane: int, *, times: int) -> None:
        """The engine of this lane takes no notice of a layer: the bytes arrive, their meaning is another."""

        def on_write(position: int, name: str) -> str | None:
            nonlocal times
            if position != 2 or times == 0:
                return None
            times -= 1
            return "leave out"

        self.engines[lane].on_write = on_write

    def fails(self, lane: int) -> None:
        """The engine of this lane fails once while it takes weights."""

        def on_write(position: int, name: str) -> None:
            self.engines[lane].on_write = lambda position, name: None
            raise RuntimeError("injected fault")

        self.engines[lane].on_write = on_write

    async def sync(self, version: int, *, meanwhile: int | None = None) -> dict[str, float]:
        """meanwhile: the version that the trainer has when this one is delivered."""
        self.version = version
        update = await self.plane.publish(version)
        await asyncio.to_thread(self.plane.publisher.pool.settle)  # type: ignore[attr-defined]
        self.version = meanwhile or version
        return await self.plane.deliver(update)

    async def serves(self, lane: int, version: int) -> bool:
        return await self.engines[lane].ask(PROMPT) == (says(trained(version), PROMPT), version)

    async def refuses(self, lane: int) -> bool:
        try:
            await self.engines[lane].ask(PROMPT)
        except WeightSyncError as exc:
            return "invalid" in exc.message
        return False


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_engine_that_is_rebuilt_between_canaries_is_asked_at_once(lanes: int) -> None:
    """Also when the trainer has moved on since it published."""
    rig = Rig(lanes, canary_every=50, on_failure="rebuild_and_retry")

    async def scenario() -> None:
        await rig.sync(1)
        rig.asked.clear()
        await rig.sync(2)
        assert rig.asked == [], "nothing was due"
        rig.fails(0)
        metrics = await rig.sync(3, meanwhile=4)
        assert ("rollout-0", 3) in rig.asked and rig.plane.lanes[0].proved and "weights/canary_max" in metrics
        assert rig.engines[0].starts == 1 and await rig.serves(0, 3)

    run(scenario())
    run(rig.plane.close())


def test_an_engine_that_is_rebuilt_and_wrong_does_not_serve() -> None:
    rig = Rig(1, canary_every=50, on_failure="rebuild_and_retry")

    async def scenario() -> None:
        await rig.sync(1)
        rig.fails(0)
        start = rig.engines[0].start

        async def wrong() -> None:
            await start()
            rig.leaves_out(0, times=1)

        rig.engines[0].start = wrong  # type: ignore[method-assign]
        with pytest.raises(WeightSyncError, match="does not compute the policy's function"):
            await rig.sync(2)
        assert rig.plane.version == 1 and await rig.refuses(0)

    run(scenario())
    run(rig.plane.close())


def test_one_lane_that_fails_its_canary_is_rebuilt_and_asked_again() -> None:
    rig = Rig(3, on_failure="rebuild_and_retry", canary_every=1)
    rig.leaves_out(1, times=1)

    async def scenario() -> None:
        await rig.sync(1, meanwhile=2)
        assert [engine.starts for engine in rig.engines] == [0, 1, 0]
        assert rig.asked == [("rollout-0", 1), ("rollout-1", 1), ("rollout-2", 1), ("rollout-1", 1)]
        assert rig.plane.version == 1 and all([await rig.serves(lane, 1) for lane in range(3)])
        failure = rig.plane.last_failure
        assert failure is not None and (failure.peer, failure.phase) == ("rollout-1", "canary")
        await rig.sync(2)

    run(scenario())
    run(rig.plane.close())


def test_a_lane_that_fails_its_canary_again_ends_the_run() -> None:
    rig = Rig(2, on_failure="rebuild_and_retry")
    rig.leaves_out(1, times=2)

    async def scenario() -> None:
        with pytest.raises(WeightSyncError, match="rollout-1.*does not compute the policy's function"):
            await rig.sync(1)
        assert rig.engines[1].starts == 1 and await rig.refuses(1) and await rig.serves(0, 1)
        assert rig.plane.version is None, "advertised, and a lane has not got it"

    run(scenario())
    run(rig.plane.close())


def test_one_lane_that_fails_its_canary_is_dropped() -> None:
    rig = Rig(2, on_failure="drop_lane")
    rig.leaves_out(0, times=1)

    async def scenario() -> None:
        await rig.sync(1)
        assert [lane.name for lane in rig.plane.lanes] == ["rollout-1"] and rig.plane.version == 1
        assert await rig.refuses(0) and await rig.serves(1, 1)

    run(scenario())
    run(rig.plane.close())


@pytest.mark.parametrize("policy", ["raise", "rebuild_and_retry", "drop_lane"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_canary_that_no_lane_passes_is_nobodys_fault_alone(policy: str, lanes: int) -> None:
    """A tied head that keeps its old weights: every engine does that, a new one too."""
    rig = Rig(lanes, on_failure=policy)

    async def scenario() -> None:
        for lane in range(lanes):
            rig.leaves_out(lane, times=1)
        with pytest.raises(WeightSyncError, match="rollout-0.*does not compute the policy's function") as caught:
            await rig.sync(1)
        assert caught.value.code == "canary"
        assert [engine.starts for engine in rig.engines] == [0] * lanes and len(rig.plane.lanes) == lanes
        assert rig.plane.version is None and all([await rig.refuses(lane) for lane in range(lanes)])

    run(scenario())
    run(rig.plane.close())
