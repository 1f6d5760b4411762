"""The values that travel between the parts: small, typed, picklable, free of torch at import.

The unit of exchange is the token id. Text that an engine produced is never tokenised again; a `Trajectory` therefore
carries, for every token after the prompt, whether the model sampled it (`mask`), the log-prob of the distribution it was
sampled from, and the version of the weights that sampled it.

Shape legend used in all docstrings: `T` tokens of one micro-batch, `S` sequences, `N` trajectories of a batch step,
`B` rows and `L` columns of a padded model input, `V` vocabulary, `H` hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "aborted", "error"]
ENV_VERSION = -1
"""The weight version of a token that no model sampled (environment text)."""


class Message(TypedDict, total=False):
    """One chat message. `content` is text; tool messages also carry `name` and `tool_call_id`."""

    role: str
    content: Any
    name: str
    tool_call_id: str
    tool_calls: list[dict[str, Any]]


@dataclass(slots=True)
class Reward:
    """What an environment says about one episode.

    `total` is None when the episode could not be scored (infrastructure fault, exception, time-out, NaN): it is then out of
    every baseline and trains nothing. `parts` are named components for the metrics. `info` is free and goes to the rollout
    file; `info["cause"]` names why a reward is unscorable.
    """

    total: float | None
    parts: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def scorable(self) -> bool:
        return self.total is not None and math.isfinite(self.total)


@dataclass(slots=True)
class Turn:
    """A span `[start, end)` of `Trajectory.token_ids` and who wrote it: the model or the environment."""

    start: int
    end: int
    role: Literal["model", "env"] = "model"


@dataclass(slots=True)
class Trajectory:
    """One completion of one prompt, to the token. All four per-token lists have equal length.

    `token_ids` is everything after the prompt, environment tokens included; the sampled stop token is in it and is trained.
    Environment tokens have `mask` False, log-prob 0.0 and version -1.
    An episode of several turns is one row, unless its template rewrote the history: `earlier` then holds the rows before this
    one, each with the context that its tokens were sampled in. The reward is the whole episode's.
    Raises ValueError when the lists disagree in length.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    mask: list[bool]
    rollout_logprobs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    group_id: str = ""
    sample_id: str = ""
    env: str = ""
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    earlier: list[Trajectory] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = {
            "token_ids": len(self.token_ids),
            "mask": len(self.mask),
            "rollout_logprobs": len(self.rollout_logprobs),
            "weight_versions": len(self.weight_versions),
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"a Trajectory needs one mask, log-prob and version per token, got {lengths} ({self.sample_id!r})")

    @property
    def scorable(self) -> bool:
        """Whether the reward may enter a baseline."""
        return self.reward is not None and math.isfinite(self.reward)

    @property
    def trained(self) -> bool:
        """Whether it may train: scorable and with at least one token that the model sampled."""
        return self.scorable and (any(self.mask) or any(any(row.mask) for row in self.earlier))

    @property
    def rows(self) -> list[Trajectory]:
        """What trains on its own: the rows of the episode, in order, this one last."""
        return [*self.earlier, self]

    @property
    def sampled(self) -> int:
        """Tokens of the whole episode that a model sampled."""
        return sum(sum(row.mask) for row in self.rows)

    @property
    def given(self) -> bool:
        """Whether its tokens came with the data: there are some, and no version of the weights sampled any."""
        return bool(self.weight_versions) and max(self.weight_versions) == ENV_VERSION

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(slots=True)
class Group:
    """The trajectories of one prompt, in sample order, with the dataset row (`task`) that they answer."""

    group_id: str
    task: Mapping[str, Any]
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float | None]:
        return [t.reward if t.scorable else None for t in self.trajectories]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine draws tokens. Stop ids are the engine's business: every EOS id of the model, plus `stop_token_ids`.

    `stop` are texts that end a completion, which keeps them.
    `temperature` 0 is greedy (validation and evals only; log-probs are then those of temperature 1).
    `top_p`, `top_k`, `min_p` are refused in training (the trainer would need the mask of the nucleus).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()

    @property
    def filtered(self) -> bool:
        """Whether the distribution sampled from is not the model's whole softmax."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Request:
    """`n` completions of one prompt. All noise comes from `seed`, drawn ahead; sample `i` uses row `i` of it.

    wanted: those of the `n` that are to be sampled, the others being there already; None for all.
    priority: of those that wait, the lowest goes first, in an engine that orders them (vllm does, hf does not).
    """

    id: str
    prompt_ids: Sequence[int]
    n: int
    seed: int
    sampling: Sampling
    priority: int = 0
    wanted: tuple[int, ...] | None = None

    @property
    def indices(self) -> Sequence[int]:
        """Of the samples that are wanted."""
        return range(self.n) if self.wanted is None else self.wanted


@dataclass(slots=True)
class Completion:
    """One finished sample. Log-probs are of the distribution sampled from; one weight version per token."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    error: str | None = None


@dataclass(slots=True)
class TokenBatch:
    """The layout of the loss: one micro-batch end to end without padding, `T` tokens of `S` sequences.

    Position `t` is about token `t`. Floating fields share one dtype: float32 in training, float64 in tests.
    The totals are those of the whole optimizer step (all micro-batches, all ranks), so that contributions sum.

    logprobs          [T], grad   current log-prob under the sampling temperature
    mask              [T] bool    trained tokens
    sequence          [T] int64   non-decreasing index into 0..S-1
    advantages        [T]         constant over a sequence unless a plug-in gives per-turn credit
    rewards,baselines [S]         the reward and its group's mean (NFT)
    old_logprobs, rollout_logprobs, ref_logprobs, entropy   [T] or None
    pair, chosen      [S] or None int64 pair index and bool (preference data)
    total_tokens, total_sequences, total_pairs   float
    """

    logprobs: torch.Tensor
    mask: torch.Tensor
    sequence: torch.Tensor
    advantages: torch.Tensor
    rewards: torch.Tensor
    baselines: torch.Tensor
    total_tokens: float
    total_sequences: float
    total_pairs: float = 0.0
    old_logprobs: torch.Tensor | None = None
    rollout_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    pair: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.rewards.shape[0]


class Declares:
    """What a plug-in needs of the other parts of a run, what it provides, and what it does not although its base class does.

    Names of `posttrain.plugins.capabilities.CAPABILITIES`, in addition to those of the base classes. An object may set its own,
    for what depends on its options.
    """

    needs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
