"""`posttrain doctor`: what this machine lacks for a run, each with what to do about it. Checks are functions of a snapshot."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from posttrain.cli.doctor.devices import allocator, gpu
from posttrain.cli.doctor.extensions import hub, plugins, vllm_plugins
from posttrain.cli.doctor.isolation import sandbox
from posttrain.cli.doctor.network import interfaces, ports
from posttrain.cli.doctor.report import report
from posttrain.cli.doctor.room import disk, open_files, root, shared_memory
from posttrain.cli.doctor.snapshot import Check, Finding, Snapshot
from posttrain.cli.doctor.transfer import cma, ucx, ucx_variables
from posttrain.cli.doctor.versions import versions
from posttrain.cli.main import Parser
from posttrain.config.schema import RolloutConfig
from posttrain.errors import EXIT_OK, EXIT_UNEXPECTED
from posttrain.placement.ports import RAY_PORT

CHECKS: tuple[Check, ...] = (
    versions, gpu, allocator, ucx, ucx_variables, cma, ports, interfaces, shared_memory, open_files, root, disk, sandbox,
    vllm_plugins, plugins, hub,
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain doctor",
        description="Look at this machine: versions, GPUs, UCX, ports, room, plug-ins; say what to do about what is wrong.",
        epilog="exit code: 0 nothing fails, 1 something does (a warning is no failure)",
        allow_abbrev=False,
    )
    made.add_argument("--run", metavar="DIR", help="folder for runs to look at (default: as posttrain train chooses it)")
    made.add_argument(
        "--ray-port", type=int, default=RAY_PORT, metavar="N", help=f"as for posttrain launch (default: {RAY_PORT})"
    )
    shown = made.add_mutually_exclusive_group()
    shown.add_argument("--report", action="store_true", help="a block for a bug report, without names, paths and secrets")
    shown.add_argument("--json", action="store_true", help="for programs")
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.cli.doctor.probe import look

    base = RolloutConfig().base_port
    snapshot = look(run=args.run, ports={"--ray-port": args.ray_port, "rollout.base_port": base})
    findings = examine(snapshot)
    failed = any(finding.state == "fail" for finding in findings)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=1))
    elif args.report:
        print(report(snapshot, findings))
    else:
        print(text(findings))
    return EXIT_UNEXPECTED if failed else EXIT_OK


def examine(snapshot: Snapshot, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Every finding of every check, in order. Pure."""
    return [finding for check in checks for finding in check(snapshot)]


def text(findings: Sequence[Finding]) -> str:
    """One line for each finding, the fix under it, and the count at the end."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<6}{finding.check:<{width + 2}}{finding.what}")
        lines += [f"{'':{width + 8}}fix: {finding.fix}"] if finding.fix else []
    count = {state: sum(finding.state == state for finding in findings) for state in ("ok", "warn", "fail")}
    return "\n".join([*lines, f"{count['ok']} ok, {count['warn']} warnings, {count['fail']} failures"])
