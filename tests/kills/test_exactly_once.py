"""Runs that are killed ten times with SIGKILL and resumed each time from the command line, as a stranger would.

    make kills

Under Ray with vLLM (`arrival`): the same draws, epochs and trained set as the uninterrupted run. In one process on the hf engine
(`logical`): the same bits. Whom a kill hits and when comes from a seed; it may strike while a run starts, too. Half an hour.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from posttrain.loop import checkpoint, pending
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts

pytestmark = pytest.mark.kills
KILLS, MARK = 10, "POSTTRAIN_TEST_RUN"
COMMON = [
    "environments=[{name: arithmetic, options: {operations: ['+'], largest: 19, test_size: 80, size: 60}}]",  # several epochs
    "model.factory_kwargs.steps=60",
    "model.factory_kwargs.slip_steps=20",
    "rl.batch_per_replica=32",
    "rl.group_size=4",
    "rl.discard_group_zero_advantage=false",
    "validation.prompts=4",
    "validation.every=0",
    "checkpoint.every=1",
    "tracking.display=lines",
]
CLUSTER = [
    *COMMON, "experiment=cluster_grpo", "rl.steps=40", "rollout.max_async_rollout=1", "rollout.max_num_seqs=16",
    "loop.commit_order=arrival",
]  # fmt: skip
LOCAL = [
    *COMMON, "experiment=arithmetic_grpo", "rl.steps=60", "rollout.max_async_rollout=2", "loop.commit_order=logical",
    "checkpoint.keep_last=null",
]  # fmt: skip
PROMPTS = 8
STEADY = ("step", "reward/mean", "loss", "grad_norm", "length/mean", "policy/ratio_min", "tokens/trained", "staleness/mean")


@dataclass(frozen=True)
class Plan:
    """One kill: `steps` new steps after the start, and `seconds` later; 0 steps: `seconds` after the roles are there."""

    who: str
    steps: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s after {f'{self.steps} new step(s)' if self.steps else 'its process began'}"


@dataclass
class Kill:
    """What one was found to do."""

    number: int
    plan: Plan
    step: int
    began: float
    code: int | None = None
    ended_s: float = 0.0
    resumed: int = -1
    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)


def plans(seed: int, who: list[str], starting_s: float, later_s: float) -> list[Plan]:
    """Everyone in turn. About one kill in three strikes a run that starts; the first one does not: it needs a checkpoint."""
    rng = random.Random(seed)
    made = []
    for number in range(KILLS):
        steps = rng.choice([0, 1, 2, 3]) if number else 2
        limit = later_s if steps else starting_s
        made.append(Plan(who[number % len(who)].replace("?", rng.choice("01")), steps, rng.uniform(0, limit)))
    return made


class Started:
    """`posttrain train` in a process of its own. Whatever it starts carries `token`, also when its parent is gone."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.token, self.began, self.log = uuid.uuid4().hex, time.time(), log
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {MARK: self.token}
        with log.open("w") as out:
            command = [sys.executable, "-m", "posttrain.cli", "train", *arguments]
            self.driver = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def family(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.token and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        return found

    def pid(self, who: str, run: Path) -> int | None:
        """Of a role of this start, once it is known; of the driver at once."""
        if who == "driver":
            return self.driver.pid
        roles = run / "logs" / "roles.json"
        if not roles.exists() or roles.stat().st_mtime < self.began:
            return None
        role = json.loads(roles.read_text() or "{}").get(who, {})  # not written aside: it may be empty now
        return role.get("pid")

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    def resumed(self) -> int | None:
        """The step that it goes on from, once it has said so."""
        told = re.search(r"resumed from .* after step (\d+)", self.log.read_text())
        return int(told[1]) if told else None

    def wait_for(self, what: str, found: Callable[[], Any], timeout: float = 400) -> Any:
        deadline = time.monotonic() + timeout
        while not (value := found()):
            assert self.driver.poll() is None, f"the run ended before {what}: {self.tail()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout} s: {self.tail()}"
            time.sleep(0.03)
        return value

    def end(self) -> None:
        """Whatever happened: nothing of it stays for the next test."""
        if self.driver.poll() is None:
            self.driver.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.driver.wait(60)
            self.driver.kill()
            self.driver.wait()


@contextmanager
def started(log: Path, *arguments: str) -> Iterator[Started]:
    run = Started(log, *arguments)
    try:
        yield run
    finally:
        run.end()


def settled(look: Callable[[], list[str]], within: float = 30.0) -> list[str]:
    """What is left of it in the end."""
    deadline = time.monotonic() + within
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.3)
    return left


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.is_file()} if Path("/dev/shm").is_dir() else set()


