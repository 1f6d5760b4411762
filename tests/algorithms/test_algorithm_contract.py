"""The built-in algorithms keep the contract of algorithms."""

from __future__ import annotations

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
