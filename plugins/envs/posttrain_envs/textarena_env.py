"""A game of the textarena package, played in text: alone, or against an opponent that is a function.

    environments=[{name: textarena, options: {game: GuessTheNumber-v0}}]
    environments=[{name: textarena, options: {game: Nim-v0, opponent: "players.py:careful"}}]

A row is a seed. The reward is what the game gives its player in the end, as it is: -1 to 1 in most games (`reward_range` of the
entry makes it 0 to 1 in training). A game that is not over when the episode ends is worth `unfinished`.

Games draw from Python's global generator and keep what cannot be sent elsewhere, so each answer plays the game anew from its seed
and from what was said, in a process of its own, with the generators put back afterwards. That what it finds is what was told
before is checked; a game that differs from process to process is unscorable. Games that need data of nltk find it installed, or
say how to install it: nothing is downloaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import nltk
import numpy as np
import textarena as ta
from textarena.envs.registration import ENV_REGISTRY

from posttrain.data.environment import Environment, EpisodeState, Prompt, Rows, Split, Style, as_messages, user_prompt
from posttrain.errors import ConfigError
from posttrain.plugins.functions import absolute, function_of
from posttrain.plugins.problems import nearest
from posttrain.types import Message, Reward
from posttrain_envs.tags import visible

RAW = "-raw"


class TextArena(Environment):
    """A game of textarena by name, from seeds; its own reward."""

    api: ClassVar[int] = 1

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Which game, against whom, and how many of it."""

        game: str  # name in textarena, as GuessTheNumber-v0
        args: dict[str, Any] = field(default_factory=dict)  # the game's own settings
        opponent: str | None = None  # module:function(observation, rng) -> action, for each other player
        players: int | None = None  # of the game; null: 1, with an opponent 2
        player: int = 0  # which one the model is
        size: int = 2000  # seeds of the train split
        test_size: int = 128  # seeds of the test split
        seed: int = 0  # the first one
        max_turns: int = 50  # of the model
        max_action: int = 2000  # characters of a turn that the game sees, the last ones
        unfinished: float = 0.0  # what a game is worth that is not over
        system: str | None = None  # system message
        style: Style = "auto"  # auto: chat messages where the model has a chat template, else text

        def __post_init__(self) -> None:
            if self.game not in ENV_REGISTRY:
                near = nearest(self.game, ENV_REGISTRY)
                raise ConfigError(f"textarena has no game {self.game!r}", cause=f"it has {len(ENV_REGISTRY)} names of games",
                                  fix=f"did you mean {near}?" if near else "see textarena.pprint_registry_detailed()",
                                  code="textarena-game")  # fmt: skip
            if min(self.size, self.test_size, self.max_turns, self.max_action) < 1:
                raise ValueError("size, test_size, max_turns and max_action must be at least 1")
            if not 0 <= self.player < self.number:
                raise ValueError(f"player={self.player} must be 0 to {self.number - 1}")
            if self.number > 1 and self.opponent is None:
                raise ConfigError(f"players={self.number} and no opponent", cause="somebody must play the others",
                                  fix="opponent=players.py:function, which takes (observation, rng)")  # fmt: skip
            if self.opponent is not None:
                object.__setattr__(self, "opponent", absolute(self.opponent))

        @property
        def number(self) -> int:
            """How many play."""
            return self.players if self.players is not None else 1 if self.opponent is None else 2

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.max_turns = self.options.max_turns

    def __reduce__(self) -> Any:
        return type(self), (self.options,)

    def dataset(self, split: Split) -> Rows:
        """Rows `{"id", "seed"}`. Different seeds may be the same game, where there are few."""
        o = self.options
        first, size = (o.seed, o.test_size) if split == "test" else (o.seed + o.test_size, o.size)
        return Rows(size, lambda i: {"id": f"{o.game}:{first + i}", "seed": first + i})

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        """What the game tells its player first."""
        return user_prompt(self._play(task, ()).told[0], system=self.options.system, style=self.options.style)

    def task_key(self, task: Mapping[str, Any]) -> str:
        return str(task["id"])

    def env_response(self, state: EpisodeState) -> list[Message] | None:
        game = self._so_far(state)
        return None if game.over else [Message(role="user", content=game.told[-1])]

    def compute_reward(self, state: EpisodeState) -> Reward:
        """Parts: `finished`, and `invalid` when a move against the rules ended the game."""
        game, player = self._so_far(state), self.options.player
        parts = {"finished": float(game.over), "invalid": float(bool(game.info.get("invalid_move")))}
        total = float(game.rewards.get(player, self.options.unfinished)) if game.over else self.options.unfinished
        return Reward(total, parts, {"reason": str(game.info.get("reason", ""))})

    @cached_property
    def _opponent(self) -> Callable[[str, random.Random], str] | None:
        return None if self.options.opponent is None else function_of(self.options.opponent, "opponent")

    def _so_far(self, state: EpisodeState) -> Game:
        """The game of an episode. Raises RuntimeError when it is not the one that was told."""
        opening = as_messages(state.prompt)
        later = state.messages[len(opening) :]
        game = self._play(state.task, [str(m["content"]) for m in later if m["role"] == "assistant"])
        heard = [str(m["content"]) for m in (opening[-1], *later) if m["role"] != "assistant"]
        if game.told[: len(heard)] != heard:
            raise RuntimeError(
                f"{self.options.game} with seed {state.task['seed']} is another game in another process: it depends on more than "
                "its seed (the order of a set, for one), so it cannot be trained on; PYTHONHASHSEED=0 may help"
            )
        return game

    def _play(self, task: Mapping[str, Any], said: Sequence[str]) -> Game:
        """The game of a row after what the model said. Raises what the game raises, ConfigError for missing data."""
        o = self.options
        with _own_randomness(int(task["seed"])):
            try:
                env = ta.make(f"{o.game}{RAW}" if f"{o.game}{RAW}" in ENV_REGISTRY else o.game, **o.args)
                env.reset(num_players=o.number, seed=int(task["seed"]))
            except LookupError as exc:
                if "nltk" not in str(exc).lower():
                    raise
                raise ConfigError(
                    f"the game {o.game} needs data of nltk", cause=str(exc).strip().splitlines()[1].strip("* \n"),
                    fix="python -m nltk.downloader words averaged_perceptron_tagger_eng, before the run", code="textarena-data",
                ) from exc  # fmt: skip
            game = Game(env, o.player, self._opponent, int(task["seed"]))
            for text in said:
                game.take(visible(text)[-o.max_action :])
        return game


