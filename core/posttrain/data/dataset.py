"""Where prompts come from: rows with stable ids, and a sampler whose draws depend on the seed and on nothing else.

    sampler = build_sampler(config, environments)
    draws = sampler.draw(8)                       # the next eight prompts; state_dict() is the position

Every environment is drawn by its weight, and its rows without replacement: a seeded permutation per epoch (file order with
`rl.data.shuffle=false`), for a stream one of each block of rows in the first epoch. A batch may take the end of one epoch and
the start of the next, so no prompt is lost and a dataset smaller than a batch still trains; `rl.data.drop_last` skips the short
rest of an epoch instead. `rl.data.factory` replaces the rows of the (then single) environment.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.data.seeds import derive_seed
from posttrain.errors import ConfigError, DataError, PosttrainError, error

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.data.environment import Environment, RowDataset
    from posttrain.data.row_check import RowCheck

FINGERPRINT_ROWS = 10_000
"""Rows that a fingerprint covers at most: 10,000 rows of 200 bytes take from 0.1 (a list) to 1 second (a Parquet file)."""
FIRST_FINGERPRINT_ROWS = 64
"""The same in a checkpoint that does not say it, and of a stream: its fingerprint must not make it be read on."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One taking of a row by the sampler. `index` counts all draws of a run from 0 and names its randomness.

    The same row drawn in the next epoch is another draw. `where` is the row's place for messages, such as `my.jsonl:17`;
    `position` its place in its dataset, from which `PromptSampler.redraw` takes it again.
    """

    index: int
    epoch: int
    env: str
    row_id: str
    task: Mapping[str, Any]
    where: str = field(default="", compare=False)
    position: int = field(default=-1, compare=False)

    @property
    def group_id(self) -> str:
        return f"{self.index}:{self.env}:{self.row_id}"


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one environment that train, and its share of the prompts.

    test: held-out rows that replace its own.   held: rows of the training dataset that an eval keeps out of training.
    """

    env: str
    rows: RowDataset
    weight: float = 1.0
    test: RowDataset | None = None
    held: RowDataset | None = None