def abandoned(before: set[str]) -> list[str]:
    """New shared memory that no living process has mapped or open."""
    held = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            held |= {Path(one.path).name for one in process.memory_maps(grouped=True) if one.path.startswith("/dev/shm/")}
            held |= {Path(one.path).name for one in process.open_files() if one.path.startswith("/dev/shm/")}
    return sorted(shared_memory() - before - held)


def steps_of(run: Path) -> int:
    """The last step that it has recorded; a line that is being written is none yet."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    for line in reversed(lines):
        with suppress(ValueError):
            return int(json.loads(line)["step"])
    return 0


def ledger(run: Path) -> list[dict[str, Any]]:
    """Its whole lines."""
    entries = []
    for line in (run / "ledger.jsonl").read_text().splitlines():
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def balance(found: checkpoint.Checkpoint, lines: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Draws that neither ended by the checkpoint nor are pending in it, and those that are both, or ended twice."""
    drawn, ahead = found.loop_state()["sampler"]["index"], pending.indices(found.pending)
    ended = Counter(line["draw"] for line in lines if line["step"] <= found.step)
    lost = sorted(set(range(drawn)) - set(ended) - ahead)
    return lost, sorted(draw for draw, times in ended.items() if times > 1 or draw in ahead)


def killed_and_resumed(root: Path, overrides: list[str], made: list[Plan]) -> tuple[Path, list[Kill]]:
    """A run that every plan strikes once, at its end."""
    kills: list[Kill] = []
    run = root
    for number, plan in enumerate([*made, None], 1):
        before = shared_memory()
        arguments = ["--resume", str(run)] if kills else [*overrides, "--run", str(root)]
        with started(root / f"start-{number}.log", *arguments) as start:
            run = run if kills else first_checkpoint(start, root)
            if plan is None:
                assert start.driver.wait(900) == 0, start.tail()
            else:
                kills.append(strike(start, run, number, plan))
            nothing_left(start, before)
        if (told := start.resumed()) is not None:
            assert told == kills[number - 2].resumed  # what was found after the kill before
        if plan is not None:
            found = checkpoint.find(run / "checkpoints")[-1]
            kills[-1].resumed = found.step
            kills[-1].lost, kills[-1].doubled = balance(found, ledger(run))
    return run, kills


def first_checkpoint(start: Started, root: Path) -> Path:
    """Wait for it; returns the run."""
    run: Path = start.wait_for("run directory", lambda: next(iter(root.glob("*-grpo-*/config.yaml")), None)).parent
    start.wait_for("first checkpoint", lambda: checkpoint.find(run / "checkpoints"))
    return run


def nothing_left(start: Started, before: set[str]) -> None:
    """No process of the run, and no shared memory."""
    assert not (left := settled(start.family)), left
    assert not (left := settled(lambda: abandoned(before))), left


def strike(start: Started, run: Path, number: int, plan: Plan) -> Kill:
    """Kill whom the plan names when it says; a run whose role is gone ends by itself, and may be resumed."""
    pid = start.wait_for(plan.who, lambda: start.pid(plan.who, run))
    if plan.steps:
        before = start.wait_for("word of the resume", start.resumed) if number > 1 else 0
        start.wait_for(f"step {before + plan.steps}", lambda: steps_of(run) >= before + plan.steps)
    time.sleep(plan.seconds)
    assert start.driver.poll() is None, f"the run ended before kill {number}: {start.tail()}"
    kill = Kill(number, plan, steps_of(run), time.time() - start.began)
    os.kill(pid, signal.SIGKILL)
    at = time.monotonic()
    kill.code, kill.ended_s = start.driver.wait(120), time.monotonic() - at
    assert kill.code == (-signal.SIGKILL if plan.who == "driver" else 75), start.tail()
    assert plan.who == "driver" or plan.who in start.tail(), start.tail()
    return kill


def uninterrupted(root: Path, overrides: list[str]) -> Path:
    before = shared_memory()
    with started(root / "whole.log", *overrides, "--run", str(root)) as start:
        assert start.driver.wait(900) == 0, start.tail()
        nothing_left(start, before)
    return next(iter(root.glob("*-grpo-*/config.yaml"))).parent


