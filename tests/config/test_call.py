"""The keywords of a call from Python: the same config, the same strictness, the origin `call`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config.call import call_values, keyword
from posttrain.config.load import LoadedConfig, load_config
from posttrain.errors import ConfigError
from posttrain.loop.api import load_call, train
from posttrain.plugins.objects import held

LEAST: dict[str, Any] = {"model": "m", "rl": {"steps": 2}}


def score(completion: str, row: Any) -> float:
    return 1.0


def loaded(**call: Any) -> LoadedConfig:
    return load_call(call)


def refused(**call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_call(call)
    return str(caught.value)


@pytest.fixture
def hold() -> Callable[..., Any]:
    """What the only environment's option holds, as an object."""
    return lambda made, option: held(made.config.environments[0].options[option])


def test_nested_and_dotted_keys_are_the_same_config_with_the_origin_call(hold) -> None:
    rows = [{"question": "?"}]
    nested = loaded(model=Path("m"), data=rows, reward=score, prompt_column="question", seed=np.int64(3),
                    rl={"steps": 2, "optimizer": {"lr": np.float32(0.5), "betas": (0.8, 0.9)}})  # fmt: skip
    keys = {"model.name_or_path": "m", "rl.steps": 2, "rl.optimizer.lr": 0.5, "rl.optimizer.betas": [0.8, 0.9], "seed": 3}
    dotted = loaded(data=rows, reward=score, prompt_column="question", **keys)
    assert nested.config == dotted.config
    config = nested.config
    assert (config.rl.steps, config.rl.optimizer.lr, config.rl.optimizer.betas, config.seed) == (2, 0.5, (0.8, 0.9), 3)
    assert config.environments[0].name == "function" and hold(nested, "data") is rows and hold(nested, "reward") is score
    for path in ("rl.steps", "rl.optimizer.lr", "seed", "environments[0].options.reward", "model.name_or_path"):
        assert nested.origins[path] == dotted.origins[path] == "call"
    assert "rl.steps=2" in dotted.overrides


def test_functions_by_name_and_weight_and_everything_plain_stays_text(hold) -> None:
    made = loaded(**LEAST, data="my.jsonl", reward={"right": score, "short": (lambda c: -len(c), 0.1)})
    right, short = made.config.environments[0].options["reward"]
    assert (right["name"], right["weight"], short["name"], short["weight"]) == ("right", 1.0, "short", 0.1)
    assert held(right["reward"]) is score and held(short["reward"])("abc") == -3
    assert made.config.environments[0].options["data"].endswith("/my.jsonl")
    assert loaded(**LEAST, data="d.jsonl", reward=score, prompt="cost: ${x} {q}").config.environments[0].options["prompt"] == (
        "cost: ${x} {q}"
    )


def test_options_of_the_call_change_the_environment_that_it_starts_from(tmp_path: Path) -> None:
    toy = loaded(experiment="toy_grpo", size=7)
    (environment,) = toy.config.environments
    assert (environment.name, environment.options["size"], environment.options["mode"]) == ("toy", 7, "easy")
    assert toy.origins["environments[0].options.size"] == "call" and toy.origins["rl.steps"] == "experiment toy_grpo"
    swapped = loaded(experiment="toy_grpo", reward=score, data=[{"prompt": "?"}])
    assert [e.name for e in swapped.config.environments] == ["function"]
    file = tmp_path / "my.yaml"
    file.write_text("experiment: toy_grpo\nrl: {steps: 6, group_size: 2}\n")
    mine = loaded(config=file, mode="hard", **{"rl.steps": 9})
    assert (mine.config.rl.steps, mine.config.rl.group_size, mine.config.environments[0].options["mode"]) == (9, 2, "hard")
    assert mine.origins["rl.group_size"] == "my.yaml:2" and mine.experiment == "toy_grpo"


def test_an_environment_by_name_class_or_object() -> None:
    from posttrain_envs.arithmetic import Arithmetic

    by_name = loaded(**LEAST, env="toy", size=4, seed=5)
    assert (by_name.config.environments[0].options["size"], by_name.config.seed) == (4, 5)
    by_mapping = loaded(**LEAST, env={"name": "toy", "options": {"size": 4}}, seed=5)
    assert by_mapping.config == by_name.config
    by_class = loaded(**LEAST, env=Arithmetic, digits=1)
    assert by_class.config.environments[0].name == "posttrain_envs.arithmetic:Arithmetic"
    assert by_class.config.environments[0].options["digits"] == 1
    env = Arithmetic(Arithmetic.Options(digits=1))
    by_object = loaded(**LEAST, env=env)
    assert held(by_object.config.environments[0].name) is env and by_object.config.environments[0].options == {}


def test_everything_wrong_is_told_at_once_in_the_words_of_a_call() -> None:
    text = refused(data=[{"prompt": "?"}], reward=score, promt_column="q", stepz=3, learning_rate=1e-5, rl={"group_sise": 2},
                   **{"rl.optimizer.lr": "fast"})  # fmt: skip
    for words in (
        "environments[0].options.promt_column: unknown key  (call)",
        "did you mean environments[0].options.prompt_column?",
        "stepz: unknown key  (call)",
        "the path here is rl.optimizer.lr=1e-05",
        "did you mean rl.group_size?",
        "rl.optimizer.lr: must be a number, not 'fast'  (call)",
        'give it: rl={"steps": 20}',
        'give it: model="folder or Hugging Face name"',
    ):
        assert words in text, text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"model": object()}, "model is a object"),
        ({"env": {"nam": "toy"}}, "env has 'nam'"),
        ({"env": "toyy"}, "did you mean 'toy'"),
        ({"reward": score}, "data is missing"),
        ({"data": [{"prompt": "?"}]}, "reward is missing"),
        ({"reward": score, "environments": [{"name": "toy"}]}, "environments is given, and reward too"),
        ({"reward": lambda: 1, "data": "d.jsonl"}, "it takes no argument"),
    ],
)
def test_calls_that_cannot_work(call: dict[str, Any], words: str) -> None:
    with pytest.raises(ImportError if "toyy" in str(call) else ConfigError) as caught:
        load_call({**LEAST, **call})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("path", "typed", "expected"),
    [
        ("rl.steps", "give it: rl.steps=N", 'rl={"steps": 20}'),
        ("environments[0].options.task", "give it: environments.0.options.task=TEXT", 'task="…"'),
        ("rl.optimizer.lr", "give it: rl.optimizer.lr=X", 'rl={"optimizer": {"lr": 0.5}}'),
    ],
)
def test_missing_values_in_a_call(path: str, typed: str, expected: str) -> None:
    assert keyword(path, typed) == expected


def test_a_loaded_config_goes_alone() -> None:
    with pytest.raises(ConfigError, match="got a loaded config, and model, seed too"):
        train(load_config(["experiment=toy_grpo"]), model="m", seed=3)


def test_a_value_of_a_list_is_changed_in_place() -> None:
    values = call_values(settings={"environments.0.weight": 2.0})
    made = load_config([], experiment="toy_grpo", values=values)
    assert (made.config.environments[0].weight, made.config.environments[0].options["size"]) == (2.0, 2)
