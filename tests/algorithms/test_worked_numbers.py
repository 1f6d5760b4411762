"""Losses and gradients worked out by hand, one algorithm at a time, and the cases of the field that concern them.

Other libraries differ in these conventions: eps 1e-4 beside the standard deviation (here 1e-6), k2 = δ² (here δ²/2), a k3 that
stops at 10, an entropy bonus averaged over tokens whatever the aggregation (here aggregated like the policy term), and a GSPO
averaged over tokens whose gradient is not that of its value (here it always is).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from posttrain.errors import BatchError, ConfigError, DataError
from posttrain.objective import build_objective
from posttrain.testing.rows import ScoredRow, ScoredStep, score_rows, token_batch

TWO = [math.log(0.8), math.log(0.2)]  # ratios 1.6 and 0.4 to a reference of one half
HALF = [math.log(0.5)] * 2
NAN, INF = math.nan, math.inf


def one(name: str, advantage: float, logprobs: Sequence[float], *, entropy: Sequence[float] | None = None,
        old: Sequence[float] | None = None, rollout: Sequence[float] | None = None, ref: Sequence[float] | None = None,
        **options: object) -> ScoredStep:  # fmt: skip
    """The step of one sequence with this advantage."""
    row = ScoredRow(logprobs=logprobs, reward=0.0, old=old, rollout=rollout, ref=ref, entropy=entropy)
    return score_rows(build_objective(name, **options), [row], advantages=[advantage])


def near(value: float | Sequence[float]) -> object:
    return pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("reference", ["old", "rollout"])
def test_ppo_clip(reference: str) -> None:
    bounds = {"clip_low": 0.4, "clip_high": 0.5, "ppo_clip_ref_logprobs": reference}
    up = one("grpo", 1, TWO, **{reference: HALF}, **bounds)
    assert (up.loss, up.grads[0]) == (near(-0.95), near([0, -0.2]))
    down = one("grpo", -1, TWO, **{reference: HALF}, **bounds)
    assert (down.loss, down.grads[0]) == (near(1.1), near([0.8, 0]))


def test_ppo_clip_with_one_epsilon() -> None:
    new, old = [-0.7, -2.4, -0.5], [-1.0, -2.0, -0.5]
    up = one("grpo", 1, new, old=old, clip_low=0.2, clip_high=0.2)
    assert (up.loss, up.grads[0]) == (near(-0.95677), near([0, -0.22344, -1 / 3]))
    down = one("grpo", -1, new, old=old, clip_low=0.2, clip_high=0.2)
    assert (down.loss, down.grads[0]) == (near((1.34986 + 0.8 + 1) / 3), near([0.44995, 0, 1 / 3]))


def test_dual_clip_caps_only_negative_advantages() -> None:
    far = [math.log(0.5)], [math.log(0.1)]  # ratio 5
    capped = one("grpo", -1, far[0], old=far[1], clip_ratio_c=3)
    assert (capped.loss, capped.grads[0]) == (near(3), near([0]))
    assert one("grpo", 1, far[0], old=far[1], clip_ratio_c=3).loss == near(-1.28)


def test_log_ratios_are_clamped_to_20() -> None:
    for name in ("grpo", "gspo"):
        inside, outside = one(name, -1, [0.0], old=[-19.0]), one(name, -1, [0.0], old=[-25.0])
        assert (inside.loss, inside.grads[0][0]) == (pytest.approx(math.exp(19)), pytest.approx(math.exp(19)))
        assert (outside.loss, outside.grads[0][0]) == (pytest.approx(math.exp(20)), 0.0)


def test_without_clip_there_is_no_ratio() -> None:
    plain = one("rloo", 1, TWO, old=HALF, use_ppo_clip=False)
    assert (plain.loss, plain.grads[0]) == (near(0.916291), near([-0.5, -0.5]))


def test_cispo() -> None:
    result = one("cispo", 1, TWO, old=HALF, clip_low=0.4, clip_high=0.5)
    assert (result.loss, result.grads[0]) == (near(0.650189), near([-0.75, -0.30]))
    capped = one("cispo", 1, [-0.2, -2.4], old=[-2.0, -2.0])  # the default cap is 5
    assert (capped.loss, capped.grads[0]) == (near(1.30438), near([-2.5, -0.33516]))


def test_case_loss_7_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    clipped = one("cispo", 2, [math.log(0.5)], old=[math.log(0.2)], clip_high=0.28)
    assert (clipped.loss, clipped.grads[0]) == (near(1.774457), near([-2.56]))
    inside = one("cispo", 2, [math.log(0.22)], old=[math.log(0.2)], clip_high=0.28)
    assert inside.grads[0] == near([-2.2])


def test_sapo() -> None:
    up = one("sapo", 1, TWO, old=HALF)
    assert (up.loss, up.grads[0]) == (near(-2.0), near([-0.732110, -0.183027]))
    assert one("sapo", -1, TWO, old=HALF).loss == near(1.904762)
    assert one("sapo", 1, HALF, old=HALF, sapo_tau_pos=2.5).grads[0] == near([-0.5, -0.5])  # on policy: −A, for any τ


def test_gspo_is_a_mean_over_sequences() -> None:
    rows = [
        ScoredRow(logprobs=TWO, old=HALF, reward=0.0),
        ScoredRow(logprobs=[math.log(0.6)], old=[math.log(0.5)], reward=0.0),
    ]
    objective = build_objective("gspo", clip_low=0.5, clip_high=0.5)
    for parts in (None, [[0], [1]]):  # the same in one bin and in two
        result = score_rows(objective, rows, parts, advantages=[1, -1])
        assert result.loss == near(0.2)
        assert result.grads == [near([-0.2, -0.2]), near([0.6])]


def test_gspo_clips_whole_sequences() -> None:
    deltas = [0.1, -0.1, 0.1, 0.2]
    down = one("gspo", -1, deltas, old=[0.0] * 4)
    assert (down.loss, down.grads[0]) == (near(1.077884), near([0.269471] * 4))
    assert one("gspo", 1, deltas, old=[0.0] * 4).loss == near(-1.0004)


@pytest.mark.parametrize("layout", ["right", "left", "wide"])
def test_case_loss_6_gspo_ratio_ignores_padding(layout: str) -> None:
    new, old = [-1.0, -2.0], [-1.5, -2.5]
    left, right = {"right": (0, 1), "left": (1, 0), "wide": (0, 6)}[layout]

    def pad(values: Sequence[float], filler: float) -> list[float]:
        return [filler] * left + list(values) + [filler] * right

    mask = [False] * left + [True] * 2 + [False] * right
    row = ScoredRow(logprobs=pad(new, -9.0), old=pad(old, NAN), mask=mask, reward=0.0)
    result = score_rows(build_objective("gspo", clip_low=1, clip_high=1), [row], advantages=[1])
    assert result.loss == near(-1.648721)
    assert [g for g, m in zip(result.grads[0], mask, strict=True) if not m] == [0.0] * (left + right)


def test_tis_truncates_or_drops() -> None:
    plain = {"use_ppo_clip": False, "use_tis": True, "rollout": HALF}
    assert one("grpo", 1, TWO, tis_cap=1.5, **plain).loss == near(0.489245)
    dropped = one("grpo", 1, TWO, tis_mode="icepop", tis_floor=0.5, tis_cap=1.5, **plain)
    assert (dropped.loss, dropped.grads[0]) == (0.0, [0.0, 0.0])
    assert one("grpo", 1, TWO, tis_mode="icepop", tis_floor=0.3, tis_cap=2.0, **plain).loss == near(0.500402)


def test_tis_weight_uses_the_old_logprobs_and_has_no_gradient() -> None:
    old, rollout = [0.1, 1.0, -0.3], [0.0] * 3  # weights 1.10517, 2 (capped), 0.74082
    result = one("grpo", 1, old, old=old, rollout=rollout, use_tis=True, tis_cap=2.0)
    assert result.grads[0] == near([-1.10517 / 3, -2 / 3, -0.74082 / 3])


def test_sequence_mask_by_geometric_mean() -> None:
    options = {"use_ppo_clip": False, "seq_is_masking": True, "rollout": HALF}
    assert one("grpo", 1, TWO, seq_is_mask_low=0.75, **options).loss == near(0.916291)
    masked = one("grpo", 1, TWO, seq_is_mask_low=0.85, **options)  # the geometric mean is 0.8
    assert (masked.loss, masked.grads[0]) == (0.0, [0.0, 0.0])


def test_sequence_mask_leaves_the_totals() -> None:
    rows = [ScoredRow(logprobs=TWO, rollout=HALF, reward=0.0), ScoredRow(logprobs=[-1.0], rollout=[-1.0], reward=0.0)]
    objective = build_objective("grpo", use_ppo_clip=False, seq_is_masking=True, seq_is_mask_low=0.85)
    assert score_rows(objective, rows, advantages=[1, 1]).loss == near(1 / 3)


def test_kl_estimators() -> None:
    def kl(estimator: str) -> float:
        return one("grpo", 0, TWO, ref=HALF, kl_coef=1.0, kl_estimator=estimator).loss

    assert kl("k1") == near((0.470004 - 0.916291) / 2)
    assert kl("k2") == near(0.265123)
    assert kl("k3") == near(0.339356)
    assert one("grpo", 0, [-1.0], ref=[-1.2], kl_coef=1.0).loss == near(0.018731)
    assert one("grpo", 0, [-1.0], ref=[-0.5], kl_coef=1.0).loss == near(0.148721)


def test_kl_is_not_weighted_by_tis() -> None:
    options = {"use_ppo_clip": False, "use_tis": True, "kl_coef": 1.0, "kl_estimator": "k2"}
    assert one("grpo", 0, TWO, rollout=[-5.0, -5.0], ref=HALF, **options).loss == near(0.265123)


def test_entropy_bonus() -> None:
    entropy = [0.500402, 0.500402]
    assert one("grpo", 0, TWO, entropy=entropy, entropy_coef=0.1).loss == near(-0.050040)


def test_aggregations() -> None:
    """Token losses of 1 in the sequence of two tokens, 0 in the one of four."""
    rows = [ScoredRow(logprobs=[-1.0, -1.0], reward=0.0), ScoredRow(logprobs=[-1.0] * 4, reward=0.0)]
    means = {"sequence": 0.5, "token": 1 / 3, "constant": 0.25}
    for how, mean in means.items():
        objective = build_objective("grpo", use_ppo_clip=False, loss_aggregation=how, max_tokens=4)
        assert score_rows(objective, rows, advantages=[1, 0]).loss == near(mean)


def test_dpo() -> None:
    def pair(ref: tuple[float, float], **options: object) -> ScoredStep:
        rows = [
            ScoredRow(logprobs=[-10.0], ref=[ref[0]], pair=7, chosen=True),
            ScoredRow(logprobs=[-14.0], ref=[ref[1]], pair=7, chosen=False),
        ]
        return score_rows(build_objective("dpo", **options), rows)

    assert pair((-11.0, -13.0)).loss == near(0.598139)
    assert pair((0.0, 0.0)).loss == near(0.513015)
    smooth = pair((-11.0, -13.0), label_smoothing=0.1)
    assert smooth.loss == near(0.9 * 0.598139 + 0.1 * (0.598139 + 0.2))
    assert pair((-11.0, -13.0), loss_type="ipo").loss == near(9.0)  # (2 − 1/0.2)²


def test_dpo_measures_each_pair() -> None:
    """π = (−10, −14), ref = (−11, −13), β = 0.1: implicit rewards 0.1 and −0.1, margin 0.2; and a pair without a margin."""
    rows = [
        ScoredRow(logprobs=[-4.0, -6.0], ref=[-5.0, -6.0], pair=0, chosen=True),
        ScoredRow(logprobs=[-14.0], ref=[-13.0], pair=0, chosen=False),
        ScoredRow(logprobs=[-2.0], ref=[-1.0 + 1e-9], pair=1, chosen=False),
        ScoredRow(logprobs=[-3.0], ref=[-2.0], pair=1, chosen=True),
    ]
    batch = token_batch(rows, range(4), [0.0] * 4, [0.0] * 4)

    def measured(**options: object) -> dict[str, list[float]]:
        return {name: near(list(v.tolist())) for name, v in build_objective("dpo", **options).algorithm.measures(batch).items()}

    assert measured() == {
        "dpo/margin": [0.2, 0.0], "dpo/accuracy": [1.0, 0.5], "dpo/chosen_reward": [0.1, -0.1],
        "dpo/rejected_reward": [-0.1, -0.1], "dpo/chosen_logprob": [-10.0, -3.0], "dpo/rejected_logprob": [-14.0, -2.0],
    }  # fmt: skip
    mean = measured(length_normalised=True, beta=1.0)
    assert (mean["dpo/margin"], mean["dpo/chosen_logprob"]) == ([1.5, 0.0], [-10.0, -3.0])


def test_dpo_refuses_half_a_pair() -> None:
    rows = [ScoredRow(logprobs=[-1.0], ref=[-1.0], pair=3, chosen=True)]
    with pytest.raises(BatchError, match=r"pairs \[3\]"):
        score_rows(build_objective("dpo"), rows)


def test_dpo_leaves_out_a_pair_without_a_trained_token() -> None:
    rows = [
        ScoredRow(logprobs=[-1.0], ref=[NAN], mask=[False], pair=0, chosen=True),
        ScoredRow(logprobs=[-2.0], ref=[-1.0], pair=0, chosen=False),
    ]
    result = score_rows(build_objective("dpo"), rows)
    assert (result.loss, result.grads) == (0.0, [[0.0], [0.0]])


def test_dpo_takes_the_best_and_the_worst_of_an_informative_group() -> None:
    rewards, groups = [0.0, 2.0, None, 1.0, 1.0, 5.0, -1.0, 2.0], ["a", "b", "a", "a", "b", "c", "b", "b"]
    assert build_objective("dpo").pairs(rewards, groups) == [(3, 0), (1, 6)]
    assert build_objective("grpo").pairs(rewards, groups) == []


@pytest.mark.parametrize(
    ("ratio", "right", "loss", "grad"),
    [
        (1.0, True, 0.0, -1.0),
        (1.0, False, 0.0, 1 / 3),
        (1.2, False, 0.0, 0.4),
        (0.8, False, -0.064539, 0.25),
        (5.0, False, 0.0, 5 / 3),
    ],
)
def test_nft_term(ratio: float, right: bool, loss: float, grad: float) -> None:
    """One token of a group of four with mean 1/4: the other rows carry no token, so theirs is the whole loss."""
    objective = build_objective("nft", nft_weight="none")
    result = score_rows(objective, nft_group(math.log(ratio), right))
    assert (result.loss, result.grads[0 if right else 1]) == (near(loss / 4), near([grad / 4]))


def nft_group(log_ratio: float, right: bool) -> list[ScoredRow]:
    """Rewards 1, 0, 0, 0; the row that is asked about is off policy, the others are on policy, where the value is 0."""
    asked = 0 if right else 1
    return [ScoredRow(logprobs=[log_ratio if i == asked else 0.0], old=[0.0], reward=1.0 if i == 0 else 0.0) for i in range(4)]


@pytest.mark.parametrize(("weight", "grads"), [("one_minus", (-0.75, 0.25)), ("sqrt", (-1.73205, 0.57735))])
def test_nft_on_policy_is_dr_grpo_or_grpo(weight: str, grads: tuple[float, float]) -> None:
    result = score_rows(build_objective("nft", nft_weight=weight), nft_group(0.0, right=True))
    assert [4 * row[0] for row in result.grads] == near([grads[0], grads[1], grads[1], grads[1]])


def test_nft_groups_all_right_or_all_wrong_contribute_nothing() -> None:
    rows = [
        ScoredRow(logprobs=[-0.5], old=[-1.0], reward=r, group=g) for g, r in (("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 0.0))
    ]
    for weight in ("one_minus", "sqrt", "none"):
        result = score_rows(build_objective("nft", nft_weight=weight), rows)
        assert (result.loss, result.grads) == (0.0, [[0.0]] * 4)


def test_nft_refuses_other_rewards_and_names_the_sample() -> None:
    objective = build_objective("nft")
    with pytest.raises(DataError, match=r"sample 2 of group 'b' has 0\.5"):
        objective.advantages([1.0, None, 0.5], ["a", "a", "b"])
    objective.advantages([1.0, 0.0, 0.5], ["a", "a", "b"], [True, True, False])  # a row that does not train may have any reward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nft_survives_a_ratio_at_the_bound(dtype: torch.dtype) -> None:
    """exp(20) in the negative ratio: the cap must not cancel to 0 or below in any precision."""
    result = score_rows(build_objective("nft"), nft_group(20.0, right=False), dtype=dtype)
    assert result.loss == 0.0
    assert all(math.isfinite(g) for row in result.grads for g in row)


@pytest.mark.parametrize("parts", [None, [[0, 1], [2]], [[0], [1], [2]], [[0], [1, 2]]])
def test_case_loss_1_means_do_not_depend_on_the_split(parts: list[list[int]] | None) -> None:
    losses = [[1.0] * 4, [4.0], [2.0, 2.0]]
    rows = [ScoredRow(logprobs=[-x for x in row], reward=0.0) for row in losses]
    for how, mean in (("token", 12 / 7), ("sequence", 7 / 3)):
        objective = build_objective("grpo", use_ppo_clip=False, loss_aggregation=how)
        assert score_rows(objective, rows, parts, advantages=[1, 1, 1]).loss == near(mean)


def test_case_loss_3_masked_completions_leave_numerator_and_denominator() -> None:
    objective = build_objective("grpo", use_ppo_clip=False)
    done = ScoredRow(logprobs=[-1.0] * 3, reward=0.0)
    cut = ScoredRow(logprobs=[-1.0] * 5, reward=0.0, mask=[False] * 5)
    assert score_rows(objective, [done, cut], advantages=[1, 1]).loss == near(1.0)
    nothing = score_rows(objective, [cut, cut], advantages=[1, 1])
    assert (nothing.loss, nothing.grads) == (0.0, [[0.0] * 5] * 2)


@pytest.mark.parametrize("parts", [[[0], [1], [2, 3, 4]], [[0, 2], [1, 3], [4], []], [[4, 3, 2, 1, 0]]])
def test_every_trained_token_weighs_the_same_on_any_layout(parts: list[list[int]]) -> None:
    """Lengths 5, 4, 3, 3, 2 with one prompt token each: 12 trained tokens, each with weight 1/12."""
    rows = [ScoredRow(logprobs=[-1.0] * n, mask=[False] + [True] * (n - 1), reward=0.0) for n in (5, 4, 3, 3, 2)]
    result = score_rows(build_objective("grpo"), rows, parts, advantages=[1.0] * 5)
    for row in result.grads:
        assert row == near([0.0] + [-1 / 12] * (len(row) - 1))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"use_tis": True}, "rollout_logprobs"), ({"seq_is_masking": True}, "rollout_logprobs"), ({"kl_coef": 0.1}, "ref_logprobs"),
     ({"ppo_clip_ref_logprobs": "rollout"}, "rollout_logprobs"), ({"entropy_coef": 0.1}, "entropy")],
)  # fmt: skip
def test_a_missing_field_is_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(BatchError, match=f"has no {field}"):
        one("grpo", 1, TWO, **options)


def test_constant_aggregation_needs_its_constant() -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        one("dr_grpo", 1, TWO)
