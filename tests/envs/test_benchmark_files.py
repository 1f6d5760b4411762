"""Files with the own field names of MATH-500, AIME and GSM8K, read by the math environment, whole, as an eval asks them."""

import json
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.config.load import load_config
from posttrain.evals.build import build_evals

MATH_500 = [
    {
        "problem": "What is $\\frac{1}{2} + \\frac{1}{3}$?", "solution": "It is $\\boxed{\\frac{5}{6}}$.",
        "answer": "\\frac{5}{6}", "subject": "Prealgebra", "level": 2, "unique_id": "test/prealgebra/1.json",
    },
    {
        "problem": "Solve $x^2 = 4$ for $x > 0$.", "solution": "So $x = \\boxed{2}$.",
        "answer": "2", "subject": "Algebra", "level": 1, "unique_id": "test/algebra/2.json",
    },
]  # fmt: skip
AIME = [
    {"id": 60, "problem": "Find the remainder.", "solution": "…", "answer": "033"},
    {"id": 61, "problem": "Find n.", "answer": 204},
]
AIME_CAPITAL = [
    {"ID": "2024-I-1", "Problem": "Find n.", "Solution": "…", "Answer": 204},
    {"ID": "2024-I-2", "Problem": "Find m.", "Solution": "…", "Answer": 25},
]
GSM8K = [
    {"question": "How many eggs?", "answer": "She has 40 and 2 = <<40+2=42>>42.\n#### 42"},
    {"question": "What does it cost?", "answer": "#### 1,200"},
]


@pytest.mark.parametrize(
    ("rows", "ids", "right", "wrong"),
    [
        (MATH_500, ["1", "2"], ["\\boxed{5/6}", "thus \\boxed{2}"], ["\\boxed{6/5}", "\\boxed{4}"]),
        (AIME, ["60", "61"], ["\\boxed{33}", "\\boxed{204}"], ["\\boxed{34}", "\\boxed{2040}"]),
        (AIME_CAPITAL, ["1", "2"], ["\\boxed{204}", "\\boxed{25}"], ["\\boxed{20}", "\\boxed{24}"]),
        (GSM8K, ["1", "2"], ["#### 42", "\\boxed{1200}"], ["#### 41", "\\boxed{12}"]),
    ],
    ids=["math-500", "aime", "aime, other names", "gsm8k"],
)
def test_a_benchmark_file_is_asked_whole(
    tmp_path: Path, rows: list[dict[str, Any]], ids: list[str], right: list[str], wrong: list[str]
) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    entry = {"name": "math", "options": {"data": str(file), "algebra": False}}
    config = load_config(["experiment=arithmetic_grpo"], values={"evals": [entry]}).config
    (one,) = build_evals(config, {}, [])
    assert [draw.row_id for draw in one.draws] == ids and len(one.env.dataset("test")) == len(rows)
    for draw, good, bad in zip(one.draws, right, wrong, strict=True):
        assert posttrain.score(one.env, draw.task, good).parts["correct"] == 1
        assert posttrain.score(one.env, draw.task, bad).parts["correct"] == 0
        asked = next(rows[draw.index][c] for c in ("problem", "Problem", "question") if c in rows[draw.index])
        assert draw.task["question"] == asked and asked in one.env.format_prompt(draw.task)[0]["content"]  # type: ignore[index]


def test_a_benchmark_file_with_a_function_of_ones_own(tmp_path: Path) -> None:
    file, code = tmp_path / "aime.jsonl", tmp_path / "exact.py"
    file.write_text("".join(json.dumps(row) + "\n" for row in AIME), encoding="utf-8")
    code.write_text("def score(completion, row):\n    return float(completion.strip() == str(row['answer']))\n", encoding="utf-8")
    options = {"reward": f"{code}:score", "data": str(file), "prompt_column": "problem", "answer_column": "answer"}
    config = load_config(["experiment=arithmetic_grpo"], values={"evals": [{"name": "function", "options": options}]}).config
    (one,) = build_evals(config, {}, [])
    assert [draw.row_id for draw in one.draws] == ["60", "61"]
    assert [posttrain.score(one.env, draw.task, "204").total for draw in one.draws] == [0, 1]
