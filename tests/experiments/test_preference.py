"""The recipe of preference pairs: its files are right, its held-out problems are unknown to the model, and it stands alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.load import load_config
from posttrain_envs.arithmetic import Arithmetic
from posttrain_experiments.preference import DATA, EXPERIMENTS, PROBLEMS

EXPERIMENT = EXPERIMENTS["preference_dpo"]


def rows(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"sums_{split}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("split", "count"), [("train", 320), ("test", 80)])
def test_each_pair_is_a_right_sum_and_one_that_slipped(split: str, count: int) -> None:
    env = Arithmetic(Arithmetic.Options(**PROBLEMS))
    problems = list(env.dataset(split))  # type: ignore[arg-type]
    assert [row["id"] for row in rows(split)] == [problem["id"] for problem in problems] and len(problems) == count
    for row, problem in zip(rows(split), problems, strict=True):
        assert row["prompt"] == env.format_prompt(problem)
        assert (row["chosen"], row["rejected"]) == (problem["answer"], str(int(problem["answer"]) + 1))


def test_what_is_held_out_neither_trains_nor_warms_up() -> None:
    assert EXPERIMENT["model"]["factory_kwargs"]["environment"] is PROBLEMS
    assert not {row["prompt"] for row in rows("train")} & {row["prompt"] for row in rows("test")}


def test_the_files_are_those_of_the_config() -> None:
    options = load_config(["experiment=preference_dpo"]).config.environments[0].options
    assert Path(options["data"]).is_file() and Path(options["test_data"]).is_file()


def test_it_imports_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import posttrain_experiments.preference; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["posttrain_experiments"]
