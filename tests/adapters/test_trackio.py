"""Trackio for real, in the environment of `make test-adapters`: what a run logs is read back from Trackio's own database."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain import Hook
from posttrain.errors import PluginError
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.tracking.metrics import read_metrics, read_validation

QUESTIONS = [{"question": f"{a}plus{b}", "answer": str(a + b)} for a in range(5) for b in range(5)]


def likes_a(completion: str, row: Any) -> float:
    return completion.count("a") / 8


class StopsAt(Hook):
    """Ends the run after a step, as a crash would."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step_end(self, step):
        if step == self.at:
            raise RuntimeError("stop")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trackio reads its folder when it is imported."""
    assert "trackio" not in sys.modules
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path / "trackio"


def logged(name: str) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs("mine", name)


def test_a_run_and_its_resume_are_one_run_of_trackio(tmp_path: Path, database: Path) -> None:
    write_tiny_model(tmp_path / "model")
    hooks = [{"name": "trackio", "options": {"project": "mine"}}, {"name": StopsAt(2), "on_error": "fail"}]
    with pytest.raises(PluginError) as caught:
        posttrain.train(
            model=tmp_path / "model", data=QUESTIONS, reward=likes_a, prompt_column="question", run_dir=tmp_path / "outputs",
            hooks=hooks, rl={"steps": 3, "group_size": 2, "batch_per_replica": 4}, validation={"prompts": 2},
            rollout={"max_tokens": 4, "max_model_len": 32, "reward_workers": 1}, grid={"threads": 1},
            tracking={"display": "none"},
        )  # fmt: skip
    run = caught.value.run_dir  # type: ignore[attr-defined]
    posttrain.train(resume=run, reward=likes_a, data=QUESTIONS, hooks=hooks[:1])
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("mine") == [run.name]
    rows = logged(run.name)
    written = [*read_metrics(run), *read_validation(run)]
    for row in written:
        numbers = {k: v for k, v in row.items() if k != "step" and v is not None}
        assert any(r["step"] == row["step"] and numbers.items() <= r.items() for r in rows), row
    assert len(rows) == len(written)
    config = SQLiteStorage.get_run_config("mine", run.name)
    assert config is not None and config["rl"]["steps"] == 3
    assert list(database.glob("*.db"))


def test_it_is_found_and_works_in_this_environment() -> None:
    command = [sys.executable, "-m", "posttrain.cli", "plugins", "doctor", "trackio"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "ok hooks/trackio" in done.stdout, done.stdout + done.stderr
