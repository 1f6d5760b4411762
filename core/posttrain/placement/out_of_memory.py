"""What to do when memory ran out, wherever it did: five steps in the order that keeps training the same for longest.

One step at a time, a short run after each, and stop when it fits. Every value that is offered is legal for the run's own batch,
grid and lengths; a step that cannot help this run says so instead of offering something.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from posttrain.errors import EXIT_ENGINE, EngineStartError, OutOfMemory, PosttrainError, WeightSyncError
from posttrain.placement.grid import resolve_grid
from posttrain.placement.memory import micro_batch_tokens

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig

ANCHOR = "troubleshooting.md#out-of-memory"
UTILIZATION = (0.4, 0.25, 0.2)
"""Shares of the device that are worth a try for an engine beside a policy."""

_TYPES = ("OutOfMemoryError", "OutOfMemory", "MemoryError")
_WORDS = re.compile(
    r"out[ _]of[ _]memory|running low on memory|can't allocate memory|not enough memory: you tried|cannot allocate memory"
    r"|std::bad_alloc"
    r"|no available memory for the cache blocks|free memory on device .* is less than|OutOfMemoryError|kv cache is needed",
    re.IGNORECASE,
)
_START_CODES = ("kv-cache", "device-memory", "memory")
_OTHER_FIX = "shm"
"""Too small a /dev/shm has a fix of its own."""


@contextmanager
def memory_explained(config: RunConfig) -> Iterator[None]:
    """Turn what the block raises because memory ran out into OutOfMemory with the steps for this run."""
    try:
        yield
    except Exception as exc:
        found = explain(exc, config)
        if found is None or found is exc:
            raise
        raise found from exc


def explain(exc: BaseException, config: RunConfig) -> OutOfMemory | None:
    """OutOfMemory with the steps for this run; None when `exc` is not about memory."""
    said = ran_out(exc)
    if said is None:
        return None
    steps = "".join(f"\n         {line}" for line in recovery_steps(config, exc))
    found = OutOfMemory(
        exc.message if isinstance(exc, PosttrainError) else f"out of memory: {type(exc).__name__}",
        cause=said,
        fix="one change at a time, in this order, and stop as soon as it fits:" + steps,
        where=exc.where if isinstance(exc, PosttrainError) else "",
        anchor=ANCHOR,
    )
    if isinstance(exc, EngineStartError):
        found.exit_code = EXIT_ENGINE
    return found


def ran_out(exc: BaseException | None) -> str | None:
    """The line of `exc`, or of what led to it, that says that memory ran out; None when nothing does."""
    if getattr(exc, "code", None) == _OTHER_FIX:
        return None
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        text = f"{exc.message}\n{exc.cause}" if isinstance(exc, PosttrainError) else str(exc)
        if match := _WORDS.search(text):
            return _line(text, match.start())
        if isinstance(exc, MemoryError) or type(exc).__name__ in _TYPES:
            return (exc.cause if isinstance(exc, PosttrainError) else "") or f"{type(exc).__name__} {exc}".strip()
        if isinstance(exc, BaseExceptionGroup):
            return next(filter(None, map(ran_out, exc.exceptions)), None)
        exc = exc.__cause__ or exc.__context__
    return None


def recovery_steps(config: RunConfig, exc: BaseException | None = None) -> list[str]:
    """The five steps, numbered; before them what goes first for a weight update or an engine's start."""
    steps = (_utilization, _micro_batch, _lengths, _images, _stop)
    return [*_first(config, exc), *(f"{number} {step(config)}" for number, step in enumerate(steps, 1))]


