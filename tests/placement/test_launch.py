"""What the launcher decides, and the sbatch script as text: golden files, and the linter of shells where there is one.

A golden file that should change: UPDATE_GOLDEN=1 pytest tests/placement/test_launch.py
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from posttrain.config.schema import GridConfig, ShapesConfig
from posttrain.errors import ConfigError
from posttrain.placement.cluster import cpus_of
from posttrain.placement.grid import resolve_grid
from posttrain.placement.launch import SlurmJob, cpus_for, devices, nodes_for, sbatch_script, warnings

GOLDEN = Path(__file__).parents[1] / "data" / "launch"
ONE = SlurmJob(name="arithmetic", arguments=("experiment=arithmetic_grpo", "rl.steps=2"), backend="local", root="/shared/runs",
               log_dir="/shared/logs", requeues=0)  # fmt: skip
CLUSTER = SlurmJob(
    name="cluster",
    arguments=("experiment=cluster_grpo", 'name="a, b"', "--config", "/shared/my config.yaml"),
    backend="ray",
    root="/shared/runs of all",
    log_dir="/shared/logs",
    nodes=4,
    gpus_per_node=8,
    cpus_per_node=64,
    ray_cpus=16,
    time="04:00:00",
    partition="gpu",
    account="rl",
    image="docker://registry.example/posttrain:1",
    mounts=("/data:/data",),
    directives=("--qos=high",),
    ray_port=6400,
)
JOBS = {"one_node": ONE, "cluster": CLUSTER, "cluster_cpu": dataclasses.replace(CLUSTER, image=None, mounts=(), gpus_per_node=0)}


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_golden_file(name: str) -> None:
    path, script = GOLDEN / f"{name}.sbatch", sbatch_script(JOBS[name])
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(script, encoding="utf-8")
    assert script == path.read_text(encoding="utf-8")
    assert script == sbatch_script(dataclasses.replace(JOBS[name]))


@pytest.mark.parametrize("name", JOBS)
def test_bash_and_its_linter_accept_the_script(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(sbatch_script(JOBS[name]), encoding="utf-8")
    assert subprocess.run(["bash", "-n", path], capture_output=True).returncode == 0
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_nothing_is_left_to_fill_in() -> None:
    for job in JOBS.values():
        assert not [
            line
            for line in sbatch_script(job).splitlines()
            if "@" in line.replace("[@]", "").replace("$@", "").replace("TERM@", "")
        ]


def grid(placement: str, policy: int, rollout: tuple[int, int]) -> GridConfig:
    return GridConfig(
        backend="ray",
        shapes=ShapesConfig(policy=(1, policy), rollout=rollout),
        gpu_placement=placement,
        dp_shard=policy,  # type: ignore[arg-type]
    )


def test_the_devices_of_a_grid() -> None:
    assert devices(resolve_grid(grid("disaggregated", 8, (4, 2)))) == 16
    assert devices(resolve_grid(grid("colocated", 8, (2, 2)))) == 8


def test_the_cpus_that_ray_has_to_offer_for_a_grid() -> None:
    apart, together = (resolve_grid(grid(how, 8, (4, 2))) for how in ("disaggregated", "colocated"))
    assert cpus_of(apart) == 16 and cpus_of(together) == 16
    assert cpus_for(apart, 2, 8) == cpus_for(together, 1, 8) == 16, "what eight devices with two roles each take"
    assert cpus_for(apart, 1, 0) == 12 and cpus_for(apart, 5, 0) == 3, "a part of the roles on each node"


def test_the_fewest_nodes_that_hold_the_grid() -> None:
    shape = resolve_grid(grid("disaggregated", 8, (5, 2)))
    assert nodes_for(shape, 8, None) == 3 and nodes_for(shape, 8, 4) == 4 and nodes_for(shape, 0, None) == 1
    with pytest.raises(ConfigError, match=r"needs 18 devices, 2 node\(s\) with 8 each have 16") as caught:
        nodes_for(shape, 8, 2)
    assert "--nodes 3" in caught.value.fix
    with pytest.raises(ConfigError, match="2 nodes under grid.backend=local"):
        nodes_for(resolve_grid(GridConfig()), 0, 2)


def test_a_folder_in_tmp_is_warned_of_on_more_than_one_node() -> None:
    local = dataclasses.replace(CLUSTER, root="/tmp/imaginaire-output", log_dir="/tmp")
    lines = warnings(local)
    assert len(lines) == 2 and lines[0].startswith("--run /tmp/imaginaire-output") and lines[1].startswith("--log-dir /tmp ")
    assert not warnings(dataclasses.replace(local, nodes=1)) and not warnings(CLUSTER)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "two words"},
        {"log_dir": "/shared/my logs"},
        {"partition": 'gpu" --wrap="rm'},
        {"directives": ("--qos=high\nrm -rf /",)},
        {"directives": ("qos",)},
        {"image": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_slurm_would_read_otherwise_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        sbatch_script(dataclasses.replace(CLUSTER, **change))  # type: ignore[arg-type]
