"""The objective of a run: an algorithm with its options, and how it scores a batch.

    objective = build_objective("grpo", group_size=8, clip_high=0.28)
    advantages = objective.advantages(rewards, groups, trained)        # [N] float64
    loss = objective.loss(batch)                                       # this shard's share of the step's loss
    loss, stats = objective.score(model, inputs)                       # the same, with the model's forward

Contributions of all micro-batches and ranks sum to the loss of the optimizer step. The policy is blind to the algorithm.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.objective import groups as group_statistics
from posttrain.objective.algorithm import Algorithm, Context
from posttrain.objective.build import build_algorithm, resolve_algorithm
from posttrain.objective.groups import Floats, Rewards
from posttrain.objective.loss import clean
from posttrain.objective.options import Options, TokenOptions
from posttrain.objective.stats import token_stats
from posttrain.plugins.functions import without_folders
from posttrain.types import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor


class TokenModel(Protocol):
    """What `Objective.score` calls: rows in, log-probs `[T]` with gradient out, and entropies `[T]` when asked."""

    def __call__(self, rows: Any, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]: ...


@dataclass(slots=True, kw_only=True)
class TokenInputs:
    """One micro-batch before its forward: `rows` for the model, opaque here, and the fields of TokenBatch known before it."""

    rows: Any
    mask: Tensor
    sequence: Tensor
    advantages: Tensor
    rewards: Tensor
    baselines: Tensor
    total_tokens: float
    total_sequences: float
    total_pairs: float = 0.0
    old_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    pair: Tensor | None = None
    chosen: Tensor | None = None

    def batch(self, logprobs: Tensor, entropy: Tensor | None = None) -> TokenBatch:
        """The TokenBatch with the model's output; floating fields take its dtype and device."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if hasattr(value, "is_floating_point"):
                value = value.to(logprobs.device, logprobs.dtype if value.is_floating_point() else None)
            values[field.name] = value
        del values["rows"]
        return TokenBatch(logprobs=logprobs, entropy=entropy, **values)


class Objective:
    """An algorithm and the shared terms around it. Built by `build_objective`; picklable; holds no tensors."""

    def __init__(self, name: str, algorithm: Algorithm) -> None:
        self.name = name
        self.algorithm = algorithm

    def __repr__(self) -> str:
        return f"Objective({self.name!r}, {self.options})"

    @property
    def options(self) -> Options:
        """The options with `auto` and unset values resolved."""
        return self.algorithm.options

    @property
    def context(self) -> Context:
        return self.algorithm.context

    @property
    def notes(self) -> list[str]:
        """Lines to say when a run starts: which configured clip cannot bind."""
        return [f"{without_folders(self.name)}: {note}" for note in self.algorithm.notes()]

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool] | None = None) -> Floats:
        """One advantage per trajectory, `[N]` float64 in input order. `trained` None: every row has a trained token.

        Raises DataError for rewards that the algorithm cannot take.
        """
        return self.algorithm.advantages(rewards, groups, [True] * len(rewards) if trained is None else trained)

    def baselines(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool] | None = None) -> Floats:
        """The mean reward of each row's group, `[N]` float64: what `TokenBatch.baselines` holds per sequence."""
        return group_statistics.baselines(rewards, groups, [True] * len(rewards) if trained is None else trained)

    def pairs(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool] | None = None) -> list[tuple[int, int]]:
        """(chosen, rejected) rows, for preference algorithms; else empty."""
        return self.algorithm.pairs(rewards, groups, [True] * len(rewards) if trained is None else trained)

    def loss(self, batch: TokenBatch) -> Tensor:
        """This shard's contribution to the loss of the optimizer step; scalar. Raises BatchError for a missing field."""
        return self.algorithm.loss(clean(batch))

    def score(self, model: TokenModel, inputs: TokenInputs, *, entropy: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward, loss, and detached arrays for the metrics (see `stats.token_stats`).

        `entropy=True` asks the model for entropies even where the loss does not need them.
        """
        logprobs, entropies = model(inputs.rows, entropy=entropy or self.needs_entropy())
        batch = clean(inputs.batch(logprobs, entropies))
        return self.algorithm.loss(batch), token_stats(self.algorithm, batch)

    def needs_old_logprobs(self) -> bool:
        """Whether the trainer must record log-probs before the first of several optimizer steps (the ahead pass)."""
        return self.algorithm.needs_old_logprobs()

    def needs_reference(self) -> bool:
        """Whether a frozen reference model must score the batch."""
        return self.algorithm.needs_reference()

    def needs_entropy(self) -> bool:
        """Whether the loss needs entropies, with gradient."""
        return isinstance(self.options, TokenOptions) and self.options.entropy_coef > 0


def build_objective(
    name_or_class: str | type[Algorithm],
    *,
    group_size: int | None = None,
    n_mini: int = 1,
    temperature: float = 1.0,
    asynchronous: bool = False,
    **options: object,
) -> Objective:
    """The objective `name_or_class` (a plug-in's name, or an Algorithm class) with `options`, for a run of this kind.

    group_size: completions per prompt, None if unknown. n_mini: optimizer steps per batch. temperature: of the rollouts.
    asynchronous: whether rollouts run ahead of the policy; it decides `ppo_clip_ref_logprobs=auto`.
    Raises ConfigError, naming every problem with its fix, and PluginError when the algorithm cannot be found.
    """
    name, cls = resolve_algorithm(name_or_class)
    context = Context(group_size=group_size, n_mini=n_mini, temperature=temperature, asynchronous=asynchronous)
    return Objective(name, build_algorithm(name, cls, context, options))
