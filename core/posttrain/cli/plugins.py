"""`posttrain plugins list | doctor | check`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from typing import Any

from posttrain.cli.main import Parser
from posttrain.cli.text import table
from posttrain.errors import EXIT_CONFIG, EXIT_OK, ConfigError
from posttrain.plugins.capabilities import FIELDS
from posttrain.plugins.card import Card
from posttrain.plugins.discovery import ALLOW_VARIABLE, PluginInfo, allowed, installed
from posttrain.plugins.doctor import Finding, doctor, look
from posttrain.plugins.kinds import KINDS


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="posttrain plugins", description="What is installed, and whether it works.", allow_abbrev=False)
    actions = "list: names and help, nothing imported; doctor: import each; check: run the laws of its kind on one"
    made.add_argument("action", choices=["list", "doctor", "check"], help=actions)
    made.add_argument("name", nargs="?", help="only this plug-in (NAME or DISTRIBUTION/NAME); list shows its options, too")
    made.add_argument("options", nargs="*", metavar="KEY=VALUE", help="check: its options")
    made.add_argument("--kind", choices=list(KINDS), help="only this kind")
    made.add_argument("--json", action="store_true", help="list: everything as JSON, options included")
    return made


def run(args: argparse.Namespace) -> int:
    if args.action == "check":
        from posttrain.cli.check import check

        return check(args.name, args.kind, args.options)
    if args.options:
        raise ConfigError(f"plugins {args.action} takes no {args.options[0]}", fix="posttrain plugins --help", code="usage")
    return _doctor(args) if args.action == "doctor" else _list(args)


def _list(args: argparse.Namespace) -> int:
    found = [info for kind in KINDS if args.kind in (None, kind) for info in installed(kind)]
    found = [info for info in found if args.name in (None, info.name, info.full_name)]
    entries = [_entry(info, info.card) for info in found]
    if args.json:
        print(json.dumps(entries, indent=1))
    elif args.name:
        print("\n\n".join(map(_details, entries)) or f"nothing called {args.name} is installed")
    else:
        times = Counter((info.kind, info.name) for info in found)
        names = [info.name if times[info.kind, info.name] == 1 else info.full_name for info in found]
        rows = [(e["kind"], name, _owner(e), e["state"], _line(e)) for name, e in zip(names, entries, strict=True)]
        print(table(("kind", "name", "from", "state", "what [options]"), rows))
    return EXIT_OK if entries or not args.name else EXIT_CONFIG


def _entry(info: PluginInfo, card: Card) -> dict[str, Any]:
    """All that is known of a plug-in without importing it.

    state: ok; or with why and fix: quarantined, hidden, or optional (one of posttrain's own, whose extra is not installed).
    """
    finding = look(info, card)
    if not allowed(info):
        finding = Finding(info, f"{ALLOW_VARIABLE} leaves it out", f"add {info.name} to {ALLOW_VARIABLE}, or unset it")
    broken = "optional" if finding.optional else "quarantined"
    state = (broken if allowed(info) else "hidden") if finding.problem else "ok"
    about = {"group": KINDS[info.kind].group, "state": state, "why": finding.problem, "fix": finding.fix}
    known = dataclasses.asdict(card)
    del known["problem"]
    return {**dataclasses.asdict(info), **about, **known}


def _owner(entry: dict[str, Any]) -> str:
    return f"{entry['distribution']} {entry['version']}"


def _line(entry: dict[str, Any]) -> str:
    options = f"[{', '.join(option['name'] for option in entry['options'])}]" if entry["options"] else ""
    why = f"! {entry['why']}." if entry["why"] else ""
    return " ".join(filter(None, (why, entry["help"], options)))


def _details(entry: dict[str, Any]) -> str:
    """One plug-in with its options, one on a line."""
    lines = [f"{entry['kind']}/{entry['name']} ({_owner(entry)}): {entry['help']}"]
    lines += [f"  state    {entry['state']}" + (f": {entry['why']}" if entry["why"] else "")]
    lines += [f"  fix      {entry['fix']}"] if entry["fix"] else []
    lines += [f"  code     {entry['value']}, {entry['file'] or 'no file'}:{entry['line']}, api {entry['api']}"]
    lines += [f"  {field:<8} {', '.join(entry[field])}" for field in FIELDS if entry[field]]
    for option in entry["options"]:
        value = "(must be given)" if option["default"] is None else f"= {option['default']}"
        lines.append(f"  {option['name']}: {option['type']} {value}" + (f"  # {option['help']}" if option["help"] else ""))
    return "\n".join(lines)


def _doctor(args: argparse.Namespace) -> int:
    findings = doctor(args.kind, args.name)
    for finding in findings:
        name = f"{finding.plugin.kind}/{finding.plugin.name} ({finding.plugin.owner})"
        if finding.optional:
            print(f"-  {name}, optional: {finding.problem}\n     to have it: {finding.fix}")
            continue
        print(f"{'!' if finding.problem else 'ok':<3}{name}, {finding.seconds:.2f} s")
        if finding.problem:
            print(f"     {finding.problem}\n     fix: {finding.fix}")
    optional = sum(finding.optional for finding in findings)
    broken = sum(bool(finding.problem) for finding in findings) - optional
    absent = f", {optional} optional and not installed" if optional else ""
    print(f"{len(findings)} plug-in{'s' * (len(findings) != 1)}, {broken} broken{absent}")
    return EXIT_CONFIG if broken or not findings else EXIT_OK
