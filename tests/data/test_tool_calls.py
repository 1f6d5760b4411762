"""Tool calls in what a model wrote: the formats of templates, the two text formats, and everything that is almost a call."""

from __future__ import annotations

import json
import keyword
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.tool_calls import (
    FORMATS,
    MARKS,
    ToolCall,
    describe,
    format_of,
    parse,
    with_described_tools,
)
from posttrain.data.tools import schema
from posttrain.types import Message


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
    """
    return a + b


def search(query: str, k: int = 5) -> list[str]:
    """Search."""
    return []


TOOLS = [schema(add), schema(search)]
ONE = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def calls(text: str, format: Any = "auto", **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of every call, none of which has a problem."""
    found = parse(text, format, tools=TOOLS, **options)
    assert not [call.problem for call in found if call.problem]
    return [(call.name, call.arguments) for call in found]


def only(text: str, format: Any = "auto", **options: Any) -> ToolCall:
    """The only call."""
    (call,) = parse(text, format, tools=TOOLS, **options)
    return call


# --- the formats of templates -------------------------------------------------------------------------------------------------

BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", ONE),
        ("hermes", 'I add.\n<tool_call>\n{"name": "add",\n "arguments": {"a": 1}}\n</tool_call>'),
        ("json", ONE),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        ("llama3", ' {"name": "add", "parameters": {"a": 1}}\n'),
        ("llama3", '<think>hm</think>\n{"type": "function", "name": "add", "parameters": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
        ("mistral", '[TOOL_CALLS]add{"a": 1}'),
        ("deepseek", f'<｜tool▁calls▁begin｜>{BEGIN}function{SEP}add\n```json\n{{"a": 1}}\n```{END}<｜tool▁calls▁end｜>'),
        ("deepseek", f'<｜tool▁calls▁begin｜>{BEGIN}add{SEP}{{"a": 1}}{END}<｜tool▁calls▁end｜>'),
        ("python", "add(a=1)"),
        ("python", "I add.\n  add(1)  \nThen I see."),
        ("python", "```python\nadd(a=1)\n```"),
    ],
)
def test_a_call_in_each_format(format: Any, text: str) -> None:
    assert calls(text, format) == [("add", {"a": 1})]
    if format not in ("python", "json"):
        assert calls(text) == [("add", {"a": 1})]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", f'{ONE}\n<tool_call>{{"name": "search", "arguments": {{"query": "é"}}}}</tool_call>'),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "search", "parameters": {"query": "é"}}'),
        ("llama3", '{"name": "add", "parameters": {"a": 1}};{"name": "search", "parameters": {"query": "é"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "search", "arguments": {"query": "é"}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]search[ARGS]{"query": "\\u00e9"}'),
        ("deepseek", f'{BEGIN}add{SEP}{{"a": 1}}{END}\n{BEGIN}search{SEP}{{"query": "é"}}{END}'),
        ("python", "add(1)\nsearch('é')"),
        ("python", 'add(\n    a=1,\n)\nsearch(query="é")'),
    ],
)
def test_parallel_calls_in_each_format(format: Any, text: str) -> None:
    assert calls(text, format) == [("add", {"a": 1}), ("search", {"query": "é"})]
    assert [call.id for call in parse(text, format, tools=TOOLS, first=7)] == ["call00007", "call00008"]


def test_raw_is_the_text_of_the_call() -> None:
    assert [call.raw for call in parse(f"a {ONE} b {ONE}")] == [ONE, ONE]
    assert only("x\nadd(1) # one", "python").raw == "add(1)"


def test_an_id_of_the_model_is_kept() -> None:
    assert only('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "D681PevKs"}]').id == "D681PevKs"


