"""How chat templates have tool calls written, and what recognises each: one table, `FORMATS`.

    format_of(template)                                  # the ToolFormat that a template's text shows, or None
    read = FORMATS["hermes"].read
    read('<tool_call>{"name": "f"}</tool_call>', 11)     # ([Found("f", {}, …)], 40): from behind the opening on

Every reader is linear in the text and never raises: what cannot be read is a `Found` with a `problem`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_CALLS = 64  # of one turn
DEEPEST = 64  # brackets of a call's arguments within each other
_FIRST_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})"')


@dataclass(frozen=True, slots=True)
class Found:
    """A call as it was read. `end` is where its text ends; `problem` says why it is none, and `id` is the model's own."""

    name: str
    arguments: dict[str, Any]
    end: int
    problem: str = ""
    id: str = ""


Reader = Callable[[str, int], "tuple[list[Found], int]"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """signs    a template whose text has one of them has calls written in this format
    openings  what begins a call
    marks     all that is around calls and may be a special token of a tokenizer: it must survive decoding
    read      the calls behind an opening that ends at a position, and where to go on
    """

    name: str
    signs: tuple[str, ...]
    openings: tuple[str, ...]
    read: Reader
    marks: tuple[str, ...] = field(default=())


def format_of(template: str | None) -> ToolFormat | None:
    """The format of the calls that a chat template asks for; None for one that says nothing of tools."""
    return next((one for one in FORMATS.values() if any(sign in (template or "") for sign in one.signs)), None)


def read_json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at a position, and where it ends. Raises ValueError with what is wrong, said to the model."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as exc:
        raise ValueError(f"it is not JSON: {exc.msg} at character {exc.pos - at}") from exc
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    except ValueError as exc:
        raise ValueError(said(exc)) from exc
    if fault := json_fault(value):
        raise ValueError(fault)
    return value, end


def said(exc: ValueError) -> str:
    """What an exception says, without the advice to a programmer that follows."""
    return str(exc).partition(";")[0][:120]


def json_fault(value: Any) -> str:
    """Why a value is none that JSON can say, or is nested too deeply; "" when it is fine."""
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    return "the keys of an object must be text"
                inner += item.values()
            elif isinstance(item, (list, tuple)):
                inner += item
            elif isinstance(item, float) and not math.isfinite(item):
                return "a number is too large"
            elif not (item is None or isinstance(item, (str, int, float))):
                return f"{str(item)[:40]} is no text, number, list or object"
        if not inner:
            return ""
        level = inner
    return "its brackets are nested too deeply"


def call_of(value: Any, end: int) -> Found:
    """A call from its JSON: `name`, and an object `arguments` (or `parameters`)."""
    if not isinstance(value, dict):
        return Found("", {}, end, f"it is {_kind(value)}, not an object with name and arguments")
    name, given = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return Found("", {}, end, "it has no name")
    if not isinstance(given, dict):
        return Found(name, {}, end, f"arguments must be an object, it is {_kind(given)}")
    own = value.get("id")
    return Found(name, given, end, id=own if isinstance(own, str) else "")


def broken(text: str, start: int, end: int, problem: str) -> Found:
    """A call that could not be read, under the name that can still be seen in it."""
    name = _FIRST_NAME.search(text[start : min(end, start + 300)])
    return Found(name[1] if name else "", {}, end, problem)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it gives a name twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


# A line break within a text is let through: it can mean one thing only.
_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number, strict=False)
_SPACE = re.compile(r"\s*")


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _nearest(text: str, at: int, marks: Iterable[str]) -> int:
    """Where the first of the marks is, else the end of the text."""
    return min((found for mark in marks if (found := text.find(mark, at)) >= 0), default=len(text))


# --- Hermes, Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call> -----------------------------------------------------

_CALL, _END_CALL = "<tool_call>", "</tool_call>"


def _hermes(text: str, at: int) -> tuple[list[Found], int]:
    try:
        value, end = read_json(text, _skip(text, at))
    except ValueError as exc:
        return _lost(text, at, str(exc))
    end = _skip(text, end)
    if not text.startswith(_END_CALL, end):
        return _lost(text, at, f"{_END_CALL} must follow the JSON", end)
    end += len(_END_CALL)
    return [call_of(value, end)], end


