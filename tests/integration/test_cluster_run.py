"""Runs on a Ray cluster, whole: two policy ranks under FSDP2, two rollout replicas, weights over NIXL.

Most use the `hf` engine in the bodies, which starts in seconds; one uses vLLM. They join one cluster of two nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from posttrain.config.load import load_config
from posttrain.errors import EngineStartError, PosttrainError
from posttrain.loop import checkpoint
from posttrain.loop.run import train
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.rollouts import read_rollouts
from posttrain.weights.shared_files import owner_of

KILLER = Path(__file__).parent.parent / "placement" / "killer_hook.py"
HEARTBEAT_S = 15
SMALL = [
    "experiment=cluster_grpo",
    "rollout.engine=hf",
    "model.factory_kwargs.steps=60",
    "model.factory_kwargs.slip_steps=20",
    "rl.batch_per_replica=32",
    "rl.group_size=4",
    "rl.steps=3",
    "rl.discard_group_zero_advantage=false",
    "validation.prompts=4",
    "validation.every=0",
    "checkpoint.every=1",
    "checkpoint.keep_last=null",
    f"grid.heartbeat_timeout_s={HEARTBEAT_S}",
    "loop.train_timeout_s=120",
    "tracking.display=none",
]
ONE_PROCESS = [
    "grid.backend=local",
    "grid.gpu_placement=colocated",
    "grid.shapes.policy=null",
    "grid.shapes.rollout=null",
    "grid.dp_shard=1",
    "weights.transport=inproc",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, for all runs of this file that do not start their own."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=3)
    before, os.environ["RAY_ADDRESS"] = os.environ.get("RAY_ADDRESS"), made.address
    yield made
    del os.environ["RAY_ADDRESS"]
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
    made.shutdown()


def start(root: Path, *overrides: str, resume: Path | None = None) -> Any:
    if resume is None:
        return train(load_config([*SMALL, *overrides]), run_dir=root)
    return train(load_config(list(overrides), config_file=resume / "config.yaml"), resume=resume)


@pytest.fixture(scope="module")
def whole(root: Path) -> Any:
    """An undisturbed run of three steps on two policy ranks and two replicas."""
    return start(root)


def newest(root: Path) -> Path:
    return max((path for path in root.glob("cluster-grpo-*") if path.is_dir()), key=lambda path: path.stat().st_mtime)


def pids(run: Path) -> list[int]:
    return [role["pid"] for role in json.loads((run / "logs" / "roles.json").read_text()).values()]


def gone(which: list[int], within: float = 15.0) -> bool:
    """Whether none of these processes is left, and no child of theirs."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in which):
            return True
        time.sleep(0.1)
    return False


NAMED_S = 30.0
"""From a kill to the error that names it, with the end of all processes: about two seconds, and a machine may be busy."""


def named_within(killed: float, seconds: float = NAMED_S) -> bool:
    """killed: the time of it. Asked as soon as the run has ended."""
    took = time.time() - killed
    print(f"named after {took:.1f} s")
    return took < seconds


def killed_at(run: Path) -> float:
    """When the hook sent its signal."""
    return float((run / "killed").read_text())


def left_memory(of: list[int]) -> list[str]:
    """Shared memory that these processes left."""
    owners = {path.name: owner_of(path) for path in Path("/dev/shm").glob("posttrain-*")}
    return [name for name, owner in owners.items() if owner is not None and owner.pid in of]


