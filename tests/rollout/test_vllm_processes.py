"""The end of an engine's processes, without vLLM: whoever orders it goes on at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from posttrain.errors import RunInterrupted
from posttrain.rollout import vllm, vllm_processes
from posttrain.rollout.engine import EngineSpec

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
GRACE_S = 0.5
LOOP_S = 0.1
"""How long the loop may stand still, on a busy machine too."""


@pytest.fixture
def stubborn() -> Iterator[psutil.Process]:
    """A process that SIGTERM does not end."""
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield psutil.Process(process.pid)
        process.kill()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, stubborn: psutil.Process) -> Any:
    monkeypatch.setattr(vllm, "kill", partial(vllm_processes.kill, grace=GRACE_S))
    made = vllm.VllmEngine(EngineSpec("", "float32", 8, 1, ()))
    made._processes = [stubborn]
    return made


async def standstill(work: Any) -> float:
    """The longest time for which the loop did nothing else while `work` was done."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - began - 0.005)

    ticking = asyncio.ensure_future(tick())
    await asyncio.sleep(0.02)
    await work
    await asyncio.sleep(0.02)
    ticking.cancel()
    return longest


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_an_engine_that_is_invalidated_is_killed_beside_the_loop(engine: Any, stubborn: psutil.Process) -> None:
    async def scenario() -> None:
        engine.invalidate("the canary says so")
        assert engine.invalid == "the canary says so"
        assert not ended(stubborn), "the kill was waited for"
        engine.invalidate("once more")
        await engine.close()
        assert ended(stubborn) and engine.invalid == "the canary says so"

    assert asyncio.run(standstill(scenario())) < LOOP_S


def test_to_close_an_engine_holds_up_nobody_and_waits_for_its_processes(engine: Any, stubborn: psutil.Process) -> None:
    assert asyncio.run(standstill(engine.close())) < LOOP_S
    assert ended(stubborn)


def test_a_request_that_ends_after_its_engine_became_invalid_is_not_served(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")

    async def generate(*_: Any, **__: Any) -> Any:
        engine.invalidate("half-way")
        yield "what a half-updated model says"

    with pytest.raises(RunInterrupted, match="half-way") as caught:
        asyncio.run(engine._run(SimpleNamespace(generate=generate), [1], None, "r/0"))
    assert caught.value.code == "engine-dead"
