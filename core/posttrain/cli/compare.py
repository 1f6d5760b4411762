"""`posttrain compare RUN … [--plot OUT.png]`: one line for each setting of a sweep, and of two settings a verdict."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK

if TYPE_CHECKING:
    from posttrain.tracking.comparison import Comparison, Row
    from posttrain.tracking.verdict import Interval
    from posttrain.tracking.versus import Versus

EPILOG = """\
Runs that differ in nothing but the seed are one row: mean ± standard deviation over the seeds.

Of exactly two settings there is a verdict: A better, B better or not distinguishable, at equal batch steps, tokens and seconds,
with 95% intervals; and how far engine and trainer were apart (staleness, log-prob gap). A is the one named first.

examples:
  posttrain compare outputs/synchronous outputs/asynchronous
  posttrain compare multirun/2026-01-01/12-00-00
  posttrain compare outputs/first-run outputs/second-run --metric reward/mean --plot rewards.png
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain compare",
        description="One line for each setting of a sweep: the metric before and after. Of two settings: which is better.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or folders of them")
    made.add_argument("--metric", help="what to compare (default: the held-out reward, else the one in training)")
    made.add_argument("--plot", metavar="OUT.png", help="draw the curves, too (needs posttrain[plot])")
    made.add_argument("--title", default="", help="of the drawing")
    made.add_argument("--json", action="store_true", help="for programs; with every point of the curves")
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.tracking.comparison import chosen_metric, compare_runs, find_runs
    from posttrain.tracking.versus import verdict_of

    if args.plot:
        from posttrain.tracking.plot import check_drawing

        check_drawing(Path(args.plot))
    runs = find_runs(args.runs)
    comparison = compare_runs(runs, args.metric or chosen_metric(runs))
    versus = verdict_of(runs, comparison, asked=args.metric is not None)
    if args.json:
        print(json.dumps(as_json(comparison) | {"verdict": versus and versus_json(versus)}, indent=1, default=str))
    else:
        print(as_text(comparison))
        if versus or len(runs) == 2:
            print(f"\n{versus_text(versus) if versus else _no_verdict(comparison)}")
    if args.plot:
        from posttrain.tracking.plot import plot_comparison

        plot_comparison(comparison, Path(args.plot), args.title)
    return EXIT_OK


def as_text(comparison: Comparison) -> str:
    """The table, a row for each setting."""
    from posttrain.cli.text import table

    keys = [key for key in comparison.keys if key != "seed"]
    seeds = any(len(row.runs) > 1 for row in comparison.rows)
    header = [*keys, *(["seeds"] if seeds else []), "before", "after", "mean of all steps", "run"]
    rows = [
        [
            *(str(row.label[key]) for key in keys),
            *([str(len(row.runs))] if seeds else []),
            _spread(row.before),
            _spread(row.after),
            "–" if row.mean is None else f"{row.mean:.3f}",
            _where(row),
        ]
        for row in comparison.rows
    ]
    lacking = [_lacking(row, comparison.metric) for row in comparison.rows if row.without]
    return "\n".join([comparison.metric, table(header, rows), *lacking])


def as_json(comparison: Comparison) -> dict[str, object]:
    """Everything of a comparison."""
    from posttrain.tracking.text import near

    return {
        "metric": comparison.metric,
        "rows": [
            {
                "label": {key: value for key, value in row.label.items()},
                "seeds": list(row.seeds),
                "runs": [near(run) for run in row.runs],
                "without": [near(run) for run in row.without],
                "steps": [step for step, _ in row.curve],
                "values": [list(values) for _, values in row.curve],
            }
            for row in comparison.rows
        ],
    }


def versus_text(versus: Versus) -> str:
    """The table of two settings against each other, and the sentence below it."""
    from posttrain.cli.text import table
    from posttrain.tracking.text import number

    scores = [
        [axis.name, f"{axis.a:.4f}", f"{axis.b:.4f}", _interval(axis.difference),
         f"{axis.last_a:.4f}", f"{axis.last_b:.4f}", _interval(axis.last_difference)]
        for axis in versus.axes
    ]  # fmt: skip
    header = ["at equal", "A", "B", "B − A, 95% interval", "A, last fifth", "B, last fifth", "B − A, 95% interval"]
    others = [
        *([f"{name} in all", number(a), number(b)] for name, (a, b) in versus.totals.items()),
        *([name, number(a), number(b)] for name, (a, b) in versus.beside.items()),
    ]
    parts = [
        f"A: {versus.names[0]}   B: {versus.names[1]}   {versus.metric}",
        table(header, scores),
        "",
        table(["", "A", "B"], others),
        "",
        f"verdict: {versus.sentence}",
        versus.caveat,
    ]
    return "\n".join(parts).rstrip()


def versus_json(versus: Versus) -> dict[str, object]:
    """Everything of a verdict; an interval without an end (of one point) has null there."""

    def interval(one: Interval) -> dict[str, object]:
        ends = [end if math.isfinite(end) else None for end in (one.low, one.high)]
        return {"mean": one.mean, "low": ends[0], "high": ends[1], "points": one.points}

    return {
        "metric": versus.metric,
        "a": versus.names[0],
        "b": versus.names[1],
        "verdict": versus.verdict,
        "sentence": versus.sentence,
        "caveat": versus.caveat,
        "pairs": versus.pairs,
        "at_equal": {
            axis.name: {
                "winner": axis.winner,
                "a": axis.a, "b": axis.b, "difference": interval(axis.difference),
                "last_a": axis.last_a, "last_b": axis.last_b, "last_difference": interval(axis.last_difference),
            }
            for axis in versus.axes
        },
        "totals": {name: {"a": a, "b": b} for name, (a, b) in versus.totals.items()},
        "metrics": {name: {"a": a, "b": b} for name, (a, b) in versus.beside.items()},
    }  # fmt: skip


def _no_verdict(comparison: Comparison) -> str:
    if len(comparison.rows) == 1:
        return "no verdict: the runs differ in nothing that somebody set, but the seed"
    return f"no verdict: the runs have no steps in common with {comparison.metric}"


def _interval(interval: Interval) -> str:
    return f"{interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def _lacking(row: Row, metric: str) -> str:
    from posttrain.tracking.text import near

    count, runs = len(row.without), len({*row.runs, *row.without})
    have = "has" if count == 1 else "have"
    return f"{count} of {runs} runs of {row.name} {have} no {metric}: {', '.join(map(near, row.without))}"


def _where(row: Row) -> str:
    from posttrain.tracking.text import near

    return near(row.runs[0]) + (f" and {len(row.runs) - 1} more" if len(row.runs) > 1 else "")
