"""Rollout files: every trajectory comes back to the token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from posttrain.errors import ConfigError, DataError, RunInterrupted
from posttrain.tracking.rollouts import (
    COLUMNS,
    read_rollouts,
    rollout_steps,
    supersede_after,
    to_groups,
    to_trajectory,
    write_rollouts,
)
from posttrain.types import Group

Make = Callable[[str, list[float | None]], Group]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    return tmp_path


def test_a_trajectory_survives_the_round_trip(run: Path, group: Make) -> None:
    groups = [group("a", [1.0, 0.0]), group("b", [None, 0.5])]
    path = write_rollouts(run / "rollouts", 12, groups, advantages={"a/0": 0.7}, decode=lambda ids: "".join(map(str, ids)))
    assert path.name == "step_000012.parquet"
    rows = read_rollouts(run, 12)
    assert [to_trajectory(r) for r in rows] == [t for g in groups for t in g.trajectories]
    assert [r["advantage"] for r in rows] == [0.7, 0.0, 0.0, 0.0]
    assert rows[0]["prompt"] == "12" and rows[0]["completion"] == "342" and rows[0]["task"] == {"id": "a", "answer": 4}
    assert rows[2]["reward"] is None and rows[2]["info"]["cause"] == "exception"


def test_groups_come_back_in_batch_order(run: Path, group: Make) -> None:
    groups = [group("b", [1.0, 0.0]), group("a", [None])]
    write_rollouts(run / "rollouts", 1, groups)
    rows = read_rollouts(run, 1)
    assert to_groups(rows) == groups
    rows[1]["mask"].pop()
    with pytest.raises(DataError, match="the recorded trajectory 'b/1' of step 1 is damaged") as caught:
        to_groups(rows)
    assert "one mask, log-prob and version per token" in caught.value.cause and caught.value.code == "rollouts_damaged"


@pytest.mark.parametrize("damage", ["cut", "column", "json"])
def test_a_file_that_is_not_what_was_written_is_refused(run: Path, group: Make, damage: str) -> None:
    path = write_rollouts(run / "rollouts", 1, [group("a", [1.0])])
    table = pq.read_table(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "column":
        pq.write_table(table.drop_columns(["mask"]), path)
    else:
        rows = [row | {"info": "{"} for row in table.to_pylist()]
        pq.write_table(type(table).from_pylist(rows, schema=table.schema), path)
    with pytest.raises(DataError, match=r"the rollout file .*step_000001\.parquet cannot be read") as caught:
        read_rollouts(run, 1)
    assert damage != "column" or "it has no column mask" in caught.value.cause


def test_the_file_has_the_documented_columns(run: Path, group: Make) -> None:
    path = write_rollouts(run / "rollouts", 1, [group("a", [1.0])])
    assert pq.read_schema(path).names == list(COLUMNS)


def test_the_last_step_is_the_default_and_an_absent_one_names_those_there_are(run: Path, group: Make) -> None:
    with pytest.raises(ConfigError, match="no rollouts in"):
        read_rollouts(run)
    for step in (2, 10):
        write_rollouts(run / "rollouts", step, [group(f"g{step}", [1.0])])
    (run / "rollouts" / "step_x.parquet").touch()
    assert rollout_steps(run) == [2, 10]
    assert read_rollouts(run)[0]["step"] == 10
    with pytest.raises(ConfigError, match="no rollouts of step 3") as caught:
        read_rollouts(run, 3)
    assert "2, 10" in caught.value.cause


def test_a_resume_puts_later_files_aside(run: Path, group: Make) -> None:
    for step in (1, 2, 3):
        write_rollouts(run / "rollouts", step, [group("a", [1.0])])
    write_rollouts(run / "rollouts", 3, [group("a", [1.0])], kind="validation")
    assert supersede_after(run, 1) == 3
    assert rollout_steps(run) == [1] and rollout_steps(run, "validation") == []
    assert len(list((run / "rollouts").glob("*.superseded"))) == 3


def test_a_full_disk_leaves_no_half_file(run: Path, group: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(table: object, where: Path, **_: object) -> None:
        Path(where).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(RunInterrupted, match="the disk is full") as caught:
        write_rollouts(run / "rollouts", 1, [group("a", [1.0])])
    assert "step_000001.parquet" in caught.value.message
    assert list((run / "rollouts").iterdir()) == []
