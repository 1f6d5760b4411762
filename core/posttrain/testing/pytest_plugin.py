"""Fixtures for the tests of plug-ins; pytest loads this module by itself wherever posttrain is installed.

    def test_it_trains(posttrain_plugins, tiny_run):
        posttrain_plugins.add("envs", "mine", MyEnvironment)        # only posttrain's own plug-ins, and this one
        assert tiny_run(env="mine").steps_done == 3

Nothing of posttrain is imported before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from posttrain.testing.sandbox import PluginSandbox
    from posttrain.testing.tiny_run import TinyRun

_SUITES = ("algorithm", "datapacker", "engine", "env", "hook", "transport")
pytest.register_assert_rewrite(*(f"posttrain.testing.{kind}_contract" for kind in _SUITES), "posttrain.testing.laws")


@pytest.fixture
def posttrain_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginSandbox]:
    """Temporary plug-ins, `.add(kind, name, class)` and `.install(distribution, files=…, points=…)`; others are hidden."""
    from posttrain.testing.sandbox import PluginSandbox

    sandbox = PluginSandbox(tmp_path / "posttrain-plugins", monkeypatch)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="session")
def posttrain_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with random weights; its tokens are letters and digits. Made once per session."""
    from posttrain.policy.load import quiet_libraries
    from posttrain.testing.tiny_model import write_tiny_model

    quiet_libraries()
    folder = tmp_path_factory.mktemp("posttrain") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture
def tiny_run(tmp_path: Path, posttrain_tiny_model: Path) -> TinyRun:
    """Trains three steps in a temporary folder: `tiny_run(env="mine")`, `tiny_run(["rl.objective.name=mine"])`."""
    from posttrain.testing.tiny_run import TinyRun

    return TinyRun(posttrain_tiny_model, tmp_path / "posttrain-runs")
