"""The table of known names says only what is true of this posttrain."""

from __future__ import annotations

import tomllib
from pathlib import Path

from posttrain.plugins.kinds import KINDS
from posttrain.plugins.known import EXTRAS, elsewhere

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_every_name_is_a_plugin_of_posttrain_and_every_extra_exists() -> None:
    for kind, names in EXTRAS.items():
        assert set(names) == set(PROJECT["entry-points"][KINDS[kind].group]), f"known.py and pyproject.toml differ in {kind}"
        assert set(names.values()) <= {"", *PROJECT["optional-dependencies"]}


def test_what_to_type() -> None:
    assert elsewhere("algorithms", "grpo") == ("posttrain", "pip install --upgrade 'posttrain', in a clone pip install -e '.'")
    assert elsewhere("envs", "reasoning_gym")[0] == "posttrain[reasoning-gym]"
    assert elsewhere("envs", "grpo") is None and elsewhere("experiments", "arithmetic") is None
