"""Endpoints for the tests: in front of a real engine with a tiny model, or of one that says what a script has it say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import torch
from chat_styles import CHATML, Style, write_style

from posttrain.data.packer import DataPacker, init_data_packer
from posttrain.endpoint.server import Endpoint
from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.hf import HFEngine
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Completion, Request, Sampling

TURNS = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
MODEL = "tiny"
LIMIT = 256


class Weights:
    """A publication of a model's parameters, without a plane; `scale` tells versions apart."""

    def __init__(self, model: Any, version: int, scale: float = 1.0) -> None:
        self.version, self.model, self.scale = version, model, scale

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value.detach() * self.scale) for name, value in self.model.named_parameters())


async def put(engine: HFEngine, weights: Any) -> None:
    await engine.pause()
    try:
        await engine.apply(weights)
    finally:
        await engine.resume()


class Watched:
    """An engine's calls, kept: requests, completions and aborts."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        self.completions: list[Completion] = []
        self.aborted: list[str] = []

    async def start(self) -> None:
        await self.engine.start()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        self.requests += requests
        async for done in self.engine.generate(requests):
            self.completions.append(done)
            yield done

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        await self.engine.abort(request_id)

    async def close(self) -> None:
        await self.engine.close()


class Script:
    """An engine whose answers are texts, by `say(prompt text)`; None hangs until the request is given up."""

    def __init__(self, say: Callable[[str], Any]) -> None:
        self.say = say
        self.packer: Any = None
        self.version = 1
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.cancelled = 0
        self.running = asyncio.Event()

    async def start(self) -> None: ...

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        for request in requests:
            self.requests.append(request)
            said = self.say(self.packer.spell(request.prompt_ids))
            self.running.set()
            if said is None:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled += 1
            if isinstance(said, BaseException):
                raise said
            if isinstance(said, Completion):
                said.request_id = request.id
                yield said
                continue
            for index in range(request.n):
                await asyncio.sleep(0)
                ids = [*self.packer.encode(said), self.packer.special_tokens.stop[0]]
                reason: Any = "stop" if len(ids) <= request.sampling.max_tokens else "length"
                ids = ids[: request.sampling.max_tokens]
                count = len(ids)
                yield Completion(request.id, index, ids, [-0.5] * count, [self.version] * count, reason)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def close(self) -> None: ...


def on_model(folder: Path, work: Callable[[Endpoint, Watched, DataPacker, Any], Any], **options: Any) -> Any:
    """What `work(endpoint, engine, packer, model)` comes to, with a real tiny model on the embedded engine."""
    model = write_tiny_model(folder)
    packer = init_data_packer(str(folder), chat_template=TURNS)

    async def main() -> Any:
        engine = HFEngine(EngineSpec(str(folder), "float32", LIMIT, 64, (2,)))
        await engine.start()
        await put(engine, Weights(model, 1))
        watched = Watched(engine)
        endpoint = Endpoint(watched, packer, max_model_len=LIMIT, model=MODEL, one_by_one=True, **options)
        await endpoint.start()
        try:
            async with asyncio.timeout(120):
                return await work(endpoint, watched, packer, model)
        finally:
            await endpoint.close()
            await engine.close()

    return asyncio.run(main())


def on_script(
    folder: Path, say: Callable[[str], Any], work: Callable[[Endpoint, Script], Any], *, style: Style = CHATML, **options: Any
) -> Any:
    """What `work(endpoint, engine)` comes to, with an engine that says what `say` has it say, in a chat of `style`."""
    packer = init_data_packer(str(write_style(folder, style)))

    async def main() -> Any:
        engine = Script(say)
        engine.packer = packer
        endpoint = Endpoint(engine, packer, **{"max_model_len": 4096, "model": MODEL, **options})
        await endpoint.start()
        try:
            async with asyncio.timeout(60):
                return await work(endpoint, engine)
        finally:
            await endpoint.close()

    return asyncio.run(main())


def session_of(endpoint: Endpoint, **options: Any) -> Any:
    return endpoint.open(**{"sampling": Sampling(max_tokens=16), "seed": 7, "name": "0:env:1/0", **options})


def client_of(session: Any, **options: Any) -> openai.AsyncOpenAI:
    """The client of a session, or of the endpoint itself."""
    key = getattr(session, "api_key", "none")
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=key, **{"max_retries": 0, "timeout": 60, **options})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
