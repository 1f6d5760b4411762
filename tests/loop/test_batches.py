import pytest

from posttrain.data.dataset import Draw
from posttrain.data.special_tokens import SpecialTokens
from posttrain.errors import PackerError
from posttrain.loop.batches import cohort_metrics, make_batch, make_row
from posttrain.loop.cohort import Cohort
from posttrain.objective import build_objective
from posttrain.types import Group, Trajectory


class PlainPacker:
    """Prompt and completion end to end; what every decoder-only packer does. Its tokenizer writes BOS 7, its model stops at 9."""

    special_tokens = SpecialTokens(prefix=(7,), stop=(9,))

    def get_policy_input(self, trajectory):
        return {
            "input_ids": trajectory.prompt_ids + trajectory.token_ids,
            "mask": [False] * len(trajectory.prompt_ids) + trajectory.mask,
        }


class ShiftedPacker(PlainPacker):
    """The convention of a neighbouring library: the mask is about the position that predicts a token."""

    def get_policy_input(self, trajectory):
        item = super().get_policy_input(trajectory)
        return {**item, "mask": [*item["mask"][1:], False]}


def trajectory(group, index, reward, tokens=3, finish="stop", **fields):
    return Trajectory(
        [7, 8],
        [10 + index] * tokens,
        [True] * tokens,
        [-0.5] * tokens,
        [0] * tokens,
        finish,
        reward,
        group_id=group,
        sample_id=f"{group}/{index}",
        env="e",
        **fields,
    )


def cohort(**groups):
    made = [Group(name, {}, [trajectory(name, i, r) for i, r in enumerate(rewards)]) for name, rewards in groups.items()]
    return Cohort(1, [Draw(i, 0, "e", name, {}) for i, name in enumerate(groups)], made)


def test_tied_groups_are_counted_before_they_are_left_out():
    batch = make_batch(
        cohort(a=[1, 0], b=[0, 0], c=[1, 1], d=[0.5, 0.5]), build_objective("grpo"), PlainPacker(), discard_tied=True
    )
    assert {row.group for row in batch.rows} == {"a"}
    assert batch.metrics["train/grpo_all_zero_group_count"] == 1
    assert batch.metrics["train/grpo_all_one_group_count"] == 1
    assert batch.metrics["train/informative_group_count"] == 1
    assert batch.metrics["train/uninformative_group_count"] == 3
    assert batch.metrics["train/effective_batch"] == 2
    assert batch.advantages["a/0"] == pytest.approx(0.70711, abs=1e-4) and batch.advantages["b/0"] == 0


def test_tied_groups_stay_with_advantage_zero_when_asked():
    batch = make_batch(cohort(a=[1, 0], b=[0, 0]), build_objective("grpo"), PlainPacker(), discard_tied=False)
    assert [(row.group, row.advantage == 0) for row in batch.rows] == [("a", False), ("a", False), ("b", True), ("b", True)]


def test_tied_groups_leave_before_the_batch_is_whitened():
    one = make_batch(cohort(a=[1, 0], b=[3, 0]), build_objective("reinforce_pp"), PlainPacker(), discard_tied=True)
    with_tied = make_batch(
        cohort(a=[1, 0], t=[5, 5], b=[3, 0]), build_objective("reinforce_pp"), PlainPacker(), discard_tied=True
    )
    assert [row.advantage for row in with_tied.rows] == [row.advantage for row in one.rows]


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_case_samp_1_an_unscorable_reward_never_trains_and_is_in_no_baseline(bad):
    batch = make_batch(cohort(a=[1, 0, bad, 1]), build_objective("grpo"), PlainPacker(), discard_tied=True)
    assert [row.id for row in batch.rows] == ["a/0", "a/1", "a/3"]
    assert [row.advantage for row in batch.rows] == pytest.approx([0.57735, -1.15470, 0.57735], abs=1e-4)
    assert batch.rows[0].baseline == pytest.approx(2 / 3)
    assert batch.metrics["rollout/unscorable_count"] == 1


