"""The end of an engine's processes, without vLLM: whoever orders it goes on at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from posttrain.config.load import load_config
from posttrain.errors import RunInterrupted
from posttrain.placement.out_of_memory import explain
from posttrain.rollout import vllm, vllm_processes
from posttrain.rollout.engine import EngineSpec

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
GRACE_S = 3.0
LOOP_S = 1.5
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


OUT_OF_MEMORY = "(EngineCore pid=7) ERROR [core.py:9] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"

RUN = ["model.name_or_path=/m", "rl.steps=1", "environments=[{name: arithmetic}]"]


@pytest.mark.parametrize(
    "said", [OUT_OF_MEMORY, "ERROR RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 8 B"]
)
def test_an_engine_that_died_as_memory_ran_out_says_so_and_gets_the_steps(engine: Any, tmp_path: Path, said: str) -> None:
    engine._log = tmp_path / "vllm.log"
    engine._log.write_text(f"INFO all well\n{said}\nERROR EngineDeadError: see the stack trace above\n")
    found = engine._dead()
    assert found.cause == f"{said}; see {engine._log}" and found.code == "engine-dead"
    explained = explain(found, load_config([*RUN, "rollout.engine=vllm"]).config)
    assert explained is not None and explained.message == "the vLLM engine died"
    assert "1 rollout.gpu_memory_utilization=0.4" in explained.fix and "5 stop" in explained.fix


def test_an_engine_that_died_of_something_else_is_not_short_of_memory(engine: Any, tmp_path: Path) -> None:
    """Neither advice of vLLM nor what an engine before it left in the same log is why it died."""
    log = engine._log = tmp_path / "vllm.log"
    log.write_text(f"{OUT_OF_MEMORY}\n")
    engine._log_start = log.stat().st_size
    with log.open("a") as file:
        file.write("INFO lower max_num_seqs in case of out of memory\nERROR ValueError: a bug\n")
    assert engine._dead().cause == f"see {log}"
    assert explain(engine._dead(), load_config(RUN).config) is None
    log.unlink()
    assert engine._dead().cause == f"see {log}"


def test_an_engine_remembers_where_its_own_log_begins(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.log").write_text("of another\n")
    engine.spec = EngineSpec("", "float32", 8, 1, (), log_dir=tmp_path)
    monkeypatch.setattr(engine, "preflight", lambda *_: None)
    monkeypatch.setattr(engine, "_launch", lambda _: None)
    monkeypatch.setattr(vllm, "engine_processes", lambda _: [])
    asyncio.run(engine.start())
    assert engine._log == tmp_path / "vllm.log" and engine._log_start == len("of another\n")
