"""Groups that are generated and not yet trained, as lines of JSON in a checkpoint.

    pending.jsonl    {"step": 5, "draw": {"index": 40, "epoch": 0, "env": "countdown", "row": "17", "position": 17},
                      "round": 0, "group": {"trajectories": [...]}}
    a draw without a group was dispatched and has to be generated again, with the same seeds; "tries" where it was before

The dataset row is not written: it is read again at its position. Numbers come back to the bit. What an environment put into
`info` and JSON cannot hold comes back as its `repr`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError
from posttrain.types import Group, Trajectory, Turn

if TYPE_CHECKING:
    from pathlib import Path

    from posttrain.data.dataset import Draw, PromptSampler
    from posttrain.loop.cohort import Round

FILE = "pending.jsonl"

Generated = tuple["Draw", Group]


@dataclass(slots=True)
class Pending:
    """What a checkpoint carries beside the policy.

    rounds   by batch step, the rounds of its cohort; under `arrival` all under step 0
    again    draws that were dispatched, to be generated anew
    tries    by draw index, dispatches so far of those that may yet be dropped for having had too many
    bad_rows   draws of rows passed over before      cells   the groups of a batch per data cell, as they were dealt then
    """

    rounds: dict[int, list[list[Generated]]] = field(default_factory=dict)
    again: list[Draw] = field(default_factory=list)
    tries: dict[int, int] = field(default_factory=dict)
    bad_rows: tuple[int, ...] = ()
    cells: tuple[int, ...] = ()

    def __len__(self) -> int:
        return sum(len(one) for rounds in self.rounds.values() for one in rounds) + len(self.again)

    @property
    def draws(self) -> list[Draw]:
        """All of them."""
        generated = [draw for rounds in self.rounds.values() for one in rounds for draw, _ in one]
        return [*generated, *self.again]

    @classmethod
    def of(cls, rounds: Iterable[Round], again: Iterable[Draw] = (), tries: Mapping[int, int] | None = None) -> Pending:
        found = cls(again=list(again), tries=dict(tries or {}))
        for one in rounds:
            found.rounds.setdefault(one.step, []).append(list(zip(one.draws, one.groups, strict=True)))
        return found

    def lines(self) -> Iterable[str]:
        """One line for each draw."""
        for step, rounds in self.rounds.items():
            for number, groups in enumerate(rounds):
                for draw, group in groups:
                    trajectories = [_plain(trajectory) for trajectory in group.trajectories]
                    yield self._line(draw, step=step, round=number, group={"trajectories": trajectories})
        for draw in self.again:
            yield self._line(draw, step=0, round=0, group=None)

    def _line(self, draw: Draw, **entry: Any) -> str:
        tries = {"tries": self.tries[draw.index]} if draw.index in self.tries else {}
        return json.dumps({**entry, "draw": _draw(draw), **tries}, default=repr)


def write(path: Path, pending: Pending) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in pending.lines())


def indices(path: Path) -> set[int]:
    """The draws of a file. Raises DataError for a damaged one."""
    return {entry["draw"]["index"] for _, entry in _entries(path)}


def read(path: Path, sampler: PromptSampler) -> Pending:
    """What `write` was given, the rows from the sampler's datasets. Raises DataError for a damaged file."""
    found = Pending()
    for number, entry in _entries(path):
        try:
            known = entry["draw"]
            draw = sampler.redraw(known["index"], known["epoch"], known["env"], known["position"])
            if "tries" in entry:
                found.tries[draw.index] = int(entry["tries"])
            trajectories = entry["group"] and [_trajectory(values) for values in entry["group"]["trajectories"]]
        except (ValueError, KeyError, TypeError, StopIteration) as exc:
            if isinstance(exc, DataError):
                raise
            raise _damaged(path, number, exc) from exc
        if trajectories is None:
            found.again.append(draw)
            continue
        rounds = found.rounds.setdefault(entry["step"], [])
        while len(rounds) <= entry["round"]:
            rounds.append([])
        rounds[entry["round"]].append((draw, Group(draw.group_id, draw.task, trajectories)))
    return found


def _entries(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            entry["draw"]["index"]
        except (ValueError, KeyError, TypeError) as exc:
            raise _damaged(path, number, exc) from exc
        yield number, entry


def _damaged(path: Path, line: int, exc: Exception) -> DataError:
    return DataError(
        f"{path}:{line} is not what was written", cause=f"{type(exc).__name__}: {exc}",
        fix="resume from an older checkpoint: posttrain train --resume RUN/checkpoints/step_<earlier>",
        code="checkpoint-damaged",
    )  # fmt: skip


def _draw(draw: Draw) -> dict[str, Any]:
    return {"index": draw.index, "epoch": draw.epoch, "env": draw.env, "row": draw.row_id, "position": draw.position}


_FIELDS = tuple(one.name for one in fields(Trajectory))


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    """As `asdict`, without a copy of every token."""
    values = {name: getattr(trajectory, name) for name in _FIELDS}
    earlier = [_plain(row) for row in trajectory.earlier]
    return values | {"turns": [asdict(turn) for turn in trajectory.turns], "earlier": earlier}


def _trajectory(values: dict[str, Any]) -> Trajectory:
    turns = [Turn(**turn) for turn in values["turns"]]
    earlier = [_trajectory(row) for row in values["earlier"]]
    return Trajectory(**{name: values[name] for name in _FIELDS} | {"turns": turns, "earlier": earlier})
