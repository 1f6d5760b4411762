"""A config file: what it may hold, which line is named when it cannot be read, and where its values say they came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.config import load_config
from posttrain.config.file import read_file
from posttrain.errors import ConfigError

TOY = "experiment=toy_grpo"


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., ConfigError]:
    """The error of a config file with this content."""

    def refuse(content: str | bytes, *overrides: str, name: str = "my.yaml") -> ConfigError:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError) as caught:
            load_config(overrides or [TOY], config_file=path)
        return caught.value

    return refuse


@pytest.mark.parametrize(
    ("name", "content", "message", "line", "fix"),
    [
        ("my.yaml", "seed: 1\nrl:\n\tsteps: 2\n", "is not valid YAML", 3, "indent with spaces"),
        ("my.yaml", "rl:\n  steps: 3\n seed: 2\n", "is not valid YAML", 3, "correct that line, or the one above"),
        ("my.yaml", "a: [1,\n", "is not valid YAML", 2, "correct that line"),
        ("my.yaml", "seed: 1\n---\nseed: 2\n", "is not valid YAML", 2, "correct that line"),
        ("my.yaml", b"name: x\nseed: \xe9\n", "is not UTF-8 text", 2, "save it as UTF-8"),
        ("my.yaml", "seed: 1\nname: x\nseed: 2\n", "seed is given twice, in lines 1 and 3", 3, "keep one"),
        ("my.yaml", "rl:\n  steps: 2\n  group_size: 4\n  steps: 3\n", "rl.steps is given twice, in lines 2 and 4", 4, "keep one"),
        ("my.yaml", "environments:\n- name: a\n  name: b\n", "environments.0.name is given twice", 3, "keep one"),
        ("my.yaml", "seed: 1\nrl.steps: 3\n", "line 2: rl.steps", 2, "nest them: rl: {steps: …}"),
        ("my.yaml", "rl:\n  optimizer.lr: 3\n", "line 2: optimizer.lr", 2, "nest them: optimizer: {lr: …}"),
        ("my.yaml", "seed: 1\nrl: &a\n  steps: *a\n", "contains itself", 2, "write the value out"),
        ("my.yaml", "seed: 1\nenvironments: &a [*a]\n", "contains itself", 2, "write the value out"),
        ("my.json", '{\n "rl": {\n  "steps": 3,,\n}}', "is not valid JSON", 3, "correct that line"),
        ("my.json", '{"seed": 1,\n"seed": 2}', "seed is given twice, in lines 1 and 2", 2, "keep one"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_line(refused, name, content, message, line, fix) -> None:
    error = refused(content, name=name)
    assert message in error.message and error.where.endswith(f"/{name}:{line}") and error.fix.startswith(fix)


@pytest.mark.parametrize(
    ("content", "cause"), [("", "it is empty"), ("# nothing\n", "it is empty"), ("- a\n", "sequence"), ("x", "scalar")]
)
def test_a_file_without_keys_is_refused(refused, content, cause) -> None:
    error = refused(content)
    assert "must hold a mapping of keys" in error.message and cause in error.cause


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "no.yaml")
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError) as caught:
        read_file(tmp_path)
    assert caught.value.fix == f"--config {tmp_path}/config.yaml"


def test_json_is_a_config_file_too_tabs_and_all(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps({"experiment": "toy_grpo", "seed": 4, "rl": {"optimizer": {"lr": 1e-5}}}, indent="\t"))
    loaded = load_config(config_file=path)
    assert (loaded.config.seed, loaded.config.rl.optimizer.lr) == (4, 1e-5)
    assert loaded.origins["rl.optimizer.lr"] == "my.json:6"


def test_a_byte_order_mark_and_anchors_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    text = "\ufefftracking: {tags: {a: x}}\nrollout: {max_tokens: &n 40}\nvalidation: {max_tokens: *n}\n"
    path.write_text(text, encoding="utf-8")
    loaded = load_config([TOY], config_file=path)
    assert loaded.config.validation.max_tokens == 40 and loaded.config.tracking.tags == {"a": "x"}


def test_the_experiment_in_the_file_gives_way_to_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("experiment: toy_long\nseed: 3\n")
    assert load_config(config_file=path).experiment == "toy_long"
    loaded = load_config([TOY], config_file=path)
    assert (loaded.experiment, loaded.config.seed) == ("toy_grpo", 3)


@pytest.mark.parametrize(("value", "message"), [("[toy_grpo]", "experiment must be one name"), ("toy_grp", "Could not load")])
def test_an_experiment_in_the_file_that_cannot_be(refused, value, message) -> None:
    assert message in refused(f"experiment: {value}\n", "seed=1").message


def test_an_environment_variable_is_text_until_decoded(tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SEED", "7")
    assert "write ${oc.decode:${oc.env:MY_SEED}}" in str(refused("name: a\nseed: ${oc.env:MY_SEED}\n"))
    path = tmp_path / "my.yaml"
    path.write_text("name: ${oc.env:MY_SEED}\nseed: ${oc.decode:${oc.env:MY_SEED}}\n")
    config = load_config([TOY], config_file=path).config
    assert (config.name, config.seed) == ("7", 7)


def test_an_absent_environment_variable_names_the_key_and_the_line(refused) -> None:
    error = refused("name: a\nseed: ${oc.env:NOT_SET_ANYWHERE}\n")
    assert error.where == "seed (my.yaml:2)" and error.cause == "Environment variable 'NOT_SET_ANYWHERE' not found"


def test_dots_in_names_of_the_user_are_names(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("tracking: {tags: {v1.2: x}}\nrl: {optimizer: {betas: [0.9, 0.99]}}\n")
    assert load_config([TOY], config_file=path).config.tracking.tags == {"v1.2": "x"}
