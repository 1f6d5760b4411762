"""`from posttrain import …`: every public name resolves, and type checkers see the same names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import posttrain


def test_every_public_name_resolves() -> None:
    for name in posttrain.__all__:
        assert getattr(posttrain, name) is not None
    assert set(posttrain.__all__) <= set(dir(posttrain))


def test_type_checkers_see_the_same_names_in_the_same_places() -> None:
    tree = ast.parse(Path(posttrain.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == posttrain._HOME_OF


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'posttrain' has no attribute 'nosuch'"):
        posttrain.nosuch  # noqa: B018
