"""The fixtures that authors get: temporary plug-ins and nothing else, and a whole run in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from posttrain import Environment, plugins
from posttrain.data.environment import EpisodeState, Rows, Split
from posttrain.errors import ConfigError, PluginError
from posttrain.objective import PolicyGradient
from posttrain.objective.groups import centred
from posttrain.testing.sandbox import PluginSandbox
from posttrain.testing.tiny_run import TinyRun
from posttrain_datapackers.decoder_only import DecoderOnlyPacker


class Vowels(Environment):
    """Begin with a vowel."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        bonus: float = 1.0  # for a vowel

    def dataset(self, split: Split) -> Rows:
        return Rows(40, lambda i: {"id": f"{split}{i}", "prompt": f"{split}{i}"})

    def compute_reward(self, state: EpisodeState) -> float:
        return float(state.completion[:1] in tuple("aeiou")) * float(self.options.bonus)


class Plain(PolicyGradient):
    """Centred."""

    def advantages(self, rewards: Any, groups: Any, trained: Any) -> Any:
        return centred(rewards, groups, trained)


class Upside(DecoderOnlyPacker):
    """Asks the prompt backwards."""

    def get_rollout_input(self, prompt: Any) -> dict[str, Any]:
        return super().get_rollout_input(prompt[::-1] if isinstance(prompt, str) else prompt)


def names(kind: str) -> set[str]:
    return {info.name for info in plugins.discover(kind)}


def test_only_posttrain_s_own_and_what_is_added_is_seen(fake_distribution: Any, posttrain_plugins: PluginSandbox) -> None:
    fake_distribution("other", points={"posttrain.envs": {"other": "other_env:Other"}}, files={"other_env.py": "1/0"})
    own = names("envs")
    assert "arithmetic" in own and "other" not in own
    posttrain_plugins.add("envs", "mine", Vowels)
    assert names("envs") == own | {"mine"}
    posttrain_plugins.allow("other")
    assert names("envs") == own | {"mine", "other"}


def test_without_the_fixture_nothing_is_hidden_and_nothing_stays(fake_distribution: Any) -> None:
    fake_distribution("other", points={"posttrain.envs": {"other": "other_env:Other"}}, files={"other_env.py": "1/0"})
    assert "other" in names("envs") and "mine" not in names("envs")
    assert "POSTTRAIN_PLUGINS" not in os.environ


def test_a_class_of_the_test_is_a_plug_in_with_help_and_options(posttrain_plugins: PluginSandbox) -> None:
    posttrain_plugins.add("envs", "mine", Vowels)
    assert plugins.load("envs", "mine", bonus=2.0).options.bonus == 2.0
    (info,) = (i for i in plugins.discover("envs") if i.name == "mine")
    assert info.card.help == "Begin with a vowel." and not info.card.problem
    with pytest.raises(ConfigError, match="bonus"):
        plugins.load("envs", "mine", bonsu=2.0)


def test_what_is_wrong_with_it_is_said_as_of_any_other(posttrain_plugins: PluginSandbox) -> None:
    posttrain_plugins.add("envs", "mine", Plain)
    with pytest.raises(PluginError, match="mine"):
        plugins.load("envs", "mine")


def test_a_package_of_files_is_installed_for_other_processes_too(posttrain_plugins: PluginSandbox) -> None:
    source = "from posttrain_envs.arithmetic import Arithmetic\nclass Mine(Arithmetic):\n    'Sums.'\n"
    points = {"posttrain.envs": {"mine": "acme_rl:Mine"}}
    posttrain_plugins.install("acme-rl", files={"acme_rl.py": source}, points=points, version="2.1")
    assert type(plugins.load("envs", "acme-rl/mine")).__name__ == "Mine"
    code = "from posttrain import discover; print([i.full_name + ' ' + i.version for i in discover('envs') if not i.builtin])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['acme-rl/mine 2.1']"


def test_modules_of_temporary_packages_are_forgotten(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sandbox = PluginSandbox(tmp_path, patch)
        sandbox.install("acme", files={"acme_gone.py": "x = 1"}, points={})
        __import__("acme_gone")
        sandbox.close()
    assert "acme_gone" not in sys.modules and not any(str(tmp_path) in path for path in sys.path)


def test_three_steps_with_an_environment_of_the_test(posttrain_plugins: PluginSandbox, tiny_run: TinyRun) -> None:
    posttrain_plugins.add("envs", "mine", Vowels)
    result = tiny_run(env="mine", bonus=3.0)
    assert result.steps_done == 3 and len(result.rollouts()) == 16
    rows = result.rollouts()
    assert all(row["reward"] == 3.0 * (row["completion"][:1] in tuple("aeiou")) for row in rows)
    assert any(metrics["grad_norm"] for metrics in result.metrics()), "it learned something"


def test_an_algorithm_and_a_packer_by_overrides_and_a_resume(posttrain_plugins: PluginSandbox, tiny_run: TinyRun) -> None:
    posttrain_plugins.add("algorithms", "plain", Plain)
    posttrain_plugins.add("datapackers", "upside", Upside)
    result = tiny_run(["rl.objective.name=plain", "rl.data.packer=upside", "rl.steps=1"])
    assert result.steps_done == 1 and any(metrics["loss"] is not None for metrics in result.metrics())
    assert result.rollouts()[0]["prompt"].replace(" ", "").endswith("rettel")
    assert tiny_run(["rl.steps=2"], resume=result.run).steps_done == 1


def test_pytest_loads_it_and_nothing_of_posttrain(tmp_path: Path) -> None:
    """As anyone's test run has it: the fixtures are there, and neither torch nor any part that is not needed is imported."""
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_it(request):\n"
        "    assert request.config.pluginmanager.hasplugin('posttrain')\n"
        "    heavy = ('posttrain', 'torch', 'transformers', 'cloudpickle', 'numpy')\n"
        "    loaded = {name for name in sys.modules if name.split('.')[0] in heavy}\n"
        "    assert loaded == {'posttrain', 'posttrain.testing', 'posttrain.testing.pytest_plugin'}, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-c", os.devnull,
         f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout and "warning" not in done.stdout


