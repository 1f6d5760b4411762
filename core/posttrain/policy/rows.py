"""A row: one trajectory, or one member of a preference pair, ready to train. Plain data, picklable, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All per-token lists have length `L`; entry `t` is about token `t` itself.

    input_ids           [L] the prompt and everything after it
    mask                [L] tokens that train
    rollout_logprobs    [L] the engine's log-probs, 0.0 where the model did not sample
    advantage           of every trained token of the row
    reward, baseline    the reward and its group's mean (NFT)
    group, id           of the prompt and of the sample
    prefix              length of the prompt that the rows of a group share; 0: nothing is shared
    pair, chosen        preference data: which pair, and whether this is its chosen member
    """

    input_ids: list[int]
    mask: list[bool]
    rollout_logprobs: list[float]
    advantage: float
    reward: float
    baseline: float
    group: str
    id: str
    prefix: int = 0
    pair: int | None = None
    chosen: bool | None = None

    def __post_init__(self) -> None:
        if not len(self.input_ids) == len(self.mask) == len(self.rollout_logprobs):
            raise ValueError(
                f"row {self.id!r} has {len(self.input_ids)} ids, {len(self.mask)} mask entries and "
                f"{len(self.rollout_logprobs)} log-probs"
            )

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask)
