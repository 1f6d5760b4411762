"""The engine contract: what a rollout body generates with.

Token ids go in and come out; text never does. An engine starts without weights of its own making: it refuses to generate
before the first commit, and from then on every token it returns carries the version of the weights that sampled it.
Log-probs are of the distribution sampled from (temperature applied). The sampled stop token is part of the completion.

The smallest engine implements the abstract methods below; `posttrain.testing.EngineContract` states the laws as tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from posttrain.errors import WeightSyncError
from posttrain.types import Declares

if TYPE_CHECKING:
    from posttrain.types import Completion, Request
    from posttrain.weights.transport import Staged


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What every engine needs to start; plain data, picklable.

    model_path         a Hugging Face folder (config, tokenizer, generation config); its weights need not be read
    dtype              "float32" | "bfloat16": storage and compute of the engine
    max_model_len      prompt plus completion, tokens
    max_num_seqs       rows of one forward
    eos_token_ids      every id that ends a completion
    trust_remote_code  run code that the model folder brings
    stop_strings       requests may name texts that end them (`Sampling.stop`): the engine needs the tokenizer
    base_port          first port of an engine that serves over the network; the built-in engines use none
    log_dir            where the engine's chatter goes
    """

    model_path: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    trust_remote_code: bool = False
    stop_strings: bool = False
    seed: int = 0
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    base_port: int = 8100
    start_timeout_s: float = 300.0
    log_dir: Path | None = None


class Generates(Protocol):
    """What drives a batch needs of whoever generates it: one engine, or the replicas of several."""

    async def start(self) -> None: ...
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]: ...
    async def abort(self, request_id: str) -> None: ...
    async def close(self) -> None: ...


class Engine(Declares, ABC):
    """One rollout body's generator. All methods are called from one event loop."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = ""
    provides: tuple[str, ...] = ("rollout_logprobs", "partial_rollouts", "inflight_updates")
    """What the methods below promise. An engine that does not keep it says so: `lacks = ("partial_rollouts",)`."""
    shared_staging: ClassVar[bool] = False
    """Whether `apply` reads the staged weights from other processes, so that staging must be shared memory."""

    @dataclass(frozen=True)
    class Options:
        """Options of the engine itself, under `rollout.options`."""

    def __init__(self, spec: EngineSpec, options: Any = None) -> None:
        self.spec = spec
        self.options = options if options is not None else type(self).Options()
        self.invalid: str | None = None

    @classmethod
    def preflight(cls, spec: EngineSpec, options: Any) -> None:
        """What `start` would refuse, as far as it can be told without starting anything. Called before the policy loads.

        Raises EngineStartError or ConfigError with the fix.
        """

    @abstractmethod
    async def start(self) -> None:
        """Bring the engine up with placeholder weights. Raises EngineStartError with the fix."""

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Yield every completion (`n` per request) as it finishes. Raises WeightSyncError before the first commit."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Stop a request inside the engine; its unfinished samples come back with finish_reason "aborted"."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop decoding, keep the running requests. Returns when no forward is running."""

    @abstractmethod
    async def apply(self, staged: Staged) -> None:
        """Write the staged weights in place, drop every cached prefix, stamp `staged.version`. Only between pause and resume."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on decoding; running requests continue under the new weights with a recomputed cache."""

    @abstractmethod
    def weight_version(self) -> int | None:
        """The version of the weights in place; None before the first commit."""

    @abstractmethod
    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob (temperature 1) of each token given those before it, from the second token on. For the canary."""

    def parameters(self) -> Mapping[str, tuple[int, ...]] | None:
        """Names and shapes of all parameters that `apply` must be given, to be compared with a plan before the first byte moves.
        Called in a thread: it may take long.

        None: not known before the weights are loaded; `apply` then checks itself.
        """
        return None

    async def stacks(self) -> Mapping[str, str]:
        """Where the processes are that the engine has started: name → stacks, for the report of a hang. Answers within 2 s."""
        return {}

    def invalidate(self, cause: str) -> None:
        """Refuse to generate until started again: an update failed half-way, or the weights in place proved to be wrong."""
        self.invalid = cause

    def refuse_invalid(self) -> None:
        """What `generate` calls first. Raises WeightSyncError when the weights in place cannot be trusted."""
        if self.invalid is not None:
            raise WeightSyncError(
                f"the {self.name} engine is invalid: {self.invalid}",
                fix="rebuild the engine: close() and start(), then sync",
                code="lane-invalid",
            )

    @abstractmethod
    async def close(self) -> None:
        """Free everything; idempotent."""


def check_training_sampling(*, temperature: float, top_p: float, top_k: int, min_p: float) -> list[str]:
    """The reasons why these sampling settings cannot be trained on, in words; empty when they can.

    A nucleus changes the distribution sampled from; the trainer would need its mask to compute the same log-prob.
    """
    problems = []
    if temperature <= 0:
        problems.append(f"rollout.temperature={temperature} is greedy: a group's completions are equal; use a value above 0")
    for key, value, off in (("top_p", top_p, 1.0), ("top_k", top_k, 0), ("min_p", min_p, 0.0)):
        if value != off:
            problems.append(
                f"rollout.{key}={value} samples from a cut distribution whose log-probs the trainer cannot recompute; "
                f"set rollout.{key}={off} (evals may use it: validation.{key})"
            )
    return problems
