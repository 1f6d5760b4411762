"""The embedded engine keeps the contract of engines, on windows and soft caps too: caches recomputed in flight, rows retired."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.hf import HFEngine
from posttrain.testing import EngineContract


class TestHF(EngineContract):
    @pytest.fixture(scope="class")
    def make_engine(self) -> Callable[[EngineSpec], HFEngine]:
        return HFEngine


class TestGemma2(TestHF):
    family = "gemma2"


class TestMistral(TestHF):
    family = "mistral"
