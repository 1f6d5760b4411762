"""Every visible plug-in, tried one by one in quarantine: what works, what does not, why, and what to type.

`quarantined` looks without importing and is cheap enough for the start of a run; `doctor` imports each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from posttrain.errors import PosttrainError
from posttrain.plugins.discovery import PluginInfo, discover
from posttrain.plugins.kinds import KINDS, SUPPORTED_APIS
from posttrain.plugins.problems import install_command
from posttrain.plugins.resolution import import_target, resolve


@dataclass(frozen=True, slots=True)
class Finding:
    """One plug-in and what is wrong with it; `problem` is empty when it works. `seconds`: what importing it took."""

    plugin: PluginInfo
    problem: str = ""
    fix: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line: name, distribution and cause."""
        return f"{self.plugin.kind} {self.plugin.name} ({self.plugin.owner}): {self.problem or 'ok'}"


def doctor(kind: str | None = None, name: str | None = None) -> list[Finding]:
    """Import and check every visible plug-in (of one kind, of one name). Nothing that a plug-in raises gets out."""
    wanted = [info for k in KINDS if kind in (None, k) for info in discover(k) if name in (None, info.name, info.full_name)]
    return [_try(info) for info in wanted]


def quarantined() -> list[Finding]:
    """The plug-ins of other distributions that cannot work, as far as their source tells: file, syntax, api, imports."""
    findings = []
    for info in (info for kind in KINDS for info in discover(kind) if not info.builtin):
        card = info.card
        if card.missing:
            findings.append(Finding(info, f"needs {card.missing[0]!r}, which is missing", install_command(card.missing[0], info)))
        elif card.problem:
            findings.append(Finding(info, card.problem, f"posttrain plugins doctor {info.name}"))
        elif card.api not in SUPPORTED_APIS:
            findings.append(Finding(info, f"is written for api {card.api}", f"posttrain plugins doctor {info.name}"))
    return findings


def _try(info: PluginInfo) -> Finding:
    start = time.perf_counter()
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
