"""The built-in environments keep the contract of environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from posttrain.data.environment import Environment
from posttrain.testing import EnvContract
from posttrain_envs.arithmetic import Arithmetic
from posttrain_envs.preference import Preference


class TestArithmetic(EnvContract):
    @pytest.fixture
    def env(self) -> Environment:
        return Arithmetic(Arithmetic.Options(operations=("+", "-", "*"), size=500, test_size=50))

    def gold(self, row: Mapping[str, Any]) -> str:
        return str(row["answer"])


class TestPreference(EnvContract):
    @pytest.fixture
    def env(self) -> Environment:
        rows = [{"id": str(i), "prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(40)]
        return Preference(Preference.Options(data=rows, test_size=8))

    def gold(self, row: Mapping[str, Any]) -> str:
        return str(row["chosen"])

    def wrong(self, row: Mapping[str, Any]) -> list[str]:
        return [row["rejected"]]


class TestReasoningGym(EnvContract):
    plugin = "reasoning_gym"
    options: ClassVar = {"task": "basic_arithmetic", "size": 40, "test_size": 20}

    def gold(self, row: Mapping[str, Any]) -> str:
        return f"I think so. <answer>{row['answer']}</answer>"


class TestTheSmallestEnvironment(EnvContract):
    """The one that the module's docstring shows."""

    @pytest.fixture
    def env(self) -> Environment:
        import inspect
        import textwrap

        from posttrain.data import environment

        source = textwrap.dedent((inspect.getdoc(environment) or "").split("The smallest environment:")[1])
        scope = {"Environment": Environment, "__name__": "__main__"}
        exec(source, scope)
        return scope["Parity"]()  # type: ignore[operator, no-any-return]

    def gold(self, row: Mapping[str, Any]) -> str:
        return str(row["answer"])
