"""Run the whole thing: `train` makes or resumes a run directory, builds the parts, drives the controller, sums up.

result = train(load_config(["experiment=arithmetic_grpo"]))
result.summary.held_out_after
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.evals.result import FOLDER, Results
from posttrain.loop import checkpoint, pending
from posttrain.loop.collector import few_collections
from posttrain.loop.controller import Controller, LoopState
from posttrain.loop.hang import attended
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
    from posttrain.loop.pending import Pending


def train(loaded: LoadedConfig, *, run_dir: str | Path | None = None, resume: str | Path | None = None) -> RunResult:
    """Train as configured. `run_dir` is the root for new runs; `resume` a run directory or one of its checkpoints.

    Raises PosttrainError; the run directory, its metrics and its last checkpoint are then as they were at the last step.
    """
    from posttrain.loop.build import build
    from posttrain.policy.load import quiet_libraries

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
            _cut(directory, found, config.rl.steps)
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
                    tracker.declare({name: env.metrics for name, env in parts.environments.items()})
                    with few_collections(config.rl.batch_per_replica * (1 + config.rollout.max_async_rollout)):
                        done = run_to_end(_run(parts, found, loaded.tree))
            outcome = "Done" if done else f"Nothing left to do: {_all_there(found, config.rl.steps)}, 0 done now"
            return RunResult(directory.path, done, tracker.finish(outcome))


def _all_there(found: checkpoint.Checkpoint | None, steps: int) -> str:
    if found is None or found.step <= steps:
        return f"the run has its {steps} steps"
    return f"the run has {found.step} steps, more than rl.steps={steps}"


async def _run(parts: Parts, found: checkpoint.Checkpoint | None, tree: Mapping[str, Any]) -> int:
    """Start, drive, close. tree: the config without secrets. Returns the number of batch steps done."""
    try:
        state, ahead = (LoopState(), None) if found is None else await guarded(_load(parts, found), parts.watch())
        if found is not None:
            parts.tracker.note(f"resumed from {near(found.path)} after step {found.step}")
        path, step, steps = parts.run_dir.path, state.step, parts.config.rl.steps
        async with parts.hooks.running(parts.tracker, path=path, config=tree, step=step, steps=steps):
            await guarded(parts.start(), parts.watch())
            controller = Controller(parts, state, ahead)
            ended = await attended(controller.run(), controller.waits, parts)
        return ended.step - step
    finally:
        await parts.close()


async def _load(parts: Parts, found: checkpoint.Checkpoint) -> tuple[LoopState, Pending]:
    """In a thread where the policy is in other processes, whose death is then noticed meanwhile."""
    return parts.load(found) if parts.hosting is None else await in_thread(lambda: parts.load(found))


def set_threads(threads: int) -> int:
    """Fix torch's thread count (0: the cores this process may use): results are bitwise equal only at a fixed count."""
    import torch

    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def _cut(directory: RunDir, found: checkpoint.Checkpoint, steps: int) -> None:
    """Put aside everything that was recorded past the checkpoint that the run goes on from.

    Its own validation came after the cut, and may have moved the state of an environment: it is done again.
    """
    checkpoint.forget_torn(directory.checkpoints)
    cut_after(directory, found.step, validated=found.step - 1 if found.step < steps else None)
    cut_ledger(directory.path, found)
    Results(directory.path / FOLDER).cut_after(found.step)
    for later in checkpoint.find(directory.checkpoints):
        if later.step > found.step:
            checkpoint.set_aside(later.path)


def cut_ledger(run: Path, found: checkpoint.Checkpoint) -> None:
    """Put aside the lines of draws that will end again."""
    from posttrain.loop.ledger import Ledger

    drawn, ahead = found.loop_state()["sampler"]["index"], pending.indices(found.pending)
    Ledger(run / "ledger.jsonl").cut_after(found.step, drawn, ahead)