class PromptSampler:
    """Draws rows from `sources`. The whole state is how many draws were taken of each source."""

    def __init__(
        self, sources: Sequence[Source], *, seed: int, shuffle: bool = True, drop_last: bool = False, batch: int = 1
    ) -> None:
        for source in sources:
            if len(source.rows) == 0:
                raise DataError(
                    f"the training dataset of {source.env} is empty",
                    cause="no row was found, or a filter left none",
                    fix="check the environment's options, or rl.data.factory",
                    code="empty-dataset",
                )
            if drop_last and len(source.rows) < batch:
                raise DataError(
                    f"the training dataset of {source.env} has {len(source.rows)} row(s), a batch takes {batch} prompts",
                    cause="rl.data.drop_last=true drops every epoch's short rest, and here that is all of it",
                    fix="set rl.data.drop_last=false, lower rl.batch_per_replica, or give more rows",
                    code="small-dataset",
                )
        self.sources = list(sources)
        self._seed, self._shuffle = seed, shuffle
        self._usable = [len(s.rows) - (len(s.rows) % batch if drop_last else 0) for s in sources]
        self._taken = [0] * len(self.sources)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._checks: list[RowCheck] = []
        self.index = 0

    def watch(self, refuse: Callable[[Source, int, Any], None] | None = None) -> list[RowCheck]:
        """Look at the first rows of every source now, at the rest beside the run: a later draw raises what is found there.

        refuse(source, position, row): may raise for what else a row must not be. Raises DataError.
        """
        from posttrain.data.row_check import RowCheck

        self._checks = [RowCheck(source, partial(refuse, source) if refuse else None) for source in self.sources]
        for check in self._checks:
            check.first()
        for check in self._checks:
            check.start()
        return self._checks

    def draw(self, n: int) -> list[Draw]:
        """The next `n` draws. Raises DataError for a row that cannot be read, and what `watch` found."""
        for check in self._checks:
            check.raise_if_failed()
        return [self._next() for _ in range(n)]

    def redraw(self, index: int, epoch: int, env: str, position: int) -> Draw:
        """A draw that was taken before, from what a checkpoint knows of it. Raises DataError when its row is not there."""
        source = next(source for source in self.sources if source.env == env)
        row = read_row(source, position)
        return Draw(index, epoch, env, row_id(row, position), row, place_of(source.rows, position), position)

    def anew(self) -> PromptSampler:
        """The same sampler before its first draw: it draws the same again."""
        again = copy.copy(self)
        again.load_state_dict({"index": 0, "taken": {source.env: 0 for source in self.sources}})
        again._orders = {}
        return again

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index, "taken": {s.env: t for s, t in zip(self.sources, self._taken, strict=True)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises DataError when the state is of other environments."""
        names = [s.env for s in self.sources]
        if sorted(state["taken"]) != sorted(names):
            raise DataError(
                f"the sampler's state is of {sorted(state['taken'])}, this run has {sorted(names)}",
                fix="resume with the environments of the run",
            )
        self.index = int(state["index"])
        self._taken = [int(state["taken"][name]) for name in names]

    def fingerprints(self, most: int = FINGERPRINT_ROWS) -> dict[str, str]:
        """The `fingerprint` of each source; a checkpoint says of how many rows at most its own are."""
        return {source.env: fingerprint(source.rows, most) for source in self.sources}

    def _next(self) -> Draw:
        which = self._pick()
        source, size = self.sources[which], self._usable[which]
        epoch, place = divmod(self._taken[which], size)
        position = int(self._order(which, epoch)[place])
        row = read_row(source, position)
        made = Draw(self.index, epoch, source.env, row_id(row, position), row, place_of(source.rows, position), position)
        self._taken[which] += 1
        self.index += 1
        return made

    def _pick(self) -> int:
        """The source of draw `index`, by weight, from a generator that the index names."""
        if len(self.sources) == 1:
            return 0
        weights = np.array([s.weight for s in self.sources], dtype=np.float64)
        point = np.random.Generator(np.random.Philox(derive_seed(self._seed, "environment", self.index))).random()
        return int(np.searchsorted(np.cumsum(weights / weights.sum()), point, side="right").clip(max=len(weights) - 1))

    def _order(self, which: int, epoch: int) -> np.ndarray | range:
        if not self._shuffle:
            return range(self._usable[which])
        cached = self._orders.get(which)
        if cached is None or cached[0] != epoch:
            source = self.sources[which]
            generator = np.random.Generator(np.random.Philox(derive_seed(self._seed, "epoch", source.env, epoch)))
            size, window = len(source.rows), getattr(source.rows, "window", None)
            block = window if window and epoch == 0 else size  # a stream is read no further than its rows are needed
            order = [generator.permutation(min(block, size - begin)) + begin for begin in range(0, size, block)]
            cached = self._orders[which] = (epoch, np.concatenate(order))
        return cached[1]


def read_row(source: Source, position: int) -> Any:
    """The row at a position. Raises DataError naming it when the dataset cannot give it."""
    try:
        return source.rows[position]
    except PosttrainError:
        raise
    except Exception as exc:
        raise DataError(
            f"{place_of(source.rows, position)} of the training dataset of {source.env} cannot be read",
            cause=f"{type(exc).__name__}: {exc}",
            fix="check the files behind the dataset",
            code="unreadable-row",
        ) from exc


def place_of(rows: RowDataset, position: int) -> str:
    """Where a row is written, such as `my.jsonl:17`, when its dataset knows; else its position."""
    where = getattr(rows, "where", None)
    return str(where(position)) if where is not None else f"row {position}"


def row_id(row: Any, position: int) -> str:
    """The row's own `id`, else its position."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"row {position} is a {type(row).__name__}, not a mapping", fix='return rows such as {"id": "7", "question": "…"}'
        )
    return str(row.get("id", position))


