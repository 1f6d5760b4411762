"""Tool calls written as Python: `name(arg=1)` on a line of its own. Read with `ast`, literals only; nothing is evaluated.

    read('calculate(expression="2*3")', 0, {"calculate": ["expression"]})

A line that begins with the name of a known tool and a bracket is a call, whole or broken; one that begins with another name is a
call if all of the line is, and else prose. Arguments by position are taken where the tool is known.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.tool_formats import Found, json_fault

LONGEST_CALL = 20_000  # characters
OPENING = r"(?m:^)[ \t]*([A-Za-z_]\w{0,63})\("
"""What may begin a call; the group is its name."""
_STOP = re.compile(r"[\"'()\[\]{}]")
_SIGNS = re.compile(r"(?:[-+~]\s*){8}")  # a parser's stack is not for the model to fill
_CLOSES = {")": "(", "]": "[", "}": "{"}


def read(text: str, name: str, start: int, opened: int, known: Mapping[str, Sequence[str]]) -> Found | None:
    """The call `name(…` of which the text begins at `start` and the arguments at `opened`; None for prose.

    known: the parameters of each tool, in order.
    """
    line = text.find("\n", start)
    limit = min(len(text), start + LONGEST_CALL) if name in known else line if line >= 0 else len(text)
    end = _closed(text, opened, limit)
    if end is None:
        return Found(name, {}, limit, "its brackets or quotes are not closed") if name in known else None
    try:
        arguments = _arguments(text[start:end].strip(), known.get(name))
    except ValueError as exc:
        return Found(name, {}, end, str(exc)) if name in known else None
    if name not in known and text[end : line if line >= 0 else len(text)].strip():
        return None
    return Found(name, arguments, end)


def _closed(text: str, at: int, limit: int) -> int | None:
    """Behind the bracket that closes the one before `at`; None when there is none, or another one, before `limit`."""
    opened = ["("]
    while stop := _STOP.search(text, at, limit):
        mark, at = stop[0], stop.end()
        if mark in "\"'":
            quote = mark * 3 if text.startswith(mark * 3, stop.start()) else mark
            past = _QUOTES[quote].match(text, stop.start() + len(quote), limit)
            if past is None:
                return None
            at = past.end()
        elif mark in _CLOSES:
            if opened.pop() != _CLOSES[mark]:
                return None
            if not opened:
                return at
        else:
            opened.append(mark)
    return None


# What follows an opening quote, with the closing one. The alternatives begin with different characters: no backtracking.
_QUOTES = {
    quote: re.compile(rf"(?s:[^\\{quote[0]}]+|\\.{'' if len(quote) == 1 else f'|{quote[0]}(?!{quote[:2]})'})*+{quote}")
    for quote in ("'", '"', "'''", '"""')
}


def _arguments(call: str, parameters: Sequence[str] | None) -> dict[str, Any]:
    """The arguments of one call by name. Raises ValueError with what is wrong, said to the model."""
    if _SIGNS.search(call):
        raise ValueError("it is not readable as Python")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = ast.parse(call, mode="eval").body
    except SyntaxError as exc:
        raise ValueError(f"it is not readable as Python: {exc.msg.partition(':')[0][:80]}") from exc
    except (RecursionError, MemoryError, ValueError):
        raise ValueError("it is not readable as Python") from None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("it is no call of a function by its name")
    given = [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
    if node.args:
        if parameters is None or len(node.args) > len(parameters):
            raise ValueError("it has too many arguments" if parameters is not None else "arguments are given by name")
        given = [*zip(parameters, node.args, strict=False), *given]
    names = [name for name, _ in given]
    if "**" in names or len(set(names)) < len(names):
        raise ValueError("it gives an argument twice, or with **")
    return {name: _literal(name, value) for name, value in given}


def _literal(name: str, node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        wanted = "text in quotes, a number, True, False, None, a list or a dict"
        raise ValueError(f"{name[:64]} must be a literal: {wanted}") from None
    if fault := json_fault(value):
        raise ValueError(f"{name[:64]}: {fault}")
    return _listed(value)


def _listed(value: Any) -> Any:
    """Tuples as lists."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
