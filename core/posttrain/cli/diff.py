"""`posttrain diff A B`: what tells two runs apart, and what they came to."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK

if TYPE_CHECKING:
    from posttrain.tracking.difference import Difference, Side

WIDEST = 40
"""Characters of a value; longer ones are cut in the table, not in --json."""

EPILOG = """\
A and B: a run directory, one of its checkpoints, a config file, or experiment=NAME.

Each value is followed by where it came from: default, experiment NAME, FILE:LINE, call (from Python), command line,
resume command line, auto (the objective chose it by what the run is).
The exit code is 0 whether they differ or not.

examples:
  posttrain diff outputs/first-run outputs/second-run
  posttrain diff experiment=arithmetic_grpo outputs/first-run
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain diff",
        description="Compare two runs: config, origins, versions, data, results.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("a", metavar="A")
    made.add_argument("b", metavar="B")
    made.add_argument("--all", action="store_true", help="values that agree, too")
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.tracking.difference import compare, read_side

    a, b = read_side(args.a), read_side(args.b)
    difference = compare(a, b, everything=args.all)
    print(json.dumps(as_json(a, b, difference), indent=1) if args.json else "\n".join(as_text(a, b, difference)))
    return EXIT_OK


def as_json(a: Side, b: Side, difference: Difference) -> dict[str, Any]:
    """Everything of a difference; what one side lacks has neither value nor origin."""
    from posttrain.config.layers import ABSENT

    def side(value: Any, origin: str) -> dict[str, Any]:
        return {} if value is ABSENT else {"value": value, "origin": origin}

    return {
        "a": a.name,
        "b": b.name,
        "config": {path: {"a": side(*va), "b": side(*vb)} for path, (va, vb) in difference.config.items()},
        "same": difference.same,
        **{name: _sides(getattr(difference, name)) for name in ("provenance", "data", "results")},
    }


def as_text(a: Side, b: Side, difference: Difference) -> Iterator[str]:
    """The lines of a difference."""
    from posttrain.tracking.difference import NOT_RECORDED
    from posttrain.tracking.text import number

    yield from (f"A  {a.name}", f"B  {b.name}", "")
    rows = [
        (path, _cell(va), origin_a, _cell(vb), origin_b) for path, ((va, origin_a), (vb, origin_b)) in difference.config.items()
    ]
    if rows:
        yield from _aligned(("config", "A", "from", "B", "from"), rows)
    yield f"{difference.same} other values agree" if rows else f"the configs agree in all {difference.same} values"
    for side, letter in ((a, "A"), (b, "B")):
        if side.origins is None:
            yield f"{letter} has no origins.json, so where its values came from is {NOT_RECORDED}"
    for title, pairs, show in (
        ("ran on", difference.provenance, _cell),
        ("data", difference.data, _cell),
        ("results", difference.results, number),
    ):
        if pairs:
            yield ""
            yield from _aligned((title, "A", "B"), [(key, show(va), show(vb)) for key, (va, vb) in pairs.items()])


def _sides(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, dict[str, Any]]:
    return {key: {"a": va, "b": vb} for key, (va, vb) in pairs.items()}


def _cell(value: Any) -> str:
    """A value as YAML would have it, cut; paths from the current folder."""
    from posttrain.tracking.text import near

    text = near(value) if isinstance(value, str) else repr(value) if value.__class__.__name__ == "_Absent" else json.dumps(value)
    text = " ".join(text.split()) if text.strip() else repr(text)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    from posttrain.cli.text import table

    yield from table(header, rows).splitlines()
