"""The policy, one at a time: who has it and who waits for whom is in the graph, and what hangs in it ends at its deadline."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.config.load import load_config
from posttrain.errors import WaitExpired
from posttrain.loop.checkpointer import Checkpointer
from posttrain.loop.controller import LoopState
from posttrain.loop.policy_turn import RANKS_FIRST_S, PolicyTurn
from posttrain.loop.sim.virtual_time import VirtualLoop
from posttrain.loop.waits import Waits


def virtual(main: Any, takes: float = 0.01) -> Any:
    """takes: seconds of a thread."""
    loop = VirtualLoop(takes=lambda name: takes, most_seconds=10_000.0)
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def test_whoever_waits_for_the_policy_waits_for_the_one_before_it() -> None:
    waits, graphs, order = Waits(), [], []

    async def main() -> None:
        policy = PolicyTurn(waits, 3600.0)

        async def use(seconds: float) -> None:
            async with policy.turn():
                order.append(asyncio.current_task().get_name())  # type: ignore[union-attr]
                graphs.append(waits.graph())
                with waits.named("work", "policy"):
                    await asyncio.sleep(seconds)

        tasks = [asyncio.create_task(use(10.0), name=name) for name in ("train loop", "weights loop", "rollouts loop")]
        await asyncio.sleep(5.0)
        graphs.append(waits.graph())
        tasks[1].cancel()  # who gives up holds up nobody
        await asyncio.gather(*tasks, return_exceptions=True)
        async with policy.turn():
            assert not waits.open

    virtual(main())
    assert order == ["train loop", "rollouts loop"] and graphs[0] == graphs[2] == "nobody waits"
    assert graphs[1].splitlines() == [
        "rollouts loop waits for weights loop: its turn with the policy (5.0 s)",
        "  weights loop waits for train loop: its turn with the policy (5.0 s)",
        "    train loop waits for policy: work (5.0 s)",
        "      policy waits for nobody here: look there first",
    ]


@pytest.mark.parametrize("ranks", [False, True])
def test_a_call_that_hangs_ends_at_its_deadline_and_the_ranks_own_comes_first(ranks: bool) -> None:
    waits = Waits()

    async def main() -> None:
        policy = PolicyTurn(waits, 60.0, ranks=ranks)
        try:
            async with policy.turn():
                await policy.call("the optimizer steps", time.sleep, 0)
        finally:
            assert asyncio.get_running_loop().time() == (60.0 + RANKS_FIRST_S if ranks else 60.0)

    with pytest.raises(WaitExpired, match=r"waited [69]0 s for the optimizer steps") as caught:
        virtual(main(), takes=1000.0)
    assert "raise loop.train_timeout_s if it is only slow" in caught.value.fix and "owner: policy" in str(caught.value.where)
    assert RANKS_FIRST_S > 15  # what the ranks take to say where they are, and a death to be told


def test_a_checkpoint_leaves_the_policy_to_what_the_one_before_waits_for() -> None:
    """Its writer waits for a validation, which may need the policy."""

    async def states() -> list[Any]:
        return []

    async def main() -> None:
        waits, config = Waits(), load_config(["experiment=arithmetic_grpo"]).config
        policy, never = PolicyTurn(waits, 60.0), asyncio.get_running_loop().create_future()
        snapshot = SimpleNamespace(snapshot=lambda: None)
        parts: Any = SimpleNamespace(
            config=config, hook_states=states, algorithm_states=list, fingerprints={}, origins=(), policy=snapshot
        )
        source: Any = SimpleNamespace(cut=lambda step: never)
        checkpoints = Checkpointer(parts, source, None, waits, policy)  # type: ignore[arg-type]

        async def before() -> None:
            await asyncio.sleep(1.0)
            async with policy.turn():
                pass

        checkpoints._writing = asyncio.create_task(before(), name="checkpoints")
        checkpoints.batch_made(2)
        await asyncio.wait_for(checkpoints.begin(LoopState(step=2)), 100.0)
        await checkpoints.close()

    virtual(main())
