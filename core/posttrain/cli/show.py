"""`posttrain show RUN`: sample rollouts of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK, PosttrainError


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain show", description="Print sample rollouts with reward parts and advantages.", allow_abbrev=False
    )
    made.add_argument("run", metavar="RUN", help="a run directory")
    made.add_argument("--step", type=int, metavar="N", help="a batch step (default: the last)")
    made.add_argument("--sample", metavar="ID", help="one episode of it, token by token")
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.tracking.show import show

    if args.sample is None:
        show(args.run, args.step)
    else:
        from posttrain.tracking.episode_table import show_episode

        show_episode(args.run, args.sample, args.step, spell=_spell(args.run))
    return EXIT_OK


def _spell(run: str) -> Callable[[Sequence[int]], str] | None:
    """What the run's tokenizer makes of ids; None where it is no longer there."""
    from posttrain.data.packer import load_tokenizer
    from posttrain.loop.export import run_model
    from posttrain.loop.model_folder import made_folder
    from posttrain.tracking.run_dir import find_run

    try:
        folder = find_run(run)
        model = run_model(folder)
        tokenizer = load_tokenizer(made_folder(model, folder.parent) or "", trust_remote_code=model.trust_remote_code)
    except (PosttrainError, OSError):
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
