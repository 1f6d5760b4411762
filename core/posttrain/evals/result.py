"""What one eval came to at one version of the weights, and its files.

    evals/<label>/<step>.jsonl                 one line per prompt: id, n, correct, rewards, causes, tokens, truncated
    evals/<label>/completions_<step>.parquet   the completions, as in rollouts/
    evals/summary.json                         settings, measures with intervals, what of the ledger was checked
    evals/table.txt                            the same for people

A completion without a usable reward counts as wrong in `accuracy` and the estimates of k. In the mean reward it counts 0, or the
least reward of the results that are compared where that is below 0: it never raises a mean. How many there are is always told.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError
from posttrain.evals.bootstrap import Interval, interval
from posttrain.evals.estimators import pass_at_k, pass_hat_k
from posttrain.tracking import jsonl
from posttrain.tracking.files import superseded_name, write_text
from posttrain.tracking.jsonl import plain

if TYPE_CHECKING:
    from posttrain.types import Group, Trajectory

FOLDER, SUMMARY, TABLE = "evals", "summary.json", "table.txt"
SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class Result:
    """step: the version of the weights, which is the batch step that made them.   rows: see the module, one per prompt.

    of: what was asked, such as a run or a model folder.   checked: what was found of its rows in a ledger; empty: there is none.
    """

    label: str
    step: int
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    seconds: float = 0.0
    of: str = ""
    checked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def measures(self) -> list[str]:
        """Names of the numbers of each prompt: reward, accuracy, pass@k and pass^k for each k (pass^1 is pass@1)."""
        return ["reward", "accuracy", *(f"pass{sign}{k}" for k in self.settings["k"] for sign in "@^"[: 1 if k == 1 else 2])]

    @property
    def causes(self) -> dict[str, int]:
        """Completions without a usable reward, by cause."""
        return dict(sum((Counter(row["causes"]) for row in self.rows), Counter()))

    @property
    def completions(self) -> int:
        return sum(row["n"] for row in self.rows)

    def share(self, name: str) -> float:
        """`truncated` completions, or mean `tokens`, of each completion."""
        return sum(row[name] for row in self.rows) / self.completions

    def values(self, measure: str, *, floor: float | None = None) -> dict[str, float]:
        """The number of each prompt, by its id. floor: what a completion without a reward counts in the mean reward."""
        return {row["id"]: _value(row, measure, floor_of([self]) if floor is None else floor) for row in self.rows}

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """The mean of each measure with its interval. Of thousands of prompts it takes seconds: not for an event loop."""
        seed = int(self.settings["seed"])
        return {
            m: interval(list(self.values(m).values()), bounds=None if m == "reward" else SHARE, seed=seed) for m in self.measures
        }

    def metrics(self) -> dict[str, float]:
        """The same as metrics of a run, under `eval/<label>/…`."""
        at = f"eval/{self.label}"
        found = {f"{at}/{'reward/mean' if m == 'reward' else m}": self.intervals[m].mean for m in self.measures}
        return found | {
            f"{at}/prompts": float(len(self.rows)), f"{at}/unscorable_count": float(sum(self.causes.values())),
            f"{at}/length/mean": self.share("tokens"), f"{at}/truncated_share": self.share("truncated"),
            f"{at}/time_s": self.seconds,
        }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """The result without its rows, as it stands in `summary.json`."""
        found: dict[str, Any] = {"label": self.label, "step": self.step, "of": self.of, "settings": dict(self.settings)}
        for measure in self.measures:
            one = self.intervals[measure]
            found[measure] = {"mean": one.mean, "low": one.low, "high": one.high}
        return found | {
            "completions": self.completions, "unscorable": self.causes, "truncated_share": self.share("truncated"),
            "length_mean": self.share("tokens"), "time_s": self.seconds, "checked": dict(self.checked),
        }  # fmt: skip


def floor_of(results: Iterable[Result]) -> float:
    """What a completion without a reward counts in the mean reward of these results."""
    return min([0.0, *(r for one in results for row in one.rows for r in row["rewards"] if r is not None)])


def _value(row: Mapping[str, Any], measure: str, floor: float) -> float:
    n, correct = row["n"], row["correct"]
    if measure == "reward":
        return math.fsum(floor if r is None else r for r in row["rewards"]) / n
    if measure == "accuracy":
        return float(correct / n)
    return (pass_at_k if measure.startswith("pass@") else pass_hat_k)(n, correct, int(measure[5:]))


def row_of(group: Group, name: str, place: str, *, part: str | None, at: float) -> dict[str, Any]:
    """The line of a prompt. part, at: `correct_part`, `correct_at` of its entry. Raises DataError for a part that it lacks."""
    rows = group.trajectories
    causes = Counter(str(t.info.get("cause", "none")) for t in rows if not t.scorable)
    return {
        "id": name, "where": place, "n": len(rows),
        "correct": sum(_is_correct(t, part, at) for t in rows), "rewards": [t.reward if t.scorable else None for t in rows],
        "causes": dict(causes), "tokens": sum(t.sampled for t in rows), "truncated": sum(t.truncated for t in rows),
    }  # fmt: skip


def failed_row(name: str, place: str, n: int, cause: str, error: str) -> dict[str, Any]:
    """The line of a prompt that could not be asked: all its completions are wrong."""
    return {
        "id": name, "where": place, "n": n, "correct": 0, "rewards": [None] * n, "causes": {cause: n}, "tokens": 0,
        "truncated": 0, "error": error,
    }  # fmt: skip


def _is_correct(t: Trajectory, part: str | None, at: float) -> bool:
    if not t.scorable or t.reward is None:
        return False
    if part is not None and part not in t.reward_parts:
        raise DataError(
            f"rewards of this eval have no part {part!r}", cause=f"they have {', '.join(t.reward_parts) or 'none'}",
            fix="correct correct_part, or leave it out", where="evals", code="no-part",
        )  # fmt: skip
    value = t.reward_parts.get(part or "correct", t.reward)
    return bool(value >= at - 1e-9)


class Results:
    """The results in a folder: read, added to, put aside. `steps(label)` are those that are complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, label: str, step: int) -> bool:
        return self._path(label, step).is_file()

    def write(self, result: Result) -> None:
        """Write a result; one of the same label and step is put aside. Raises RunInterrupted when the disk is full."""
        path = self._path(result.label, result.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.rename(superseded_name(path))
        lines = [json.dumps(plain(row), ensure_ascii=False, allow_nan=False) for row in result.rows]
        rest = [one for one in self._summaries() if (one["label"], one["step"]) != (result.label, result.step)]
        self._write_summary([*rest, result.summary()])
        write_text(path, "\n".join(lines) + "\n")  # last: what is there is complete

    def read(self) -> list[Result]:
        """Every result, by label as they were first written, then by step."""
        found = [one for one in self._summaries() if self.has(one["label"], one["step"])]
        labels = list(dict.fromkeys(one["label"] for one in found))
        found.sort(key=lambda one: (labels.index(one["label"]), one["step"]))
        return [
            Result(
                one["label"], one["step"], one["settings"], list(jsonl.read(self._path(one["label"], one["step"]))),
                one["time_s"], one["of"], one["checked"],
            )
            for one in found
        ]  # fmt: skip

    def cut_after(self, step: int) -> int:
        """Put aside what is past a step, before a resume; return how many results."""
        late = [path for path in self.folder.glob("*/*.jsonl") if path.stem.isdigit() and int(path.stem) > step]
        for path in late:
            for file in (path, path.with_name(f"completions_{int(path.stem):06d}.parquet")):
                if file.exists():
                    file.rename(superseded_name(file))
        if late:
            self._write_summary([one for one in self._summaries() if one["step"] <= step])
        return len(late)

    def note_checked(self, checked: Mapping[str, Any]) -> None:
        """Write into every summary what of the ledger was checked."""
        if found := self._summaries():
            self._write_summary([one | {"checked": dict(checked)} for one in found])

    def _path(self, label: str, step: int) -> Path:
        return self.folder / label / f"{step}.jsonl"

    def _summaries(self) -> list[dict[str, Any]]:
        path = self.folder / SUMMARY
        try:
            return list(json.loads(path.read_text(encoding="utf-8"))["evals"]) if path.exists() else []
        except (ValueError, KeyError) as exc:
            raise DataError(f"{path} cannot be read", cause=str(exc), fix="restore it, or move it away", code="evals") from exc

    def _write_summary(self, evals: Sequence[Mapping[str, Any]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / SUMMARY, json.dumps(plain({"evals": list(evals)}), indent=1, ensure_ascii=False) + "\n")
