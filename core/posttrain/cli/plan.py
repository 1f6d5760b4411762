"""`posttrain plan`: grid, batch arithmetic, memory by term and the transfer plan of a config, on any machine."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from posttrain.loop.plan import RunPlan, Transfer
    from posttrain.placement.memory import Term

WIDTH = 100
EPILOG = """\
examples:
  posttrain plan experiment=arithmetic_grpo
  posttrain plan --config my.yaml rl.master_dtype=bfloat16 rl.optimizer.name=adamw_master
  posttrain plan experiment=arithmetic_grpo --json

Needs no GPU, starts nothing and reads no weights: the model's config is enough. A model that is made by code
is made first, where the run will find it.
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain plan",
        description="Show what a config means before it runs: grid, batches, memory by term, weight transfer.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="posttrain plan [experiment=NAME] [KEY=VALUE ...] [flags]",
    )
    made.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="config values, as posttrain train takes them")
    made.add_argument("--config", metavar="FILE", help="a YAML file with the same keys")
    made.add_argument("--run", metavar="DIR", help="folder for runs, where models lie that were made by code")
    made.add_argument("--link", type=float, metavar="GB/S", help="speed of a link (default: 5 on one machine, 50 on Ray)")
    made.add_argument("--json", action="store_true", help="the same as JSON, sizes in bytes, times in seconds")
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.config.load import load_config

    if args.link is not None and not 0 < args.link < float("inf"):
        raise ConfigError(f"--link={args.link} is not a speed", fix="give GB/s above 0, such as --link 50", code="usage")
    loaded = load_config(args.overrides, config_file=args.config)
    from posttrain.loop.plan import plan_run
    from posttrain.policy.load import quiet_libraries

    quiet_libraries()
    plan = plan_run(loaded, root=args.run, link=args.link, say=lambda line: print(line, file=sys.stderr))
    print(json.dumps(plan.to_dict(), indent=1) if args.json else "\n".join(lines(plan)))
    return EXIT_OK


def lines(plan: RunPlan) -> Iterator[str]:
    """The plan as text, at most 100 columns wide."""
    yield from _section("grid", _grid(plan))
    yield from _section("batch", _batch(plan))
    yield from _section("model", [plan.model, f"{_count(plan.parameters)} parameters, tied ones counted once"])
    ranks = plan.grid.dp_world
    yield from _section("policy", _memory(plan.policy, f"each of {ranks} ranks, at most" if ranks > 1 else "the policy"))
    if plan.transfer is None:
        yield from _section("rollout", ["none: completions come with the data"])
    else:
        bodies, width = plan.grid.rollout
        who = f"each of {bodies} x {width} ranks" if bodies * width > 1 else "the engine"
        yield from _section("rollout", _memory(plan.rollout, who))
        yield from _section("weights", _transfer(plan.transfer, plan.grid.rollout[1]))
    yield from _section("notes", plan.notes)


def _section(title: str, body: Iterable[str]) -> Iterator[str]:
    wrapped = [part for line in body for part in _wrap(line)]
    for i, line in enumerate(wrapped):
        yield f"{title if i == 0 else '':<9}{line}".rstrip()


def _wrap(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH - 9, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) or [""]


def _grid(plan: RunPlan) -> Iterator[str]:
    from posttrain.placement.layout import actor_groups, device_groups

    grid = plan.grid
    shapes = f"policy [{grid.policy[0]}, {grid.policy[1]}], rollout [{grid.rollout[0]}, {grid.rollout[1]}]"
    yield f"{grid.backend}: {shapes}; dp_world = {grid.dp_replicate} x {grid.dp_shard} = {grid.dp_world}"
    processes = (_processes(group.processes, group.ranks) + f" with {' and '.join(group.roles)}" for group in actor_groups(grid))
    yield f"processes: {'; '.join(processes)}"
    devices = (f"{group.devices} for {' and '.join(group.roles)}" for group in device_groups(grid))
    yield f"devices: {'; '.join(devices)}"


def _processes(count: int, ranks: int) -> str:
    return f"{count}{f' of {ranks} ranks' if ranks > 1 else ''}"


def _batch(plan: RunPlan) -> Iterator[str]:
    batch = plan.batch
    yield f"{batch.batch} completions a step: {batch.groups} prompts x {batch.group_size}; a multiple of {batch.smallest_batch}"
    steps = f"{batch.n_mini} optimizer steps of {batch.mini}" if batch.mini else "1 optimizer step"
    yield f"{steps}; rl.mini_batch_per_replica: {_all(batch.legal_minis)}"
    micro = f"micro-batches of {batch.micro}" if batch.micro else "micro-batches by tokens"
    yield f"{micro}; rl.micro_batch_per_replica: {_all(batch.legal_micros)}"


def _memory(terms: Sequence[Term], who: str) -> Iterator[str]:
    device = sum(term.nbytes for term in terms if term.place == "device")
    host = sum(term.nbytes for term in terms if term.place == "host")
    for term in terms:
        yield f"{term.name:<18} {_bytes(term.nbytes):>8}  {term.why}{' (host memory)' if term.place == 'host' else ''}"
    yield f"{'together':<18} {_bytes(device):>8}  {who}{f'; and {_bytes(host)} of host memory' if host else ''}"


def _transfer(transfer: Transfer, width: int) -> Iterator[str]:
    yield f"{transfer.transport}: {_bytes(transfer.lane_bytes)} into each rollout body, every parameter once"
    if transfer.policy_ranks > 1:
        yield f"from {transfer.policy_ranks} policy ranks, {_bytes(transfer.rank_bytes)} at most from one"
    buckets = "1 bucket" if transfer.buckets == 1 else f"{transfer.buckets:,} buckets"
    yield f"{transfer.parameters:,} parameters in {buckets} of {_bytes(transfer.bucket_bytes)} at most"
    if width > 1:
        yield f"a rank that took its slice alone would need {_bytes(transfer.slice_bytes)}"
    at_once = f", {transfer.concurrent} at once" if transfer.concurrent < transfer.lanes else ""
    yield (
        f"{_seconds(transfer.makespan_s)} for {transfer.lanes} {'body' if transfer.lanes == 1 else 'bodies'}"
        f"{at_once}; no order takes less than {_seconds(transfer.limit_s)}"
    )
    yield (
        f"assumed: links of {transfer.link / 1e9:g} GB/s into each body and out of each policy rank, shared evenly by "
        "bodies that pull from the same rank; copies, digests and latency free"
    )


def _all(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _count(value: int) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:,}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _seconds(value: float) -> str:
    return f"{value * 1000:.2g} ms" if value < 1 else f"{value:.3g} s" if value < 600 else f"{value / 60:.3g} min"
