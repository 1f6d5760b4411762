"""A toy language model and the engine that serves it: few numbers, but every token really comes from the weights in place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from posttrain.errors import WeightSyncError
from posttrain.rollout.engine import Engine, EngineSpec
from posttrain.types import Completion, Request, Sampling
from posttrain.weights.transport import Staged

SPEC = EngineSpec(model_path="", dtype="float32", max_model_len=64, max_num_seqs=1, eos_token_ids=())
TOKENS = 16
LAYERS = 6
Weights = dict[str, torch.Tensor]


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def trained(version: int) -> Weights:
    """The weights of a version; nothing of one is like those of another."""
    noise = torch.Generator().manual_seed(1000 + version)
    return {f"layers.{i}.weight": torch.randn(TOKENS, TOKENS, generator=noise) for i in range(LAYERS)}


def scores(weights: Weights, ids: Sequence[int]) -> torch.Tensor:
    """Log-probs `[len(ids), TOKENS]` of the token after each of `ids`."""
    hidden = torch.eye(TOKENS, dtype=torch.float64)[list(ids)]
    for weight in weights.values():
        hidden = torch.tanh(hidden @ weight.double())
    return (4 * hidden).log_softmax(-1)


def says(weights: Weights, prompt: Sequence[int], count: int = 8) -> list[int]:
    """The most likely continuation."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(scores(weights, ids)[-1].argmax()))
    return ids[len(prompt) :]


def logprobs(weights: Weights, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[float(scores(weights, ids)[t, ids[t + 1]]) for t in range(len(ids) - 1)] for ids in sequences]


class ToyEngine(Engine):
    """`on_write(position, name)` runs before each parameter is written: where tests fail, stall or die half-way.

    `writes` may change what is written, as a corrupting memory would.
    """

    name = "toy"

    def __init__(self, spec: EngineSpec = SPEC, options: Any = None, *, knows_parameters: bool = True) -> None:
        super().__init__(spec, options)
        self.knows_parameters = knows_parameters
        self.on_write: Callable[[int, str], Any] = lambda position, name: None
        self.version: int | None = None
        self.weights: Weights = {}
        self.paused = False
        self.stamp = 0  # added to the version that the engine says it has
        self.starts = self.writes = 0

    async def start(self) -> None:
        self.starts += 1
        self.version, self.invalid, self.weights, self.paused = None, None, {}, False
        self.stamp = 0

    async def generate(self, requests: Sequence[Request]):  # type: ignore[no-untyped-def, override]
        self.refuse_invalid()
        if self.version is None:
            raise WeightSyncError("no weights yet")
        for request in requests:
            ids = says(self.weights, request.prompt_ids, request.sampling.max_tokens)
            yield Completion(request.id, 0, ids, [0.0] * len(ids), [self.version] * len(ids), "length")

    async def ask(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """A continuation of eight tokens and the version that it says it is of."""
        async for completion in self.generate([Request("r", list(prompt), 1, 0, Sampling(8))]):
            return completion.token_ids, completion.versions[0]
        raise AssertionError

    async def abort(self, request_id: str) -> None: ...

    async def pause(self) -> None:
        self.refuse_invalid()
        self.paused = True

    async def apply(self, staged: Staged) -> None:
        assert self.paused
        for position, (name, tensor) in enumerate(staged.tensors()):
            self.writes += 1
            change = self.on_write(position, name)
            if asyncio.iscoroutine(change):
                change = await change
            if change != "leave out":
                self.weights[name] = tensor.clone()
        self.version = staged.version + self.stamp

    async def resume(self) -> None:
        self.paused = False

    def weight_version(self) -> int | None:
        return self.version

    def parameters(self) -> Mapping[str, tuple[int, ...]] | None:
        return {f"layers.{i}.weight": (TOKENS, TOKENS) for i in range(LAYERS)} if self.knows_parameters else None

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return logprobs(self.weights, sequences)

    @property
    def total(self) -> float:
        return sum(float(w.double().sum()) for w in self.weights.values())

    async def close(self) -> None: ...
