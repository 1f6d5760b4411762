"""Does a chat template only append? A dialogue is walked turn by turn, as a run would have it, and as the template has it.

    prompt of turn n ‖ sampled ids   must begin   prompt of turn n + 1, rendered from all messages

Where it does not, the model would read another history than the one that it was sampled with: the turn splits. What the packer
itself sends next (`extend`) is compared too. All through the packer: nothing here renders in a way that a run does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.data.packer import DataPacker
from posttrain.errors import PackerError
from posttrain.types import Message

MARK, REPLY = "last-words", "next-words"
THINK, END_THINK = "<think>", "</think>"

Sent = Literal["same", "verbatim", "refused", "other"]


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends an assistant's turn.

    ids     what the model samples last: up to and with the first stop token that the template writes there; () when none
    after   what the template writes then, before the next message: the model never samples it
    text    all that the template writes between the words of one turn and those of the next; None when it changes the words
    """

    ids: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the assistant says (`thought` first, in the tags of thinking), and the messages that answer it."""

    says: str
    replies: tuple[Message, ...]
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Dialogue:
    name: str
    opening: tuple[Message, ...]
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn, and what became of it in the next prompt.

    number   from 1
    splits   why the template's next prompt does not begin with this turn; "" when it does
    seen     the first place where it does not
    sent     what the packer's `extend` makes: what the template renders ("same"), the ids as they are although the template
             rewrites them ("verbatim"), nothing ("refused"), or, though nothing is rewritten, something else ("other")
    recoded  the text is the same, but encoded again it has other ids than the sampled ones
    lost     roles of the messages that answer it whose words the template leaves out
    """

    number: int
    splits: str
    seen: str
    sent: Sent
    recoded: bool = False
    lost: tuple[str, ...] = ()


def ending(packer: DataPacker) -> Ending:
    """What ends an assistant's turn. Raises PackerError as `render` does."""
    turn: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
    last = packer.render(turn, add_generation_prompt=False)
    whole = packer.render([*turn, {"role": "user", "content": REPLY}])
    start = whole.rfind(MARK) + len(MARK)
    text = whole[start : whole.find(REPLY, start)]
    if MARK not in last or MARK not in whole or REPLY not in whole[start:]:
        return Ending()
    between, closing = packer.encode(text), packer.encode(last[last.rfind(MARK) + len(MARK) :])
    stop = next((n for n, token in enumerate(between, 1) if token in packer.special_tokens.stop), 0)
    return Ending(tuple(between[:stop]), tuple(closing[stop:] if closing[:stop] == between[:stop] else ()), text)


def walk(packer: DataPacker, dialogue: Dialogue, end: Ending) -> Iterator[Turn]:
    """The assistant turns of a dialogue. Raises PackerError when the template refuses one of its messages."""
    history: list[Message] = list(dialogue.opening)
    prompt = prompt_ids(packer, history)
    stop = end.ids or packer.special_tokens.stop[:1]
    for number, exchange in enumerate(dialogue.exchanges, 1):
        sampled = [*packer.encode(_said(packer, prompt, exchange)), *stop]
        history += [*packer.get_rollout_output(sampled)["messages"], *exchange.replies]
        rendered, whole = prompt_ids(packer, history), [*prompt, *sampled]
        text = packer.spell(rendered)
        splits, seen = difference(packer.spell(whole), text, exchange, dialogue.opening)
        lost = tuple(str(m["role"]) for m in exchange.replies if _kept(packer, m["content"].strip()) not in text)
        recoded = not splits and rendered[: len(whole)] != whole
        sent = _sent(packer, whole, len(stop), exchange.replies, None if splits else rendered)
        yield Turn(number, splits, seen, sent, recoded, lost)
        prompt = rendered


def prompt_ids(packer: DataPacker, messages: Sequence[Message]) -> list[int]:
    return list(packer.get_rollout_input(list(messages))["prompt_ids"])


def difference(was: str, now: str, exchange: Exchange, opening: Sequence[Message]) -> tuple[str, str]:
    """Why `now` does not begin with `was`, and where; empty when it does.

    Texts, not ids: what spells the same is not encoded again, but sent as it was sampled.
    """
    if now.startswith(was):
        return "", ""
    at = next((n for n, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    seen = f"{_near(was, at)} becomes {_near(now, at)}"
    if "".join(now.split()).startswith("".join(was.split())):
        return "changes white space", seen
    thinks = was.rfind(THINK)
    if 0 <= thinks <= at <= thinks + len(THINK) + len(exchange.thought):
        return "drops earlier thinking", seen
    if any(m["role"] == "system" and now.find(m["content"]) > was.find(m["content"]) for m in opening):
        return "moves the system prompt", seen
    return "rewrites it", seen


def _near(text: str, at: int) -> str:
    return repr(text[max(at - 8, 0) : at + 12])


def _said(packer: DataPacker, prompt: Sequence[int], exchange: Exchange) -> str:
    """What the model samples, without the tag that opens its thinking where the prompt has written that already."""
    if not exchange.thought:
        return exchange.says
    opened = packer.spell(prompt).rstrip().endswith(THINK)
    return f"{'' if opened else THINK + chr(10)}{exchange.thought}\n{END_THINK}\n\n{exchange.says}"


def _kept(packer: DataPacker, text: str) -> str:
    """A text as the vocabulary can say it."""
    return packer.spell(packer.encode(text)).strip()


def _sent(
    packer: DataPacker, whole: Sequence[int], stop: int, replies: Sequence[Message], rendered: Sequence[int] | None
) -> Sent:
    """What `extend` makes of a turn that stopped, and of one that the budget cut off before its stop token."""
    try:
        both = [packer.extend(ids, replies) for ids in (whole, whole[: len(whole) - stop])]
    except PackerError:
        return "refused"
    if rendered is None:
        return "verbatim"
    return "same" if all(packer.spell(ids) == packer.spell(rendered) for ids in both) else "other"
