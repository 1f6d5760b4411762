"""A row: one trajectory, or one piece of a split episode, ready to train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Everything the policy needs to know about one sequence of `L` tokens, prompt included.

    input_ids         [L]
    mask              [L] about token t itself: sampled by the model and trained; never the first token
    rollout_logprobs  [L] of the distribution sampled from, anything where mask is False; None: it came with the data
    advantage         of the whole row
    reward, baseline  the episode's reward and its group's mean
    group             id of its group
    prefix            length of the prompt that rows of the same group share; 0 if unknown
    pair, chosen      preference data: pair index, and which of the two this is
    id                sample id, for messages
    Raises ValueError when the lists disagree, no token is trained, or the first one is.
    """

    input_ids: list[int]
    mask: list[bool]
    rollout_logprobs: list[float] | None
    advantage: float = 0.0
    reward: float = 0.0
    baseline: float = 0.0
    group: str = ""
    prefix: int = 0
    pair: int | None = None
    chosen: bool | None = None
    id: str = ""

    def __post_init__(self) -> None:
        logprobs = self.mask if self.rollout_logprobs is None else self.rollout_logprobs
        lengths = (len(self.input_ids), len(self.mask), len(logprobs))
        if len(set(lengths)) != 1:
            raise ValueError(f"row {self.id!r}: input_ids, mask and rollout_logprobs have lengths {lengths}; they must be equal")
        if not any(self.mask):
            raise ValueError(f"row {self.id!r} has no trained token; leave it out of the batch")
        if self.mask[0]:
            raise ValueError(f"row {self.id!r}: nothing comes before its first token, so it has no log-prob; mask it out")
        if not 0 <= self.prefix <= len(self.input_ids):
            raise ValueError(f"row {self.id!r}: prefix={self.prefix} is not within its {len(self.input_ids)} tokens")

    @property
    def trained(self) -> list[int]:
        """Positions of the trained tokens, ascending."""
        return [position for position, trained in enumerate(self.mask) if trained]

    @property
    def context(self) -> int:
        """Tokens that a forward must see: all before the last trained one."""
        return len(self.mask) - 1 - self.mask[::-1].index(True)
