"""`posttrain eval RUN …`: evals of checkpoints and models, with intervals; of two, what tells them apart."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from posttrain.evals.result import Result

EPILOG = """\
WHAT: a run (its newest checkpoint, or --step), RUN/checkpoints/step_N, or a Hugging Face folder. A run brings its config and its
own evals (evals=[…]; without, the test split of what it trained on). A model alone takes those of the first run beside it, or
--env, or evals=[{name: …, options: {…}}].

Each difference is paired by prompt; one whose 95% interval contains 0 is not distinguishable. A completion that failed or has no
reward is wrong. Rows that the run trained on are refused: its ledger is looked through first.

Results: RUN/evals/NAME/STEP.jsonl (a line per prompt) and summary.json; --out for elsewhere.

examples:
  posttrain eval outputs/my-run
  posttrain eval outputs/my-run --step 0,20,40 --samples 8 --k 1,4
  posttrain eval outputs/my-run --env math --prompts 100 --temperature 0.6 --samples 16
  posttrain eval outputs/my-run my-model rollout.engine=vllm
  posttrain eval --compare outputs/first-run outputs/second-run
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain eval",
        description="Measure checkpoints and models on held-out prompts, and tell what differs between them.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="posttrain eval WHAT ... [KEY=VALUE ...] [flags]",
    )
    made.add_argument("what", nargs="*", metavar="WHAT", help="runs, checkpoints, models; and config values, KEY=VALUE")
    made.add_argument("--env", action="append", default=[], metavar="NAME", help="an environment to ask instead; may be repeated")
    made.add_argument("--step", metavar="N[,N]", help="checkpoints of the runs: steps, 0 (before training), or all")
    made.add_argument("--prompts", type=int, metavar="N", help="rows of each eval, from the first on (0: all)")
    made.add_argument("--samples", type=int, metavar="N", help="completions per prompt")
    made.add_argument("--k", metavar="K[,K]", help="estimate pass@k and pass^k; needs more samples than k")
    made.add_argument("--temperature", type=float, metavar="T", help="of sampling; 0: greedy")
    made.add_argument("--max-tokens", type=int, metavar="N", help="length of a completion")
    made.add_argument("--config", metavar="FILE", help="a YAML file with a config, for models of no run")
    made.add_argument("--out", metavar="DIR", help="folder of the results")
    made.add_argument("--allow-trained", action="store_true", help="measure also on rows that the run trained on")
    made.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two recorded results instead; nothing is generated")
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def run(args: argparse.Namespace) -> int:
    if args.compare:
        if args.what:
            raise ConfigError("--compare takes two recorded results and nothing else", fix="leave the rest out", code="usage")
        from posttrain.evals.standalone import recorded

        _print([*recorded(args.compare[0]), *recorded(args.compare[1])], args)
        return EXIT_OK
    overrides = [text for text in args.what if "=" in text or re.fullmatch(r"~[\w.]+", text)]
    given = [text for text in args.what if text not in overrides]
    if not given:
        raise ConfigError("there is nothing to evaluate", fix="posttrain eval RUN, or RUN/checkpoints/step_N", code="usage")
    from posttrain.evals.standalone import Flags, evaluate
    from posttrain.policy.load import quiet_libraries

    quiet_libraries()
    results = evaluate(
        given,
        overrides,
        names=args.env,
        steps=_steps(args.step),
        flags=Flags(args.samples, _numbers(args.k, "--k"), args.prompts, args.temperature, args.max_tokens),
        config_file=args.config,
        out=args.out,
        allow_trained=args.allow_trained,
        say=lambda line: print(line, file=sys.stderr),
    )
    _print(results, args)
    return EXIT_OK


def _print(results: Sequence[Result], args: argparse.Namespace) -> None:
    from posttrain.evals.standalone import pairs_of
    from posttrain.evals.table import differences, text

    pairs = pairs_of(results)
    if args.json:
        gaps = [one.plain() for a, b in pairs for one in differences(a, b)]
        print(json.dumps({"evals": [one.summary() for one in results], "differences": gaps}, indent=1, ensure_ascii=False))
    else:
        print(text(results, pairs))


def _steps(given: str | None) -> Sequence[int] | str | None:
    return given if given in (None, "all") else _numbers(given, "--step")


def _numbers(given: str | None, flag: str) -> tuple[int, ...] | None:
    if given is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", given):
        raise ConfigError(f"{flag} {given} is no list of numbers", fix=f"write {flag} 1,4", code="usage")
    return tuple(int(number) for number in given.split(","))
