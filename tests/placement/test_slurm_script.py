"""The sbatch script, run: with stand-ins for Slurm, the container tools and Ray, and once with the real training."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.placement.launch import SlurmJob, sbatch_script


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def job(tmp_path: Path, port: int, **given: Any) -> str:
    values = {"name": "toy", "arguments": ("experiment=toy", "name='a b'"), "backend": "ray", "nodes": 2, "ray_port": port}
    return sbatch_script(SlurmJob(**{**values, "root": str(tmp_path / "runs"), "log_dir": str(tmp_path / "logs"), **given}))


def trained(slurm: Any) -> list[dict[str, Any]]:
    path = slurm.folder / "trained"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_ray_on_every_node_and_the_training_on_the_first(slurm: Any, tmp_path: Path, port: int) -> None:
    code, said = slurm.run(job(tmp_path, port))
    assert code == 0, said
    head, worker = sorted(slurm.calls("ray"), key=lambda line: "--head" not in line)
    assert head.startswith(f"ray n1 start --head --node-ip-address=127.0.0.1 --port={port} ") and "--block" in head
    assert worker.startswith(f"ray n2 start --address=127.0.0.1:{port} ") and "--block" in worker
    (train,) = trained(slurm)
    assert train["argv"] == ["launch", "ray", "--nodes", "2", "experiment=toy", "name='a b'"] and train["node"] == "n1"
    assert (
        train["RAY_ADDRESS"] == f"127.0.0.1:{port}" and train["RAY_AUTH_MODE"] == "token" and len(train["RAY_AUTH_TOKEN"]) == 64
    )
    root = tmp_path / "runs"
    assert train["POSTTRAIN_OUTPUT_ROOT"] == train["IMAGINAIRE_OUTPUT_ROOT"] == str(root / "slurm-41")
    assert train["POSTTRAIN_MODELS"] == str(root / "models")
    assert not list(root.rglob(".posttrain-nonce-*")) and train["RAY_AUTH_TOKEN"] not in said
    with socket.create_server(("127.0.0.1", port)):
        pass  # nothing of Ray is left


def test_ray_offers_what_the_roles_take_also_where_there_are_fewer_cores(slurm: Any, tmp_path: Path, port: int) -> None:
    cores, environment = len(os.sched_getaffinity(0)), {"OMP_NUM_THREADS": "1"}
    for ray_cpus, offered in ((1000, 1000), (1, cores)):
        (slurm.folder / "calls").unlink(missing_ok=True)
        code, said = slurm.run(job(tmp_path, port, ray_cpus=ray_cpus), **environment)
        assert code == 0, said
        assert [f"--num-cpus={offered} " in line for line in slurm.calls("ray")] == [True, True], slurm.calls("ray")


def test_an_import_that_breaks_twice_is_repeated_on_a_clean_rootfs(slurm: Any, tmp_path: Path, port: int) -> None:
    code, said = slurm.run(job(tmp_path, port, image="docker://a/b"), STUB_IMPORT_FAILS="2")
    assert code == 0, said
    assert said.count("attempt 1 of 3") == said.count("attempt 2 of 3") == 2 and "attempt 3 of 3" not in said
    imports = [line for line in slurm.calls("srun") if " import " in line]
    assert sorted(imports) == sorted(f"srun {node} import in true" for node in ("n1", "n2") for _ in range(3))
    assert "enroot n2 remove -f pyxis_posttrain-41" in slurm.calls("enroot")
    assert len(trained(slurm)) == 1


def test_three_broken_imports_end_the_job_and_nothing_else_was_started(slurm: Any, tmp_path: Path, port: int) -> None:
    code, said = slurm.run(job(tmp_path, port, image="docker://a/b"), STUB_IMPORT_FAILS="3")
    assert code == 4 and "no container after three attempts" in said and "attempt 3 of 3" in said
    assert not trained(slurm) and not slurm.calls("ray")
    assert not list((slurm.folder / "rootfs").glob("*/*")), "a partial rootfs is left"


def test_a_rootfs_that_is_not_removed_would_fail_every_attempt(slurm: Any, tmp_path: Path, port: int) -> None:
    """The stand-in has the fault that the removal is for."""
    slurm.install("enroot", "exit 0\n")
    code, said = slurm.run(job(tmp_path, port, image="docker://a/b"), STUB_IMPORT_FAILS="1")
    assert code == 4 and said.count("File exists") == 4


def test_a_node_with_another_folder_for_runs_ends_the_job(slurm: Any, tmp_path: Path, port: int) -> None:
    code, said = slurm.run(job(tmp_path, port), STUB_BLIND="n2")
    assert code == 2 and f"{tmp_path / 'runs'}, is not shared: not seen by n2\n" in said and "--run FOLDER" in said
    assert not trained(slurm) and not slurm.calls("ray")


def test_a_port_that_is_taken_ends_the_job(slurm: Any, tmp_path: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        code, said = slurm.run(job(tmp_path, port))
    assert code == 2 and f"port {port} on n1 is taken" in said and "--ray-port" in said and not trained(slurm)


def test_a_head_that_does_not_start_ends_the_job(slurm: Any, tmp_path: Path, port: int) -> None:
    code, said = slurm.run(job(tmp_path, port), STUB_RAY_FAILS="1")
    assert code == 4 and "Ray did not start on n1" in said and "ray-41-n1.log" in said and not trained(slurm)


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 130])
def test_a_code_that_is_not_worth_it_is_not_repeated(slurm: Any, tmp_path: Path, port: int, code: int) -> None:
    ended, said = slurm.run(job(tmp_path, port, backend="local", nodes=1), STUB_CODES=str(code))
    assert ended == code and not [call for call in slurm.calls("scontrol") if "requeue" in call], said


def test_75_goes_back_into_the_queue_and_on_from_the_checkpoint(slurm: Any, tmp_path: Path, port: int) -> None:
    script = job(tmp_path, port, backend="local", nodes=1, requeues=1)
    assert slurm.run(script, STUB_CODES="75,75", SLURM_RESTART_COUNT="0")[0] == 75
    assert [call for call in slurm.calls("scontrol") if "requeue" in call] == ["scontrol requeue 41"]
    assert slurm.run(script, STUB_CODES="75,75", SLURM_RESTART_COUNT="1")[0] == 75
    assert len([call for call in slurm.calls("scontrol") if "requeue" in call]) == 1, "queued more often than asked for"
    first, second = trained(slurm)
    assert first["argv"] == ["train", "experiment=toy", "name='a b'"]
    assert second["argv"] == ["train", "--resume", str(tmp_path / "runs/slurm-41/toy-20260101-000000")]


def test_sigterm_reaches_the_training_and_its_code_is_the_jobs(slurm: Any, tmp_path: Path, port: int) -> None:
    process = slurm.start(job(tmp_path, port), STUB_WAITS="1")
    deadline = time.monotonic() + 60
    while not (slurm.folder / "waiting").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_the_real_training_runs_in_the_script(slurm: Any, tmp_path: Path, port: int, posttrain_tiny_model: Path) -> None:
    """`posttrain train` itself, for one step; then, as after a requeue, it goes on to the second."""
    slurm.install("posttrain", f'exec "{sys.executable}" -m posttrain.cli "$@"\n')
    config = tmp_path / "toy.yaml"
    least = {
        "model": {"name_or_path": str(posttrain_tiny_model)},
        "rl": {"steps": 1, "objective": {"name": "grpo"}, "group_size": 4, "batch_per_replica": 8},
        "rollout": {"max_tokens": 4, "max_model_len": 64},
        "environments": [{"name": "posttrain.testing.letters:Letters"}],
        "validation": {"prompts": 0},
        "checkpoint": {"every": 1},
        "grid": {"threads": 1},
    }
    config.write_text(json.dumps(least))
    script = job(tmp_path, port, backend="local", nodes=1, arguments=("--config", str(config)))
    code, said = slurm.run(script, OMP_NUM_THREADS="1")
    assert code == 0 and "step 1" in said, said
    (run,) = (tmp_path / "runs/slurm-41").glob("run-*")
    assert (run / "checkpoints/step_1").is_dir() and len((run / "metrics.jsonl").read_text().splitlines()) == 1
    code, said = slurm.run(script, SLURM_RESTART_COUNT="1", OMP_NUM_THREADS="1")
    assert code == 0 and "Nothing left to do" in said, said
    assert list((tmp_path / "runs/slurm-41").glob("run-*")) == [run], "a requeue began anew"
