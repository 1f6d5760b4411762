"""The hang doctor: what it raises and when, and the real command with an engine that hangs."""

import os
import re
import subprocess
import sys
import time

import pytest

from posttrain.testing.sandbox import write_distribution

ENGINE = '''
import asyncio, time
from dataclasses import dataclass
from posttrain.rollout.hf import HFEngine

class Stuck(HFEngine):
    """Generates nothing, for ever: waits, computes without end, or sleeps in a call of C."""

    name = "stuck"

    @dataclass(frozen=True)
    class Options:
        how: str = "waits"

    async def generate(self, requests):
        await getattr(self, self.options.how)()
        yield

    async def waits(self):
        await asyncio.Event().wait()

    async def sleeps(self):
        time.sleep(10_000)
'''

HOOK = """
import threading

import posttrain
from posttrain.policy.policy import Policy


class Hangs(posttrain.Hook):
    def run_start(self):
        Policy.train_step = train_step


def train_step(policy, rows):
    threading.Event().wait()
"""

FAST = [
    "experiment=arithmetic_grpo", "model.factory_kwargs.steps=30", "model.factory_kwargs.slip_steps=10", "rl.steps=2",
    "rl.batch_per_replica=16", "rl.group_size=4", "validation.prompts=0", "grid.threads=1", "rollout.generate_timeout_s=2",
    "rollout.reward_workers=1", "weights.canary_every=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One folder for all runs, so that the model is made once."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    points = {"posttrain.engines": {"stuck": "stuck_engine:Stuck"}}
    write_distribution(folder, "stuck-engine", points=points, files={"stuck_engine.py": ENGINE})
    return folder


def run(root, site, *overrides):
    command = [sys.executable, "-m", "posttrain.cli", "train", *FAST, *overrides, "--run", str(root)]
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    before = set(root.glob("*/config.yaml"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    ended = time.time()
    (config,) = set(root.glob("*/config.yaml")) - before
    return done, config.parent, ended


def test_an_engine_that_never_yields_ends_the_run_with_the_graph_the_report_and_75(root, site):
    done, folder, ended = run(root, site, "rollout.engine=stuck", "loop.commit_order=logical")
    (report,) = (folder / "logs").glob("hang-*.txt")
    assert done.returncode == 75 and "Traceback" not in done.stderr, done.stderr
    assert ended - report.stat().st_mtime < 15
    assert done.stderr.startswith("error: waited 2 s for completions of step 1\n  where: owner: rollout engine stuck\n")
    graph = [
        "    train loop waits for batches loop: a batch to train on (2.0 s)",
        "      batches loop waits for rollouts loop: a group to batch (2.0 s)",
        "        rollouts loop waits for rollout engine stuck: completions of step 1 (2.0 of 2 s, over)",
        "          rollout engine stuck waits for nobody here: look there first",
    ]
    assert "\n".join(graph) in re.sub(r"2\.\d", "2.0", done.stderr)
    assert str(report) in done.stderr and "raise rollout.generate_timeout_s if it is only slow" in done.stderr
    assert "docs/troubleshooting.md#waited-n-s-for-name" in done.stderr and len(done.stderr.splitlines()) < 15
    text = report.read_text()
    assert re.search(r"task rollouts loop\n.*wait .*\n +waits .*stuck_engine.py:\d+\n +generate .*stuck_engine.py", text)
    assert re.search(r"task train loop\n.*\n +_train_loop .*controller.py:\d+", text) and "thread MainThread\n" in text
    assert re.search(r"== reward worker 0 \(pid \d+\)\n\nCurrent thread .*\n  File .*reward_worker.py\", line \d+ in", text)


def test_a_stream_of_prompts_of_which_none_comes_back_ends_the_run_too(root, site):
    done, folder, _ = run(root, site, "rollout.engine=stuck", "loop.commit_order=arrival")
    assert done.returncode == 75
    assert re.match(r"error: waited 2 s for completions of draw \d+\n  where: owner: rollout", done.stderr)
    hung = r"rollouts loop waits for rollout engine stuck: completions of draw \d+ \([23].\d of 2 s, over, and 3 more\)"
    assert re.search(hung, done.stderr) and "deadlock" not in done.stderr
    assert list((folder / "logs").glob("hang-*.txt"))


def test_an_engine_that_blocks_the_event_loop_in_c_ends_the_run_all_the_same(root, site):
    done, folder, ended = run(root, site, "rollout.engine=stuck", "loop.commit_order=logical", "rollout.options.how=sleeps")
    (report,) = (folder / "logs").glob("hang-*.txt")
    assert done.returncode == 75 and "Traceback" not in done.stderr, done.stderr
    assert ended - report.stat().st_mtime < 15
    assert "error: waited 2 s for completions of step 1, and the event loop is blocked" in done.stderr
    assert re.search(r"what blocks it: thread MainThread: sleeps \(stuck_engine.py:\d+\) < generate", done.stderr)
    assert f"read {report}" in done.stderr and "== reward worker 0" in report.read_text()


def test_optimizer_steps_that_never_end_end_the_run_with_the_key_to_raise(root, site, tmp_path):
    (tmp_path / "stuck_hook.py").write_text(HOOK)
    options = ["rl.discard_group_zero_advantage=false", "rollout.generate_timeout_s=60", "loop.train_timeout_s=3"]
    done, folder, ended = run(root, site, *options, "loop.commit_order=logical", f"hooks=['{tmp_path}/stuck_hook.py:Hangs']")
    (report,) = (folder / "logs").glob("hang-*.txt")
    assert done.returncode == 75 and "Traceback" not in done.stderr, done.stderr
    assert ended - report.stat().st_mtime < 15
    assert done.stderr.startswith("error: waited 3 s for the optimizer steps\n  where: owner: policy\n")
    assert "train loop waits for policy: the optimizer steps (3.0 of 3 s, over)" in re.sub(r"3\.\d", "3.0", done.stderr)
    assert "raise loop.train_timeout_s if it is only slow" in done.stderr
    assert re.search(r"thread posttrain-train_step\n.*\n? *.*train_step .*stuck_hook.py:\d+", report.read_text(), re.DOTALL)
