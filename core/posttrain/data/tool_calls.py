"""From an assistant's text to the tool calls in it, and how tools are told to a model whose chat template knows none.

    parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')     # [ToolCall("call00001", "add", {"a": 1}, …)]
    parse("add(a=1)", "python", tools=tools)
    with_described_tools(messages, tools)                                      # the same messages, tools in the system message

A format is one of `FORMATS`, which are those of chat templates; `json`, which is that of Hermes; or `python`. `auto` finds any
of `FORMATS` by its marks. Text and calls may alternate, calls follow one another. What a model writes while it thinks, also
when it never stops, is no call. A call that cannot be read is in the list too, with its `problem`: the model is to hear of it.
All is linear in the text; more than 64 calls of one turn are one problem.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from posttrain.data import python_calls
from posttrain.data.tool_formats import FORMATS as FORMATS
from posttrain.data.tool_formats import MOST_CALLS, Found, bare, call_of, read_json
from posttrain.data.tool_formats import format_of as format_of
from posttrain.types import Message

TextFormat: TypeAlias = Literal["json", "python"]
CallFormat: TypeAlias = Literal["auto", "json", "python", "hermes", "llama3", "mistral", "deepseek"]
MARKS: frozenset[str] = frozenset(mark for one in FORMATS.values() for mark in one.marks)
"""What a packer must not leave out of a decoded turn, although a tokenizer may call it special."""

_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model wrote.

    id         the model's own where its format has one, else `call00001` and on: nine letters and digits, as templates ask for
    raw        its text
    problem    why it cannot be run, said to the model; "" when it can be read. Names and types are not looked at here
    """

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str = ""
    problem: str = ""


def parse(
    text: str, format: CallFormat = "auto", *, tools: Sequence[Mapping[str, Any]] = (), first: int = 1, thinking: bool = False
) -> list[ToolCall]:
    """The calls of a turn, in order. Never raises.

    tools     schemas of the tools that there are: `python` knows by them what is a call, and arguments by position
    first     the number of the first call, for ids that no other turn has
    thinking  the prompt has opened `<think>`: there is no call before `</think>`
    """
    at = _after_prompted_thinking(text, thinking)
    known = {tool["function"]["name"]: list(tool["function"]["parameters"].get("properties", ())) for tool in tools}
    found = list[tuple[int, Found]]()
    while len(found) <= MOST_CALLS and (mark := _OPENINGS[format].search(text, at)):
        start, at = mark.span()
        if mark[0] == _THINK:
            closed = text.find(_END_THINK, at)
            if closed < 0:
                break
            at = closed + len(_END_THINK)
        elif format == "python":
            call = python_calls.read(text, mark[1], start, at, known)
            if call is not None:
                found.append((start, call))
                at = call.end
        else:
            calls, at = _READERS[mark[0]](text, at)
            found += [(start, call) for call in calls]
    if not found and format in ("auto", "llama3"):
        start = _after_thinking(text, _after_prompted_thinking(text, thinking))
        found = [(start, call) for call in bare(text, start)[0]]
    if len(found) > MOST_CALLS:
        too_many = f"a turn may hold {MOST_CALLS} calls; the others were left out"
        found = [*found[:MOST_CALLS], (found[MOST_CALLS][0], Found("", {}, len(text), too_many))]
    return [
        ToolCall(call.id or f"call{number:05d}", call.name, call.arguments, text[start : call.end], call.problem)
        for number, (start, call) in enumerate(found, first)
    ]


def of_message(message: Mapping[str, Any], first: int = 1) -> list[ToolCall]:
    """The calls of an assistant's message that holds them apart from its text, as OpenAI's and some packers' do."""
    found = []
    for number, one in enumerate(message.get("tool_calls") or (), first):
        function = one.get("function", one)
        given = function.get("arguments") or {}
        raw = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        try:
            call = call_of({"name": function.get("name"), "arguments": read_json(raw, 0)[0]}, len(raw))
        except ValueError as exc:
            call = Found(str(function.get("name") or ""), {}, len(raw), str(exc))
        found.append(ToolCall(one.get("id") or f"call{number:05d}", call.name, call.arguments, raw, call.problem))
    return found


