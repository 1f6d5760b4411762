"""Wordle: guess a secret word in a few turns; each guess is answered with what it shares with the word.

    environments=[{name: wordle}]                                      # common English words of five letters, from a seed
    environments=[{name: wordle, options: {data: words.csv}}]          # rows of your own: `word`, of any length

A guess is the last `<guess>crane</guess>` or `[crane]` after the model's thinking. It is answered with G (this letter is here), Y
(elsewhere) and X for each letter; a letter is marked no more often than the word has it, greens first. What is no guess (no tags,
other characters, another length) is answered with the reason and costs no guess, `invalid` times; after that it ends the game.

The reward is 1 for the word and `speed_weight`/guesses on top, else 0.2 for each green and 0.1 for each yellow of the last guess,
plus `format_weight` times the share of turns that held a guess. An episode's messages are the game: nothing else is remembered.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, ClassVar

from posttrain.data.environment import Environment, EpisodeState, Prompt, RowDataset, Split, Style, as_messages, user_prompt
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import DataError
from posttrain.types import Message, Reward
from posttrain_envs.idle import refuse_idle
from posttrain_envs.tags import visible

PROMPT = (
    "Guess a secret English word of {length} letters; you have {guesses} guesses. Think first, then write your guess like "
    "<guess>{example}</guess>. Each guess is answered with one mark for each letter: G for a letter that is right where it is, Y "
    "for one that is in the word but elsewhere, X for one that is not in it (or not once more)."
)
EXAMPLES = {5: "crane"}  # not in the list of words
GREEN, YELLOW, GREY = "G", "Y", "X"
_GUESS = re.compile(r"<guess>([^<>\[\]]{0,64})</guess>|\[([^<>\[\]]{0,64})\]")


class Wordle(Environment):
    """Guess a secret word; a game of several turns, told in text alone."""

    api: ClassVar[int] = 1

    @dataclass(frozen=True, kw_only=True)
    class Options(DataOptions):
        """Where the words come from (`data`, or else the list of the package), how it is asked, and what counts."""

        guesses: int = 6  # valid guesses of a game
        invalid: int = 1  # turns without a valid guess that are answered; one more ends the game
        seed: int = 0  # which words of the package's list are held out (test_size of them, 256 unless set), and the order
        speed_weight: float = 1.0  # for the word, this divided by the guesses it took is added
        format_weight: float = 0.2  # times the share of turns that hold a valid guess
        system: str | None = None  # system message
        prompt: str = PROMPT  # user message; {length}, {guesses} and {example} are filled in
        style: Style = "auto"  # auto: chat messages where the model has a chat template, else text

        def __post_init__(self) -> None:
            super().__post_init__()
            refuse_idle(self, made=("seed",), what="words")
            if self.guesses < 1 or self.invalid < 0:
                raise ValueError(f"guesses={self.guesses} must be at least 1, and invalid={self.invalid} at least 0")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.max_turns = self.options.guesses + self.options.invalid + 1

    def dataset(self, split: Split) -> RowDataset:
        """Rows `{"id", "word"}`; no word is in both splits."""
        if self.options.data is not None:
            return open_rows(self.options, split, required=("word",), same=("word",))
        words = list(common_words())
        random.Random(self.options.seed).shuffle(words)
        size = 256 if self.options.test_size is None else self.options.test_size
        held_out = round(size * len(words)) if isinstance(size, float) else size
        if not 0 <= held_out < len(words):
            raise DataError(f"test_size={size} leaves none of the {len(words)} words to train", fix="lower test_size")
        return [{"id": word, "word": word} for word in (words[:held_out] if split == "test" else words[held_out:])]

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        o, length = self.options, len(_word(task))
        example = EXAMPLES.get(length, "x" * length)
        text = o.prompt.replace("{length}", str(length)).replace("{guesses}", str(o.guesses)).replace("{example}", example)
        return user_prompt(text, system=o.system, style=o.style)

    def task_key(self, task: Mapping[str, Any]) -> str:
        """The word, which the prompt does not tell."""
        return f"wordle {_word(task)}"

    async def env_response(self, state: EpisodeState) -> list[Message] | None:
        game = self._game(state)
        return None if game.over else [Message(role="user", content=game.reply)]

    async def compute_reward(self, state: EpisodeState) -> Reward:
        """Parts: `correct`, `partial`, `speed` and `format` as they come, and the counts `guesses` and `invalid`."""
        o, game = self.options, self._game(state)
        correct, tried = float(game.solved), len(game.guesses)
        partial = 0.0 if game.solved or not tried else 0.2 * game.last.count(GREEN) + 0.1 * game.last.count(YELLOW)
        parts = {
            "correct": correct, "partial": partial, "speed": correct / tried if tried else 0.0,
            "format": tried / game.turns if game.turns else 0.0, "guesses": float(tried), "invalid": float(game.invalid),
        }  # fmt: skip
        total = correct + partial + o.speed_weight * parts["speed"] + o.format_weight * parts["format"]
        return Reward(total, parts, {"word": game.word, "guesses": list(game.guesses)})

    def _game(self, state: EpisodeState) -> Game:
        game = Game(_word(state.task), guesses_allowed=self.options.guesses, invalid_allowed=self.options.invalid)
        for message in state.messages[len(as_messages(state.prompt)) :]:
            if message["role"] == "assistant" and not game.over:
                game.take(str(message["content"]))
        return game


class Game:
    """One game, from what the model said in it."""

    def __init__(self, word: str, *, guesses_allowed: int, invalid_allowed: int) -> None:
        self.word, self._guesses_allowed, self._invalid_allowed = word, guesses_allowed, invalid_allowed
        self.guesses: list[str] = []
        self.invalid = 0
        self.last = self.reply = ""

    @property
    def turns(self) -> int:
        return len(self.guesses) + self.invalid

    @property
    def solved(self) -> bool:
        return self.word in self.guesses[-1:]

    @property
    def over(self) -> bool:
        return self.solved or len(self.guesses) >= self._guesses_allowed or self.invalid > self._invalid_allowed

    def take(self, text: str) -> None:
        """The model's next turn; `reply` is then what it is told."""
        guess = guess_in(text)
        problem = problem_of(guess, len(self.word))
        if problem:
            self.invalid += 1
            self.reply = f"{problem} Write it like <guess>{EXAMPLES.get(len(self.word), 'x' * len(self.word))}</guess>."
            return
        assert guess is not None
        self.guesses.append(guess)
        self.last = feedback(guess, self.word)
        left = self._guesses_allowed - len(self.guesses)
        self.reply = f"{' '.join(guess.upper())}\n{' '.join(self.last)}\n{left} {'guess' if left == 1 else 'guesses'} left."


