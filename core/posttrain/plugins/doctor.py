"""Every visible plug-in, tried one by one in quarantine: what works, what does not, why, and what to type.

`look` and `quarantined` read the source and import nothing, cheap enough for the start of a run; `doctor` imports each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from posttrain.errors import PosttrainError
from posttrain.plugins.capabilities import name_fault
from posttrain.plugins.card import Card
from posttrain.plugins.discovery import PluginInfo, discover
from posttrain.plugins.kinds import KINDS, speaks
from posttrain.plugins.problems import extra_of, install_command
from posttrain.plugins.resolution import import_target, resolve


@dataclass(frozen=True, slots=True)
class Finding:
    """One plug-in and what is wrong with it; `problem` is empty when it works. `seconds`: what importing it took.

    optional: nothing is broken: posttrain brings it, and what it needs is in an extra that is not installed.
    """

    plugin: PluginInfo
    problem: str = ""
    fix: str = ""
    seconds: float = 0.0
    optional: bool = False

    def __str__(self) -> str:
        """One line: name, distribution and cause."""
        return f"{self.plugin.kind} {self.plugin.name} ({self.plugin.owner}): {self.problem or 'ok'}"


def doctor(kind: str | None = None, name: str | None = None) -> list[Finding]:
    """Import and check every visible plug-in (of one kind, of one name). Nothing that a plug-in raises gets out."""
    wanted = [info for k in KINDS if kind in (None, k) for info in discover(k) if name in (None, info.name, info.full_name)]
    return [_try(info) for info in wanted]


def look(info: PluginInfo, card: Card | None = None) -> Finding:
    """What the source of a plug-in already tells about it: its file, syntax, imports, api and `Options`. Imports nothing."""
    card = card or info.card
    doctor_it = f"posttrain plugins doctor {info.name}"
    if card.missing:
        absent = card.missing[0]
        optional = info.builtin and all(extra_of(name, info) for name in card.missing)
        return Finding(info, f"needs {absent!r}, which is missing", install_command(absent, info), optional=optional)
    if card.problem:
        return Finding(info, card.problem, doctor_it)
    if not speaks(card.api):
        return Finding(info, f"is written for api {card.api}", doctor_it)
    if fault := name_fault(info.kind, card.declared):
        return Finding(info, *fault)
    return Finding(info)


def quarantined() -> list[Finding]:
    """The plug-ins of other distributions that cannot work, as far as their source tells."""
    findings = [look(info) for kind in KINDS for info in discover(kind) if not info.builtin]
    return [finding for finding in findings if finding.problem]


def _try(info: PluginInfo) -> Finding:
    start = time.perf_counter()
    seen = look(info)
    if seen.optional:
        return seen
    try:
        if KINDS[info.kind].base is None:
            import_target(info.value)
        else:
            resolve(info.kind, info.full_name)
    except PosttrainError as exc:
        return Finding(info, f"{exc.message} [{exc.cause}]" if exc.cause else exc.message, exc.fix, time.perf_counter() - start)
    except (Exception, SystemExit) as exc:
        cause = f"{type(exc).__name__}: {exc}"
        return Finding(info, cause, f"report it to the authors of {info.distribution}", time.perf_counter() - start)
    return Finding(info, seconds=time.perf_counter() - start)