def describe(tools: Sequence[Mapping[str, Any]], format: TextFormat = "json") -> str:
    """What a system message says of the tools, and how to call them."""
    functions = [tool["function"] for tool in tools]
    if format == "python":
        return "\n\n".join(["# Tools\n\nYou may call these functions:", *map(_signature, functions), _HOW_PYTHON])
    listed = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
    return f"# Tools\n\nYou may call these functions:\n<tools>\n{listed}\n</tools>\n\n{_HOW_JSON}"


def with_described_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format: TextFormat = "json"
) -> list[Message]:
    """The messages with the tools described at the end of their system message, or in one before them."""
    rest, section = [cast(Message, dict(message)) for message in messages], describe(tools, format)
    if not rest or rest[0].get("role") != "system":
        return [Message(role="system", content=section), *rest]
    said = rest[0].get("content") or ""
    if isinstance(said, str):
        rest[0]["content"] = f"{said}\n\n{section}" if said.strip() else section
    else:  # parts, as models that see have them
        rest[0]["content"] = [*said, {"type": "text", "text": section}]
    return rest


def _after_prompted_thinking(text: str, thinking: bool) -> int:
    """Where the turn begins to count: behind a `</think>` whose `<think>` the prompt has written."""
    closed = text.find(_END_THINK)
    if closed >= 0 and (thinking or text.find(_THINK, 0, closed) < 0):
        return closed + len(_END_THINK)
    return len(text) if thinking else 0


def _after_thinking(text: str, at: int) -> int:
    """Behind the thinking that a turn begins with."""
    while (thought := _THOUGHT.match(text, at)) is not None:
        closed = text.find(_END_THINK, thought.end())
        at = closed + len(_END_THINK) if closed >= 0 else len(text)
    return at


def _signature(function: Mapping[str, Any]) -> str:
    """`add(a: integer, b: integer = 1)`, what it does, and what its parameters are."""
    schema = function["parameters"]
    given, lines = [], []
    for name, one in schema.get("properties", {}).items():
        default = f" = {one['default']!r}" if "default" in one else ""
        given.append(f"{name}: {_kind(one)}{default}")
        if one.get("description"):
            lines.append(f"    {name}: {one['description']}")
    about = [f"    {line}" for line in function.get("description", "").splitlines()]
    return "\n".join([f"{function['name']}({', '.join(given)})", *about, *lines])


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(map(_kind, schema["anyOf"]))
    if schema.get("type") == "array" and "items" in schema:
        return f"list of {_kind(schema['items'])}"
    if "properties" in schema:
        return "{" + ", ".join(f"{name!r}: {_kind(one)}" for name, one in schema["properties"].items()) + "}"
    return _WORDS.get(schema.get("type", ""), "any")


_WORDS = {
    "integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "None", "array": "list", "object": "dict",
}  # fmt: skip
_HOW_JSON = (
    "To call one, write its name and arguments as JSON between tags:\n"
    '<tool_call>\n{"name": "name of the function", "arguments": {"name of a parameter": "value"}}\n</tool_call>\n'
    "You may write several calls. The next message holds their results. An answer without a call is final."
)
_HOW_PYTHON = (
    "To call one, write the call on a line of its own, arguments by name and as literals: name(parameter=1, other=\"text\")\n"
    "You may write several calls. The next message holds their results. An answer without a call is final."
)  # fmt: skip

_READERS = {opening: one.read for one in FORMATS.values() for opening in one.openings}


def _any_of(openings: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, (_THINK, *openings))))


_THOUGHT = re.compile(rf"\s*{_THINK}")
_OPENINGS: dict[str, re.Pattern[str]] = {
    "auto": _any_of(list(_READERS)),
    "json": _any_of(FORMATS["hermes"].openings),
    "python": re.compile(f"{_THINK}|{python_calls.OPENING}"),
    **{name: _any_of(one.openings) for name, one in FORMATS.items()},
}
