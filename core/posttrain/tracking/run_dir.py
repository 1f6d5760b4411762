"""The run directory: where everything about one run lies. Local files, no account.

    <root>/<name>-<time>/
        config.yaml  overrides.txt  origins.json         what was asked for, and where each value came from
        provenance.json  fingerprints.json               what answered: versions, source, machine; the data
        metrics.jsonl  validation.jsonl                  one object per batch step; one per held-out validation
        rollouts/step_000012.parquet                     every trajectory, to the token
        events.jsonl  logs/<role>.log                    what each role did when; what it said
        checkpoints/  ledger.jsonl                       written by the loop
        run.lock                                         held while a process writes here

The root is `--run`, else `POSTTRAIN_OUTPUT_ROOT`, else `IMAGINAIRE_OUTPUT_ROOT`, else `./outputs`. Models that are made by code
lie beside the runs in `models/`, or in `POSTTRAIN_MODELS`.
Two runs never share a directory: creation is exclusive, and a lock is held while the run goes on.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from posttrain.config.layers import differing
from posttrain.config.rules import name_problem
from posttrain.errors import ConfigError, DataError
from posttrain.tracking.files import write_text, writing
from posttrain.tracking.lock import RunLock

ROOT_VARIABLES = ("POSTTRAIN_OUTPUT_ROOT", "IMAGINAIRE_OUTPUT_ROOT")
RESUMED = "resume command line"
"""The origin of a value that was changed on the command line of a resume."""
MODELS_VARIABLE = "POSTTRAIN_MODELS"
CHECKPOINT = re.compile(r"step_(\d+)")


def output_root(flag: str | Path | None = None) -> Path:
    """Where new runs go: the flag, else the environment, else ./outputs."""
    chosen = flag or next((os.environ[v] for v in ROOT_VARIABLES if os.environ.get(v)), None) or "outputs"
    return Path(chosen).expanduser().absolute()


def models_root(root: Path) -> Path:
    """Where models lie that `model.factory` makes: `$POSTTRAIN_MODELS`, else `models` in the folder for runs."""
    chosen = os.environ.get(MODELS_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else root / "models"


def saved_config(run: Path) -> dict[str, Any]:
    """The resolved config that a run was started with. Raises DataError when it cannot be read."""
    import yaml

    path = run / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as exc:
        cause = " ".join(str(exc).split())
        raise DataError(f"{path} cannot be read", cause=cause, fix="restore it: it is the run's own config") from exc
    if not isinstance(tree, dict):
        raise DataError(f"{path} is not a config", fix="restore it: it is the run's own config")
    return tree


def saved_json(path: Path) -> Any:
    """What a small JSON file of a run holds; None when the run has none. Raises DataError when it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise DataError(f"{path} cannot be read", cause=str(exc), fix="restore it, or remove it to go without") from exc


def find_run(path: str | Path) -> Path:
    """The run directory that `path` names: itself, or the run that owns this checkpoint. Raises ConfigError."""
    given = Path(path).expanduser().absolute()
    candidates = [given, given.parent.parent] if CHECKPOINT.fullmatch(given.name) else [given]
    for folder in candidates:
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(
        f"there is no run at {path}",
        cause="no such folder" if not given.exists() else "the folder holds no config.yaml",
        fix="give the directory that the run printed at its start, or one of its checkpoints (RUN/checkpoints/step_N)",
        where=str(given),
        anchor="troubleshooting.md#there-is-no-run-at-this-path",
        code="no_run",
    )


class RunDir:
    """One run's directory, locked by this process until `close()`. Use `create` or `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = RunLock(path)
        with writing(path):
            for folder in (self.rollouts, self.logs, self.checkpoints):
                folder.mkdir(exist_ok=True)

    @classmethod
    def create(cls, root: str | Path | None, name: str) -> RunDir:
        """Make a new directory `<root>/<name>-<time>`. Raises ConfigError when the root cannot be written."""
        if problem := name_problem(name):
            raise ConfigError(f"name={problem.what}", fix=problem.fix, where="name")
        base = output_root(root)
        stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            with writing(base):
                base.mkdir(parents=True, exist_ok=True)
                return cls(_make_unique(base, stem))
        except (PermissionError, FileExistsError, NotADirectoryError) as exc:
            raise unwritable(base, f"{type(exc).__name__}: {exc.strerror}") from exc

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Take an existing run (or one of its checkpoints) to go on with it. Raises ConfigError."""
        return cls(find_run(path))

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def validation(self) -> Path:
        return self.path / "validation.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def write_config(
        self, tree: Mapping[str, Any], overrides: Sequence[str] = (), origins: Mapping[str, str] | None = None
    ) -> None:
        """Write the resolved config as YAML, the overrides exactly as typed, one a line, and the origin of each value.

        A run that is resumed keeps its origins; keys that the resume changed are of the resume's command line. What was typed
        then goes below what was typed before, under the time.
        """
        import yaml

        recorded, resumed = self.path / "origins.json", (self.path / "config.yaml").exists()
        if origins is not None and not resumed:
            self._write_json(recorded, origins)
        elif (earlier := saved_json(recorded)) is not None:
            changed = differing(saved_config(self.path), tree)
            self._write_json(recorded, earlier | dict.fromkeys(changed, RESUMED))
        write_text(self.path / "config.yaml", yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True))
        typed = self.path / "overrides.txt"
        before = typed.read_text(encoding="utf-8") if typed.exists() else ""
        heading = time.strftime("# resumed %Y-%m-%d %H:%M:%S\n") if resumed else ""
        write_text(typed, before + heading + "".join(f"{o}\n" for o in overrides))

    def write_provenance(
        self,
        *,
        tags: Mapping[str, str] | None = None,
        threads: int | None = None,
        changed: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> None:
        """Write provenance.json, once per start: a resumed run keeps the earlier ones in its list. changed: see `provenance`."""
        from posttrain.tracking.provenance import append_provenance

        append_provenance(self.path / "provenance.json", tags=tags, threads=threads, changed=changed)

    def add_changed(self, changed: Mapping[str, tuple[Any, Any]]) -> None:
        """Add to `changed` of this start what is known only when the parts are built."""
        from posttrain.tracking.provenance import add_changed

        add_changed(self.path / "provenance.json", changed)

    def write_fingerprints(self, fingerprints: Mapping[str, str]) -> None:
        """Write the digest of each environment's training rows."""
        self._write_json(self.path / "fingerprints.json", fingerprints)

    def _write_json(self, path: Path, tree: Mapping[str, Any]) -> None:
        write_text(path, json.dumps(dict(tree), indent=1, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Release the lock; idempotent."""
        self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if exc is not None:
            exc.run_dir = self.path  # type: ignore[attr-defined]  # the command line names the run and how to go on
        self.close()


def unwritable(folder: Path, cause: str) -> ConfigError:
    """The error of a folder for runs in which none can be made."""
    return ConfigError(
        f"cannot create a run directory under {folder}",
        cause=cause,
        fix=f"give a folder that you may write to: --run FOLDER, or set {ROOT_VARIABLES[0]}",
        where=str(folder),
        anchor="troubleshooting.md#cannot-create-a-run-directory",
        code="output_root",
    )


def _make_unique(base: Path, stem: str) -> Path:
    for number in range(1, 10_000):
        path = base / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"10,000 runs named {stem}")