def ends(run: Path) -> dict[int, tuple[Any, ...]]:
    """How every draw ended, but for the batch that took it."""
    lines = ledger(run)
    assert max(Counter(line["draw"] for line in lines).values()) == 1
    return {line["draw"]: (line["epoch"], line["env"], line["row"], line["state"], line.get("cause")) for line in lines}


def check_record(run: Path, steps: int, oldest: int) -> None:
    """Each step once, each batch what the ledger says, each token's version as the config allows; versions and time only grow."""
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(earlier["time/wall_s"] < later["time/wall_s"] for earlier, later in pairwise(rows))
    assert checkpoint.find(run / "checkpoints")[-1].step == steps
    trained = Counter((line["step"], line["draw"]) for line in ledger(run) if line["state"] == "trained")
    for step in range(1, steps + 1):
        recorded = read_rollouts(run, step)
        assert {int(row["group_id"].split(":")[0]) for row in recorded} == {draw for at, draw in trained if at == step}
        for row in recorded:
            of_tokens = [version for version in row["weight_versions"] if version >= 0]
            assert of_tokens == sorted(of_tokens)
            assert all(step - 1 - oldest <= version <= step - 1 for version in of_tokens)


def table(title: str, kills: list[Kill], whole: dict[int, Any], final: dict[int, Any]) -> str:
    """As `docs/reference/checkpoint.md` shows it."""
    lines = [title, "", "| Kill | Who | When | At step | Second | Over after | Resumed from step | Draws lost | Doubled |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for k in kills:
        seconds, over = f"{k.began:.0f}", f"{k.ended_s:.1f} s"
        cells = [k.number, k.plan.who, k.plan, k.step, seconds, over, k.resumed, len(k.lost), len(k.doubled)]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    epochs = 1 + max(end[0] for end in final.values())
    differ = sum(whole.get(draw) != final.get(draw) for draw in {*whole, *final})
    total = f"{len(final)} draws in {epochs} epochs; {differ} of them end otherwise than in the uninterrupted run"
    return "\n".join([*lines, "", total])


@pytest.mark.parametrize("seed", [int(os.environ.get("POSTTRAIN_KILLS_SEED", "6"))])
def test_on_a_cluster_with_vllm_every_draw_ends_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = uninterrupted(tmp_path / "whole", CLUSTER)
    made = plans(seed, ["driver", "policy-?", "rollout-?"], starting_s=40, later_s=1.0)
    run, kills = killed_and_resumed(tmp_path / "killed", CLUSTER, made)
    with capsys.disabled():
        print("\n" + table(f"Ray, 2 policy ranks, 2 vLLM replicas; seed {seed}", kills, ends(whole), ends(run)))
    assert not [kill for kill in kills if kill.lost or kill.doubled]
    assert ends(run) == ends(whole) and sorted(ends(run)) == list(range(40 * PROMPTS))
    assert {end[3] for end in ends(run).values()} == {"trained"}
    for one in (whole, run):
        check_record(one, 40, oldest=8)


@pytest.mark.parametrize("seed", [int(os.environ.get("POSTTRAIN_KILLS_SEED", "6"))])
def test_in_one_process_the_bits_are_those_of_the_uninterrupted_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = uninterrupted(tmp_path / "whole", LOCAL)
    run, kills = killed_and_resumed(tmp_path / "killed", LOCAL, plans(seed, ["driver"], starting_s=6, later_s=0.5))
    with capsys.disabled():
        print("\n" + table(f"One process, hf engine; seed {seed}", kills, ends(whole), ends(run)))
    assert not [kill for kill in kills if kill.lost or kill.doubled]
    assert ends(run) == ends(whole) and sorted(ends(run)) == list(range(60 * PROMPTS))
    for one in (whole, run):
        check_record(one, 60, oldest=2)
    assert steady(run) == steady(whole)
    assert weights(run) == weights(whole)


def steady(run: Path) -> list[tuple[Any, ...]]:
    return [tuple(row.get(key) for key in STEADY) for row in read_metrics(run)]


def weights(run: Path) -> dict[str, bytes]:
    newest = checkpoint.find(run / "checkpoints")[-1].policy
    return {path.name: path.read_bytes() for path in sorted(newest.rglob("*")) if path.is_file()}