def test_which_format_a_template_has() -> None:
    assert format_of("{{ '<tool_call>' }}") is FORMATS["hermes"]
    assert format_of("… <|python_tag|> …") is FORMATS["llama3"]
    assert format_of("[AVAILABLE_TOOLS] [TOOL_CALLS]") is FORMATS["mistral"]
    assert format_of(f"{BEGIN}") is FORMATS["deepseek"]
    assert format_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None and format_of(None) is None
    assert {"<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", SEP} <= MARKS


# --- thinking -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["auto", "python"])
def test_a_call_in_thinking_is_none(format: Any) -> None:
    call = f"\n{ONE if format == 'auto' else 'add(1)'}\n"
    assert calls(f"<think>{call}", format) == []
    assert calls(f"<think>{call}</think>It is 2.", format) == []
    assert calls(f"{call}</think>It is 2.", format) == [], "the prompt had opened it"
    assert len(calls(f"<think>{call}</think>{call}", format)) == 1
    assert len(calls(f"{call}<think>{call}</think>", format)) == 1
    assert len(calls(f"{call}<think>{call}", format)) == 1
    assert calls(f"hm {call}", format, thinking=True) == []
    assert len(calls(f"hm</think>{call}", format, thinking=True)) == 1


def test_tags_of_thinking_within_a_call_are_text() -> None:
    call = '<tool_call>{"name": "search", "arguments": {"query": "what does <think> do?"}}</tool_call>'
    assert calls(f"{call}{ONE}") == [("search", {"query": "what does <think> do?"}), ("add", {"a": 1})]


# --- what is almost a call ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', "</tool_call> is missing"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "</tool_call> must follow"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}} so</tool_call>', "</tool_call> must follow"),
        ('<tool_call>{"name": "add", "arguments": {"a": 01}}</tool_call>', "it is not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no number"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "too large"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', "a name twice"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments must be an object, it is a list"),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "arguments must be an object, it is text"),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', "no name"),
        ("<tool_call>[]</tool_call>", "it is a list"),
        ("<tool_call></tool_call>", "it is not JSON"),
        ("<tool_call>", "</tool_call> is missing"),
        ("<tool_call>" + "[" * 10_000, "nested too deeply"),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>", "nested too deeply"),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 10_000 + "}}</tool_call>", "digits"),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}', "it is not JSON"),
        ('[TOOL_CALLS]add[ARGS]{"a": 1', "it is not JSON"),
        ('<|python_tag|>{"name": "add", "parameters": ', "it is not JSON"),
        ('{"name": "add", "parameters": ', "it is not JSON"),
        (f"{BEGIN}add{SEP}{{{END}", "it is not JSON"),
        (f'{BEGIN}add{SEP}{{"a": 1}}', "must follow"),
        (f'{BEGIN}add{{"a": 1}}{END}', "is missing"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, words: str) -> None:
    call = only(f"So: {text}" if not text.startswith("{") else text)
    assert words in call.problem and len(call.problem) < 200
    assert call.name in ("add", "") and call.arguments == {}
    if '"name": "add"' in text and '"a": 9' not in text:
        assert call.name == "add"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("add(a=1", "not closed"),
        ("add(a='1)", "not closed"),
        ("add(a=[1)", "not closed"),
        ("add(a=1+)", "not readable"),
        ("add(a=1+1)", "a must be a literal"),
        ("add(a=__import__('os').getpid())", "a must be a literal"),
        ("add(a=x)", "a must be a literal"),
        ("add(a=true)", "a must be a literal"),
        ("add(a=f'{1}')", "a must be a literal"),
        ("add(a=b'1')", "is no text, number"),
        ("add(a={1, 2})", "is no text, number"),
        ("add(a={1: 2})", "keys of an object"),
        ("add(a=1j)", "is no text, number"),
        ("add(a=1e999)", "too large"),
        ("add(a=1, a=2)", "twice"),
        ("add(1, a=2)", "twice"),
        ("add(1, 2, 3)", "too many"),
        ("add(*[1])", "must be a literal"),
        ("add(**{'a': 1})", "twice, or with"),
        ("add(1)(2)", ""),
        ("add(a=" + "-" * 10_000 + "1)", "not readable"),
        ("add(a=" + "(" * 10_000 + ")" * 10_000 + ")", ""),
        ("add(" + "[" * 10_000, "not closed"),
        ("add(a=" + "[" * 150 + "]" * 150 + ")", "nested too deeply"),
        ("add(a=" + "9" * 10_000 + ")", "not readable"),
        ("add(a='\ud800')", "not readable"),
        ("add(a='\x00')", "not readable"),
        ("add(a=" + "not " * 5_000 + "1)", ""),
        ("add(a=" + "lambda:" * 2_500 + "1)", ""),
        ("add(a=" + "1 if 1 else " * 1_500 + "1)", ""),
        ("add(a=1" + ".a" * 9_000 + ")", ""),
    ],
)
def test_a_python_call_that_cannot_be_read_says_why(text: str, words: str) -> None:
    if text == "add(1)(2)":
        assert only(text, "python").arguments == {"a": 1}
        return
    call = only(text, "python")
    assert call.name == "add" and call.problem and words in call.problem and len(call.problem) < 200


