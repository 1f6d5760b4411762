"""What the entries of `environments` are called."""

from __future__ import annotations

import pytest

from posttrain.config.entries import label_of, reward_ranges
from posttrain.config.load import load_config
from posttrain.config.schema import EnvironmentConfig
from posttrain.errors import ConfigError

BASE = "experiment=toy_grpo"


@pytest.mark.parametrize(
    ("name", "label", "called"),
    [
        ("toy", None, "toy"), ("acme-rl/robot", None, "robot"), ("my_lab.envs:Toy", None, "my_lab.envs:Toy"),
        ("/a/my_env.py:Mine", None, "my_env.py:Mine"), ("my_env.py:Mine", None, "my_env.py:Mine"), ("toy", "hard", "hard"),
    ],
)  # fmt: skip
def test_the_label_is_the_name_unless_it_is_given(name: str, label: str | None, called: str) -> None:
    assert label_of(EnvironmentConfig(name=name, label=label)) == called


def test_two_entries_of_one_environment_are_told_apart_by_their_labels() -> None:
    entries = "environments=[{name: toy, options: {size: 1}}, {name: toy, label: big, weight: 3, options: {size: 9}}]"
    config = load_config([BASE, entries]).config
    assert [label_of(entry) for entry in config.environments] == ["toy", "big"]
    assert [entry.options["size"] for entry in config.environments] == [1, 9]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            "[{name: toy, options: {size: 1}}, {name: toy, options: {size: 9}}]",
            ["environments[1].label: 'toy' is also what environments[0] is called", "environments.1.label=NAME"],
        ),
        ("[{name: toy, label: a}, {name: toy, label: a, options: {size: 9}}]", ["'a' is also what environments[0] is called"]),
        ("[{name: toy, weight: 2}, {name: toy}]", ["environments[1]: repeats 'toy' with the same options", "raise the weight"]),
        ("[{name: toy, label: 'a/b'}]", ["environments[0].label: 'a/b' cannot be in a metric's name"]),
        ("[{name: toy, label: ''}]", ["environments[0].label: '' cannot be in a metric's name"]),
        ("[{name: toy, reward_range: [1, 0]}]", ["environments[0].reward_range: [1, 0] is no range"]),
        ("[{name: toy, reward_range: [1]}]", ["environments[0].reward_range"]),
        ("[{name: toy, reward_min: 0}]", ["reward_range=[MIN,MAX]"]),
    ],
)  # fmt: skip
def test_what_cannot_be_told_apart_is_refused(entries: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([BASE, f"environments={entries}"])
    assert all(text in str(caught.value) for text in said), str(caught.value)


def test_the_same_options_under_two_labels_are_two_environments() -> None:
    config = load_config([BASE, "environments=[{name: toy, label: a}, {name: toy, label: b, reward_range: [0, 10]}]"]).config
    assert reward_ranges(config.environments) == {"b": (0.0, 10.0)}
