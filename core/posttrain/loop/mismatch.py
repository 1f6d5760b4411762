"""Why engine and trainer give the same tokens other log-probs: measured per possible cause, the most likely one is named.

    found = attribute(trajectories, policy.logprobs(rows), version=step - 1, setup=Setup.of(config))
    print(found)                                     # eight lines; found.cause is a word of `CAUSES`

The gap of a token is |trainer − engine|, in nats. A cause is scored from 0 to 1 by how much of the gap it accounts for:

    version      tokens of older versions have more than those of the newest. Where none is of the version that the trainer has,
                 age is named, and said to hide the next three: what the policy learned may well be in the first half of its
                 answers, or in the cut ones
    truncation   samples cut by a token limit have more than the others
    template     the first half of each sample has more than the second: the two read another prompt (template, BOS, a lost
                 token), and what follows makes up for it
    temperature  the gap follows the log-prob itself: one of the two scales its logits
    dtype        none of these, and there is no more than the arithmetic rounds (the limits of the canary: bfloat16 0.1 nats)

Truncation, template and temperature are looked for among tokens of lag 0, whose engine had the trainer's weights, and count as
far as those have the gap of the others: age explains nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from posttrain.loop.staleness import versions_of
from posttrain.types import Trajectory

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

CAUSES: dict[str, str] = {
    "version": "older weights sampled these tokens. Lower rollout.max_async_rollout or rollout.max_off_policy_steps, or correct "
    "for it: rl.objective.use_tis=true",
    "truncation": "samples that a token limit cut are read differently. Look at what get_policy_input makes of one; "
    "rl.filter_overlong=true leaves them out",
    "template": "engine and trainer do not read the same prompt. Compare prompt_ids of the rollout file with get_policy_input: a "
    "BOS, a chat template, a token that one of them lacks",
    "temperature": "one of the two scales its logits. The engine must give log-probs of what it samples from "
    "(logprobs_mode=processed_logprobs), and the trainer divide by the same rollout.temperature",
    "dtype": "it is what this precision rounds. Where that hurts, correct for it (rl.objective.use_tis=true), or compute both in "
    "float32",
    "none": "none of these accounts for it: other weights (see weights/canary_max), or a filter of the sampling that the trainer "
    "does not know",
}
"""What the gap may come from, and what to do."""

HIDDEN = (
    "truncation, template and temperature can only be judged on tokens of lag 0, and there are none: run once with "
    "rollout.max_async_rollout=0; a gap that stays is not of age"
)
LEAST_SCORE = 0.3
ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}
"""Mean gap, in nats, that arithmetic alone may make."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What engine and trainer compute with."""

    temperature: float = 1.0
    rollout_dtype: str = "float32"
    policy_dtype: str = "float32"

    @classmethod
    def of(cls, config: RunConfig) -> Setup:
        return cls(config.rollout.temperature, config.rollout.dtype, config.rl.param_dtype)

    @property
    def rounding(self) -> float:
        """The mean gap that is to be expected."""
        return max(ROUNDING.get(dtype, 0.0) for dtype in (self.rollout_dtype, self.policy_dtype))


