"""The schema itself: every key documented, bounded where it is a number, and free of surprises."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config import schema
from posttrain.config.bounds import BOUNDS, Range
from posttrain.config.schema import RunConfig
from posttrain.config.walker import Walker, fields_of, paths_of, show, spell, to_tree

CLASSES = [value for value in vars(schema).values() if dataclasses.is_dataclass(value) and isinstance(value, type)]


def numbers(cls: type = RunConfig, prefix: str = "") -> list[str]:
    found = []
    for field in fields_of(cls):
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.type):
            found += numbers(field.type, f"{path}.")
        elif {int, float} & {field.type, *get_args(field.type)} and field.type is not bool and "tuple" not in str(field.type):
            found.append(path)
    return found


def test_every_number_is_bounded() -> None:
    elsewhere = {
        "rl.group_size",
        "rl.batch_per_replica",
        "rl.mini_batch_per_replica",
        "rl.micro_batch_per_replica",
        "rollout.temperature",
        "rollout.top_p",
        "rollout.top_k",
        "rollout.min_p",
        "grid.ranks",
        "grid.dp_replicate",
        "grid.dp_shard",
    }
    assert set(numbers()) - elsewhere == {path for path in BOUNDS if "[" not in path}


def test_defaults_that_the_seeds_give() -> None:
    config = RunConfig()
    assert (config.rl.optimizer.lr, config.rl.group_size, config.rollout.max_off_policy_steps) == (1e-6, 8, 8)
    assert (config.rollout.max_async_rollout, config.rollout.base_port, config.rl.discard_group_zero_advantage) == (0, 8100, True)
    assert (config.rl.min_informative_groups, config.rl.dynamic_sampling_on_budget_exhausted) == (0, "raise")
    assert config.grid.backend == "local" and config.rl.routing_replay == "off" and not config.weights.verify_weight_values


def test_a_tree_of_the_defaults_walks_to_the_defaults() -> None:
    walker = Walker()
    built = walker.build(RunConfig, to_tree(RunConfig()))
    assert built == RunConfig()
    assert {problem.what for problem in walker.problems} == {"missing value"}


@given(st.floats(allow_nan=True), st.floats(-10, 10), st.floats(-10, 10), st.booleans(), st.booleans())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_ranges(value, low, high, open_low, open_high) -> None:
    allowed = Range(low, high, open_low, open_high)
    inside = (
        low < value < high
        or (value == low and not open_low and value <= high and not (value == high and open_high))
        or (value == high and not open_high and value >= low and not (value == low and open_low))
    )
    assert allowed.holds(value) == inside
    assert not allowed.holds(math.nan)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
)
@settings(max_examples=80, derandomize=True, deadline=None)
def test_no_tree_makes_the_walker_raise(tree) -> None:
    for key in ("rl", "rollout", "environments", "model", "seed", "grid"):
        walker = Walker(paths_of(RunConfig))
        built = walker.build(RunConfig, {key: tree})
        assert isinstance(built, RunConfig)


@pytest.mark.parametrize(
    ("hint", "value", "result"),
    [
        (float, 1, 1.0),
        (int | None, None, None),
        (tuple[int, int], [1, 2], (1, 2)),
        (list[float], (1, 2.5), [1.0, 2.5]),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (str, 3, "3"),
    ],
)
def test_what_converts(hint, value, result) -> None:
    walker = Walker()
    converted = walker.convert(hint, value, "x")
    assert converted == result and type(converted) is type(result) and not walker.problems


@pytest.mark.parametrize(
    ("hint", "value", "what", "fix"),
    [
        (int, True, "must be an integer, not true", "write a number: x=1"),
        (int, "3", "must be an integer, not '3'", "write the number without quotes: x=3"),
        (int, 2.0, "must be an integer, not 2.0", "write x=2"),
        (float, None, "must be a number, not null", ""),
        (bool, "yes", "must be true or false, not 'yes'", "write x=true"),
        (str, None, "must be text, not null", ""),
        (tuple[int, int], [1], "must have 2 entries, not 1: [1]", ""),
        (list[int], 3, "must be a list, not 3", "write x=[3]"),
        (dict[str, int], [1], "must be a mapping, not [1]", ""),
        (int | None, "a", "must be an integer or null, not 'a'", ""),
    ],
)
def test_what_does_not(hint, value, what, fix) -> None:
    walker = Walker()
    walker.convert(hint, value, "x")
    (problem,) = walker.problems
    assert (problem.what, problem.fix) == (what, fix)


def test_every_field_of_the_schema_has_a_spelled_type() -> None:
    for cls in CLASSES:
        for field in fields_of(cls):
            assert spell(field.type) and show(field.default)
