"""The loop in simulated time: no schedule loses, repeats or ages a draw, and the simulator finds races that are put back in."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_mutations import MUTATIONS

from posttrain.loop.sim import run as simulator
from posttrain.loop.sim.life import Life, Run
from posttrain.loop.sim.run import simulate
from posttrain.loop.sim.trace import Trace
from posttrain.loop.sim.virtual_time import Killed, Stuck, VirtualLoop
from posttrain.loop.sim.world import SIBLINGS, Faults, World

SEEDS = 300
MOST = 300
"""Seeds within which a mutation must be found."""


@pytest.fixture(autouse=True)
def forget():
    """An undisturbed run that a mutation made is nobody else's."""
    simulator._CALM.clear()
    yield
    simulator._CALM.clear()


@pytest.mark.parametrize("part", range(10))
def test_no_schedule_breaks_a_law(part):
    for seed in range(part * SEEDS // 10, (part + 1) * SEEDS // 10):
        found = simulate(World.of(seed))
        assert not found.problem, f"posttrain sim --seed {seed}: {found.problem}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_race_that_is_put_back_is_found(name):
    where, mutated = MUTATIONS[name]
    with mutated():
        assert any(simulate(World.of(seed, **where)).problem for seed in range(MOST)), f"{name} survived {MOST} seeds"


def test_a_seed_replays_to_the_letter():
    seed = next(s for s in range(100) if len(World.of(s).faults.kills) > 1)
    first, second = (simulate(World.of(seed), trace=True) for _ in range(2))
    assert first.lives > 1 and str(first.trace) == str(second.trace)
    assert (first.turns, first.seconds, first.causes) == (second.turns, second.seconds, second.causes)


def test_schedules_see_every_fault_and_every_way_back():
    """What the seeds come across; a law says nothing of what never happens."""
    ways: set[str] = set()
    seen: set[str] = set()
    signs = ("aborted", "dropped after 3 tries: timeout", "update fails", "dies", "validated", "resumes from step")
    for seed in range(0, 80 * SIBLINGS, SIBLINGS):
        found = simulate(World.of(seed, order="arrival"), trace=True)
        ways |= {cause.split(":")[0] for cause in found.causes}
        seen |= {sign for sign in signs if sign in str(found.trace)}
    assert ways >= {"killed", "ends with RunInterrupted", "ends with PeerFailure"}
    assert seen == set(signs)


kills = st.lists(st.floats(0, 1.2), min_size=0, max_size=4)
torn = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=2)
chances = st.sampled_from([0.0, 0.1])


@given(
    seed=st.integers(0, 2**20), order=st.sampled_from(["logical", "arrival"]), ahead=st.integers(0, 3), kills=kills, torn=torn,
    updates=chances, duplicate=chances, late=chances, thread=chances, deadline=st.sampled_from([0.0, 12.0]),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_draw_ends_once_whatever_happens(seed, order, ahead, kills, torn, updates, duplicate, late, thread, deadline):
    faults = Faults(tuple(enumerate(kills)), tuple(torn), (), (), updates, duplicate, late, thread, deadline)
    found = simulate(World.of(seed, order=order, ahead=ahead, faults=False).with_faults(faults))
    assert not found.problem


def test_the_interrupted_are_not_the_long_ones():
    """Long samples are in flight when a run dies more often than short ones; they train all the same."""
    lengths: dict[bool, list[float]] = {True: [], False: []}
    resumes = 0
    for seed in range(0, 90 * SIBLINGS, SIBLINGS):
        world = World.of(seed, order="arrival", faults=False)
        if world.tail == 0 or not world.exact:
            continue
        for disturbed in (False, True):
            faults = Faults(kills=((0, 0.3), (1, 0.5), (2, 0.4)) if disturbed else ())
            run = Run(world.with_faults(faults), Path(), Trace())
            with simulator._folder() as folder, simulator._quiet():
                run.folder = folder / "run"
                simulator._to_the_end(run, 2000)
            resumes += len(run.resumes)
            tokens = [len(t.token_ids) for _, groups in run.records.steps for group in groups for t in group.trajectories]
            lengths[disturbed].append(statistics.fmean(tokens))
    differences = [ours - theirs for ours, theirs in zip(lengths[True], lengths[False], strict=True)]
    assert len(differences) > 15 and resumes > 15
    error = statistics.stdev(differences) / len(differences) ** 0.5
    assert abs(statistics.fmean(differences)) <= max(2 * error, 1e-9)


def test_the_loop_says_so_when_everything_waits():
    loop = VirtualLoop()
    with pytest.raises(Stuck, match="everything waits"):
        loop.run_until_complete(asyncio.Event().wait())
    loop.bury()


def test_a_loop_that_never_ends_is_stuck():
    async def forever() -> None:
        while True:
            await asyncio.sleep(1)

    for limit, words in (({"most_turns": 50}, "50 turns"), ({"most_seconds": 50.0}, "50 virtual seconds")):
        loop = VirtualLoop(**limit)
        with pytest.raises(Stuck, match=words):
            loop.run_until_complete(forever())
        loop.bury()


def test_nothing_runs_in_a_process_that_was_killed():
    loop, done = VirtualLoop(kill_at=5), []

    async def work() -> None:
        loop.start_thread(lambda: done.append("thread"))
        for turn in range(10):
            await asyncio.sleep(0)
            done.append(turn)

    with pytest.raises(Killed):
        loop.run_until_complete(work())
    before = list(done)
    loop.bury()
    assert done == before and "thread" not in done


def test_what_a_dead_process_left_ends_in_the_order_in_which_it_began():
    """Not in that of a set of tasks, which is that of their addresses: a replay must be the same run."""
    loop, ended, kept = VirtualLoop(kill_at=3), list[int](), list[object]()

    async def one(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    async def all_of_them() -> None:
        tasks = []
        for number in range(100):
            kept.append([object()] * number)
            tasks.append(asyncio.create_task(one(number)))
        await asyncio.gather(*tasks)

    with pytest.raises(Killed):
        loop.run_until_complete(all_of_them())
    loop.bury()
    assert ended == list(range(100))


def test_what_is_ready_runs_in_an_order_of_the_seed():
    def order(seed: int | None) -> list[int]:
        found: list[int] = []
        loop = VirtualLoop(seed=seed)

        async def one(number: int) -> None:
            found.append(number)

        async def all_of_them() -> None:
            await asyncio.gather(*(one(number) for number in range(6)))

        loop.run_until_complete(all_of_them())
        loop.close()
        return found

    assert order(None) == list(range(6)) and order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_a_broken_law_names_itself_and_stops_the_run(monkeypatch):
    monkeypatch.setattr(Life, "_found", lambda self: 1 / 0)
    assert "ZeroDivisionError: division by zero (test_sim.py" in simulate(World.of(0)).problem