@pytest.mark.parametrize(
    "text",
    [
        "", "It is 2.", '{"name": "Bob"}', '{"answer": 2}', '{"name": "add", "parameters": {"a": 1}} is how to call it',
        'Here: {"name": "add", "parameters": {"a": 1}}', "tool_call add 1", "</tool_call>", "[1, 2]", "{" * 10_000,
    ],
)  # fmt: skip
def test_other_texts_hold_no_call(text: str) -> None:
    assert calls(text) == []


@pytest.mark.parametrize(
    "text",
    ["", "It is add(1).", "print(1) shows it", "f(x)", "def f(a=1):", "if (a):", "Then call add with a=1", "x = add(1)", "f(" * 9,
     "addition(1, 2)"],
)  # fmt: skip
def test_prose_with_brackets_holds_no_python_call(text: str) -> None:
    assert calls(text, "python") == []


def test_an_unknown_name_is_a_call_when_it_is_all_of_a_line() -> None:
    assert calls("Now:\nsubtract(a=1)\n", "python") == [("subtract", {"a": 1})]
    assert calls("subtract(a=1) or so", "python") == []


def test_python_literals_and_texts() -> None:
    text = "search(query='''it's \"q\"\\n''', k=-3)\nsearch(query=\"a ) ' ( [\", k=[(1, 2.5), {'x': None}])\nsearch(query='a\\'')"
    assert calls(text, "python") == [
        ("search", {"query": "it's \"q\"\n", "k": -3}),
        ("search", {"query": "a ) ' ( [", "k": [[1, 2.5], {"x": None}]}),
        ("search", {"query": "a'"}),
    ]


def test_too_many_calls_are_one_problem() -> None:
    for format, text in (("auto", ONE * 1000), ("python", "add(1)\n" * 1000)):
        found = parse(text, format, tools=TOOLS)  # type: ignore[arg-type]
        assert len(found) == 65 and not any(call.problem for call in found[:64]) and "64 calls" in found[64].problem
    many = json.dumps([{"name": "add", "arguments": {"a": 1}}] * 200)
    assert len(parse(f"[TOOL_CALLS]{many}")) == 65


HUGE = 400_000


