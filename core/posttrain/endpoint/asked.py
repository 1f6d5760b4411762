"""What a client asked for, read from the JSON of a request: checked, with every default filled in.

A field that would change the distribution that is sampled from, and that no engine here has, is refused; what changes nothing
(`user`, `metadata`, `store`, …) is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.data.environment import Prompt
from posttrain.endpoint.api_error import bad
from posttrain.endpoint.chat_messages import read_messages, read_tools
from posttrain.types import Message

MOST_CHOICES = 128
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "echo": (False,),
    "suffix": ("",), "best_of": (1,), "top_logprobs": (0,), "functions": ([],), "function_call": ("none",),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "structured_outputs": (),
}  # fmt: skip
"""Fields that are not there, with the values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. None: not said. `prompts` are of the completions API, `messages` and `tools` of the chat API.

    calls: whether calls of tools are looked for in the text (`tool_choice` auto, and there are tools)
    """

    model: str
    chat: bool
    messages: list[Message]
    tools: list[dict[str, Any]]
    prompts: list[Prompt]
    calls: bool
    n: int
    stop: tuple[str, ...]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    logprobs: bool
    seed: int | None
    stream: bool
    usage: bool


def read_chat(body: Any) -> Asked:
    """A request of `/v1/chat/completions`. Raises ApiError 400."""
    fields = _Fields(body)
    tools = read_tools(fields.body.get("tools"))
    choice = fields.body.get("tool_choice") or ("auto" if tools else "none")
    if choice not in ("auto", "none"):
        raise bad(
            f"tool_choice={choice!r} is not supported, only 'auto' and 'none': an answer that is forced into a form is not "
            "sampled from the model's own distribution", "tool_choice",
        )
    return fields.asked(
        chat=True, messages=read_messages(fields.body.get("messages")), tools=tools, prompts=[],
        calls=bool(tools) and choice == "auto", logprobs=fields.flag("logprobs"), limits=("max_completion_tokens", "max_tokens"),
    )  # fmt: skip


def read_text(body: Any) -> Asked:
    """A request of `/v1/completions`. Raises ApiError 400."""
    fields = _Fields(body)
    logprobs = fields.whole("logprobs", 0, 5)
    return fields.asked(
        chat=False, messages=[], tools=[], prompts=_prompts(fields.body.get("prompt")), calls=False,
        logprobs=logprobs is not None, limits=("max_tokens",),
    )  # fmt: skip


class _Fields:
    def __init__(self, body: Any) -> None:
        if not isinstance(body, Mapping):
            raise bad("the body must be a JSON object")
        self.body = body

    def asked(self, *, limits: tuple[str, ...], **known: Any) -> Asked:
        body = self.body
        if not isinstance(body.get("model"), str) or not body["model"]:
            raise bad("model must be the name of a model; GET /v1/models says which there is", "model")
        for name, harmless in _NEUTRAL.items():
            if body.get(name) is not None and body[name] not in harmless:
                raise bad(f"{name} is not supported: the engine samples from the model's own distribution", name)
        options = body.get("stream_options") or {}
        said = [value for value in (self.whole(name, 1) for name in limits) if value is not None]
        return Asked(
            model=body["model"], n=self.whole("n", 1, MOST_CHOICES) or 1, stop=_stop(body.get("stop")),
            max_tokens=min(said) if said else None, temperature=self.number("temperature", 0, 100),
            top_p=self.number("top_p", 0, 1), top_k=self.whole("top_k", -1), min_p=self.number("min_p", 0, 1),
            seed=self.whole("seed"), stream=self.flag("stream"),
            usage=isinstance(options, Mapping) and bool(options.get("include_usage")), **known,
        )  # fmt: skip

    def flag(self, name: str) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise bad(f"{name} must be true or false, not {value!r:.40}", name)
        return bool(value)

    def whole(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad(f"{name} must be an integer, not {value!r:.40}", name)
        return self._within(name, value, low, high)

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise bad(f"{name} must be a number, not {value!r:.40}", name)
        return float(self._within(name, value, low, high))

    def _within(self, name: str, value: Any, low: Any, high: Any) -> Any:
        if (low is not None and value < low) or (high is not None and value > high):
            limit = f"least {low}" if low is not None and value < low else f"most {high}"
            raise bad(f"{name} is {value}, and must be at {limit}", name)
        return value


def _stop(value: Any) -> tuple[str, ...]:
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found) or len(found) > 16:
        raise bad("stop must be a text, or a list of at most 16 texts that are not empty", "stop")
    return tuple(found)


def _prompts(value: Any) -> list[Prompt]:
    """The prompts of the completions API: a text, ids, or a list of either."""
    if isinstance(value, str) or _ids(value):
        return [value]
    if isinstance(value, list) and 0 < len(value) <= MOST_CHOICES and all((isinstance(p, str) or _ids(p)) and p for p in value):
        return list(value)
    raise bad("prompt must be a text, a list of token ids, or a list of these, none of them empty", "prompt")


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and i >= 0 for i in value)
