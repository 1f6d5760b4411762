"""The length penalty and the filters: golden numbers, what they do to a batch, and that screening twice changes nothing."""

from __future__ import annotations

import copy
import math
import random
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.config.schema import RLConfig, RolloutConfig, RunConfig
from posttrain.data.special_tokens import SpecialTokens
from posttrain.loop.batches import make_batch
from posttrain.loop.cohort import Cohort
from posttrain.loop.filters import Screening, compared, filters_of, gibberish, overlong_penalty, rare_from, repetitive, trains
from posttrain.loop.gathering import stats_of
from posttrain.objective import build_objective
from posttrain.types import Group, Trajectory, Turn

QWEN = 151_936

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


class Letters:
    """A packer of one letter per token."""

    special_tokens = SpecialTokens(prefix=(), stop=())

    def decode(self, ids):
        return "".join(map(chr, ids))

    def get_policy_input(self, trajectory):
        mask = [False] * len(trajectory.prompt_ids) + trajectory.mask
        return {"input_ids": trajectory.prompt_ids + trajectory.token_ids, "mask": mask}


def sample(reward=1.0, *, ids=(65, 66), logprob=-0.5, finish="stop", group="g", index=0, mask=None) -> Trajectory:
    n = len(ids)
    versions, logprobs = [0] * n, [logprob] * n
    return Trajectory(
        [1], [*ids], mask or [True] * n, logprobs, versions, finish, reward, group_id=group, sample_id=f"{group}/{index}"
    )


def screening(vocab=QWEN, max_tokens=1000, **rl) -> Screening | None:
    return Screening.of(RunConfig(rl=RLConfig(**rl), rollout=RolloutConfig(max_tokens=max_tokens)), vocab)


def screened(made: Screening | None, *trajectories: Trajectory) -> list[Trajectory]:
    assert made is not None
    for trajectory in trajectories:
        made.screen(trajectory, Letters().decode)
    return list(trajectories)


def cohort(*groups: list[Trajectory]) -> Cohort:
    return Cohort(1, [], [Group(rows[0].group_id, {}, rows) for rows in groups])


# golden numbers


@pytest.mark.parametrize(("length", "penalty"), [(800, 0.0), (900, 0.25), (1000, 0.5), (0, 0.0), (3000, 0.5)])
def test_the_penalty_is_a_ramp_that_ends_at_the_factor(length, penalty):
    assert overlong_penalty(length, 800, 200, 0.5) == pytest.approx(penalty, abs=1e-12)
    one = sample(1.0, ids=[65] * length)
    screened(screening(overlong_penalty_factor=0.5, overlong_buffer_tokens=200), one)
    assert one.reward == pytest.approx(1 - penalty, abs=1e-12)
    assert one.reward_parts == {"overlong_penalty": pytest.approx(-penalty, abs=1e-12)}
    assert one.info["screening"]["raw_reward"] == 1.0


@pytest.mark.parametrize(("length", "loss"), [(10, 0), (12, 0), (13, 0.25), (15, 0.75), (16, 1), (17, 1)])
def test_the_ramp_of_the_dapo_paper(length, loss):
    assert overlong_penalty(length, 16 - 4, 4, 1.0) == loss


def test_the_penalty_counts_the_models_tokens_of_all_turns():
    turns = [True] * 450 + [False] * 500 + [True] * 450
    one = sample(1.0, ids=[65] * 1400, mask=turns)
    one.turns = [Turn(0, 450), Turn(450, 950, "env"), Turn(950, 1400)]
    screened(screening(overlong_penalty_factor=0.5, overlong_buffer_tokens=200), one)
    assert one.reward == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("token", "logprob", "caught"), [(100_001, -13.6, True), (100_001, -13.5, False), (100_000, -50.0, False)]
)
def test_gibberish(token, logprob, caught):
    # the constant 11.5 of other trainers is the log of a vocabulary of 98,716; here the offset to the model's own gives the same
    made = screening(filter_gibberish=True, gibberish_logprob_offset=13.5 - math.log(QWEN))
    (one,) = screened(made, sample(ids=[65, token], logprob=logprob))
    assert filters_of(one) == (["gibberish"] if caught else [])


def test_the_thresholds_follow_the_vocabulary():
    assert rare_from(QWEN) == 100_000 and rare_from(32_000) == 21_061
    made = screening(filter_gibberish=True)
    assert made is not None and made.gibberish == (100_000, pytest.approx(-13.9312, abs=1e-4))
    small = screening(vocab=64, filter_gibberish=True, gibberish_token_threshold=7)
    assert small is not None and small.gibberish == (7, pytest.approx(-math.log(64) - 2))


def test_tokens_of_the_environment_are_nobodys_gibberish():
    assert not gibberish([(150_000, 0.0, True), (150_000, -99.0, False)], 100_000, -13.9)


def test_repetition():
    assert repetitive("ab" * 500, 10.0) and not repetitive("ab" * 40, 10.0)  # 1,000 characters; 80 never
    assert not repetitive(
        "The quick brown fox jumps over the lazy dog while seven wizards mix strange potions in jars. " * 2, 10.0
    )
    varied = "".join(random.Random(0).choices(string.ascii_letters, k=20_000))
    assert not repetitive(varied, 10.0) and repetitive(varied + "no " * 4000, 10.0)  # the end counts
    made = screening(filter_repetition=True)
    looping, fine = screened(made, sample(ids=[97, 98] * 500), sample(ids=[97, 98] * 40))
    assert filters_of(looping) == ["repetition"] and filters_of(fine) == []


