"""`--multirun`: a sweep as in any Hydra program (`seed=1,2`, `range`, `glob`, `hydra.sweep.*`), each job a child process.

Hydra makes the combinations and the folders; the child composes and checks its own config with the same code as a single run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import EXIT_CONFIG, EXIT_OK

_NAME = "posttrain_sweep"


def multirun(overrides: Sequence[str], *, config_file: str | None = None, root: str | None = None) -> int:
    """Run every job; returns 0, or the exit code of the first that failed. Raises ConfigError for overrides that do not parse."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig

    arguments = sweep_arguments(overrides)
    register_experiments()
    ConfigStore.instance().store(name=_NAME, node={"defaults": ["_self_", {"experiment": None}]})
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=None, config_name=_NAME)
    def job(_config: Any) -> None:
        settings = HydraConfig.get()
        folder = Path(root) if root else Path(settings.runtime.output_dir)
        codes.append(run_job(list(settings.overrides.task), config_file=config_file, folder=folder))

    finished = _call_with(["posttrain train", "--multirun", *arguments], job)
    failed = [code for code in codes if code]
    print(f"{len(codes)} runs, {len(failed)} failed", file=sys.stderr)
    return failed[0] if failed else finished


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


def run_job(task: Sequence[str], *, config_file: str | None, folder: Path) -> int:
    """One run in a process of its own; Ctrl-C reaches it too. Returns its exit code."""
    command = [sys.executable, "-m", "posttrain.cli", "train", *task, "--run", str(folder)]
    if config_file is not None:
        command += ["--config", str(Path(config_file).absolute())]
    child = subprocess.Popen(command)
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise


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
