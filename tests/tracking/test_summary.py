"""The line about time: one after the other, or side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.tracking.summary import summarise

STEP = {
    "reward/mean": 0.5, "time/step_s": 2.0, "time/rollout_s": 1.0, "time/train_s": 0.5, "time/sync_s": 0.2,
    "tokens/generated": 100,
}  # fmt: skip


def time_line(run: Path, *rows: dict[str, Any]) -> str:
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, **row}) + "\n" for n, row in enumerate(rows, 1)))
    (run / "validation.jsonl").write_text("")
    (line,) = [line for line in summarise(run, len(rows)).lines() if line.startswith("  time ")]
    return line.split(maxsplit=1)[1]


def test_phases_one_after_the_other_leave_a_rest(tmp_path: Path) -> None:
    line = time_line(tmp_path, STEP, STEP | {"staleness/max": 0})
    assert line == "rollout 50% · train 25% · sync 10% · other 15% · 50 tokens/s"


def test_a_run_ahead_says_that_both_went_on_together(tmp_path: Path) -> None:
    ahead = STEP | {"time/rollout_s": 1.9, "time/train_s": 1.6, "staleness/max": 1}
    assert time_line(tmp_path, ahead, ahead) == "rollout 95% and train 80%, side by side · sync 10% · 50 tokens/s"


def test_no_share_is_more_than_the_whole(tmp_path: Path) -> None:
    """Generation goes on while the loop waits for a checkpoint, which no step counts."""
    ahead = STEP | {"time/rollout_s": 2.5, "time/train_s": 1.25, "staleness/max": 1}
    assert time_line(tmp_path, ahead).startswith("rollout 100% and train 50%, side by side")
