"""`posttrain replay RUN --step N`: a recorded batch step computed again. `--bisect A B`: where two runs part."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from posttrain.loop.replay import Replay
    from posttrain.tracking.bisect import Bisection

EXIT_DIFFERS = 1

EPILOG = """\
RUN: a run directory. Needed are its rollouts of the step (tracking.rollouts_every) and the checkpoint before it; for every
step train with checkpoint.every=1 checkpoint.keep_every=1. Step 1 starts from the model. Nothing is generated or scored:
neither the engine nor the environment is needed.

Each number is equal to the bit, within rounding, or DIFFERS. In one process, on the run's machine and thread count, all are
equal to the bit; with --dtype float64, on another machine, or of a run of several policy ranks, they are within rounding.

The exit code is 0 when nothing differs (--bisect: to the bit), 1 when something does.

examples:
  posttrain replay outputs/my-run --step 12
  posttrain replay outputs/my-run --step 12 --dtype float64
  posttrain replay --bisect outputs/my-run outputs/the-same-again
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain replay",
        description="Compute a recorded batch step again and compare; or find the first step at which two runs differ.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", nargs="?", metavar="RUN", help="a run directory")
    made.add_argument("--step", type=int, metavar="N", help="the batch step")
    made.add_argument("--dtype", choices=["float64"], help="compute everything in it (default: as the run did)")
    made.add_argument("--bisect", nargs=2, metavar=("RUN_A", "RUN_B"), help="compare two runs step by step instead")
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def run(args: argparse.Namespace) -> int:
    if args.bisect:
        if args.run or args.step is not None or args.dtype:
            fix = "posttrain replay --bisect RUN_A RUN_B"
            raise ConfigError("--bisect takes two runs and nothing else", fix=fix, code="usage")
        return _bisect(args)
    if args.run is None or args.step is None:
        raise ConfigError("a replay needs a run and a step", fix="posttrain replay RUN --step N", code="usage")
    from posttrain.loop.replay import replay
    from posttrain.policy.load import quiet_libraries

    quiet_libraries()
    found = replay(args.run, args.step, dtype=args.dtype, say=lambda text: print(text, file=sys.stderr))
    print(json.dumps(as_json(found), indent=1) if args.json else "\n".join(as_text(found)))
    return EXIT_OK if found.same else EXIT_DIFFERS


def _bisect(args: argparse.Namespace) -> int:
    from posttrain.tracking.bisect import bisect

    found = bisect(*args.bisect)
    print(json.dumps(bisection_json(found), indent=1, default=str) if args.json else "\n".join(bisection_text(found)))
    return EXIT_OK if found.same else EXIT_DIFFERS


def as_json(found: Replay) -> dict[str, Any]:
    """Everything of a replay."""
    return {
        "run": str(found.run), "step": found.step, "before": found.before, "dtype": found.dtype, "same": found.same,
        "metrics": [
            {"name": line.name, "recorded": line.recorded, "recomputed": line.recomputed, "difference": line.difference,
             "verdict": line.verdict}
            for line in found.lines
        ],
        "not_recomputed": list(found.left_out), "notes": list(found.notes),
    }  # fmt: skip


def as_text(found: Replay) -> Iterator[str]:
    """The lines of a replay: a table, what was not compared, and a last line that says it all."""
    from posttrain.cli.text import table
    from posttrain.tracking.agreement import DIFFERS, EQUAL
    from posttrain.tracking.text import near

    yield f"step {found.step} of {near(found.run)}, from {found.before}, in {found.dtype}"
    yield from found.notes
    yield ""
    rows = [(line.name, _value(line.recorded), _value(line.recomputed), _value(line.difference), line.verdict)
            for line in found.lines]  # fmt: skip
    yield table(("metric", "recorded", "recomputed", "difference", ""), rows)
    if found.left_out:
        yield f"not computed by a replay: {', '.join(found.left_out)}"
    yield ""
    verdicts = [line.verdict for line in found.lines]
    if not found.same:
        yield f"DIFFERS in {verdicts.count(DIFFERS)} of {len(verdicts)}: " + ", ".join(
            line.name for line in found.lines if line.verdict == DIFFERS
        )
    elif set(verdicts) == {EQUAL}:
        yield f"the same: all {len(verdicts)} are equal to the bit"
    else:
        yield f"the same: {verdicts.count(EQUAL)} of {len(verdicts)} are equal to the bit, the others within rounding"


def bisection_json(found: Bisection) -> dict[str, Any]:
    """Everything of a comparison of two runs."""
    from dataclasses import asdict

    return asdict(found) | {"same": found.same}


def bisection_text(found: Bisection) -> Iterator[str]:
    """The lines of a comparison of two runs, the last of them the outcome."""
    from posttrain.tracking.text import near

    yield from (f"A  {near(found.a)}", f"B  {near(found.b)}", "")
    for change in found.config:
        yield f"config: {change.name} is {change.a!r} in A, {change.b!r} in B"
    if found.only:
        yield f"only one of them has, not compared: {', '.join(found.only)}"
    if found.step is not None:
        yield f"the first batch step that differs is {found.step}"
    if found.recorded is not None:
        yield from _recorded(found)
    for tensor in found.tensors:
        what = f"  checkpoint of step {tensor.step}, {tensor.part}"
        yield f"{what}: all {tensor.of} tensors are equal to the bit" if tensor.name is None else (
            f"{what}: {tensor.tensors} of {tensor.of} tensors differ, first {tensor.name}: "
            f"{tensor.elements:,} element(s), by up to {tensor.largest:.3g}"
        )
    if not found.tensors:
        yield "  no checkpoint is in both"
    if found.same:
        ends = "" if len(set(found.steps)) == 1 else f"; A has {found.steps[0]} steps, B {found.steps[1]}"
        yield f"equal to the bit up to step {found.last}{ends}"


def _recorded(found: Bisection) -> Iterator[str]:
    """In what the first recorded step that differs does."""
    at = f"  recorded of step {found.recorded}"
    if found.metric is not None:
        yield f"{at}: metric {found.metric.name} is {_value(found.metric.a)} in A, {_value(found.metric.b)} in B"
    else:
        yield f"{at}: all metrics agree"
    if not found.rollouts:
        yield f"{at}: no rollouts in both"
    elif (t := found.trajectory) is None:
        yield f"{at}: all trajectories are equal to the bit"
    else:
        place = "" if t.position is None else f", token {t.position}"
        yield f"{at}: trajectory {t.place}, sample {t.sample}: {t.field}{place} is {_value(t.a)} in A, {_value(t.b)} in B"


def _value(value: Any) -> str:
    """All digits of a number: those at the end are what this is about."""
    return "–" if value is None else repr(value) if isinstance(value, float) else str(value)
