"""Answers in OpenAI's form: one JSON object, or the events of a stream, which add up to the same.

An engine gives whole completions, so the events of a stream come when an answer is done, in pieces of about a word.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.endpoint.answering import Choice
    from posttrain.endpoint.asked import Asked
    from posttrain.endpoint.session import Reply

Json = dict[str, Any]


def whole(asked: Asked, reply: Reply) -> Json:
    """The answer to a request that does not stream."""
    choices = [
        {"index": index, **({"message": _message(choice)} if asked.chat else {"text": choice.text}),
         "logprobs": _logprobs(asked, choice), "finish_reason": _reason(choice)}
        for index, choice in enumerate(reply.choices)
    ]  # fmt: skip
    return {**_head(asked, "chat.completion" if asked.chat else "text_completion"), "choices": choices, "usage": _usage(reply)}


def pieces(asked: Asked, reply: Reply) -> Iterator[Json]:
    """The events of the same answer."""
    head = _head(asked, "chat.completion.chunk" if asked.chat else "text_completion")
    rest = {"usage": None} if asked.usage else {}
    for index, choice in enumerate(reply.choices):
        for delta, last in _deltas(asked, choice):
            logprobs = _logprobs(asked, choice) if delta.pop("first", False) else None
            added = {"delta": delta} if asked.chat else {"text": delta.get("content", "")}
            one = {"index": index, **added, "logprobs": logprobs, "finish_reason": _reason(choice) if last else None}
            yield {**head, "choices": [one], **rest}
    if asked.usage:
        yield {**head, "choices": [], "usage": _usage(reply)}


def _deltas(asked: Asked, choice: Choice) -> Iterator[tuple[Json, bool]]:
    """What each event of a choice adds, and whether it is the last. The first with text carries all log-probs."""
    if asked.chat:
        yield {"role": "assistant", "content": "", "first": True}, False
    for number, text in enumerate(re.findall(r"\s*\S+|\s+\Z", choice.text)):
        yield {"content": text, "first": number == 0 and not asked.chat}, False
    for index, call in enumerate(_calls(choice)):
        yield {"tool_calls": [{"index": index, **call}]}, False
    yield {"first": not asked.chat and not choice.text}, True


def _head(asked: Asked, kind: str) -> Json:
    name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": asked.model}


def _message(choice: Choice) -> Json:
    if not choice.tool_calls:
        return {"role": "assistant", "content": choice.text, "refusal": None}
    return {"role": "assistant", "content": choice.text or None, "refusal": None, "tool_calls": _calls(choice)}


def _calls(choice: Choice) -> list[Json]:
    """Calls with their arguments as JSON text."""
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in choice.tool_calls
    ]


def _reason(choice: Choice) -> str:
    return "tool_calls" if choice.tool_calls and choice.finish_reason == "stop" else choice.finish_reason


def _usage(reply: Reply) -> Json:
    sampled = sum(len(choice.token_ids) for choice in reply.choices)
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": sampled, "total_tokens": reply.prompt_tokens + sampled}


def _logprobs(asked: Asked, choice: Choice) -> Json | None:
    """Of the sampled tokens; the engine gives no others."""
    if not asked.logprobs:
        return None
    if asked.chat:
        content = [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}
    offsets = [sum(map(len, choice.tokens[:n])) for n in range(len(choice.tokens))]
    return {"tokens": choice.tokens, "token_logprobs": choice.logprobs, "top_logprobs": None, "text_offset": offsets}
