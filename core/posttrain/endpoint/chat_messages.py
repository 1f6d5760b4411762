"""Chat messages as clients write them, brought to the one form that packers and environments know; and when two are the same.

Contents become text, `developer` becomes `system`, arguments of calls become objects where they are JSON objects (templates write
them out themselves). `history(tools, messages)` gives a name to every beginning of a conversation, so that a request which
goes on with one is found at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from posttrain.endpoint.api_error import bad
from posttrain.types import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}


def read_messages(value: Any) -> list[Message]:
    """The messages of a request. Raises ApiError 400, which names the message."""
    if not isinstance(value, list) or not value:
        raise bad("messages must be a list of at least one message", "messages")
    names: dict[str, str] = {}
    return [_message(item, f"messages[{number}]", names) for number, item in enumerate(value)]


def read_tools(value: Any) -> list[dict[str, Any]]:
    """The tools of a request, functions all. Raises ApiError 400."""
    if value is not None and not isinstance(value, list):
        raise bad("tools must be a list", "tools")
    for number, tool in enumerate(value or []):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            form = "{type: function, function: {name, description, parameters}}"
            raise bad(f"tools[{number}] must be {form}", f"tools[{number}]")
    return list(value or [])


def history(tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[bytes]:
    """A name for each beginning of a conversation: entry `k` of the tools and the first `k` messages.

    White space around a text makes no difference (agents strip it), nor do the ids of calls.
    """
    names = [blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16).digest()]
    for message in messages:
        names.append(goes_on(names[-1], message))
    return names


def goes_on(name: bytes, message: Message) -> bytes:
    """The name of the conversation called `name`, and one more message."""
    return blake2b(name + essence(message), digest_size=16).digest()


def essence(message: Message) -> bytes:
    """What two messages must have in common to be the same one."""
    role = message.get("role")
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
    parts = [role, "" if role == "tool" else message.get("name", ""), str(message.get("content", "")).strip(), calls]
    return json.dumps(parts, sort_keys=True).encode()


def spelled_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls written into the text, for a template that knows none."""
    out = [Message(**message) for message in messages]
    for message in out:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.pop("tool_calls", [])]
        tagged = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
        if calls:
            message["content"] = "\n".join([*([message["content"]] if message["content"] else []), *tagged])
    return out


def _message(item: Any, where: str, names: dict[str, str]) -> Message:
    """One message. names: the functions of the calls so far, by the id of the call, for the answers of tools."""
    role = item.get("role") if isinstance(item, Mapping) else None
    if role not in _ROLES:
        raise bad(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
    out = Message(role=_ROLES[role], content=_text(item.get("content"), f"{where}.content"))
    if item.get("name"):
        out["name"] = str(item["name"])
    if out["role"] == "assistant" and item.get("tool_calls"):
        out["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(item["tool_calls"])]
        names.update({call["id"]: call["function"]["name"] for call in out["tool_calls"]})
    if out["role"] == "tool" and item.get("tool_call_id"):
        out["tool_call_id"] = str(item["tool_call_id"])
        out.setdefault("name", names.get(out["tool_call_id"], ""))
    return out


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad(f"{where} must be a text, or a list of parts", where)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text", "refusal"):
            texts.append(str(part.get("text", part.get("refusal", ""))))
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise bad(f"{where} has a part of type {kind!r}; only text is supported", where)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad(f"{where} must be {{id, type: function, function: {{name, arguments}}}}", where)
    return {
        "id": str(call.get("id", "")), "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"))},
    }  # fmt: skip


def _arguments(value: Any) -> Any:
    """JSON objects as objects; what is none stays the text that the model wrote."""
    if not isinstance(value, str):
        return value or {}
    try:
        found = json.loads(value or "{}")
    except ValueError:
        return value
    return found if isinstance(found, dict) else value
