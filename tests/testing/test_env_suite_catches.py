"""Each law of environments fails for the environment that breaks it, and says what to do."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from posttrain.data.environment import Environment, EpisodeState, Split
from posttrain.testing import EnvContract
from posttrain.types import Reward


class Good(Environment):
    """Sums."""

    def dataset(self, split: Split) -> Any:
        numbers = range(20) if split == "train" else range(20, 30)
        return [{"id": str(n), "a": n, "answer": str(n + 3)} for n in numbers]

    def format_prompt(self, task: Mapping[str, Any]) -> Any:
        return f"{task['a']}+3="

    def compute_reward(self, state: EpisodeState) -> Any:
        return float(state.completion.strip() == state.task["answer"])


class GoodAsync(Good):
    """Sums, judged by somebody who takes a moment."""

    async def compute_reward(self, state: EpisodeState) -> Any:
        await asyncio.sleep(0.001)
        return float(state.completion.strip() == state.task["answer"])


class Sums(EnvContract):
    __test__ = False

    def gold(self, row: Mapping[str, Any]) -> str | None:
        return str(row["answer"])


class TestGood(Sums):
    __test__ = True
    plugin = Good


class TestGoodAsync(Sums):
    __test__ = True
    plugin = GoodAsync


class Turns(Good):
    """Sums, with as many tries as are needed."""

    max_turns = 4

    def env_response(self, state: EpisodeState) -> Any:
        state.custom["tries"] = state.custom.get("tries", 0) + 1
        if state.completion.strip() == state.task["answer"]:
            return None
        return [{"role": "user", "content": f"{state.custom['tries']} wrong"}]


class TestTurns(Sums):
    __test__ = True
    plugin = Turns


class ReadsIt(Turns):
    def env_response(self, state: EpisodeState) -> Any:
        int(state.completion)
        return super().env_response(state)


class Says(Turns):
    def env_response(self, state: EpisodeState) -> Any:
        return [{"role": "assistant", "content": "me too"}]


class Moody(Turns):
    def env_response(self, state: EpisodeState) -> Any:
        return [{"role": "user", "content": str(random.random())}]


class LastSpoken(Turns):
    """Answers with what was said before, by whomever."""

    said = ""

    def format_prompt(self, task: Mapping[str, Any]) -> Any:
        return f"{task['a']}+3="

    def env_response(self, state: EpisodeState) -> Any:
        before, type(self).said = type(self).said, f"{state.task['a']} {state.completion}"
        return [{"role": "user", "content": before if state.turn > 1 else "go on"}]


class Rewrites(Turns):
    def env_response(self, state: EpisodeState) -> Any:
        state.messages[0]["content"] = "?"
        return super().env_response(state)


class KeepsCount(Turns):
    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.count = 0

    def env_response(self, state: EpisodeState) -> Any:
        self.count += 1
        return super().env_response(state)


class KeepsALock(Turns):
    def env_response(self, state: EpisodeState) -> Any:
        state.custom["lock"] = threading.Lock()
        return super().env_response(state)


class SameIds(Good):
    def dataset(self, split: Split) -> Any:
        return [{**row, "id": "row"} for row in super().dataset(split)]


class Unseeded(Good):
    def dataset(self, split: Split) -> Any:
        return [{**row, "a": random.SystemRandom().random()} for row in super().dataset(split)]


class SetOrder(Good):
    def dataset(self, split: Split) -> Any:
        return [{"id": word, "a": 1, "answer": word} for word in {f"{split}{n}" for n in range(50)}]


class Objects(Good):
    def dataset(self, split: Split) -> Any:
        return [{**row, "answer": {1, 2}} for row in super().dataset(split)]


class Overlap(Good):
    def dataset(self, split: Split) -> Any:
        return super().dataset("train")


class Restless(Good):
    calls = itertools.count()

    def format_prompt(self, task: Mapping[str, Any]) -> Any:
        return f"{next(Restless.calls)}"


class Writes(Good):
    def compute_reward(self, state: EpisodeState) -> Any:
        state.task["asked"] = True  # type: ignore[index]
        return 0.0


class TakesItForANumber(Good):
    def compute_reward(self, state: EpisodeState) -> Any:
        return float(int(state.completion) == int(state.task["answer"]))


class Random(Good):
    def compute_reward(self, state: EpisodeState) -> Any:
        return random.SystemRandom().random()


class Remembers(GoodAsync):
    """Keeps the episode on the object while it waits."""

    async def compute_reward(self, state: EpisodeState) -> Any:
        self.answer = state.task["answer"]
        await asyncio.sleep(0.01)
        return float(state.completion == self.answer)


class Counts(Good):
    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.scored = 0

    def compute_reward(self, state: EpisodeState) -> Any:
        self.scored += 1
        return super().compute_reward(state)


class Locked(Good):
    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.lock = threading.Lock()


class Generous(Good):
    def compute_reward(self, state: EpisodeState) -> Any:
        return 0.0


class Format(Good):
    def compute_reward(self, state: EpisodeState) -> Any:
        return float(state.completion.strip().isdigit())


class Anywhere(Good):
    def compute_reward(self, state: EpisodeState) -> Any:
        return float(state.task["answer"] in state.completion.split())


class Stubborn(Good):
    """Takes a deadline, or a cancellation, for a wrong answer."""

    async def compute_reward(self, state: EpisodeState) -> Any:
        try:
            await asyncio.sleep(30)
        except BaseException:
            return 0.0


class Blocks(Good):
    async def compute_reward(self, state: EpisodeState) -> Any:
        time.sleep(1.3)
        return 0.0


class LeavesTasks(Good):
    async def compute_reward(self, state: EpisodeState) -> Any:
        self._task = asyncio.ensure_future(asyncio.sleep(60))
        await asyncio.sleep(30)
        return 0.0


class Forgets(Counts):
    """A curriculum that a checkpoint does not hold."""

    def compute_reward(self, state: EpisodeState) -> Any:
        self.scored += 1
        return float(self.scored)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Level(Good):
    """A curriculum, rightly: it decides what is asked, and is counted where the run keeps the object."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.right = 0

    def format_prompt(self, task: Mapping[str, Any]) -> Any:
        return f"{task['a']}+3=" if self.right < 3 else f"sum of {task['a']} and 3:"

    async def finish_reward(self, state: EpisodeState, reward: Reward) -> Any:
        self.right += int(reward.total == 1)
        return reward

    def state_dict(self) -> dict[str, Any]:
        return {"right": self.right}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.right = state["right"]


