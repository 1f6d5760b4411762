"""Without the package verifiers, which has an environment of its own (tests/adapters), the adapter says what to install."""

from __future__ import annotations

import importlib.util

import pytest

from posttrain import plugins
from posttrain.errors import PluginError


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")
def test_it_says_what_to_install() -> None:
    with pytest.raises(PluginError) as caught:
        plugins.load("envs", "verifiers", env="vf-gsm8k")
    assert "verifiers" in caught.value.message and "pip install 'posttrain[verifiers]'" in str(caught.value)
