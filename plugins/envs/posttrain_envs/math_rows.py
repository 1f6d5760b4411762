"""Rows of the public math sets, told apart by their columns, as a question and a final answer.

    gsm8k        question, answer (a solution that ends in `#### 72`)             openai/gsm8k
    math         problem, solution (its last box is the answer), level, type      Hendrycks' MATH and its copies
    dapo         prompt (messages, or text), reward_model.ground_truth, extra_info.index      BytedTsinghua-SIA/DAPO-Math-17k
    deepscaler   problem, answer, solution                                        agentica-org/DeepScaleR-Preview-Dataset
    plain        question or problem, answer                                      one's own, MATH-500, AIME, …

MATH-500 has `problem`, `solution`, `answer`, `subject`, `level` and `unique_id`, AIME `id`, `problem` and `answer`; columns of
`plain` may begin with a capital, as in some copies of AIME.

A read row keeps its columns and gains `question` and `gold`, in the place of columns of these names; reading it again gives the
same. The DAPO file wraps each problem in instructions of its own, which are taken off, and repeats each about a hundred times:
see `different`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from posttrain.data.environment import RowDataset
from posttrain.data.view import View
from posttrain.errors import DataError
from posttrain_envs.math_answer import gold

Format: TypeAlias = Literal["auto", "gsm8k", "math", "dapo", "deepscaler", "plain"]
_COLUMNS = {
    "gsm8k": "question and answer, which has `####` before the final answer",
    "math": "problem and solution, which has the final answer in \\boxed{}",
    "dapo": "prompt and reward_model.ground_truth",
    "deepscaler": "problem and answer",
    "plain": "question (or problem) and answer",
}
QUESTIONS = ("question", "problem", "Question", "Problem")
_CHECKED = 1000
_WRAPPER = re.compile(
    r"\s*Solve the following math problem[^\n]*\n+(.*?)(?:\n+Remember to put your answer on[^\n]*)?\s*", re.DOTALL
)


def read(row: Mapping[str, Any], form: Format = "auto") -> dict[str, Any]:
    """The row with `question` and `gold`. Raises DataError when it has no question or no final answer."""
    kind = detect(row) if form == "auto" else form
    question, answer = _PARTS[kind](row)
    final = None if answer is None else gold(str(answer))
    if kind == "gsm8k" and "####" not in str(answer):
        final = None
    if not isinstance(question, str) or not question.strip() or not final:
        lacking = "final answer" if isinstance(question, str) and question.strip() else "question"
        raise DataError(
            f"a row of the math data has no {lacking}: {dict(row)!r:.200}",
            cause=f"read as `format: {kind}`: {_COLUMNS[kind]}",
            fix="name the columns with `columns: {question: …, answer: …}`, or choose another `format`", code="math-row",
        )
    return {**row, "question": question.strip(), "gold": final}


def detect(row: Mapping[str, Any]) -> str:
    """The format that a row's columns mean."""
    if isinstance(row.get("reward_model"), Mapping):
        return "dapo"
    if row.get("answer") is None and "problem" in row and "solution" in row:
        return "math"
    return "plain"


class Problems(Sequence[dict[str, Any]]):
    """Read rows of opened data, with its `where`, `notes` and `window`. `keep`: their positions, default all.

    The first rows are read here, so that a wrong column or format is told before anything starts. Raises DataError.
    """

    def __init__(self, rows: View, form: Format, keep: Sequence[int] | None = None) -> None:
        self._rows, self._form = rows, form
        self._keep: Sequence[int] = range(len(rows)) if keep is None else keep
        self.notes, self.window = rows.notes, rows.window
        for index in range(min(len(self), _CHECKED if rows.window is None else 1)):
            self[index]

    def __len__(self) -> int:
        return len(self._keep)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[self._keep[index]]
        try:
            return read(row, self._form)
        except DataError as exc:
            exc.where = exc.where or self.where(index)
            raise

    def where(self, index: int) -> str:
        return self._rows.where(self._keep[index])


def different(rows: RowDataset, *, without: RowDataset | None = None) -> list[int]:
    """Positions of the rows that are the first of their problem, and whose problem is not in `without`. Reads every row."""
    seen = set() if without is None else {_key(without[i]) for i in range(len(without))}
    keep = []
    for position in range(len(rows)):
        key = _key(rows[position])
        if key not in seen:
            seen.add(key)
            keep.append(position)
    return keep


def _key(row: Mapping[str, Any]) -> str:
    info = row.get("extra_info")
    return str(info["index"]) if isinstance(info, Mapping) and info.get("index") is not None else str(row.get("prompt"))


def _first(row: Mapping[str, Any], *columns: str) -> Any:
    """The value of the first of these columns that holds something."""
    return next((row[column] for column in columns if row.get(column) not in (None, "")), None)


def _dapo(row: Mapping[str, Any]) -> tuple[Any, Any]:
    prompt, truth = row.get("prompt"), row.get("reward_model")
    if not isinstance(prompt, str):
        said = [m.get("content") for m in prompt or () if isinstance(m, Mapping) and m.get("role") == "user"]
        prompt = said[-1] if said else None
    wrapped = _WRAPPER.fullmatch(prompt) if isinstance(prompt, str) else None
    return wrapped.group(1) if wrapped else prompt, truth.get("ground_truth") if isinstance(truth, Mapping) else None


_PARTS: dict[str, Any] = {
    "gsm8k": lambda row: (row.get("question"), row.get("answer")),
    "math": lambda row: (row.get("problem"), row.get("solution")),
    "dapo": _dapo,
    "deepscaler": lambda row: (row.get("problem"), row.get("answer")),
    "plain": lambda row: (_first(row, *QUESTIONS), _first(row, "answer", "Answer")),
}
