"""`posttrain train`: compose, check, and run; or print the config; or sweep."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from posttrain.config.load import LoadedConfig

EPILOG = """\
examples:
  posttrain train experiment=arithmetic_grpo
  posttrain train experiment=arithmetic_grpo rl.steps=20 rl.optimizer.lr=1e-5 rl.objective.clip_high=0.3
  posttrain train --config my.yaml seed=1
  posttrain train experiment=arithmetic_grpo --cfg job > my.yaml
  posttrain train --config my.yaml --dry-run
  posttrain train --multirun experiment=arithmetic_grpo seed=1,2,3
  posttrain train --resume outputs/arithmetic_grpo-20260101-120000

order: defaults < experiment < --config < command line
KEY=VALUE, +KEY=VALUE and ++KEY=VALUE mean the same; ~KEY takes a key away.
A list is [a,b], a mapping {a: 1}; text with , or quotes in it is quoted twice: 'name="a,b"'.
All keys: docs/reference/config.md
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain train",
        description="Train a model as configured.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="posttrain train [experiment=NAME] [KEY=VALUE ...] [flags]",
    )
    what, where = add_config_arguments(made)
    what.add_argument("--multirun", "-m", action="store_true", help="one run for each combination of comma-separated values")
    where.add_argument("--dry-run", action="store_true", help="check all that needs no weights, show a prompt, and stop")
    where.add_argument("--cfg", choices=["job"], help="print the resolved config and stop")
    where.add_argument("--traceback", action="store_true", help="show where an error came from")
    return made


def add_config_arguments(made: argparse.ArgumentParser) -> tuple[argparse._ArgumentGroup, argparse._ArgumentGroup]:
    """The arguments that every command which trains has: what to run, and where its files go. Returns both groups."""
    made.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="config values; experiment=NAME selects from the catalogs"
    )
    what = made.add_argument_group("what to run")
    what.add_argument("--config", metavar="FILE", help="a YAML file with the same keys")
    what.add_argument("--resume", metavar="RUN", help="go on with this run directory, or from one of its checkpoints")
    where = made.add_argument_group("where and how")
    where.add_argument("--run", metavar="DIR", help="folder for new runs (default: $POSTTRAIN_OUTPUT_ROOT, else ./outputs)")
    return what, where


def run(args: argparse.Namespace) -> int:
    if args.multirun:
        from posttrain.cli.multirun import multirun

        _refuse_together(args, "--multirun", ("resume", "cfg"))
        flags = ["--dry-run"] if args.dry_run else []
        return multirun(args.overrides, config_file=args.config, root=args.run, flags=flags)
    if args.dry_run:
        _refuse_together(args, "--dry-run", ("resume", "cfg"))
    loaded = load(args)
    if args.dry_run:
        from posttrain.loop.dry_run import dry_run

        print("\n".join(dry_run(loaded, root=args.run)))
        return EXIT_OK
    if args.cfg:
        print(loaded.yaml(), end="")
        for note in loaded.notes:
            print(f"note: {note}", file=sys.stderr)
        return EXIT_OK
    from posttrain.loop.run import train

    train(loaded, run_dir=args.run, resume=args.resume)
    return EXIT_OK


def load(args: argparse.Namespace) -> LoadedConfig:
    """The checked config of a new run, or of a run to go on with."""
    from posttrain.config.load import load_config

    if args.resume is None:
        return load_config(args.overrides, config_file=args.config)
    _refuse_together(args, "--resume", ("config", "run"))
    if any(text.lstrip("+").startswith("experiment=") for text in args.overrides):
        raise ConfigError(
            "a resumed run keeps its experiment", fix="leave experiment= out; its values are in the run's config.yaml"
        )
    from posttrain.tracking.run_dir import find_run

    return load_config(args.overrides, config_file=find_run(Path(args.resume)) / "config.yaml")


def _refuse_together(args: argparse.Namespace, flag: str, others: tuple[str, ...]) -> None:
    clash = [f"--{name}" for name in others if getattr(args, name)]
    if clash:
        raise ConfigError(f"{flag} does not go with {' and '.join(clash)}", fix=f"leave out {clash[0]}", code="usage")
