"""`posttrain plugins list | doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from posttrain.cli.main import Parser
from posttrain.cli.text import table
from posttrain.errors import EXIT_CONFIG, EXIT_OK
from posttrain.plugins.discovery import PluginInfo, discover
from posttrain.plugins.kinds import KINDS, SUPPORTED_APIS


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="posttrain plugins", description="What is installed, and whether it works.", allow_abbrev=False)
    made.add_argument("action", choices=["list", "doctor"], help="list: names and help, nothing imported; doctor: import each")
    made.add_argument("name", nargs="?", help="doctor: only this plug-in (NAME or DISTRIBUTION/NAME)")
    made.add_argument("--kind", choices=list(KINDS), help="only this kind")
    made.add_argument("--json", action="store_true", help="list: everything as JSON, options included")
    return made


def run(args: argparse.Namespace) -> int:
    return _doctor(args) if args.action == "doctor" else _list(args)


def _list(args: argparse.Namespace) -> int:
    found = [info for kind in KINDS if args.kind in (None, kind) for info in discover(kind) if args.name in (None, info.name)]
    if args.json:
        print(json.dumps([_entry(info) for info in found], indent=1))
        return EXIT_OK
    names = [info.name for info in found]
    rows = []
    for info in found:
        clash = names.count(info.name) > 1 and sum(other.kind == info.kind and other.name == info.name for other in found) > 1
        rows.append((info.kind, info.full_name if clash else info.name, info.owner, _line(info)))
    print(table(("kind", "name", "from", "what"), rows))
    return EXIT_OK


def _entry(info: PluginInfo) -> dict[str, Any]:
    card = info.card
    return {**dataclasses.asdict(info), **dataclasses.asdict(card), "problem": _doubt(info)}


def _line(info: PluginInfo) -> str:
    doubt = _doubt(info)
    return f"! {doubt}" if doubt else info.card.help


def _doubt(info: PluginInfo) -> str:
    """What its source already tells about a plug-in that will not work."""
    card = info.card
    if card.missing:
        return f"needs {', '.join(card.missing)}, which is missing"
    return card.problem or ("" if card.api in SUPPORTED_APIS else f"is written for api {card.api}")


def _doctor(args: argparse.Namespace) -> int:
    from posttrain.plugins.doctor import doctor

    findings = doctor(args.kind, args.name)
    for finding in findings:
        mark = "!" if finding.problem else "ok"
        print(f"{mark:<3}{finding.plugin.kind}/{finding.plugin.name} ({finding.plugin.owner}), {finding.seconds:.2f} s")
        if finding.problem:
            print(f"     {finding.problem}\n     fix: {finding.fix}")
    broken = sum(bool(finding.problem) for finding in findings)
    print(f"{len(findings)} plug-ins, {broken} broken")
    return EXIT_CONFIG if broken or not findings else EXIT_OK
