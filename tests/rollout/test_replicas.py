"""How requests are dealt to replicas; the replicas themselves run in tests/integration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.errors import RunInterrupted
from posttrain.policy.partition import deal
from posttrain.rollout.engine import Generates
from posttrain.rollout.replicas import GONE, LOST, RemoteLane, Replicas, shares
from posttrain.types import Completion, Request, Sampling


def requests(count: int, n: int = 2) -> list[Request]:
    return [Request(str(i), [1], n, 0, Sampling(4)) for i in range(count)]


@given(count=st.integers(0, 20), replicas=st.integers(1, 5))
def test_without_load_the_share_of_a_replica_is_its_data_cell(count: int, replicas: int) -> None:
    asked = requests(count)
    assert shares(asked, [0] * replicas) == [[asked[i] for i in cell] for cell in deal(count, replicas)]


@given(count=st.integers(0, 20), loads=st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_the_least_loaded_gets_the_next(count: int, loads: list[int]) -> None:
    asked = requests(count)
    dealt = shares(asked, loads)
    assert [request for part in dealt for request in part] == asked
    after = [load + 2 * len(part) for load, part in zip(loads, dealt, strict=True)]
    touched = [total for total, part in zip(after, dealt, strict=True) if part]
    assert all(total - 2 <= min(after) for total in touched)


def test_one_request_goes_to_the_idle_replica() -> None:
    (asked,) = requests(1)
    assert shares([asked], [3, 0, 1]) == [[], [asked], []]


class Role:
    """A `Remote` whose engine answers, or fails with an error of this code after `good` completions."""

    def __init__(self, name: str, fails: str = "", good: int = 0) -> None:
        self.name, self.fails, self.good, self.ended, self.asked = name, fails, good, False, list[str]()
        self.given: list[tuple[str, int]] = []

    async def stream(self, method: str, asked: list[Request]) -> AsyncIterator[Completion]:
        for request in asked:
            self.asked.append(request.id)
            for index in request.indices:
                await asyncio.sleep(0)
                if self.fails and not self.good:
                    raise RunInterrupted(f"{self.name} died", code=self.fails)
                self.good -= 1
                self.given.append((request.id, index))
                yield Completion(request.id, index, [1], [0.0], [3], "stop")

    async def call(self, method: str, *args: object, timeout: float) -> None:
        if self.fails:
            raise RunInterrupted(f"{self.name} died", code=self.fails)

    def kill(self) -> None:
        self.ended = True


def replicas(*roles: Role, may_lose: bool = True) -> Replicas:
    lanes = [RemoteLane(role, 1.0, lambda: None) for role in roles]  # type: ignore[arg-type]
    return Replicas(lanes, start_timeout_s=1.0, may_lose=may_lose, say=lambda line: None)


async def everything(generator: Generates, asked: list[Request]) -> list[tuple[str, int]]:
    return sorted([(done.request_id, done.index) async for done in generator.generate(asked)])


@pytest.mark.parametrize("code", LOST)
def test_what_a_lost_replica_owes_comes_from_the_others_and_nobody_owes_anything_then(code: str) -> None:
    good, bad = Role("rollout-0"), Role("rollout-1", fails=code, good=1)
    generator, asked = replicas(good, bad), requests(6)
    assert asyncio.run(everything(generator, asked)) == [(str(i), n) for i in range(6) for n in range(2)]
    assert not any(generator._load.values()) and bad.ended == (code in GONE)
    bad.good = 99
    asyncio.run(everything(generator, requests(2)))
    assert bad.asked == ["3"]  # it is not asked again before an update has replaced it


def test_what_a_lost_replica_had_delivered_is_not_sampled_again() -> None:
    good, bad = Role("rollout-0"), Role("rollout-1", fails="role-died", good=1)
    asyncio.run(everything(replicas(good, bad), requests(2)))
    assert bad.given == [("1", 0)] and good.given == [("0", 0), ("0", 1), ("1", 1)]


def test_a_replica_without_weights_is_not_asked_until_they_are_there() -> None:
    first, second = Role("rollout-0"), Role("rollout-1")
    generator = replicas(first, second)
    lane = generator.lanes[1]

    async def rebuilt() -> list[str]:
        await lane.rebuild()
        await everything(generator, requests(2))
        before = list(second.asked)
        await lane.commit(timeout=1.0)
        await everything(generator, requests(2))
        return before

    assert asyncio.run(rebuilt()) == [] and second.asked == ["1"]


def test_an_abort_bears_a_replica_that_has_just_died() -> None:
    asyncio.run(replicas(Role("rollout-0"), Role("rollout-1", fails="role-died")).abort("7"))
    with pytest.raises(RunInterrupted, match="out of memory"):
        asyncio.run(replicas(Role("out of memory", fails="oom")).abort("7"))


def test_what_begins_on_a_replica_goes_on_there_and_elsewhere_when_it_is_gone() -> None:
    first, second = Role("rollout-0"), Role("rollout-1", good=3)
    generator = replicas(first, second)
    _, one = generator.each()

    async def turns() -> None:
        for turn in range(4):
            assert await everything(one, [Request(f"turn {turn}", [1], 1, 0, Sampling(4))]) == [(f"turn {turn}", 0)]
            second.fails = "role-died"  # with one more good answer than it has given

    asyncio.run(turns())
    assert second.asked == [f"turn {turn}" for turn in range(4)] and first.asked == ["turn 3"]
    assert not any(generator._load.values())
