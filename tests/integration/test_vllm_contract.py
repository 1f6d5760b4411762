"""vLLM keeps the contract of engines: the same laws as the embedded engine, on a tied model, over shared memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.vllm import VllmEngine
from posttrain.testing import EngineContract

pytestmark = pytest.mark.integration


class TestVllm(EngineContract):
    transport = "shm"

    @pytest.fixture(scope="class")
    def make_engine(self) -> Callable[[EngineSpec], VllmEngine]:
        return VllmEngine
