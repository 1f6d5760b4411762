"""What the loop's own bookkeeping costs: per trajectory in flight, per line of the ledger, per checkpoint.

    python tests/benchmarks/bench_bookkeeping.py

The real controller in virtual time (`loop.commit_order=arrival`); what is between dispatch and reward is a timer, and the policy
trains nothing. All trajectories of a batch are in flight at once, a group has eight. CPU seconds of this process.
"""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from posttrain.config.schema import (
    CheckpointConfig,
    EnvironmentConfig,
    LoopConfig,
    ModelConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    ValidationConfig,
)
from posttrain.data.dataset import Draw, PromptSampler, Source
from posttrain.loop import checkpoint, pending
from posttrain.loop.collector import few_collections
from posttrain.loop.controller import Controller, LoopState
from posttrain.loop.ledger import Ledger
from posttrain.loop.parts import Parts
from posttrain.loop.pending import Pending
from posttrain.loop.sim.ends import SimObjective, SimPacker
from posttrain.loop.sim.life import SimRunDir
from posttrain.loop.sim.virtual_time import VirtualLoop
from posttrain.policy.step import StepResult
from posttrain.types import Group, Trajectory, Turn

GROUP, TOKENS = 8, 4
TOTAL = 200_000
"""Trajectories of one measurement, however many of them are in flight at once: so each pays its share of garbage collection."""


class Ends:
    """Policy, rollouts and tracker that do nothing but answer."""

    notes: tuple[str, ...] = ()
    vocab_size = 1000

    def __init__(self, batch: int) -> None:
        self.batch, self.random = batch, random.Random(0)
        self.in_flight = self.most = 0

    async def run(self, draws: list[Draw], *, n: int, generated: Any, **_: Any) -> list[Group]:
        (draw,) = draws
        self.in_flight += n
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(1000 + self.random.random())
        self.in_flight -= n
        for _ in range(n):
            generated()
        return [group(draw, n, draw.index * n // self.batch)]

    def prepare(self, draw: Draw) -> None: ...

    async def abort(self, draw: Draw) -> None: ...

    def train_step(self, rows: list[Any]) -> StepResult:
        return StepResult({}, 1, False, {})

    def snapshot(self) -> Any:
        return lambda folder: (folder / "model").write_text("weights")

    def span(self, *args: Any, **kwargs: Any) -> Any:
        return _Nothing()

    def note(self, text: str) -> None: ...

    def step(self, *args: Any) -> None: ...

    def validation(self, *args: Any) -> None: ...

    def has_validation(self, step: int) -> bool:
        return False


class _Nothing:
    def __enter__(self) -> dict[str, Any]:
        return {}

    def __exit__(self, *exc: object) -> None: ...


def group(draw: Draw, n: int, version: int = 0) -> Group:
    made = [
        Trajectory(
            [1, 2], [3] * TOKENS, [True] * TOKENS, [-0.5] * TOKENS, [version] * TOKENS, "stop", float(i % 2),
            group_id=draw.group_id, sample_id=f"{draw.group_id}/{i}", env="sim", turns=[Turn(0, TOKENS)],
        )
        for i in range(n)
    ]  # fmt: skip
    return Group(draw.group_id, draw.task, made)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": str(number)} for number in range(count)]


def in_flight(trajectories: int, folder: Path) -> tuple[float, int, int]:
    """CPU seconds per trajectory, how many were in flight at once, bytes of the ledger."""
    config = RunConfig(
        model=ModelConfig(name_or_path="sim"), environments=(EnvironmentConfig(name="sim"),),
        validation=ValidationConfig(prompts=0),
        rl=RLConfig(steps=TOTAL // trajectories, group_size=GROUP, batch_per_replica=trajectories),
        rollout=RolloutConfig(max_num_seqs=trajectories, max_async_rollout=0, generate_timeout_s=1e6),
        loop=LoopConfig(commit_order="arrival"), checkpoint=CheckpointConfig(every=0),
    )  # fmt: skip
    ends: Any = Ends(trajectories)
    sampler = PromptSampler([Source("sim", rows(trajectories // GROUP))], seed=0)
    run_dir: Any = SimRunDir(folder)
    objective: Any = SimObjective()
    packer: Any = SimPacker()
    parts = Parts(
        config=config, run_dir=run_dir, tracker=ends, objective=objective, environments={}, sampler=sampler, packer=packer,
        policy=ends, rollouts=ends, ledger=Ledger(folder / "ledger.jsonl"),
    )  # fmt: skip
    loop = VirtualLoop(takes=lambda name: 0.001)

    async def work() -> None:
        await Controller(parts, LoopState()).run()
        await parts.close()

    gc.collect()
    with few_collections(trajectories):
        began = time.process_time()
        loop.run_until_complete(work())
        spent = time.process_time() - began
    loop.close()
    assert not parts.ledger.open
    return spent / TOTAL, ends.most, (folder / "ledger.jsonl").stat().st_size


def pending_size(trajectories: int, folder: Path) -> tuple[float, int]:
    """Seconds and bytes of a checkpoint that holds this many trajectories, written and read back."""
    sampler = PromptSampler([Source("sim", rows(trajectories // GROUP))], seed=0)
    found = Pending({0: [[(draw, group(draw, GROUP))] for draw in sampler.draw(trajectories // GROUP)]})
    began = time.perf_counter()
    saved = checkpoint.write(folder, 1, lambda path: None, {"sampler": sampler.state_dict()}, found)
    spent = time.perf_counter() - began
    assert len(pending.read(saved.pending, sampler)) == len(found)
    return spent, saved.pending.stat().st_size


def finished(prompts: int, folder: Path) -> tuple[float, float, int]:
    """Seconds of a checkpoint and of what a resume cuts, with this many finished prompts; bytes of the ledger."""
    ledger = Ledger(folder / "ledger.jsonl")
    for index in range(prompts):
        ledger.drawn(Draw(index, 0, "sim", str(index), {}), "admitted")
        ledger.move(index, "trained", step=index // 1000 + 1)
    began = time.perf_counter()
    ledger.flush()
    ledger.sync()
    checkpoint.write(folder, 1, lambda path: None, {"sampler": {"index": prompts}})
    spent = time.perf_counter() - began
    ledger.close()
    began = time.perf_counter()
    Ledger(folder / "ledger.jsonl").cut_after(prompts // 1000, prompts)
    return spent, time.perf_counter() - began, (folder / "ledger.jsonl").stat().st_size


def main() -> None:
    for trajectories in (1_000, 10_000, 100_000):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "checkpoints").mkdir()
            cost, most, size = in_flight(trajectories, Path(folder))
        draws = TOTAL / GROUP
        print(f"{most:>7,} in flight: {1e6 * cost:6.1f} µs per trajectory, {size / draws:5.1f} bytes of ledger per draw")
    for trajectories in (1_000, 10_000, 100_000):
        with tempfile.TemporaryDirectory() as folder:
            spent, size = pending_size(trajectories, Path(folder))
        each = f"{size / trajectories:5.1f} bytes per trajectory of {TOKENS} tokens"
        print(f"{trajectories:>7,} pending: {spent:6.2f} s to write, {each}")
    for prompts in (10_000, 100_000, 1_000_000):
        with tempfile.TemporaryDirectory() as folder:
            spent, cut, size = finished(prompts, Path(folder))
        of_ledger = f"ledger {size / 2**20:6.1f} MiB"
        print(f"{prompts:>9,} finished prompts: checkpoint {spent:5.2f} s, cut on resume {cut:5.2f} s, {of_ledger}")


if __name__ == "__main__":
    main()
