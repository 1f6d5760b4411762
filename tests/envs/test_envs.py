"""The built-in environments."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import plugins
from posttrain.data.environment import episode
from posttrain.errors import ConfigError, PosttrainError
from posttrain_envs.arithmetic import Arithmetic


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    st.sets(st.sampled_from("+-*"), min_size=1), st.integers(1, 3), st.integers(1, 400), st.integers(1, 50), st.integers(0, 9)
)
def test_arithmetic_splits_share_no_problem_and_answers_are_right(
    operations: set[str], digits: int, size: int, test_size: int, seed: int
) -> None:
    options = {"operations": tuple(sorted(operations)), "digits": digits, "size": size, "test_size": test_size, "seed": seed}
    env = Arithmetic(Arithmetic.Options(**options))
    train, test = list(env.dataset("train")), list(env.dataset("test"))
    assert not {r["id"] for r in train} & {r["id"] for r in test} and len({r["id"] for r in train}) == len(train) <= size
    for row in (train + test)[:20]:
        assert str(eval(row["problem"])) == row["answer"]
        assert env.compute_reward(episode(env, row, f" {row['answer']}\n")).total == 1.0
        assert env.compute_reward(episode(env, row, row["answer"] + "0")).total == 0.0
    assert list(Arithmetic(env.options).dataset("train")) == train


def test_arithmetic_largest_bounds_the_operands() -> None:
    env = Arithmetic(Arithmetic.Options(largest=4))
    rows = [*env.dataset("train"), *env.dataset("test")]
    assert {int(n) for r in rows for n in r["problem"].split("+")} == {0, 1, 2, 3, 4} and len(rows) == 25


def test_arithmetic_parts_and_styles() -> None:
    env = Arithmetic(Arithmetic.Options(digits=1, style="chat"))
    row = env.dataset("train")[0]
    assert env.format_prompt(row) == [{"role": "user", "content": f"{row['problem']}="}]
    assert Arithmetic().format_prompt(row) == f"{row['problem']}="
    assert env.compute_reward(episode(env, row, "none")).parts == {"format": 0.0}
    assert env.compute_reward(episode(env, row, "-99")).parts == {"format": 1.0}


BAD_OPTIONS = ({"operations": ["/"]}, {"operations": []}, {"digits": 0}, {"size": 0}, {"largest": 0}, {"sizes": 3})


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_arithmetic_refuses_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        plugins.load("envs", "arithmetic", **options)


@pytest.fixture(scope="module")
def gym() -> object:
    pytest.importorskip("reasoning_gym")
    return plugins.load("envs", "reasoning_gym", task="basic_arithmetic", config={"max_terms": 3, "max_digits": 2}, size=60,
                        test_size=20)


def test_reasoning_gym_rows_are_stable_disjoint_and_scored_by_the_task(gym) -> None:
    train, test = list(gym.dataset("train")), list(gym.dataset("test"))
    assert len(train) == 60 and len(test) == 20
    assert not {r["question"] for r in train} & {r["question"] for r in test}
    assert len({r["id"] for r in train + test}) == 80
    again = pickle.loads(pickle.dumps(gym))
    assert list(again.dataset("train")) == train
    row = test[0]
    right = again.compute_reward(episode(again, row, f"so <answer>{row['answer']}</answer>"))
    assert right.total == 1.0 and right.parts == {"answered": 1.0}
    assert again.compute_reward(episode(again, row, f"so {row['answer']}")).parts == {"answered": 0.0}
    assert again.compute_reward(episode(again, row, "<answer>no number</answer>")).total < 0.2


def test_reasoning_gym_prompts(gym) -> None:
    row = gym.dataset("test")[0]
    made = type(gym)(type(gym).Options(task="basic_arithmetic", system="Short.", prompt="Q: {question}"))
    system, user = {"role": "system", "content": "Short."}, {"role": "user", "content": f"Q: {row['question']}"}
    assert made.format_prompt(row) == [system, user]
    text = type(gym)(type(gym).Options(task="basic_arithmetic", style="text", answer="last_line"))
    assert text.format_prompt(row) == row["question"]
    assert text.compute_reward(episode(text, row, f"thinking\n{row['answer']}\n\n")).total == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "basic_arithmetik"}, "did you mean basic_arithmetic"),
        ({"task": "basic_arithmetic", "config": {"max_term": 3}}, "max_terms"),
        ({"task": "basic_arithmetic", "config": {"min_terms": 9, "max_terms": 2}}, "refuses its settings"),
        ({"task": "basic_arithmetic", "prompt": "no place"}, "{question}"),
        ({}, "task"),
    ],
)
def test_reasoning_gym_refuses_with_the_fix(gym, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plugins.load("envs", "reasoning_gym", **options)
    assert words in str(caught.value)


def test_reasoning_gym_too_few_questions_is_said_instead_of_leaking(gym) -> None:
    class Constant:
        def __getitem__(self, index: int) -> dict[str, object]:
            return {"question": "1 + 1 =", "answer": "2", "metadata": {}}

    small = type(gym)(gym.options)
    small.__dict__["_task"] = Constant()
    with pytest.raises(PosttrainError, match="too few different questions"):
        list(small.dataset("train"))


def test_reasoning_gym_absent_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [n for n in sys.modules if n.split(".")[0] == "reasoning_gym" or n == "posttrain_envs.reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # type: ignore[arg-type]
    with pytest.raises(PosttrainError) as caught:
        plugins.load("envs", "reasoning_gym", task="basic_arithmetic")
    assert "reasoning" in str(caught.value) and "pip install" in str(caught.value)


def test_solved_examples_come_before_the_question_and_are_in_no_split():
    gym = {"task": "chain_sum", "size": 20, "test_size": 5}
    env = plugins.load("envs", "reasoning_gym", **gym, examples=2, system="Answer only.")
    train, test = env.dataset("train"), env.dataset("test")
    messages = env.format_prompt(test[0])
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert messages[-1]["content"] == test[0]["question"]
    shown = {messages[1]["content"], messages[3]["content"]}
    assert not shown & {row["question"] for row in [*train, *test]}
    text = plugins.load("envs", "reasoning_gym", **gym, examples=1, style="text").format_prompt(test[0])
    assert text.endswith(test[0]["question"]) and text.count("\n") >= 2
