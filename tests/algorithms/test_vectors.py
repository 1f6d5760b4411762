"""The golden vectors: advantages, loss and gradient of every token objective, whole and in micro-batches."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from posttrain.objective import build_objective
from posttrain.testing.rows import ScoredRow, score_rows

CASES = json.loads((Path(__file__).parents[1] / "data" / "objectives.json").read_text())
TOLERANCE = 1e-8


def rows_of(case: dict[str, Any]) -> list[ScoredRow]:
    return [ScoredRow(**row) for row in case["sequences"]]


def splits(rows: list[ScoredRow], seed: int) -> list[list[list[int]] | None]:
    """Whole; one atom per micro-batch; atoms shuffled into three micro-batches. An atom is a row, or the two rows of a pair."""
    atoms: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        atoms.setdefault(index if row.pair is None else ("pair", row.pair), []).append(index)
    single = list(atoms.values())
    shuffled = single.copy()
    random.Random(seed).shuffle(shuffled)
    return [None, single, [[i for atom in shuffled[k::3] for i in atom] for k in range(3)]]


def test_there_are_37_vectors_of_all_nine_token_objectives() -> None:
    assert len(CASES) == 37
    names = {"grpo", "rloo", "dr_grpo", "reinforce_pp", "cispo", "gspo", "sapo", "dpo", "nft"}
    assert {case["algorithm"] for case in CASES} == names


@pytest.mark.parametrize("case", CASES, ids=[case["label"] for case in CASES])
def test_vector(case: dict[str, Any]) -> None:
    objective = build_objective(case["algorithm"], **case["options"])
    rows, expect = rows_of(case), case["expect"]
    for parts in splits(rows, seed=len(case["label"])):
        result = score_rows(objective, rows, parts)
        assert result.loss == pytest.approx(expect["loss"], abs=TOLERANCE)
        for got, want in zip(result.grads, expect["grad"], strict=True):
            assert got == pytest.approx(want, abs=TOLERANCE)
        if expect["advantages"] is not None:
            assert result.advantages == pytest.approx(expect["advantages"], abs=TOLERANCE)
