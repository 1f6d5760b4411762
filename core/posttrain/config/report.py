"""Many problems as one error, each with its key, where the value came from, and its fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.config.walker import Problem
from posttrain.errors import ConfigError, PosttrainError

ANCHOR = "reference/config.md"


def refuse(
    problems: Sequence[Problem], *, subject: str = "the configuration cannot work", origin: Callable[[str], str] | None = None
) -> PosttrainError:
    """One error that names all `problems`: a ConfigError, or the problem's own error when there is just one that has one."""
    if len(problems) == 1 and problems[0].error is not None:
        only = problems[0].error
        source = origin(problems[0].path) if origin and problems[0].path else ""
        only.where = only.where or problems[0].path + (f" ({source})" if source else "")
        return only
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{subject}: {count}"]
    for problem in problems:
        source = origin(problem.path) if origin and problem.path and not problem.what.startswith("missing") else ""
        key = f"{problem.path}: " if problem.path else ""
        lines.append(f"  - {key}{problem.what}" + (f"  ({source})" if source else ""))
        if problem.fix:
            lines.append(f"      fix: {problem.fix}")
    error = ConfigError("\n".join(lines), anchor=ANCHOR)
    error.problems = [one for problem in problems for one in _single(problem)]
    return error


def _single(problem: Problem) -> Sequence[object]:
    """The problem alone, or those that its error tells in one table."""
    return getattr(problem.error, "problems", ()) or [Problem(problem.path, problem.what, problem.fix)]
