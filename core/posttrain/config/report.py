"""Many problems as one error, each with its key, where the value came from, and its fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.config.walker import Problem
from posttrain.errors import CATALOGUE, ConfigError


def refuse(
    problems: Sequence[Problem], *, subject: str = "the configuration cannot work", origin: Callable[[str], str] | None = None
) -> ConfigError:
    """One ConfigError that names all `problems`. When all have one documented code, the error carries it."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{subject}: {count}"]
    for problem in problems:
        source = origin(problem.path) if origin and problem.path else ""
        subject_key = f"{problem.path}: " if problem.path else ""
        lines.append(f"  - {subject_key}{problem.what}" + (f"  ({source})" if source else ""))
        if problem.fix:
            lines.append(f"      fix: {problem.fix}")
    codes = {problem.code for problem in problems}
    code = codes.pop() if len(codes) == 1 else ""
    error = ConfigError("\n".join(lines), code=code or None, anchor=CATALOGUE[code].anchor if code in CATALOGUE else "")
    error.problems = list(problems)
    return error
