"""`posttrain sim`: the asynchronous loop under a virtual clock, with deaths, delays and duplicates drawn from a seed."""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK, EXIT_UNEXPECTED, ConfigError

if TYPE_CHECKING:
    from posttrain.loop.sim.run import Found
    from posttrain.loop.sim.world import World

WORTH_A_PROCESS = 50
"""Schedules for which it pays to start a process."""
CHUNK = 8
"""Schedules that a process takes at once: neighbours, which share their undisturbed run, and few, so that all end together."""

EPILOG = """\
examples:
  posttrain sim --seeds 0:1000
  posttrain sim --seed 17 --order arrival --trace

The controller, its checkpoints and the weight plane are the real ones; engines, rewards, policy, threads and time are not.
A seed fixes a small config and everything that goes wrong: kills, dead engines, failed updates, lost time, completions said
twice, torn checkpoints. What must hold is checked against the same run undisturbed. The seed and the options replay it.
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain sim",
        description="Run the loop in simulated time and check that nothing is lost, repeated or too old.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = made.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, metavar="N", help="one schedule; its trace is printed when a law is broken")
    what.add_argument("--seeds", metavar="A:B", help="those from A up to, without, B; ends with the first that breaks a law")
    made.add_argument("--order", choices=("logical", "arrival"), help="loop.commit_order (default: drawn)")
    made.add_argument("--ahead", type=int, metavar="N", help="rollout.max_async_rollout (default: drawn)")
    made.add_argument("--jobs", type=int, metavar="N", help="processes that share the schedules (default: one for each core)")
    made.add_argument("--trace", action="store_true", help="print the trace in any case")
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.loop.sim.run import simulate

    first, last = _range(args.seeds) if args.seeds else (args.seed or 0, (args.seed or 0) + 1)
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs} is not 1 or more", fix="leave it out: one for each core", code="usage")
    many, began, lives, seconds = last - first, time.perf_counter(), 0, 0.0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = 1 if args.trace else min(args.jobs or cores, math.ceil(many / WORTH_A_PROCESS))
    with _few_collections():
        for seed, found in zip(range(first, last), _each(range(first, last), args, jobs), strict=True):
            lives, seconds = lives + found.lives, seconds + found.seconds
            if found.problem:
                print(failure(simulate(world(seed, args), trace=True), args), file=sys.stderr)
                return EXIT_UNEXPECTED
    spent = time.perf_counter() - began
    print(
        f"{many} schedule{'s' if many > 1 else ''}, {lives} processes, {seconds / 3600:.1f} virtual hours in {spent:.1f} s "
        f"({60 * many / spent:,.0f} schedules a minute): no law was broken"
    )
    return EXIT_OK


@dataclass(frozen=True)
class _Outcome:
    """Of one schedule."""

    lives: int
    seconds: float
    problem: str


def _each(seeds: range, args: argparse.Namespace, jobs: int) -> Iterator[_Outcome]:
    """The outcome of each seed, in their order."""
    one = partial(_outcome, args)
    if jobs == 1:
        yield from map(one, seeds)
        return
    # a fork has all modules at once, which a new process is seconds in importing; elsewhere than on Linux it is not safe
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(jobs, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        yield from pool.map(one, seeds, chunksize=CHUNK)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _few_collections() -> Iterator[None]:
    """What is loaded is left out of garbage collections, and they are rare: a schedule makes much that soon goes by itself."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _outcome(args: argparse.Namespace, seed: int) -> _Outcome:
    from posttrain.loop.sim.run import simulate

    found = simulate(world(seed, args), trace=args.trace)
    if args.trace:
        print(found.trace)
    return _Outcome(found.lives, found.seconds, found.problem)


def world(seed: int, args: argparse.Namespace) -> World:
    """What a seed and the options mean."""
    from posttrain.loop.sim.world import World

    return World.of(seed, order=args.order, ahead=args.ahead)


def failure(found: Found, args: argparse.Namespace) -> str:
    """The law, what led there, and how to see it again."""
    again = " ".join(["posttrain sim", f"--seed {found.world.seed}", *(_option(args, name) for name in ("order", "ahead"))])
    return f"{found.trace}\n\nseed {found.world.seed}: {found.problem}\n{found.world.summary}\nreplay: {again.strip()}"


def _option(args: argparse.Namespace, name: str) -> str:
    value = getattr(args, name)
    return "" if value is None else f"--{name} {value}"


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        found = int(first), int(last)
    except ValueError:
        found = 0, 0
    if found[0] >= found[1]:
        raise ConfigError(f"--seeds {text} is not A:B with A below B", fix="posttrain sim --seeds 0:1000", code="usage")
    return found
