"""The `vllm` engine: vLLM's AsyncLLM in processes of its own, its weights replaced in place through our receiver.

It starts from seeded dummy weights and refuses to generate before the first commit, so that every parameter it ever serves
came from the policy. Each sample is a request of its own with a seed derived from the request's. Log-probs are vLLM's
`processed_logprobs`: those of the distribution sampled from. The versions of tokens come from vLLM's weight-version spans.

When a call into the engine times out or an update fails half-way, its replies and its weights can no longer be trusted: it
is killed at once, beside the event loop, and says so whenever it is asked to generate; what was still running in it is lost.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.errors import EngineStartError, RunInterrupted, WeightSyncError
from posttrain.placement import stacks
from posttrain.rollout.engine import Engine, EngineSpec
from posttrain.rollout.vllm_errors import check_model, death_cause, start_error
from posttrain.rollout.vllm_processes import children, engine_processes, forget_names, kill, process_name
from posttrain.rollout.vllm_start import (
    check_api,
    check_cores,
    check_installed,
    check_plugin_visible,
    engine_arguments,
    environment,
    log_files,
    start_llm,
)
from posttrain.types import Completion, FinishReason, Request, Sampling

if TYPE_CHECKING:
    import psutil  # type: ignore[import-untyped]
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from posttrain.weights.transport import Staged

STACKS_S = 2.0
"""How long the processes may take to write where they are."""

_FINISH: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


class VllmEngine(Engine):
    """vLLM as the rollout engine: continuous batching, prefix cache, updates in flight."""

    name: ClassVar[str] = "vllm"
    needs: tuple[str, ...] = ("between_processes",)
    provides: tuple[str, ...] = ("tensor_parallel",)
    shared_staging: ClassVar[bool] = True

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Options of the vllm engine."""

        enforce_eager: bool = True  # no compilation; on a CPU it saves a minute of start and costs nothing measurable
        kv_cache_gib: int = 1  # CPU: memory of the KV cache (VLLM_CPU_KVCACHE_SPACE)
        cpu_cores: str = ""  # CPU: cores of each worker's threads, like 0-3 or 0-3|4-7; empty: all of this process, divided
        update_timeout_s: float = 120.0  # deadline of each call of a weight update
        engine_args: dict[str, Any] = field(default_factory=dict)  # further arguments of vLLM's AsyncEngineArgs

    def __init__(self, spec: EngineSpec, options: Any = None) -> None:
        super().__init__(spec, options)
        self.options: VllmEngine.Options
        self._llm: AsyncLLM | None = None
        self._processes: list[psutil.Process] = []
        self._killing: threading.Thread | None = None
        self._log: Path | None = None
        self._log_start = 0  # an engine before this one wrote to the same file
        self._version: int | None = None
        self._paused = self._abandoned = False
        self._receiver: tuple[str, str | None] | None = None

    # ---- life

    @classmethod
    def preflight(cls, spec: EngineSpec, options: Any) -> None:
        """vLLM absent or of another version, our plug-in hidden, the model absent or not one that vLLM can run here."""
        check_installed()
        check_plugin_visible()
        check_cores(options, spec.tensor_parallel_size)
        # torch is loaded by now, so TORCH_LOGS comes too late for this process
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
        with environment(options, *log_files(spec)):
            check_api()
            check_model(spec)

    async def start(self) -> None:
        await asyncio.to_thread(self.preflight, self.spec, self.options)
        self._log, log_config = log_files(self.spec)
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        before = children()
        self._abandoned = False
        launch = asyncio.create_task(asyncio.to_thread(self._launch, log_config))
        try:
            await asyncio.wait_for(asyncio.shield(launch), self.spec.start_timeout_s)
        except BaseException as exc:
            await self._abandon(launch, before)
            if not isinstance(exc, Exception):
                raise
            raise start_error(exc, self.spec, self._log) from exc
        self._processes = engine_processes(self._llm)
        forget_names(self._processes)
        self._version = self.invalid = self._receiver = None
        self._paused = False

    def _launch(self, log_config: Path) -> None:
        """Runs in a thread."""
        assert self._log is not None
        with environment(self.options, self._log, log_config, workers=self.spec.tensor_parallel_size):
            arguments = engine_arguments(self.spec, self.options)
            if not self._abandoned:
                self._llm = start_llm(arguments)

    async def _abandon(self, launch: asyncio.Task[None], before: Sequence[psutil.Process]) -> None:
        """End what a failed or late launch has started; while its thread runs, it may start more."""
        self._abandoned = True
        while not launch.done():
            await asyncio.to_thread(lambda: kill(children(before)))
            await asyncio.sleep(0.1)
        await asyncio.to_thread(lambda: kill(children(before)))
        await self.close()

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(partial(llm.shutdown, timeout=15.0))
        self._kill()
        if self._killing is not None:
            await asyncio.to_thread(self._killing.join)

    async def stacks(self) -> dict[str, str]:
        """What the core and the workers write of themselves; of one that does not within 2 s, why."""
        names = {process.pid: process_name(process) for process in self._processes}
        found = await stacks.ask(list(names), timeout=STACKS_S)
        return {names[pid]: text for pid, text in found.items()}

    # ---- generation

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        return self._stream(self._ready(), requests)

    async def _stream(self, llm: AsyncLLM, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        finished: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._sample(llm, request, i, finished), name=f"sample {_child_id(request.id, i)}")
            for request in requests
            for i in request.indices
        ]
        try:
            for _ in tasks:
                item = await finished.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, llm: AsyncLLM, request: Request, index: int, finished: asyncio.Queue[Completion | Exception]) -> None:
        try:
            problem, budget = self._budget(request)
            if not budget:
                finished.put_nowait(Completion(request.id, index, [], [], [], "error" if problem else "length", problem))
                return
            params = _sampling_params(request.sampling, budget, sample_seed(request.seed, index), self.spec.eos_token_ids)
            output = await self._run(llm, list(request.prompt_ids), params, _child_id(request.id, index), request.priority)
            finished.put_nowait(_completion(request.id, index, output))
        except Exception as exc:
            finished.put_nowait(exc)

    def _budget(self, request: Request) -> tuple[str | None, int]:
        """Why a request cannot run, and the tokens it may generate."""
        length, limit = len(request.prompt_ids), self.spec.max_model_len
        if not length:
            return "the prompt is empty", 0
        if length >= limit:
            return f"the prompt has {length} tokens, max_model_len={limit} leaves no room for a completion", 0
        return None, min(request.sampling.max_tokens, limit - length)

    async def _run(
        self, llm: AsyncLLM, prompt: list[int], params: SamplingParams, request_id: str, priority: int = 0
    ) -> RequestOutput:
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            stream = llm.generate(TokensPrompt(prompt_token_ids=prompt), params, request_id, priority=priority)
            outputs = [output async for output in stream]
        except EngineDeadError as exc:
            raise self._dead() from exc
        if self.invalid is not None:  # it came to its end before the engine did
            raise self._dead()
        return outputs[-1]

    def _dead(self) -> RunInterrupted:
        return RunInterrupted(
            self.invalid or "the vLLM engine died",
            cause=death_cause(self._log, self._log_start),
            fix="read the log, then --resume",
            code="engine-dead",
        )

    async def abort(self, request_id: str) -> None:
        if self._llm is not None:
            active = self._llm.output_processor.external_req_ids
            await self._llm.abort([child for child in list(active) if _parent_id(child) == request_id])

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        llm = self._ready()
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        calls = (self._run(llm, list(ids), params, f"probe/{i}") for i, ids in enumerate(sequences))
        outputs = await asyncio.gather(*calls)
        return [
            [position[token].logprob for token, position in zip(list(ids)[1:], (output.prompt_logprobs or [])[1:], strict=True)]
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    # ---- weights

    async def pause(self) -> None:
        llm = self._alive()
        await self._within("pause", llm.pause_generation(mode="keep", clear_cache=False))
        self._paused = True

    async def resume(self) -> None:
        llm = self._alive()
        await self._within("resume", llm.resume_generation())
        self._paused = False

    async def apply(self, staged: Staged) -> None:
        llm = self._alive()
        if not self._paused:
            raise WeightSyncError("apply outside of pause and resume", cause="a forward may be reading the weights")
        try:
            await self._update(llm, staged)
        except BaseException as exc:
            why = f"the update to version {staged.version} failed half-way: {_root_cause(exc)}"
            self.invalidate(why)
            if isinstance(exc, Exception) and not isinstance(exc, WeightSyncError):
                raise WeightSyncError(why, cause=f"see {self._log}") from exc
            raise
        self._version = staged.version

    async def _update(self, llm: AsyncLLM, staged: Staged) -> None:
        receiver = (staged.plan.digest, staged.region.path)
        if receiver != self._receiver:
            init = {"plan": staged.plan.to_dict(), "path": staged.region.path}
            await self._rpc(llm, "init_weight_transfer_engine", init_info=init)
            self._receiver = receiver
        await self._rpc(llm, "start_weight_update")
        update = {"epoch": staged.epoch, "plan_digest": staged.plan.digest, "digests": list(staged.digests)}
        await self._rpc(llm, "update_weights", update_info=update)
        await self._rpc(llm, "finish_weight_update")
        if await self._within("reset_prefix_cache", llm.reset_prefix_cache(reset_running_requests=True)) is not True:
            raise WeightSyncError("the prefix cache was not reset", cause="cached prefixes of the old weights would be served")
        await self._within("stamp", llm.update_weight_version(str(staged.version)))

    def weight_version(self) -> int | None:
        return self._version

    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """As transformers names them: what the policy publishes and `load_weights` takes. Built without memory."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        trust = self.spec.trust_remote_code
        config = AutoConfig.from_pretrained(self.spec.model_path, trust_remote_code=trust)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    # ---- what is left when something went wrong

    def _alive(self) -> AsyncLLM:
        self.refuse_invalid()
        if self._llm is None:
            raise EngineStartError("the vLLM engine is not running", fix="await start() first")
        return self._llm

    def _ready(self) -> AsyncLLM:
        llm = self._alive()
        if self._version is None:
            raise WeightSyncError(
                "the vllm engine has no weights yet",
                cause="it starts from dummy weights and serves after the first commit",
                fix="sync the policy's weights first",
                code="no-weights",
                retryable=False,
            )
        return llm

    async def _rpc(self, llm: AsyncLLM, method: str, **kwargs: Any) -> None:
        limit = self.options.update_timeout_s
        await self._within(method, llm.collective_rpc(method, timeout=limit, kwargs=kwargs))

    async def _within(self, what: str, call: Any) -> Any:
        try:
            # the worker's own deadline comes first, so that its message survives
            return await asyncio.wait_for(call, self.options.update_timeout_s + 5.0)
        except TimeoutError as exc:
            why = f"{what} did not return within {self.options.update_timeout_s:.0f} s"
            self.invalidate(why)
            raise WeightSyncError(f"the vllm engine: {why}", cause=f"see {self._log}", code="deadline") from exc

    def invalidate(self, cause: str) -> None:
        """Kill the engine: late replies would answer the wrong calls, and a half-updated model would be served."""
        super().invalidate(self.invalid or cause)
        self._version = None
        self._kill()

    def _kill(self) -> None:
        """Begin to end the processes: it may take seconds, and a thread waits for them. `close` waits for the thread."""
        if self._processes:
            self._killing = threading.Thread(target=kill, args=(self._processes,), name="posttrain-kill")
            self._killing.start()
        self._processes = []


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request: 63 bits, a function of both."""
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "big") >> 1


