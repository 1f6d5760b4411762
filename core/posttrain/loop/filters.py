"""What a run makes of rewards and samples before anything is compared: a length penalty, and filters that take samples out.

    screening = Screening.of(config, vocab_size)              # None when all of it is off
    screening.screen(trajectory, packer.decode)               # once it has its reward, before its group is counted

**Overlong penalty** (DAPO). `L` tokens of the model in an episode are `e = L − (rollout.max_tokens − buffer)` too many: the
reward loses `overlong_penalty_factor · e / buffer` where e > 0, never more than the factor (`buffer`: `overlong_buffer_tokens`).
The shaped reward enters baselines, so it decides which groups are informative. The raw one stays in
`info["screening"]["raw_reward"]`, and the reward's part `overlong_penalty` says what was taken.

**Filters.** A filtered sample trains nothing. It stays in its group's baseline: that is an estimate of what the policy earns,
and a filter never changes the advantage of another sample. A group of which every sample is filtered counts as uninformative; a
preference pair is made of samples that are not filtered. `info["screening"]["filters"]` names the filters.

    overlong     the answer was cut by a token limit (finish reason `length`)
    gibberish    the model sampled an id above the threshold with a log-prob below −ln V − `gibberish_logprob_offset`: a rare
                 token in a place where it was less likely than a uniform draw. BPE vocabularies number tokens in the order of
                 their merges; the threshold in use for Qwen's V = 151,936 is 100,000, and that share of V is the default
    repetition   the last 10,000 characters of at least 100 are more than `repetition_compression_threshold` times as many bytes
                 as zlib makes of them at level 1

Screening twice changes nothing, and what was screened says so itself, also when it comes from a checkpoint.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from posttrain.types import Trajectory

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig

QWEN_VOCABULARY, QWEN_RARE = 151_936, 100_000
SHORTEST_TEXT, LONGEST_TEXT = 100, 10_000
PENALTY, SCREENING = "overlong_penalty", "screening"


@dataclass(frozen=True, slots=True)
class Screening:
    """The penalty and the filters of a run. None, or a factor of 0, is off.

    penalty            largest loss of reward       free   model tokens without a penalty       buffer   tokens of the ramp
    gibberish          (largest common id, lowest log-prob of a rarer one)        repetition   bytes per compressed byte
    """

    penalty: float = 0.0
    free: int = 0
    buffer: int = 1
    overlong: bool = False
    gibberish: tuple[int, float] | None = None
    repetition: float | None = None

    @classmethod
    def of(cls, config: RunConfig, vocab_size: int) -> Screening | None:
        """What a checked config means for a model of `vocab_size` ids; None when all of it is off."""
        rl = config.rl
        made = cls(
            penalty=rl.overlong_penalty_factor,
            free=config.rollout.max_tokens - rl.overlong_buffer_tokens,
            buffer=rl.overlong_buffer_tokens,
            overlong=rl.filter_overlong,
            gibberish=(
                rare_from(vocab_size) if rl.gibberish_token_threshold is None else rl.gibberish_token_threshold,
                -math.log(vocab_size) - rl.gibberish_logprob_offset,
            )
            if rl.filter_gibberish
            else None,
            repetition=rl.repetition_compression_threshold if rl.filter_repetition else None,
        )
        return made if made.penalty or made.filters else None

    @property
    def filters(self) -> tuple[str, ...]:
        """The filters that are on."""
        on = {"overlong": self.overlong, "gibberish": self.gibberish is not None, "repetition": self.repetition is not None}
        return tuple(name for name, used in on.items() if used)

    def screen(self, trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> None:
        """Shape the reward of a trajectory and note which filters take it out, in place. `decode`: for the repetition filter."""
        if SCREENING in trajectory.info:
            return
        noted: dict[str, Any] = {"filters": [name for name in self.filters if self._catches(name, trajectory, decode)]}
        if self.penalty and trajectory.reward is not None and trajectory.scorable:
            taken = overlong_penalty(trajectory.sampled, self.free, self.buffer, self.penalty)
            noted["raw_reward"] = trajectory.reward
            trajectory.reward_parts[PENALTY] = -taken
            trajectory.reward -= taken
        trajectory.info[SCREENING] = noted

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """`filter/<filter>_frac`: the share of the trajectories that each filter that is on took out."""
        number = max(len(trajectories), 1)
        return {f"filter/{name}_frac": sum(name in filters_of(t) for t in trajectories) / number for name in self.filters}

    def _catches(self, name: str, t: Trajectory, decode: Callable[[Sequence[int]], str]) -> bool:
        if name == "overlong":
            return t.truncated
        if name == "gibberish":
            assert self.gibberish is not None
            tokens = (zip(row.token_ids, row.rollout_logprobs, row.mask, strict=True) for row in t.rows)
            return gibberish(chain.from_iterable(tokens), *self.gibberish)
        assert self.repetition is not None
        return repetitive(decode([i for r in t.rows for i, own in zip(r.token_ids, r.mask, strict=True) if own]), self.repetition)


def overlong_penalty(tokens: int, free: int, buffer: int, factor: float) -> float:
    """0 up to `free` tokens, then a linear ramp that reaches `factor` after `buffer` more and stays there."""
    return factor * min(max(tokens - free, 0) / buffer, 1.0)


def rare_from(vocab_size: int) -> int:
    """The largest id of a vocabulary that is not taken for a rare token."""
    return vocab_size * QWEN_RARE // QWEN_VOCABULARY


def gibberish(tokens: Iterable[tuple[int, float, bool]], rare: int, logprob: float) -> bool:
    """Whether any sampled token of `(id, log-prob, sampled)` has an id above `rare` and a log-prob below `logprob`."""
    return any(own and token > rare and value < logprob for token, value, own in tokens)


def repetitive(text: str, threshold: float) -> bool:
    """Whether the end of a text shrinks to less than 1 / `threshold` of its bytes. A short text never does."""
    if len(text) < SHORTEST_TEXT:
        return False
    data = text[-LONGEST_TEXT:].encode("utf-8", errors="replace")
    return len(data) / len(zlib.compress(data, level=1)) > threshold


def filters_of(trajectory: Trajectory) -> list[str]:
    """The filters that took a trajectory out; none for one that may train."""
    return list(trajectory.info.get(SCREENING, {}).get("filters", ()))


def trains(trajectory: Trajectory) -> bool:
    """Whether a trajectory may become a row: it is scorable, has a trained token, and no filter took it out."""
    return trajectory.trained and not filters_of(trajectory)


def compared(trajectories: Sequence[Trajectory], *, pairs: bool = False) -> list[bool]:
    """Which trajectories are compared with the others of their group: filtered ones too, but none where nothing trains.

    pairs: the groups are to give preference pairs, which filtered ones are no part of.
    """
    live = {t.group_id for t in trajectories if trains(t)}
    return [trains(t) if pairs else t.trained and t.group_id in live for t in trajectories]