class HalfOfIt(Level):
    """Its state lacks what an episode changed besides."""

    async def finish_reward(self, state: EpisodeState, reward: Reward) -> Any:
        self.last = state.completion
        return await super().finish_reward(state, reward)


class OnACopy(Level):
    def compute_reward(self, state: EpisodeState) -> Any:
        self.right += 1
        return super().compute_reward(state)


class LastOne(Level):
    """The level follows the episode that happens to end last."""

    async def finish_reward(self, state: EpisodeState, reward: Reward) -> Any:
        self.right = len(state.completion)
        return reward


class TestLevel(Sums):
    __test__ = True
    plugin = Level


class Future(Good):
    api = 2


class SlowSums(Sums):
    def slow(self, row: Mapping[str, Any]) -> str:
        return "7"


class Shades(Good):
    """Gives a half for a number, and says that it does not."""

    provides = ("binary_rewards",)

    def compute_reward(self, state: EpisodeState) -> Any:
        return 0.5 if state.completion.strip() == "7" else 0.0


BROKEN: dict[str, tuple[type[Environment], str]] = {
    "test_both_splits_hold_rows_with_ids_of_their_own": (SameIds, r"rows share an id: \['row'\]"),
    "test_the_same_options_give_the_same_rows": (Unseeded, r"differs from call to call: draw from random.Random\(seed\)"),
    "test_another_process_gets_the_same_rows": (SetOrder, r"differs in another process: sort a set"),
    "test_rows_are_plain_data": (Objects, r"row '0' is not plain data \(.*set.*\): rows hold text"),
    "test_the_splits_share_no_prompt": (Overlap, r"train and test both ask '\d+\+3='"),
    "test_prompts_are_messages_text_or_ids_and_do_not_change": (Restless, r"differs from call to call for the same row"),
    "test_a_row_is_not_written_into": (Writes, r"writes into the row: use state.custom"),
    "test_any_completion_has_a_reward_as_a_run_computes_it": (TakesItForANumber, r"on nothing \(''\): raised: .*give 0\.0"),
    "test_the_same_episode_is_worth_the_same": (Random, r"draw from random.Random\(state.seed\)"),
    "test_many_at_once_are_worth_what_they_are_one_by_one": (Remembers, r"alone and .* among others: .* state.custom"),
    "test_an_episode_leaves_nothing_behind": (Counts, r"changed the environment itself \(scored\).*state.custom"),
    "test_it_travels_to_other_processes": (Locked, r"cannot be sent to another process: .*__getstate__"),
    "test_the_right_answer_passes": (Generous, r"gold\(row\) '3' of row '0' is worth 0.0"),
    "test_spoilt_answers_fail": (Format, r"\(another number\) passes for row '0', as the right answer '3' does"),
    "test_listing_answers_does_not_pass": (Anywhere, r"in either order .* learns to list answers"),
    "test_a_slow_reward_is_unscorable_in_its_time": (Stubborn, r"late is worth 0.0 .* let CancelledError"),
    "test_a_coroutine_lets_the_others_run": (Blocks, r"compute_reward is a coroutine and blocks the event loop for 1\.\d s"),
    "test_a_cancelled_coroutine_leaves_nothing": (Stubborn, r"compute_reward, cancelled: it went on and gave a result"),
    "test_state_survives_a_crash": (Forgets, r"goes on differently after a crash: state_dict\(\) must hold"),
    "test_what_it_says_it_provides_is_so": (Shades, r"'7' is worth 0.5, and it provides binary_rewards"),
    "test_state_changes_where_the_run_keeps_it": (OnACopy, r"runs on copies in other processes: change it in finish_reward"),
    "test_state_is_the_same_in_any_order": (LastOne, r"depends on the order in which episodes end"),
    "test_turns_are_answered_by_messages_until_none": (ReadsIt, r"nothing \(''\) in every turn: ValueError.*say anything"),
    "test_the_same_replies_get_the_same_answers": (Moody, r"goes differently the second time: draw from random.Random"),
    "test_episodes_side_by_side_are_answered_as_alone": (LastSpoken, r"goes differently beside others: .* state.custom"),
    "test_an_answer_changes_the_episode_s_own_things_alone": (Rewrites, r"changes earlier messages: return new ones"),
    "test_what_an_episode_keeps_travels": (KeepsALock, r"state.custom cannot be sent to another process: .*async def"),
    "test_it_names_a_contract_version": (Future, r"api = 2: this contract is version 1"),
}


