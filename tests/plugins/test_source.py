"""Source files are read by `ast`, and never run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from posttrain.plugins.source import parsed


def test_a_count_that_the_interpreter_lost_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    original, failures = ast.parse, [SystemError("AST constructor recursion depth mismatch")] * 2

    def parse(*args: Any, **kwargs: Any) -> ast.AST:
        if failures:
            raise failures.pop()
        return original(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", parse)
    assert isinstance(parsed("x = 1", Path("x.py")), ast.Module)
    failures.extend([SystemError("again")] * 3)
    with pytest.raises(SystemError, match="again"):
        parsed("x = 1", Path("x.py"))