def test_case_samp_1_a_group_with_only_unscorable_rewards_is_dropped():
    batch = make_batch(cohort(a=[None, None]), build_objective("grpo"), PlainPacker(), discard_tied=True)
    assert batch.rows == [] and batch.metrics["train/informative_group_count"] == 0


def test_preferences_become_the_best_and_worst_of_informative_groups():
    batch = make_batch(cohort(a=[0.2, 1, 0], b=[1, 1]), build_objective("dpo"), PlainPacker(), discard_tied=True)
    assert [(row.id, row.pair, row.chosen) for row in batch.rows] == [("a/1", 0, True), ("a/2", 0, False)]


def test_a_row_is_aligned_to_the_token():
    row = make_row(trajectory("a", 0, 1.0), PlainPacker(), 0.5, 0.25)
    assert row.input_ids == [7, 8, 10, 10, 10] and row.mask == [False, False, True, True, True]
    assert row.rollout_logprobs == [0, 0, -0.5, -0.5, -0.5] and row.prefix == 2


def test_a_mask_shifted_by_one_is_refused_in_words():
    with pytest.raises(PackerError, match=r"ShiftedPacker.get_policy_input changed .* its mask is shifted by one") as caught:
        make_row(trajectory("a", 0, 1.0), ShiftedPacker(), 0.0, 0.0)
    assert "mask[t] is about token t itself" in caught.value.cause and "cosmos-rl" in caught.value.cause
    assert "[False, *mask[:-1]]" in caught.value.fix


def test_a_packer_that_writes_into_the_trajectory_is_refused_too():
    class InPlace(PlainPacker):
        def get_policy_input(self, trajectory):
            trajectory.mask[-1] = False
            return super().get_policy_input(trajectory)

    with pytest.raises(PackerError, match=r"InPlace\.get_policy_input changed the trajectory"):
        make_row(trajectory("a", 0, 1.0), InPlace(), 0.0, 0.0)


@pytest.mark.parametrize(("prompt", "cause"), [([7, 7, 8], "twice"), ([8], "miss")])
def test_a_bos_that_is_doubled_or_missing_in_a_row_is_caught(prompt, cause):
    class Prefixing(PlainPacker):
        def get_policy_input(self, trajectory):
            ids = prompt + trajectory.token_ids
            return {"input_ids": ids, "mask": [False] * len(prompt) + trajectory.mask}

    with pytest.raises(PackerError, match="packer tokenizer adds special tokens") as caught:
        make_row(trajectory("a", 0, 1.0), Prefixing(), 0.0, 0.0)
    assert cause in caught.value.cause and caught.value.code == "E13"


def test_a_doubled_stop_token_is_caught_unless_the_completion_ran_on():
    doubled = Trajectory([7, 8], [5, 9, 9], [True] * 3, [-0.5] * 3, [0] * 3, "stop", 1.0)
    with pytest.raises(PackerError, match="packer tokenizer adds special tokens") as caught:
        make_row(doubled, PlainPacker(), 0.0, 0.0)
    assert "stop token 9 twice" in caught.value.cause
    doubled.finish_reason = "length"  # rollout.ignore_eos
    assert make_row(doubled, PlainPacker(), 0.0, 0.0).input_ids == [7, 8, 5, 9, 9]


def test_metrics_are_over_everything_generated():
    rows = [
        trajectory("a", 0, 1.0, tokens=2, reward_parts={"format": 1.0}),
        trajectory("a", 1, 0.0, tokens=4, finish="length", reward_parts={"format": 0.0}),
        trajectory("a", 2, None, tokens=3, info={"cause": "timeout"}),
    ]
    metrics = cohort_metrics(rows)
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == 0.5 and metrics["reward/format"] == 0.5
    assert metrics["length/mean"] == 3 and metrics["rollout/truncated_share"] == pytest.approx(1 / 3)
    assert metrics["rollout/unscorable/timeout"] == 1 and metrics["tokens/generated"] == 9
