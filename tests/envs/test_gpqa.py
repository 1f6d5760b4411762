"""Multiple choice in the format of GPQA: the dataset's own columns, a seeded order, the last `Answer: X`."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.errors import ConfigError, DataError
from posttrain.plugins import load
from posttrain.testing import EnvContract
from posttrain_envs.gpqa import COLUMNS, Gpqa, answer_of

ROWS: list[dict[str, Any]] = [
    {
        "Record ID": f"rec{n}", "Question": f" Which number is {n} + {n}? ", "Correct Answer": f"{2 * n}\n",
        "Incorrect Answer 1": f"{2 * n + 1}", "Incorrect Answer 2": f"{2 * n + 2}", "Incorrect Answer 3": f"{2 * n + 3}",
        "High-level domain": "Arithmetic",
    }
    for n in range(40)
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "gpqa_diamond.csv"
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    return str(path)


def made(data: str, **options: Any) -> Any:
    return load("envs", "gpqa", data=data, **options)


def test_choices_are_in_an_order_of_their_own_wherever_the_row_is(file: str) -> None:
    env = made(file, test_size=0)
    rows = [env.dataset("train")[i] for i in range(40)]
    letters = [env.choices(row)[1] for row in rows]
    assert set(letters) == set("ABCD") and max(letters.count(letter) for letter in "ABCD") < 20
    assert letters == [made(file, test_size=0).choices(row | {"id": "elsewhere"})[1] for row in rows]
    assert letters != [made(file, test_size=0, choice_seed=1).choices(row)[1] for row in rows]
    for row in rows:
        choices, letter = env.choices(row)
        assert sorted(choices) == sorted(str(row[c]).strip() for c in COLUMNS[1:])
        assert choices["ABCD".index(letter)] == row["Correct Answer"].strip()


def test_what_is_asked(file: str) -> None:
    env = made(file, test_size=0, style="text")
    row = env.dataset("train")[0]
    choices, _ = env.choices(row)
    asked = env.format_prompt(row)
    assert f"\n\nWhich number is 0 + 0?\n\nA) {choices[0]}\nB) {choices[1]}\nC) {choices[2]}\nD) {choices[3]}" in asked
    assert "'Answer: X'" in asked


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("It must be 4.\nAnswer: C", "C"),
        ("Answer: A\nNo, wait.\nAnswer: B", "B"),
        ("**Answer: D**", "D"),
        ("answer: (B)", "B"),
        ("The answer is: $\\boxed{A}$", "A"),
        ("Answer: $\\text{C}$.", "C"),
        ("Final ANSWER: E", "E"),
        ("<think>Answer: A</think>I think so. Answer: B", "B"),
        ("<think>Answer: A", None),
        ("Answer: 4", None),
        ("Answer: a hard one", None),
        ("Answer: All of them", None),
        ("C", None),
        ("", None),
    ],
)
def test_the_last_letter_counts(completion: str, letter: str | None) -> None:
    assert answer_of(completion) == letter


def test_rewards(file: str) -> None:
    env = made(file, test_size=0)
    row = env.dataset("train")[3]
    right = env.choices(row)[1]
    wrong = next(letter for letter in "ABCD" if letter != right)
    rewards = {text: posttrain.score(env, row, text) for text in (f"Answer: {right}", f"Answer: {wrong}", "no idea")}
    assert [r.total for r in rewards.values()] == [1, 0, 0]
    assert [r.parts for r in rewards.values()] == [
        {"correct": 1, "format": 1}, {"correct": 0, "format": 1}, {"correct": 0, "format": 0}
    ]  # fmt: skip
    assert rewards[f"Answer: {wrong}"].info == {"extracted": wrong, "answer": right}
    assert posttrain.score(made(file, thinking=True), row, f"Answer: {right}").total == 0


def test_a_long_completion_is_read_in_time() -> None:
    assert answer_of("Answer: " * 200_000 + "B") == "B"


def test_rows_without_the_columns_and_prompts_without_the_question(tmp_path: Path, file: str) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"question": "?", "a": 1}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="no column 'Question'"):
        made(str(other), test_size=0).dataset("train")
    with pytest.raises(ConfigError, match=r"does not hold \{choices\}"):
        made(file, prompt="{question}")


class TestContract(EnvContract):
    @pytest.fixture
    def env(self, file: str) -> Any:
        return Gpqa(Gpqa.Options(data=file, test_size=8))
