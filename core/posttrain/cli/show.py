"""`posttrain show RUN`: sample rollouts of a run."""

from __future__ import annotations

import argparse

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain show", description="Print sample rollouts with reward parts and advantages.", allow_abbrev=False
    )
    made.add_argument("run", metavar="RUN", help="a run directory")
    made.add_argument("--step", type=int, metavar="N", help="a batch step (default: the last)")
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.tracking.show import show

    show(args.run, args.step)
    return EXIT_OK
