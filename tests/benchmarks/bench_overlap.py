"""What generation ahead of training gains: steady batch steps with max_async_rollout 0 and 1, each role on a core of its own.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_overlap.py [--steps 24] [--completions 192] [--tokens 48] [--rounds 3]

The policy trains on core A; vLLM and the reward process run on core B. After the first step every thread of each process is bound
to its core, in both measurements alike. Run alternately; medians over the steady steps of all rounds. The rollout of a step alone
and its training alone are those of the synchronous run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil  # type: ignore[import-untyped]

import posttrain
from posttrain import Hook

WARM = 4
"""First steps of a run that are left out: kernels are compiled, cores are being bound."""


class OneCoreEach(Hook):
    """Binds the trainer's process to one core and all others to another, after the first step."""

    def step_end(self, step: int) -> None:
        if step != 1:
            return
        cores = sorted(os.sched_getaffinity(0))
        here = psutil.Process()
        for process, core in [(here, cores[0]), *((child, cores[1]) for child in here.children(recursive=True))]:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


def one(ahead: int, args: argparse.Namespace, root: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    settings: dict[str, object] = {
        "rollout.max_async_rollout": ahead, "rl.steps": args.steps, "rl.batch_per_replica": args.completions,
        "rl.group_size": 8, "rl.discard_group_zero_advantage": False, "rl.optimizer.lr": 1e-7, "rollout.ignore_eos": True,
        "rollout.max_tokens": args.tokens, "rollout.max_model_len": args.tokens + 32,
        "rollout.max_num_seqs": args.completions, "rollout.options": {"cpu_cores": str(cores[1])}, "rollout.reward_workers": 1,
        "model.factory_kwargs.hidden_size": args.hidden, "model.factory_kwargs.layers": args.layers,
        "model.factory_kwargs.steps": 1, "model.factory_kwargs.slip_steps": 1, "validation.prompts": 0, "checkpoint.every": 0,
        "tracking.display": "none", "tracking.rollouts_every": 0, "weights.canary_every": 0,
    }  # fmt: skip
    result = posttrain.train(experiment="async_grpo", hooks=[OneCoreEach()], run_dir=root, **settings)
    rows = result.metrics()[WARM:]
    names = ("time/step_s", "time/rollout_s", "time/train_s", "time/sync_s", "staleness/mean")
    print(json.dumps([{name: row[name] for name in names} for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 24), ("completions", 192), ("tokens", 48), ("rounds", 3), ("hidden", 192), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        one(args.one, args, args.root)
        return
    rows: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for ahead, found in rows.items():
                command = [sys.executable, __file__, *sys.argv[1:], "--one", str(ahead), "--root", folder]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found += json.loads(done.stdout.splitlines()[-1])

    def median(ahead: int, name: str) -> float:
        return statistics.median(row[name] for row in rows[ahead])

    step = {ahead: median(ahead, "time/step_s") for ahead in rows}
    rollout, train, sync = (median(0, f"time/{name}_s") for name in ("rollout", "train", "sync"))
    print(f"synchronous    step {step[0]:.3f} s = rollout {rollout:.3f} + train {train:.3f} + sync {sync:.3f} + rest")
    print(f"one step ahead step {step[1]:.3f} s, staleness {median(1, 'staleness/mean'):.2f}")
    print(f"ahead / max(rollout, train) = {step[1] / max(rollout, train):.3f}     ahead / synchronous = {step[1] / step[0]:.2f}")


if __name__ == "__main__":
    main()
