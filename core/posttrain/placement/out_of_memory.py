"""What to do when memory ran out, wherever it did: five steps in the order that keeps training the same for longest.

One step at a time, a short run after each, and stop when it fits. Whatever is offered is put into the run's config first and held
against the rules that a config is loaded by; what they refuse is left out. A step that cannot help says so instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain.config.rules import batch_plan, check_rules
from posttrain.config.schema import NO_ENGINE
from posttrain.config.walker import show
from posttrain.errors import EXIT_ENGINE, EngineStartError, OutOfMemory, PosttrainError, WeightSyncError
from posttrain.placement.batch import divisors
from posttrain.placement.grid import resolve_grid
from posttrain.placement.memory import micro_batch_tokens

if TYPE_CHECKING:
    from posttrain.config.schema import EvalConfig, RunConfig

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
_ENGINE = re.compile(r"\brollout-\d|\bengine\b")
"""What an error says, or where it says that it was, when an engine is who ran out."""

Offer = Mapping[str, Any]
"""Keys and values that go together."""


@dataclass(frozen=True, slots=True)
class Case:
    """A command that ran out of memory.

    config   that its overrides are put into      exc   what was raised, where it is known
    asked    the evals of `posttrain eval`, which drives an engine from its own process and trains nothing; None in a run
    """

    config: RunConfig
    exc: BaseException | None = None
    asked: Sequence[EvalConfig] | None = None

    def legal(self, offer: Offer) -> bool:
        """Whether a config with these values would load."""
        return not check_rules(changed(self.config, offer))

    def engine(self) -> bool:
        """Whether it was an engine that ran out, as far as the error says."""
        exc = self.exc
        return isinstance(exc, PosttrainError) and bool(_ENGINE.search(f"{exc.message} {exc.where}"))


@contextmanager
def memory_explained(config: RunConfig, asked: Sequence[EvalConfig] | None = None) -> Iterator[None]:
    """Turn what the block raises because memory ran out into OutOfMemory with the steps. asked: see `Case`."""
    try:
        yield
    except Exception as exc:
        found = explain(exc, config, asked)
        if found is None or found is exc:
            raise
        raise found from exc


def explain(exc: BaseException, config: RunConfig, asked: Sequence[EvalConfig] | None = None) -> OutOfMemory | None:
    """OutOfMemory with the steps for this command; None when `exc` is not about memory."""
    said = ran_out(exc)
    if said is None:
        return None
    steps = "".join(f"\n         {line}" for line in recovery_steps(config, exc, asked))
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


def recovery_steps(
    config: RunConfig, exc: BaseException | None = None, asked: Sequence[EvalConfig] | None = None
) -> list[str]:
    """The five steps, numbered; before them what goes first for a weight update or an engine's start."""
    case = Case(config, exc, asked)
    steps = (_utilization, _micro_batch, _lengths, _images, _stop)
    return [*_first(case), *(f"{number} {step(case)}" for number, step in enumerate(steps, 1))]


def changed(config: RunConfig, offer: Offer) -> RunConfig:
    """The config with these values, by dotted path."""
    for path, value in offer.items():
        config = _put(config, path, value)
    return config


def _put(node: Any, path: str, value: Any) -> Any:
    key, _, rest = path.partition(".")
    return replace(node, **{key: _put(getattr(node, key), rest, value) if rest else value})


def _typed(offer: Offer) -> str:
    return " ".join(f"{key}={value!r}".replace(", ", ",").replace("(", "[").replace(")", "]") for key, value in offer.items())


def _first(case: Case) -> list[str]:
    config, exc, r = case.config, case.exc, case.config.rollout
    if isinstance(exc, WeightSyncError):
        lanes, size = config.weights.max_concurrent_lanes or "all", config.weights.bucket_bytes
        return [
            f"- first, it was a weight update: lower weights.max_concurrent_lanes (lanes that pull at once, now {lanes}) "
            f"or weights.bucket_bytes (now {size})"
        ]
    if isinstance(exc, EngineStartError) and exc.code in _START_CODES:
        width = "the second number of grid.shapes.rollout" if config.grid.shapes.rollout else "grid.ranks"
        more = (  # under grid.backend=local an engine has one device, and posttrain eval starts one of that kind
            f"; or raise rollout.tensor_parallel_size (now {r.tensor_parallel_size}) and {width} together: more devices for "
            "one engine"
            if config.grid.backend == "ray" and r.engine == "vllm" and case.asked is None
            else ""
        )
        cpu = "; on a CPU raise rollout.options.kv_cache_gib" if r.engine == "vllm" else ""
        return [
            f"- first, the engine did not fit: lower rollout.max_model_len (now {r.max_model_len}) or rollout.max_num_seqs "
            f"(now {r.max_num_seqs}), or change rollout.gpu_memory_utilization (now {r.gpu_memory_utilization}): higher for "
            f"a KV cache that lacks room, lower where others use the device too{cpu}{more}"
        ]
    return []


