"""Which names a new package may have, and what is in it. That it works is in tests/integration/test_authoring.py."""

from __future__ import annotations

import ast
import keyword
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.cli.main import main
from posttrain.errors import ConfigError
from posttrain.plugins.scaffold import DRAFTS, check_name, class_name, files, write_package


@pytest.mark.parametrize(
    ("name", "says", "fix"),
    [
        ("My_2Env", "cannot name", "my-2-env"),
        ("2words", "cannot name", "words"),
        ("a--b", "cannot name", "a-b"),
        ("日本", "cannot name", "my-words"),
        ("../up", "cannot name", "up"),
        ("", "cannot name", "my-words"),
        ("class", "is a word of Python", "class-rl"),
        ("json", "Python's own library", "json-rl"),
        ("numpy", "is installed, and pip would replace it", "numpy-rl"),
        ("posttrain-envs", "can be imported here", "posttrain-envs-rl"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_one_that_can(name: str, says: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_name(name)
    assert caught.value.fix == f"for example {fix}"
    check_name(fix)


@given(st.text(min_size=1, max_size=20))
def test_what_is_suggested_for_any_text_is_a_name(text: str) -> None:
    try:
        check_name(text)
    except ConfigError as exc:
        suggested = exc.fix.removeprefix("for example ")
        assert suggested.replace("-", "_").isidentifier() and suggested.isascii()
    else:
        assert text.replace("-", "_").isidentifier() and not keyword.iskeyword(text)


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "my-words").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        write_package("env", "my_words", tmp_path)
    assert not list((tmp_path / "my-words").iterdir())


def test_a_file_of_the_current_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grown.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_package("env", "grown", tmp_path)
    monkeypatch.chdir(tmp_path / "grown")
    with pytest.raises(ConfigError, match="can be imported here"):
        check_name("grown")


@pytest.mark.parametrize("name", ["grpo", "words"])
def test_a_name_that_a_plug_in_has_is_said(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "algorithm", name, "--dir", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert ("brings 'grpo', too; write grpo/grpo where both are installed" in said) == (name == "grpo")


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("module", ["my_words", "x", "hook", "algorithm", "env", "datapacker", "decoder_only"])
def test_the_entry_point_names_the_class_and_nothing_is_left_to_fill_in(draft: str, module: str) -> None:
    written = files(draft, module)
    project = tomllib.loads(written["pyproject.toml"])
    assert project["project"]["name"] == module.replace("_", "-")
    ((target,),) = [entries.values() for entries in project["project"]["entry-points"].values()]
    path, cls = target.split(":")
    tree = ast.parse(written[f"src/{path.replace('.', '/')}.py"])
    (node,) = [one for one in tree.body if isinstance(one, ast.ClassDef)]
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    assert node.name == cls and cls not in bases, "a class of the name of its base"
    assert not [path for path, text in written.items() if "$" in text]


def test_class_names() -> None:
    assert class_name("my_sums", "Env") == "MySumsEnv"
    assert class_name("my_env", "Env") == "MyEnv"
    assert class_name("hook", "Hook") == "HookHook"


def test_check_runs_the_laws_of_a_class_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "loud.py").write_text(
        "from posttrain import Hook\n\nclass Loud(Hook):\n    'Fails.'\n    def run_end(self):\n        raise OSError('disk')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "check", "loud.py:Loud", "--kind", "hooks"]) == 2
    out = capsys.readouterr().out
    assert "FAIL  it gets through a run\n      hook 'hook'" in out and "failed in run_end: OSError: disk" in out
    assert "ok    it names a contract version" in out and out.endswith(" broken, 1 skipped\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "needs the name of one plug-in"),
        (["arithmetik"], "did you mean 'arithmetic'"),
        (["preference"], "--kind datapackers or --kind envs"),
        (["arithmetic", "digits=9"], "digits=9 must be 1 to 6"),
        (["arithmetic", "digit=1"], "did you mean digits"),
        (["decoder_only", "a=1"], "takes no options"),
        (["smollm2", "--kind", "experiments"], "needs the name of one plug-in"),
    ],
)
def test_check_refuses_what_it_cannot_check(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", *arguments]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.out == ""


def test_check_says_that_pytest_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from posttrain.cli import check

    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    assert main(["plugins", "check", "arithmetic"]) == 2
    assert "pip install 'posttrain[test]'" in capsys.readouterr().err
