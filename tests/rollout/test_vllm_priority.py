"""vLLM is asked to serve by priority, and told that of each request; `test_vllm_contract` shows what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.vllm import VllmEngine
from posttrain.rollout.vllm_start import engine_arguments
from posttrain.types import Request, Sampling

pytest.importorskip("vllm")


def engine(folder: Path) -> Any:
    return VllmEngine(EngineSpec(str(folder), "float32", 64, 4, (2,)))


def test_the_engine_is_started_with_the_scheduler_that_reads_priorities(tmp_path: Path) -> None:
    made = engine(tmp_path)
    assert engine_arguments(made.spec, made.options)["scheduling_policy"] == "priority"


def test_every_sample_has_the_priority_of_its_request(tmp_path: Path) -> None:
    asked: dict[str, int] = {}

    async def generate(prompt: Any, params: Any, request_id: str, *, priority: int = 0) -> AsyncIterator[Any]:
        asked[request_id] = priority
        span = SimpleNamespace(version="1", start=0, end=1)
        sample = SimpleNamespace(
            token_ids=[9], logprobs=SimpleNamespace(logprobs=[-0.5]), weight_versions=[span], finish_reason="stop"
        )
        yield SimpleNamespace(outputs=[sample])

    async def main() -> None:
        made = engine(tmp_path)
        made._llm, made._version = SimpleNamespace(generate=generate), 1
        requests = [Request("later", [5, 6], 2, 0, Sampling(4), priority=-3), Request("first", [5, 6], 1, 0, Sampling(4))]
        assert len([done async for done in made.generate(requests)]) == 3

    asyncio.run(main())
    assert asked == {"later/0": -3, "later/1": -3, "first/0": 0}
