"""Sweeps: Hydra's combinations and folders, each job a process of its own."""

from __future__ import annotations

import json

import pytest

import posttrain.cli.multirun as sweeps
from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.config.overrides import parse
from posttrain.config.schema import ModelConfig
from posttrain.loop.model_folder import model_folder


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """The jobs that would have been started: overrides, folder, and the flags that they get."""
    started = []

    def run_job(task, *, folder, options, models):
        started.append((task, folder, options))
        return 0

    monkeypatch.setattr(sweeps, "run_job", run_job)
    monkeypatch.chdir(tmp_path)
    return started


def test_every_combination_is_a_job_with_a_folder_of_its_own(jobs, tmp_path) -> None:
    assert main(["train", "--multirun", "experiment=toy", "seed=1,2", "+rl.optimizer.lr=1e-5,1e-6"]) == 0
    configs = [load_config(task).config for task, _, _ in jobs]
    assert [(c.seed, c.rl.optimizer.lr) for c in configs] == [(1, 1e-5), (1, 1e-6), (2, 1e-5), (2, 1e-6)]
    folders = [folder for _, folder, _ in jobs]
    assert len(set(folders)) == 4 and all(tmp_path / "multirun" in folder.parents for folder in folders)


def test_hydras_own_settings_and_sweeps_work(jobs, tmp_path) -> None:
    assert main(["train", "-m", "experiment=toy", "seed=range(3)", f"hydra.sweep.dir={tmp_path}/here", "name='x=y'"]) == 0
    assert [load_config(task).config.seed for task, _, _ in jobs] == [0, 1, 2]
    assert {folder.parent.name for _, folder, _ in jobs} == {"here"} and load_config(jobs[0][0]).config.name == "x=y"


def test_experiments_can_be_swept(jobs) -> None:
    assert main(["train", "-m", "experiment=glob(toy*)", "seed=1"]) == 0
    assert [task for task, _, _ in jobs] == [["experiment=toy", "++seed=1"]]


def test_the_file_the_root_and_flags_are_handed_on(jobs, tmp_path) -> None:
    assert main(["train", "-m", "seed=1,2", "--config", "my.yaml", "--run", str(tmp_path / "root"), "--dry-run"]) == 0
    assert [(folder, options) for _, folder, options in jobs] == [
        (tmp_path / "root", ["--dry-run", "--config", str(tmp_path / "my.yaml")])
    ] * 2


def test_values_that_are_lists_and_files_can_be_swept(jobs) -> None:
    files = "environments.0.options.data=a.jsonl,'b c.jsonl'"
    assert main(["train", "-m", "experiment=toy", files, "rl.optimizer.betas=[0.9,0.99],[0.8,0.9]"]) == 0
    found = [{one.key: one.value for one in parse(task)} for task, _, _ in jobs]
    assert [one["environments.0.options.data"] for one in found] == ["a.jsonl", "a.jsonl", "b c.jsonl", "b c.jsonl"]
    assert [one["rl.optimizer.betas"] for one in found] == [[0.9, 0.99], [0.8, 0.9]] * 2


def made_run(folder, name: str, before: float, after: float):
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: x\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    rows = [{"step": 0, "validation/reward/mean": before}, {"step": 1, "validation/reward/mean": after}]
    (run / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_failed_job_does_not_end_the_sweep_and_the_table_tells_what_each_came_to(jobs, monkeypatch, capsys) -> None:
    codes = iter([0, 75, 0])

    def run_job(task, *, folder, **_):
        code = next(codes)
        if code == 0:
            made_run(folder, "toy-1", 0.25, 0.75)
        return code

    monkeypatch.setattr(sweeps, "run_job", run_job)
    assert main(["train", "-m", "experiment=toy", "seed=1,2,3", "name=same", "hydra.sweep.dir=s"]) == 75
    out = capsys.readouterr()
    assert "3 runs, 1 failed" in out.err
    assert [line.split() for line in out.out.splitlines() if "seed=" in line and not line.startswith("[")] == [
        ["seed=1", "0.25", "0.75", "done", "s/0/toy-1"],
        ["seed=2", "–", "–", "exit", "code", "75", "–"],
        ["seed=3", "0.25", "0.75", "done", "s/2/toy-1"],
    ]


def test_runs_in_one_folder_are_told_apart(jobs, monkeypatch, capsys, tmp_path) -> None:
    names = iter(["b", "a"])
    monkeypatch.setattr(sweeps, "run_job", lambda task, *, folder, **_: made_run(folder, next(names), 0.0, 1.0) or 0)
    assert main(["train", "-m", "experiment=toy", "seed=1,2", "--run", "all"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("seed=")] == ["all/b", "all/a"]


def test_ctrl_c_ends_the_sweep_with_what_there_is(jobs, monkeypatch, capsys) -> None:
    def run_job(task, **_):
        if "++seed=2" in task:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(sweeps, "run_job", run_job)
    assert main(["train", "-m", "experiment=toy", "seed=1,2,3"]) == 130
    assert "done" in capsys.readouterr().out


def test_models_made_by_code_are_shared_by_the_jobs(monkeypatch, tmp_path) -> None:
    seen = {}
    monkeypatch.setattr(sweeps.subprocess, "Popen", lambda command, env: seen.update(env=env) or Finished(0))
    sweeps.run_job(["seed=1"], folder=tmp_path / "0", options=[], models=tmp_path / "models")
    monkeypatch.setenv("POSTTRAIN_MODELS", seen["env"]["POSTTRAIN_MODELS"])
    config = ModelConfig(factory="cli_toy_models:build")
    (tmp_path / "cli_toy_models.py").write_text("def build(out): (out / 'config.json').write_text('{}')")
    monkeypatch.syspath_prepend(tmp_path)
    first, second = (model_folder(config, tmp_path / str(i)) for i in (0, 1))
    assert first == second and first.startswith(str(tmp_path / "models"))


class Finished:
    def __init__(self, code: int) -> None:
        self.code = code

    def wait(self) -> int:
        return self.code


def test_a_job_killed_by_a_signal_has_the_exit_code_of_a_shell(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sweeps.subprocess, "Popen", lambda command, env: Finished(-9))
    assert sweeps.run_job([], folder=tmp_path, options=[], models=tmp_path) == 137


def test_a_bad_override_ends_before_any_job(jobs, capsys) -> None:
    assert main(["train", "-m", "experiment=toy", "seed=1,2", "a={{"]) == 2
    assert jobs == [] and "cannot read 'a={{'" in capsys.readouterr().err


def test_a_job_is_a_real_process_with_our_exit_code(monkeypatch, tmp_path, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "experiment=toy", "rl.stepz=1,2"]) == 2
    err = capfd.readouterr().err
    assert err.count("did you mean rl.steps?") == 2 and "2 runs, 2 failed" in err
