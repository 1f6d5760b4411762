"""Typed Python functions as tools: their JSON schemas, the check of what a model gives them, and their results as text.

    def multiply(a: int, b: int = 1) -> int:
        '''Multiply two numbers.

        Args:
            a: the first
            b: the second
        '''
        return a * b

    tool = Tool.of(multiply)
    tool.schema                        # {"type": "function", "function": {"name": "multiply", "description": …, "parameters": …}}
    tool.bind({"a": 6})                # {"a": 6}; BadArgument for {"a": "6"}, {} and {"a": 6, "c": 1}
    to_text(multiply(6, 7))            # "42"

The name, the types, the defaults and the docstring of the function are the tool. A parameter `state: EpisodeState` gets the
episode and is not in the schema. What cannot be a tool is a ConfigError when it is built, never in the middle of a run.
Which types there are, and what is converted (whole numbers to float, nothing else), is in `data.tool_types`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.data import tool_types
from posttrain.data.environment import EpisodeState
from posttrain.errors import ConfigError

STATE = "state"
"""The parameter that gets the episode."""
LONGEST_NAME = 64
_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{LONGEST_NAME - 1}}}", re.ASCII)
_HEADING = re.compile(r"(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?):\s*", re.IGNORECASE)
_ARGUMENT = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s+(.*)")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    schema       OpenAI style: `{"type": "function", "function": {"name", "description", "parameters"}}`
    waits        it is a coroutine function
    takes_state  it is given the episode
    """

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    waits: bool = False
    takes_state: bool = False
    _wanted: Mapping[str, tuple[Any, bool]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Raises ConfigError for what cannot be a tool: an untyped parameter, `*args`, a default that is no JSON, …"""
        name = _name(function)
        hints = _hints(function, name)
        summary, said = read_docstring(inspect.getdoc(function) or "")
        wanted, properties, takes_state = dict[str, tuple[Any, bool]](), dict[str, Any](), False
        for parameter in inspect.signature(function).parameters.values():
            annotation = _annotation(parameter, hints, name)
            if parameter.name == STATE or annotation is EpisodeState:
                takes_state = _is_state(parameter, annotation, name)
                continue
            properties[parameter.name] = _property(parameter, annotation, said.get(parameter.name, ""), name)
            wanted[parameter.name] = annotation, parameter.default is inspect.Parameter.empty
        parameters = {
            "type": "object",
            "properties": properties,
            "required": [one for one, (_, required) in wanted.items() if required],
            "additionalProperties": False,
        }
        schema = {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}
        return cls(name, function, schema, inspect.iscoroutinefunction(function), takes_state, wanted)

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the function is called with. Raises BadArgument, whose text is for the model."""
        return tool_types.accept_all(self._wanted, arguments)


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The OpenAI-style schema of a function. Raises ConfigError."""
    return Tool.of(function).schema


def toolset(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Functions as tools by name. Raises ConfigError, also when two have one name."""
    tools: dict[str, Tool] = {}
    for tool in map(Tool.of, functions):
        if tool.name in tools:
            raise _refusal(tool.name, "another tool has this name", "rename one of the two functions")
        tools[tool.name] = tool
    return tools


def to_text(result: Any) -> str:
    """A tool's result as the model reads it: text as it is, all else as JSON, and what JSON cannot say as `str` has it."""
    value = tool_types.plain(result)
    text = str(value)
    if value is None or isinstance(value, (bool, int, float, list, dict)):
        with contextlib.suppress(TypeError, ValueError):  # keys that are no text
            text = json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()  # no tokenizer takes half a character


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the lines `name: what it is` of the section `Args:`, by name."""
    summary, arguments, section, name, indent = list[str](), dict[str, str](), "", "", 0
    for line in text.splitlines():
        if heading := _HEADING.fullmatch(line):
            section, name = heading[1].lower(), ""
        elif not section:
            summary.append(line.rstrip())
        elif section in ("args", "arguments", "parameters") and line.strip():
            found, depth = _ARGUMENT.fullmatch(line.strip()), len(line) - len(line.lstrip())
            if found and (not name or depth <= indent):
                name, indent = found[1], depth
                arguments[name] = found[2].strip()
            elif name:
                arguments[name] += " " + line.strip()
    return "\n".join(summary).strip(), arguments


def _name(function: Any) -> str:
    name = str(getattr(function, "__name__", "") or "")
    if not callable(function) or isinstance(function, type) or not _NAME.fullmatch(name):
        raise _refusal(
            name or repr(function)[:60], "a tool is a function with a name of its own (letters, digits and _)",
            "write it as `def name(…)`",
        )  # fmt: skip
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise _refusal(name, "it is a generator", "return the whole result")
    return name


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The types, which the function keeps in the place of their names: where it may travel, the names are unknown."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as exc:
        raise _refusal(name, f"its annotations cannot be read: {type(exc).__name__}: {exc}",
                       "use types that the module of the function knows at run time") from exc  # fmt: skip
    with contextlib.suppress(AttributeError, TypeError):
        getattr(function, "__func__", function).__annotations__ = hints
    return hints


def _annotation(parameter: inspect.Parameter, hints: Mapping[str, Any], tool: str) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        stars = "*" if parameter.kind == parameter.VAR_POSITIONAL else "**"
        raise _refusal(tool, f"a model cannot be told about {stars}{parameter.name}", "name every parameter")
    if parameter.kind == parameter.POSITIONAL_ONLY:
        raise _refusal(tool, f"{parameter.name} can be given by position only", "leave `/` out: models give arguments by name")
    if parameter.name == "self":
        raise _refusal(tool, "it is a method without its object", "give it as `self.name`, from a property `tools`")
    if parameter.name not in hints and parameter.name != STATE:
        raise _refusal(tool, f"the parameter {parameter.name} has no type", f"write `{parameter.name}: str`, or whatever it is")
    return hints.get(parameter.name)


def _is_state(parameter: inspect.Parameter, annotation: Any, tool: str) -> bool:
    if parameter.name != STATE or annotation not in (None, EpisodeState):
        raise _refusal(tool, f"the episode comes as `{STATE}: EpisodeState`, not as `{parameter.name}: "
                       f"{tool_types.name_of(annotation)}`", f"name only that parameter `{STATE}`")  # fmt: skip
    return True


def _property(parameter: inspect.Parameter, annotation: Any, said: str, tool: str) -> dict[str, Any]:
    """The schema of one parameter, with its default and what the docstring says about it."""
    try:
        found = tool_types.describe(annotation)
    except TypeError as exc:
        raise _refusal(tool, f"the type of the parameter {parameter.name} cannot be told to a model: {exc}",
                       "take one of those, and convert it inside") from exc  # fmt: skip
    if said:
        found["description"] = said
    if parameter.default is not inspect.Parameter.empty:
        default = tool_types.plain(parameter.default)
        try:
            found["default"] = json.loads(json.dumps(default, allow_nan=False))
            tool_types.accept(annotation, found["default"], parameter.name)
        except (TypeError, ValueError) as exc:
            fix = f"write `{parameter.name}: … | None = None`" if default is None else "give a default of its own type"
            raise _refusal(tool, f"the default of the parameter {parameter.name}, {parameter.default!r:.80}, "
                           f"cannot be told to a model: {exc}", fix) from exc  # fmt: skip
    return found


def _refusal(tool: str, cause: str, fix: str) -> ConfigError:
    anchor = "howto/tools.md#what-can-be-a-tool"
    return ConfigError(f"{tool!r} cannot be a tool", cause=cause, fix=fix, anchor=anchor, code="tool")
