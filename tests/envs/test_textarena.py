"""The adapter `textarena` against the real package: seeded games, an opponent, no download, nobody's randomness touched."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import nltk
import numpy as np
import pytest

from posttrain import plugins
from posttrain.data.environment import as_messages
from posttrain.errors import ConfigError
from posttrain.testing import EnvContract, play

GUESS = plugins.load("envs", "textarena", game="GuessTheNumber-v0", size=40, test_size=10)
ROW = GUESS.dataset("train")[3]


class TestTextArenaContract(EnvContract):
    plugin = "textarena"
    options: ClassVar = {"game": "GuessTheNumber-v0", "size": 40, "test_size": 10, "max_turns": 6}
    rows = 4

    def replies(self, row: Mapping[str, Any]) -> list[str]:
        return ["[10]", "I think [12]", "[3]"]


def secret(row: Mapping[str, Any]) -> int:
    """Found by asking one number after the other, as anybody would."""
    return next(n for n in range(1, 21) if play(GUESS, row, [f"[{n}]"]).reward.parts["finished"])


def test_a_game_is_played_turn_by_turn_to_its_own_reward() -> None:
    number = secret(ROW)
    other = 1 if number != 1 else 2
    assert "between 1 and 20" in as_messages(GUESS.format_prompt(ROW))[0]["content"]
    state, reward = play(GUESS, ROW, [f"<think>[{number}]?</think> [{other}]", f"It is [{number}].", "never said"])
    assert state.turn == 2 and state.messages[2]["content"] == f"The target number is {'higher' if other < number else 'lower'}."
    assert reward.total == 1 and reward.parts == {"finished": 1, "invalid": 0} and "correct number" in reward.info["reason"]


def test_moves_against_the_rules_are_told_and_then_end_the_game() -> None:
    state, reward = play(GUESS, ROW, ["a number", "no number"])
    assert "invalid move" in state.messages[2]["content"] and state.turn == 2
    assert reward.parts == {"finished": 1, "invalid": 1}


def test_a_game_that_is_not_over_is_worth_what_the_options_say() -> None:
    assert play(GUESS, ROW, []).reward.total == 0
    env = plugins.load("envs", "textarena", game="GuessTheNumber-v0", unfinished=-1, max_turns=1)
    number = secret(ROW)
    state, reward = play(env, ROW, [f"[{1 if number != 1 else 2}]", "[3]"])
    assert state.turn == 1 and reward.total == -1 and reward.parts["finished"] == 0


def test_a_seed_is_a_game_and_rows_of_the_splits_are_other_seeds() -> None:
    train, test = ({row["seed"] for row in GUESS.dataset(split)} for split in ("train", "test"))
    assert not train & test and len(train) == 40 and len(test) == 10
    assert len({secret(row) for row in list(GUESS.dataset("train"))[:8]}) > 2


def test_the_randomness_of_the_process_is_left_alone() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    play(plugins.load("envs", "textarena", game="2048-v0"), {"id": "x", "seed": 1}, ["[up]", "[left]"])
    assert (random.random(), np.random.random()) == expected


def test_a_game_with_chance_goes_on_as_it_began() -> None:
    """2048 draws a tile after each move; each answer plays the game anew."""
    env = plugins.load("envs", "textarena", game="2048-v0")
    moves = ["[up]", "[left]", "[down]", "[right]", "[up]"]
    one, two = (play(env, {"id": "x", "seed": 7}, moves) for _ in range(2))
    assert one.state.messages == two.state.messages and one.state.turn == 5
    assert play(env, {"id": "y", "seed": 8}, moves).state.messages != one.state.messages


OPPONENT = '''
import re

def first_free(observation, rng):
    """The first free cell of the last board, or any."""
    free = re.findall(r"\\[(\\d)\\]|'(\\d)'", observation)
    return f"[{rng.choice([a or b for a, b in free])}]" if free else "[0]"

def nim(observation, rng):
    heaps = re.findall(r"(?:Pile|pile|Heap|heap) (\\d+): (\\d+)", observation)
    full = [number for number, count in dict(heaps).items() if int(count)]
    return f"[{full[0]} 1]"
'''


def test_an_opponent_plays_the_others(tmp_path: Path) -> None:
    (tmp_path / "players.py").write_text(OPPONENT)
    env = plugins.load("envs", "textarena", game="Nim-v0", opponent=f"{tmp_path}/players.py:nim")
    row = {"id": "x", "seed": 3}
    first = as_messages(env.format_prompt(row))[0]["content"]
    assert "Player 0" in first

    def player(state: Any) -> str:
        heaps = dict(re.findall(r"(?i)(?:pile|heap) (\d+): (\d+)", "\n".join(str(m["content"]) for m in state.messages)))
        return next(f"[{number} {count}]" for number, count in heaps.items() if int(count))

    state, reward = play(env, row, player)
    assert reward.parts["finished"] == 1 and reward.total in (-1, 1) and state.turn >= 2
    assert any("[Player 1]" in str(m["content"]) for m in state.messages[2:])
    second = plugins.load("envs", "textarena", game="Nim-v0", opponent=f"{tmp_path}/players.py:nim", player=1)
    assert "[Player 0]" in as_messages(second.format_prompt(row))[0]["content"]


def test_a_game_that_is_another_one_elsewhere_is_unscorable() -> None:
    state, _ = play(GUESS, ROW, ["[1]"])
    state.messages[2]["content"] = "The target number is somewhere."
    with pytest.raises(RuntimeError, match="is another game in another process"):
        GUESS.compute_reward(state)


def test_data_that_is_missing_is_named_and_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: pytest.fail("a download was begun"))
    env = plugins.load("envs", "textarena", game="Wordle-v0")
    with pytest.raises(ConfigError, match="needs data of nltk") as caught:
        env.format_prompt(ROW)
    assert "python -m nltk.downloader words" in caught.value.fix


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"game": "GuessTheNumbers-v0"}, "did you mean GuessTheNumber-v0"), ({"game": "Nim-v0", "players": 2}, "no opponent"),
        ({"game": "GuessTheNumber-v0", "player": 1}, "must be 0 to 0"), ({"game": "GuessTheNumber-v0", "size": 0}, "at least 1"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError)) as caught:
        plugins.load("envs", "textarena", **options)
    assert said in str(caught.value)
