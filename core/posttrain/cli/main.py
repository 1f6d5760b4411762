"""`posttrain COMMAND …`: finds the command, runs it, turns what it raises into one screen and an exit code."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from posttrain.errors import EXIT_CONFIG, EXIT_OK, ConfigError

COMMANDS = {
    "train": "posttrain.cli.train",
    "launch": "posttrain.cli.launch",
    "plan": "posttrain.cli.plan",
    "doctor": "posttrain.cli.doctor",
    "eval": "posttrain.cli.eval",
    "show": "posttrain.cli.show",
    "diff": "posttrain.cli.diff",
    "compare": "posttrain.cli.compare",
    "replay": "posttrain.cli.replay",
    "export": "posttrain.cli.export",
    "plugins": "posttrain.cli.plugins",
    "new": "posttrain.cli.new",
    "experiments": "posttrain.cli.experiments",
    "sim": "posttrain.cli.sim",
    "template-check": "posttrain.cli.template_check",
}
"""Each command's module; it defines `parser()` and `run(args)`."""

HELP = """\
posttrain: reinforcement learning after pre-training; everywhere: --help, --version, --traceback
train
  posttrain train experiment=NAME [KEY=VALUE ...]   train; posttrain train --help has the rest
  posttrain train --resume RUN | --multirun KEY=A,B go on with a run; one run for each value
  posttrain launch local|ray|slurm KEY=VALUE ...    train here, in a Ray cluster, or as a Slurm job
  posttrain plan experiment=NAME [KEY=VALUE ...]    grid, batches, memory and weight transfer, without a GPU

look
  posttrain show RUN [--step N]                     sample rollouts with rewards and advantages
  posttrain eval RUN|MODEL ... [--env NAME]         held-out scores with intervals; of two, what differs
  posttrain export RUN OUT [--step N]               a Hugging Face folder from a checkpoint
  posttrain diff A B                                what tells two runs apart, and what they came to
  posttrain compare RUN ... [--plot OUT.png]        one line for each setting; of two, which is better
  posttrain replay RUN --step N                     a recorded step again; --bisect A B: where two part
  posttrain experiments list                        what experiment= can name
  posttrain template-check MODEL                    what its chat template does to multi-turn training
  posttrain sim --seeds A:B                         the asynchronous loop under simulated failures
  posttrain doctor [--report]                       what this machine lacks for a run, each with what to do

plug-ins
  posttrain plugins list|doctor|check [NAME]        what is installed; what is wrong with it; its laws
  posttrain new env|algorithm|datapacker|hook NAME  a package to begin with, and its tests
exit codes: 0 done, 1 unexpected, 2 configuration or plug-in, 3 data, 4 engine or model start,
            5 run aborted, 75 worth resuming, 130 Ctrl-C, 143 SIGTERM
"""


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread so that everything is closed as for Ctrl-C."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of exiting, so that a bad flag looks like every other error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix=f"{self.prog} --help", code="usage")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv`: without the program's name; default: the command line."""
    from posttrain.cli.report import report

    arguments = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, _terminate) if in_main_thread else None
    try:
        return _dispatch(arguments)
    except BrokenPipeError:
        sys.stdout = None  # type: ignore[assignment]
        return EXIT_OK
    except (Exception, KeyboardInterrupt) as exc:
        return report(exc, traceback=traceback)
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous)


def command() -> NoReturn:
    """`posttrain`: `main` as a process. A thread that never ends changes neither its exit code nor whether it ends."""
    code = main()
    deadline = sys.modules.get("posttrain.weights.deadline")  # without it no thread was started
    if deadline is not None and _left_behind(deadline):
        atexit.unregister(deadline.at_exit)  # they have had their time
        with contextlib.suppress(KeyboardInterrupt):
            atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _left_behind(deadline: Any) -> bool:
    """Whether a thread works on although the end has waited for it; also when somebody is tired of that wait."""
    try:
        return bool(deadline.still_working(deadline.END_S))
    except KeyboardInterrupt:
        return True


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return EXIT_OK if arguments else EXIT_CONFIG
    if arguments[0] == "--version":
        import posttrain

        print(f"posttrain {posttrain.__version__}")
        return EXIT_OK
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        raise ConfigError(f"there is no command {command!r}", fix=_nearest(command), code="usage")
    module: Any = importlib.import_module(COMMANDS[command])
    try:
        args, unknown = module.parser().parse_known_intermixed_args(rest)
    except SystemExit as exc:  # --help printed
        return int(exc.code or 0)
    if unknown:
        raise unknown_flags(command, unknown, rest)
    code: int = module.run(args)
    return code


def unknown_flags(command: str, unknown: Sequence[str], arguments: Sequence[str]) -> ConfigError:
    """Flags that the command does not have, all at once; those that look like config keys get their path here."""
    from posttrain.config.flat_keys import renamed

    flags = [text for text in unknown if text.startswith("-")] or list(unknown)
    hints = []
    for flag in flags:
        key, equals, value = flag.lstrip("-").partition("=")
        following = arguments[list(arguments).index(flag) + 1 :] if flag in arguments else []
        if not equals and following and not following[0].startswith("-") and "=" not in following[0]:
            value = following[0]
        if known := renamed(key, value):
            hints.append(known if len(flags) == 1 else f"{flag.partition('=')[0]}: {known}")
    fix = f"{'; '.join(hints)}; values are given as key=value" if hints else f"posttrain {command} --help"
    named = ", ".join(flag.partition("=")[0] for flag in flags) if len(flags) > 1 else flags[0]
    return ConfigError(f"posttrain {command} has no flag {named}", fix=fix, code="usage")


def _nearest(command: str) -> str:
    import difflib

    if "=" in command:
        return f"posttrain train {command} …"
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    return f"posttrain {near[0]} …" if near else f"one of: {', '.join(COMMANDS)}; posttrain --help"


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


if __name__ == "__main__":
    command()
