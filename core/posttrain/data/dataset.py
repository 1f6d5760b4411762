"""Where prompts come from: rows with stable ids, and a sampler whose draws depend on the seed and on nothing else.

    sampler = build_sampler(config, environments)
    draws = sampler.draw(8)                       # the next eight prompts; state_dict() is the position

Every environment is drawn by its weight, and its rows without replacement: a seeded permutation per epoch (file order with
`rl.data.shuffle=false`). A batch may take the end of one epoch and the start of the next, so no prompt is lost and a dataset
smaller than a batch still trains; `rl.data.drop_last` skips the short rest of an epoch instead. `rl.data.factory` replaces the
rows of the (then single) environment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.data.seeds import derive_seed
from posttrain.errors import ConfigError, DataError, error
from posttrain.plugins.resolution import import_target, target_of

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.data.environment import Environment, RowDataset

FINGERPRINT_ROWS = 64


@dataclass(frozen=True, slots=True)
class Draw:
    """One taking of a row by the sampler. `index` counts all draws of a run from 0 and names its randomness.

    The same row drawn in the next epoch is another draw.
    """

    index: int
    epoch: int
    env: str
    row_id: str
    task: Mapping[str, Any]

    @property
    def group_id(self) -> str:
        return f"{self.index}:{self.env}:{self.row_id}"


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one environment and its share of the prompts."""

    env: str
    rows: RowDataset
    weight: float = 1.0


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
        self.index = 0

    def draw(self, n: int) -> list[Draw]:
        """The next `n` draws."""
        return [self._next() for _ in range(n)]

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

    def fingerprints(self) -> dict[str, str]:
        """A digest of each source's size and of rows spread over it: tells another dataset, not every changed byte."""
        return {source.env: fingerprint(source.rows) for source in self.sources}

    def _next(self) -> Draw:
        which = self._pick()
        source, size = self.sources[which], self._usable[which]
        epoch, place = divmod(self._taken[which], size)
        position = int(self._order(which, epoch)[place])
        row = read_row(source, position)
        made = Draw(self.index, epoch, source.env, row_id(row, position), row)
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
            cached = self._orders[which] = (epoch, generator.permutation(len(source.rows)))
        return cached[1]


def read_row(source: Source, position: int) -> Any:
    """The row at a position. Raises DataError naming it when the dataset cannot give it."""
    try:
        return source.rows[position]
    except Exception as exc:
        raise DataError(
            f"row {position} of the training dataset of {source.env} cannot be read",
            cause=f"{type(exc).__name__}: {exc}",
            fix="check the files behind the dataset",
            code="unreadable-row",
        ) from exc


def row_id(row: Any, position: int) -> str:
    """The row's own `id`, else its position."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"row {position} is a {type(row).__name__}, not a mapping", fix='return rows such as {"id": "7", "question": "…"}'
        )
    return str(row.get("id", position))


def fingerprint(rows: RowDataset) -> str:
    """Twelve hex digits from the number of rows and up to 64 rows spread evenly over them."""
    size = len(rows)
    step = max(size - 1, 1) / (FINGERPRINT_ROWS - 1)
    positions = range(size) if size <= FINGERPRINT_ROWS else [round(i * step) for i in range(FINGERPRINT_ROWS)]
    digest = hashlib.sha256(str(size).encode())
    for position in positions:
        digest.update(json.dumps(dict(rows[position]), sort_keys=True, default=str).encode())
    return digest.hexdigest()[:12]


def build_sampler(config: RunConfig, environments: Mapping[str, Environment]) -> PromptSampler:
    """The sampler of a run. `environments` in the order of the config. Raises DataError (E6 among them) and ConfigError."""
    from posttrain.placement.grid import resolve_grid

    data, grid = config.rl.data, resolve_grid(config.grid)
    weights = [entry.weight for entry in config.environments]
    sources = [
        Source(name, env.dataset("train"), weight) for (name, env), weight in zip(environments.items(), weights, strict=True)
    ]
    if data.factory is not None:
        if len(sources) != 1:
            raise ConfigError(
                f"rl.data.factory gives the rows of one environment, and there are {len(sources)}",
                fix="keep one entry in environments, or let each environment bring its rows",
                where="rl.data.factory",
            )
        sources = [Source(sources[0].env, rows_of(data.factory, data.factory_kwargs), 1.0)]
    batch = config.rl.batch_per_replica // config.rl.group_size
    _refuse_repeated_ids(sources)
    sampler = PromptSampler(sources, seed=config.seed, shuffle=data.shuffle, drop_last=data.drop_last, batch=batch)
    check_size(sources, world=max(grid.rollout[0], grid.dp_world))
    return sampler


def check_size(sources: Sequence[Source], world: int) -> None:
    """Raise E6 when there are fewer rows than data cells, the parts that a batch is dealt to."""
    items = sum(len(source.rows) for source in sources)
    if items < world:
        raise error("E6", items=items, world=world)


def rows_of(factory: str, kwargs: Mapping[str, Any]) -> RowDataset:
    """Call `rl.data.factory`. Raises DataError when it cannot be imported, refuses its arguments, or returns no dataset."""
    where = "rl.data.factory"
    try:
        made: Callable[..., Any] = import_target(target_of(factory))
    except (ImportError, AttributeError, OSError) as exc:
        raise DataError(
            f"rl.data.factory={factory!r} cannot be imported",
            cause=f"{type(exc).__name__}: {exc}",
            fix="install the package that holds it, or correct the path (form: package.module:function)",
            where=where,
        ) from exc
    try:
        rows = made(**kwargs)
    except Exception as exc:
        raise DataError(
            f"rl.data.factory={factory!r} failed",
            cause=f"{type(exc).__name__}: {exc}",
            fix="check rl.data.factory_kwargs and the data they name",
            where=where,
        ) from exc
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise DataError(
            f"rl.data.factory={factory!r} returned a {type(rows).__name__}",
            cause="a dataset has a length and rows by index",
            fix="return a list of dicts or a datasets.Dataset",
            where=where,
        )
    return rows  # type: ignore[no-any-return]


def _refuse_repeated_ids(sources: Sequence[Source], limit: int = 10_000) -> None:
    """Repeated ids would pool different prompts into one name in the ledger and the rollout files."""
    for source in sources:
        ids = sorted((row_id(read_row(source, i), i), i) for i in range(min(len(source.rows), limit)))
        for (a, i), (b, j) in pairwise(ids):
            if a == b:
                raise DataError(
                    f"rows {min(i, j)} and {max(i, j)} of {source.env} have the same id {a!r}",
                    fix="give every row its own id, or leave ids out",
                    code="repeated-id",
                )
