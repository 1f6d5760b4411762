"""Python functions as tools: schemas, the check of arguments, results as text, and what cannot be a tool."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.environment import EpisodeState
from posttrain.data.tool_types import BadArgument, accept, describe
from posttrain.data.tools import Tool, schema, to_text, toolset
from posttrain.errors import ConfigError


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Point:
    x: int
    y: float = 0.0
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")


def measure(
    start: Point, unit: Unit = Unit.METRE, mode: Literal["fast", "exact"] = "fast", *, limit: Optional[int] = None,  # noqa: UP045
    weights: dict[str, float] | None = None, note: Annotated[str, "for the log"] = "",
) -> str:  # fmt: skip
    """Measure from a point.

    Takes a while.

    Args:
        start: where to begin,
            and nowhere else
        limit (int, optional): at most so many

    Returns:
        text: what was found
    """
    return "done"


def test_the_schema_says_what_the_function_does() -> None:
    function = schema(measure)["function"]
    assert function["name"] == "measure"
    assert function["description"] == "Measure from a point.\n\nTakes a while."
    parameters = function["parameters"]
    assert parameters["required"] == ["start"] and parameters["additionalProperties"] is False
    assert parameters["properties"] == {
        "start": {
            "type": "object", "required": ["x"], "additionalProperties": False,
            "properties": {
                "x": {"type": "integer"}, "y": {"type": "number"}, "tags": {"type": "array", "items": {"type": "string"}},
            },
            "description": "where to begin, and nowhere else",
        },
        "unit": {"type": "string", "enum": ["m", "ft"], "default": "m"},
        "mode": {"type": "string", "enum": ["fast", "exact"], "default": "fast"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "at most so many", "default": None},
        "weights": {
            "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}], "default": None,
        },
        "note": {"type": "string", "description": "for the log", "default": ""},
    }  # fmt: skip
    assert json.loads(json.dumps(function)) == function


def test_arguments_become_what_the_function_takes() -> None:
    tool = Tool.of(measure)
    assert tool.bind({"start": {"x": 3, "y": 2}, "unit": "ft", "weights": {"a": 1}}) == {
        "start": Point(3, 2.0), "unit": Unit.FOOT, "weights": {"a": 1.0},
    }  # fmt: skip
    assert type(tool.bind({"start": {"x": 3, "y": 2}})["start"].y) is float


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({}, "missing_argument", "start must be given"),
        ({"start": {}}, "missing_argument", "start.x must be given"),
        ({"start": {"x": "3"}}, "wrong_argument", 'start.x must be a whole number, it is "3"'),
        ({"start": {"x": 3.0}}, "wrong_argument", "start.x must be a whole number, it is 3.0"),
        ({"start": {"x": True}}, "wrong_argument", "start.x must be a whole number, it is true"),
        ({"start": {"x": 1, "y": False}}, "wrong_argument", "start.y must be a number, it is false"),
        ({"start": {"x": 1, "y": float("inf")}}, "wrong_argument", "start.y must be a number"),
        ({"start": {"x": 1, "y": 10**400}}, "wrong_argument", "start.y is too large for a number"),
        ({"start": {"x": -1}}, "wrong_argument", "x is negative"),
        ({"start": {"x": 1, "z": 1}}, "wrong_argument", "there is no start.z: x, y, tags can be given"),
        ({"start": [1]}, "wrong_argument", "start must be an object, it is [1]"),
        ({"start": {"x": 1, "tags": "ab"}}, "wrong_argument", 'start.tags must be a list, it is "ab"'),
        ({"start": {"x": 1, "tags": ["a", 1]}}, "wrong_argument", "start.tags[1] must be text, it is 1"),
        ({"start": {"x": 1}, "unit": "METRE"}, "wrong_argument", 'unit must be one of "m", "ft", it is "METRE"'),
        ({"start": {"x": 1}, "limit": "5"}, "wrong_argument", 'limit must be a whole number or null, it is "5"'),
        ({"start": {"x": 1}, "weights": {"a": "1"}}, "wrong_argument", "weights.a must be a number"),
        ({"start": {"x": 1}, "note": None}, "wrong_argument", "note must be text, it is null"),
        ({"start": {"x": 1}, "state": 1}, "wrong_argument", "there is no state"),
        ({"start": {"x": "9" * 10_000}}, "wrong_argument", "start.x must be a whole number"),
    ],
)
def test_arguments_that_do_not_fit_are_said_shortly(given: dict[str, Any], kind: str, words: str) -> None:
    with pytest.raises(BadArgument) as caught:
        Tool.of(measure).bind(given)
    assert caught.value.kind == kind and words in str(caught.value) and len(str(caught.value)) < 300


def test_a_union_takes_the_first_that_fits_and_keeps_whole_numbers() -> None:
    assert accept(float | int, 3, "x") == 3 and type(accept(float | int, 3, "x")) is int
    assert type(accept(float | None, 3, "x")) is float
    assert accept(int | list[int], [1], "x") == [1]
    with pytest.raises(BadArgument):
        accept(Literal[1, "a"], True, "x")  # True == 1
    assert accept(Literal[1, True], True, "x") is True
    assert accept(Any, {"a": [None]}, "x") == {"a": [None]}


def test_the_episode_is_not_in_the_schema() -> None:
    def look(where: str, state: EpisodeState) -> str:
        """Look."""
        return where

    tool = Tool.of(look)
    assert tool.takes_state and list(tool.schema["function"]["parameters"]["properties"]) == ["where"]
    assert tool.bind({"where": "up"}) == {"where": "up"}


def untyped(a, b: int = 1): ...


def stars(*a: int): ...


def names(**a: int): ...


def by_position(a: int, /): ...


def odd_default(a: Any = object()): ...  # noqa: B008


def nothing_default(a: int = None): ...  # type: ignore[assignment]  # noqa: RUF013


def wrong_default(a: int = "1"): ...  # type: ignore[assignment]


def nan_default(a: float = float("nan")): ...


def a_set(a: set[int]): ...


def number_keys(a: dict[int, str]): ...


def unknown_name(a: Nowhere): ...  # type: ignore[name-defined]  # noqa: F821


def other_state(state: int): ...


def episode_elsewhere(a: EpisodeState): ...


def generates(a: int):
    yield a


@dataclass
class Node:
    children: list[Node]


def holds_itself(a: Node): ...


class Box:
    def method(self, a: int): ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (untyped, "the parameter a has no type"),
        (stars, r"\*a"),
        (names, r"\*\*a"),
        (by_position, "leave `/` out"),
        (odd_default, "the default of the parameter a"),
        (nothing_default, "None = None"),
        (wrong_default, "a must be a whole number"),
        (nan_default, "default of the parameter a"),
        (a_set, "is no type of JSON"),
        (number_keys, "keys of a dict are text"),
        (unknown_name, "Nowhere"),
        (other_state, "state: EpisodeState"),
        (episode_elsewhere, "state: EpisodeState"),
        (generates, "generator"),
        (holds_itself, "holds itself"),
        (Box.method, "self.name"),
        (lambda a: a, "def name"),
        (Box, "def name"),
        (7, "def name"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_when_it_is_built(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a tool") as caught:
        Tool.of(function)
    import re

    assert re.search(words, str(caught.value)) and caught.value.fix and caught.value.cause


def test_two_tools_of_one_name_are_refused() -> None:
    def measure() -> str:
        return ""

    with pytest.raises(ConfigError, match="'measure' cannot be a tool"):
        toolset([globals()["measure"], measure])
    assert list(toolset([measure])) == ["measure"]


def test_a_method_of_an_object_is_a_tool() -> None:
    assert list(schema(Box().method)["function"]["parameters"]["properties"]) == ["a"]


def test_results_as_text() -> None:
    assert to_text("as it is\n") == "as it is\n"
    assert to_text(42) == "42" and to_text(None) == "null" and to_text(True) == "true"
    assert to_text([1, "é", {"a": (Unit.FOOT, Point(1))}]) == '[1, "é", {"a": ["ft", {"x": 1, "y": 0.0, "tags": []}]}]'
    assert to_text(Fraction(1, 3)) == "1/3" and to_text([Fraction(1, 3)]) == '["1/3"]'
    assert to_text({(1, 2): 3}) == "{(1, 2): 3}"
    assert to_text("half \ud800") == "half ?"
    assert to_text(b"ab") == "b'ab'"


annotations = st.deferred(lambda: st.one_of(
    st.sampled_from([int, float, str, bool, type(None)]),
    st.builds(lambda a: list[a], annotations),  # type: ignore[valid-type]
    st.builds(lambda a: dict[str, a], annotations),  # type: ignore[valid-type]
    st.builds(lambda a, b: a | b, annotations, st.none()),
    st.lists(st.sampled_from(["a", "b", 1, 2, None]), min_size=1, max_size=3, unique=True).map(lambda v: Literal[tuple(v)]),
))  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | st.sampled_from(["a", "b", "c"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2), max_leaves=6,
)  # fmt: skip


def valid(schema: dict[str, Any], value: Any) -> bool:
    """A validator of its own, for the schemas that describe() makes."""
    if "anyOf" in schema:
        return any(valid(one, value) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(one) is type(value) and one == value for one in schema["enum"])
    if schema["type"] == "array":
        return isinstance(value, list) and all(valid(schema["items"], item) for item in value)
    if schema["type"] == "object":
        return isinstance(value, dict) and all(valid(schema["additionalProperties"], item) for item in value.values())
    kinds = {"integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "null": (type(None),)}
    return type(value) in kinds[schema["type"]]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(annotations, values)
def test_what_the_schema_allows_is_accepted_and_nothing_else_is(annotation: Any, value: Any) -> None:
    allowed = valid(describe(annotation), value)
    try:
        taken = accept(annotation, value, "x")
    except BadArgument:
        assert not allowed
    else:
        assert allowed and taken == value
        assert accept(annotation, json.loads(json.dumps(taken)), "x") == value
