"""Wordle: marks are right for repeated letters, games are told by their messages, words of the splits are apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import plugins
from posttrain.data.environment import Environment, as_messages, episode
from posttrain.errors import ConfigError, DataError
from posttrain.testing import EnvContract, play
from posttrain_envs.wordle import Wordle, common_words, feedback, guess_in

ENV = Wordle()
CRANE, LLAMA = {"id": "crane", "word": "crane"}, {"id": "llama", "word": "LLama"}


class TestWordleContract(EnvContract):
    plugin = "wordle"
    passing = 2.0  # the word in the first guess; four greens and the format are 1.0

    def gold(self, row: Mapping[str, Any]) -> str:
        return f"<think>[other]</think> I say <guess>{row['word']}</guess>"

    def wrong(self, row: Mapping[str, Any]) -> list[str]:
        return ["<guess>zzzzz</guess>"]


@pytest.mark.parametrize(
    ("guess", "word", "marks"),
    [
        ("eerie", "crane", "XXYXG"), ("allow", "llama", "YGYXX"), ("speed", "abide", "XXYXY"), ("geese", "elegy", "YYGXX"),
        ("geese", "those", "XXXGG"), ("EeRiE", "cRaNe", "XXYXG"), ("crane", "crane", "GGGGG"), ("GEESE", "those", "XXXGG"),
    ],
)  # fmt: skip
def test_case_game_3_a_letter_is_marked_no_more_often_than_the_word_has_it(guess: str, word: str, marks: str) -> None:
    assert feedback(guess, word) == marks


def reference(guess: str, word: str) -> str:
    """The rule as one would say it: a grey or yellow letter is yellow while it is left, from the left, after all greens."""
    marks = ["G" if g == w else "?" for g, w in zip(guess, word, strict=True)]
    for i, letter in enumerate(guess):
        if marks[i] == "?":
            green = sum(mark == "G" and guess[j] == letter for j, mark in enumerate(marks))
            yellow = sum(marks[j] == "Y" and guess[j] == letter for j in range(i))
            marks[i] = "Y" if green + yellow < word.count(letter) else "X"
    return "".join(marks)


WORDS = st.text(alphabet="abc", min_size=5, max_size=5)
REPLIES = st.one_of(WORDS.map(lambda w: f"<guess>{w}</guess>"), WORDS.map(lambda w: f"[{w}]"), st.just("hm"))


@settings(max_examples=500, derandomize=True, deadline=None)
@given(guess=WORDS, word=WORDS)
def test_marks_are_those_of_the_rule(guess: str, word: str) -> None:
    marks = feedback(guess, word)
    assert marks == reference(guess, word) == feedback(guess.upper(), word)
    for letter in "abc":  # as many are marked as both have, whatever the order
        marked = sum(g == letter and mark != "X" for g, mark in zip(guess, marks, strict=True))
        assert marked == min(guess.count(letter), word.count(letter))
    assert [mark == "G" for mark in marks] == [g == w for g, w in zip(guess, word, strict=True)]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(replies=st.lists(REPLIES, max_size=9), word=WORDS)
def test_the_reward_of_any_game_is_that_of_its_rules(replies: list[str], word: str) -> None:
    guesses, invalid = [], 0
    for reply in replies:
        found = "" if reply == "hm" else reply.strip("[]").removeprefix("<guess>").removesuffix("</guess>")
        guesses, invalid = ([*guesses, found], invalid) if found else (guesses, invalid + 1)
        if found == word or len(guesses) == 6 or invalid > 1:
            break
    state, reward = play(ENV, {"word": word}, replies)
    assert reward.info["guesses"] == guesses and reward.parts["invalid"] == invalid
    shape = 0.2 * len(guesses) / max(len(guesses) + invalid, 1)
    if guesses and guesses[-1] == word:
        assert reward.total == pytest.approx(1 + 1 / len(guesses) + shape)
    else:
        last = reference(guesses[-1], word) if guesses else ""
        assert reward.total == pytest.approx(0.2 * last.count("G") + 0.1 * last.count("Y") + shape)
    assert state.turn == len(guesses) + invalid <= ENV.max_turns


def test_a_game_is_answered_turn_by_turn_and_ends_with_the_word() -> None:
    state, reward = play(ENV, LLAMA, ["<guess>Allow</guess>", "Maybe [hello]? No: [LLAMA]", "never said"])
    assert state.turn == 2 and state.messages[-1]["role"] == "assistant"
    assert state.messages[2]["content"] == "A L L O W\nY G Y X X\n5 guesses left."
    assert reward.total == pytest.approx(1 + 1 / 2 + 0.2)
    assert reward.parts == {"correct": 1, "partial": 0, "speed": 0.5, "format": 1, "guesses": 2, "invalid": 0}


def test_it_ends_after_six_guesses_and_the_last_one_counts() -> None:
    state, reward = play(ENV, CRANE, ["<guess>eerie</guess>"] * 5 + ["<guess>crank</guess>", "<guess>crane</guess>"])
    assert state.turn == 6 and reward.total == pytest.approx(0.2 * 4 + 0.2) and reward.parts["correct"] == 0
    told = [message["content"].splitlines()[-1] for message in state.messages if message["role"] == "user"][1:]
    assert told == ["5 guesses left.", "4 guesses left.", "3 guesses left.", "2 guesses left.", "1 guess left."]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("I am not sure.", "There is no guess"), ("<guess>cranes</guess>", "The word has 5 letters, your guess has 6."),
        ("<guess>cr4ne</guess>", "letters only"), ("<think><guess>crane</guess>", "There is no guess"), ("[]", "letters only"),
        ("<guess>crane", "There is no guess"), ("[crаne]", "letters only"),  # the last one has a Cyrillic letter
    ],
)  # fmt: skip
def test_what_is_no_guess_is_told_costs_nothing_once_and_ends_the_game_twice(reply: str, said: str) -> None:
    state, reward = play(ENV, CRANE, [reply, "<guess>crane</guess>"])
    assert said in state.messages[2]["content"] and "<guess>crane</guess>" in state.messages[2]["content"]
    assert reward.total == pytest.approx(1 + 1 + 0.2 / 2) and reward.parts["invalid"] == 1
    state, reward = play(ENV, CRANE, [reply, "[eerie]", reply, "<guess>crane</guess>"])
    assert state.turn == 3 and reward.total == pytest.approx(0.1 + 0.2 + 0.2 / 3)
    strict = Wordle(Wordle.Options(invalid=0))
    assert play(strict, CRANE, [reply, "<guess>crane</guess>"]).state.turn == 1


def test_a_game_that_is_cut_off_is_worth_what_was_said_till_then() -> None:
    assert play(ENV, CRANE, []).reward.total == 0
    state = episode(ENV, CRANE, "<guess>crank</guess>")  # no turn was answered
    assert play(ENV, CRANE, ["<guess>crank</guess>"]).reward == asyncio.run(ENV.compute_reward(state))


def test_words_are_many_common_and_apart() -> None:
    words = common_words()
    assert "crane" not in words and len(words) > 2000 and list(words) == sorted(set(words))
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in words)
    train, test = ({row["word"] for row in ENV.dataset(split)} for split in ("train", "test"))  # type: ignore[union-attr]
    assert not train & test and train | test == set(words) and len(test) == 256
    other = Wordle(Wordle.Options(seed=1, test_size=0.1)).dataset("test")
    assert len(other) == round(0.1 * len(words)) and {row["word"] for row in other} != test  # type: ignore[union-attr]


def test_words_of_one_s_own_may_have_any_length(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"word": w}) + "\n" for w in ("Cat", "dog", "bird", "fish", "cow")))
    env = plugins.load("envs", "wordle", data=str(tmp_path / "words.jsonl"), test_size=2)
    train, test = env.dataset("train"), env.dataset("test")
    assert (len(train), len(test)) == (3, 2) and not {r["word"] for r in train} & {r["word"] for r in test}
    assert "3 letters" in str(as_messages(env.format_prompt({"word": "Cat"}))[0]["content"])
    assert play(env, {"word": "Cat"}, ["[cat]"]).reward.parts["correct"] == 1
    with pytest.raises(DataError, match="no word to guess"):
        env.format_prompt({"word": "it's"})


@pytest.mark.parametrize("options", [{"guesses": 0}, {"invalid": -1}, {"columns": {"word": "w"}}, {"data": "x.csv", "seed": 3}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, ValueError)):
        plugins.load("envs", "wordle", **options)


def test_the_last_guess_after_the_thinking_counts() -> None:
    assert guess_in("<think>[other]</think>[first] or <guess> Crane </guess>") == "crane"
    assert guess_in("<guess>first</guess>, no: [crane]") == "crane" and guess_in("[[crane]]") == "crane"
    assert isinstance(ENV, Environment) and ENV.max_turns == 8
