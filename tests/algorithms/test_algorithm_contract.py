"""The built-in algorithms keep the contract of algorithms."""

from __future__ import annotations

from typing import Literal

import pytest

from posttrain.objective import Objective, build_objective
from posttrain.testing import AlgorithmContract

ALGORITHMS = {
    name: {} for name in ("grpo", "rloo", "reinforce_pp", "cispo", "gspo", "sapo", "dpo", "nft")
} | {"dr_grpo": {"max_tokens": 8}}


class TestBuiltIn(AlgorithmContract):
    @pytest.fixture(params=sorted(ALGORITHMS))
    def objective(self, request: pytest.FixtureRequest) -> Objective:
        return build_objective(request.param, **ALGORITHMS[request.param])

    def invariance(self, objective: Objective) -> Literal["", "shift", "affine"]:
        if objective.name in ("dpo", "nft"):
            return ""  # pairs, and rewards that are 0 or 1
        return "shift" if objective.name in ("rloo", "dr_grpo") else "affine"