def _first(config: RunConfig, exc: BaseException | None) -> list[str]:
    r = config.rollout
    if isinstance(exc, WeightSyncError):
        lanes, size = config.weights.max_concurrent_lanes or "all", config.weights.bucket_bytes
        return [
            f"- first, it was a weight update: lower weights.max_concurrent_lanes (lanes that pull at once, now {lanes}) "
            f"or weights.bucket_bytes (now {size})"
        ]
    if isinstance(exc, EngineStartError) and exc.code in _START_CODES:
        cpu = "; on a CPU raise rollout.options.kv_cache_gib" if r.engine == "vllm" else ""
        return [
            f"- first, the engine did not fit: lower rollout.max_model_len (now {r.max_model_len}) or rollout.max_num_seqs "
            f"(now {r.max_num_seqs}), or change rollout.gpu_memory_utilization (now {r.gpu_memory_utilization}): higher for "
            f"a KV cache that lacks room, lower where others use the device too{cpu}"
        ]
    return []


def _utilization(config: RunConfig) -> str:
    r, key = config.rollout, "rollout.gpu_memory_utilization"
    if r.engine != "vllm":
        return f"{key}: nothing to lower, engine {r.engine} reserves no memory"
    if config.grid.backend == "ray" and config.grid.gpu_placement == "disaggregated":
        return f"{key}: nothing to gain for the policy, the engines have devices of their own"
    lower = [str(value) for value in UTILIZATION if value < r.gpu_memory_utilization]
    if not lower:
        return f"{key}={r.gpu_memory_utilization} is low already"
    return f"{key}={', then '.join(lower)} (now {r.gpu_memory_utilization}; on a GPU; slower, training stays the same)"


def _micro_batch(config: RunConfig) -> str:
    from posttrain.config.rules import batch_plan

    plan, rl = batch_plan(config), config.rl
    tokens, _ = micro_batch_tokens(config, resolve_grid(config.grid))
    now, longest = plan.micro, config.rollout.max_model_len
    if now is not None:
        lower = [micro for micro in plan.legal_micros if micro < now]
    else:
        lower = [micro for micro in plan.legal_micros if micro // plan.dp_world * longest < tokens]
    choices = []
    if lower:
        some, current = ", ".join(map(str, lower[::-1][:6])), "by tokens" if now is None else str(now)
        choices.append(f"rl.micro_batch_per_replica={some} (now {current}; legal for dp_world={plan.dp_world})")
    if now is None and rl.micro_batch_tokens > 1:
        choices.append(f"rl.micro_batch_tokens={max(rl.micro_batch_tokens // 2, 1)} (now {rl.micro_batch_tokens})")
    if not choices:
        return f"rl.micro_batch_per_replica={now} is the least that dp_world={plan.dp_world} allows"
    return f"{' or '.join(choices)}: the same result"


def _lengths(config: RunConfig) -> str:
    r, held_out = config.rollout, config.validation.max_tokens
    if r.max_tokens < 2:
        return f"rollout.max_tokens={r.max_tokens} is as short as it gets"
    half = r.max_tokens // 2
    longest = max(r.max_model_len - (r.max_tokens - half), half + 1)
    own = half if held_out is None else max(min(half, held_out), 1)
    return (
        f"rollout.max_tokens={half} validation.max_tokens={own} together, then rollout.max_model_len={longest}: "
        "only if shorter answers are acceptable"
    )


def _images(config: RunConfig) -> str:
    keys = [f"{key}={value // 2}" for key, value in config.rl.data.factory_kwargs.items() if "image" in key and _halves(value)]
    if not keys:
        return "the ceiling of image sizes, of training and held-out data together: this run names none"
    settings = " ".join(f"rl.data.factory_kwargs.{key}" for key in keys)
    return f"{settings}, and the same for the held-out data: another resolution is another variant"


def _stop(config: RunConfig) -> str:
    grid = resolve_grid(config.grid)
    wider = f"; more policy ranks: grid.dp_shard={2 * grid.dp_shard}" if grid.backend == "ray" else ""
    return f"stop, and choose a smaller model or another topology{wider}; `posttrain plan` shows memory by term"


def _halves(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _line(text: str, at: int) -> str:
    end = text.find("\n", at)
    return " ".join(text[text.rfind("\n", 0, at) + 1 : end if end >= 0 else None].split())[:300]
