"""`posttrain plugins check NAME [KEY=VALUE …]`: the contract suite of a plug-in's kind, run on it from the command line.

The suite is a class of `posttrain.testing` with the plug-in's name in it, run by pytest in this process. What only the author
can say, a right answer of an environment for example, is in the plug-in's own tests; the laws about it are skipped here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import EXIT_CONFIG, EXIT_OK, ConfigError, PosttrainError
from posttrain.plugins.discovery import PluginInfo, discover
from posttrain.plugins.functions import absolute
from posttrain.plugins.kinds import KINDS
from posttrain.plugins.problems import nearest

if TYPE_CHECKING:
    import pytest

SUITES = {
    "algorithms": "AlgorithmContract",
    "datapackers": "DataPackerContract",
    "envs": "EnvContract",
    "engines": "EngineContract",
    "transports": "TransportContract",
    "hooks": "HookContract",
}
SOURCE = '''"""The contract of {kind}, for one plug-in."""

from posttrain.testing import {suite}


class TestPlugin({suite}):
    plugin = {name!r}
    options = {options!r}
'''


@dataclass
class Verdict:
    """What came of the laws: their names, and of those that are broken or skipped the reason."""

    kept: list[str] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


def check(name: str | None, kind: str | None, overrides: Sequence[str]) -> int:
    """Run the laws, print one line for each, and return the exit code: 2 when one is broken."""
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("plugins check needs 'pytest', which is missing", fix="pip install 'posttrain[test]'", code="usage")
    kind, name = _find(name, kind)
    options = _options(overrides)
    _construct(kind, name, options)
    suite = SUITES[kind]
    print(f"{KINDS[kind].noun} {name!r} against posttrain.testing.{suite}", flush=True)
    verdict = run_suite(SOURCE.format(kind=kind, suite=suite, name=name, options=options))
    counts = f"{len(verdict.kept)} kept, {len(verdict.broken)} broken, {len(verdict.skipped)} skipped"
    print(f"{len(verdict.kept) + len(verdict.broken) + len(verdict.skipped)} laws: {counts}")
    return EXIT_CONFIG if verdict.broken or not verdict.kept else EXIT_OK


def _find(name: str | None, kind: str | None) -> tuple[str, str]:
    """The kind and the reference of the plug-in that is meant; a path is one of `kind`."""
    kinds = [kind] if kind else list(SUITES)
    if name is None or kind not in (None, *SUITES):
        kinds_with = ", ".join(SUITES)
        raise ConfigError("plugins check needs the name of one plug-in", cause=f"of {kinds_with}", fix="posttrain plugins list",
                          code="usage")  # fmt: skip
    if kind and (":" in name or "." in name):
        return kind, absolute(name)
    known = [info for k in kinds for info in discover(k)]
    found = sorted({info.kind for info in known if name in (info.name, info.full_name)})
    if len(found) > 1:
        raise ConfigError(f"{name!r} is the name of {' and of '.join(f'one of the {k}' for k in found)}",
                          fix=f"add --kind {' or --kind '.join(found)}", code="usage")  # fmt: skip
    if not found:
        raise _not_installed(name, known)
    return found[0], name


def _not_installed(name: str, known: Sequence[PluginInfo]) -> ConfigError:
    near = nearest(name, sorted({info.name for info in known}))
    meant = f"; did you mean {near!r}?" if near else ""
    fix = "posttrain plugins list; or name a class, with its kind: file.py:Class --kind envs"
    return ConfigError(f"no plug-in named {name!r} is installed{meant}", fix=fix, code="plugin-not-installed")


def _options(overrides: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` as everywhere: options of the plug-in, by their own names."""
    from posttrain.config.overrides import parse

    return {typed.key: typed.value for typed in parse(overrides)}


def _construct(kind: str, name: str, options: Mapping[str, Any]) -> None:
    """Make it once, so that a plug-in or options that cannot work are one screen and not one for each law."""
    from posttrain.plugins.build import build
    from posttrain.plugins.resolution import resolve

    if kind == "engines":  # its constructor needs a model
        resolve(kind, name)
    elif kind == "datapackers" and options:
        raise ConfigError(f"{name!r} takes no options: packers are made without arguments", fix="leave them out", code="usage")
    else:
        build(kind, name, options)


def run_suite(source: str) -> Verdict:
    """Run the tests of a file of this text, which prints a line for each, and nothing else."""
    import pytest

    verdict = Verdict()
    with tempfile.TemporaryDirectory(prefix="posttrain_check_") as folder:
        file = Path(folder) / f"test_{Path(folder).name}.py"  # another module each time that this process checks something
        file.write_text(source, encoding="utf-8")
        (Path(folder) / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        plain = ["-p", "no:terminal", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", f"{folder}/pytest.ini"]
        given = {name: os.environ.pop(name, None) for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
        try:
            pytest.main([*plain, f"--rootdir={folder}", f"--basetemp={folder}/tmp", str(file)], plugins=[_Printer(verdict)])
        finally:
            os.environ.update({name: value for name, value in given.items() if value is not None})
    return verdict


class _Printer:
    """A plug-in of pytest that says what becomes of each law."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        law = re.sub(r"^test_", "", item.name).replace("_", " ")
        if call.excinfo is None:
            if call.when == "call":
                self.verdict.kept.append(law)
                print(f"ok    {law}", flush=True)
            return
        reason = _reason(call.excinfo.value)
        if type(call.excinfo.value).__name__ == "Skipped":
            self.verdict.skipped.append((law, reason))
            print(f"skip  {law}: {reason}", flush=True)
            return
        self.verdict.broken.append((law, reason))
        print(f"FAIL  {law}\n      " + reason.replace("\n", "\n      "), flush=True)


def _reason(exc: BaseException) -> str:
    """What a law says of itself when it fails: its own words, without those that pytest adds to an assertion."""
    if isinstance(exc, PosttrainError) or type(exc).__name__ in ("Failed", "Skipped"):
        return str(exc)
    if isinstance(exc, AssertionError):
        return str(exc).partition("\nassert ")[0] or "the law does not hold"
    frame = traceback.extract_tb(exc.__traceback__)[-1]
    return f"{type(exc).__name__}: {exc}\n{frame.filename}:{frame.lineno}"