def _utilization(case: Case) -> str:
    r, grid, key = case.config.rollout, case.config.grid, "rollout.gpu_memory_utilization"
    if r.engine != "vllm":
        return f"{key}: nothing to lower, engine {r.engine} reserves no memory"
    if isinstance(case.exc, EngineStartError) and case.exc.code == "kv-cache":
        return f"{key}: nothing to lower, the KV cache lacks room in what {r.gpu_memory_utilization} gives it"
    apart = grid.backend == "ray" and grid.gpu_placement == "disaggregated" and case.asked is None
    if apart and not case.engine():
        return f"{key}: nothing to gain for the policy, the engines have devices of their own"
    lower = [str(value) for value in UTILIZATION if value < r.gpu_memory_utilization and case.legal({key: value})]
    if not lower:
        return f"{key}={r.gpu_memory_utilization} is low already"
    where = "on a GPU, which the engine has to itself" if apart else "on a GPU"
    what = "training stays the same" if case.asked is None else "the results stay the same"
    return f"{key}={', then '.join(lower)} (now {r.gpu_memory_utilization}; {where}; slower, {what})"


def _micro_batch(case: Case) -> str:
    config, key, by_tokens = case.config, "rl.micro_batch_per_replica", "rl.micro_batch_tokens"
    if case.asked is not None:
        return f"{key}: nothing to lower, nothing trains here"
    plan, rl = batch_plan(config), config.rl
    tokens, _ = micro_batch_tokens(config, resolve_grid(config.grid))
    now, longest = plan.micro, config.rollout.max_model_len
    if now is not None:
        lower = [micro for micro in plan.legal_micros if micro < now]
    else:
        lower = [micro for micro in plan.legal_micros if micro // plan.dp_world * longest < tokens]
    lower, half = [micro for micro in lower if case.legal({key: micro})], rl.micro_batch_tokens // 2
    choices = []
    if lower:
        some, current = ", ".join(map(str, lower[::-1][:6])), "by tokens" if now is None else str(now)
        choices.append(f"{key}={some} (now {current}; legal for dp_world={plan.dp_world})")
    if now is None and half and case.legal({by_tokens: half}):
        choices.append(f"{by_tokens}={half} (now {rl.micro_batch_tokens})")
    if not choices:
        return f"{key}={show(now)} is the least that dp_world={plan.dp_world} allows"
    return f"{' or '.join(choices)}: the same result"


def _lengths(case: Case) -> str:
    r, limit = case.config.rollout, "rollout.max_model_len"
    if r.engine == NO_ENGINE:
        half = {limit: r.max_model_len // 2}
        if not case.legal(half):
            return f"{limit}={r.max_model_len} is as short as it gets"
        return f"{_typed(half)} (now {r.max_model_len}): what a longer pair loses is said by truncate of its environment"
    asked = [entry.max_tokens or r.max_tokens for entry in case.asked or ()]
    now = max(asked) if asked else r.max_tokens
    if now < 2:
        return f"rollout.max_tokens={now} is as short as it gets"
    shorter: dict[str, Any] = {} if asked else _shorter(case.config)
    first = f"--max-tokens {now // 2}" if asked else f"{_typed(shorter)} together"
    if not case.legal(shorter):
        return f"rollout.max_tokens={now} cannot be lower beside what else is set"
    config = changed(case.config, shorter)
    lengths = [config.rollout.max_tokens, config.validation.max_tokens, *(entry.max_tokens for entry in config.evals)]
    less = {limit: max(r.max_model_len - (now - now // 2), 1 + max(length for length in lengths if length is not None))}
    then = f", then {_typed(less)}" if less[limit] < r.max_model_len and case.legal({**shorter, **less}) else ""
    return f"{first}{then}: only if shorter answers are acceptable"


def _shorter(config: RunConfig) -> dict[str, Any]:
    """Half as long completions, and what cannot stay as it is beside them."""
    half, held_out, rl = config.rollout.max_tokens // 2, config.validation.max_tokens, config.rl
    own = half if held_out is None else max(min(half, held_out), 1)
    offer = {"rollout.max_tokens": half, "validation.max_tokens": own}
    if rl.overlong_penalty_factor and rl.overlong_buffer_tokens > half:
        offer["rl.overlong_buffer_tokens"] = max(rl.overlong_buffer_tokens // 2, 1)
    return offer


def _images(case: Case) -> str:
    given = case.config.rl.data.factory_kwargs
    keys = [f"{key}={value // 2}" for key, value in given.items() if "image" in key and _halves(value)]
    if not keys:
        return "the ceiling of image sizes, of training and held-out data together: this run names none"
    settings = " ".join(f"rl.data.factory_kwargs.{key}" for key in keys)
    return f"{settings}, and the same for the held-out data: another resolution is another variant"


def _stop(case: Case) -> str:
    wider = _wider(case) if case.config.grid.backend == "ray" and case.asked is None else None
    more = f"; more policy ranks: {_typed(wider)}" if wider else ""
    return f"stop, and choose a smaller model or another topology{more}; `posttrain plan` shows memory by term"


def _wider(case: Case) -> Offer | None:
    """The next wider policy that the batch divides over, with micro-batches of one row to a rank; None when there is none."""
    plan, grid = batch_plan(case.config), case.config.grid
    for ranks in divisors(plan.mini or plan.batch, grid.dp_replicate):
        wider: dict[str, Any] = {"grid.dp_shard": ranks // grid.dp_replicate}
        if grid.shapes.policy:
            wider["grid.shapes.policy"] = (1, ranks)
        wider["rl.micro_batch_per_replica"] = ranks
        if ranks > plan.dp_world and case.legal(wider):
            return wider
    return None


def _halves(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _line(text: str, at: int) -> str:
    end = text.find("\n", at)
    return " ".join(text[text.rfind("\n", 0, at) + 1 : end if end >= 0 else None].split())[:300]