@dataclass(frozen=True, slots=True)
class Attribution:
    """cause: a word of `CAUSES`.   scores: of causes with a pattern, 0 to 1.   lines: the report, the verdict last."""

    cause: str
    scores: dict[str, float]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The trained tokens of all samples, end to end. place: from 0 to 1 within its sample."""

    engine: Floats
    trainer: Floats
    lag: NDArray[np.int64]
    cut: Flags
    place: Floats
    first: Flags

    @property
    def gap(self) -> Floats:
        return np.abs(self.trainer - self.engine)

    def pick(self, flags: Flags) -> _Tokens:
        return _Tokens(*(getattr(self, name)[flags] for name in self.__slots__))


def attribute(
    trajectories: Sequence[Trajectory], trainer: Sequence[Sequence[float]], *, version: int, setup: Setup
) -> Attribution:
    """Attribute the gap of trained tokens that an engine sampled.

    trainer   for each trajectory the trainer's log-probs of its trained tokens, in order (`Policy.logprobs` of their rows)
    version   of the weights that the trainer has
    Raises ValueError when a trajectory has another number of trained tokens, or nothing was sampled.
    """
    tokens = _collect(trajectories, trainer, version)
    newest, rounds = tokens.lag.min(), tokens.gap.mean() <= setup.rounding
    fresh = tokens.pick(tokens.lag == newest)
    slope, follows = _follows(fresh)
    judged = 0.0 if newest > 0 else min(1.0, float(fresh.gap.mean() / max(tokens.gap.mean(), 1e-300)))
    scores = {
        "version": _excess(tokens.gap, tokens.lag > newest),
        "truncation": judged * _excess(fresh.gap, fresh.cut),
        "template": judged * _excess(fresh.gap, fresh.place < 0.5),
        "temperature": judged * follows if fresh.gap.mean() > setup.rounding else 0.0,
    }
    cause = max(scores, key=lambda name: scores[name])
    if scores[cause] < LEAST_SCORE:
        cause = "dtype" if rounds else "version" if newest > 0 else "none"
    lines = (
        f"engine and trainer differ by {tokens.gap.mean():.2g} nats on average, {tokens.gap.max():.2g} at most, over "
        f"{len(tokens.gap):,} tokens of {len(trajectories)} samples",
        f"by version: {_lags(tokens)}",
        f"by end: cut by the token limit {_mean(fresh.gap, fresh.cut)}, others {_mean(fresh.gap, ~fresh.cut)}",
        f"by place: first token {_mean(fresh.gap, fresh.first)}, first half {_mean(fresh.gap, fresh.place < 0.5)}, "
        f"second half {_mean(fresh.gap, fresh.place >= 0.5)}",
        f"by log-prob: {follows:.0%} of it follows the engine's log-prob, trainer ≈ {slope:.2f} · engine "
        f"(rollout.temperature={setup.temperature:g})",
        f"by dtype: engine {setup.rollout_dtype}, trainer {setup.policy_dtype}: up to {setup.rounding:g} on average is rounding",
        f"most likely: {cause}" + (f" ({scores[cause]:.0%})" if scores.get(cause, 0) >= LEAST_SCORE else ""),
        f"  {CAUSES[cause]}",
        *([f"  {HIDDEN}"] if newest > 0 and not rounds else []),
    )
    return Attribution(cause, scores, lines)


def _collect(trajectories: Sequence[Trajectory], trainer: Sequence[Sequence[float]], version: int) -> _Tokens:
    parts: list[tuple[Floats | Flags | NDArray[np.int64], ...]] = []
    for t, values in zip(trajectories, trainer, strict=True):
        versions = versions_of(t)
        if len(values) != sum(t.mask) or (versions.size and versions.size != len(values)):
            raise ValueError(f"{len(values)} log-probs for {sum(t.mask)} trained tokens of {t.sample_id!r}")
        if not (n := versions.size):
            continue
        engine = np.asarray(t.rollout_logprobs, dtype=np.float64)[np.asarray(t.mask, dtype=bool)]
        own, place = np.asarray(values, dtype=np.float64), np.arange(n)
        parts.append((engine, own, version - versions, np.full(n, t.truncated), place / n, place == 0))
    if not parts:
        raise ValueError("no token of these trajectories was sampled by an engine")
    return _Tokens(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))  # type: ignore[arg-type]


def _excess(gap: Floats, flags: Flags) -> float:
    """The share of the whole gap that the flagged tokens have beyond what the others have on average."""
    if flags.all() or not flags.any() or not gap.sum() > 0:
        return 0.0
    return max(0.0, float(flags.sum() * (gap[flags].mean() - gap[~flags].mean()) / gap.sum()))


def _follows(tokens: _Tokens) -> tuple[float, float]:
    """Slope of the trainer's log-probs over the engine's, and the share of the signed gap's variance that a parabola in the
    log-prob explains. The log-prob is the mean of both, so that noise in one of them explains little."""
    signed, middle = tokens.trainer - tokens.engine, (tokens.trainer + tokens.engine) / 2
    if signed.size < 8 or not middle.std() > 0 or not np.square(signed).sum() > 0:
        return 1.0, 0.0
    design = np.stack([middle, np.square(middle)], axis=1)
    rest = signed - design @ np.linalg.lstsq(design, signed, rcond=None)[0]
    slope = float((tokens.trainer * tokens.engine).sum() / max(np.square(tokens.engine).sum(), 1e-12))
    return slope, max(0.0, 1 - float(np.square(rest).sum() / np.square(signed).sum()))


def _mean(gap: Floats, flags: Flags) -> str:
    return f"{gap[flags].mean():.2g}" if flags.any() else "–"


def _lags(tokens: _Tokens) -> str:
    return ", ".join(f"lag {lag}: {_mean(tokens.gap, tokens.lag == lag)}" for lag in np.unique(tokens.lag)[:6])
