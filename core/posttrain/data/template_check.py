"""What multi-turn training with a tokenizer and a chat template would meet, found out before any run.

    for line in check(init_data_packer("Qwen/Qwen3-0.6B"), generation_config("Qwen/Qwen3-0.6B")):
        print(line.name, line.verdict, line.found)

Nothing is sampled and no weights are read: the packer renders fixed dialogues and texts through the functions that a run uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.data.packer import DataPacker, engine_input
from posttrain.data.template_turns import Dialogue, Ending, Exchange, Turn, ending, walk
from posttrain.errors import PackerError
from posttrain.types import Message

Verdict = Literal["ok", "note", "splits", "WRONG"]

ASKS: tuple[Message, ...] = ({"role": "user", "content": "What is 2 + 3?"},)
MORE: tuple[Message, ...] = tuple({"role": "user", "content": text} for text in ("And 7 more?", "Are you sure?", "Thank you."))
SYSTEM: Message = {"role": "system", "content": "Be brief and exact."}
RESULT: Message = {"role": "tool", "content": "the sum is 5", "name": "add", "tool_call_id": "call00001"}
SAYS = ("It is 5.", "12.", "Yes, quite sure.")
TOOL = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


def _exchanges(form: str = "{}", thought: str = "") -> tuple[Exchange, ...]:
    return tuple(
        Exchange(form.format(says), (more,), f"{thought} {number}" if thought else "")
        for number, (says, more) in enumerate(zip(SAYS, MORE, strict=True), 1)
    )


DIALOGUES = (
    Dialogue("turns", ASKS, _exchanges()),
    Dialogue("turns, system prompt", (SYSTEM, *ASKS), _exchanges()),
    Dialogue("turns, thinking", ASKS, _exchanges(thought="Let me count, step")),
    Dialogue("turns, white space", ASKS, _exchanges("  {} \n")),
    Dialogue("turns, tools", ASKS, (Exchange("add(2, 3)", (RESULT,)), *_exchanges()[:2])),
)
_APPEND = "set model.chat_template to one that only appends"
TEXTS = {
    "words": "The answer is 42, isn't it?",
    "spaces": "  two before, two  between, one after ",
    "lines": "one\n\nthree\r\n\ttab\n",
    "punctuation": "a , b . c ! d 's",
    "emoji": "🙂👩‍👩‍👧‍👦🇩🇪",
    "CJK": "你好，世界。こんにちは 안녕",
    "combining marks": "e\u0301 n\u0303 \u0905\u0930\u094d\u0925",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One finding.   verdict: ok; note: good to know; splits: rows may split there; WRONG: training would not be right."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def check(packer: DataPacker, generation: Mapping[str, Any]) -> list[Line]:
    """Every line of the check; `generation` is the model's generation_config.json.

    Raises PackerError when there is no chat template, and when it fails on a question, an answer and a question.
    """
    end = ending(packer)
    lines = [_end_of_turn(packer, end), _after(packer, end), _generation_config(end, generation), bos := _bos(packer)]
    if bos.verdict != "WRONG":  # a run ends there: there are no turns to speak of
        lines += (turns_line(packer, dialogue, end) for dialogue in DIALOGUES)
    return [*lines, _clock(packer), *_round_trips(packer), _tools(packer), _thinking(packer)]


def _end_of_turn(packer: DataPacker, end: Ending) -> Line:
    name, stop = "end of turn", packer.special_tokens.stop
    if end.text is None:
        return Line(name, "WRONG", "the template changes or leaves out the words of messages", _APPEND)
    if not end.ids:
        has = ", ".join(_token(packer, i) for i in stop) or "the model has none"
        return Line(name, "WRONG", f"the template writes {end.text!r} after a turn, and no stop token ({has})",
                    "add the id that ends a turn to eos_token_id in generation_config.json of the model folder; when the "
                    "template writes none, set model.chat_template to one that does")  # fmt: skip
    others = ", ".join(_token(packer, i) for i in stop if i != end.ids[-1])
    before = f", after {packer.spell(end.ids[:-1])!r}, which is sampled too" if len(end.ids) > 1 else ""
    also = f"; {others} ends a completion too, and the template's own end of turn then follows" if others else ""
    return Line(name, "ok", f"{_token(packer, end.ids[-1])}, sampled and trained{before}{also}")


def _after(packer: DataPacker, end: Ending) -> Line:
    text = f"{packer.spell(end.after)!r}, ids {list(end.after)}: never sampled, masked, written once"
    return Line("after it", "ok", text if end.after else "nothing")


def _generation_config(end: Ending, generation: Mapping[str, Any]) -> Line:
    name, eos = "generation_config", generation.get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not end.ids or end.ids[-1] in eos:
        return Line(name, "ok", f"eos_token_id is {eos}")
    return Line(name, "note", f"eos_token_id is {eos or 'not set'}, without the end of turn {end.ids[-1]}",
                "nothing for a run, which also reads config.json and the tokenizer; other programs may not stop at the end of a "
                "turn: add the id")  # fmt: skip


def _bos(packer: DataPacker) -> Line:
    prefix = list(packer.special_tokens.prefix)
    try:
        engine_input(packer, list(ASKS))
    except PackerError as exc:
        return Line("BOS", "WRONG", f"{exc.cause}: a run stops with {exc.code}",
                    "set model.chat_template to one that writes the BOS as often as the tokenizer does, once")  # fmt: skip
    return Line("BOS", "ok", f"{prefix} once" if prefix else "the tokenizer puts none before a text")


def turns_line(packer: DataPacker, dialogue: Dialogue, end: Ending) -> Line:
    """What a dialogue shows."""
    try:
        turns = list(walk(packer, dialogue, end))
    except PackerError as exc:
        plain = dialogue is DIALOGUES[0]
        return Line(dialogue.name, "WRONG" if plain else "note", f"the template refuses it: {exc.cause or exc.message}",
                    "set model.chat_template to one that takes several turns" if plain else
                    "keep such messages out of the environment, or set model.chat_template")  # fmt: skip
    if lost := sorted({role for turn in turns for role in turn.lost}):
        return Line(dialogue.name, "WRONG", f"the template leaves out messages with role {', '.join(lost)}",
                    "set model.chat_template to one that writes them, or answer with another role")  # fmt: skip
    if odd := [turn for turn in turns if turn.sent == "other"]:
        return Line(dialogue.name, "WRONG", f"{_numbers(odd)}: the packer's next prompt is not what the template writes",
                    "set model.chat_template to one that writes the same between any two turns")  # fmt: skip
    if refused := [turn for turn in turns if turn.sent == "refused" and not turn.splits]:
        return Line(dialogue.name, "WRONG", f"{_numbers(refused)}: the packer refuses to go on, as the template writes the last "
                    "turn in another way than the same turn later", _APPEND)  # fmt: skip
    if split := [turn for turn in turns if turn.splits]:
        causes = {turn.splits: [other for other in split if other.splits == turn.splits] for turn in split}
        found = "; ".join(f"{_numbers(same)}: {cause}, {same[0].seen}" for cause, same in causes.items())
        return Line(dialogue.name, "splits", found, _advice(split))
    recoded = [turn for turn in turns if turn.recoded]
    again = f"; encoded again, {_numbers(recoded)} would have other ids: the sampled ones are sent" if recoded else ""
    return Line(dialogue.name, "ok", f"each of {len(turns)} begins the next prompt{again}")


def _advice(split: Sequence[Turn]) -> str:
    if any(turn.sent == "refused" for turn in split):
        return f"the packer refuses to go on (PackerError): {_APPEND}"
    return (
        "the packer sends the sampled ids as they are, so training is exact; whoever renders the dialogue anew shows the model "
        f"another history. To have neither, {_APPEND}"
    )


def _numbers(turns: Sequence[Turn]) -> str:
    return f"turn{'s' if len(turns) > 1 else ''} {', '.join(str(turn.number) for turn in turns)}"


def _clock(packer: DataPacker) -> Line:
    def later(_form: str) -> str:
        return "another day"

    if packer.render(ASKS) == packer.render(ASKS, strftime_now=later):
        return Line("clock", "ok", "prompts do not depend on it")
    return Line("clock", "note", "the template writes the date: the same prompt has other ids on another day",
                "write a fixed date into model.chat_template, so that a run can be repeated")  # fmt: skip


def _round_trips(packer: DataPacker) -> Iterator[Line]:
    """Texts as a reward would read them; and ids of characters one by one, as a model may sample them."""
    read = {name: packer.decode(packer.encode(text)) for name, text in TEXTS.items()}
    changed = [name for name, text in TEXTS.items() if read[name] != text]
    gone = [name for name in changed if _plain(read[name]) != _plain(TEXTS[name])]
    name = "text, ids, text"
    if gone:
        yield Line(name, "WRONG", f"characters are lost: {', '.join(gone)}",
                   "keep such texts out of prompts, or take the tokenizer that belongs to the model")  # fmt: skip
    elif changed:
        yield Line(name, "note", f"white space or the Unicode form changes: {', '.join(changed)}",
                   "let rewards not depend on it")  # fmt: skip
    else:
        yield Line(name, "ok", f"the same for {len(TEXTS)} texts")
    moved = [name for name, text in TEXTS.items() if (ids := _one_by_one(packer, text)) != packer.encode(packer.decode(ids))]
    again = f"other ids for {', '.join(moved)}" if moved else "the same"
    yield Line("ids, text, ids", "ok", f"{again}; sampled ids are never encoded again" if moved else again)


def _one_by_one(packer: DataPacker, text: str) -> list[int]:
    return [i for character in text for i in packer.encode(character)]


def _plain(text: str) -> str:
    import unicodedata

    return "".join(unicodedata.normalize("NFKC", text).split())


def _tools(packer: DataPacker) -> Line:
    try:
        text = packer.render(ASKS, tools=[TOOL])
    except PackerError as exc:
        return Line("tool format", "note", f"the template refuses tools: {exc.cause}", "describe the tools in a message")
    if "add_numbers" in text:
        return Line("tool format", "ok", "the template describes tools")
    return Line("tool format", "note", "none: the template leaves `tools` out", "describe the tools in a message")


def _thinking(packer: DataPacker) -> Line:
    default, on, off = (packer.render(ASKS, **v) for v in ({}, {"enable_thinking": True}, {"enable_thinking": False}))
    if on == off:
        return Line("enable_thinking", "ok", "the template does not read it")
    return Line("enable_thinking", "note", f"the template reads it; a run thinks {'off' if default == off else 'on'}",
                "to have it the other way, write the choice into model.chat_template")  # fmt: skip


def _token(packer: DataPacker, token: int) -> str:
    return f"{token} {packer.spell([token])}"
