"""Countdown: its parser is exact and safe, its answers are found where they are, its made problems can be solved."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import time
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import plugins, score
from posttrain.data.environment import Environment, episode
from posttrain.errors import ConfigError, DataError
from posttrain.testing import EnvContract
from posttrain_envs.countdown import Countdown
from posttrain_envs.expression import LONGEST, read
from posttrain_envs.tags import last_answer, visible, well_formed

ENV = Countdown()


class TestCountdownContract(EnvContract):
    @pytest.fixture
    def env(self) -> Environment:
        return Countdown(Countdown.Options(size=60, test_size=20, numbers=(2,)))

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """By trying: one of the four operations does it."""
        a, b = row["nums"]
        found = [text for x, y in ((a, b), (b, a)) for text in (f"{x}+{y}", f"{x}-{y}", f"{x}*{y}", f"{x}/{y}")
                 if eval(text) == row["target"]]
        return f"<answer>{found[0]}</answer>"


class TestCountdownFromAFile(EnvContract):
    @pytest.fixture
    def env(self, tmp_path: Path) -> Environment:
        rows = [{"target": 10 + i, "nums": [i, 4, 6]} for i in range(1, 41)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return Countdown(Countdown.Options(data=str(tmp_path / "rows.jsonl"), test_size=10))


def reward(nums: list[int], target: int, completion: str, **options: Any) -> Any:
    env = Countdown(Countdown.Options(**options)) if options else ENV
    return env.compute_reward(episode(env, {"nums": nums, "target": target}, completion))


CASE_GAME_1 = (
    ([9, 9, 9], 1, "9**9**9", 0.0),
    ([1], 1, "__import__('os').getpid()", 0.0),
    ([3], 3, "(3).__class__", 0.0),
    ([8, 4, 4], 24, "8/(4-4)", 0.0),
    ([3, 8], 24, "８*3", 0.0),
    ([2, 4, 8], 24, "((8-2)*4", 0.0),
    ([2, 4, 8], 24, "24", 0.0),
    ([2, 4, 8], 24, "(8-2)*4", 1.0),
    ([2, 4, 8], 24, "(" * 10_000, 0.0),
)
HOSTILE = (
    ([9, 9, 9], 1, "9//9*9", 0.0),
    ([2, 3], 8, "2**3", 0.0),
    ([99, 99, 99], 1, "99**99**99", 0.0),
    ([2, 4, 8], 24, "(" * 10_000 + "(8-2)*4" + ")" * 10_000, 0.0),
    ([2, 4, 8], 24, "-" * 100_000 + "(8-2)*4", 0.0),
    ([2, 4, 8], 24, "9" * 200_000, 0.0),
    ([2, 4, 8], 24, "<answer>" * 20_000, 0.0),
    ([2, 4, 8], 24, "</answer><think>" * 20_000, 0.0),
    ([2, 4, 8], 24, "(8-2)*4\n" + "1+1\n" * 20_000, 0.0),
    ([2, 4, 8], 24, " " * 200_000, 0.0),
    ([2, 4, 8], 24, "(8-2)*4\x00", 0.0),
    ([2, 4, 8], 24, "(8-2)*4.0", 0.0),
    ([2, 4, 8], 24, "(8-2)4", 0.0),
    ([2, 4, 8], 24, "(8-2)*4)", 0.0),
    ([2, 4, 8], 24, "()(8-2)*4", 0.0),
    ([2, 4, 8], 24, "(8-2)*٤", 0.0),
    ([2, 4, 8], 24, "1 / (8/8 - 1)", 0.0),
    ([2, 4, 8], 0, "0 * (8/(4-4))", 0.0),
)


@pytest.mark.parametrize(("nums", "target", "answer", "expected"), CASE_GAME_1 + HOSTILE)
@pytest.mark.parametrize("tagged", [False, True])
def test_case_game_1_model_text_is_never_evaluated(
    nums: list[int], target: int, answer: str, expected: float, tagged: bool
) -> None:
    completion = f"<answer>{answer}</answer>" if tagged else answer
    began = time.process_time()
    assert reward(nums, target, completion).total == expected
    assert time.process_time() - began < 0.1


def test_exact_fractions_not_floats() -> None:
    assert reward([3, 3, 8, 8], 24, "8/(3-8/3)").total == 1.0
    assert reward([1, 3, 3, 1], 1, "1/3*3*1").total == 1.0
    assert reward([1, 49], 1, "49*(1/49)").total == 0.0, "49 twice"
    assert reward([1, 49, 49], 1, "49*(1/49)").total == 1.0


@pytest.mark.parametrize(
    ("completion", "correct", "form"),
    [
        ("<think>4*8</think>\n<answer>(8-2)*4</answer>", 1, 1),
        ("opened by the prompt</think> <answer>(8-2)*4</answer>", 1, 1),
        ("<answer>8+2+4</answer> no: <answer>(8 - 2) * 4</answer>", 1, 1),
        ("<answer>(8-2)*4</answer> or <answer>8+2+4</answer>", 0, 1),
        ("<answer>(8-2)*4 = 24</answer>", 1, 1),
        ("<answer>(8-2)*4 = 25</answer>", 0, 1),
        ("<answer>(8-2)*4 = 20+4</answer>", 0, 0),
        ("<answer>(8−2)×4</answer>", 1, 1),
        ("<answer>\n  (8-2)·4\n</answer>", 1, 1),
        ("<answer>The answer is (8-2)*4</answer>", 0, 0),
        ("<answer></answer>", 0, 0),
        ("I found it:\n\n(8-2)*4\n\nThat is right.", 1, 0),
        ("(8-2)*4 = 24", 1, 0),
        ("`(8-2)*4`\n24", 1, 0),
        ("$(8-2)*4$", 1, 0),
        ("**(8-2)*4**", 1, 0),
        ("(8-2)*4\n8+2+4", 0, 0),
        ("8-(-4)*2*2", 0, 0),
        ("-(2-8)*4", 1, 0),
        ("<think>(8-2)*4", 0, 0),
        ("<think><answer>(8-2)*4</answer></think> none", 0, 0),
        ("<think>x</answer><answer>(8-2)*4</answer>", 0, 0),
        ("<answer>(8-2)*4", 0, 0),
    ],
)
def test_where_the_answer_is(completion: str, correct: int, form: int) -> None:
    got = reward([2, 4, 8], 24, completion)
    assert got.parts == {"correct": correct, "format": form} and got.total == correct
    assert reward([2, 4, 8], 24, completion, format_weight=0.25).total == 0.75 * correct + 0.25 * form


def test_case_ans_7_tags_must_match() -> None:
    assert not well_formed("<think>x</answer><answer>12</answer>")
    for text in ("", "x</think> y", "<think>a <answer></think><answer>b</answer>", "x</think><think>y</think>"):
        assert well_formed(text), text
    for text in ("<think>a", "</think>a</think>", "<answer>a<answer>", "<answer><think></answer>", "<answer>", "</answer>"):
        assert not well_formed(text), text
    assert visible("a</think>b<think>c") == "b" and visible("a") == "a" and visible("<think>a") == ""
    assert last_answer("<answer>1</answer><answer> 2 </answer>") == "2" and last_answer("1</answer>") is None


Tree = Any


def trees() -> st.SearchStrategy[Tree]:
    """Expression trees: a number, ("neg", tree) or (operator, tree, tree)."""
    return st.recursive(
        st.integers(0, 999),
        lambda t: st.one_of(st.tuples(st.just("neg"), t), st.tuples(st.sampled_from("+-*/"), t, t)),
        max_leaves=12,
    )


def computed(tree: Tree) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    if tree[0] == "neg":
        return -computed(tree[1])
    left, right = computed(tree[1]), computed(tree[2])
    return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[tree[0]](right)


def leaves(tree: Tree) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    else:
        for branch in tree[1:]:
            yield from leaves(branch)


def printed(tree: Tree, rng: random.Random, binds: int = 0) -> str:
    """The tree as text: brackets where they are needed and some where they are not, spaces anywhere."""
    pad = lambda: " " * rng.choice((0, 0, 0, 1, 2))  # noqa: E731
    if isinstance(tree, int):
        text, own = str(tree), 9
    elif tree[0] == "neg":
        text, own = f"-{pad()}{printed(tree[1], rng, 3)}", 3
    else:
        own = 1 if tree[0] in "+-" else 2
        text = f"{printed(tree[1], rng, own)}{pad()}{tree[0]}{pad()}{printed(tree[2], rng, own + 1)}"
    return f"({pad()}{text}{pad()})" if own < binds or rng.random() < 0.15 else text


@settings(max_examples=300, derandomize=True, deadline=None)
@given(trees(), st.integers(0, 2**32))
def test_the_parser_computes_what_the_text_says(tree: Tree, seed: int) -> None:
    text = printed(tree, random.Random(seed))
    got = read(text)
    if len(text) > LONGEST:
        assert got is None
        return
    assert got is not None and list(got.numbers) == list(leaves(tree))
    try:
        assert got.value == computed(tree)
    except ZeroDivisionError:
        assert got.value is None


@settings(max_examples=500, derandomize=True, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet="0123456789+-*/() =.×÷\n<>answerthink"), st.text(alphabet="12+-*/()", max_size=12)))
def test_any_text_has_a_reward(text: str) -> None:
    for completion in (text, f"<answer>{text}</answer>"):
        assert reward([2, 4, 8], 24, completion).total in (0.0, 1.0)
    got = read(text)
    if got is not None and got.value is not None and "×" not in text and "÷" not in text:
        assert got.value == eval(_as_fractions(text))


def _as_fractions(text: str) -> str:
    import re

    return re.sub(r"[0-9]+", lambda m: f"Fraction({int(m.group())})", " ".join(text.split()))


def solve(nums: list[int], target: int) -> str | None:
    """Some expression, by trying all."""
    def combine(items: list[tuple[Fraction, str]]) -> str | None:
        if len(items) == 1:
            return items[0][1] if items[0][0] == target else None
        for (i, (a, x)), (j, (b, y)) in itertools.permutations(enumerate(items), 2):
            rest = [item for k, item in enumerate(items) if k not in (i, j)]
            for value, text in ((a + b, f"({x}+{y})"), (a - b, f"({x}-{y})"), (a * b, f"({x}*{y})"), (b and a / b, f"({x}/{y})")):
                if text.endswith(f"/{y})") and b == 0:
                    continue
                if found := combine([*rest, (Fraction(value), text)]):
                    return found
        return None

    return combine([(Fraction(n), str(n)) for n in nums])


MADE: tuple[dict[str, Any], ...] = (
    {"seed": 1},
    {"seed": 2, "operations": ["+", "-"]},
    {"numbers": [2], "largest": 9, "test_size": 4},
    {"numbers": [4], "largest": 12},
)


@pytest.mark.parametrize("options", MADE)
def test_made_problems_can_be_solved_and_a_changed_number_is_noticed(options: dict[str, Any]) -> None:
    env = plugins.load("envs", "countdown", size=20, **{"test_size": 5, **options})
    rows = [*env.dataset("train"), *env.dataset("test")]
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        answer = solve(row["nums"], row["target"])
        assert answer is not None, row
        assert reward(row["nums"], row["target"], f"<answer>{answer}</answer>").total == 1.0
        other = [*row["nums"][:-1], row["nums"][-1] + 1]
        assert reward(other, row["target"], answer).total == 0.0, "a number that is not given"
        assert reward([*row["nums"], 1], row["target"], answer).total == 0.0, "a number left over"
        assert reward(row["nums"], row["target"], f"{answer}+0").total == 0.0, "a number too many"


def test_the_test_split_does_not_depend_on_the_size_and_is_not_trained_on() -> None:
    small, large = (Countdown(Countdown.Options(size=size, test_size=30)) for size in (10, 200))
    assert small.dataset("test") == large.dataset("test") and len(large.dataset("train")) == 200
    assert not {r["id"] for r in large.dataset("train")} & {r["id"] for r in large.dataset("test")}
    assert large.dataset("train")[:10] == small.dataset("train")
    assert len(Countdown(Countdown.Options(size=200, test_size=0.1)).dataset("test")) == 20
    with pytest.raises(DataError, match="different problem") as caught:
        Countdown(Countdown.Options(numbers=(2,), largest=3)).dataset("train")
    assert "test_size" in caught.value.fix


def test_prompts() -> None:
    row = {"nums": [3, 8], "target": 24}
    made = Countdown(Countdown.Options(prompt="{nums} → {target}", system="Short."))
    assert made.format_prompt(row) == [{"role": "system", "content": "Short."}, {"role": "user", "content": "3, 8 → 24"}]
    assert Countdown(Countdown.Options(prompt="{nums} → {target}", style="text")).format_prompt(row) == "3, 8 → 24"
    assert "3, 8" in ENV.format_prompt(row)[0]["content"] and "24" in ENV.format_prompt(row)[0]["content"]


@pytest.mark.parametrize(
    "options",
    [{"operations": ["**"]}, {"operations": []}, {"numbers": []}, {"numbers": [9]}, {"size": 0}, {"format_weight": 1.5},
     {"prompt": "{nums}"}, {"largest": 0}],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plugins.load("envs", "countdown", **options)


BAD_ROWS = ({"nums": "3 8", "target": 24}, {"nums": [], "target": 24}, {"nums": [3.5], "target": 24}, {"nums": [3]})


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_bad_row_is_told(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="countdown row"):
        ENV.format_prompt(row)


def test_score_works_and_the_environment_travels() -> None:
    row = {"nums": [2, 4, 8], "target": 24}
    assert score(ENV, row, "<answer>(8-2)*4</answer>").total == 1.0
    assert score("countdown", row, "<answer>8*4-2</answer>").total == 0.0
    assert pickle.loads(pickle.dumps(ENV)).dataset("test")[:3] == ENV.dataset("test")[:3]


@pytest.mark.parametrize(("options", "words"), [
    ({"take": 3, "columns": {"nums": "n"}}, "columns, take would do nothing"),
    ({"test_data": "rows.jsonl"}, "test_data would do nothing"),
    ({"streaming": True, "split_seed": 1}, "streaming, split_seed would do nothing"),
    ({"data": [], "size": 5, "largest": 9, "numbers": (2,)}, "numbers, largest, size would do nothing"),
])
def test_options_that_would_do_nothing_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Countdown.Options(**options)
    assert Countdown.Options(data=[], take=3, operations=["+", "-", "*", "/"]) and Countdown.Options(size=5, test_size=2)


@pytest.mark.parametrize("row", [{"nums": [float("inf"), 2], "target": 3}, {"nums": [1, 2], "target": float("-inf")}])
def test_infinite_numbers_are_no_countdown_row(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="whole number"):
        ENV.format_prompt(row)
