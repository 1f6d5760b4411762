"""Calls of tools in the text of an answer, as the chat API has them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from posttrain.data.tool_calls import parse


def calls_of(
    text: str, tools: Sequence[dict[str, Any]], ids: Sequence[int], *, thinking: bool = False
) -> tuple[str, list[dict[str, Any]]]:
    """The text without its calls, and the calls. One that cannot be read stays in the text, for the agent to see.

    ids: what the conversation consists of, from which the calls get their ids: others than those of earlier turns, the same in a
    run that is repeated. thinking: the prompt has opened the model's thinking.
    """
    calls: list[dict[str, Any]] = []
    name = blake2b(array("q", ids).tobytes(), digest_size=8)
    outside = text
    for call in parse(text, tools=tools, thinking=thinking):
        if call.problem:
            continue
        name.update(b"call")
        function = {"name": call.name, "arguments": call.arguments}
        calls.append({"id": name.hexdigest()[:9], "type": "function", "function": function})  # some templates demand 9 letters
        outside = outside.replace(call.raw, "", 1)
    return (outside.strip() if calls else text), calls
