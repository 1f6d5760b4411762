"""An engine and the policy that it serves, for the tests of families: one way to say that the two compute the same."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config.schema import WeightsConfig
from posttrain.policy.load import load_causal_lm
from posttrain.policy.module import PolicyModule
from posttrain.policy.rows import Row
from posttrain.rollout.body import RolloutBody
from posttrain.rollout.engine import EngineSpec
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Completion, Request, Sampling
from posttrain.weights.canary import Canary, make_probe
from posttrain.weights.plane import WeightPlane
from posttrain.weights.publication import PublicationPool, whole
from posttrain.weights.publisher import LocalPublisher
from posttrain.weights.shm import ShmTransport

TEMPERATURE = 0.8

sys.path.append(str(Path(__file__).parent))  # of the helpers beside the tests


class Rig:
    """A rollout body of vLLM in `dtype` on `workers` workers, and the float32 policy whose weights it serves."""

    def __init__(self, folder: Path, family: str, *, tied: bool, dtype: str = "float32", workers: int = 1) -> None:
        write_tiny_model(folder, family=family, tied=tied)
        self.policy = PolicyModule(load_causal_lm(str(folder), "float32"), temperature=TEMPERATURE, shared_prefix=True)
        self.dtype, self.runner = getattr(torch, dtype), asyncio.Runner()
        spec = EngineSpec(
            str(folder), dtype, 256, 16, (2, 3), tensor_parallel_size=workers, log_dir=folder / "logs", start_timeout_s=600
        )
        self.body = RolloutBody("rollout-0", engine="vllm", options={}, spec=spec, transport="shm")
        self.engine: Any = self.body.engine
        self.config = WeightsConfig(bucket_bytes=16384, canary_every=1)
        canary = Canary(lambda probe: self.score(probe, 1.0), make_probe(40), self.config, dtype=dtype)
        pool = PublicationPool(ShmTransport(), bucket_bytes=self.config.bucket_bytes, dtype=dtype)
        publisher = LocalPublisher(pool, lambda: whole(self.weights()))
        self.plane = WeightPlane(publisher, [self.body.receiver], self.config, canary=canary)

    def run(self, work: Any) -> Any:
        return self.runner.run(asyncio.wait_for(work, 600))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.policy.model.named_parameters())

    @torch.no_grad()
    def score(self, sequences: Any, temperature: float) -> list[list[float]]:
        """Log-probs of each token from the second on, computed in float32 with the weights as they are published."""
        self.policy.temperature = temperature
        rows = [Row(input_ids=list(s), mask=[False] + [True] * (len(s) - 1), rollout_logprobs=[0.0] * len(s)) for s in sequences]
        packed = self.policy.pack(rows)
        with self.rounded():
            return [part.tolist() for part in self.policy(packed)[0].split(packed.lengths)]

    @contextmanager
    def rounded(self) -> Iterator[None]:
        exact = [parameter.detach().clone() for parameter in self.policy.parameters()]
        for parameter in self.policy.parameters():
            parameter.copy_(parameter.to(self.dtype))
        yield
        for parameter, value in zip(self.policy.parameters(), exact, strict=True):
            parameter.copy_(value)

    async def collect(self, *requests: Request) -> list[Completion]:
        return [completion async for completion in self.body.generate(requests)]

    def gap(self) -> float:
        """The largest difference between what the engine said of its tokens and what the policy says."""
        sampling = Sampling(20, temperature=TEMPERATURE)
        requests = {str(i): Request(str(i), list(range(4, 5 + 7 * i)), 4, i, sampling) for i in range(3)}
        done = self.run(self.collect(*requests.values()))
        scored = self.score([[*requests[c.request_id].prompt_ids, *c.token_ids] for c in done], TEMPERATURE)
        pairs = [(c.logprobs, s[-len(c.token_ids) :]) for c, s in zip(done, scored, strict=True)]
        return max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))

    @torch.no_grad()
    def change(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for parameter in self.policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))

    def close(self) -> None:
        self.run(self.body.close())
        self.run(self.plane.close())
        self.runner.close()


@pytest.fixture(scope="session")
def open_rig(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Rig]]:
    """`with open_rig("qwen3", tied=True) as rig`: a `Rig` in a folder of its own, closed at the end."""

    @contextmanager
    def opened(family: str, **options: Any) -> Iterator[Rig]:
        rig = Rig(tmp_path_factory.mktemp(family), family, **options)
        try:
            yield rig
        finally:
            rig.close()

    return opened
