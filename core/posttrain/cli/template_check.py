"""`posttrain template-check MODEL`: what multi-turn training with a tokenizer and a chat template would meet."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK

if TYPE_CHECKING:
    from posttrain.data.template_check import Line

EXIT_WRONG = 1

EPILOG = """\
MODEL: a Hugging Face folder or a name on the hub. No weights are read and nothing is sampled: fixed dialogues and texts go
through the functions that a run uses.

verdicts:
  ok      as it should be
  note    good to know
  splits  the template rewrites this turn later on, so rows may split there
  WRONG   training would go wrong, most of these without a message

The exit code is 0 when nothing is WRONG, 1 when something is; 2 for a template that is absent or fails, 4 for a model that is
absent.

examples:
  posttrain template-check Qwen/Qwen3-0.6B
  posttrain template-check outputs/my-model --chat-template template.jinja
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain template-check",
        description="Check a tokenizer and its chat template for multi-turn training, before any run.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("model", metavar="MODEL", help="as model.name_or_path")
    made.add_argument("--chat-template", metavar="FILE", help="in the place of the model's own, as model.chat_template")
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.data.hub import generation_config
    from posttrain.data.packer import init_data_packer
    from posttrain.data.template_check import check
    from posttrain.policy.load import quiet_libraries

    quiet_libraries()
    lines = check(init_data_packer(args.model, chat_template=args.chat_template), generation_config(args.model))
    print(json.dumps(as_json(args.model, lines), indent=1) if args.json else "\n".join(as_text(lines)))
    return EXIT_WRONG if _with(lines, "WRONG") else EXIT_OK


def as_json(model: str, lines: Sequence[Line]) -> dict[str, Any]:
    """Everything that was found."""
    from dataclasses import asdict

    return {"model": model, "works": not _with(lines, "WRONG"), "lines": [asdict(line) for line in lines]}


def as_text(lines: Sequence[Line]) -> Iterator[str]:
    """A table, what to do about its lines, and a last line that says it all."""
    from posttrain.cli.text import table

    yield table(("check", "verdict", "found"), [(line.name, line.verdict, line.found) for line in lines])
    yield ""
    fixes: dict[str, list[str]] = {}
    for line in lines:
        if line.fix:
            fixes.setdefault(line.fix, []).append(line.name)
    yield from (f"{'; '.join(names)}: {fix}" for fix, names in fixes.items())
    if wrong := _with(lines, "WRONG"):
        yield f"WRONG: {', '.join(wrong)}"
    elif splits := _with(lines, "splits"):
        yield f"multi-turn works; rows may split: {', '.join(splits)}"
    else:
        yield "multi-turn works, no turn splits"


def _with(lines: Sequence[Line], verdict: str) -> list[str]:
    return [line.name for line in lines if line.verdict == verdict]
