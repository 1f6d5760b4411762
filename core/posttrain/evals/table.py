"""Results as a table, and what two of them tell apart.

    arithmetic: arithmetic, 80 prompts (test) x 8, temperature 1
        step  accuracy                 pass@4                   no reward
           0  0.162 [0.131, 0.194]     0.402 [0.338, 0.466]     0
          40  0.803 [0.759, 0.845]     0.981 [0.962, 0.995]     0
      40 - 0  +0.641 [+0.597, +0.686]  +0.579 [+0.516, +0.641]
              better                   better

Intervals are of 95%, by prompts. A difference is paired by prompt; one whose interval contains 0 is `not distinguishable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.evals.bootstrap import LEVEL, Interval, paired
from posttrain.evals.result import TABLE, Result, Results, floor_of
from posttrain.tracking.files import write_text

NOT_DISTINGUISHABLE = "not distinguishable"
NO_REWARD = "no reward"


@dataclass(frozen=True, slots=True)
class Difference:
    """`b` − `a` of one measure. unlike: settings in which the two differ, so that more than the weights may be behind it."""

    measure: str
    a: Result
    b: Result
    gap: Interval
    unlike: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """`better`, `worse` or `not distinguishable`; more is better in every measure."""
        if not self.gap.distinguishable:
            return NOT_DISTINGUISHABLE
        return "better" if self.gap.mean > 0 else "worse"

    def plain(self) -> dict[str, Any]:
        return {
            "label": self.b.label, "measure": self.measure, "a": place(self.a), "b": place(self.b), "prompts": self.gap.prompts,
            "difference": self.gap.mean, "low": self.gap.low, "high": self.gap.high, "differing": self.gap.differing,
            "verdict": self.verdict, "unlike": list(self.unlike),
        }  # fmt: skip


def place(result: Result) -> str:
    """Whose result it is."""
    return f"{result.of} step {result.step}" if result.of else f"step {result.step}"


def differences(a: Result, b: Result) -> list[Difference]:
    """Every measure that both have, over the prompts that both asked; none when they have no prompt in common."""
    if not {row["id"] for row in a.rows} & {row["id"] for row in b.rows}:
        return []
    unlike = tuple(
        f"{key} {a.settings.get(key)} and {b.settings.get(key)}"
        for key in a.settings
        if key not in ("k", "prompts") and a.settings.get(key) != b.settings.get(key)
    )
    floor, seed = floor_of([a, b]), int(a.settings["seed"])
    return [
        Difference(m, a, b, paired(a.values(m, floor=floor), b.values(m, floor=floor), seed=seed), unlike)
        for m in a.measures if m in b.measures
    ]  # fmt: skip


def text(results: Sequence[Result], compared: Sequence[tuple[Result, Result]] = ()) -> str:
    """The table, a block for each eval. compared: pairs whose difference, the second minus the first, follows the results."""
    sources = list(dict.fromkeys(one.of for one in results))
    letters = {of: chr(ord("A") + i) if i < 26 else f"{i}:" for i, of in enumerate(sources)} if len(sources) > 1 else {}
    lines = [f"{letter}: {of}" for of, letter in letters.items()]
    for label in dict.fromkeys(one.label for one in results):
        mine = [one for one in results if one.label == label]
        lines += _block(mine, [pair for pair in compared if pair[1].label == label], letters)
    lines.append(f"[ ]: {LEVEL:.0%} interval, bootstrap over prompts; a difference is paired by prompt")
    return "\n".join(lines)


def before_after(results: Sequence[Result]) -> list[tuple[Result, Result]]:
    """The first and the last result of each label, where there are two."""
    pairs = []
    for label in dict.fromkeys(one.label for one in results):
        mine = [one for one in results if one.label == label]
        if len(mine) > 1:
            pairs.append((mine[0], mine[-1]))
    return pairs


def write_table(results: Results, *lines: str) -> str:
    """Write `table.txt` about everything in a folder of results, with lines below; returns the table without them."""
    found = results.read()
    table = text(found, before_after(found))
    write_text(results.folder / TABLE, "\n".join([table, *lines]) + "\n")
    return table


def _block(results: Sequence[Result], compared: Sequence[tuple[Result, Result]], letters: dict[str, str]) -> list[str]:
    """The lines about one eval."""
    measures = list(dict.fromkeys(m for one in results for m in one.measures))
    if all(one.values("reward") == one.values("accuracy") for one in results):
        measures.remove("reward")
    rows = [("step", *measures, NO_REWARD), *(_line(one, measures, letters) for one in results)]
    trained = {name for one in results for label, name, _ in one.checked.get("trained", ()) if label == one.label}
    notes = [f"  {len(trained)} of these prompts were drawn for training: this is no held-out score"] if trained else []
    for a, b in compared:
        found = differences(a, b)
        by_measure = {one.measure: one for one in found}
        gaps = [_interval(by_measure[m].gap, "+") if m in by_measure else "" for m in measures]
        verdicts = [by_measure[m].verdict if m in by_measure else "" for m in measures]
        rows += [(f"{_at(b, letters)} - {_at(a, letters)}", *gaps, ""), ("", *verdicts, "")] if found else []
        notes += _warnings(found, a, b, letters)
    return [_heading(results[0]), *_columns(rows), *notes, ""]


def _heading(one: Result) -> str:
    s = one.settings
    asked = f"{len(one.rows)} prompts ({s['split']}) x {s['samples']}"
    return f"{one.label}: {s['environment']}, {asked}, " + (f"temperature {s['temperature']:g}" if s["temperature"] else "greedy")


def _line(one: Result, measures: Sequence[str], letters: dict[str, str]) -> tuple[str, ...]:
    cells = [_interval(one.intervals[m]) if m in one.measures else "" for m in measures]
    causes = ", ".join(f"{n} {cause}" for cause, n in sorted(one.causes.items()))
    return (_at(one, letters), *cells, f"{causes} of {one.completions}" if causes else "0")


def _warnings(found: Sequence[Difference], a: Result, b: Result, letters: dict[str, str]) -> Iterator[str]:
    """What keeps a difference from being about the weights alone."""
    pair = f"  {_at(b, letters)} and {_at(a, letters)}"
    if not found:
        yield f"{pair} have no prompt in common: they cannot be compared"
        return
    shared, most = found[0].gap.prompts, max(len(a.rows), len(b.rows))
    if shared < most:
        yield f"{pair} are compared over the {shared} prompts that both asked, of {most}"
    if found[0].unlike:
        yield f"{pair} were asked otherwise, a difference is not of the weights alone: {'; '.join(found[0].unlike)}"


def _at(one: Result, letters: dict[str, str]) -> str:
    return f"{letters[one.of]} {one.step}" if letters else str(one.step)


def _interval(one: Interval, sign: str = "") -> str:
    spec = f"{sign}.3f"
    return f"{one.mean:{spec}} [{one.low:{spec}}, {one.high:{spec}}]"


def _columns(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        cells = [f"{c:<{w}}" if i else f"{c:>{w}}" for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        yield f"  {'  '.join(cells)}".rstrip()
