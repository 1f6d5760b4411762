"""What cannot work is refused when the objective is built: all problems in one error, each with its fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from posttrain.errors import ConfigError, PluginError
from posttrain.objective import Algorithm, Context, PolicyGradient, Problem, TokenOptions, bound, build_objective
from posttrain.objective.groups import centred

PPO = ("grpo", "rloo", "dr_grpo", "reinforce_pp")
OWN = ("cispo", "gspo", "sapo")
TOKEN = (*PPO, *OWN, "nft")


def problems(name: Any, **options: Any) -> list[Problem]:
    """The problems that building this objective names."""
    with pytest.raises(ConfigError) as caught:
        build_objective(name, **options)
    text = str(caught.value)
    for problem in caught.value.problems:
        assert isinstance(problem, Problem)
        assert problem.what in text
        assert problem.fix in text
        assert problem.fix or "must be" in problem.what  # a wrong type says what it must be
    return list(caught.value.problems)  # type: ignore[arg-type]


def only(name: Any, **options: Any) -> str:
    """The option that the one problem is about."""
    found = problems(name, **options)
    assert len(found) == 1, found
    return found[0].path


@pytest.mark.parametrize("name", PPO)
def test_tis_with_clip_against_the_rollout(name: str) -> None:
    assert only(name, use_tis=True, ppo_clip_ref_logprobs="rollout") == "use_tis"
    build_objective(name, use_tis=True, ppo_clip_ref_logprobs="old")
    build_objective(name, use_tis=True, ppo_clip_ref_logprobs="rollout", use_ppo_clip=False)
    build_objective(name, ppo_clip_ref_logprobs="rollout")


@pytest.mark.parametrize("name", [*OWN, "nft"])
def test_tis_with_a_ratio_against_the_rollout(name: str) -> None:
    assert only(name, use_tis=True, ppo_clip_ref_logprobs="rollout") == "use_tis"
    build_objective(name, use_tis=True)


@pytest.mark.parametrize("name", [*OWN, "nft"])
@pytest.mark.parametrize("value", [True, False])
def test_ppo_clip_with_an_algorithm_of_its_own_ratio(name: str, value: bool) -> None:
    assert only(name, use_ppo_clip=value) == "use_ppo_clip"
    assert build_objective(name, use_ppo_clip=None).options.use_ppo_clip is None  # type: ignore[attr-defined]


def test_advantage_norm_by_definition() -> None:
    for name in ("rloo", "dr_grpo"):
        assert only(name, advantage_norm="batch") == "advantage_norm"
        build_objective(name, advantage_norm="group")
    assert only("reinforce_pp", advantage_norm="group") == "advantage_norm"
    for name in ("grpo", *OWN):
        build_objective(name, advantage_norm="batch")


@pytest.mark.parametrize("name", [*TOKEN, "dpo"])
@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("nan")])
def test_temperature(name: str, temperature: float) -> None:
    assert only(name, temperature=temperature) == "temperature"
    build_objective(name, temperature=0.01)


@pytest.mark.parametrize("name", PPO)
def test_several_optimizer_steps_need_a_ratio(name: str) -> None:
    assert only(name, n_mini=2, use_ppo_clip=False) == "n_mini"
    assert only(name, n_mini=2, use_ppo_clip=False, use_tis=True) == "n_mini"
    build_objective(name, n_mini=2)
    build_objective(name, n_mini=1, use_ppo_clip=False)


def test_several_optimizer_steps_of_preferences_and_own_ratios() -> None:
    for name in ("dpo", "nft", *OWN):
        build_objective(name, n_mini=4)


@pytest.mark.parametrize("name", [*TOKEN, "dpo"])
def test_groups_of_one_teach_nothing(name: str) -> None:
    assert only(name, group_size=1) == "group_size"
    assert only(name, group_size=0) == "group_size"
    build_objective(name, group_size=2)
    build_objective(name, group_size=None)


def test_one_completion_is_no_pair() -> None:
    assert "no pair to learn from" in problems("dpo", group_size=1)[0].what
    assert "every advantage is 0" in problems("grpo", group_size=1)[0].what


def test_dual_clip_needs_a_clip_above_one() -> None:
    assert only("grpo", clip_ratio_c=1.0) == "clip_ratio_c"
    assert only("grpo", clip_ratio_c=3.0, use_ppo_clip=False) == "clip_ratio_c"
    for name in ("sapo", "nft"):
        assert only(name, clip_ratio_c=3.0) == "clip_ratio_c"
    for name in (*PPO, "cispo", "gspo"):
        build_objective(name, clip_ratio_c=3.0)


def test_tis_floor() -> None:
    assert only("grpo", use_tis=True, tis_mode="icepop", tis_floor=3.0, tis_cap=2.0) == "tis_floor"
    assert only("grpo", use_tis=True, tis_floor=0.5) == "tis_floor"
    build_objective("grpo", use_tis=True, tis_mode="icepop", tis_floor=0.5)


@pytest.mark.parametrize(
    ("name", "option", "bad", "good"),
    [
        ("grpo", "clip_low", [-0.1, 1.1, float("nan")], [0.0, 1.0]),
        ("grpo", "clip_high", [-0.1], [0.0, 5.0]),
        ("cispo", "clip_low", [1.1], [1.0]),
        ("grpo", "kl_coef", [-0.1, float("nan")], [0.0, 2.0]),
        ("grpo", "entropy_coef", [-0.1], [0.0]),
        ("grpo", "tis_cap", [0.0, -1.0], [0.5]),
        ("grpo", "tis_floor", [-0.1], [0.0]),
        ("grpo", "seq_is_mask_low", [0.0, 1.0], [0.5]),
        ("grpo", "seq_is_mask_high", [1.0], [1.01]),
        ("dr_grpo", "max_tokens", [0], [1]),
        ("sapo", "sapo_tau_pos", [0.0], [0.1]),
        ("sapo", "sapo_tau_neg", [-1.0], [0.1]),
        ("nft", "nft_eps", [0.0], [0.1]),
        ("dpo", "beta", [0.0], [0.1]),
        ("dpo", "label_smoothing", [-0.1, 0.5], [0.0, 0.49]),
        ("grpo", "n_mini", [0], [1]),
    ],
)
def test_bounds(name: str, option: str, bad: list[float], good: list[float]) -> None:
    for value in bad:
        assert only(name, **{option: value}) == option
    for value in good:
        build_objective(name, **{option: value})


def test_types_and_choices() -> None:
    for options in (
        {"kl_estimator": "k4"},
        {"tis_mode": "clip"},
        {"loss_aggregation": "sum"},
        {"ppo_clip_ref_logprobs": "batch"},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            build_objective("grpo", **options)
    for options in ({"clip_low": "0.2"}, {"use_tis": 1}, {"clip_low": True}, {"max_tokens": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            build_objective("grpo", **options)


def test_unknown_options_are_answered_with_the_nearest() -> None:
    found = problems("grpo", clip_hihg=0.3)
    assert (found[0].path, found[0].fix) == ("clip_hihg", "did you mean clip_high?")
    for name, option in (("sapo", "clip_low"), ("nft", "beta"), ("dpo", "use_tis"), ("dpo", "kl_coef")):
        assert only(name, **{option: 1.0}) == option


def test_label_smoothing_needs_the_logistic_loss() -> None:
    assert only("dpo", loss_type="ipo", label_smoothing=0.1) == "label_smoothing"


def test_all_problems_at_once() -> None:
    found = problems(
        "cispo", group_size=1, temperature=0.0, clip_lo=1, clip_high="wide", use_ppo_clip=True, use_tis=True,
        ppo_clip_ref_logprobs="rollout", tis_floor=4.0, kl_coef=-1.0,
    )  # fmt: skip
    told = [problem.path for problem in found]
    assert set(told) == {
        "group_size", "temperature", "clip_lo", "clip_high", "use_ppo_clip", "use_tis", "tis_floor", "kl_coef",
    }  # fmt: skip
    assert told.count("tis_floor") == 2  # above the cap, and without effect


def test_the_error_reads_as_a_list_with_fixes() -> None:
    with pytest.raises(ConfigError, match=r"objective 'cispo' cannot be built: 2 problems") as caught:
        build_objective("cispo", use_ppo_clip=True, group_size=1)
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert all(re.match(r"      fix: ", line) for line in lines[2::2])
    assert caught.value.exit_code == 2


def test_options_check_themselves_when_built_directly() -> None:
    with pytest.raises(ConfigError, match="2 problems"):
        TokenOptions(kl_coef=-1.0, tis_cap=0.0)


def test_an_unknown_algorithm_and_a_wrong_type() -> None:
    with pytest.raises(PluginError, match="grpo"):
        build_objective("grpoo")
    with pytest.raises(PluginError, match="int"):
        build_objective(int)  # type: ignore[arg-type]


class Toy(Algorithm):
    """An algorithm of somebody else's, given as a class."""

    handles_ratio = "none"

    @dataclass(frozen=True, kw_only=True)
    class Options(TokenOptions):
        delta: float = 0.1  # a bound of its own

        def check(self) -> Iterator[Problem]:
            yield from super().check()
            yield from bound(self, "delta", gt=0)

    @classmethod
    def check(cls, options: Any, context: Context) -> Iterator[Problem]:
        if options.delta > 1 and context.asynchronous:
            yield Problem("delta", f"{options.delta} diverges when rollouts run ahead", "set delta below 1")

    def advantages(self, rewards, groups, trained):  # type: ignore[no-untyped-def]
        return centred(rewards, groups, trained)

    def policy_loss(self, batch):  # type: ignore[no-untyped-def]
        return -batch.logprobs * batch.advantages


