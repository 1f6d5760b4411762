"""`posttrain launch`: which way a config can take, what is written and submitted, and a port that is taken."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.cli.main import main

TOY = "experiment=toy"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "POSTTRAIN_OUTPUT_ROOT", "IMAGINAIRE_OUTPUT_ROOT"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> int:
    return main(["launch", *arguments])


def on_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config for Ray, whatever the rules of this version say of it."""
    from posttrain.cli import launch
    from posttrain.config.schema import GridConfig

    config = SimpleNamespace(name="toy", grid=GridConfig(backend="ray"))
    monkeypatch.setattr(launch, "load", lambda args: SimpleNamespace(config=config, tree={}))


def test_local_trains_here(fake_train, tmp_path) -> None:
    seen = []
    fake_train(lambda loaded, **given: seen.append((loaded.config.rl.steps, given)))
    assert run("local", TOY, "rl.steps=7", "--run", str(tmp_path)) == 0
    assert seen == [(7, {"run_dir": str(tmp_path), "resume": None})]


def test_the_backend_has_to_be_the_one_that_is_launched(fake_train, capsys, monkeypatch) -> None:
    fake_train(lambda *_, **__: pytest.fail("trained"))
    assert run("ray", TOY) == 2
    assert "posttrain launch ray with grid.backend=local" in capsys.readouterr().err
    on_ray(monkeypatch)
    assert run("local", TOY) == 2
    assert "posttrain launch local with grid.backend=ray" in capsys.readouterr().err


def test_a_port_that_is_taken_ends_it_before_anything_starts(fake_train, capsys, monkeypatch) -> None:
    fake_train(lambda *_, **__: pytest.fail("trained"))
    on_ray(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run("ray", TOY, "--ray-port", str(port)) == 2
    said = capsys.readouterr().err
    assert f"port {port} is taken by process {os.getpid()}" in said and "another --ray-port" in said


def test_more_nodes_than_this_one_need_a_cluster_to_join(fake_train, capsys, monkeypatch) -> None:
    fake_train(lambda *_, **__: pytest.fail("trained"))
    on_ray(monkeypatch)
    assert run("ray", TOY, "--nodes", "2") == 2
    assert "--nodes 2 without RAY_ADDRESS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "flags", "fix"),
    [
        (["local", "--submit", "--nodes", "1"], "--nodes, --submit", "posttrain launch slurm"),
        (["local", "--ray-port", "6379"], "--ray-port", "posttrain launch ray (with grid.backend=ray)"),
        (["ray", "--gpus-per-node", "0"], "--gpus-per-node", "posttrain launch slurm"),
        (["ray", "--requeues", "3", "--mount", "/a:/a"], "--mount, --requeues", "posttrain launch slurm"),
        (["slurm", "--wait", "9"], "--wait", "leave --wait out"),
        (["slurm", "--ray-port", "6380"], "--ray-port", "set grid.backend=ray"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(fake_train, capsys, tmp_path, arguments, flags, fix) -> None:
    fake_train(lambda *_, **__: pytest.fail("trained"))
    assert run(arguments[0], TOY, *arguments[1:]) == 2
    said = capsys.readouterr().err
    assert f"{flags} would do nothing: posttrain launch {arguments[0]}" in said and f"fix:   leave {flags} out" in said
    assert fix in said and not list(tmp_path.glob("*.sbatch"))


def test_a_cluster_that_is_joined_takes_no_port_and_writes_no_log(fake_train, capsys, monkeypatch) -> None:
    fake_train(lambda *_, **__: pytest.fail("trained"))
    on_ray(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert run("ray", TOY, "--ray-port", "6379", "--log-dir", "logs") == 2
    said = capsys.readouterr().err
    assert "--ray-port, --log-dir would do nothing: posttrain launch ray with RAY_ADDRESS set" in said
    assert "or unset RAY_ADDRESS" in said


def test_slurm_writes_a_script_with_what_was_typed(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")
    (tmp_path / "my.yaml").write_text("experiment: toy\n")
    arguments = [
        "--config",
        "my.yaml",
        "rl.steps=7",
        "tracking.tags.token=hunter2-hunter2",
        "--run",
        "/shared/runs",
        "--time",
        "1:00:00",
    ]
    assert run("slurm", *arguments) == 0
    assert "written: run.sbatch; submit it with: sbatch run.sbatch" in capsys.readouterr().out
    script = Path("run.sbatch").read_text()
    assert "#SBATCH --time=1:00:00\n" in script and "readonly ROOT=/shared/runs LOG_DIR=/shared/runs/launch\n" in script
    assert (
        f"train=(posttrain train rl.steps=7 'tracking.tags.token=${{oc.env:MY_TOKEN}}' --config {tmp_path}/my.yaml)\n" in script
    )
    assert "hunter2" not in script
    assert subprocess.run(["bash", "-n", "run.sbatch"]).returncode == 0


def test_slurm_warns_of_tmp_on_several_nodes(capsys, monkeypatch) -> None:
    on_ray(monkeypatch)
    assert run("slurm", TOY, "--nodes", "2", "--run", "/shared/runs", "--log-dir", "/tmp/logs", "--out", "-") == 0
    out, err = capsys.readouterr()
    assert "warning: --log-dir /tmp/logs is local to a node" in err and "--nodes=2\n" in out


def test_slurm_refuses_a_config_that_cannot_work_and_writes_nothing(tmp_path, capsys) -> None:
    assert run("slurm", TOY, "rl.steps=ten") == 2 and run("slurm", TOY, "--nodes", "2") == 2
    assert run("slurm", TOY, "--ray-port", "70000") == 2
    assert not list(tmp_path.glob("*.sbatch"))


def test_submitting(tmp_path, capsys, monkeypatch) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run("slurm", TOY, "--submit", "--run", str(tmp_path / "runs")) == 2
    assert "there is no sbatch here" in capsys.readouterr().err
    stub = tmp_path / "bin" / "sbatch"
    stub.parent.mkdir()
    stub.write_text(
        '#!/bin/sh\necho "$@" >called\n[ -z "$REFUSES" ] || { echo "invalid partition" >&2; exit 1; }\necho "41;cluster"\n'
    )
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{path}")
    capsys.readouterr()
    assert run("slurm", TOY, "--submit", "--run", str(tmp_path / "runs")) == 0
    assert "as job 41; its log: " in capsys.readouterr().out and Path("called").read_text() == "--parsable run.sbatch\n"
    assert (tmp_path / "runs/launch").is_dir(), "Slurm would drop the log"
    monkeypatch.setenv("REFUSES", "1")
    assert run("slurm", TOY, "--submit", "--run", str(tmp_path / "runs")) == 2
    assert "cause: invalid partition" in capsys.readouterr().err
