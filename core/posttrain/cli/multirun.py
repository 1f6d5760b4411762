"""`--multirun`: a sweep as in any Hydra program (`seed=1,2`, `range`, `glob`, `hydra.sweep.*`), each job a child process.

Hydra makes the combinations and the folders; the child composes and checks its own config with the same code as a single run.
A job that fails does not end the sweep. Models that are made by code are made once and shared by all jobs. At the end there is a
table of what the jobs came to, also after Ctrl-C; `posttrain compare` reads the same runs again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import EXIT_CONFIG, EXIT_OK

_NAME = "posttrain_sweep"


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a sweep: its overrides as Hydra gave them, the exit code, and the run directory if it got so far."""

    overrides: tuple[str, ...]
    code: int
    run: Path | None


def multirun(
    overrides: Sequence[str], *, config_file: str | None = None, root: str | None = None, flags: Sequence[str] = ()
) -> int:
    """Run every job; returns 0, or the exit code of the first that failed. Raises ConfigError for overrides that do not parse.

    flags: handed on to each job.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig

    from posttrain.tracking.run_dir import models_root, output_root

    arguments = sweep_arguments(overrides)
    options = [*flags, *(["--config", str(Path(config_file).absolute())] if config_file is not None else [])]
    models = models_root(output_root(root))
    register_experiments()
    ConfigStore.instance().store(name=_NAME, node={"defaults": ["_self_", {"experiment": None}]})
    jobs: list[Job] = []

    @hydra.main(version_base="1.3", config_path=None, config_name=_NAME)
    def job(_config: Any) -> None:
        settings = HydraConfig.get()
        folder = Path(root) if root else Path(settings.runtime.output_dir)
        task = list(settings.overrides.task)
        earlier = runs_in(folder)
        code = run_job(task, folder=folder, options=options, models=models)
        jobs.append(Job(tuple(task), code, next((run for run in runs_in(folder) if run not in earlier), None)))

    try:
        finished = _call_with(["posttrain train", "--multirun", *arguments], job)
    finally:
        if jobs:
            print(sweep_table(jobs))
    failed = [job.code for job in jobs if job.code]
    print(f"{len(jobs)} runs, {len(failed)} failed", file=sys.stderr)
    return failed[0] if failed else finished


def runs_in(folder: Path) -> list[Path]:
    """The run directories right inside a folder."""
    return sorted(path.parent for path in folder.glob("*/config.yaml")) if folder.is_dir() else []


def sweep_table(jobs: Sequence[Job]) -> str:
    """A line for each job: the overrides that tell it apart, held-out reward before and after, how it ended, where it lies."""
    from posttrain.cli.text import table
    from posttrain.tracking.summary import summarise
    from posttrain.tracking.text import near, number

    shared = set(jobs[0].overrides).intersection(*(job.overrides for job in jobs)) if len(jobs) > 1 else set()
    rows = []
    for job in jobs:
        label = " ".join(text.lstrip("+") for text in job.overrides if text not in shared) or "–"
        try:
            came_to = summarise(job.run, 0) if job.run else None
        except FileNotFoundError:
            came_to = None
        scores = (came_to.held_out_before, came_to.held_out_after) if came_to else (None, None)
        ended = "done" if job.code == 0 else f"exit code {job.code}"
        rows.append((label, *map(number, scores), ended, near(job.run) if job.run else "–"))
    return table(("overrides", "held-out before", "after", "ended", "run"), rows)


def sweep_arguments(overrides: Sequence[str]) -> list[str]:
    """Overrides as Hydra's sweeper takes them: force-added, apart from those of Hydra itself and the choice of experiments."""
    from posttrain.config.overrides import parse

    ours = [text for text in overrides if not text.lstrip("+~").startswith("hydra.")]
    parsed = [one.text for one in parse(ours, multirun=True)]
    return [*parsed, *(text for text in overrides if text not in ours)]


def register_experiments() -> None:
    """Make `experiment=a,b` and `experiment=glob(*)` known to Hydra, as empty choices: the child fills them."""
    from hydra.core.config_store import ConfigStore

    from posttrain.config.catalog import load_catalog

    for name in load_catalog().experiments:
        ConfigStore.instance().store(group="experiment", name=name, node={})


def run_job(task: Sequence[str], *, folder: Path, options: Sequence[str], models: Path) -> int:
    """One run in a process of its own; Ctrl-C reaches it too. Returns its exit code (128 + n when signal n killed it)."""
    from posttrain.tracking.run_dir import MODELS_VARIABLE

    command = [sys.executable, "-m", "posttrain.cli", "train", *task, "--run", str(folder), *options]
    child = subprocess.Popen(command, env={**os.environ, MODELS_VARIABLE: str(models)})
    try:
        code = child.wait()
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise
    return code if code >= 0 else 128 - code


def _call_with(argv: list[str], job: Any) -> int:
    """Call a hydra.main function under this command line. Returns the exit code that Hydra ends with."""
    before, sys.argv = sys.argv, argv
    try:
        job()
    except SystemExit as exc:
        return EXIT_OK if exc.code in (None, 0) else EXIT_CONFIG
    finally:
        sys.argv = before
    return EXIT_OK