def feedback(guess: str, word: str) -> str:
    """A mark for each letter of the guess; both have the same length, upper and lower case are alike.

        feedback("geese", "elegy")       # "YYGXX": the word has two e, of which one is green and one is elsewhere
    """
    guess, word = guess.lower(), word.lower()
    left = Counter(w for g, w in zip(guess, word, strict=True) if g != w)
    marks = []
    for g, w in zip(guess, word, strict=True):
        if g == w:
            marks.append(GREEN)
        elif left[g] > 0:
            left[g] -= 1
            marks.append(YELLOW)
        else:
            marks.append(GREY)
    return "".join(marks)


def guess_in(text: str) -> str | None:
    """The last guess after the thinking, in lower case; None without one."""
    found: Sequence[tuple[str, str]] = _GUESS.findall(visible(text))
    return (found[-1][0] or found[-1][1]).strip().lower() if found else None


def problem_of(guess: str | None, length: int) -> str:
    """Why this is no guess; empty for one that is."""
    if guess is None:
        return "There is no guess in your answer."
    if not (guess.isascii() and guess.isalpha()):
        return "A guess has letters only."
    return "" if len(guess) == length else f"The word has {length} letters, your guess has {len(guess)}."


@cache
def common_words() -> tuple[str, ...]:
    """The package's list: more than 2,000 common English words of five letters, in order."""
    return tuple(resources.files("posttrain_envs").joinpath("data/words.txt").read_text(encoding="utf-8").split())


def _word(task: Mapping[str, Any]) -> str:
    """The secret word of a row, in lower case. Raises DataError for one that cannot be guessed."""
    word = str(task["word"]).strip().lower()
    if not (word.isascii() and word.isalpha()):
        raise DataError(
            f"{task['word']!r} is no word to guess", cause="guesses are letters from a to z",
            fix="correct the row, or leave it out with options.filter", code="wordle-word",
        )  # fmt: skip
    return word