def _sampling_params(sampling: Sampling, max_tokens: int, seed: int, eos_token_ids: Sequence[int]) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop = sampling.stop_token_ids if sampling.ignore_eos else (*eos_token_ids, *sampling.stop_token_ids)
    return SamplingParams(
        n=1,
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        stop_token_ids=list(stop),
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=not sampling.stop,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(request_id: str, index: int, output: RequestOutput) -> Completion:
    sample = output.outputs[0]
    tokens = list(sample.token_ids)
    logprobs = list(sample.logprobs.logprobs) if sample.logprobs is not None else []  # type: ignore[union-attr]
    versions = [int(span.version) for span in sample.weight_versions or () for _ in range(span.start, span.end)]
    if not len(tokens) == len(logprobs) == len(versions):
        raise RunInterrupted(
            f"vLLM returned {len(tokens)} tokens, {len(logprobs)} log-probs and {len(versions)} versions for {request_id}/{index}"
        )
    return Completion(request_id, index, tokens, logprobs, versions, _FINISH.get(sample.finish_reason, "error"))


def _child_id(request_id: str, index: int) -> str:
    return f"{request_id}/{index}"


def _parent_id(child_id: str) -> str:
    return child_id.rpartition("/")[0]


def _root_cause(exc: BaseException) -> str:
    text = str(exc).strip() or type(exc).__name__
    return text.removeprefix("Call to collective_rpc method failed: ")
