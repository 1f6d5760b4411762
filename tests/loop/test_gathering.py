"""Dynamic sampling, R29 to R36: quotas, rounds, the batch's fixed shape, E7 and its opposite."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.config.schema import GridConfig, RLConfig, RunConfig
from posttrain.errors import RunAborted
from posttrain.loop.gathering import ONE_ROUND, Gathering, Quotas, cell_groups, stats_of
from posttrain.types import Group, Trajectory

REWARDS = {"informative": [0.0, 1.0], "zero": [0.0, 0.0], "one": [1.0, 1.0], "unscorable": [None, None]}

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def group(group_id: str, kind: str) -> Group:
    rows = [
        Trajectory([1], [2], [True], [-0.5], [0], "stop", reward, group_id=group_id, sample_id=f"{group_id}/{i}")
        for i, reward in enumerate(REWARDS[kind])
    ]
    return Group(group_id, {}, rows)


def config(replicas: int = 1, **rl) -> RunConfig:
    sizes = {"batch_per_replica": 80, "group_size": 2, **rl}
    return RunConfig(rl=RLConfig(**sizes), grid=GridConfig(backend="ray", num_replicas=replicas))


class Prompts:
    """An endless source: the kind of group that prompt `i` gives."""

    def __init__(self, kinds) -> None:
        self.kinds, self.index = kinds, 0

    def draw(self, n: int) -> list[Group]:
        first, self.index = self.index, self.index + n
        return [group(f"{i}:e:r{i}", self.kinds[i % len(self.kinds)]) for i in range(first, self.index)]


def gather(gathering: Gathering, prompts: Prompts, order=lambda groups: groups) -> list[Group]:
    """Every group that was drawn."""
    drawn = []
    while n := gathering.wanted():
        groups = prompts.draw(n)
        gathering.expect([g.group_id for g in groups])
        for g in order(groups):
            gathering.add(g)
        drawn += groups
    return drawn


def ids(groups) -> list[str]:
    return [g.group_id for g in groups]


# quotas


def test_off_by_default():
    assert Quotas.of(config()) is None


def test_ten_over_four_cells():
    quotas = Quotas.of(config(4, min_informative_groups=10, dynamic_sampling_max_extra_rollouts=2))
    assert quotas == Quotas((10, 10, 10, 10), (3, 3, 2, 2), 2, "raise")


@pytest.mark.parametrize(("frac", "groups", "count"), [(0.7, 10, 7), (0.1, 10, 1), (0.26, 10, 3), (1.0, 10, 10), (0.3, 10, 3)])
def test_a_share_is_rounded_up_and_not_past_what_it_says(frac, groups, count):
    quotas = Quotas.of(config(batch_per_replica=2 * groups, min_informative_groups_frac=frac))
    assert quotas is not None and quotas.informative == (count,)


@SETTINGS
@given(st.integers(1, 9), st.integers(1, 12), st.data())
def test_quotas_sum_exactly_and_fit(replicas, per_cell, data):
    minimum = data.draw(st.integers(1, replicas * per_cell))
    made = config(replicas, batch_per_replica=2 * replicas * per_cell, min_informative_groups=minimum)
    quotas = Quotas.of(made)
    assert quotas is not None and quotas.groups == cell_groups(made) == (per_cell,) * replicas
    assert sum(quotas.informative) == minimum and max(quotas.informative) - min(quotas.informative) <= 1
    assert list(quotas.informative) == sorted(quotas.informative, reverse=True)
    assert all(quota <= size for quota, size in zip(quotas.informative, quotas.groups, strict=True))


# one step


def test_without_quotas_one_round_is_all():
    gathering = Gathering(1, None, (3,))
    drawn = gather(gathering, Prompts(["zero", "unscorable", "informative"]))
    taken = gathering.take()
    assert taken.groups == drawn and taken.surplus == [] and taken.metrics == ONE_ROUND and taken.informative == 1


def test_the_base_draw_is_enough_when_every_cell_meets_its_quota():
    gathering = Gathering(1, Quotas((2, 2), (1, 1), 5), (2, 2))
    drawn = gather(gathering, Prompts(["informative", "zero"]))
    taken = gathering.take()
    assert taken.groups == drawn and len(drawn) == 4  # tied groups stay: the shape of the batch is fixed
    assert taken.metrics == ONE_ROUND == {
        "train/dynamic_sampling_rounds": 1,
        "train/dynamic_sampling_shortfall": 0,
        "train/dynamic_sampling_extra_prompts": 0,
    }


def test_a_short_cell_draws_its_share_again_and_another_does_not():
    gathering = Gathering(1, Quotas((3, 2), (2, 1), 5), (3, 2))
    prompts = Prompts(["zero", "informative", "one", "informative", "zero", "informative", "zero", "informative"])
    drawn = gather(gathering, prompts)
    taken = gathering.take()
    assert len(drawn) == 5 + 3  # cell 0 had one of two; its share is three prompts
    assert ids(taken.groups) == ["1:e:r1", "3:e:r3", "4:e:r4", "5:e:r5", "7:e:r7"]
    assert [(g.group_id, cause) for g, cause in taken.surplus] == [
        ("0:e:r0", "uninformative"),
        ("2:e:r2", "uninformative"),
        ("6:e:r6", "uninformative"),
    ]
    assert taken.informative == 4 and taken.metrics["train/dynamic_sampling_extra_prompts"] == 3


def test_informative_groups_beyond_the_shape_are_surplus():
    gathering = Gathering(1, Quotas((2,), (2,), 1), (2,))
    gather(gathering, Prompts(["informative", "unscorable", "informative", "informative"]))
    taken = gathering.take()
    assert ids(taken.groups) == ["0:e:r0", "2:e:r2"]
    assert [(g.group_id, cause) for g, cause in taken.surplus] == [("1:e:r1", "unscorable"), ("3:e:r3", "surplus")]


def test_e7_names_the_short_cells_with_counts_quotas_and_what_was_seen():
    gathering = Gathering(7, Quotas((2, 2, 2), (2, 2, 1), 1), (2, 2, 2))
    gather(gathering, Prompts(["zero", "one", "informative", "informative", "zero", "zero", "zero", "one", "zero", "zero"]))
    with pytest.raises(RunAborted) as caught:
        gathering.take()
    exc = caught.value
    assert exc.code == "E7" and exc.exit_code == 5 and not exc.retryable
    assert exc.message == (
        "dynamic sampling batch_step=7: replay cells [0, 2] hold fewer informative trajectories than their quotas [4, 2]"
    )
    assert "cell 0 has 0 of 2, cell 2 has 0 of 1 informative groups of 2 trajectories after 2 round(s), 10 prompts" in exc.cause
    assert "(6 were all 0, 2 all 1)" in exc.cause and "did not train" in exc.cause
    assert "rl.group_size" in exc.fix and "only defers this" in exc.fix and "=proceed" in exc.fix


def test_proceed_fills_with_tied_groups_and_says_how_many_lack():
    gathering = Gathering(1, Quotas((3,), (3,), 1, "proceed"), (3,))
    gather(gathering, Prompts(["unscorable", "zero", "informative", "unscorable", "one", "zero"]))
    taken = gathering.take()
    assert ids(taken.groups) == ["1:e:r1", "2:e:r2", "4:e:r4"]  # informative, then tied; never one without rewards if another is
    assert taken.informative == 1
    assert taken.metrics["train/dynamic_sampling_shortfall"] == 2 and taken.metrics["train/dynamic_sampling_rounds"] == 2


def test_a_group_is_informative_by_the_rewards_that_enter_its_baseline():
    cut = group("a", "informative")
    cut.trajectories[1].mask = [False]  # not trained: its reward is in no baseline
    assert stats_of(cut).informative == 0
    near = group("b", "zero")
    near.trajectories[1].reward = 1e-6
    assert stats_of(near).informative == 1  # however small the difference: no threshold on the spread


def test_a_group_comes_once_and_only_when_asked_for():
    gathering = Gathering(3, Quotas((2,), (1,)), (2,))
    with pytest.raises(RuntimeError, match="not settled"):
        gathering.take()
    with pytest.raises(ValueError, match=r"batch step 3 wants 2 prompt\(s\), 1 were drawn"):
        gathering.expect(["a"])
    with pytest.raises(ValueError, match="drawn twice"):
        gathering.expect(["a", "a"])
    gathering.expect(["a", "b"])
    assert gathering.wanted() == 0 and not gathering.settled
    gathering.add(group("a", "zero"))
    with pytest.raises(RunAborted, match="cannot take group a: it came before"):
        gathering.add(group("a", "zero"))
    with pytest.raises(RunAborted, match="cannot take group c: nobody asked for it"):
        gathering.add(group("c", "zero"))
    with pytest.raises(RuntimeError, match=r"1 group\(s\) are missing"):
        gathering.take()


# laws

KINDS = st.lists(st.sampled_from(sorted(REWARDS)), min_size=1, max_size=60)
SHAPES = st.lists(st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=4)


@SETTINGS
@given(SHAPES, KINDS, st.integers(0, 4), st.randoms(use_true_random=False))
def test_laws(shapes, kinds, extra, random):
    sizes, quota = zip(*shapes, strict=True)
    quotas = Quotas(sizes, quota, extra, "proceed")
    gathering, shuffled = Gathering(1, quotas, sizes), Gathering(1, quotas, sizes)
    drawn = gather(gathering, Prompts(kinds))
    gather(shuffled, Prompts(kinds), order=lambda groups: random.sample(groups, len(groups)))
    taken, again = gathering.take(), shuffled.take()

    assert taken == again  # the order of arrival changes nothing, and the same twice gives the same
    assert len(taken.groups) == sum(sizes)
    assert sorted(ids(taken.groups) + ids(g for g, _ in taken.surplus)) == sorted(ids(drawn))  # each group ends once
    assert len(set(ids(drawn))) == len(drawn)
    order = ids(drawn)
    assert ids(taken.groups) == sorted(ids(taken.groups), key=order.index)
    rounds = taken.metrics["train/dynamic_sampling_rounds"]
    assert 1 <= rounds <= 1 + extra
    assert taken.metrics["train/dynamic_sampling_extra_prompts"] == len(drawn) - sum(sizes)
    if taken.metrics["train/dynamic_sampling_shortfall"]:
        assert rounds == 1 + extra
    else:
        assert taken.informative >= sum(quota)


@pytest.mark.parametrize("budget", [0, 1, 9])
def test_a_batch_that_a_checkpoint_brought_along_takes_the_rounds_that_it_took(budget: int) -> None:
    kinds = ["zero"] * 6 + ["informative"] * 6
    before = Gathering(3, Quotas((2,), (2,), 2, "proceed"), (2,))
    gather(before, Prompts(kinds))
    again = Gathering(3, Quotas((2,), (2,), budget, "raise").gathered(before.rounds), (2,))
    gather(again, Prompts(kinds))
    assert again.rounds == before.rounds == 3 and again.take() == before.take()
