"""Episodes of several turns, to the token: random dialogues in all template styles, and the cases worked out by hand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from chat_styles import CHATML, COUNTING, QWEN3, STYLES, TOOLS, Style, write_style
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.environment import ToolChat
from posttrain.data.packed_row import packed_row
from posttrain.data.packer import DataPacker, init_data_packer, spoken
from posttrain.errors import PackerError
from posttrain.loop.episode import Episode, Opening
from posttrain.types import Completion, Trajectory

FOLDERS = TemporaryDirectory()
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


@cache
def packer_of(style: Style, prefix: str = "") -> DataPacker:
    packer = init_data_packer(str(write_style(Path(FOLDERS.name) / f"{hash(style)}", style)))
    packer.thinking_prefix = prefix
    return packer


def completion(ids: list[int], reason: str = "stop", version: int = 3) -> Completion:
    return Completion("r", 0, ids, [-0.5 - 0.01 * i for i in range(len(ids))], [version] * len(ids), reason)  # type: ignore[arg-type]


class Engine:
    """Remembers the context of every token that it gave."""

    def __init__(self) -> None:
        self.gave: list[tuple[list[int], Completion]] = []

    def play(self, episode: Episode, turns: list[tuple[list[int], str, list[dict[str, Any]]]]) -> str:
        for version, (sampled, reason, replies) in enumerate(turns):
            done = completion(sampled[: episode.room], reason, version)
            self.gave.append((episode.ids, done))
            episode.take(done)
            if not episode.answer(replies):
                return "context"
        return "done"

    def check(self, trajectory: Trajectory) -> None:
        """Every trained token was sampled, in this place, after exactly these tokens, with this log-prob and version."""
        given = iter(self.gave)
        for row in trajectory.rows:
            whole, start = [*row.prompt_ids, *row.token_ids], len(row.prompt_ids)
            for turn in row.turns:
                at = slice(turn.start, turn.end)
                if turn.role == "env":
                    assert not any(row.mask[at]) and {*row.rollout_logprobs[at]} == {0.0} and {*row.weight_versions[at]} == {-1}
                    continue
                context, done = next(given)
                while not done.token_ids:
                    context, done = next(given)
                assert whole[: start + turn.start] == context, "the context is what the engine saw"
                assert row.token_ids[at] == done.token_ids and all(row.mask[at])
                assert row.rollout_logprobs[at] == done.logprobs and row.weight_versions[at] == done.versions
            assert sum(turn.end - turn.start for turn in row.turns) == len(row.token_ids)
        assert not [one for one in given if one[1].token_ids]


words = st.text(st.sampled_from(list("ab Is 2\n🙂é")), min_size=1, max_size=8).filter(lambda text: text.strip() != "")


@st.composite
def sampled(draw: Any, style: Style) -> tuple[list[int], str]:
    """What a model may sample: any spelling of any text, with thinking or marks in it, a cut emoji, with or without its stop."""
    packer = packer_of(style)
    text = draw(words) if draw(st.booleans()) else f"<think>\n{draw(words)}\n</think>\n\n{draw(words)}"
    ids = packer.encode(text) if draw(st.booleans()) else [i for character in text for i in packer.encode(character)]
    if draw(st.integers(0, 9)) == 0:
        ids.insert(draw(st.integers(0, len(ids))), packer.encode(draw(st.sampled_from(style.marks)))[0])
    if draw(st.integers(0, 3)) == 0:
        return ids[: draw(st.integers(1, len(ids)))], "length"
    return [*ids, packer.special_tokens.stop[0]], "stop"


@st.composite
def played(draw: Any, style: Style, roles: tuple[str, ...]) -> list[tuple[list[int], str, list[dict[str, Any]]]]:
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        replies = [{"role": draw(st.sampled_from(roles)), "content": draw(words)} for _ in range(draw(st.integers(1, 2)))]
        turns.append((*draw(sampled(style)), replies))
    return turns


def roles_of(name: str) -> tuple[str, ...]:
    return ("user",) if name in ("mistral",) else ("user", "tool")


@pytest.mark.parametrize("prefix", ["", "<think>\n"])
@pytest.mark.parametrize("name", sorted(STYLES))
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_prompt_is_what_the_template_renders_and_every_token_has_its_context(name: str, prefix: str, data: Any) -> None:
    style = STYLES[name]
    packer = packer_of(style, prefix)
    opening = [{"role": "user", "content": data.draw(words)}]
    episode = Episode(Opening.of(list(opening), packer), packer, limit=2_000, max_tokens=60)  # type: ignore[arg-type]
    engine = Engine()
    engine.play(episode, data.draw(played(style, roles_of(name))))
    trajectory = episode.trajectory("s", "g", "e")
    engine.check(trajectory)
    rendered = packer.tokenizer.apply_chat_template(spoken(packer, episode.messages), tokenize=False, add_generation_prompt=True)
    assert packer.spell(episode.ids) == rendered + prefix, "what the engine would be asked next"
    for row in trajectory.rows:
        ids, mask, start = packed_row(packer, row)
        assert ids == [*row.prompt_ids, *row.token_ids] and mask == [False] * start + row.mask


@pytest.mark.parametrize("name", sorted(set(STYLES) - {"counting", "plain_words", "hostile"}))
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_verbatim_every_prompt_begins_with_all_ids_so_far(name: str, data: Any) -> None:
    style = STYLES[name]
    packer, engine = packer_of(style), Engine()
    opening = Opening.of([{"role": "user", "content": data.draw(words)}], packer)
    episode = Episode(opening, packer, limit=2_000, max_tokens=60, verbatim=True)
    engine.play(episode, data.draw(played(style, roles_of(name))))
    trajectory = episode.trajectory("s", "g", "e")
    assert not trajectory.earlier, "one row, always"
    engine.check(trajectory)
    for (before, done), (after, _) in zip(engine.gave, engine.gave[1:], strict=False):
        assert after[: len(before) + len(done.token_ids)] == [*before, *done.token_ids]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), limit=st.integers(20, 120), cap=st.integers(1, 40))
def test_budgets_are_never_negative_and_a_truncated_episode_keeps_what_it_has(data: Any, limit: int, cap: int) -> None:
    packer, engine = packer_of(CHATML), Engine()
    opening = Opening.of([{"role": "user", "content": "a"}], packer)
    limit = max(limit, len(opening.item["prompt_ids"]) + 1)
    episode = Episode(opening, packer, limit=limit, max_tokens=cap)
    end = engine.play(episode, data.draw(played(CHATML, ("user",))))
    trajectory = episode.trajectory("s", "g", "e")
    engine.check(trajectory)
    for context, done in engine.gave:
        assert min(cap, limit - len(context)) > 0 and len(context) + len(done.token_ids) <= limit
    assert all(len(row.prompt_ids) + len(row.token_ids) <= limit for row in trajectory.rows)
    assert end == "done" or trajectory.truncated


# --- worked out by hand -----------------------------------------------------------------------------------------------


class ByHand(DataPacker):
    """The numbers of the acceptance check: 2 ends a turn, 99 is the newline, the environment says [1, 30, 2, 99, 1, 40]."""

    chats = True  # type: ignore[assignment]
    get_policy_input = policy_compute_max_len = policy_collate_fn = None  # type: ignore[assignment]

    def get_rollout_input(self, prompt: Any) -> dict[str, Any]:
        return {"prompt_ids": list(prompt)}

    def decode(self, token_ids: Any) -> str:
        return " ".join(map(str, token_ids))

    def encode(self, text: str) -> list[int]:
        return []

    def extend(self, ids: Any, messages: Any) -> list[int]:
        suffix = [2, 99]
        overlap = next((n for n in (2, 1) if list(ids[-n:]) == suffix[:n]), 0)
        return [*ids, *suffix[overlap:], *json.loads(messages[0]["content"])]


SAYS = [{"role": "user", "content": "[1, 30, 2, 99, 1, 40]"}]


@pytest.mark.parametrize("first, closing", [([20, 2], [99]), ([20], [2, 99])], ids=["stopped", "cut"])
def test_the_newline_after_the_end_of_a_turn_comes_once_and_is_masked(first: list[int], closing: list[int]) -> None:
    packer = ByHand()
    episode = Episode(Opening.of([10, 11], packer), packer, limit=100, max_tokens=10)
    episode.take(completion(first))
    assert episode.answer(SAYS)  # type: ignore[arg-type]
    env = [*closing, 1, 30, 2, 99, 1, 40]
    assert episode.ids == [10, 11, *first, *env]
    episode.take(completion([21, 2]))
    made = episode.trajectory("s", "g", "e")
    assert made.token_ids == [*first, *env, 21, 2]
    assert made.mask == [True] * len(first) + [False] * len(env) + [True, True]
    assert [v for v, own in zip(made.rollout_logprobs, made.mask, strict=True) if not own] == [0.0] * len(env)


@pytest.mark.parametrize("reply, room", [(9, 0), (6, 0), (5, 1)], ids=["19", "16", "15"])
def test_case_tok_5_a_prompt_that_outgrew_the_window_ends_the_episode(reply: int, room: int) -> None:
    """max_model_len 16, 6 prompt and 4 sampled tokens: next prompts of 19, 16 and 15."""
    packer = ByHand()
    episode = Episode(Opening.of([10] * 6, packer), packer, limit=16, max_tokens=10)
    episode.take(completion([20, 21, 22, 2]))
    said = [{"role": "user", "content": json.dumps([30] * (reply - 1))}]  # and the newline
    assert episode.answer(said) == bool(room)  # type: ignore[arg-type]
    made = episode.trajectory("s", "g", "e")
    if room:
        assert episode.room == room and len(episode.ids) == 15
    else:
        assert made.truncated and made.mask == [True] * 4 and len(made.turns) == 1


def test_a_template_that_drops_earlier_thinking_splits_or_is_kept_verbatim() -> None:
    packer = packer_of(QWEN3)
    ids = [*packer.encode("<think>\nhm\n</think>\n\nis 2"), packer.special_tokens.stop[0]]
    lengths = {}
    for verbatim in (False, True):
        opening = Opening.of([{"role": "user", "content": "?"}], packer)
        episode = Episode(opening, packer, limit=500, max_tokens=90, verbatim=verbatim)
        for _ in range(3):
            episode.take(completion(ids))
            episode.answer([{"role": "user", "content": "again"}])
        episode.take(completion(ids))
        made = episode.trajectory("0:e:r/0", "0:e:r", "e")
        lengths[verbatim] = len(made.rows)
        assert made.sampled == 4 * len(ids), "every token trains once"
    assert lengths == {False: 4, True: 1}


def test_the_rows_of_a_split_episode_have_names_of_their_own_and_the_last_is_the_sample() -> None:
    packer = packer_of(COUNTING)
    episode = Episode(Opening.of([{"role": "user", "content": "?"}], packer), packer, limit=500, max_tokens=90)
    named = []
    for _ in range(3):
        episode.take(completion([*packer.encode("2"), packer.special_tokens.stop[0]]))
        named.append([row.sample_id for row in episode.trajectory("s", "g", "e").rows])
        episode.answer([{"role": "user", "content": "again"}])
    assert named == [["s"], ["s"], ["s#0", "s"]]
    assert [row.sample_id for row in episode.trajectory("s", "g", "e").rows] == ["s#0", "s"], "a row without a turn is left out"


def test_results_of_tools_are_the_templates_own_or_else_the_users_words() -> None:
    said = [{"role": "tool", "name": "add", "content": "4"}, {"role": "tool", "name": "add", "content": "5"}]
    texts = {}
    for name, style in (("tools", TOOLS), ("chatml", CHATML)):
        packer = packer_of(style)
        opening = Opening.of(ToolChat([{"role": "user", "content": "2+2?"}], [TOOL]), packer)
        episode = Episode(opening, packer, limit=2_000, max_tokens=90)
        episode.take(completion([*packer.encode("is 2"), packer.special_tokens.stop[0]]))
        assert episode.answer(said)  # type: ignore[arg-type]
        assert not episode.trajectory("s", "g", "e").earlier
        texts[name] = packer.spell(episode.ids)
    assert '<tools>[{"type": "function"' in texts["tools"] and "<result>4</result>" in texts["tools"]
    assert "add" in texts["chatml"].split("user")[0], "described in the system message"
    assert "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>" in texts["chatml"]


def test_special_tokens_that_mark_tool_calls_are_words_of_a_turn() -> None:
    from posttrain.data.tool_calls import parse

    style = Style(TOOLS.template, (*CHATML.marks, "[TOOL_CALLS]"), ("<|im_end|>",))
    packer = packer_of(style)
    text = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}]'
    said = packer.get_rollout_output([*packer.encode("<|im_start|>" + text), packer.special_tokens.stop[0]])["text"]
    assert said == text, "other special tokens are left out"
    (call,) = parse(said)
    assert (call.name, call.arguments, call.problem) == ("add", {"a": 2}, "")


def test_text_goes_on_as_text() -> None:
    packer = packer_of(CHATML)
    episode = Episode(Opening.of("2+2=", packer), packer, limit=100, max_tokens=9, verbatim=False)
    episode.take(completion(packer.encode("5"), "length"))
    assert episode.answer([{"role": "user", "content": " no: "}])
    assert packer.spell(episode.ids) == "2+2=5 no: " and episode.trajectory("s", "g", "e").mask == [True, *[False] * 5]


def test_a_template_that_cannot_continue_is_an_error_only_where_it_must() -> None:
    bad = Style("{{ messages[-1]['content'] }}{{ messages | length }}", ("<eos>",), ("<eos>",))
    packer = packer_of(bad)
    for verbatim in (True, False):
        opening = Opening.of([{"role": "user", "content": "?"}], packer)
        episode = Episode(opening, packer, limit=100, max_tokens=9, verbatim=verbatim)
        episode.take(completion([*packer.encode("2"), packer.special_tokens.stop[0]]))
        if verbatim:
            with pytest.raises(PackerError, match="rewrites earlier turns"):
                episode.answer([{"role": "user", "content": "a"}])
        else:
            assert episode.answer([{"role": "user", "content": "a"}]) and packer.spell(episode.ids) == "a3"


def test_the_config_says_how_a_model_thinks(tmp_path: Path) -> None:
    from posttrain.config.load import load_config
    from posttrain.loop.prepare import build_packer

    folder = str(write_style(tmp_path, QWEN3))
    told = {}
    for value, extra in (("null", []), ("false", []), ("true", ["rollout.thinking_prefix='<think>\n'"])):
        overrides = [f"rollout.enable_thinking={value}", f"model.name_or_path={folder}", "model.factory=null", *extra]
        config = load_config(["experiment=arithmetic_grpo", "~model.factory_kwargs", *overrides]).config
        packer = build_packer(config, folder)
        told[value] = packer.spell(Opening.of([{"role": "user", "content": "?"}], packer).item["prompt_ids"])
    assert told["false"].endswith("assistant\n<think>\n\n</think>\n\n") and told["null"].endswith("assistant\n")
    assert told["true"].endswith("assistant\n<think>\n")


@pytest.mark.parametrize("verbatim", [False, True])
def test_no_word_of_a_conversation_is_taken_for_the_packers_own(verbatim: bool) -> None:
    from posttrain_datapackers.decoder_only import MARK

    packer = packer_of(CHATML)
    for said in (MARK, f"echo: {MARK}", f"{MARK}, {MARK} and more"):
        opening = Opening.of([{"role": "user", "content": "?"}], packer)
        episode = Episode(opening, packer, limit=500, max_tokens=90, verbatim=verbatim)
        episode.take(completion([*packer.encode(MARK), packer.special_tokens.stop[0]]))
        assert episode.answer([{"role": "user", "content": said}])
        assert not episode.trajectory("s", "g", "e").earlier
        asked = f"{MARK}<|im_end|>\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        assert packer.spell(episode.ids).endswith(asked)
