"""The graph of waits: what people read, and that a deadlock is always found."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from posttrain.loop.wait_graph import Wait, cycle, endless, ends, render, within

STEP = [
    Wait("prompts loop", "weights of version 3 to draw prompts", "train loop", 0.5),
    Wait("rollouts loop", "completions of step 3", "rollout engine hf", 1.0, 12.0),
    Wait("batches loop", "a cohort to batch", "rollouts loop", 0.9),
    Wait("train loop", "a batch to train on", "batches loop", 0.75),
]


def test_a_chain_is_told_from_the_one_who_waits_to_the_one_who_does_not():
    assert render(STEP, 13.0) == "\n".join([
        "prompts loop waits for train loop: weights of version 3 to draw prompts (12.5 s)",
        "  train loop waits for batches loop: a batch to train on (12.2 s)",
        "    batches loop waits for rollouts loop: a cohort to batch (12.1 s)",
        "      rollouts loop waits for rollout engine hf: completions of step 3 (12.0 of 12 s, over)",
        "        rollout engine hf waits for nobody here: look there first",
    ])  # fmt: skip
    assert ends(STEP) == ends(STEP, "train loop") == ["rollout engine hf"] and cycle(STEP) == []


def test_a_chain_that_two_wait_for_is_told_once_and_nobody_waits_is_said():
    waits = [*STEP[1:3], Wait("validation", "samples", "rollouts loop", 2.0)]
    lines = render(waits, 3.0).splitlines()
    names = [line.strip().split(" waits")[0] for line in lines]
    assert names == ["batches loop", "rollouts loop", "rollout engine hf", "validation"]
    assert render([], 1.0) == "nobody waits" and ends([]) == []


def test_many_that_wait_for_the_same_are_counted():
    waits = [Wait(f"sample {i}", "a slot", "rollouts loop", float(i)) for i in range(1000)]
    lines = render(waits, 1000.0).splitlines()
    assert lines[0] == "sample 0 waits for rollouts loop: a slot (1000.0 s)"
    assert lines[-1] == "and 997 more wait for rollouts loop" and len(lines) == 5


def test_a_deadlock_is_named():
    waits = [*STEP[2:], Wait("rollouts loop", "a cohort to generate", "prompts loop", 1.0), STEP[0]]
    assert cycle(waits) == ["prompts loop", "train loop", "batches loop", "rollouts loop", "prompts loop"]
    assert render(waits, 2.0).splitlines()[-1] == (
        "deadlock: prompts loop → train loop → batches loop → rollouts loop → prompts loop"
    )
    assert ends(waits) == [] and len(within(waits, cycle(waits))) == 4
    assert cycle([Wait("a", "itself", "a", 0.0)]) == ["a", "a"]


def test_a_ring_through_one_who_waits_for_something_with_a_deadline_too_is_none():
    """Prompts in flight come back or are given up; that meanwhile no further one may be dispatched is no deadlock."""
    waits = [*STEP[1:], Wait("rollouts loop", "version 3 to dispatch prompts", "train loop", 1.0)]
    assert cycle(waits) and cycle(endless(waits)) == []
    assert "deadlock" not in render(waits, 2.0) and ends(waits) == ["rollout engine hf"]


EDGES = st.lists(st.tuples(st.sampled_from("abcdefg"), st.sampled_from("abcdefg")), max_size=12)


def reachable(edges):
    closed = set(edges)
    for middle, start, end in itertools.product("abcdefg", repeat=3):
        if (start, middle) in closed and (middle, end) in closed:
            closed.add((start, end))
    return closed


@given(EDGES)
def test_a_cycle_is_found_when_and_only_when_there_is_one(edges):
    waits = [Wait(who, "it", owner, 0.0) for who, owner in edges]
    found = cycle(waits)
    assert bool(found) == any(start == end for start, end in reachable(edges))
    if found:
        assert found[0] == found[-1] and set(itertools.pairwise(found)) <= set(edges)
        assert {(w.who, w.owner) for w in within(waits, found)} == set(itertools.pairwise(found))
        assert render(waits, 1.0).endswith(f"deadlock: {' → '.join(found)}")


@given(EDGES)
def test_everybody_is_told_of_and_the_ends_are_those_who_do_not_wait(edges):
    waits = [Wait(who, "it", owner, 0.0) for who, owner in edges]
    text = render(waits, 1.0)
    assert set(ends(waits)) == {owner for _, owner in edges} - {who for who, _ in edges}
    for owner in ends(waits):
        assert f"{owner} waits for nobody here" in text
    if len({who for who, _ in edges} - {owner for _, owner in edges}) <= 3:
        assert all(f"{who} waits for {owner}: it" in text for who, owner in edges)
