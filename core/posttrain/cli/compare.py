"""`posttrain compare RUN … [--plot OUT.png]`: one line for each setting of a sweep."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK

if TYPE_CHECKING:
    from posttrain.tracking.comparison import Comparison, Row

EPILOG = """\
Runs that differ in nothing but the seed are one row: mean ± standard deviation over the seeds.

examples:
  posttrain compare multirun/2026-01-01/12-00-00
  posttrain compare outputs/first-run outputs/second-run --metric reward/mean --plot rewards.png
"""


def parser() -> argparse.ArgumentParser:
    from posttrain.tracking.metric_names import HELD_OUT

    made = Parser(
        prog="posttrain compare",
        description="One line for each setting of a sweep: the metric before and after.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or folders of them")
    made.add_argument("--metric", default=HELD_OUT, help="what to compare (default: %(default)s)")
    made.add_argument("--plot", metavar="OUT.png", help="draw the curves, too (needs posttrain[plot])")
    made.add_argument("--title", default="", help="of the drawing")
    made.add_argument("--json", action="store_true", help="for programs; with every point of the curves")
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.tracking.comparison import compare_runs, find_runs

    if args.plot:
        from posttrain.tracking.plot import check_drawing

        check_drawing(Path(args.plot))
    comparison = compare_runs(find_runs(args.runs), args.metric)
    print(json.dumps(as_json(comparison), indent=1, default=str) if args.json else as_text(comparison))
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
