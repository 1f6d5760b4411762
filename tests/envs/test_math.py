"""The math environment: where the answer is, what numbers and text decide, and what is written for each file format."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Mapping
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
from posttrain_envs.math_answer import LONGEST, find, gold
from posttrain_envs.math_compare import number, same
from posttrain_envs.math_env import Math
from posttrain_envs.math_rows import read

PLAIN = [{"question": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(60)]


def env(**options: Any) -> Math:
    return Math(Math.Options(**{"data": PLAIN, "algebra": False, **options}))


def reward(answer: str, completion: str, **options: Any) -> Any:
    made = env(**options)
    return made.compute_reward(episode(made, {"question": "?", "answer": answer}, completion))


class TestMathContract(EnvContract):
    @pytest.fixture
    def env(self, tmp_path: Path) -> Environment:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, PLAIN)))
        return env(data=str(tmp_path / "rows.jsonl"), test_size=10)

    def gold(self, row: Mapping[str, Any]) -> str:
        return f"So it is \\boxed{{{row['answer']}}}."


CASE_ANS_1 = (
    ("17", "so \\boxed{17}. Check… Final: \\boxed{17}", 1),
    ("7", "\\boxed{5}, no: \\boxed{7}", 1),
    ("5", "\\boxed{5}, no: \\boxed{7}", 0),
    ("17", "\\boxed{017}", 1),
    ("17", "\\boxed{}", 0),
)
CASE_ANS_7 = (
    ("12", "<think>maybe \\boxed{12}", 0),
    ("12", "<think>maybe \\boxed{9}</think> \\boxed{12}", 1),
    ("12", "<think>\\boxed{12}</think> I don’t know", 0),
    ("12", "x</think> \\boxed{12}", 1),
)


@pytest.mark.parametrize(("answer", "completion", "expected"), CASE_ANS_1 + CASE_ANS_7)
def test_cases_ans_1_and_7_the_last_box_after_the_thinking(answer: str, completion: str, expected: float) -> None:
    assert reward(answer, completion).total == expected


def test_case_ans_7_the_format_needs_matching_tags() -> None:
    assert reward("12", "<think>x</answer><answer>12</answer>").parts["format"] == 0
    assert reward("12", "<think>x</think><answer>12</answer>").parts == {"correct": 1, "format": 1, "gave_up": 0}
    assert reward("12", "\\boxed{12}", thinking=True).total == 0, "the template opened <think>, and it was never closed"
    assert reward("12", "so</think> \\boxed{12}", thinking=True).total == 1
    assert reward("12", "\\boxed{13}", format_weight=0.1).total == 0.1
    assert reward("12", "\\boxed{12}", format_weight=0.1).total == 1.0


CASE_ANS_3 = (
    *(("72", text, True) for text in ("72.0", "72.", "$72", "7.2e1", "72 apples")),
    *(("1800", text, True) for text in ("1,800", "1800.00")),
    ("-5", "-5", True), ("-5", "−5", True), ("-5", "5", False),
    ("0.5", "1/2", True), ("0.5", ".5", True),
    ("12", "1,2", False),
)


@pytest.mark.parametrize(("answer", "text", "expected"), CASE_ANS_3)
def test_case_ans_3_numbers_are_compared_as_numbers(answer: str, text: str, expected: bool) -> None:
    for completion in (f"\\boxed{{{text}}}", f"#### {text}", f"<answer>{text}</answer>", f"Answer: {text}"):
        assert reward(answer, completion).total == expected, completion


DECIDED = (
    ("18", "$18 per day", True), ("5", "\\$5", True), ("10000", "10,\\!000", True), ("10000", "10{,}000", True),
    ("\\frac{1}{2}", "0.5", True), ("\\frac{1}{2}", "\\dfrac12", True), ("-\\frac{1}{2}", "\\frac{-1}{2}", True),
    ("\\frac{1}{2}", "\\frac{1}{3}", False), ("0.333333", "1/3", True), ("0.33", "1/3", False), ("1000000", "1000001", False),
    ("1000000", "1000000.4", False), ("0.0000001", "0.0000002", False), ("50", "50\\%", True), ("50\\%", "0.5", True),
    ("50%", "50 percent", True), ("50%", "5%", False), ("90", "90^\\circ", True), ("90", "90^{\\circ}", True),
    ("( 1,2 )", "(1, 2)", True),
    ("10", "10\\text{ cm}^2", True), ("10", "\\text{10 cm}", True), ("72", "72 million", False), ("72 million", "72000000", True),
    ("5", "x = 5", True), ("5", "\\(5\\)", True), ("5", "**5**", True), ("5", "five", False), ("5", "I don't know", False),
    ("(1, 2)", "(1,2)", True), ("A", "(A)", True), ("A", "\\text{A}", True), ("A", "B", False), ("a", "b", False),
    ("\\text{Tuesday}", "tuesday.", True), ("Tuesday", "Friday", False), ("x^2 + 1", "x^2+1", True), ("12", "1e999", False),
    ("5", "+5", True), ("5", "--5", None), ("2", "2 pi", None), ("2", "2\\pi", None), ("5", "5x", None), ("5", "5 or 6", None),
    ("8", "0x8", None), ("4", "８/2", None), ("25", "5^2", None), ("x^2", "x \\cdot x", None), ("1", "1/0", None),
    ("3", "", False),
)


@pytest.mark.parametrize(("answer", "text", "expected"), DECIDED)
def test_what_numbers_and_text_decide(answer: str, text: str, expected: bool | None) -> None:
    assert same(answer, text) is expected


WAYS = ("{}", "${}$", "\\( {} \\)", "{}.", "x = {}", "{} apples")


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(1, 999), st.integers(-(10**6), 10**6), st.sampled_from(WAYS))
def test_however_a_number_is_written_it_is_that_number(whole: int, part: int, other: int, around: str) -> None:
    value = Fraction(whole * 1000 + part, 1000)
    sign, size = "-" if value < 0 else "", abs(value)
    thousandths = size.numerator * 1000 // size.denominator
    written = (
        f"{sign}{float(size):.3f}",
        f"{value.numerator}/{value.denominator}",
        f"{sign}{int(size):,}.{int(size % 1 * 1000):03d}",
        f"{sign}\\frac{{{size.numerator}}}{{{size.denominator}}}",
        f"{sign}{thousandths}e-3",
    )
    for text in written:
        found = number(text)
        assert found and found.value == value
        assert same(str(value), around.format(text)) is True, text
        assert same(str(value + other + 1), text) is (other == -1)


ODD = st.one_of(st.text(), st.text(alphabet="\\boxed{}0123456789.,-+/$%^ frac#<>answerthink:\n", max_size=60))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(ODD, st.text(max_size=20))
def test_any_text_has_a_reward(text: str, answer: str) -> None:
    assert same(answer or "7", text) in (True, False, None)
    for completion in (text, f"\\boxed{{{text}}}", f"#### {text}"):
        assert reward("7", completion).total in (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        ("\\boxed{\\frac{1}{2}}", "auto", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{7}}", "auto", "7"),
        ("\\boxed{\\{1,2\\}}", "auto", "\\{1,2\\}"),
        ("\\boxed {7}", "auto", "7"),
        ("\\fbox{7}", "auto", "7"),
        ("$\\boxed 7$", "auto", "7"),
        ("\\boxedx{7}", "boxed", None),
        ("\\boxed{5}, no: \\boxed{7", "auto", None),
        ("\\boxed{5} #### 7", "auto", "5"),
        ("\\boxed{5} #### 7", "hash", "7"),
        ("#### 5\n#### 7\nindeed", "auto", "7"),
        ("<answer>5</answer> <answer> 7 </answer>", "auto", "7"),
        ("so\nAnswer: 5\n\n**Final answer:** 7", "auto", "7"),
        ("The final answer is: 7", "auto", "7"),
        ("no answer here: 7", "auto", None),
        ("first 5, then -7.5 apples", "auto", None),
        ("first 5, then -7.5 apples", "last_number", "-7.5"),
        ("it costs $1,234", "last_number", "$1,234"),
        ("none", "last_number", None),
        ("\\boxed{" + "1" * (LONGEST + 1) + "}", "auto", None),
        ("\\boxed{" * 50_000, "auto", None),
        ("{" * 200_000, "auto", None),
        ("Answer" * 50_000, "auto", None),
        (" " * 200_000, "auto", None),
    ],
)
def test_where_the_answer_is(text: str, where: Any, expected: str | None) -> None:
    assert find(text, where) == expected


def test_the_gold_answer_of_a_solution() -> None:
    assert gold("He pays 3*600=<<3*600=1800>>1800.\n#### 1,800") == "1,800"
    assert gold("So $x = \\boxed{\\frac{3}{4}}$.") == "\\frac{3}{4}"
    assert gold(" 42 ") == "42" and gold("") is None and gold("so ####") == ""


GSM8K = {"question": "How many?", "answer": "3*600=<<3*600=1800>>1800 each.\n#### 1,800"}
MATH = {"problem": "What is $x$?", "level": "Level 5", "type": "Algebra",
        "solution": "We get $\\boxed{3}$, so $x=\\boxed{\\frac34}$."}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve the following math problem step by step, like this.\n\nWhat is\n\n6*7?\n\n"
                                           "Remember to put your answer on its own line."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule"},
    "extra_info": {"index": "9a9b"},
}
DEEPSCALER = {"problem": "What is $y$?", "answer": "-\\frac{2}{3}", "solution": "Long. $\\boxed{5}$"}


def test_a_column_of_ones_own_named_gold_is_no_answer() -> None:
    assert read({"question": "1+1=", "answer": "2", "gold": "silver"})["gold"] == "2"
    with pytest.raises(DataError, match="has no final answer"):
        read({"question": "1+1=", "gold": "2"})


@pytest.mark.parametrize(
    ("form", "row", "question", "final"),
    [
        ("gsm8k", GSM8K, "How many?", "1,800"),
        ("math", MATH, "What is $x$?", "\\frac34"),
        ("dapo", DAPO, "What is\n\n6*7?", "42"),
        ("dapo", {**DAPO, "prompt": "What is 6*7?"}, "What is 6*7?", "42"),
        ("deepscaler", DEEPSCALER, "What is $y$?", "-\\frac{2}{3}"),
        ("plain", {"problem": "?", "answer": 7, "level": 3}, "?", "7"),
    ],
)
def test_the_formats_of_the_public_sets(tmp_path: Path, form: Any, row: dict[str, Any], question: str, final: str) -> None:
    for given_form in ("auto", form):
        got = read(row, given_form)
        assert (got["question"], got["gold"]) == (question, final) and read(got, given_form) == got
    rows = [{**row, "n": i, **({"extra_info": {"index": str(i)}} if form == "dapo" else {})} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = env(data=str(tmp_path / "rows.jsonl"), format=form)
    train, test = made.dataset("train"), made.dataset("test")
    assert len(train) + len(test) == 40 and {r["gold"] for r in [*train, *test]} == {final}
    assert made.format_prompt(train[0])[0]["content"].startswith(question)
    assert made.compute_reward(episode(made, train[0], f"\\boxed{{{final}}}")).total == 1.0
    assert score(made, row, f"\\boxed{{{final}}}").total == 1.0, "a raw row works too"


def test_repetitions_in_the_dapo_file_are_left_out_also_across_the_splits() -> None:
    def row(index: int) -> dict[str, Any]:
        return {**DAPO, "prompt": [{"role": "user", "content": f"What is {index} + 1?"}], "extra_info": {"index": str(index)}}

    rows = [row(i % 10) for i in range(100)]
    made = env(data=rows, test_size=5)
    train, test = ([row["extra_info"]["index"] for row in made.dataset(split)] for split in ("train", "test"))
    assert len(set(train)) == len(train) and len(set(test)) == len(test)
    assert not set(train) & set(test) and set(train) | set(test) == set(map(str, range(10)))


@pytest.mark.parametrize(
    ("row", "form", "words"),
    [
        ({"question": "?", "answer": ""}, "auto", "final answer"),
        ({"question": "?", "answer": None}, "auto", "final answer"),
        ({"question": "?", "answer": "42"}, "gsm8k", "####"),
        ({"text": "?", "answer": "42"}, "auto", "question"),
        ({"problem": "?", "solution": "so \\boxed{"}, "auto", "final answer"),
        ({"prompt": [], "reward_model": {"ground_truth": "3"}}, "auto", "question"),
    ],
)
def test_a_bad_row_names_its_place_and_the_fix(tmp_path: Path, row: dict[str, Any], form: Any, words: str) -> None:
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, [row, *PLAIN[:3]])))
    with pytest.raises(DataError) as caught:
        env(data=str(tmp_path / "bad.jsonl"), test_data=PLAIN[3:6], format=form).dataset("train")
    assert "bad.jsonl:1" in str(caught.value) and words in str(caught.value) and "columns" in caught.value.fix


def test_prompts_and_null() -> None:
    row = {"question": "What is 1+1?", "answer": "2"}
    assert env(system=None, prompt=None).format_prompt(row) == [{"role": "user", "content": "What is 1+1?"}]
    made = env(system="Short.", prompt="Q: {question}")
    assert made.format_prompt(row) == [{"role": "system", "content": "Short."}, {"role": "user", "content": "Q: What is 1+1?"}]
    assert env(prompt="Q: {question}", style="text", system="S.").format_prompt(row) == "S.\n\nQ: What is 1+1?"
    assert "\\boxed{}" in env().format_prompt(row)[0]["content"]


BAD_OPTIONS = ({"prompt": "no place"}, {"format_weight": 2}, {"verify_timeout_s": 0}, {"format": "csv"}, {"answer": "boxes"})


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plugins.load("envs", "math", **options)


def test_no_data_and_no_verifier_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"options\.data is not set"):
        plugins.load("envs", "math", algebra=False).dataset("train")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigError, match="math-verify") as absent:
        Math.Options()
    assert "posttrain[math]" in absent.value.fix and "algebra: false" in absent.value.fix


def test_score_inside_an_event_loop_and_by_name_and_it_travels() -> None:
    async def inside() -> Any:
        return score("math", {"question": "?", "answer": "2"}, "\\boxed{2}")

    assert asyncio.run(inside()).total == 1.0
    assert pickle.loads(pickle.dumps(env(data="rows.jsonl"))).options == env(data="rows.jsonl").options
