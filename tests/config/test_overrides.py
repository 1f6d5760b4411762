"""What is typed reaches the config whole, or is refused with the form that works."""

from __future__ import annotations

import pytest

from posttrain.config import load_config
from posttrain.config.overrides import parse, quoted
from posttrain.errors import ConfigError

PATH = "/ckpt/epoch=3-step=7.pt"


@pytest.mark.parametrize(
    "typed",
    [
        f"model.name_or_path={PATH}",
        f'model.name_or_path="{PATH}"',
        f"model.name_or_path='{PATH}'",
        "model.name_or_path=/ckpt/epoch\\=3-step\\=7.pt",
        f"++model.name_or_path={PATH}",
    ],
)
def test_case_ops_7_paths_with_equals(typed) -> None:
    assert load_config(["experiment=toy_grpo", typed]).config.model.name_or_path == PATH


def test_case_ops_7_what_cannot_be_read_shows_the_quoted_form() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["model.name_or_path=/ckpt/{epoch}=3,a.pt"])
    assert caught.value.fix == "quote the value: 'model.name_or_path=\"/ckpt/{epoch}=3,a.pt\"'"
    (typed,) = parse([caught.value.fix.removeprefix("quote the value: ").strip("'")])
    assert typed.value == "/ckpt/{epoch}=3,a.pt"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1e-6", 1e-6),
        ("a=null", None),
        ("a=true", True),
        ("a=[1,2]", [1, 2]),
        ("a={b: c}", {"b": "c"}),
        ("a=x y", "x y"),
        ("a=", ""),
        ("a=x=y", "x=y"),
        ("a=s3://b/k=v/w=x", "s3://b/k=v/w=x"),
    ],
)
def test_values(text, value) -> None:
    assert parse([text])[0].value == value


def test_all_bad_overrides_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["rl.steps", "a={{", "seed=1,2", "db@x=1"])
    text = str(caught.value)
    assert "cannot read 'rl.steps' as an override" in text and "cannot read 'a={{'" in text
    assert "seed=1,2 is a sweep over several values" in text and "add --multirun" in text and "packages (@)" in text


def test_a_flat_flag_without_value_gets_its_path() -> None:
    with pytest.raises(ConfigError, match="the path here is rl.objective.use_tis"):
        parse(["use_tis"])


def test_quoting_is_safe_for_quotes_and_backslashes() -> None:
    assert parse([quoted('a=say "x\\y"').strip("'")])[0].value == 'say "x\\y"'