class Game:
    """A game of textarena from one player's seat. `told`: what it was told, before each of its turns."""

    def __init__(self, env: Any, player: int, opponent: Callable[[str, random.Random], str] | None, seed: int) -> None:
        self._env, self._player, self._opponent = env, player, opponent
        self._rng = random.Random(f"opponent of {seed}")
        self.over = False
        self.told: list[str] = []
        self.rewards: Mapping[int, float] = {}
        self.info: Mapping[str, Any] = {}
        self._others()

    def take(self, action: str) -> None:
        """The player's move, and those of the others until it is to move again; nothing when the game is over."""
        if not self.over:
            self._step(action)
            self._others()

    def _others(self) -> None:
        while not self.over:
            number, seen = self._env.get_observation()
            if number == self._player:
                self.told.append(self._text(seen, number) or "Your move.")
                return
            assert self._opponent is not None
            self._step(str(self._opponent(self._text(seen, number), self._rng)))

    def _step(self, action: str) -> None:
        self.over, _ = self._env.step(action)
        if self.over:
            rewards, info = self._env.close()
            self.rewards, self.info = rewards or {}, (info or {}).get(self._player, {})

    def _text(self, seen: Any, player: int) -> str:
        """Observations as text, without the player's own moves."""
        if isinstance(seen, str):
            return seen.strip()
        lines = [(sender, str(text).strip()) for sender, text, _ in seen if sender != player]
        return "\n".join(text if sender == ta.GAME_ID else f"[Player {sender}] {text}" for sender, text in lines if text)


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """The global generators begin at `seed`, and are afterwards what they were before; nothing is downloaded meanwhile."""
    before, arrays, download = random.getstate(), np.random.get_state(), nltk.download
    random.seed(seed)
    np.random.seed(seed % 2**32)
    nltk.download = lambda *_, **__: True
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(arrays)
        nltk.download = download