def test_overlong():
    cut, whole = screened(screening(filter_overlong=True), sample(finish="length"), sample())
    assert filters_of(cut) == ["overlong"] and not trains(cut) and trains(whole)


# what a batch makes of it


def test_everything_is_off_by_default():
    assert screening() is None and trains(sample())


def test_a_filtered_sample_has_no_row_and_changes_nobodys_advantage():
    rows = lambda: [sample(r, index=i, finish="length" if i == 3 else "stop") for i, r in enumerate([1, 0, 0, 1])]  # noqa: E731
    plain = make_batch(cohort(rows()), build_objective("grpo"), Letters(), discard_tied=True)
    batch = make_batch(
        cohort(rows()), build_objective("grpo"), Letters(), discard_tied=True, screening=screening(filter_overlong=True)
    )
    assert [row.id for row in batch.rows] == ["g/0", "g/1", "g/2"]
    assert [row.advantage for row in batch.rows] == [row.advantage for row in plain.rows[:3]]
    assert batch.rows[0].baseline == 0.5 and batch.advantages["g/3"] == 0
    assert batch.metrics["filter/overlong_frac"] == 0.25 and "filter/gibberish_frac" not in batch.metrics
    assert batch.metrics["train/effective_batch"] == 3 and batch.metrics["tokens/generated"] == 8


def test_a_group_that_filters_empty_is_not_informative():
    rows = [sample(r, index=i, finish="length") for i, r in enumerate([1, 0])]
    batch = make_batch(
        cohort(rows), build_objective("grpo"), Letters(), discard_tied=True, screening=screening(filter_overlong=True)
    )
    assert batch.rows == [] and batch.metrics["train/informative_group_count"] == 0
    assert stats_of(Group("g", {}, rows)).informative == 0


def test_the_shaped_reward_decides_what_is_informative():
    rows = [sample(1.0, index=0, ids=[65] * 10), sample(1.0, index=1, ids=[65] * 1000)]
    assert stats_of(Group("g", {}, rows)).informative == 0
    made = screening(overlong_penalty_factor=0.5, overlong_buffer_tokens=200)
    batch = make_batch(cohort(rows), build_objective("grpo"), Letters(), discard_tied=True, screening=made)
    assert stats_of(Group("g", {}, rows)).informative == batch.metrics["train/informative_group_count"] == 1
    assert batch.metrics["reward/mean"] == 0.75 and batch.metrics["reward/overlong_penalty"] == -0.25
    assert [row.reward for row in batch.rows] == [1.0, 0.5]


def test_a_preference_pair_has_no_filtered_sample():
    rows = [sample(r, index=i, finish="length" if i == 0 else "stop") for i, r in enumerate([1.0, 0.6, 0.2])]
    batch = make_batch(
        cohort(rows), build_objective("dpo"), Letters(), discard_tied=True, screening=screening(filter_overlong=True)
    )
    assert [row.id for row in batch.rows] == ["g/1", "g/2"]
    assert compared(rows, pairs=True) == [False, True, True] and compared(rows) == [True, True, True]
    tied = [sample(1.0, index=0, finish="length"), sample(0.5, index=1), sample(0.5, index=2)]
    screened(screening(filter_overlong=True), *tied)
    assert stats_of(Group("g", {}, tied)).informative == 1 and stats_of(Group("g", {}, tied), pairs=True).informative == 0


def test_an_unscorable_sample_gets_no_penalty():
    for reward in (None, math.nan):
        (one,) = screened(screening(overlong_penalty_factor=0.5), sample(reward, ids=[65] * 1000))
        assert not one.scorable and one.reward_parts == {} and "raw_reward" not in one.info["screening"]


def test_what_dynamic_sampling_left_out_is_counted_and_does_not_train():
    left = [sample(0.0, group="s", index=0, finish="length"), sample(0.0, group="s", index=1)]
    taken = [sample(1.0, index=0), sample(0.0, index=1)]
    batch = make_batch(
        cohort(taken), build_objective("grpo"), Letters(), discard_tied=False, screening=screening(filter_overlong=True),
        surplus=[Group("s", {}, left)],
    )  # fmt: skip
    assert {row.group for row in batch.rows} == {"g"} and batch.advantages["s/0"] == 0.0
    assert [group.group_id for group in batch.groups] == ["g", "s"]
    assert batch.metrics["train/grpo_all_zero_group_count"] == 1 and batch.metrics["reward/mean"] == 0.25
    assert batch.metrics["filter/overlong_frac"] == 0.25


@SETTINGS
@given(st.floats(-5, 5), st.integers(0, 40), st.floats(0.1, 3), st.integers(1, 20), st.sampled_from(["stop", "length"]))
def test_laws(reward, tokens, factor, buffer, finish):
    made = screening(
        max_tokens=20, overlong_penalty_factor=factor, overlong_buffer_tokens=buffer, filter_overlong=True, filter_gibberish=True
    )
    once = sample(reward, ids=[100_001] * tokens, logprob=-20.0, finish=finish)
    screened(made, once)
    twice = copy.deepcopy(once)
    assert screened(made, twice) == [once]  # also when it comes from a checkpoint
    taken = -once.reward_parts["overlong_penalty"]
    assert 0 <= taken <= factor and once.reward == reward - taken
    assert (taken == 0) == (tokens <= 20 - buffer)
    assert filters_of(once) == ["overlong"] * (finish == "length") + ["gibberish"] * (tokens > 0)
