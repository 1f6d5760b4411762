"""A float32 policy and an engine in bfloat16: the weights are cast on their way, and the canary's limits hold.

With a dense and a mixture-of-experts model, tied and untied; float32 is in `test_families.py` and `test_vllm_tp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.integration

CAST = [("qwen3", True), ("llama3", False), ("qwen3_moe", False)]
"""Family, tied head."""


@pytest.fixture(params=CAST, ids=[f"{family}-{'tied' if tied else 'untied'}" for family, tied in CAST])
def rig(request: pytest.FixtureRequest, open_rig: Any) -> Iterator[Any]:
    family, tied = request.param
    with open_rig(family, tied=tied, dtype="bfloat16") as rig:
        yield rig


def test_the_engine_computes_the_policy_within_the_limits_of_its_dtype(rig: Any) -> None:
    rig.run(rig.body.start())
    rig.run(rig.plane.sync(1))
    assert rig.gap() < rig.config.canary_max_bf16
    rig.change()
    assert rig.gap() > 2 * rig.config.canary_max_bf16, "the change is large enough to be seen"
    found = rig.run(rig.plane.sync(2))
    assert found["weights/canary_max"] < rig.config.canary_max_bf16
    assert 0 < found["weights/canary_mean"] < rig.config.canary_mean_bf16, "equal to the bit would not be bfloat16"
    assert rig.gap() < rig.config.canary_max_bf16