def fingerprint(rows: RowDataset, most: int = FINGERPRINT_ROWS) -> str:
    """Twelve hex digits from the number of rows and all of them; of more than `most`, from so many spread evenly over them.

    Of a stream, from its first 64. What the rows say counts, not the file or the cache that they come from.
    """
    size, stream = len(rows), getattr(rows, "window", None) is not None
    most = min(most, FIRST_FINGERPRINT_ROWS) if stream else most
    step = 1 if stream else (size - 1) / (most - 1)
    positions = range(size) if size <= most else [round(i * step) for i in range(most)]
    digest = hashlib.sha256(str(size).encode())
    for position in positions:
        digest.update(json.dumps(dict(rows[position]), sort_keys=True, default=str).encode())
    return digest.hexdigest()[:12]


def build_sampler(config: RunConfig, environments: Mapping[str, Environment]) -> PromptSampler:
    """The sampler of a run. `environments` in the order of the config. Raises DataError (E6 among them) and ConfigError."""
    from posttrain.placement.grid import resolve_grid

    data, grid = config.rl.data, resolve_grid(config.grid)
    if data.factory is None:
        weights = [entry.weight for entry in config.environments]
        named = zip(environments.items(), weights, strict=True)
        sources = [Source(name, env.dataset("train"), weight) for (name, env), weight in named]
    elif len(environments) == 1:
        splits = rows_of(data.factory, data.factory_kwargs)
        sources = [Source(next(iter(environments)), splits["train"], test=splits.get("test"))]
    else:
        raise ConfigError(
            f"rl.data.factory gives the rows of one environment, and there are {len(environments)}",
            fix="keep one entry in environments, or let each environment bring its rows",
            where="rl.data.factory",
        )
    sources = [_without_held(config, i, one, environments[one.env]) for i, one in enumerate(sources)]
    batch = config.rl.batch_per_replica // config.rl.group_size
    sampler = PromptSampler(sources, seed=config.seed, shuffle=data.shuffle, drop_last=data.drop_last, batch=batch)
    check_size(sources, world=max(grid.rollout[0], grid.dp_world))
    return sampler


def _without_held(config: RunConfig, position: int, source: Source, env: Environment) -> Source:
    """The source of an entry of `environments` without the rows that entries of `evals` hold out."""
    from posttrain.config.eval_rules import same_entry
    from posttrain.data.holdout import apart

    held = [e.prompts for e in config.evals if e.split == "holdout" and same_entry(e, config.environments) == position]
    if not held:
        return source
    rows, asked = apart(source.rows, max(held), env, source.env)
    return replace(source, rows=rows, held=asked)


def check_size(sources: Sequence[Source], world: int) -> None:
    """Raise E6 when there are fewer rows than data cells, the parts that a batch is dealt to."""
    items = sum(len(source.rows) for source in sources)
    if items < world:
        raise error("E6", items=items, world=world)


def rows_of(factory: str, kwargs: Mapping[str, Any]) -> dict[str, RowDataset]:
    """Call `rl.data.factory`: the rows of "train", and those of "test" when it brings them. Raises DataError.

    It may return what `DataOptions.data` may be as an object: a list, a dataset, a generator, or one of these for each split.
    """
    from posttrain.data.objects import call, tables_of
    from posttrain.data.source import as_view
    from posttrain.data.view import View

    where = "rl.data.factory"
    made = call(factory, kwargs, where)
    if isinstance(made, Mapping) and made and all(isinstance(rows, View) for rows in made.values()):
        splits: dict[str, Any] = dict(made)
    else:
        splits = {name: as_view(table) for name, table in tables_of(made, where).items()}
    if "train" not in splits:
        raise DataError(
            f"{where}={factory!r} gives no split 'train'", cause=f"its splits: {', '.join(splits)}",
            fix='return {"train": rows, "test": rows}, or the rows that train', where=where,
        )
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits["validation"]
    return splits
