"""Why vLLM did not start, told apart: each failure with its fix. And whether an engine that died had run out of memory.

What can be seen from the model's config is checked before any process starts; the rest is read from the exception and the tail
of the engine's log, because vLLM's own exception only says that its worker failed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.hub import HUB_FAILURES, Failure, known_failure, model_config
from posttrain.errors import EngineStartError
from posttrain.placement.out_of_memory import ran_out

if TYPE_CHECKING:
    from posttrain.rollout.engine import EngineSpec

MIN_CPU_HEAD_DIM = 32

_ERROR = re.compile(r"\bERROR\b|\w(Error|Exception)\b|bad_alloc")

_WIDER = "spread the model: rollout.tensor_parallel_size and grid.ranks together, under grid.backend=ray"
_KV_FIX = (
    "lower rollout.max_model_len or rollout.max_num_seqs, raise rollout.gpu_memory_utilization (on a CPU: "
    f"rollout.options.kv_cache_gib), or {_WIDER}"
)


FAILURES = (
    *HUB_FAILURES,
    Failure(
        "architecture",
        "vLLM does not know this architecture",
        "use rollout.engine=hf, or a vLLM that lists the architecture",
        r"architectures? .*(not supported|failed to be inspected)|does not recognize this architecture"
        r"|has no vLLM implementation",
    ),
    Failure(
        "device-memory",
        "the device has less free memory than the engine may take",
        "lower rollout.gpu_memory_utilization (with rollout.max_model_len and rollout.max_num_seqs, if the KV cache then lacks "
        f"room), end what else uses the device, or {_WIDER}",
        r"Free memory on device .* is less than|less than desired (CPU|GPU) memory utilization",
    ),
    Failure(
        "kv-cache",
        "the KV cache does not fit",
        _KV_FIX,
        r"No available memory for the cache blocks|larger than the maximum number of tokens that can be stored in KV cache"
        r"|KV cache is needed, which is larger than the available"
        r"|less than requested memory for kv|kv cache allocation is less",
    ),
    Failure(
        "memory",
        "the model does not fit into memory",
        f"use rollout.dtype=bfloat16 or a smaller model, or {_WIDER}",
        r"CUDA out of memory|OutOfMemoryError|Cannot allocate memory|MemoryError",
    ),
    Failure(
        "max-model-len",
        "rollout.max_model_len is longer than the model's positions",
        "lower rollout.max_model_len to the model's max_position_embeddings",
        r"max_model_len.* is greater than the derived max_model_len",
    ),
    Failure(
        "port",
        "a port that the engine needs is taken",
        "start again: vLLM takes free ports, and another process was faster; if VLLM_PORT is set, unset it or choose another",
        r"Address already in use|EADDRINUSE",
    ),
    Failure(
        "head-dim",
        "the attention kernel does not take this head size",
        "use rollout.engine=hf for models with such small heads",
        r"head[_ ]size:? \S+ (is )?not supported|Unsupported head_?[ ]?size",
    ),
    Failure(
        "vllm-plugins",
        "vLLM's process did not load the plug-in that receives the weights",
        "install posttrain in the environment of the engine, and unset VLLM_PLUGINS",
        r"Invalid weight transfer backend",
    ),
)
"""Looked for in this order: the first that is found names the failure."""


def check_model(spec: EngineSpec) -> None:
    """Refuse what the model's config alone shows: model absent or gated, unknown architecture, heads too small or too few."""
    config = model_config(spec.model_path)
    _check_architecture(config, spec.model_path)
    _check_head_dim(config, spec.model_path)
    _check_workers(config, spec)


def start_error(exc: BaseException, spec: EngineSpec, log: Path | None) -> EngineStartError:
    """The failure of a start as one message with a cause and a fix; names the log."""
    if isinstance(exc, EngineStartError):
        return exc
    where = str(log) if log else ""
    if isinstance(exc, TimeoutError):
        return EngineStartError(
            f"vLLM did not start within {spec.start_timeout_s:.0f} s",
            cause="see the log for how far it came", fix="raise rollout.start_timeout_s", where=where, code="start-deadline",
        )  # fmt: skip
    text = f"{exc}\n{_tail(log)}"
    if known := known_failure(FAILURES, spec.model_path, text, where=where):
        return known
    cause = _last_error(text) or f"{type(exc).__name__}: {exc}"
    return EngineStartError("vLLM did not start", cause=cause, fix="the log says more", where=where, code="engine-start")


def death_cause(log: Path | None, start: int = 0) -> str:
    """Where to look for why an engine died; before it the last line from byte `start` on that says that memory ran out.

    Only lines that tell of an error: vLLM also advises on memory that nobody lacks.
    """
    errors = (line for line in reversed(_tail(log, start=start).splitlines()) if _ERROR.search(line))
    said = next((line.strip()[:500] for line in errors if ran_out(RuntimeError(line))), "")
    return "; ".join(filter(None, [said, f"see {log}"]))


def _check_architecture(config: dict[str, Any], model: str) -> None:
    from vllm.model_executor.models import ModelRegistry

    architectures = config.get("architectures") or []
    known = ModelRegistry.get_supported_archs()
    if not architectures:
        fix = 'add "architectures": ["…ForCausalLM"] to it'
        raise EngineStartError(f"{model}/config.json names no architecture", fix=fix, code="architecture")
    if not any(a in known for a in architectures):
        raise EngineStartError(
            f"vLLM does not know the architecture {', '.join(architectures)}",
            cause=f"model_type {config.get('model_type')!r} in {model}/config.json",
            fix="use rollout.engine=hf, or a vLLM that lists the architecture",
            code="architecture",
        )


def _check_head_dim(config: dict[str, Any], model: str) -> None:
    from vllm.platforms import current_platform

    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    if current_platform.is_cpu() and head_dim is not None and head_dim < MIN_CPU_HEAD_DIM:
        raise EngineStartError(
            f"the model has heads of {head_dim} elements; vLLM's CPU attention takes {MIN_CPU_HEAD_DIM} or more",
            cause=f"{model}/config.json: hidden_size {hidden}, num_attention_heads {heads}",
            fix="use rollout.engine=hf, or a model with fewer, larger heads",
            code="head-dim",
        )


def _check_workers(config: dict[str, Any], spec: EngineSpec) -> None:
    heads, workers = config.get("num_attention_heads"), spec.tensor_parallel_size
    if heads is not None and heads % workers:
        raise EngineStartError(
            f"{heads} attention heads cannot be divided among {workers} workers",
            cause=f"{spec.model_path}/config.json: num_attention_heads {heads}",
            fix=f"set rollout.tensor_parallel_size to one of {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}",
            where="rollout.tensor_parallel_size",
            code="tensor-parallel",
        )


def _tail(log: Path | None, size: int = 200_000, start: int = 0) -> str:
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - size))
        return file.read().decode(errors="replace")


def _last_error(text: str) -> str:
    errors = re.findall(r"^.*?\b(\w*(?:Error|Exception): .+)$", text, re.MULTILINE)
    return errors[-1][:500] if errors else ""
