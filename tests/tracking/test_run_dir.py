"""The run directory: exclusive, locked, found again, and honest about what it recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from posttrain.config.load import load_config
from posttrain.errors import ConfigError, RunInterrupted
from posttrain.tracking.files import aside, superseded_name, write_text
from posttrain.tracking.lock import RunLock
from posttrain.tracking.run_dir import RunDir, find_run, output_root


@pytest.fixture(autouse=True)
def no_root_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POSTTRAIN_OUTPUT_ROOT", "IMAGINAIRE_OUTPUT_ROOT"):
        monkeypatch.delenv(name, raising=False)


def test_root_flag_before_variables_before_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_root() == tmp_path / "outputs"
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path / "i"))
    assert output_root() == tmp_path / "i"
    monkeypatch.setenv("POSTTRAIN_OUTPUT_ROOT", str(tmp_path / "p"))
    assert output_root() == tmp_path / "p"
    assert output_root(tmp_path / "flag") == tmp_path / "flag"


def test_two_runs_of_the_same_second_get_two_directories(tmp_path: Path) -> None:
    runs = [RunDir.create(tmp_path, "demo") for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(run.path.name.startswith("demo-") and run.rollouts.is_dir() for run in runs)
    for run in runs:
        run.close()


CREATE = "import sys; from posttrain.tracking.run_dir import RunDir; print(RunDir.create(sys.argv[1], 'race').path)"


def test_racing_processes_never_share_a_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CREATE, str(tmp_path)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {racer.communicate(timeout=60)[0] for racer in racers}
    assert len(paths) == 4 and all(path.strip() for path in paths)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a run directory"):
        RunDir.create(tmp_path, name)


def test_a_root_that_is_a_file_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot create a run directory") as caught:
        RunDir.create(tmp_path / "file", "demo")
    assert "--run" in caught.value.fix


HOLD = """
import sys, time
from posttrain.tracking.run_dir import RunDir
run = RunDir.open(sys.argv[1])
print("held", flush=True)
if sys.argv[2] == "fork":
    import os
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


def _holder(path: Path, mode: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def _new_run(root: Path) -> Path:
    with RunDir.create(root, "demo") as run:
        run.write_config({"name": "demo"})
        return run.path


def test_a_running_run_is_locked_and_a_killed_one_is_free(tmp_path: Path) -> None:
    path = _new_run(tmp_path)
    process = _holder(path, "alone")
    try:
        with pytest.raises(ConfigError, match="is in use") as caught:
            RunDir.open(path)
        assert str(process.pid) in caught.value.cause
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    RunDir.open(path).close()


def test_an_orphaned_forked_worker_does_not_keep_a_dead_run_locked(tmp_path: Path) -> None:
    path = _new_run(tmp_path)
    process = _holder(path, "fork")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    try:
        os.kill(child, 0)
        RunDir.open(path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_without_flock_the_process_id_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("posttrain.tracking.lock.fcntl.flock", unsupported)
    lock = RunLock(tmp_path)
    with pytest.raises(ConfigError, match="is in use"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


def test_open_takes_a_run_or_a_checkpoint_and_refuses_the_rest(tmp_path: Path) -> None:
    path = _new_run(tmp_path)
    checkpoint = path / "checkpoints" / "step_12"
    checkpoint.mkdir()
    assert find_run(path) == find_run(checkpoint) == path
    with pytest.raises(ConfigError, match="there is no run at") as caught:
        find_run(tmp_path / "absent")
    assert caught.value.cause == "no such folder"
    with pytest.raises(ConfigError, match="there is no run at"):
        find_run(tmp_path)


def test_config_and_overrides_are_written_as_given(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo") as run:
        run.write_config({"rl": {"steps": 3, "π": "é"}}, ["rl.steps=3", "+name='a=b'"])
    assert yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8")) == {"rl": {"steps": 3, "π": "é"}}
    assert (run.path / "overrides.txt").read_text() == "rl.steps=3\n+name='a=b'\n"


def test_a_resume_adds_to_what_was_typed(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo") as run:
        run.write_config({"rl": {"steps": 3}}, ["rl.steps=3"])
    for overrides in (["rl.steps=5"], []):
        with RunDir.open(run.path) as again:
            again.write_config({"rl": {"steps": 5}}, overrides)
    when = r"# resumed \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n"
    assert re.fullmatch(rf"rl\.steps=3\n{when}rl\.steps=5\n{when}", (run.path / "overrides.txt").read_text())


def test_provenance_has_versions_plugins_and_machine_but_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "tok-123")
    with RunDir.create(tmp_path, "demo") as run:
        run.write_provenance(tags={"idea": "a"}, threads=2)
        run.write_provenance()
    text = (run.path / "provenance.json").read_text(encoding="utf-8")
    first, second = json.loads(text)
    assert first["tags"] == {"idea": "a"} and first["threads"] == 2 and second["tags"] == {}
    assert first["libraries"]["torch"] and first["machine"]["cores"] >= 1
    assert first["plugins"]["algorithms"]["grpo"].startswith("posttrain ")
    assert "tok-123" not in text


def test_provenance_records_the_commit_and_whether_it_is_dirty(tmp_path: Path) -> None:
    from posttrain.tracking.provenance import git_state

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert git_state(tmp_path) is None
    git("init")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "x")
    clean = git_state(tmp_path)
    assert clean is not None and len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "f").write_text("2")
    changed = git_state(tmp_path)
    assert changed is not None and changed["dirty"] is True


def test_a_file_written_aside_is_whole_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_text(target, "old")
    with pytest.raises(RuntimeError), aside(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_superseded_names_never_collide(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    names = []
    for _ in range(3):
        name = superseded_name(path)
        name.touch()
        names.append(name.name)
    assert len(set(names)) == 3 and all(n.endswith(".superseded") for n in names)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    from posttrain.tracking.metrics import MetricsWriter

    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunInterrupted, match="the disk is full") as caught:
        MetricsWriter(tmp_path / "metrics.jsonl").write(1, {"loss": 1.0})
    assert "metrics.jsonl" in str(caught.value) and caught.value.retryable and caught.value.exit_code == 75


def test_what_ends_a_run_carries_its_directory(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, RunDir.create(tmp_path, "run") as directory:
        raise KeyboardInterrupt
    assert caught.value.run_dir == directory.path  # type: ignore[attr-defined]


def test_provenance_records_every_value_that_differs_from_the_experiment(tmp_path: Path) -> None:
    loaded = load_config(["experiment=arithmetic_grpo", "rl.micro_batch_per_replica=64", "rollout.max_tokens=7", "seed=0"])
    with RunDir.create(tmp_path, "demo") as run:
        run.write_provenance(changed=loaded.changed)
    (entry,) = json.loads((run.path / "provenance.json").read_text(encoding="utf-8"))
    assert entry["changed"].pop("rollout.max_tokens")["is"] == 7
    assert entry["changed"] == {"rl.micro_batch_per_replica": {"was": None, "is": 64}}
