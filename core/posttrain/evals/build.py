"""The evals of a config, ready to be asked: an environment object of their own, and the rows as draws.

An eval never shares an object with training, so it moves no state of it. Its rows are those that the entry says: of an
environment that trains, the rows that are held out there; of any other, its test split, and all rows of a file that has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain import plugins
from posttrain.config.eval_rules import label_of, same_entry
from posttrain.data.dataset import Draw, place_of, row_id
from posttrain.data.preference import PreferenceEnvironment
from posttrain.data.source import DataOptions
from posttrain.errors import ConfigError, DataError
from posttrain.loop.validation import held_out_rows, sampling
from posttrain.types import Sampling

if TYPE_CHECKING:
    from posttrain.config.schema import EvalConfig, RunConfig
    from posttrain.data.dataset import Source
    from posttrain.data.environment import Environment, RowDataset

MOST_ROWS = 20_000
"""So many rows are asked without a word (`prompts: 0`); more must be meant."""


@dataclass(frozen=True, slots=True)
class Eval:
    """entry: with resolved options.   env: of this eval alone.   draws: its rows; their `env` is `key`."""

    entry: EvalConfig
    env: Environment
    draws: list[Draw]

    @property
    def label(self) -> str:
        return label_of(self.entry)

    @property
    def key(self) -> str:
        return key_of(self.entry)

    def due(self, version: int, last: int | None = None) -> bool:
        """Whether it is to be asked of this version. last: that of the end of training."""
        if version == 0:
            return self.entry.before
        if version == last:
            return self.entry.after
        return self.entry.every > 0 and version % self.entry.every == 0


def key_of(entry: EvalConfig) -> str:
    """The environment that the draws of an eval name."""
    return f"eval:{label_of(entry)}"


def build_evals(
    config: RunConfig, environments: Mapping[str, Environment], sources: Sequence[Source]
) -> list[Eval]:
    """All evals of a config. environments, sources: those that train, in the order of the config. Raises DataError."""
    made = []
    for i, entry in enumerate(config.evals):
        position = same_entry(entry, config.environments)
        source = sources[position] if position is not None and sources else None
        env = build_environment(entry, f"evals[{i}]", trained=source is not None)
        rows = rows_of(entry, env, source, environments)
        made.append(Eval(entry, env, draws_of(entry, rows, f"evals[{i}]")))
    return made


def build_environment(entry: EvalConfig, where: str, *, trained: bool) -> Environment:
    """The environment object of an eval. One that reads a file and names no test rows holds all of the file out."""
    options = dict(entry.options or {})
    env: Environment = plugins.build("envs", entry.name, options, where=where)
    if isinstance(env, PreferenceEnvironment):
        raise ConfigError(
            f"{entry.name} is no eval: its completions come with the data", fix="name an environment that scores answers",
            where=f"{where}.name", code="pairs",
        )  # fmt: skip
    own = env.options
    if trained or entry.split != "test" or not isinstance(own, DataOptions) or own.data is None:
        return env
    if own.test_data is not None or own.test_size is not None:
        return env
    return plugins.build("envs", entry.name, options | {"test_data": own.data}, where=where)  # type: ignore[no-any-return]


def rows_of(
    entry: EvalConfig, env: Environment, source: Source | None, environments: Mapping[str, Environment]
) -> RowDataset:
    """The rows that an entry asks. source: of the environment that trains with the same options, if one does."""
    if entry.split == "holdout":
        assert source is not None and source.held is not None  # the config was checked
        return source.held
    if source is not None and entry.split == "test":
        return held_out_rows(source, environments)
    return env.dataset("train" if entry.split == "train" else "test")


def draws_of(entry: EvalConfig, rows: RowDataset, where: str) -> list[Draw]:
    """The first `prompts` rows, or all. Raises DataError for none, too many, and two of the same id."""
    size = len(rows)
    if size == 0:
        raise DataError(
            f"the eval {label_of(entry)} has no rows", cause=f"its split {entry.split} is empty",
            fix="another split, or options that give rows", where=where, code="empty-dataset",
        )  # fmt: skip
    if entry.prompts == 0 and size > MOST_ROWS:
        fix = f"say how many are asked: {where}.prompts=500"
        raise DataError(f"the eval {label_of(entry)} has {size:,} rows", fix=fix, where=where, code="many-rows")
    draws: dict[str, Draw] = {}
    for position in range(min(entry.prompts or size, size)):
        row = rows[position]
        draw = Draw(position, 0, key_of(entry), row_id(row, position), row, place_of(rows, position), position)
        if (first := draws.setdefault(draw.row_id, draw)) is not draw:
            raise DataError(
                f"two rows of the eval {label_of(entry)} have the same id {draw.row_id!r}: {first.where} and {draw.where}",
                fix="give every row its own id, or leave ids out", where=where, code="repeated-id",
            )  # fmt: skip
    return list(draws.values())


def eval_sampling(config: RunConfig, entry: EvalConfig) -> Sampling:
    """How the completions of an eval are drawn; all else is as in validation."""
    from dataclasses import replace

    return replace(
        sampling(config),
        max_tokens=entry.max_tokens or config.rollout.max_tokens,
        temperature=temperature(config, entry), top_p=entry.top_p, top_k=entry.top_k, min_p=entry.min_p,
    )  # fmt: skip


def temperature(config: RunConfig, entry: EvalConfig) -> float:
    """`temperature` with null resolved."""
    if entry.temperature is not None:
        return entry.temperature
    return 0.0 if entry.samples == 1 else config.rollout.temperature


def settings_of(config: RunConfig, one: Eval) -> dict[str, Any]:
    """What two results must have in common to be compared, as plain values."""
    s, entry = eval_sampling(config, one.entry), one.entry
    return {
        "environment": entry.name, "split": entry.split, "prompts": len(one.draws), "samples": entry.samples, "k": list(entry.k),
        "correct_part": entry.correct_part, "correct_at": entry.correct_at, "temperature": s.temperature, "top_p": s.top_p,
        "top_k": s.top_k, "min_p": s.min_p, "max_tokens": s.max_tokens, "max_model_len": config.rollout.max_model_len,
        "seed": config.seed,
    }  # fmt: skip