@pytest.mark.parametrize("law", BROKEN)
def test_the_law_catches_it(law: str, told: Callable[..., str]) -> None:
    broken, message = BROKEN[law]
    suite = SlowSums() if "slow" in law else Sums()
    assert re.search(message, told(suite, law, broken()), flags=re.DOTALL)


def test_there_is_a_broken_one_for_every_law(laws: Callable[[type], set[str]]) -> None:
    assert laws(EnvContract) == set(BROKEN)


def test_what_an_episode_changes_beside_its_state_is_caught_too(told: Callable[..., str]) -> None:
    assert "changed the environment itself (last)" in told(Sums(), "test_an_episode_leaves_nothing_behind", HalfOfIt())


@pytest.mark.parametrize(
    ("law", "broken", "message"),
    [
        ("test_turns_are_answered_by_messages_until_none", Says, "is answered with .*assistant.*a role of user, tool, system"),
        ("test_an_answer_changes_the_episode_s_own_things_alone", KeepsCount, r"changes the environment itself \(count\)"),
    ],
)
def test_other_faults_of_answers_are_caught_too(law: str, broken: type, message: str, told: Callable[..., str]) -> None:
    assert re.search(message, told(Sums(), law, broken()), flags=re.DOTALL)


def test_tasks_that_are_left_running_are_caught_too(told: Callable[..., str]) -> None:
    assert "left 1 task(s) running" in told(Sums(), "test_a_cancelled_coroutine_leaves_nothing", LeavesTasks())


def test_an_unscorable_reward_that_says_so_is_no_fault() -> None:
    class Unsure(Good):
        def compute_reward(self, state: EpisodeState) -> Any:
            return Reward(None, info={"cause": "unclear"})

    Sums().test_any_completion_has_a_reward_as_a_run_computes_it(Unsure())


def test_without_an_environment_it_says_how_to_give_one() -> None:
    with pytest.raises(NotImplementedError, match=r"the class variable `plugin`, or a fixture `env`"):
        EnvContract.env.__wrapped__(EnvContract())  # type: ignore[attr-defined]
