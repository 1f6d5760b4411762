"""Why vLLM did not start, told apart: each failure with its fix.

What can be seen from the model folder is checked before any process starts; the rest is read from the exception and the tail
of the engine's log, because vLLM's own exception only says that its worker failed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import EngineStartError

if TYPE_CHECKING:
    from posttrain.rollout.engine import EngineSpec

MIN_CPU_HEAD_DIM = 32

_KV_FIX = (
    "lower rollout.max_model_len or rollout.max_num_seqs, raise rollout.gpu_memory_utilization (on a CPU: "
    "rollout.options.kv_cache_gib), or spread the model with rollout.tensor_parallel_size"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure that vLLM, transformers or the hub reports in words that `pattern` finds."""

    code: str
    message: str
    fix: str
    pattern: str


FAILURES = (
    Failure(
        "gated",
        "the model is gated and this machine is not allowed to read it",
        "accept its licence on the hub, then export HF_TOKEN=…; or point model.name_or_path at a local folder",
        r"gated repo|GatedRepoError|401 Client Error|403 Client Error|access to model .* is restricted",
    ),
    Failure(
        "absent",
        "the model was not found",
        "give model.name_or_path the path of a Hugging Face folder, or a name that this machine can fetch",
        r"is not a local folder and is not a valid model identifier|Repository ?Not ?Found|couldn't connect to"
        r"|LocalEntryNotFoundError|OfflineModeIsEnabled",
    ),
    Failure(
        "architecture",
        "vLLM does not know this architecture",
        "use rollout.engine=hf, or a vLLM that lists the architecture",
        r"architectures? .*(not supported|failed to be inspected)|does not recognize this architecture"
        r"|has no vLLM implementation",
    ),
    Failure(
        "kv-cache",
        "the KV cache does not fit",
        _KV_FIX,
        r"No available memory for the cache blocks|larger than the maximum number of tokens that can be stored in KV cache"
        r"|KV cache is needed, which is larger than the available|less than desired (CPU|GPU) memory utilization"
        r"|less than requested memory for kv|kv cache allocation is less",
    ),
    Failure(
        "memory",
        "the model does not fit into memory",
        "use rollout.dtype=bfloat16, a smaller model, or rollout.tensor_parallel_size",
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
        "choose another rollout.base_port, or end the process that holds it",
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
    """Refuse what the model folder alone shows: path absent, unreadable config, unknown architecture, heads too small."""
    folder = Path(spec.model_path)
    if not folder.exists():
        looks_like_a_path = folder.is_absolute() or spec.model_path.startswith((".", "~")) or spec.model_path.count("/") > 1
        if looks_like_a_path:
            raise EngineStartError(f"there is no model at {spec.model_path}", fix="correct model.name_or_path", code="absent")
        return  # a hub name: vLLM fetches it
    config = _read_config(folder)
    _check_architecture(config, folder)
    _check_head_dim(config, folder)


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
    for known in FAILURES:
        match = re.search(known.pattern, text, re.IGNORECASE)
        if match:
            cause = _line_of(text, match.start())
            message = f"{known.message} ({spec.model_path})"
            return EngineStartError(message, cause=cause, fix=known.fix, where=where, code=known.code)
    cause = _last_error(text) or f"{type(exc).__name__}: {exc}"
    return EngineStartError("vLLM did not start", cause=cause, fix="the log says more", where=where, code="engine-start")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError as exc:
        raise EngineStartError(
            f"{folder} is not a model folder: it has no config.json",
            fix="give model.name_or_path a folder written by save_pretrained", code="absent",
        ) from exc  # fmt: skip
    except json.JSONDecodeError as exc:
        raise EngineStartError(f"{path} is not JSON: {exc}", fix="write the folder again", code="config") from exc
    return config


def _check_architecture(config: dict[str, Any], folder: Path) -> None:
    from vllm.model_executor.models import ModelRegistry

    architectures = config.get("architectures") or []
    known = ModelRegistry.get_supported_archs()
    if not architectures:
        fix = 'add "architectures": ["…ForCausalLM"] to it'
        raise EngineStartError(f"{folder}/config.json names no architecture", fix=fix, code="architecture")
    if not any(a in known for a in architectures):
        raise EngineStartError(
            f"vLLM does not know the architecture {', '.join(architectures)}",
            cause=f"model_type {config.get('model_type')!r} in {folder}/config.json",
            fix="use rollout.engine=hf, or a vLLM that lists the architecture",
            code="architecture",
        )


def _check_head_dim(config: dict[str, Any], folder: Path) -> None:
    from vllm.platforms import current_platform

    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    if current_platform.is_cpu() and head_dim is not None and head_dim < MIN_CPU_HEAD_DIM:
        raise EngineStartError(
            f"the model has heads of {head_dim} elements; vLLM's CPU attention takes {MIN_CPU_HEAD_DIM} or more",
            cause=f"{folder}/config.json: hidden_size {hidden}, num_attention_heads {heads}",
            fix="use rollout.engine=hf, or a model with fewer, larger heads",
            code="head-dim",
        )


def _tail(log: Path | None, size: int = 200_000) -> str:
    if log is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return file.read().decode(errors="replace")


def _line_of(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : text.find("\n", at) if "\n" in text[at:] else None]
    return re.sub(r"^.*?(?=\w+(Error|Exception)?:)", "", line).strip()[:500]


def _last_error(text: str) -> str:
    errors = re.findall(r"^.*?\b(\w*(?:Error|Exception): .+)$", text, re.MULTILINE)
    return errors[-1][:500] if errors else ""
