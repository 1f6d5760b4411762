"""vLLM keeps the contract of engines: the same laws as the embedded engine, on a tied model, over shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.vllm import VllmEngine
from posttrain.testing import EngineContract
from posttrain.testing.engine_contract import Rig, ask

pytestmark = pytest.mark.integration


class Priorities:
    """What is vLLM's own. A base, since pytest runs the tests of the last base first, and the last law breaks the engine."""

    def test_a_lower_priority_that_is_asked_later_overtakes_all_that_wait(self, rig: Rig) -> None:
        """Every slot is taken, more wait than there are slots, and behind them comes the later turn of an episode."""
        slots = rig.engine.spec.max_num_seqs
        running = ask("running", n=slots, ignore_eos=True, max_tokens=240)
        waiting = ask("waiting", n=2 * slots, ignore_eos=True, max_tokens=16)
        later = replace(ask("later", ignore_eos=True, max_tokens=4), priority=-1)
        order = [c.request_id for c in rig.generate(running, waiting, later)]
        assert order.index("later") < order.index("waiting"), order


class TestVllm(EngineContract, Priorities):
    transport = "shm"

    @pytest.fixture(scope="class")
    def make_engine(self) -> Callable[[EngineSpec], VllmEngine]:
        return VllmEngine
