"""Sweeps: Hydra's combinations and folders, each job a process of its own."""

from __future__ import annotations

import pytest

import posttrain.cli.multirun as sweeps
from posttrain.cli.main import main
from posttrain.config import load_config


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """The jobs that would have been started."""
    started = []

    def run_job(task, *, config_file, folder):
        started.append((task, config_file, folder))
        return 0

    monkeypatch.setattr(sweeps, "run_job", run_job)
    monkeypatch.chdir(tmp_path)
    return started


def test_every_combination_is_a_job_with_a_folder_of_its_own(jobs, tmp_path) -> None:
    assert main(["train", "--multirun", "experiment=toy", "seed=1,2", "+rl.optimizer.lr=1e-5,1e-6"]) == 0
    configs = [load_config(task).config for task, _, _ in jobs]
    assert [(c.seed, c.rl.optimizer.lr) for c in configs] == [(1, 1e-5), (1, 1e-6), (2, 1e-5), (2, 1e-6)]
    folders = [folder for _, _, folder in jobs]
    assert len(set(folders)) == 4 and all(tmp_path / "multirun" in folder.parents for folder in folders)


def test_hydras_own_settings_and_sweeps_work(jobs, tmp_path) -> None:
    assert main(["train", "-m", "experiment=toy", "seed=range(3)", f"hydra.sweep.dir={tmp_path}/here", "name='x=y'"]) == 0
    assert [load_config(task).config.seed for task, _, _ in jobs] == [0, 1, 2]
    assert {folder.parent.name for _, _, folder in jobs} == {"here"} and load_config(jobs[0][0]).config.name == "x=y"


def test_experiments_can_be_swept(jobs) -> None:
    assert main(["train", "-m", "experiment=glob(toy*)", "seed=1"]) == 0
    assert [task for task, _, _ in jobs] == [["experiment=toy", "++seed=1"]]


def test_the_file_and_the_root_are_handed_on(jobs, tmp_path) -> None:
    assert main(["train", "-m", "seed=1,2", "--config", "my.yaml", "--run", str(tmp_path / "root")]) == 0
    assert [(config, folder) for _, config, folder in jobs] == [("my.yaml", tmp_path / "root")] * 2


def test_a_failed_job_fails_the_sweep_after_all_have_run(jobs, monkeypatch, capsys) -> None:
    codes = iter([0, 75, 0])
    monkeypatch.setattr(sweeps, "run_job", lambda task, **_: next(codes))
    assert main(["train", "-m", "experiment=toy", "seed=1,2,3"]) == 75
    assert "3 runs, 1 failed" in capsys.readouterr().err


def test_a_bad_override_ends_before_any_job(jobs, capsys) -> None:
    assert main(["train", "-m", "experiment=toy", "seed=1,2", "a={{"]) == 2
    assert jobs == [] and "cannot read 'a={{'" in capsys.readouterr().err


def test_a_job_is_a_real_process_with_our_exit_code(monkeypatch, tmp_path, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "experiment=toy", "rl.stepz=1,2"]) == 2
    err = capfd.readouterr().err
    assert err.count("did you mean rl.steps?") == 2 and "2 runs, 2 failed" in err