@pytest.mark.parametrize("unit", [
    "<tool_call>", '<tool_call>{"a":"', '<tool_call>"', "<tool_call>{", ONE, "<think>", "<think></think>", "</think>",
    "[TOOL_CALLS]", "[TOOL_CALLS]add", "<|python_tag|>", f"{BEGIN}", f"{BEGIN}x{SEP}", "{", '{"name":"parameters",', "(",
    "add(", "\nadd(", "\nadd(a='", "\nzzz(", "\nzzz(a=1", "add(1)\n", "a" * 60, " ", "\n", "\n   ", "'", '"', "\\", "'''", "9",
    "\nadd(a=1)x(", "`", "- ",
])  # fmt: skip
def test_huge_texts_take_no_long(unit: str) -> None:
    """Linear: four times the text takes about four times as long. Bounded here by a generous limit."""
    text = unit * (HUGE // len(unit))
    for format in ("auto", "python"):
        began = time.process_time()
        parse(text, format, tools=TOOLS)  # type: ignore[arg-type]
        assert time.process_time() - began < 3.0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8,
)  # fmt: skip
names = st.text("abcdefghijklmnop", min_size=1, max_size=5).filter(lambda name: not keyword.iskeyword(name))
arguments = st.dictionaries(names, json_values, max_size=3)
WRITERS = {
    "hermes": lambda a: "<tool_call>\n" + json.dumps({"name": "add", "arguments": a}, ensure_ascii=False) + "\n</tool_call>",
    "llama3": lambda a: "<|python_tag|>" + json.dumps({"name": "add", "parameters": a}),
    "mistral": lambda a: "[TOOL_CALLS]" + json.dumps([{"name": "add", "arguments": a}], indent=1),
    "deepseek": lambda a: f"{BEGIN}add{SEP}{json.dumps(a)}{END}",
    "python": lambda a: f"add({', '.join(f'{name}={value!r}' for name, value in a.items())})",
}


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.sampled_from(sorted(WRITERS)),
    st.lists(arguments, min_size=1, max_size=3),
    st.sampled_from(["", "hm\n", "<think>x</think>"]),
)
def test_what_is_written_is_read(format: Any, given: list[dict[str, Any]], before: str) -> None:
    if format == "llama3":
        given = given[:1]
    joined = "\n".join(WRITERS[format](one) for one in given)
    assert calls(f"{before}\n{joined}", format) == [("add", one) for one in given]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from([
    ONE, "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "add"', '"arguments": {', "}", "[TOOL_CALLS]", "[ARGS]",
    BEGIN, SEP, END, "<|python_tag|>", "\nadd(", ")", "'", '"', "\n", "a=1", ";", "\ud800",
])), max_size=12))  # fmt: skip
def test_any_text_is_read(parts: list[str]) -> None:
    text = "".join(parts)
    for format in ("auto", "json", "python", *FORMATS):
        for call in parse(text, format, tools=TOOLS):  # type: ignore[arg-type]
            assert call.raw in text and isinstance(call.arguments, dict)
            json.dumps(call.arguments)


# --- tools told to a model ------------------------------------------------------------------------------------------------------


def test_tools_are_described() -> None:
    text = describe(TOOLS)
    assert text.count('{"type": "function"') == 2 and "<tool_call>" in text
    assert describe(TOOLS, "python").splitlines()[2:9] == [
        "You may call these functions:", "", "add(a: int, b: int = 1)", "    Add two numbers.", "    a: the first", "",
        "search(query: str, k: int = 5)",
    ]  # fmt: skip


def test_what_a_description_shows_is_no_prose_when_it_is_written() -> None:
    """The examples are what the parser reads."""
    assert only(describe(TOOLS).partition("between tags:\n")[2], "json").problem == ""


def test_tools_go_into_the_system_message() -> None:
    user: Message = {"role": "user", "content": "1+1?"}
    system: Message = {"role": "system", "content": "Be brief."}
    section = describe(TOOLS)
    assert with_described_tools([user], TOOLS) == [{"role": "system", "content": section}, user]
    assert with_described_tools([system, user], TOOLS) == [{"role": "system", "content": f"Be brief.\n\n{section}"}, user]
    assert with_described_tools([{"role": "system", "content": ""}, user], TOOLS)[0]["content"] == section
    parts: Message = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert with_described_tools([parts], TOOLS)[0]["content"] == [*parts["content"], {"type": "text", "text": section}]
    assert system == {"role": "system", "content": "Be brief."} and len(parts["content"]) == 1, "what was given stays as it is"
