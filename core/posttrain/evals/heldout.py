"""Rows of evals never train: refused before a run, and looked up in its ledger afterwards.

    sampler.watch(refuse_eval_rows(evals, config, environments))       # raises for a row that trains and is asked by an eval
    found = ledger_proof(run / "ledger.jsonl", sampler, evals, config, environments)
    found.trained, found.text()                                        # [], "none of 64 eval rows is among the 4,800 draws …"

Two rows are the same when they have the same `task_key` (by default: when they ask the same), whatever their environments are
called; or, within one environment plug-in, the same content but for the id, whatever is made of it by its options.
The ledger names draws by their row; the sampler draws them again, from the seed, to see what they asked.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from posttrain.config import entries
from posttrain.data.view import content
from posttrain.errors import DataError

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import Draw, PromptSampler, Source
    from posttrain.data.environment import Environment
    from posttrain.evals.build import Eval

Refuse: TypeAlias = "Callable[[Source, int, Any], None]"
SHOWN = 5


class Asked:
    """What evals ask, to be asked whether a row is among it."""

    def __init__(self, evals: Sequence[Eval]) -> None:
        self._by_key: dict[str, tuple[Eval, Draw]] = {}
        for one in evals:
            for draw in one.draws:
                for key in keys_of(one.entry.name, one.env, draw.task):
                    self._by_key.setdefault(key, (one, draw))

    def find(self, plugin: str, env: Environment, row: Mapping[str, Any]) -> tuple[Eval, Draw] | None:
        """The eval and its row that is the same as a row of `env`."""
        if not self._by_key:
            return None
        return next((self._by_key[key] for key in keys_of(plugin, env, row) if key in self._by_key), None)


def keys_of(plugin: str, env: Environment, row: Mapping[str, Any]) -> Iterator[str]:
    """What a row has in common with no other but the same one; nothing of it for a row that cannot be asked about."""
    from posttrain.data.environment import Environment

    with contextlib.suppress(Exception):
        own = type(env).task_key is not Environment.task_key
        yield f"{plugin if own else ''} {env.task_key(row)!r}"
    with contextlib.suppress(Exception):
        yield f"{plugin} {content(row).hex()}"


def refuse_eval_rows(
    evals: Sequence[Eval], config: RunConfig, environments: Mapping[str, Environment], first: Refuse | None = None
) -> Refuse:
    """What `PromptSampler.watch` takes: raises DataError for a row that trains and that an eval asks, after what `first` does."""
    asked, plugin = Asked(evals), plugins_by_label(config)

    def refuse(source: Source, position: int, row: Any) -> None:
        from posttrain.data.dataset import place_of

        if first is not None:
            first(source, position, row)
        found = asked.find(plugin[source.env], environments[source.env], row)
        if found is not None:
            one, draw = found
            raise DataError(
                f"{place_of(source.rows, position)} of {source.env} trains, and the eval {one.label} asks it ({draw.where})",
                cause="a score on prompts that train says nothing of others",
                fix="split=holdout keeps the rows of an eval out of training; or leave them out of one of the two with a filter",
                where="evals", code="not-held-out",
            )  # fmt: skip

    return refuse


def plugins_by_label(config: RunConfig) -> dict[str, str]:
    """The environment plug-in behind each label of `environments`."""
    return {entries.label_of(entry): entry.name for entry in config.environments}


@dataclass(frozen=True, slots=True)
class Proof:
    """What a ledger says of the rows of evals. draws: that it has, of so many different rows.   trained: (eval, row, draw)."""

    draws: int
    rows: int
    asked: int
    trained: tuple[tuple[str, str, int], ...] = ()
    unknown: str = ""

    def text(self) -> str:
        """One line about it."""
        if self.unknown:
            return f"whether eval rows trained is not known: {self.unknown}"
        if self.trained:
            shown = ", ".join(f"{row} of {label} (draw {index})" for label, row, index in self.trained[:SHOWN])
            return f"{len(self.trained)} of {self.asked:,} eval rows were drawn for training: {shown}"
        return f"none of the {self.asked:,} eval rows is among the {self.draws:,} draws of {self.rows:,} rows in the ledger"

    def plain(self) -> dict[str, Any]:
        return {"ledger_draws": self.draws, "ledger_rows": self.rows, "eval_rows": self.asked,
                "trained": [list(one) for one in self.trained], "unknown": self.unknown}  # fmt: skip


def ledger_proof(
    ledger: Path, sampler: PromptSampler, evals: Sequence[Eval], config: RunConfig, environments: Mapping[str, Environment]
) -> Proof:
    """Look up the rows of evals among all draws of a ledger. sampler: of the run; it is left as it is."""
    drawn = read_draws(ledger)
    asked_rows, trained = sum(len(one.draws) for one in evals), dict[tuple[str, str], int]()
    rows = set(drawn.values())
    asked, plugin, again, seen = Asked(evals), plugins_by_label(config), sampler.anew(), set[tuple[str, str]]()
    for index in range(max(drawn, default=-1) + 1):
        draw = again.draw(1)[0]
        row = (draw.env, draw.row_id)
        if index not in drawn or row in seen:
            continue
        if row != drawn[index]:
            what = f"draw {index} was {drawn[index][1]!r} of {drawn[index][0]}, and would be {row[1]!r} of {row[0]} now"
            return Proof(len(drawn), len(rows), asked_rows, unknown=f"the data is not the run's: {what}")
        seen.add(row)
        if (found := asked.find(plugin[draw.env], environments[draw.env], draw.task)) is not None:
            trained.setdefault((found[0].label, found[1].row_id), index)
    return Proof(len(drawn), len(rows), asked_rows, tuple((*name, index) for name, index in trained.items()))


def read_draws(ledger: Path) -> dict[int, tuple[str, str]]:
    """`draw -> (environment, row)` of every line of a ledger; a torn last line is left out."""
    found: dict[int, tuple[str, str]] = {}
    if ledger.exists():
        for line in ledger.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError):
                entry = json.loads(line)
                found[int(entry["draw"])] = (entry["env"], entry["row"])
    return found


def refuse_trained(proof: Proof) -> None:
    """Raise DataError when a row of an eval was drawn for training."""
    if proof.trained:
        raise DataError(
            proof.text(), cause="a score on prompts that trained says nothing of others",
            fix="ask other rows (options.filter, another split); --allow-trained measures them all the same and says so",
            where="evals", code="not-held-out",
        )  # fmt: skip
