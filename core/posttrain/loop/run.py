"""Run the whole thing: `train` makes or resumes a run directory, builds the parts, drives the controller, sums up.

result = train(load_config(["experiment=arithmetic_grpo"]))
result.summary.held_out_after
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.loop import checkpoint
from posttrain.loop.controller import Controller, LoopState
from posttrain.loop.result import RunResult as RunResult
from posttrain.loop.resume import changed_keys, check_changes
from posttrain.loop.waits import guarded
from posttrain.placement.out_of_memory import memory_explained
from posttrain.rollout.event_loop import run_to_end
from posttrain.tracking.run_dir import RunDir, saved_config
from posttrain.tracking.text import near
from posttrain.tracking.tracker import Tracker, cut_after
from posttrain.weights.deadline import in_thread

if TYPE_CHECKING:
    from posttrain.config.load import LoadedConfig
    from posttrain.loop.parts import Parts


def train(loaded: LoadedConfig, *, run_dir: str | Path | None = None, resume: str | Path | None = None) -> RunResult:
    """Train as configured. `run_dir` is the root for new runs; `resume` a run directory or one of its checkpoints.

    Raises PosttrainError; the run directory, its metrics and its last checkpoint are then as they were at the last step.
    """
    from posttrain.loop.build import build

    config = loaded.config
    threads = set_threads(config.grid.threads)
    quiet_libraries()
    found = None
    if resume is not None:
        path, found = checkpoint.locate(Path(resume).expanduser().absolute())
        before = saved_config(path)
        notes = check_changes(before, loaded.tree)
        changed = {key: (was, now) for key, was, now in changed_keys(before, loaded.tree)}
        found.plugin_states()  # a damaged one is told before anything is cut
        directory = RunDir.open(path)
    else:
        notes, changed = [], loaded.changed
        directory = RunDir.create(run_dir, config.name)
    with directory:
        if found is not None:
            _cut(directory, found.step)
        directory.write_config(loaded.tree, loaded.overrides, loaded.origins)
        directory.write_provenance(tags=config.tracking.tags, threads=threads, changed=changed)
        with Tracker(directory, config.tracking, config.rl.steps) as tracker:
            for line in [*loaded.notes, *notes]:
                tracker.note(line)
            done = 0
            if found is None or found.step < config.rl.steps:
                tracker.note(f"run: {near(directory.path)}")
                with memory_explained(config):
                    parts = build(config, directory, tracker)
                    directory.write_fingerprints(parts.fingerprints)
                    done = run_to_end(_run(parts, found, loaded.tree))
            outcome = "Done" if done else f"Nothing left to do: the run has its {config.rl.steps} steps, 0 done now"
            return RunResult(directory.path, done, tracker.finish(outcome))


async def _run(parts: Parts, found: checkpoint.Checkpoint | None, tree: Mapping[str, Any]) -> int:
    """Start, drive, close. tree: the config without secrets. Returns the number of batch steps done."""
    try:
        state = LoopState() if found is None else await guarded(_load(parts, found), parts.watch())
        if found is not None:
            parts.tracker.note(f"resumed from {near(found.path)} after step {found.step}")
        path, step, steps = parts.run_dir.path, state.step, parts.config.rl.steps
        async with parts.hooks.running(parts.tracker, path=path, config=tree, step=step, steps=steps):
            await guarded(parts.start(), parts.watch())
            ended = await guarded(Controller(parts, state).run(), parts.watch())
        return ended.step - step
    finally:
        await parts.close()


async def _load(parts: Parts, found: checkpoint.Checkpoint) -> LoopState:
    """In a thread where the policy is in other processes, whose death is then noticed meanwhile."""
    return parts.load(found) if parts.hosting is None else await in_thread(lambda: parts.load(found))


def set_threads(threads: int) -> int:
    """Fix torch's thread count (0: the cores this process may use): results are bitwise equal only at a fixed count."""
    import torch

    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def quiet_libraries() -> None:
    """Progress bars of the libraries would tear the display; what matters of them is in the run's own lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _cut(directory: RunDir, step: int) -> None:
    """Put aside everything that was recorded past the checkpoint that the run goes on from."""
    from posttrain.loop.ledger import Ledger

    cut_after(directory, step)
    Ledger(directory.path / "ledger.jsonl").cut_after(step)
    for later in checkpoint.find(directory.checkpoints):
        if later.step > step:
            checkpoint.set_aside(later.path)
