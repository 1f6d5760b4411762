"""`posttrain new KIND NAME [--dir DIR]`: a plug-in package that works, to change into one's own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK
from posttrain.plugins.scaffold import DRAFTS, write_package


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="posttrain new", description="Write a plug-in package to begin with.", allow_abbrev=False)
    made.add_argument("kind", choices=list(DRAFTS), help="what it brings")
    made.add_argument("name", help="of the package and the plug-in: lower-case letters and digits, joined by - or _")
    made.add_argument("--dir", type=Path, default=Path(), help="where the folder goes; default: here")
    return made


def run(args: argparse.Namespace) -> int:
    package = write_package(args.kind, args.name, args.dir)
    for path in sorted(path for path in package.folder.rglob("*") if path.is_file()):
        print(path)
    print("\nnext:")
    print(f"  cd {package.folder}")
    print("  pip install -e '.[test]'")
    print("  pytest")
    print(f"  posttrain train experiment=arithmetic_grpo rl.steps=3 {package.selection}")
    for info in package.clashes:
        full = f"{package.folder.name}/{package.name}"
        print(f"note: {info.owner} brings {package.name!r}, too; write {full} where both are installed", file=sys.stderr)
    return EXIT_OK
