"""Preference pairs from one's own data: `prompt`, `chosen`, `rejected`, in the usual public forms.

    {"prompt": "2+2=", "chosen": "4", "rejected": "5"}                                       texts
    {"chosen": "The sky is blue.", "rejected": "The sky is green."}                          texts, the prompt is what they share
    {"prompt": [{"role": "user", …}], "chosen": [{"role": "assistant", …}], "rejected": […]} messages
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}             conversations, the prompt likewise

A conversation ends with the answer that is compared, and everything before it is the same on both sides. A `prompt` beside whole
conversations is allowed and must be part of them. A prompt of text stays text; one of messages goes through the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

from posttrain.data.environment import Prompt, RowDataset, Split
from posttrain.data.preference import Pair, PreferenceEnvironment, Truncate
from posttrain.data.source import DataOptions, open_rows
from posttrain.types import Message

ANSWER_MARK = "\n\nAssistant:"
"""What stands before an answer in dialogues written as one text, such as those of HH-RLHF."""


class Preference(PreferenceEnvironment):
    """Pairs of a chosen and a rejected completion, from a file or a dataset."""

    api: ClassVar[int] = 1

    @dataclass(frozen=True, kw_only=True)
    class Options(DataOptions):
        truncate: Truncate = "keep_end"  # too long: cut the prompt's start, the completions' ends (keep_start), or drop the pair

    @property
    def truncate(self) -> Truncate:
        return self.options.truncate  # type: ignore[no-any-return]

    def dataset(self, split: Split) -> RowDataset:
        return open_rows(self.options, split, required=("chosen", "rejected"))

    def pair(self, task: Mapping[str, Any]) -> Pair:
        prompt, chosen, rejected = (task.get(name) for name in ("prompt", "chosen", "rejected"))
        if isinstance(chosen, str) and isinstance(rejected, str):
            if prompt is None:
                prompt, chosen, rejected = split_texts(chosen, rejected)
            return Pair(checked_prompt(prompt), chosen, rejected)
        (history, answer), (other, worse) = conversation(chosen, "chosen"), conversation(rejected, "rejected")
        if history != other:
            place = len(shared_start(history, other)) + 1
            raise ValueError(f"chosen and rejected part at message {place}, before their answers: they share no prompt")
        return Pair(joined(prompt, history), answer, worse)


def shared_start(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """The items, from the first on, that two sequences have in common."""
    return [a for a, _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))]


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Prompt and completions of two texts that begin alike: parted after the last `Assistant:` they share, else before a word.

    White space before the first word that differs belongs to the completions. Raises ValueError when they share nothing.
    """
    shared = chosen[: len(shared_start(chosen, rejected))]
    mark = shared.rfind(ANSWER_MARK)
    if mark >= 0:
        end = mark + len(ANSWER_MARK)
    elif (word := re.search(r"\s+\S*\Z", shared)) and shared[: word.start()].strip():
        end = word.start()
    else:
        end = len(shared)
    if not shared[:end].strip():
        raise ValueError("there is no prompt, and chosen and rejected do not begin alike")
    return shared[:end], chosen[end:], rejected[end:]


def conversation(value: object, name: str) -> tuple[list[Message], str]:
    """What comes before the last answer of a conversation, and the answer. Raises ValueError for anything else."""
    messages = cleaned(value, name)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{name} ends with a message of {messages[-1]['role']!r}, not with an assistant's answer")
    return messages[:-1], messages[-1]["content"]


def cleaned(value: object, name: str) -> list[Message]:
    """Chat messages without empty fields. Raises ValueError for what is none."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        kind = "an empty list" if value == [] else f"a {type(value).__name__}"
        raise ValueError(f"{name} is {kind}; a text or a list of messages is wanted, the same kind in chosen and rejected")
    messages = [{k: v for k, v in m.items() if v is not None} if isinstance(m, Mapping) else {} for m in value]
    for place, message in enumerate(messages):
        if not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str):
            raise ValueError(f'message {place + 1} of {name} is not {{"role": "…", "content": "…"}} with text as content')
    return messages  # type: ignore[return-value]


def checked_prompt(prompt: object) -> Prompt:
    """A text or messages. Raises ValueError for anything else, and for an empty text."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("prompt is empty")
        return prompt
    return cleaned(prompt, "prompt")


def joined(prompt: object, history: list[Message]) -> Prompt:
    """The prompt of two conversations: what comes before their answers, begun by `prompt` when they hold the answers alone."""
    if prompt is None:
        if not history:
            raise ValueError("there is no prompt: chosen and rejected are answers alone")
        return history
    asked = checked_prompt(prompt)
    if isinstance(asked, str):
        if not history:
            return [Message(role="user", content=asked)]
        if any(message["content"].strip() == asked.strip() for message in history):
            return history
    elif not history or history[: len(asked)] == asked:
        return history or asked
    raise ValueError("the conversations of chosen and rejected do not hold the prompt")
