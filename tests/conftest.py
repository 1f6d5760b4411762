"""Fixtures that several areas share."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from posttrain.testing.sandbox import write_distribution

FakeDistribution = Callable[..., Path]


@pytest.fixture
def fake_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDistribution:
    """Installs a distribution for one test: metadata, entry points and files in a folder at the front of sys.path."""

    def install(
        name: str,
        *,
        version: str = "1.0",
        points: Mapping[str, Mapping[str, str]],
        files: Mapping[str, str],
        requires: Sequence[str] = (),
    ) -> Path:
        root = tmp_path / f"site-{name}"
        write_distribution(root, name, version=version, points=points, files=files, requires=requires)
        monkeypatch.syspath_prepend(str(root))
        importlib.invalidate_caches()
        return root

    return install


def pytest_configure() -> None:
    """A suite that a shell started in the background inherits an ignored Ctrl-C, and so would the commands that it tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
