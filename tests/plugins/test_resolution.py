"""All routes to a plug-in, and the five ways in which one fails, to the word."""

from __future__ import annotations

import pickle
import sys

import pytest

from posttrain.data.environment import Environment
from posttrain.errors import PackerError, PluginError
from posttrain.plugins import resolve
from posttrain.plugins.problems import install_command, missing_dependency

GOOD = '''"""Good things."""
from posttrain.data.environment import Environment

class Good(Environment):
    """Always right."""

    def dataset(self, split):
        return [{"id": "0", "prompt": "?"}]

    def compute_reward(self, state):
        return 1.0
'''


@pytest.fixture
def good(fake_distribution):
    return fake_distribution(
        "rl-good",
        version="0.3.1",
        points={"posttrain.envs": {"hangman": "rl_good.env:Good"}},
        files={"rl_good/__init__.py": "", "rl_good/env.py": GOOD},
    )


def one(fake_distribution, text: str, **options) -> None:
    fake_distribution(
        "rl-bad", version="2.1", points={"posttrain.envs": {"bad": "rl_bad:Env"}}, files={"rl_bad.py": text}, **options
    )
    sys.modules.pop("rl_bad", None)


def test_every_route_leads_to_the_same_class(good) -> None:
    by_name = resolve("envs", "hangman")
    assert by_name.__name__ == "Good"
    for ref in ("rl-good/hangman", "rl_good/hangman", "rl_good.env:Good", "rl_good.env.Good", by_name):
        assert resolve("envs", ref) is by_name


def test_a_file_is_a_route_too_and_its_classes_travel(tmp_path) -> None:
    import cloudpickle

    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    cls = resolve("envs", f"{path}:Good")
    assert issubclass(cls, Environment) and resolve("envs", f"{path}:Good") is cls
    sys.modules.pop(cls.__module__)
    assert pickle.loads(cloudpickle.dumps(cls())).compute_reward(None) == 1.0


def test_not_installed_suggests_the_nearest_with_its_owner(good) -> None:
    with pytest.raises(PluginError) as caught:
        resolve("envs", "hangmna", where="environments[0].name")
    exc = caught.value
    assert exc.message == "no environment named 'hangmna' is installed; did you mean 'hangman' (rl-good 0.3.1)?"
    assert exc.code == "plugin-not-installed" and exc.where == "environments[0].name" and "hangman" in exc.cause
    assert "package.module:attribute" in exc.fix and isinstance(exc, ImportError)


def test_hidden_is_said(good, monkeypatch) -> None:
    monkeypatch.setenv("POSTTRAIN_PLUGINS", "none")
    with pytest.raises(PluginError, match=r"'hangman' \(rl-good 0.3.1\) is hidden by POSTTRAIN_PLUGINS"):
        resolve("envs", "hangman")


@pytest.mark.parametrize(
    ("requires", "fix"),
    [
        (["absent-lib>=0.7"], "pip install 'absent-lib>=0.7'"),
        (['absent_lib>=0.7; extra == "games"'], "pip install 'rl-bad[games]'"),
        ([], "pip install absent_lib"),
    ],
)
def test_a_missing_dependency_is_named_not_the_plugin(fake_distribution, requires, fix) -> None:
    one(fake_distribution, "import os\nimport absent_lib.sub\n", requires=requires)
    with pytest.raises(PluginError) as caught:
        resolve("envs", "bad")
    exc = caught.value
    assert exc.message == "environment 'bad' (rl-bad 2.1) is installed but needs 'absent_lib', which is missing"
    assert exc.code == "plugin-dependency" and exc.fix == fix
    assert "rl_bad.py:2: No module named" in exc.cause
    assert isinstance(exc.__cause__, ModuleNotFoundError)


def test_modules_named_otherwise_than_their_distribution() -> None:
    assert install_command("yaml", None) == "pip install PyYAML"
    assert missing_dependency(ModuleNotFoundError("x", name="mine.sub"), "mine.env:Env") is None


