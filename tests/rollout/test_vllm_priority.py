"""What vLLM is asked for, by its adapter, without vLLM's processes: priorities, which `test_vllm_contract` shows at work, and an
update that left cached prefixes of the old weights is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.errors import WeightSyncError
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


@pytest.mark.parametrize("reset", [True, False, None])
def test_an_update_that_did_not_reset_the_prefix_cache_is_none(tmp_path: Path, reset: bool | None) -> None:
    stamped: list[str] = []

    async def reset_prefix_cache(*, reset_running_requests: bool) -> bool | None:
        assert reset_running_requests
        return reset

    async def update_weight_version(version: str) -> None:
        stamped.append(version)

    async def collective_rpc(*args: Any, **kwargs: Any) -> list[Any]:
        return [None]

    async def main() -> None:
        made = engine(tmp_path)
        llm = SimpleNamespace(
            reset_prefix_cache=reset_prefix_cache, update_weight_version=update_weight_version, collective_rpc=collective_rpc
        )
        made._rpc = collective_rpc
        staged = SimpleNamespace(
            plan=SimpleNamespace(digest="d", to_dict=dict), region=SimpleNamespace(path="p"), epoch=1, version=4, digests=()
        )
        await made._update(llm, staged)

    if reset:
        asyncio.run(main())
        assert stamped == ["4"]
    else:
        with pytest.raises(WeightSyncError, match="the prefix cache was not reset"):
            asyncio.run(main())
        assert not stamped
