"""What a person sees when a command fails: one screen, no traceback (unless asked for), and an exit code.

The run that failed is known from the exception's attribute `run_dir`, which `loop.run.train` sets when there is one.
"""

from __future__ import annotations

import errno
import sys
import time
import traceback as tracebacks
from collections.abc import Iterator
from pathlib import Path

from posttrain.errors import (
    CATALOGUE,
    EXIT_ABORTED,
    EXIT_INTERRUPT,
    EXIT_RETRYABLE,
    EXIT_TERMINATED,
    EXIT_UNEXPECTED,
    PosttrainError,
)

_FULL = ("no space left on device", "storagefull", "disk quota exceeded", "pytorchstreamwriter failed writing")


def report(exc: BaseException, *, traceback: bool = False) -> int:
    """Print what happened to stderr and return the exit code."""
    if traceback:
        tracebacks.print_exception(exc)
    run = getattr(exc, "run_dir", None)
    exc = unwrap(exc)
    run = getattr(exc, "run_dir", run)
    if isinstance(exc, KeyboardInterrupt):
        return _interrupted(exc, run)
    full = disk_full(exc)
    if full is not None and not (isinstance(exc, PosttrainError) and exc.retryable):
        _say(f"error: no space left on device{full}")
        _say("  cause: the disk that holds the run is full; the last checkpoint is intact")
        _say(f"  fix:   free some space, then go on: {_resume(run)}")
        return EXIT_RETRYABLE
    if isinstance(exc, PosttrainError):
        return _known(exc, run, traceback)
    log = _write_log(exc, run)
    _say(f"error: unexpected {type(exc).__name__}: {_one_line(exc)}")
    _say(f"  log:   {log}" if log else "  log:   could not be written")
    _say("  fix:   --traceback shows where it came from; this is a bug in posttrain or in a plug-in")
    return EXIT_UNEXPECTED


def unwrap(exc: BaseException) -> BaseException:
    """The one exception of a group that says most: an interrupt, else an error of ours, else the first."""
    if not isinstance(exc, BaseExceptionGroup):
        return exc
    leaves = [unwrap(one) for one in exc.exceptions]
    for kind in (KeyboardInterrupt, PosttrainError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]


def exit_code(exc: PosttrainError) -> int:
    """The exit code of an error: a run that stopped is 75 when it is worth resuming, else 5."""
    if exc.exit_code in (EXIT_ABORTED, EXIT_RETRYABLE):
        return EXIT_RETRYABLE if exc.retryable else EXIT_ABORTED
    return exc.exit_code


def disk_full(exc: BaseException) -> str | None:
    """` while writing FILE` when something in the chain of `exc` says that a disk is full; None otherwise."""
    for one in _chain(exc):
        if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
            return f" while writing {one.filename}" if one.filename else ""
        if any(mark in str(one).lower() for mark in _FULL):
            return ""
    return None


def _known(exc: PosttrainError, run: Path | None, shown: bool) -> int:
    for note in getattr(exc, "__notes__", ()):
        for line in filter(None, note.splitlines()):
            _say(f"warning: {line}")
    _say(f"error: {exc}")
    if exc.anchor:
        named = f" ({exc.code}, {type(exc).__name__})" if exc.code in CATALOGUE else ""
        _say(f"  docs:  docs/{exc.anchor}{named}")
    if run is not None:
        _say(f"  run:   {run}" + (f"; go on: {_resume(run)}" if exc.retryable else ""))
    if exc.__cause__ is not None and not shown:
        _say("  (--traceback shows the original exception)")
    return exit_code(exc)


def _interrupted(exc: KeyboardInterrupt, run: Path | None) -> int:
    terminated = type(exc).__name__ == "Terminated"
    _say("stopped by SIGTERM" if terminated else "stopped by Ctrl-C")
    if run is not None:
        _say(f"  the last checkpoint is intact; go on: {_resume(run)}")
    return EXIT_TERMINATED if terminated else EXIT_INTERRUPT


def _resume(run: Path | None) -> str:
    return f"posttrain train --resume {run or 'RUN'}"


def _write_log(exc: BaseException, run: Path | None) -> Path | None:
    """The traceback in a file: in the run's logs when there is a run, else among the outputs."""
    from posttrain.tracking.run_dir import output_root

    folder = run / "logs" if run is not None else output_root()
    path = folder / f"error-{time.strftime('%Y%m%d-%H%M%S')}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(tracebacks.format_exception(exc)), encoding="utf-8")
    except OSError:
        return None
    return path


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        yield exc
        exc = exc.__cause__ or exc.__context__


def _one_line(exc: BaseException) -> str:
    text = " ".join(str(exc).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _say(text: str) -> None:
    print(text, file=sys.stderr)
