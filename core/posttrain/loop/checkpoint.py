"""Checkpoints: `checkpoints/step_N/`, written aside, fsynced, renamed. A crash at any byte leaves the last good one.

A checkpoint of step N is a consistent cut: the policy (weights, optimizer, schedule, random state), the sampler's position,
what is generated and not yet trained, the counters of the loop and the states of plug-ins. Folders that are not exactly
`step_<number>` are never read and never deleted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import DataError, RunInterrupted
from posttrain.loop import pending
from posttrain.loop.pending import Pending
from posttrain.plugins.origin import Origin
from posttrain.plugins.state import SavedState
from posttrain.tracking.files import FULL, superseded_name, sync

STEP = re.compile(r"step_(\d+)\Z")
LOOP_FILE = "loop.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk. `policy` is the folder that `Policy.load` takes."""

    step: int
    path: Path

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    @property
    def pending(self) -> Path:
        """The groups that were generated and not yet trained."""
        return self.path / pending.FILE

    def loop_state(self) -> dict[str, Any]:
        """What `write` was given. Raises DataError for a damaged file."""
        try:
            return json.loads((self.path / LOOP_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise self._damaged(str(exc)) from exc

    def plugin_states(self) -> list[SavedState]:
        """The states of plug-ins. Raises DataError for one that is not, to the bit, what was written."""
        try:
            states = [SavedState(**entry) for entry in self.loop_state().get("plugins", [])]
        except TypeError as exc:
            raise self._damaged(f"plugins in {LOOP_FILE}: {exc}") from exc
        for state in states:
            if not state.intact:
                raise self._damaged(f"the state of {state.subject} in {LOOP_FILE} does not fit its digest")
        return states

    def origins(self) -> list[Origin]:
        """Where the plug-ins of the run came from; none in a checkpoint that does not say it. Raises DataError."""
        try:
            return [Origin(**entry) for entry in self.loop_state().get("origins", [])]
        except TypeError as exc:
            raise self._damaged(f"origins in {LOOP_FILE}: {exc}") from exc

    def _damaged(self, cause: str) -> DataError:
        return DataError(
            f"checkpoint {self.path} cannot be read",
            cause=cause,
            fix=f"resume from an older checkpoint: posttrain train --resume {self.path.parent}/step_<earlier>",
        )


def find(folder: Path) -> list[Checkpoint]:
    """All complete checkpoints in `folder`, by step number."""
    if not folder.is_dir():
        return []
    found = [
        Checkpoint(int(match[1]), child)
        for child in folder.iterdir()
        if (match := STEP.match(child.name)) and (child / LOOP_FILE).is_file()
    ]
    return sorted(found, key=lambda c: c.step)


def locate(path: Path) -> tuple[Path, Checkpoint]:
    """Resolve what `--resume` was given (a run directory or one checkpoint) to the run directory and the checkpoint."""
    if not path.exists():
        raise DataError(
            f"nothing to resume at {path}",
            cause="the path does not exist",
            fix="give a run directory or one of its checkpoints/step_N folders; `ls outputs` shows the runs",
        )
    if STEP.match(path.name):
        run = path.parent.parent
        wanted = [c for c in find(path.parent) if c.path.name == path.name]
        if not wanted:
            raise DataError(
                f"{path} is not a complete checkpoint",
                cause=f"it has no {LOOP_FILE}",
                fix=f"--resume {run} takes the newest complete one",
            )
        return run, wanted[0]
    found = find(path / "checkpoints")
    if not found:
        raise DataError(
            f"{path} has no complete checkpoint",
            cause="the run ended before its first one (checkpoint.every)",
            fix="start it anew, with checkpoint.every=N",
        )
    return path, found[-1]


def write(
    folder: Path, step: int, save_policy: Callable[[Path], None], loop_state: dict[str, Any], ahead: Pending | None = None,
    *, wanted: Callable[[], bool] = lambda: True,
) -> Checkpoint:  # fmt: skip
    """Write `folder/step_N`. Raises RunInterrupted when it cannot; older checkpoints stay as they are, nothing half is left.

    wanted: asked before it becomes a checkpoint; the run may have ended, and another one go on from an older one.
    """
    target, aside = folder / f"step_{step}", folder / f"tmp_step_{step}"
    try:
        if aside.exists():
            shutil.rmtree(aside)
        (aside / "policy").mkdir(parents=True)
        save_policy(aside / "policy")
        pending.write(aside / pending.FILE, ahead or pending.Pending())
        (aside / LOOP_FILE).write_text(json.dumps(loop_state), encoding="utf-8")
        sync_tree(aside)
        if not wanted():
            raise RunInterrupted(f"the run ended before its checkpoint of step {step} was written", code="checkpoint")
        if target.exists():
            set_aside(target)
        aside.rename(target)
        sync(folder)
    except RunInterrupted:  # a process that holds a part of the policy died: it says so itself
        shutil.rmtree(aside, ignore_errors=True)
        raise
    except Exception as exc:  # safetensors and torch.save have exceptions of their own for a full disk
        full = _is_full(folder, exc)
        shutil.rmtree(aside, ignore_errors=True)
        raise RunInterrupted(
            f"checkpoint of step {step} was not written to {folder}",
            cause="the disk is full" if full else f"{type(exc).__name__}: {exc}",
            fix="free space (checkpoint.keep_last) and resume; the checkpoints before this one are intact",
            code="disk_full" if full else "checkpoint",
        ) from exc
    return Checkpoint(step, target)


def _is_full(folder: Path, exc: Exception) -> bool:
    """Whether a full disk is behind `exc`; `torch.save` does not say, so the space that is left decides."""
    if isinstance(exc, OSError) and exc.errno in FULL:
        return True
    return "no space left" in str(exc).lower() or shutil.disk_usage(folder).free < 2**20


def set_aside(path: Path) -> Path:
    """Rename a folder out of the way, to a free `NAME.superseded`; nothing is deleted."""
    return path.rename(superseded_name(path))


def prune(folder: Path, *, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Delete the checkpoints that the retention does not keep; returns their steps. The newest always stays.

    Each is renamed first: one that is half deleted when the process dies is no checkpoint any more.
    """
    found = find(folder)
    newest = {c.step for c in found[-max(keep_last or len(found), 1) :]}
    gone = [c for c in found if c.step not in newest and not (keep_every and c.step % keep_every == 0)]
    for checkpoint in gone:
        dying = checkpoint.path.with_name(f"tmp_{checkpoint.path.name}")
        checkpoint.path.rename(dying)
        shutil.rmtree(dying)
    return [c.step for c in gone]


def forget_torn(folder: Path) -> None:
    """Delete what a process that was killed had begun to write, or to delete."""
    for torn in folder.glob("tmp_step_*"):
        shutil.rmtree(torn, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """fsync everything in a folder, and the folder."""
    for root, _, files in os.walk(folder):
        for name in files:
            sync(Path(root) / name)
        sync(Path(root))
