"""The laws of environments of several turns; a part of `EnvContract`, skipped where nothing answers the model.

    def replies(self, row):
        return ["50", "75", row["answer"]]        # what the model says in one episode, to exercise the answers
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from posttrain.data.environment import Environment, EpisodeState, Split, as_messages
from posttrain.testing.answers import HOSTILE
from posttrain.testing.laws import changed, kept
from posttrain.testing.playing import Played, aplay, play
from posttrain.types import Message

ROLES = ("user", "tool", "system")


class TurnLaws:
    """What every `env_response` does. The suite gives `some` and `gold`."""

    def replies(self, row: Mapping[str, Any]) -> Sequence[str | Message]:
        """What the model says in one episode, turn by turn. Default: what answers nothing, then what is right."""
        gold = self.gold(row)  # type: ignore[attr-defined]
        return ["something that answers nothing", "7", *([] if gold is None else [gold])]

    def test_turns_are_answered_by_messages_until_none(self, env: Environment) -> None:
        """Whatever the model says, in every turn; a run counts what is raised as unscorable."""
        row = self._of_several_turns(env)[0]
        for name, text in HOSTILE.items():
            try:
                state, _ = play(env, row, [text] * env.max_turns)
            except Exception as exc:
                pytest.fail(f"{name} ({text[:30]!r}) in every turn: {type(exc).__name__}: {exc}. A model can say anything")
            said: Message = {"role": "assistant", "content": text}
            for message in state.messages[len(as_messages(env.format_prompt(row))) :]:
                told = message["role"] in ROLES and isinstance(message["content"], str) and message["content"] != ""
                good = told or message == said
                assert good, f"{name} is answered with {message!r:.80}: a role of {', '.join(ROLES)} and some text"

    def test_the_same_replies_get_the_same_answers(self, env: Environment) -> None:
        for row in self._of_several_turns(env):
            first, second = (play(env, row, self.replies(row), seed=3) for _ in range(2))
            assert _told(first) == _told(second), (
                f"the episode of row {row.get('id')!r} goes differently the second time: draw from random.Random(state.seed), "
                "and keep nothing of an episode on self"
            )

    def test_episodes_side_by_side_are_answered_as_alone(self, env: Environment) -> None:
        """Turn by turn in turns: a run has hundreds of episodes open at once."""
        rows = self._of_several_turns(env)
        rows = [*rows, *rows]  # also two of the same row

        async def together() -> list[Played]:
            await env.start()
            try:
                runs = (aplay(env, row, self.replies(row), seed=i, start=False) for i, row in enumerate(rows))
                return list(await asyncio.gather(*runs))
            finally:
                await env.close()

        for i, (row, among) in enumerate(zip(rows, asyncio.run(together()), strict=True)):
            alone = play(env, row, self.replies(row), seed=i)
            assert _told(alone) == _told(among), (
                f"the episode of row {row.get('id')!r} goes differently beside others: what belongs to an episode is in "
                "state.custom, the environment is shared"
            )

    def test_an_answer_changes_the_episode_s_own_things_alone(self, env: Environment) -> None:
        """It returns messages and may write into `state.custom`; the row, the conversation and the environment stay."""
        row = self._of_several_turns(env)[0]
        play(env, row, self.replies(row))  # what is loaded at the first use is loaded now
        before, task = kept(env), copy.deepcopy(dict(row))
        seen: list[list[Message]] = []

        def say(state: EpisodeState) -> str | Message | None:
            now = copy.deepcopy(state.messages)
            assert now[: len(seen[-1])] == seen[-1] if seen else True, "env_response changes earlier messages: return new ones"
            seen.append(now)
            replies = self.replies(row)
            return replies[state.turn] if state.turn < len(replies) else None

        state, _ = play(env, row, say)  # type: ignore[arg-type]
        assert dict(row) == task, "env_response writes into the row: use state.custom"
        if seen:
            assert state.messages[: len(seen[-1])] == seen[-1], "env_response changes earlier messages: return new ones"
        names = changed(before, kept(env))
        assert not names, f"env_response changes the environment itself ({', '.join(names)}): keep it in state.custom"

    def test_what_an_episode_keeps_travels(self, env: Environment) -> None:
        """A plain `env_response` or `compute_reward` runs in other processes, with a copy of `state.custom`."""
        import pickle

        row = self._of_several_turns(env)[0]
        if all(inspect.iscoroutinefunction(getattr(env, name)) for name in ("env_response", "compute_reward")):
            pytest.skip("everything of it runs on the event loop")
        state, _ = play(env, row, self.replies(row))
        try:
            pickle.dumps(state.custom)
        except Exception as exc:
            pytest.fail(
                f"state.custom cannot be sent to another process: {type(exc).__name__}: {exc}. Keep plain values there, or write "
                "`async def env_response` and `async def compute_reward`, which run on the event loop"
            )

    def _of_several_turns(self, env: Environment) -> list[Mapping[str, Any]]:
        """The rows to play; skips for an environment of single turns."""
        if type(env).env_response is Environment.env_response:
            pytest.skip("a single turn")
        splits: tuple[Split, ...] = ("train", "test")
        return [row for split in splits for row in self.some(env, split)[:2]]  # type: ignore[attr-defined]


def _told(played: Played) -> tuple[Any, ...]:
    return played.state.messages, played.reward.total, dict(played.reward.parts)
