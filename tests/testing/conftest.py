"""Broken plug-ins, and what the law that they break says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from posttrain.errors import PosttrainError

Told = Callable[..., str]


def laws_of(suite: type) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_")}


@pytest.fixture
def laws() -> Callable[[type], set[str]]:
    return laws_of


@pytest.fixture
def told(tmp_path: Any) -> Told:
    """`told(suite, law, plug_in, **others)`: the message of a law that fails. Fails when it passes, or is skipped."""

    def call(suite: Any, law: str, plug_in: Any, **others: Any) -> str:
        function = getattr(suite, law)
        first, *rest = inspect.signature(function).parameters
        known = {"tmp_path": tmp_path, **others}
        with pytest.raises((AssertionError, pytest.fail.Exception, PosttrainError)) as caught:
            function(**{first: plug_in}, **{name: known[name] for name in rest})
        return str(caught.value)

    return call
