"""What `posttrain template-check` says of templates in eleven styles, and that it holds for dialogues drawn at random."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from chat_styles import CHATML, GEMMA, HOSTILE, LLAMA3, QWEN3, STYLES, TOOLS, Style, write_style
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.hub import generation_config
from posttrain.data.packer import DataPacker, init_data_packer
from posttrain.data.template_check import DIALOGUES, Line, check
from posttrain.data.template_turns import Dialogue, Exchange, ending, walk
from posttrain.errors import PackerError
from posttrain.testing.tiny_model import write_tokenizer

TURNS = [dialogue.name for dialogue in DIALOGUES]
FOLDERS = TemporaryDirectory()


@cache
def packer_of(style: Style) -> DataPacker:
    return init_data_packer(str(write_style(Path(FOLDERS.name) / str(hash(style)), style)))


@cache
def lines_of(style: Style) -> dict[str, Line]:
    packer = packer_of(style)
    return {line.name: line for line in check(packer, generation_config(packer.name_or_path))}


OK, SPLITS, WRONG, NOTE = "ok", "splits", "WRONG", "note"


@pytest.mark.parametrize(
    ("name", "plain", "system", "thinking", "spaces", "tools", "why"),
    [
        ("chatml", OK, OK, OK, OK, OK, ""),
        ("llama3", OK, OK, OK, SPLITS, OK, "changes white space"),
        ("qwen3", OK, OK, SPLITS, OK, OK, "drops earlier thinking"),
        ("qwen3_last", OK, OK, OK, OK, OK, ""),
        ("mistral", OK, SPLITS, OK, OK, NOTE, "moves the system prompt"),
        ("gemma", OK, NOTE, OK, SPLITS, OK, "changes white space"),
        ("deepseek", SPLITS, SPLITS, SPLITS, SPLITS, SPLITS, "drops earlier thinking"),
        ("tools", OK, OK, OK, OK, OK, ""),
        ("plain_words", SPLITS, SPLITS, SPLITS, SPLITS, SPLITS, "changes white space"),
        ("hostile", SPLITS, SPLITS, SPLITS, SPLITS, SPLITS, "rewrites it"),
        ("counting", WRONG, WRONG, WRONG, WRONG, WRONG, "not what the template writes"),
    ],
)
def test_the_styles(name, plain, system, thinking, spaces, tools, why):
    lines = lines_of(STYLES[name])
    assert [lines[turns].verdict for turns in TURNS] == [plain, system, thinking, spaces, tools]
    assert all(why in lines[turns].found for turns in TURNS if lines[turns].verdict in (SPLITS, WRONG))
    assert all(line.fix for line in lines.values() if line.verdict != OK)
    assert lines["end of turn"].verdict == (WRONG if name == "hostile" else OK)
    assert {lines[text].verdict for text in ("text, ids, text", "ids, text, ids", "BOS")} == {OK}


def test_what_is_said():
    chatml, llama3, gemma = lines_of(CHATML), lines_of(LLAMA3), lines_of(GEMMA)
    assert chatml["end of turn"].found == (
        "262 <|im_end|>, sampled and trained; 263 <|end|> ends a completion too, and the template's own end of turn then follows"
    )
    assert chatml["after it"].found == "'\\n', ids [198]: never sampled, masked, written once"
    assert llama3["after it"].found == "nothing" and llama3["BOS"].found == "[261] once"
    assert "encoded again, turns 1, 2, 3 would have other ids" in llama3["turns"].found  # \n\n at the end of a prompt
    assert llama3["clock"].verdict == NOTE and "writes the date" in llama3["clock"].found and chatml["clock"].verdict == OK
    assert "turns 1, 2, 3: changes white space, " in llama3["turns, white space"].found
    assert "the packer sends the sampled ids as they are" in llama3["turns, white space"].fix
    assert "the packer refuses to go on (PackerError)" in lines_of(HOSTILE)["turns"].fix
    assert "changes or leaves out the words" in lines_of(HOSTILE)["end of turn"].found
    assert "System role not supported" in gemma["turns, system prompt"].found
    assert chatml["tool format"].verdict == NOTE and lines_of(TOOLS)["tool format"].verdict == OK
    assert lines_of(QWEN3)["enable_thinking"].found == "the template reads it; a run thinks on"
    assert "other ids for words" in chatml["ids, text, ids"].found  # `i`, `s`, which encoding merges


def test_what_extend_sends_after_a_second_kind_of_stop_token():
    packer = packer_of(CHATML)
    ids = packer.extend([*packer.encode("5"), *packer.encode("<|end|>")], [{"role": "user", "content": "u"}])
    assert packer.spell(ids) == "5<|end|><|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


def lines_for(folder: Path, style: Style, eos: tuple[str, ...] | None = None) -> dict[str, Line]:
    write_style(folder, style, eos=eos)
    return {line.name: line for line in check(init_data_packer(str(folder)), generation_config(str(folder)))}


def test_an_end_of_turn_that_stops_nothing(tmp_path):
    line = lines_for(tmp_path, CHATML, eos=("<|end|>",))["end of turn"]
    assert line.verdict == WRONG and "'<|im_end|>\\n" in line.found and "no stop token (263 <|end|>)" in line.found
    assert "eos_token_id" in line.fix


def test_an_end_of_turn_that_only_config_json_names(tmp_path):
    write_style(tmp_path, CHATML)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 263}')
    lines = {line.name: line for line in check(init_data_packer(str(tmp_path)), generation_config(str(tmp_path)))}
    assert lines["generation_config"].verdict == NOTE and lines["end of turn"].verdict == OK
    assert lines["generation_config"].found == "eos_token_id is [263], without the end of turn 262"


@pytest.mark.parametrize(("template", "said"), [
    (GEMMA.template.removeprefix("{{ bos_token }}"), "miss the tokenizer's leading [261]"),
    ("{{ bos_token }}" + GEMMA.template, "the leading [261] is there twice"),
])  # fmt: skip
def test_a_bos_missing_or_doubled(tmp_path, template, said):
    lines = lines_for(tmp_path, replace(GEMMA, template=template))
    assert lines["BOS"].verdict == WRONG and said in lines["BOS"].found and "a run stops with E13" in lines["BOS"].found
    assert not set(TURNS) & set(lines)


def test_messages_that_a_template_leaves_out(tmp_path):
    quiet = "{% for m in messages if m.role != 'tool' %}" + CHATML.template.partition("%}")[2]
    line = lines_for(tmp_path, replace(CHATML, template=quiet))["turns, tools"]
    assert (line.verdict, line.found) == (WRONG, "the template leaves out messages with role tool")


def test_a_template_for_one_turn_or_two(tmp_path):
    short = "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}" + CHATML.template
    line = lines_for(tmp_path, replace(CHATML, template=short))["turns"]
    assert line.verdict == WRONG and "the template refuses it: TemplateError: too long" in line.found


def test_a_template_that_refuses_tools(tmp_path):
    line = lines_for(tmp_path, replace(CHATML, template="{% if tools %}{{ raise_exception('no') }}{% endif %}" + CHATML.template))
    assert line["tool format"].found == "the template refuses tools: TemplateError: no"


def test_a_vocabulary_without_most_characters(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    lines = {line.name: line for line in check(init_data_packer(str(tmp_path)), {})}
    assert lines["text, ids, text"].verdict == WRONG and "emoji" in lines["text, ids, text"].found
    assert lines["end of turn"].verdict == WRONG


def test_a_tokenizer_that_cleans_up(tmp_path):
    write_style(tmp_path, CHATML)
    packer = init_data_packer(str(tmp_path))
    decode = packer.decode
    packer.decode = lambda ids: decode(ids).strip()  # type: ignore[method-assign]
    line = next(line for line in check(packer, {}) if line.name == "text, ids, text")
    assert line.verdict == NOTE and line.found == "white space or the Unicode form changes: spaces, lines"


def test_no_template_and_one_that_fails(tmp_path):
    with pytest.raises(PackerError, match="no chat template"):
        lines_for(tmp_path / "a", replace(CHATML, template=""))
    with pytest.raises(PackerError, match="the chat template of .* failed"):
        lines_for(tmp_path / "b", replace(CHATML, template="{% for m in messages %}"))


words = st.text(alphabet="ab is🙂é5.\n", min_size=1, max_size=12).filter(str.strip)
replies = st.lists(st.builds(lambda text: {"role": "user", "content": text}, words), min_size=1, max_size=2).map(tuple)
dialogues = st.builds(
    lambda opening, exchanges: Dialogue("random", opening, tuple(exchanges)), replies,
    st.lists(st.builds(Exchange, words, replies, st.one_of(st.just(""), words)), min_size=1, max_size=4),
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(STYLES) - {"hostile"}))
@settings(max_examples=25, deadline=None)
@given(dialogue=dialogues)
def test_what_the_check_says_holds_for_random_dialogues(name: str, dialogue: Dialogue) -> None:
    """No split said: each turn's text begins the next prompt, which `extend` makes. Rendered here without the packer."""
    style = STYLES[name]
    packer, lines = packer_of(style), lines_of(style)
    if any(lines[turns].verdict in (SPLITS, WRONG) for turns in ("turns", "turns, thinking", "turns, white space")):
        return
    end = ending(packer)
    assert not any(turn.splits or turn.lost or turn.sent != "same" for turn in walk(packer, dialogue, end))
    messages = list(dialogue.opening)
    ids = list(packer.get_rollout_input(messages)["prompt_ids"])
    for exchange in dialogue.exchanges:
        text = f"<think>\n{exchange.thought}\n</think>\n\n{exchange.says}" if exchange.thought else exchange.says
        whole = [*ids, *packer.encode(text), *end.ids]
        ids = packer.extend(whole, exchange.replies)
        messages += [{"role": "assistant", "content": text}, *exchange.replies]
        rendered = packer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ids[: len(whole)] == whole
        assert packer.spell(ids) == rendered


@pytest.mark.parametrize("name", sorted(STYLES))
@settings(max_examples=25, deadline=None)
@given(dialogue=dialogues)
def test_a_turn_that_does_not_split_begins_the_next_prompt(name: str, dialogue: Dialogue) -> None:
    """Turn by turn, for every style: `splits` is empty exactly when the rendered texts are prefixes."""
    packer = packer_of(STYLES[name])
    end, messages = ending(packer), list(dialogue.opening)
    stop = end.ids or packer.special_tokens.stop[:1]
    for turn, exchange in zip(walk(packer, dialogue, end), dialogue.exchanges, strict=True):
        before = packer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        opened = before.rstrip().endswith("<think>")
        thought = f"{'' if opened else '<think>' + chr(10)}{exchange.thought}\n</think>\n\n" if exchange.thought else ""
        said = thought + exchange.says
        messages += [{"role": "assistant", "content": said}, *exchange.replies]
        after = packer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert after.startswith(before + said + packer.spell(stop)) == (not turn.splits)