@pytest.mark.parametrize("text", ["raise ValueError('boom')", "import os\nraise SystemExit('boom')", "boom boom"])
def test_an_import_that_raises_is_chained_and_located(fake_distribution, text) -> None:
    one(fake_distribution, text)
    with pytest.raises(PluginError) as caught:
        resolve("envs", "bad")
    exc = caught.value
    assert exc.message == "environment 'bad' (rl-bad 2.1) cannot be imported" and exc.code == "plugin-import"
    assert f"rl_bad.py:{text.count(chr(10)) + 1}: " in exc.cause and exc.__cause__ is not None
    assert "posttrain plugins doctor bad" in exc.fix


def test_an_entry_point_into_nothing(fake_distribution) -> None:
    fake_distribution("rl-void", points={"posttrain.envs": {"void": "rl_void_gone:Env"}}, files={})
    with pytest.raises(PluginError, match="cannot be imported: there is no module 'rl_void_gone'") as caught:
        resolve("envs", "void")
    assert "--force-reinstall rl-void" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Env: pass", "is class Env, not a subclass of Environment"),
        ("Env = 3", "is a int"),
        ("import os as Env", "is module os"),
        ("def Env(): pass", "is a function Env"),
        (
            "from posttrain.data.environment import Environment\nclass Env(Environment): pass",
            "leaves methods undefined: compute_reward, dataset",
        ),
    ],
)
def test_wrong_type(fake_distribution, text, message) -> None:
    one(fake_distribution, text)
    with pytest.raises(PluginError) as caught:
        resolve("envs", "bad")
    assert caught.value.message == f"environment 'bad' (rl-bad 2.1) {message}" and caught.value.code == "plugin-type"
    assert "posttrain.data.environment.Environment" in caught.value.fix


@pytest.mark.parametrize(
    ("api", "side", "fix"),
    [
        (2, "new", "pip install --upgrade posttrain"),
        (0, "old", "pip install --upgrade rl-bad"),
    ],
)
def test_api_is_checked_before_the_import(fake_distribution, api, side, fix) -> None:
    one(fake_distribution, f"class Env:\n    api = {api}\nraise RuntimeError('imported')\n")
    with pytest.raises(PluginError) as caught:
        resolve("envs", "bad")
    exc = caught.value
    assert exc.message == f"environment 'bad' (rl-bad 2.1) is written for api {api}, this posttrain speaks 1"
    assert exc.code == "plugin-api" and exc.fix == fix and f"too {side}" in exc.cause and "rl_bad" not in sys.modules


def test_a_missing_api_means_1(fake_distribution) -> None:
    one(fake_distribution, GOOD.replace("Good", "Env"))
    assert resolve("envs", "bad").__name__ == "Env"


def test_names_that_clash_name_both(fake_distribution, good) -> None:
    fake_distribution("other", points={"posttrain.envs": {"hangman": "rl_other:Env"}}, files={"rl_other.py": ""})
    with pytest.raises(PluginError) as caught:
        resolve("envs", "hangman")
    assert caught.value.message == "environment 'hangman' is ambiguous: other 1.0 and rl-good 0.3.1 both bring it"
    assert caught.value.fix == "write other/hangman or rl-good/hangman"
    assert resolve("envs", "rl-good/hangman").__name__ == "Good"


@pytest.mark.parametrize(
    "ref", ["no_such_module:Thing", "no_such_module.Thing", "posttrain.types:Nothing", "/no/such/file.py:Env"]
)
def test_a_path_that_leads_nowhere(ref) -> None:
    with pytest.raises(PluginError) as caught:
        resolve("envs", ref)
    assert repr(ref) in caught.value.message and caught.value.fix


def test_e9_for_a_datapacker_path() -> None:
    with pytest.raises(PackerError, match=r"^Unable to import DataPacker factory 'no_such.module:make'") as caught:
        resolve("datapackers", "no_such.module:make")
    assert caught.value.code == "E9" and isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_the_same_broken_plugin_fails_the_same_way_twice(fake_distribution) -> None:
    one(fake_distribution, "raise ValueError('boom')")
    for _ in range(2):
        with pytest.raises(PluginError, match="cannot be imported"):
            resolve("envs", "bad")


def test_errors_travel_between_processes(good) -> None:
    with pytest.raises(PluginError) as caught:
        resolve("envs", "hangmna")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.message, copy.code, copy.fix) == (caught.value.message, caught.value.code, caught.value.fix)
