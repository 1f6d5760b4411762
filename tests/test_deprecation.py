"""Two minor versions with a warning, one with an error that can be put off, then gone; nothing overstays in the source."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

import posttrain
from posttrain.deprecation import ENDS, PosttrainDeprecationWarning, deprecated
from posttrain.errors import ConfigError

CORE = Path(posttrain.__file__).parent


def call(version: str, since: str = "0.3") -> None:
    deprecated("posttrain.old", since=since, instead="posttrain.new", version=version)


@pytest.mark.parametrize("version", ["0.3.0", "0.3.9", "0.4.0"])
def test_two_minor_versions_warn(version: str) -> None:
    message = "posttrain.old is deprecated since 0.3 and will be an error in 0.5; use posttrain.new"
    with pytest.warns(PosttrainDeprecationWarning, match=message) as seen:
        call(version)
    assert seen[0].filename == __file__, "the warning points at the caller of the deprecated function"


def test_the_third_is_an_error_that_can_be_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="posttrain.old is deprecated since 0.3 and will be gone in 0.6") as caught:
        call("0.5.1")
    assert caught.value.code == "deprecated" and "POSTTRAIN_ALLOW_DEPRECATED=1" in caught.value.fix
    monkeypatch.setenv("POSTTRAIN_ALLOW_DEPRECATED", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("0.5.1")


@pytest.mark.parametrize("version", ["0.6.0", "0.12.0", "1.0.0"])
def test_then_it_is_gone(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_ALLOW_DEPRECATED", "1")
    with pytest.raises(ConfigError, match="posttrain.old is gone since 0.6"):
        call(version)


def test_users_see_it_by_default() -> None:
    assert issubclass(PosttrainDeprecationWarning, FutureWarning)


def overdue(text: str, version: str) -> list[int]:
    """The lines of calls of `deprecated` whose time is over in this version."""
    major, minor = map(int, version.split(".")[:2])
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "deprecated":
            since = next(ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg == "since")
            first = tuple(map(int, since.split(".")[:2]))
            if (major, minor) >= (first[0], first[1] + ENDS):
                lines.append(node.lineno)
    return lines


def test_what_is_over_is_removed_from_the_source() -> None:
    assert overdue("x = 1\ndeprecated('a', since='0.3', instead='b')", "0.6.0") == [2]
    assert overdue("deprecated('a', since='0.3', instead='b')", "0.5.0") == []
    found = {str(p): overdue(p.read_text(), posttrain.__version__) for p in CORE.rglob("*.py") if p.name != "deprecation.py"}
    assert not {path: lines for path, lines in found.items() if lines}
