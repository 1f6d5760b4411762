"""Simulate one run from its seed: undisturbed, then with everything that the world has in store for it.

found = simulate(World.of(seed=17))
found.problem                       # "" or which law was broken;   found.trace: what led to it
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from posttrain.loop.sim import laws
from posttrain.loop.sim.life import Life, Run
from posttrain.loop.sim.trace import Trace
from posttrain.loop.sim.world import World

MOST_LIVES = 15
PROGRESS_S = 1.0
"""How often a body says where it is, virtual seconds."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a simulation came to. problem: the law that was broken, "" for none."""

    world: World
    problem: str
    trace: Trace
    lives: int = 0
    turns: int = 0
    seconds: float = 0.0
    resumes: tuple[int, ...] = ()
    causes: tuple[str, ...] = ()


def simulate(world: World, *, trace: bool = False) -> Found:
    """Run it to its end, through all its deaths, and check every law. trace: kept, of the undisturbed run where that fails."""
    run = Run(world, Path(), Trace(trace))
    with _folder() as folder, _quiet():
        calm = _calm(world.calm, trace)
        if calm.problem:
            return Found(world, f"undisturbed: {calm.problem}", calm.run.trace)
        try:
            run.folder = folder / "run"
            ended = _to_the_end(run, calm.run.turns)
            laws.same(run, ended, calm.run, calm.ended)
        except Exception as exc:
            return _found(run, _said(exc))
    return _found(run, "")


def _found(run: Run, problem: str) -> Found:
    return Found(run.world, problem, run.trace, run.lives, run.turns, run.seconds, tuple(run.resumes), tuple(run.causes))


@dataclass(frozen=True, slots=True)
class _Calm:
    """An undisturbed run."""

    run: Run
    ended: dict[int, dict[str, Any]]
    problem: str = ""


_CALM: dict[str, _Calm] = {}


def _calm(world: World, trace: bool) -> _Calm:
    """The last one that was asked for is kept."""
    if (key := repr(world)) not in _CALM or trace:
        _CALM.clear()
        with _folder() as folder:
            run = Run(world, folder / "run", Trace(trace))
            try:
                _CALM[key] = _Calm(run, _to_the_end(run, None))
            except Exception as exc:
                _CALM[key] = _Calm(run, {}, _said(exc))
    return _CALM[key]


def _to_the_end(run: Run, turns: int | None) -> dict[int, dict[str, Any]]:
    """How each draw ended. turns: of the calm run, which kills are a share of."""
    run.folder.mkdir(parents=True)
    (run.folder / "checkpoints").mkdir()
    kills = dict(run.world.faults.kills)
    while True:
        share = kills.get(run.lives)
        kill_at = None if share is None or turns is None else 1 + int(share * turns)
        if Life(run, kill_at=kill_at).live():
            break
        laws.hold(run.lives < MOST_LIVES, f"the run does not end in {MOST_LIVES} lives")
    return laws.of_a_run(run)


def _said(exc: Exception) -> str:
    """A broken law by its words, anything else with where it was raised."""
    if isinstance(exc, AssertionError) and str(exc):
        return str(exc)
    at = traceback.extract_tb(exc.__traceback__)[-1]
    return f"{type(exc).__name__}: {exc} ({at.filename.rsplit('/', 1)[-1]}:{at.lineno} {at.name})"


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory where there is such a place."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="posttrain-sim-", dir=memory if memory.is_dir() else None)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _no_memory(folder: Path) -> list[Path]:
    return []


@contextmanager
def _quiet() -> Iterator[None]:
    """Rewards fail by the dozen here, what is killed has coroutines that were never begun, no lane has memory to sweep, a body
    need not say twenty times in a virtual second where it is."""
    log = logging.getLogger("posttrain.rewards")
    before, log.disabled = log.disabled, True
    try:
        with (
            warnings.catch_warnings(),
            mock.patch("posttrain.weights.plane.sweep", _no_memory),
            mock.patch("posttrain.weights.receiver.sweep", _no_memory),
            mock.patch("posttrain.weights.deadline.PROGRESS_S", PROGRESS_S),
        ):
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        log.disabled = before
