"""What was typed on the command line, parsed by Hydra's parser.

`key=value`, `+key=value` and `++key=value` mean the same; `~key` takes a key away. A path with `=` in it may be given as it is:
when the text does not parse and quoting the value makes it parse, the quoted form is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config.flat_keys import renamed
from posttrain.errors import ConfigError

_KEY = re.compile(r"^(?P<prefix>\+{0,2}|~)(?P<key>[^=\s]+?)=(?P<value>.*)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Typed:
    """One override: `text` is what Hydra gets, `source` what was typed. `value` is meaningless for a sweep or a deletion."""

    key: str
    value: Any
    text: str
    source: str
    delete: bool = False
    sweep: bool = False


def parse(overrides: Sequence[str], *, multirun: bool = False) -> list[Typed]:
    """Parse all overrides. Raises one ConfigError that names every bad one with the form that would work."""
    typed, problems = [], []
    for source in overrides:
        try:
            one = _parse(source)
            if one.sweep and not multirun:
                raise ConfigError(
                    f"{source} is a sweep over several values", fix=f"add --multirun, or quote it: {quoted(source)}"
                )
            typed.append(one)
        except ConfigError as exc:
            problems.append(exc)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError("\n".join(str(problem) for problem in problems), code="overrides")
    return typed


def quoted(source: str) -> str:
    """The override with its value in quotes that reach Hydra, as one would type it in a shell."""
    match = _KEY.match(source)
    if match is None:
        return source
    value = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), match["value"])
    return f"'{match['prefix']}{match['key']}=\"{value}\"'"


def _parse(source: str) -> Typed:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    text = source
    try:
        override = parser.parse_override(text)
    except HydraException as exc:
        retry = _quote_equals(source)
        if retry is None:
            raise _unreadable(source, exc) from exc
        text, override = retry, parser.parse_override(retry)
    if override.package is not None:
        raise ConfigError(f"{source}: packages (@) are not used here", fix=f"write the full path: {override.package}.KEY=VALUE")
    key = override.key_or_group
    delete, sweep = override.is_delete(), override.is_sweep_override()
    body = text.lstrip("+")
    return Typed(
        key,
        None if sweep or delete else override.value(),
        body if delete or key == "experiment" else f"++{body}",
        source,
        delete,
        sweep,
    )


def _quote_equals(source: str) -> str | None:
    """The override with a value that holds `=` quoted, when nothing else in it has a meaning of its own."""
    match = _KEY.match(source)
    if match is None or "=" not in match["value"] or re.search(r"[\"'\\{}\[\]()$,]", match["value"]):
        return None
    return f'{match["prefix"]}{match["key"]}="{match["value"]}"'


def _unreadable(source: str, exc: Exception) -> ConfigError:
    match = _KEY.match(source)
    if match is None:
        known = renamed(source.lstrip("-"))
        fix = f"write key=value{f'; {known}' if known else ''}"
        return ConfigError(f"cannot read {source!r} as an override", cause="it has no key=value form", fix=fix, code="override")
    cause = str(exc).strip().splitlines()[0]
    return ConfigError(
        f"cannot read {source!r} as an override", cause=cause, fix=f"quote the value: {quoted(source)}", code="override"
    )
