"""Objects of a process as references, and the way back."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.environment import Environment
from posttrain.errors import ConfigError, PluginError
from posttrain.plugins.build import build
from posttrain.plugins.objects import References, held, import_path
from posttrain.plugins.resolution import import_target, resolve


class Mine(Environment):
    """An environment of a test."""

    def dataset(self, split: Any) -> Any:
        return [{"id": "0", "prompt": "?"}]

    def compute_reward(self, state: Any) -> float:
        return 1.0


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`my_pack.rewards` and the single file `my_single.py`, importable for one test."""
    (tmp_path / "my_pack").mkdir()
    (tmp_path / "my_pack" / "__init__.py").touch()
    for file in ("my_pack/rewards.py", "my_single.py"):
        (tmp_path / file).write_text("def score(c): return 1.0\nclass A:\n    def b(self): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] in ("my_pack", "my_single")]:
        del sys.modules[name]


def test_what_an_import_gives_is_named_by_its_import(package: Path) -> None:
    packed, single = importlib.import_module("my_pack.rewards"), importlib.import_module("my_single")
    named = {
        "my_pack.rewards:score": packed.score,
        f"{package}/my_single.py:score": single.score,
        f"{package}/my_single.py:A.b": single.A.b,
        "json:dumps": json.dumps,
        "builtins:len": len,
        "posttrain.data.environment:Environment": Environment,
    }
    for ref, value in named.items():
        assert References().of(value, "x") == ref and import_target(ref) is value


def test_everything_else_is_held_by_this_process_alone() -> None:
    refs = References()

    def inner() -> None: ...

    values = [inner, lambda: 1, [1], [2], Mine().compute_reward, Mine()]
    given = [refs.of(value, name) for value, name in zip(values, ("x", "fmt", "data", "data", "x", "environment"), strict=True)]
    assert given == ["object:inner", "object:fmt", "object:data", "object:data-2", "object:compute_reward", "object:environment"]
    assert [held(ref) for ref in given] == values == [import_target(ref) for ref in given]
    assert refs.of(values[3], "data") == "object:data-2"  # the same object, the same name
    assert References().of([3], "data") == "object:data" and held("object:data") == [3]  # a later config


def test_a_function_that_was_replaced_in_its_module_is_not_what_an_import_gives(package: Path) -> None:
    module = importlib.import_module("my_single")
    old = module.score
    module.score = lambda c: 2.0
    assert import_path(old) is None and import_path(module.score) is None


def test_an_object_of_another_process_says_how_to_give_it_again() -> None:
    with pytest.raises(ConfigError, match="is an object of the Python process that wrote this config") as caught:
        held("object:of_somebody_else")
    assert "posttrain.train(resume=RUN, reward=the_function)" in caught.value.fix
    with pytest.raises(ConfigError, match="of_somebody_else"):
        resolve("envs", "object:of_somebody_else")


def test_an_environment_class_or_object_is_a_plugin_by_its_reference() -> None:
    refs, env = References(), Mine()
    assert isinstance(build("envs", refs.of(Mine, "environment"), {}), Mine)
    ref = refs.of(env, "environment")
    assert build("envs", ref, {}) is env
    with pytest.raises(ConfigError, match="is an object, options size have no place"):
        build("envs", ref, {"size": 3})
    with pytest.raises(PluginError, match="environment 'object:list'"):
        resolve("envs", refs.of([1], "list"))


def test_a_script_that_is_imported_is_not_run_again_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`import my_script`, and it trains: its functions travel by value, for an import would train again."""
    (tmp_path / "my_script_of_objects.py").write_text(
        "import subprocess, sys, cloudpickle\n"
        "from posttrain.plugins.objects import References\n"
        "def score(c): return 5.0\n"
        "ref, sent = References().of(score, 'reward'), cloudpickle.dumps(score)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("my_script_of_objects")
    assert module.ref == "object:score"
    code = "import sys, pickle; print(pickle.load(sys.stdin.buffer)('x'), 'my_script_of_objects' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], input=module.sent, capture_output=True, check=True)
    assert done.stdout.split() == [b"5.0", b"False"]


def test_a_module_that_no_other_process_finds_travels_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the modules of a test suite, or of a notebook's magic."""
    import types

    import cloudpickle

    module = types.ModuleType("made_by_hand")
    exec("def score(c): return 5.0", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert References().of(module.score, "x") == "object:score"
    code = "import sys, pickle; print(pickle.load(sys.stdin.buffer)('x'))"
    done = subprocess.run([sys.executable, "-c", code], input=cloudpickle.dumps(module.score), capture_output=True, check=True)
    assert done.stdout.strip() == b"5.0"


def test_the_options_of_a_file_can_be_read_after_an_object_of_it_came_back(tmp_path) -> None:
    """cloudpickle gives back the class that it sent, and overwrites what the class holds."""
    import cloudpickle

    from posttrain.plugins import load

    (tmp_path / "sums.py").write_text(FILE)
    sent = load("envs", f"{tmp_path}/sums.py:Sums", size=3)
    back = cloudpickle.loads(cloudpickle.dumps(sent))
    assert type(back) is type(sent) and back.options == sent.options
    assert load("envs", f"{tmp_path}/sums.py:Sums", size=4).options.size == 4


FILE = """
from dataclasses import dataclass
from posttrain import Environment

class Sums(Environment):
    @dataclass(frozen=True, kw_only=True)
    class Options:
        size: int = 5

    def dataset(self, split):
        return []

    def compute_reward(self, state):
        return 1.0
"""
