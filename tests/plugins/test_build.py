"""`posttrain.load` builds with strict options; the doctor quarantines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FunctionType

import pytest

from posttrain.data.environment import Environment
from posttrain.errors import ConfigError, PackerError, PluginError
from posttrain.plugins import doctor, load, quarantined
from posttrain.plugins.build import build


class Words(Environment):
    """Words."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        length: int = 5
        mode: str = "easy"
        path: str

        def __post_init__(self) -> None:
            if self.length < 1:
                raise ValueError("length must be positive")

    def dataset(self, split):
        return []

    def compute_reward(self, state):
        return 0.0


def test_load_checks_all_options_at_once() -> None:
    assert load("envs", Words, path="x").options == Words.Options(length=5, mode="easy", path="x")
    with pytest.raises(ConfigError) as caught:
        load("envs", Words, lenght=3, mode=True)
    text = str(caught.value)
    assert "the options of 'Words' cannot work: 3 problems" in text
    assert "lenght: unknown key" in text and "did you mean length?" in text
    assert "mode: must be text, not true" in text and "path: missing value" in text


def test_an_options_own_check_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="length must be positive") as caught:
        load("envs", Words, path="x", length=0)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_algorithm_takes_flat_options_and_a_context() -> None:
    from posttrain.objective.algorithm import Context

    algorithm = load("algorithms", "grpo", clip_high=0.4, context=Context(n_mini=2))
    assert algorithm.options.clip_high == 0.4 and algorithm.context.n_mini == 2
    with pytest.raises(ConfigError, match="clip_hi"):
        load("algorithms", "grpo", clip_hi=0.4)


def test_an_engine_needs_its_spec() -> None:
    from posttrain.rollout.engine import Engine

    spoken = {name: FunctionType(vars(Engine)[name].__code__, {}) for name in Engine.__abstractmethods__}
    cls = type("Silent", (Engine,), spoken)
    with pytest.raises(ConfigError, match="'Silent' needs spec to be built"):
        load("engines", cls)
    assert load("engines", cls, spec="the spec").spec == "the spec"


def test_e10_names_what_came_back() -> None:
    with pytest.raises(PackerError, match="must return a DataPacker") as caught:
        load("datapackers", "builtins:dict")
    assert caught.value.code == "E10" and "a dict" in caught.value.cause


def test_build_names_the_config_path() -> None:
    with pytest.raises(PluginError) as caught:
        build("envs", "nosuch", {}, where="environments[2].name")
    assert caught.value.where == "environments[2].name"


GOOD = """from posttrain.data.environment import Environment
class Good(Environment):
    def dataset(self, split): return []
    def compute_reward(self, state): return 1.0
"""


@pytest.fixture
def three(fake_distribution):
    """The plug-ins of case OPS-5: one good, one with an absent dependency, one that raises."""
    fake_distribution("rl-good", points={"posttrain.envs": {"good": "ops_good:Good"}}, files={"ops_good.py": GOOD})
    fake_distribution(
        "rl-import",
        version="0.2",
        points={"posttrain.envs": {"bad_import": "ops_import:Env"}},
        files={"ops_import.py": "import not_there\n" + GOOD.replace("Good", "Env")},
    )
    fake_distribution(
        "rl-register",
        version="0.3",
        points={"posttrain.envs": {"bad_register": "ops_register:Env"}},
        files={"ops_register.py": "raise RuntimeError('cannot register')\nclass Env: pass"},
    )
    for name in ("ops_good", "ops_import", "ops_register"):
        sys.modules.pop(name, None)


def test_case_ops_5_broken_plugin(three) -> None:
    assert load("envs", "good").compute_reward(None) == 1.0
    lines = {finding.plugin.name: str(finding) for finding in doctor("envs")}
    assert lines["good"] == "envs good (rl-good 1.0): ok"
    assert "bad_import (rl-import 0.2)" in lines["bad_import"] and "not_there" in lines["bad_import"]
    assert "bad_register (rl-register 0.3)" in lines["bad_register"] and "cannot register" in lines["bad_register"]
    assert all("\n" not in line for line in lines.values())
    with pytest.raises(PluginError) as caught:
        load("envs", "bad_import")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(PluginError) as caught:
        load("envs", "nosuch")
    assert {"good", "bad_import", "bad_register", "arithmetic"} <= set(caught.value.cause.removeprefix("installed: ").split(", "))


def test_quarantine_looks_without_importing(three) -> None:
    (finding,) = quarantined()
    assert str(finding) == "envs bad_import (rl-import 0.2): needs 'not_there', which is missing"
    assert finding.fix == "pip install not_there" and "ops_import" not in sys.modules


def test_the_doctor_can_look_at_one(three) -> None:
    assert [finding.plugin.name for finding in doctor(name="rl-good/good")] == ["good"]
