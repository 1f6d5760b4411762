"""The embedded engine: a transformers model of its own in this process, decoding in a thread.

One `generate` call is one cohort: its rows run in waves of `max_num_seqs` and never share a forward with another call's, so
the same requests under the same weights give the same bits. Weights change between two decode steps; running requests then
go on under the new ones with a recomputed cache, and every token carries the version that sampled it. Calls run in the
order in which they come, and rows in the order given: `Request.priority` is ignored, which changes nothing but who waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from posttrain.data.packer import load_tokenizer
from posttrain.errors import RunInterrupted, WeightSyncError
from posttrain.rollout.decode import Slot, Wave
from posttrain.rollout.engine import Engine, EngineSpec
from posttrain.rollout.gate import Gate
from posttrain.rollout.module import build_module, check_module, copy_weights, score
from posttrain.rollout.sampling import request_noise
from posttrain.types import Completion, FinishReason, Request, Sampling

if TYPE_CHECKING:
    from posttrain.weights.transport import Staged

Post: TypeAlias = Callable[[list[Completion] | None], None]


class HFEngine(Engine):
    """Transformers in this process; for CPUs, small models and runs that must be reproducible to the bit."""

    name: ClassVar[str] = "hf"

    def __init__(self, spec: EngineSpec, options: Any = None) -> None:
        super().__init__(spec, options)
        self._reset()

    def _reset(self) -> None:
        self._model: Any = None
        self._tokenizer: Any = None
        self._version: int | None = None
        self._gate = Gate()
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")

    @classmethod
    def preflight(cls, spec: EngineSpec, options: Any) -> None:
        """The model absent, of an unknown architecture, in need of its own code, or with attention that is not here."""
        check_module(spec)

    async def start(self) -> None:
        """Build the module from the folder's config with seeded placeholder weights; the weight files are not read.

        After `close` it begins anew: without weights, and valid again.
        """
        if self._gate.ended:
            self._reset()
            self.invalid = None
        self._model = await asyncio.wrap_future(self._thread.submit(build_module, self.spec))

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:  # type: ignore[override]
        self.refuse_invalid()
        if self._version is None:
            raise WeightSyncError("the hf engine has no weights yet", cause="generate was called before the first commit",
                                  fix="sync the policy's weights first", code="no-weights", retryable=False)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[list[Completion] | None]()
        stop = threading.Event()

        def post(done: list[Completion] | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, done)

        ids = {r.id for r in requests}
        self._running |= ids
        job = self._thread.submit(self._run, list(requests), post, stop)
        job.add_done_callback(lambda ended: post(None) if ended.cancelled() else None)  # the engine was closed before it began
        try:
            while (batch := await queue.get()) is not None:
                for completion in batch:
                    yield completion
            if job.cancelled():
                raise RunInterrupted("the hf engine was closed", fix="go on with --resume", code="engine-dead")
            await asyncio.wrap_future(job)
        finally:
            stop.set()
            self._running -= ids
            self._aborted -= ids

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._aborted.add(request_id)

    async def pause(self) -> None:
        await asyncio.to_thread(self._gate.close)

    async def apply(self, staged: Staged) -> None:
        """Raises WeightSyncError outside of a pause, and when names, shapes or coverage differ; nothing is written then."""
        if not self._gate.closed:
            raise WeightSyncError("weights may only change between pause and resume",
                                  cause="apply was called on a running engine", fix="await pause() first", retryable=False)
        await asyncio.to_thread(copy_weights, self._model, staged)
        self._version = staged.version

    async def resume(self) -> None:
        self._gate.open()

    def weight_version(self) -> int | None:
        return self._version

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await asyncio.to_thread(self._score, [list(ids) for ids in sequences])

    def _score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Between two decode steps, not behind all that waits to be decoded."""
        with self._gate.forward():
            return score(self._model, sequences)

    def parameters(self) -> Mapping[str, tuple[int, ...]] | None:
        return {n: tuple(p.shape) for n, p in self._model.named_parameters()} if self._model is not None else None

    async def close(self) -> None:
        self._gate.shut()
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        self._model = None

    @torch.inference_mode()
    def _run(self, requests: list[Request], post: Post, stop: threading.Event) -> None:
        """Decode all requests in waves; runs in the engine's thread. None ends the stream, also after an error."""
        try:
            for sampling, prompts, slots in self._waves(requests, post):
                self._decode(sampling, prompts, slots, post, stop)
        finally:
            post(None)

    def _decode(self, sampling: Sampling, prompts: list[list[int]], slots: list[Slot], post: Post, stop: threading.Event) -> None:
        wave: Wave | None = None
        seen: int | None = None
        while wave is None or wave.running:
            with self._gate.forward():
                if stop.is_set() or self._gate.ended:
                    return
                version = self._version
                assert version is not None
                if wave is None:
                    spell = self._spell if sampling.stop else None
                    wave = Wave(self._model, prompts, slots, sampling, self.spec.eos_token_ids, spell)
                elif version != seen:
                    wave.recompute()
                seen = version
                done = [c for request_id in sorted(tuple(self._aborted)) for c in wave.abort(request_id)]
                done += wave.step(version) if wave.running else []
            if done:
                post(done)

    def _waves(self, requests: list[Request], post: Post) -> Iterator[tuple[Sampling, list[list[int]], list[Slot]]]:
        """Rows in request order, cut where the sampling settings change and every `max_num_seqs` rows."""
        accepted = []
        for request in requests:
            problem, budget = self._check(request)
            if problem or budget == 0:
                post([_empty(request, i, "error" if problem else "length", problem) for i in request.indices])
            else:
                accepted.append((request, budget))
        for sampling, same in groupby(accepted, key=lambda item: replace(item[0].sampling, max_tokens=0)):
            rows = ((r, i, budget, noise) for r, budget in same for noise in [request_noise(r)] for i in r.indices)
            while chunk := list(islice(rows, self.spec.max_num_seqs)):
                ids = list(dict.fromkeys(r.id for r, *_ in chunk))
                prompts = {r.id: list(r.prompt_ids) for r, *_ in chunk}
                slots = [Slot(r.id, i, ids.index(r.id), budget, noise[i]) for r, i, budget, noise in chunk]
                yield sampling, [prompts[name] for name in ids], slots

    def _spell(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.spec.model_path, trust_remote_code=self.spec.trust_remote_code)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _check(self, request: Request) -> tuple[str | None, int]:
        """Why a request cannot run, and the tokens it may generate."""
        length, limit = len(request.prompt_ids), self.spec.max_model_len
        if not length:
            return "the prompt is empty", 0
        if length >= limit:
            return f"the prompt has {length} tokens, max_model_len={limit} leaves no room for a completion", 0
        return None, max(0, min(request.sampling.max_tokens, limit - length))


def _empty(request: Request, index: int, reason: FinishReason, problem: str | None) -> Completion:
    return Completion(request.id, index, [], [], [], reason, problem)
