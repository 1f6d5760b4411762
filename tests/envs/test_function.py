"""The environment `function`: a reward of one's own over data of one's own, and everything that can be wrong with either."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain import plugins
from posttrain.config.load import load_config
from posttrain.data.environment import ChatOrText, Environment, EpisodeState, episode
from posttrain.data.packer import engine_input, init_data_packer
from posttrain.data.reward_range import Range
from posttrain.errors import ConfigError, DataError, PosttrainError
from posttrain.rollout.scoring import Scorer, score
from posttrain.testing.env_contract import EnvContract
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Reward
from posttrain_envs.function import Function
from posttrain_envs.reward_functions import canonical, load_functions

REWARDS = '''
import asyncio, os, time
from posttrain import Reward

def score(completion, row):
    return float(completion.strip() == row["answer"])

def evaluate(completion):
    """Whatever the test wants."""
    return eval(completion, {"Reward": Reward, "time": time, "os": os})

async def late(completion):
    """The same, on the event loop."""
    value = evaluate(completion)
    return await value if asyncio.iscoroutine(value) else value

def pid(completion): return os.getpid()
async def own_pid(completion): return os.getpid()
'''
ROWS = [{"question": f"{a}+{b}", "solution": str(a + b), "uid": f"sum-{a}-{b}"} for a in range(5) for b in range(5)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A newcomer's folder, which is the current one."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def made(**options: Any) -> Function:
    given = {"reward": "my_rewards.py:score", "data": "my.jsonl", "prompt_column": "question", "answer_column": "solution"}
    env: Function = plugins.load("envs", "function", **given | options)
    return env


def rewards_of(env: Environment, completions: list[str], *, timeout_s: float = 20.0) -> list[Reward]:
    """The rewards of completions to the first row, as a run computes them."""
    row = env.dataset("train")[0]

    async def main() -> list[Reward]:
        scorer = Scorer({"e": env}, timeout_s=timeout_s)
        try:
            await scorer.start()
            return await asyncio.gather(*(scorer.score("e", episode(env, row, text)) for text in completions))
        finally:
            await scorer.close()

    return asyncio.run(main())


class TestFunctionContract(EnvContract):
    @pytest.fixture
    def env(self, folder: Path) -> Environment:
        return made(test_size=5)

    def gold(self, row: Mapping[str, Any]) -> str:
        return str(row["answer"])


# --- what a function may return, sync and async -----------------------------------------------------------------------


@pytest.mark.parametrize("function", ["evaluate", "late"])
def test_a_number_a_reward_or_none_and_faults_are_unscorable(folder: Path, function: str) -> None:
    texts = ["0.5", "True", "3", "None", "Reward(0.25, {'near': 1.0})", "Reward(None)", "1/0", "float('nan')", "'text'", "[1]"]
    rewards = rewards_of(made(reward=f"my_rewards.py:{function}"), texts)
    causes = ["none", "unscorable", "raised", "not_finite", "wrong_type", "wrong_type"]
    assert [r.total for r in rewards] == [0.5, 1.0, 3.0, None, 0.25, None, None, None, None, None]
    assert [r.info["cause"] for r in rewards if r.total is None] == causes
    assert rewards[4].parts == {"near": 1.0} and "ZeroDivisionError" in rewards[6].info["error"]


def test_a_late_reward_ends_and_the_next_is_scored(folder: Path) -> None:
    late = rewards_of(made(reward="my_rewards.py:evaluate"), ["time.sleep(600)", "1"], timeout_s=2.0)
    assert [r.info.get("cause") for r in late] == ["timeout", None] and late[1].total == 1.0
    waits = "__import__('asyncio').sleep(600)"
    assert [r.info.get("cause") for r in rewards_of(made(reward="my_rewards.py:late"), [waits, "1"], timeout_s=0.5)] == [
        "timeout", None,
    ]  # fmt: skip


def test_numpy_numbers_and_lambdas(folder: Path) -> None:
    unit = np.float32(0.5)
    assert score(made(reward=lambda completion: unit * len(completion)), ROWS[0], "abc").total == 1.5
    assert score(made(reward=len), ROWS[0], "abc").total == 3.0
    assert score(made(reward=lambda c, r: np.array(c == r["question"])), ROWS[0], "0+0").total == 1.0


# --- several of them --------------------------------------------------------------------------------------------------


def test_a_list_is_a_weighted_sum_and_every_value_is_a_part(folder: Path) -> None:
    several = [
        {"name": "right", "reward": "my_rewards.py:score"},
        {"name": "given", "reward": "my_rewards.py:evaluate", "weight": 0.5},
        {"name": "watched", "reward": lambda completion: None if completion == "0" else 7.0, "weight": 0},
    ]
    rewards = rewards_of(made(reward=several), ["0", "4", "None", "Reward(2, {'near': 1}, {'why': 'close'})"])
    assert [r.total for r in rewards] == [1.0, 2.0, None, 1.0]
    assert rewards[0].parts == {"right": 1.0, "given": 0.0}  # the watched one may be missing
    assert rewards[1].parts == {"right": 0.0, "given": 4.0, "watched": 7.0}
    assert rewards[2].info == {"cause": "none", "error": "reward 'given': the reward is None"} and rewards[2].parts == {}
    assert rewards[3].parts == {"right": 0.0, "given": 2.0, "given/near": 1.0, "watched": 7.0}
    assert rewards[3].info == {"given": {"why": "close"}}


def test_an_entry_may_say_how_its_value_is_shown(folder: Path) -> None:
    several = [
        {"name": "right", "reward": "my_rewards.py:score", "min": 0, "max": 1},
        {"name": "words", "reward": "my_rewards.py:evaluate", "weight": -0.1, "better": "lower"},
    ]
    env = made(reward=several)
    assert env.metrics == {"right": Range(0, 1, weight=1.0), "words": Range(better="lower", weight=-0.1)}
    assert env.options.reward[0] | {"reward": ""} == {"name": "right", "reward": "", "weight": 1.0, "min": 0, "max": 1}
    assert made().metrics == {} and pickle.loads(pickle.dumps(env)).options == env.options
    for wrong in ({"min": 2, "max": 1}, {"better": "up"}, {"max": "much"}, {"least": 0}):
        with pytest.raises(ConfigError):
            made(reward=[{"reward": "my_rewards.py:score", **wrong}])


def test_plain_functions_run_in_processes_and_coroutines_here_in_one_list(folder: Path) -> None:
    mixed = {"pool": "my_rewards.py:pid", "loop": ["my_rewards.py:own_pid", 0.5]}
    (reward,) = rewards_of(made(reward=mixed), ["x"])
    assert reward.parts["loop"] == os.getpid() != reward.parts["pool"]
    assert reward.total == reward.parts["pool"] + 0.5 * os.getpid()


def test_coroutines_of_a_list_wait_together_and_one_none_makes_it_unscorable(folder: Path) -> None:
    meeting = threading.Barrier(2, timeout=10)

    async def one(completion: str) -> float | None:
        await asyncio.to_thread(meeting.wait)  # passes only when both are waiting
        return None if completion == "no" else 1.0

    async def other(completion: str) -> float:
        await asyncio.to_thread(meeting.wait)
        return 2.0

    (reward,) = rewards_of(made(reward=[one, other]), ["yes"])
    assert (reward.total, reward.parts) == (3.0, {"one": 1.0, "other": 2.0})
    (lost,) = rewards_of(made(reward=[one, other]), ["no"])
    assert lost.total is None and lost.info["error"] == "reward 'one': the reward is None"


def test_no_coroutine_is_asked_about_what_a_plain_function_could_not_score(folder: Path) -> None:
    asked: list[str] = []

    async def judge(completion: str) -> float:
        asked.append(completion)
        return 1.0

    rewards = rewards_of(made(reward={"given": "my_rewards.py:evaluate", "judge": judge}), ["1", "None", "2"])
    assert [r.total for r in rewards] == [2.0, None, 3.0] and sorted(asked) == ["1", "2"]


REF = "/f.py:a"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (REF, REF),
        ([REF], [("a", REF, 1.0)]),
        ([[REF, 0.5], "/f.py:b"], [("a", REF, 0.5), ("b", "/f.py:b", 1.0)]),
        ({"x": REF, "y": [REF, 2]}, [("x", REF, 1.0), ("y", REF, 2.0)]),
        ({"x": {"reward": REF, "weight": 0.2}}, [("x", REF, 0.2)]),
        ({"name": "x", "reward": REF, "weight": 0.2}, [("x", REF, 0.2)]),
        ([{"reward": REF}], [("a", REF, 1.0)]),
        ([("x", REF), ("y", (REF, 3))], [("x", REF, 1.0), ("y", REF, 3.0)]),
        (len, "builtins:len"),
    ],
)
def test_the_short_forms_are_written_out(given: Any, kept: Any) -> None:
    expected = kept if isinstance(kept, str) else [dict(zip(("name", "reward", "weight"), one, strict=True)) for one in kept]
    assert canonical(given) == expected and canonical(expected) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "reward is missing"),
        ([], "reward is empty"),
        (3, "reward is a int"),
        ([3], "3 is no reward function"),
        ([{"name": "x"}], "no key reward"),
        ([{"reward": REF, "wieght": 1}], "unknown key 'wieght'"),
        ([{"reward": REF, "weight": "much"}], "weight='much'"),
        ([{"reward": REF, "weight": float("nan")}], "weight=nan"),
        ([[REF, float("inf")]], "weight=inf"),
        ([[REF, 10**400]], "is no finite number"),
        ([REF, REF], "two reward functions are named 'a'"),
        ([[REF, 0]], "weight 0"),
    ],
)
def test_other_forms_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        canonical(given)
    assert words in str(caught.value) and caught.value.fix


# --- what a function is called with -----------------------------------------------------------------------------------


class Judge:
    def __call__(self, completion: str, row: Mapping[str, Any]) -> str:
        return f"{completion}|{row['answer']}"

    def method(self, completion: str) -> str:
        return completion


async def waiting(completion: str) -> str:
    return completion


def with_default(completion: str, strict: bool = True) -> str:
    return f"{completion}|{strict}"


def turned(row: Mapping[str, Any], completion: str) -> str:
    return f"{completion}|{row['answer']}"


def by_keyword(completion: str, *, state: EpisodeState, row: Mapping[str, Any] | None = None) -> str:
    return f"{completion}|{(row or {})['answer']}|{state.seed}"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda c: c, "hi"),
        (lambda text, example: f"{text}|{example['answer']}", "hi|42"),
        (lambda *given: f"{len(given)}|{given[1]['answer']}", "2|42"),
        (lambda completion, **rest: f"{completion}|{rest}", "hi|{}"),
        (lambda state: f"{state.completion}|{state.seed}", "hi|7"),
        (lambda c, state: f"{c}|{state.seed}", "hi|7"),
        (lambda c, r, state: f"{c}|{r['answer']}|{state.seed}", "hi|42|7"),
        (with_default, "hi|True"),
        (turned, "hi|42"),
        (by_keyword, "hi|42|7"),
        (Judge(), "hi|42"),
        (Judge().method, "hi"),
        (functools.partial(with_default, strict=False), "hi|False"),
        (str.upper, "HI"),
    ],
)
def test_a_function_is_called_with_what_it_asks_for(function: Any, expected: str) -> None:
    (loaded,) = load_functions(canonical(function))
    assert loaded(EpisodeState({"answer": "42"}, "?", completion="hi", seed=7)) == expected and not loaded.waits


def test_coroutine_functions_are_known_in_every_dress() -> None:
    class Later:
        async def __call__(self, completion: str) -> float:
            return 1.0

    for function in (waiting, functools.partial(waiting), Later()):
        assert load_functions(canonical(function))[0].waits


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 1, "it takes no argument"),
        (lambda a, b, c: 1, "nothing is given for its parameter 'c'"),
        (lambda completion, *, strict: 1, "nothing is given for its parameter 'strict'"),
        (lambda completions, **kwargs: [1], "asks for a batch"),
        (lambda prompts, completions: [1], "asks for a batch"),
    ],
)
def test_a_function_that_asks_for_something_else_is_refused(function: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_functions(canonical(function))
    assert words in str(caught.value) and "def score(completion, row)" in caught.value.fix


def test_a_second_parameter_named_like_a_column_is_a_trap_that_is_told(folder: Path) -> None:
    env = made(reward=lambda completion, solution: 1.0)
    with pytest.raises(ConfigError, match="its parameter 'solution' gets the whole row, not its column"):
        env.dataset("train")


# --- where it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("my_reward.py:score", "did you mean {here}/my_rewards.py:score?"),
        ("my_rewards.py:scor", "did you mean {here}/my_rewards.py:score?"),
        ("my_rewards.py", "name it: {here}/my_rewards.py:score"),
        ("my_rewards:score", "reward=my_rewards.py:score"),
        ("score", "reward=my_file.py:score"),
        ("nowhere.at.all:score", "there is no module 'nowhere'"),
        ("broken.py:score", "{here}/broken.py:2 is not valid Python"),
        ("raises.py:score", "cannot be imported: ValueError: no"),
        ("lacks.py:score", "needs 'not_installed_anywhere', which is missing"),
        ("my_rewards.py:os.sep", "is a str, not a function"),
    ],
)
def test_a_function_that_is_not_there_is_told_with_the_fix(folder: Path, ref: str, words: str) -> None:
    (folder / "broken.py").write_text("def score(completion, row):\n    return (\n")
    (folder / "raises.py").write_text("raise ValueError('no')\n")
    (folder / "lacks.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ConfigError) as caught:
        made(reward=ref)
    assert words.format(here=folder) in str(caught.value)


def test_a_config_tells_it_before_anything_starts(folder: Path) -> None:
    options = "{reward: my_rewards.py:scor, data: my.jsonl, prompt_column: question}"
    with pytest.raises(ConfigError) as caught:
        load_config(["model.name_or_path=m", "rl.steps=1", f"environments=[{{name: function, options: {options}}}]"])
    assert caught.value.where == "environments[0].options (command line)" and "did you mean" in caught.value.fix


def test_the_resolved_config_means_the_same_in_another_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = "prompt_column: question, answer_column: solution"
    options = f"{{reward: [{{name: fmt, reward: my_rewards.py:score}}], data: my.jsonl, {columns}}}"
    loaded = load_config(["model.name_or_path=m", "rl.steps=1", f"environments=[{{name: function, options: {options}}}]"])
    kept = loaded.config.environments[0].options
    assert kept["data"] == str(folder / "my.jsonl") and kept["reward"][0]["reward"] == f"{folder}/my_rewards.py:score"
    (folder / "saved.yaml").write_text(loaded.yaml())
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    again = load_config([], config_file=folder / "saved.yaml")
    assert again.config == loaded.config
    env = plugins.build("envs", "function", again.config.environments[0].options)
    assert rewards_of(env, [env.dataset("train")[0]["answer"]])[0].total == 1.0


def test_a_file_may_import_its_neighbours_and_is_read_again_when_it_was_edited(folder: Path) -> None:
    (folder / "my_helper_of_rewards.py").write_text("def half(n): return n / 2\n")
    (folder / "uses.py").write_text("from my_helper_of_rewards import half\ndef score(text): return half(len(text))\n")
    assert score(made(reward="uses.py:score"), ROWS[0], "four").total == 2.0
    (folder / "uses.py").write_text("def score(completion): return 9.0\n")
    assert score(made(reward="uses.py:score"), ROWS[0], "four").total == 9.0


def test_what_cannot_reach_the_reward_processes_is_told_at_the_start(folder: Path) -> None:
    lock = threading.Lock()

    def guarded(completion: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match="cannot be sent to the processes that score") as caught:
        made(reward=guarded)
    assert "reward=my_rewards.py:score" in caught.value.fix

    async def here(completion: str) -> float:
        with lock:
            return 1.0

    assert rewards_of(made(reward=here), ["x"])[0].total == 1.0


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_every_column_is_in_the_row_and_named_ones_have_their_name(folder: Path) -> None:
    env = made(id_column="uid", test_size=0)
    row = env.dataset("train")[0]
    assert row == {**ROWS[0], "id": "sum-0-0", "answer": "0"}
    assert len(env.dataset("train")) == 25 and len(env.dataset("test")) == 0
    nested = [{"question": "?", "reward_model": {"truth": "yes"}}]
    assert made(data=nested, answer_column="reward_model.truth").dataset("train")[0]["answer"] == "yes"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [{"role": "user", "content": "0+0"}]),
        ({"style": "chat", "system": "S"}, [{"role": "system", "content": "S"}, {"role": "user", "content": "0+0"}]),
        ({"style": "text"}, "0+0"),
        ({"style": "text", "system": "S"}, "S\n\n0+0"),
        ({"style": "text", "prompt": "Q: {question} ({uid}) {{x}}\nA:"}, "Q: 0+0 (sum-0-0) {x}\nA:"),
    ],
)
def test_prompts(folder: Path, options: dict[str, Any], expected: Any) -> None:
    assert made(**options).format_prompt({**ROWS[0], "id": "1"}) == expected


def test_chat_messages_and_ids_of_a_column_are_asked_as_they_are(folder: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    env = made(data=[{"question": turns}], answer_column=None)
    assert env.format_prompt({"question": turns}) == turns
    assert env.format_prompt({"question": [5, 6]}) == [5, 6]
    asked = made(data=[{"question": turns}], answer_column=None, system="S").format_prompt({"question": turns})
    assert asked == [{"role": "system", "content": "S"}, *turns]
    with pytest.raises(DataError, match="holds chat messages, and style is text"):
        made(data=[{"question": turns}], answer_column=None, style="text").dataset("train")


def test_auto_is_chat_where_the_model_has_a_template_and_text_elsewhere(folder: Path) -> None:
    write_tiny_model(folder / "model")
    packer = init_data_packer(str(folder / "model"), chat_template="{% for m in messages %}{{ m['content'] }}9{% endfor %}")
    prompt = made(data=[{"question": "abc"}], answer_column=None).format_prompt({"question": "abc"})
    assert isinstance(prompt, ChatOrText)
    text = lambda: packer.decode(engine_input(packer, prompt)["prompt_ids"]).replace(" ", "")  # noqa: E731
    assert text() == "abc9"
    packer.tokenizer.chat_template = None
    assert text() == "abc"
    with pytest.raises(PosttrainError, match="has no chat template"):
        engine_input(packer, list(prompt))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_column": "questoin"}, "set prompt_column to one of them"),
        ({"answer_column": "answer"}, "set answer_column to one of them"),
        ({"prompt": "{questoin}"}, "questoin"),
        ({"prompt": "the same"}, "names no column"),
        ({"prompt": "{question"}, "write {{ and }} for braces that stay"),
        ({"prompt": "{question[0]}"}, "names no column in {question[0]}"),
        ({"data": None}, "data is missing"),
        ({"data": [{"question": None}], "answer_column": None}, "is empty"),
        ({"data": [{"question": " "}], "answer_column": None}, "is empty"),
        ({"data": [{"question": {"a": 1}}], "answer_column": None}, "holds a dict"),
        ({"data": "my.json"}, "my.jsonl"),
        ({"data": [{"question": None}], "answer_column": None, "prompt": "{question}"}, "column 'question' of row '1' is null"),
        ({"style": "prose"}, "style"),
        ({"promt": "x"}, "did you mean prompt?"),
    ],
)
def test_what_cannot_be_asked_is_told_with_the_fix(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PosttrainError) as caught:
        made(**options).dataset("train")
    assert words in str(caught.value)