def test_a_run_trains_on_every_rank_and_replica_and_says_where(whole: Any) -> None:
    rows = read_metrics(whole.run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    roles = json.loads((whole.run / "logs" / "roles.json").read_text())
    assert sorted(roles) == ["policy-0", "policy-1", "rollout-0", "rollout-1"]
    assert len({role["pid"] for role in roles.values()}) == 4
    assert all((whole.run / "logs" / f"{name}.log").exists() for name in roles)
    assert gone([role["pid"] for role in roles.values()])


def test_the_numbers_are_those_of_one_process(root: Path, whole: Any) -> None:
    """The same prompts, seeds and rewards; losses and gradients but for rounding."""
    alone = start(root, *ONE_PROCESS)
    for theirs, ours in zip(read_metrics(alone.run), read_metrics(whole.run), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["tokens/trained"] == theirs["tokens/trained"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    tokens = [[(r["sample_id"], r["token_ids"]) for r in read_rollouts(run.run)] for run in (alone, whole)]
    assert tokens[0] == tokens[1]


def test_two_copies_of_a_policy_of_two_shards_compute_the_same(root: Path, whole: Any) -> None:
    """HSDP: four ranks, each of which publishes a quarter."""
    hybrid = start(root, "grid.shapes.policy=[1,4]", "grid.dp_replicate=2", "grid.dp_shard=2", "grid.shapes.rollout=[1,1]")
    for ours, theirs in zip(read_metrics(hybrid.run), read_metrics(whole.run), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"] and ours["tokens/trained"] == theirs["tokens/trained"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert sorted(json.loads((hybrid.run / "logs" / "roles.json").read_text())) == [
        "policy-0", "policy-1", "policy-2", "policy-3", "rollout-0",
    ]  # fmt: skip


def test_every_token_carries_the_version_that_sampled_it(whole: Any) -> None:
    for row in read_rollouts(whole.run):
        assert set(row["weight_versions"]) == {row["step"] - 1}


def test_it_goes_on_from_its_checkpoint_on_another_number_of_ranks(root: Path, whole: Any) -> None:
    before = read_metrics(whole.run)[2]
    copied = root / "cluster-grpo-other-ranks"
    shutil.copytree(whole.run, copied, symlinks=True)
    checkpoint.set_aside(copied / "checkpoints" / "step_3")
    resumed = start(root, "grid.dp_shard=1", "grid.shapes.policy=[1,1]", resume=copied)
    after = read_metrics(resumed.run)[2]
    assert after["step"] == 3 and after["reward/mean"] == before["reward/mean"]
    assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-3)


def also(*values: Any) -> Any:
    """Another case of what is tested here already: with `make kills`."""
    return pytest.param(*values, marks=pytest.mark.kills)


FAULTS = [
    ("policy-0", "trajectory_scored", 9, "policy-0 died"),
    also("policy-1", "before_publish", 9, "policy-1 died"),
    ("policy-1", "step_end", 19, "policy-1 has not answered"),
    also("rollout-0", "trajectory_scored", 9, "rollout-0 died"),
    ("rollout-1", "before_publish", 9, "rollout-1 died"),
    also("rollout-1", "trajectory_scored", 19, "rollout-1 has not answered"),
]


@pytest.mark.parametrize(("role", "when", "number", "said"), FAULTS)
def test_a_dead_or_stuck_role_ends_the_run_with_its_name(root: Path, role: str, when: str, number: int, said: str) -> None:
    """In step 4: step 3 was trained after the checkpoint of step 2 was begun, which waited for that of step 1."""
    options = f"{{role: {role}, when: {when}, step: 4, number: {number}}}"
    with pytest.raises(PosttrainError) as caught:
        start(root, f"hooks=[{{name: '{KILLER}:Killer', options: {options}}}]", "rl.steps=4")
    run = newest(root)
    assert named_within(killed_at(run), NAMED_S if number == 9 else HEARTBEAT_S + NAMED_S)
    assert said in str(caught.value) and caught.value.retryable, str(caught.value)
    assert role in str(caught.value.where) or role in caught.value.message
    assert gone(pids(run)) and not left_memory(pids(run))
    assert [c.step for c in checkpoint.find(run / "checkpoints")]  # what was done before is not lost
    if (role, number) == ("policy-0", 9):
        resumed = start(root, "hooks=[]", resume=run)
        assert read_metrics(resumed.run)[-1]["step"] == 4


@pytest.mark.parametrize(
    ("role", "when", "after_s"),
    [("policy-0", "trajectory_scored", 0.3), also("policy-1", "before_publish", 0.05), also("rollout-1", "before_publish", 0.1)],
)
def test_a_death_at_any_other_moment_is_named_too(root: Path, role: str, when: str, after_s: float) -> None:
    """In optimizer steps, while weights are staged or applied: whatever the run was doing then."""
    options = f"{{role: {role}, when: {when}, step: 2, after_s: {after_s}}}"
    with pytest.raises(PosttrainError) as caught:
        start(root, f"hooks=[{{name: '{KILLER}:Killer', options: {options}}}]", "rl.steps=200", "checkpoint.every=0")
    assert named_within(killed_at(newest(root)))
    assert f"{role} died" in str(caught.value) and caught.value.retryable, str(caught.value)
    assert gone(pids(newest(root)))


@pytest.mark.parametrize("role", [also("policy-1"), "rollout-1"])
def test_a_death_during_a_validation_is_named_too(root: Path, role: str) -> None:
    options = f"{{role: {role}, when: after_publish, step: 1, after_s: 0.1}}"
    long = ["validation.prompts=256", "validation.every=1", "checkpoint.every=0"]
    with pytest.raises(PosttrainError) as caught:
        start(root, f"hooks=[{{name: '{KILLER}:Killer', options: {options}}}]", *long)
    run = newest(root)
    assert named_within(killed_at(run))
    assert f"{role} died" in str(caught.value) and caught.value.exit_code == 75, str(caught.value)
    validated = [row["step"] for row in read_validation(run)]  # version 1 was delivered, its validation begun; bodies can end it
    assert validated == [0] if role == "rollout-1" else validated in ([0], [0, 1])
    assert gone(pids(run)) and not left_memory(pids(run))


@pytest.mark.parametrize("role", ["policy-1", also("rollout-0")])
def test_a_death_while_a_checkpoint_is_written_is_named_too(root: Path, role: str) -> None:
    """One that a rank has no part in any more is whole or absent, never half; and the one before is there."""
    options = f"{{role: {role}, when: checkpoint, step: 2}}"
    with pytest.raises(PosttrainError) as caught:
        start(root, f"hooks=[{{name: '{KILLER}:Killer', options: {options}}}]", "rl.steps=200")
    run = newest(root)
    assert named_within(killed_at(run))
    assert f"{role} died" in str(caught.value) and caught.value.exit_code == 75, str(caught.value)
    kept = [c.step for c in checkpoint.find(run / "checkpoints")]
    assert kept == [1] if role == "policy-1" else kept in ([1], [1, 2])
    assert not list((run / "checkpoints").glob("tmp_*"))
    assert gone(pids(run)) and not left_memory(pids(run))


def writer_of(log: Path) -> int | None:
    """The process that has a log open: a role, from the first thing that it does."""
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(one.resolve() == log for one in descriptors.iterdir()):
                return int(descriptors.parent.name)
    return None


def new_run(root: Path, before: set[Path]) -> Path | None:
    return next((path for path in root.glob("cluster-grpo-*") if path not in before), None)


@pytest.mark.parametrize(
    ("role", "ready"),
    [also("policy-1", "logs/policy-1.log"), ("policy-0", "logs/roles.json"), also("rollout-1", "logs/rollout-1.log")],
)
def test_a_death_during_the_start_is_named_too(root: Path, role: str, ready: str) -> None:
    """While a role begins, of which only its log is known; while the ranks load the model."""
    before, killed = set(root.glob("cluster-grpo-*")), list[tuple[int, float]]()

    def kill() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not killed:
            run = new_run(root, before)
            pid = writer_of((run / f"logs/{role}.log").resolve()) if run and (run / ready).exists() else None
            if pid is not None:
                killed.append((pid, time.time()))
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(PosttrainError) as caught:
        start(root, "rl.steps=200")
    assert killed and named_within(killed[0][1])
    thread.join()
    assert f"{role} died" in str(caught.value) and caught.value.exit_code == 75, str(caught.value)
    run = newest(root)
    assert not read_metrics(run)
    for log in (run / "logs").glob("*-?.log"):
        assert writer_of(log.resolve()) is None, log


def test_a_death_while_engines_start_is_named_too(root: Path) -> None:
    options = "{role: rollout-1, when: run_start}"
    with pytest.raises(PosttrainError, match="rollout-1 died"):
        start(root, f"hooks=[{{name: '{KILLER}:Killer', options: {options}}}]", "rl.steps=200")
    run = newest(root)
    assert named_within(killed_at(run)) and gone(pids(run)) and not read_metrics(run)


@pytest.mark.parametrize("when", ["trajectory_scored", also("before_publish")])
def test_a_dead_replica_is_replaced_where_the_config_says_so(root: Path, whole: Any, when: str) -> None:
    """Its prompts go to the other one with the same seeds, so that the run's numbers are those of the undisturbed one."""
    options = f"{{role: rollout-0, when: {when}, step: 2}}"
    healed = start(root, "weights.on_failure=rebuild_and_retry", f"hooks=[{{name: '{KILLER}:Killer', options: {options}}}]")
    for theirs, ours in zip(read_metrics(whole.run), read_metrics(healed.run), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
    roles = json.loads((healed.run / "logs" / "roles.json").read_text())
    assert "rollout-0 runs again, in a new process" in (healed.run / "logs" / "driver.log").read_text()
    assert gone([role["pid"] for role in roles.values()])


def test_a_run_goes_on_without_a_replica_where_the_config_says_so(root: Path, whole: Any) -> None:
    options = "{role: rollout-1, when: before_publish, step: 2}"
    smaller = start(root, "weights.on_failure=drop_lane", f"hooks=[{{name: '{KILLER}:Killer', options: {options}}}]")
    assert [row["reward/mean"] for row in read_metrics(smaller.run)] == [row["reward/mean"] for row in read_metrics(whole.run)]


def test_a_run_that_needs_more_than_the_cluster_has_ends_before_anything_loads(root: Path) -> None:
    with pytest.raises(EngineStartError, match="this grid needs 6 CPU in 6 bundle"):
        start(root, "grid.shapes.rollout=[4,1]", "rl.batch_per_replica=32")


@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("train", signal.SIGKILL, -9), ("launch ray --ray-port PORT", signal.SIGINT, 130), also("train", signal.SIGINT, 130),
        also("train", signal.SIGTERM, 143),
    ],
)  # fmt: skip
def test_a_signal_to_the_driver_leaves_no_process(root: Path, how: str, number: int, code: int) -> None:
    """With a cluster of its own, which has to go too. Ctrl-C is sent to all, as a terminal does."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        words = how.replace("PORT", str(free.getsockname()[1])).split()
    command = [sys.executable, "-m", "posttrain.cli", *words, *SMALL, "rl.steps=500", "--run", str(root)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as driver:
        run = wait_for_step(root, driver, 2)
        family = psutil.Process(driver.pid).children(recursive=True)
        if number == signal.SIGINT:
            os.killpg(driver.pid, number)
        else:
            driver.send_signal(number)
        driver.wait(60)
    assert driver.returncode == code
    assert gone([*pids(run), *(child.pid for child in family)])
    time.sleep(1.0 if number == signal.SIGKILL else 0.0)  # those who outlived it remove what it left
    assert not left_memory([driver.pid, *pids(run), *(child.pid for child in family)])


@pytest.mark.parametrize("ready", [also("logs/driver.log"), "logs/roles.json"])
def test_a_sigterm_during_the_start_leaves_no_process(root: Path, ready: str) -> None:
    """Before anything is placed; while the ranks load the model."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "posttrain.cli", "train", *SMALL, "rl.steps=500", "--run", str(root)]
    before, deadline = set(root.glob("cluster-grpo-*")), time.monotonic() + 180
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        while not ((run := new_run(root, before)) and (run / ready).exists()):
            assert driver.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(signal.SIGTERM)
        began = time.time()
        driver.wait(60)
    assert driver.returncode == 143 and named_within(began)
    assert gone([child.pid for child in family])
    assert not read_metrics(run) and not left_memory([driver.pid, *(child.pid for child in family)])
    for log in (run / "logs").glob("*-?.log"):
        assert writer_of(log.resolve()) is None, log


def wait_for_step(root: Path, driver: subprocess.Popen[str], step: int) -> Path:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert driver.poll() is None, driver.stdout.read() if driver.stdout else ""
        for run in root.glob("cluster-grpo-*"):
            config = run / "config.yaml"
            long = config.exists() and "steps: 500" in config.read_text() and not (run / "seen").exists()
            if long and len(read_metrics(run)) >= step:
                (run / "seen").touch()
                return run
        time.sleep(0.2)
    raise AssertionError("the run did not reach its step")


def test_a_body_with_two_tensor_parallel_workers_serves_the_same_weights(root: Path) -> None:
    """The canary holds its log-probs against the policy's; its workers end with it."""
    wide = ["grid.shapes.rollout=[1,2]", "rollout.tensor_parallel_size=2", "rl.steps=1", "rl.batch_per_replica=32"]
    result = train(load_config(["experiment=cluster_grpo", *wide, "validation.prompts=8", "tracking.display=none"]), run_dir=root)
    assert read_metrics(result.run)[0]["tokens/trained"] > 0
    assert gone(pids(result.run)) and not left_memory(pids(result.run))


def test_with_vllm_bodies_the_reward_rises(root: Path) -> None:
    few = ["rl.steps=4", "rl.batch_per_replica=64", "tracking.display=none"]
    result = train(load_config(["experiment=cluster_grpo", *few]), run_dir=root)
    first, last = (read_validation(result.run)[row]["validation/reward/mean"] for row in (0, -1))
    assert last > first + 0.3
    assert all((result.run / "logs" / name / "vllm.log").exists() for name in ("rollout-0", "rollout-1"))
    assert gone(pids(result.run))
