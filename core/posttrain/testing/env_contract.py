"""The laws of an environment as tests: subclass, name the plug-in or give one fixture.

    class TestMine(EnvContract):
        plugin = MyEnvironment                    # a name, `file.py:Class` or the class
        options = {"size": 100}

        def gold(self, row):
            return row["answer"]                  # the laws about right and wrong answers

        def replies(self, row):
            return ["50", row["answer"]]          # what the model says turn by turn, where there are several

or, for full control, a fixture `env` that returns the object. Rewards that are plain functions run in real reward processes.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from posttrain.data.environment import Environment, EpisodeState, RowDataset, Split, episode, is_messages
from posttrain.plugins.capabilities import declared
from posttrain.rollout.rewards import as_reward
from posttrain.rollout.scoring import Scorer
from posttrain.testing.answers import HOSTILE, contradictions, spoilt
from posttrain.testing.coroutines import cancelled, longest_pause
from posttrain.testing.elsewhere import rows_elsewhere
from posttrain.testing.laws import by_value, changed, has_state, kept, state_of, survives_a_crash, travelled
from posttrain.testing.slow import SlowAsyncEnvironment, SlowEnvironment
from posttrain.testing.turn_laws import TurnLaws
from posttrain.types import Reward

SPLITS: tuple[Split, ...] = ("train", "test")
PLAIN = ("", "7", "something that answers nothing")
FAULTS = ("raised", "timeout", "died", "none", "not_finite", "wrong_type")


class EnvContract(TurnLaws):
    """What every environment does; looks at up to `rows` rows of a split."""

    plugin: ClassVar[Any] = None
    options: ClassVar[Mapping[str, Any]] = {}
    rows = 16
    passing = 1.0
    """The least total reward of a right answer."""
    deadline_s = 30.0
    """Within which any reward must be there, as `rollout.reward_timeout_s`."""
    blocking_s = 1.0
    """For how long a coroutine may keep the event loop from doing anything else."""

    @pytest.fixture
    def env(self) -> Environment:
        if self.plugin is None:
            raise NotImplementedError("give the contract an environment: the class variable `plugin`, or a fixture `env`")
        from posttrain.plugins import load

        return load("envs", self.plugin, **self.options)  # type: ignore[no-any-return]

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """A completion that is right; None where none is known, and the laws about right and wrong answers are skipped."""
        return None

    def wrong(self, row: Mapping[str, Any]) -> Iterable[str]:
        """Completions that are wrong, beside those that `mutations` makes of the right one."""
        return ()

    def mutations(self, gold: str) -> Mapping[str, str]:
        """Wrong answers made of a right one, by what was done to it. Override where one of them may be right."""
        return spoilt(gold)

    def slow(self, row: Mapping[str, Any]) -> str | None:
        """A completion whose reward takes longer than a run waits; None: the contract makes rewards slow."""
        return None

    def some(self, env: Environment, split: Split) -> list[Mapping[str, Any]]:
        data = env.dataset(split)
        return [data[i] for i in range(min(len(data), self.rows))]

    def episodes(self, env: Environment) -> list[EpisodeState]:
        """Episodes to score: a few rows, each answered in every plain way, and rightly where that is known."""
        rows = self.some(env, "train")[:4]
        answers = [(row, text) for row in rows for text in [*PLAIN, self.gold(row)] if text is not None]
        return [episode(env, row, text, seed=seed) for seed, (row, text) in enumerate(answers)]

    # --- rows and prompts ---------------------------------------------------------------------------------------------

    def test_both_splits_hold_rows_with_ids_of_their_own(self, env: Environment) -> None:
        for split in SPLITS:
            data = env.dataset(split)
            assert isinstance(data, RowDataset) and len(data) > 0, f"dataset({split!r}) needs a length, and rows by index"
            rows = self.some(env, split)
            assert all(isinstance(row, Mapping) for row in rows), "a row is a mapping, as {'id': …, 'question': …}"
            ids = [str(row["id"]) for row in rows if "id" in row]
            assert len(ids) in (0, len(rows)), f"{len(rows) - len(ids)} of {len(rows)} rows have no id: all have one, or none"
            assert len(set(ids)) == len(ids), f"rows share an id: {sorted({i for i in ids if ids.count(i) > 1})[:3]}"

    def test_the_same_options_give_the_same_rows(self, env: Environment) -> None:
        again = type(env)(env.options)
        for split in SPLITS:
            rows = self.some(env, split)
            assert rows == self.some(env, split), f"dataset({split!r}) differs from call to call: draw from random.Random(seed)"
            assert rows == self.some(again, split), f"dataset({split!r}) differs from object to object of the same options"

    def test_another_process_gets_the_same_rows(self, env: Environment) -> None:
        """With another hash seed, as every process has: the order of a set, or hash(text), is not the same there."""
        by_value(env)
        found = rows_elsewhere(env, SPLITS, self.rows)
        for split in SPLITS:
            rows = [dict(row) for row in self.some(env, split)]
            assert found[split] == rows, f"dataset({split!r}) differs in another process: sort a set, use no hash()"

    def test_rows_are_plain_data(self, env: Environment) -> None:
        for row in (row for split in SPLITS for row in self.some(env, split)):
            try:
                json.dumps(dict(row))
            except (TypeError, ValueError) as exc:
                pytest.fail(f"row {row.get('id')!r} is not plain data ({exc}): rows hold text, numbers, lists and dicts")

    def test_the_splits_share_no_prompt(self, env: Environment) -> None:
        asked = {split: {repr(env.task_key(row)) for row in self.some(env, split)} for split in SPLITS}
        both = asked["train"] & asked["test"]
        assert not both, (
            f"train and test both ask {next(iter(both))[:200]}: held-out rewards would not be held out "
            "(where prompts do not tell rows apart, as in a game, override `task_key`)"
        )

    def test_prompts_are_messages_text_or_ids_and_do_not_change(self, env: Environment) -> None:
        for row in self.some(env, "train"):
            prompt = env.format_prompt(row)
            kinds = is_messages(prompt) or isinstance(prompt, str) or all(isinstance(i, int) for i in prompt)
            assert kinds and prompt, f"format_prompt gave {prompt!r:.80}: messages, a text or token ids, and not empty"
            assert env.format_prompt(row) == prompt, "format_prompt differs from call to call for the same row"

    def test_a_row_is_not_written_into(self, env: Environment) -> None:
        """It is shared by the episodes of its group."""
        for row in self.some(env, "train")[:4]:
            before = copy.deepcopy(dict(row))
            self.reward(env, episode(env, row, "7"))
            assert dict(row) == before, "format_prompt or compute_reward writes into the row: use state.custom"

    # --- rewards ------------------------------------------------------------------------------------------------------

    def test_any_completion_has_a_reward_as_a_run_computes_it(self, env: Environment) -> None:
        """Empty, not ASCII, 100,000 characters long, with NUL, with half a character: a model can write anything."""
        row = self.some(env, "test")[0]
        rewards = self.at_once(env, [episode(env, row, text) for text in HOSTILE.values()])
        for (name, text), reward in zip(HOSTILE.items(), rewards, strict=True):
            cause = "" if reward.total is not None else str(reward.info.get("cause"))
            assert cause not in FAULTS, (
                f"compute_reward on {name} ({text[:30]!r}): {cause}: {reward.info.get('error')}. "
                "A model can write anything: give 0.0, or Reward(None) where the answer cannot be judged"
            )

    def test_the_same_episode_is_worth_the_same(self, env: Environment) -> None:
        states = self.episodes(env)
        for one, two in zip(states, copy.deepcopy(states), strict=True):
            first, second = self.reward(env, one), self.reward(env, two)
            assert _worth(first) == _worth(second), (
                f"{one.completion!r:.40} is worth {first.total}, then {second.total}: draw from random.Random(state.seed), "
                "and keep nothing of an episode on self"
            )

    def test_many_at_once_are_worth_what_they_are_one_by_one(self, env: Environment) -> None:
        states = self.episodes(env)
        again = copy.deepcopy(states)

        async def one_by_one(scorer: Scorer) -> list[Reward]:
            return [await scorer.score("env", state) for state in states]

        alone, together = self.scored(env, one_by_one), self.at_once(env, again[::-1])[::-1]
        for state, first, second in zip(states, alone, together, strict=True):
            assert _worth(first) == _worth(second), (
                f"{state.completion!r:.40} is worth {first.total} alone and {second.total} among others: "
                "the environment is shared by all episodes, what belongs to one is in state.custom"
            )

    def test_an_episode_leaves_nothing_behind(self, env: Environment) -> None:
        """The object keeps nothing of the episodes that it scored, but for what its state holds."""
        states = self.episodes(env)
        for state in states:  # what is loaded at the first use is loaded now
            self.reward(env, state)
        before = kept(env)
        saved = state_of(env) if has_state(env) else None
        for state in self.episodes(env)[::-1]:
            state.custom["posttrain.testing"] = 1
            self.reward(env, state)
        if saved is not None:
            env.load_state_dict(saved)  # type: ignore[attr-defined]
        names = changed(before, kept(env))
        assert not names, (
            f"scoring changed the environment itself ({', '.join(names)}): it is shared by all episodes, and by copies in other "
            "processes. Keep what belongs to an episode in state.custom, what the run needs in state_dict(), and leave a cache "
            "out in __getstate__"
        )

    def test_it_travels_to_other_processes(self, env: Environment) -> None:
        self.some(env, "train")
        there = travelled(env)
        assert self.some(there, "train") == self.some(env, "train"), "the copy in another process has other rows"
        for here, away in zip(self.episodes(env), self.episodes(there), strict=True):
            assert here.prompt == away.prompt, "the copy in another process asks differently"
            same = _worth(self.reward(env, here)) == _worth(self.reward(there, away))
            assert same, "the copy in another process scores differently"

    # --- right and wrong ----------------------------------------------------------------------------------------------

    def test_the_right_answer_passes(self, env: Environment) -> None:
        for row, gold in self._golds(env):
            reward = self.reward(env, episode(env, row, gold))
            assert reward.total is not None and reward.total >= self.passing, (
                f"gold(row) {gold!r:.60} of row {row.get('id')!r} is worth {reward.total}, less than `passing` = {self.passing}"
            )

    def test_spoilt_answers_fail(self, env: Environment) -> None:
        for row, gold in self._golds(env):
            bad = dict(self.mutations(gold)) | {f"wrong(row) {i}": text for i, text in enumerate(self.wrong(row), 1)}
            for name, text in bad.items():
                reward = self.reward(env, episode(env, row, text))
                assert reward.total is None or reward.total < self.passing, (
                    f"{text!r:.60} ({name}) passes for row {row.get('id')!r}, as the right answer {gold!r:.60} does. "
                    "Make the check stricter, or override mutations(gold) if that answer is right"
                )

    def test_listing_answers_does_not_pass(self, env: Environment) -> None:
        """A right answer beside a wrong one, in either order: one of the two must fail."""
        for row, gold in self._golds(env):
            texts = contradictions(gold, self.wrong(row))
            if texts and all((self.reward(env, episode(env, row, text)).total or 0.0) >= self.passing for text in texts):
                pytest.fail(
                    f"{texts[0]!r:.80} passes in either order for row {row.get('id')!r}: a model learns to list answers. "
                    "Judge one of them (the last), not whether the right one is anywhere"
                )

    # --- time ---------------------------------------------------------------------------------------------------------

    def test_a_slow_reward_is_unscorable_in_its_time(self, env: Environment) -> None:
        row = self.some(env, "train")[0]
        text = self.slow(row)
        slow: Environment = env
        if text is None:
            slow = (SlowAsyncEnvironment if inspect.iscoroutinefunction(env.compute_reward) else SlowEnvironment)(env)
        (reward,) = self.at_once(slow, [episode(env, row, text or "7")], deadline_s=1.0)
        assert reward.total is None and reward.info.get("cause") == "timeout", (
            f"a reward that is late is worth {reward.total} ({reward.info.get('cause')}), not unscorable: "
            "compute_reward must let CancelledError and TimeoutError through"
        )

    def test_a_coroutine_lets_the_others_run(self, env: Environment) -> None:
        for name, call in self._coroutines(env):
            longest = asyncio.run(longest_pause(call))
            assert longest < self.blocking_s, (
                f"{name} is a coroutine and blocks the event loop for {longest:.1f} s: await what waits, "
                "or make it a plain function, which runs in a process of its own"
            )

    def test_a_cancelled_coroutine_leaves_nothing(self, env: Environment) -> None:
        for name, call in self._coroutines(env):
            for turns in (1, 2, 3, 5, 10):
                problem = asyncio.run(cancelled(call, turns))
                assert not problem, f"{name}, cancelled: {problem}"

    # --- the rest -----------------------------------------------------------------------------------------------------

    def test_state_survives_a_crash(self, env: Environment) -> None:
        self._needs_state(env)
        survives_a_crash(env, self._asked_and_worth)

    def test_state_changes_where_the_run_keeps_it(self, env: Environment) -> None:
        """A plain `compute_reward` works on copies in other processes, so what it changes is lost."""
        self._needs_state(env)
        if inspect.iscoroutinefunction(env.compute_reward):
            pytest.skip("its compute_reward runs on the event loop")
        made = travelled(env)
        before = state_of(made)
        for state in self.episodes(made):
            made.compute_reward(state)
        assert state_of(made) == before, (
            "compute_reward changes the state, and as a plain function it runs on copies in other processes: "
            "change it in finish_reward, or make compute_reward a coroutine"
        )

    def test_state_is_the_same_in_any_order(self, env: Environment) -> None:
        """Episodes of a batch step end in any order."""
        self._needs_state(env)
        one, two = travelled(env), travelled(env)
        states = self.episodes(env)
        for made, order in ((one, states), (two, copy.deepcopy(states)[::-1])):
            for state in order:
                self.reward(made, state)
        assert state_of(one) == state_of(two), (
            "the state depends on the order in which episodes end, which differs from run to run: "
            "count in whole numbers, and keep no last one"
        )

    def test_what_it_says_it_provides_is_so(self, env: Environment) -> None:
        if "binary_rewards" not in declared("envs", env).provides:
            pytest.skip("provides no binary_rewards")
        for state in self.episodes(env):
            total = self.reward(env, state).total
            assert total in (None, 0.0, 1.0), (
                f"{state.completion!r:.40} is worth {total}, and it provides binary_rewards, that every reward is 0 or 1. "
                'Leave it out of `provides`, or set self.lacks = ("binary_rewards",) where options decide'
            )

    def test_it_names_a_contract_version(self, env: Environment) -> None:
        assert type(env).api == 1, f"api = {type(env).api}: this contract is version 1"
        assert (type(env).__doc__ or "").strip(), "give the class a docstring: its first line is what `plugins list` says"

    # --- how ----------------------------------------------------------------------------------------------------------

    def _needs_state(self, env: Environment) -> None:
        if not has_state(env):
            pytest.skip("has no state_dict")

    def _asked_and_worth(self, env: Environment) -> list[str]:
        """What the episodes of some rows are asked and worth, one after the other."""
        return [f"{state.prompt!r} {_worth(self.reward(env, state))!r}" for state in self.episodes(env)]

    def reward(self, env: Environment, state: EpisodeState) -> Reward:
        """The reward of an episode in this process. Whatever it raises is raised."""

        async def work() -> Reward:
            value: Any = env.compute_reward(state)
            reward = as_reward(await value if inspect.isawaitable(value) else value)
            if type(env).finish_reward is not Environment.finish_reward and reward.total is not None:
                reward = as_reward(await env.finish_reward(state, reward))
            return reward

        return asyncio.run(work())

    def scored(self, env: Environment, work: Callable[[Scorer], Awaitable[Any]], *, deadline_s: float | None = None) -> Any:
        """What `work` does with the scorer of a run: processes, deadlines."""

        by_value(env)

        async def whole() -> Any:
            scorer = Scorer({"env": env}, timeout_s=deadline_s or self.deadline_s, workers=1)
            try:
                await scorer.start()
                return await work(scorer)
            finally:
                await scorer.close()

        return asyncio.run(whole())

    def at_once(self, env: Environment, states: Sequence[EpisodeState], *, deadline_s: float | None = None) -> list[Reward]:
        async def work(scorer: Scorer) -> list[Reward]:
            return list(await asyncio.gather(*(scorer.score("env", state) for state in states)))

        return self.scored(env, work, deadline_s=deadline_s)  # type: ignore[no-any-return]

    def _golds(self, env: Environment) -> list[tuple[Mapping[str, Any], str]]:
        found = [(row, gold) for split in SPLITS for row in self.some(env, split) if (gold := self.gold(row)) is not None]
        if not found:
            pytest.skip("no gold(row)")
        return found

    def _coroutines(self, env: Environment) -> list[tuple[str, Callable[[], Any]]]:
        def state() -> EpisodeState:
            row = self.some(env, "train")[0]
            return episode(env, row, self.gold(row) or "7")

        calls: dict[str, Callable[[], Any]] = {
            "compute_reward": lambda: env.compute_reward(state()),
            "env_response": lambda: env.env_response(state()),
            "finish_reward": lambda: env.finish_reward(state(), Reward(0.0)),
        }
        own = [name for name in calls if getattr(type(env), name) is not getattr(Environment, name)]
        found = [(name, calls[name]) for name in own if inspect.iscoroutinefunction(getattr(env, name))]
        if not found:
            pytest.skip("nothing of it runs on the event loop")
        return found


def _worth(reward: Reward) -> tuple[float | None, dict[str, float]]:
    return reward.total, dict(reward.parts)
