"""The tests of a coding problem: inputs and what they should give, read from a row as data, never evaluated.

A row's `tests` is a list, or its JSON text, of

    {"stdin": "1 2\\n", "stdout": "3\\n"}                                    # a program; `input` and `output` are the same
    {"name": "add", "args": [1, 2], "expected": 3}                          # a function; `kwargs` may be there too

or one object in the form of APPS, TACO and their kin, in columns: `{"inputs": […], "outputs": […]}`, and with `"fn_name": "add"`
for a function, where an input is a list of arguments, or a text with one argument as JSON in each line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import DataError


@dataclass(frozen=True, slots=True)
class StdinTest:
    """A program reads `stdin`; what it prints should be `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """`name(*args, **kwargs)` should give `expected`; all of it as in JSON."""

    name: str
    args: list[Any]
    expected: Any
    kwargs: dict[str, Any] = field(default_factory=dict)


Test = StdinTest | CallTest


def read_tests(value: Any) -> list[Test]:
    """The tests of a row. Raises DataError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as exc:
            raise _bad("are not JSON", str(exc)) from exc
    if isinstance(value, Mapping):
        value = _from_columns(value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise _bad("are not a list of tests", f"they are {value!r:.80}")
    return [_one(test) for test in value]


def some(tests: Sequence[Test], most: int | None, seed: str) -> list[Test]:
    """At most `most` of them in their order, the same ones for the same seed."""
    if most is None or len(tests) <= most:
        return list(tests)
    return [tests[i] for i in sorted(random.Random(seed).sample(range(len(tests)), most))]


def _one(test: Any) -> Test:
    if isinstance(test, Mapping):
        stdin, stdout = test.get("stdin", test.get("input")), test.get("stdout", test.get("output"))
        if isinstance(stdin, str) and isinstance(stdout, str):
            return StdinTest(stdin, stdout)
        name, args, kwargs = test.get("name"), test.get("args", []), test.get("kwargs") or {}
        if isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, Mapping) and "expected" in test:
            return CallTest(name, args, test["expected"], dict(kwargs))
    raise _bad("have one that is neither a program's nor a function's", f"{test!r:.200}")


def _from_columns(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs, name = table.get("inputs"), table.get("outputs"), table.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise _bad("need inputs and outputs of one length", f"the keys are {', '.join(map(str, table))}")
    if not name:
        return [{"stdin": _text(i), "stdout": _text(o)} for i, o in zip(inputs, outputs, strict=True)]
    found = []
    for given, expected in zip(inputs, outputs, strict=True):
        if isinstance(given, str):
            try:
                given = [json.loads(line) for line in given.splitlines() if line.strip()]
                expected = json.loads(expected) if isinstance(expected, str) else expected
            except ValueError as exc:
                raise _bad("have an input of a function that is not JSON, one argument a line", f"{given!r:.200}") from exc
        found.append({"name": name, "args": given, "expected": expected})
    return found


def _text(value: Any) -> Any:
    """A text, or lines that were kept apart."""
    return "\n".join(map(str, value)) if isinstance(value, list) else value


def _bad(what: str, cause: str) -> DataError:
    form = '[{"stdin": "1 2", "stdout": "3"}, …] or [{"name": "add", "args": [1, 2], "expected": 3}, …]'
    return DataError(f"the tests of a row {what}", cause=cause, fix=f"write {form}", code="code-tests")
