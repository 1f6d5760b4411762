"""Every family on the embedded engine: what it says about its tokens is what the policy says, past the windows too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.policy.load import load_causal_lm
from posttrain.policy.module import PolicyModule
from posttrain.policy.rows import Row
from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.hf import HFEngine
from posttrain.testing.tiny_model import FAMILIES, WINDOW, write_tiny_model
from posttrain.types import Completion, Request, Sampling

TEMPERATURE = 0.8
PROMPTS = ([5], [6, 7, 8], list(range(4, 4 + 2 * WINDOW)))  # of different lengths: padding on the left


class Weights:
    """A publication of a model's parameters, without a plane."""

    version = 1

    def __init__(self, model: Any) -> None:
        self.model = model

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value.detach()) for name, value in self.model.named_parameters())


async def generate(folder: Path, model: Any) -> tuple[list[Completion], list[list[float]]]:
    engine = HFEngine(EngineSpec(str(folder), "float32", 128, 5, (2, 3)))
    await engine.start()
    try:
        await engine.pause()
        await engine.apply(Weights(model))  # type: ignore[arg-type]
        await engine.resume()
        sampling = Sampling(2 * WINDOW + 3, temperature=TEMPERATURE)
        requests = [Request(str(i), prompt, 4, i, sampling) for i, prompt in enumerate(PROMPTS)]
        return [c async for c in engine.generate(requests)], await engine.logprobs(PROMPTS[1:])
    finally:
        await engine.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_says_what_the_policy_says(tmp_path, family, tied):
    model = write_tiny_model(tmp_path, family=family, tied=tied)
    done, scored = asyncio.run(generate(tmp_path, model))
    assert len(done) == 12 and {c.finish_reason for c in done} == {"stop", "length"}
    rows = []
    for c in done:
        prompt = PROMPTS[int(c.request_id)]
        mask = [False] * len(prompt) + [True] * len(c.token_ids)
        ids = [*prompt, *c.token_ids]
        rows.append(Row(input_ids=ids, mask=mask, rollout_logprobs=[0.0] * len(ids), prefix=len(prompt)))
    policy = PolicyModule(load_causal_lm(str(tmp_path), "float32"), temperature=TEMPERATURE, shared_prefix=True)
    with torch.no_grad():
        wanted, _ = policy(policy.pack(rows))
    got = torch.tensor([value for c in done for value in c.logprobs])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    assert max(len(row.input_ids) for row in rows) > 3 * WINDOW
    policy.temperature = 1.0
    for ids, values in zip(PROMPTS[1:], scored, strict=True):
        row = Row(input_ids=ids, mask=[False] + [True] * (len(ids) - 1), rollout_logprobs=[0.0] * len(ids))
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(values), policy(policy.pack([row]))[0], atol=1e-5, rtol=0)