def test_a_class_brings_its_own_rules() -> None:
    assert build_objective(Toy, delta=2.0).name == "Toy"
    assert only(Toy, delta=0.0) == "delta"
    assert only(Toy, delta=2.0, asynchronous=True) == "delta"
    assert only(Toy, n_mini=2) == "n_mini"
    assert only(Toy, use_ppo_clip=True) == "use_ppo_clip"


def test_a_plain_dataclass_is_not_enough_for_options() -> None:
    class Plain(Toy):
        @dataclass(frozen=True)
        class Options:  # type: ignore[assignment]
            delta: float = 0.1

    with pytest.raises(PluginError, match="subclass posttrain.objective.TokenOptions"):
        build_objective(Plain)


def test_a_plugin_that_raises_in_post_init_is_told_as_a_problem() -> None:
    class Strict(PolicyGradient):
        @dataclass(frozen=True, kw_only=True)
        class Options(TokenOptions):
            even: int = 2

            def __post_init__(self) -> None:
                super().__post_init__()
                if self.even % 2:
                    raise ValueError("even must be even")

        def advantages(self, rewards, groups, trained):  # type: ignore[no-untyped-def]
            return centred(rewards, groups, trained)

    with pytest.raises(ConfigError, match="even must be even"):
        build_objective(Strict, even=3)