def _lost(text: str, at: int, problem: str, past: int | None = None) -> tuple[list[Found], int]:
    """One broken call, up to its closing tag or the next call."""
    end = _nearest(text, at if past is None else past, (_END_CALL, _CALL))
    if text.startswith(_END_CALL, end):
        end += len(_END_CALL)
    elif end == len(text) and past is None:
        problem += f"; {_END_CALL} is missing, too"
    return [broken(text, at, end, problem)], end


# --- Llama 3: <|python_tag|>{"name": …, "parameters": {…}}, several with ; between, also without the tag -----------------------


def _llama(text: str, at: int) -> tuple[list[Found], int]:
    calls: list[Found] = []
    while True:
        start = _skip(text, at)
        try:
            value, at = read_json(text, start)
        except ValueError as exc:
            return [*calls, broken(text, start, len(text), str(exc))], len(text)
        calls.append(call_of(value, at))
        after = _skip(text, at)
        if not text.startswith(";", after) or len(calls) > MOST_CALLS:
            return calls, at
        at = after + 1


def bare(text: str, at: int) -> tuple[list[Found], int]:
    """Llama's calls without a tag: the text from `at` is nothing else. No calls for any other text, JSON answers included."""
    start = _skip(text, at)
    if not text.startswith("{", start) or '"name"' not in text or not ('"parameters"' in text or '"arguments"' in text):
        return [], at
    calls, end = _llama(text, start)
    return (calls, end) if _skip(text, end) == len(text) else ([], at)


# --- Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}], and newer: [TOOL_CALLS]name[ARGS]{…} ------------------------

_MISTRAL_NAME = re.compile(r"\s*([\w.-]{1,64})\s*(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str, at: int) -> tuple[list[Found], int]:
    named = _MISTRAL_NAME.match(text, at)
    try:
        value, end = read_json(text, named.end() if named else _skip(text, at))
    except ValueError as exc:
        end = _nearest(text, at, ("[TOOL_CALLS]",))
        lost = broken(text, at, end, str(exc))
        return [Found(named[1], {}, end, lost.problem) if named else lost], end
    if named:
        return [call_of({"name": named[1], "arguments": value}, end)], end
    return [call_of(item, end) for item in (value if isinstance(value, list) else [value])], end


# --- DeepSeek: <|tool_call_begin|>function<|tool_sep|>name ```json {…} ``` <|tool_call_end|>, newer: name<|tool_sep|>{…} --------

_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_WORD = re.compile(r"[\w.-]{1,64}")
_FENCE = re.compile(r"\s*(?:([\w.-]{1,64})\s*)?(?:```(?:json)?)?\s*")


def _deepseek(text: str, at: int) -> tuple[list[Found], int]:
    stop = _nearest(text, at, (_END, _BEGIN))
    end = stop + len(_END) if text.startswith(_END, stop) else stop
    kind, sep, body = text[at:stop].partition(_SEP)
    fence = _FENCE.match(body)
    assert fence is not None
    name = (fence[1] or "") if kind.strip() == "function" else kind.strip()
    try:
        if not sep:
            raise ValueError(f"{_SEP} is missing")
        value, past = read_json(body, fence.end())
        if body[past:].strip(" \t\r\n`") or not text.startswith(_END, stop):
            raise ValueError(f"{_END} must follow the JSON")
    except ValueError as exc:
        seen = _WORD.match(name)
        return [Found(seen[0] if seen else "", {}, end, str(exc))], end
    return [call_of({"name": name, "arguments": value}, end)], end


FORMATS: dict[str, ToolFormat] = {
    one.name: one
    for one in (
        ToolFormat("deepseek", (_BEGIN,), (_BEGIN,), _deepseek,
                   (_BEGIN, _SEP, _END, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),
        ToolFormat("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), _mistral, ("[TOOL_CALLS]", "[ARGS]")),
        ToolFormat("llama3", ("<|python_tag|>", '{"name": function name, "parameters"'), ("<|python_tag|>",), _llama,
                   ("<|python_tag|>",)),
        ToolFormat("hermes", (_CALL,), (_CALL,), _hermes, (_CALL, _END_CALL)),
    )
}  # fmt: skip
"""By name, in the order in which a template is looked at."""
