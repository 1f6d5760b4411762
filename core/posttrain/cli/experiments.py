"""`posttrain experiments list`."""

from __future__ import annotations

import argparse
import sys

from posttrain.cli.main import Parser
from posttrain.cli.text import table
from posttrain.errors import EXIT_OK


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="posttrain experiments", description="What experiment=NAME can select.", allow_abbrev=False)
    made.add_argument("action", choices=["list"], help="names, where they come from, what they are")
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.config.catalog import load_catalog

    catalog = load_catalog()
    rows = [
        (name, f"{e.module.module} ({e.module.owner})", ", ".join(e.parents) or "-", e.help)
        for name, found in sorted(catalog.experiments.items())
        for e in found
    ]
    print(table(("name", "from", "inherits", "catalog"), rows))
    for warning in catalog.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return EXIT_OK
