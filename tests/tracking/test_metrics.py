"""metrics.jsonl: every row on disk at once, plain JSON, and cut cleanly before a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.tracking.metric_names import definitions, find
from posttrain.tracking.metrics import MetricsWriter, read_metrics, truncate_after


def test_a_row_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"loss": 0.5, "reward/mean": np.float32(0.25), "n": np.int64(3), "flag": True})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1, "loss": 0.5, "reward/mean": 0.25, "n": 3, "flag": True,
    }
    writer.close()


def test_non_finite_numbers_are_strict_json_and_come_back(tmp_path: Path) -> None:
    def refuse(token: str) -> float:
        raise AssertionError(f"{token} is not JSON")

    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "loss": None})
    writer.close()
    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    row = read_metrics(tmp_path)[0]
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf and row["loss"] is None


def test_a_torn_last_line_is_ignored_by_readers_and_cut_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]
    writer = MetricsWriter(path)
    writer.write(2, {})
    writer.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


@settings(max_examples=30, derandomize=True, deadline=None)
@given(rows=st.lists(st.integers(0, 20), max_size=20), cut=st.integers(-1, 21), torn=st.booleans())
def test_truncation_moves_exactly_the_later_rows_and_deletes_none(
    tmp_path_factory: object, rows: list[int], cut: int, torn: bool
) -> None:
    folder = tmp_path_factory.mktemp("m")  # type: ignore[attr-defined]
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in rows) + ('{"st' if torn else ""))
    assert truncate_after(path, cut) == sum(s > cut for s in rows)
    assert [r["step"] for r in read_metrics(path)] == [s for s in rows if s <= cut]
    aside = folder / "metrics.jsonl.superseded"
    later = [s for s in rows if s > cut]
    assert [json.loads(line)["step"] for line in aside.read_text().splitlines()] == later if later else not aside.exists()


def test_a_second_resume_keeps_what_the_first_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        writer = MetricsWriter(path)
        for step in (1, 2, 3):
            writer.write(step, {})
        writer.close()
        truncate_after(path, 0)
    assert len(list(tmp_path.glob("*.superseded"))) == 2
    assert truncate_after(tmp_path / "absent.jsonl", 0) == 0


def test_names_are_unique_and_families_match_concrete_names() -> None:
    names = [m.name for m in definitions()]
    assert len(names) == len(set(names))
    assert all(m.meaning.endswith((".", "?")) and m.emitter for m in definitions())
    assert find("reward/mean") is not None and find("reward/mean").name == "reward/mean"  # type: ignore[union-attr]
    assert find("reward/correct").name == "reward/<part>"  # type: ignore[union-attr]
    assert find("rollout/unscorable/timeout") is not None
    assert find("validation/arithmetic/reward/mean") is not None
    assert find("nothing/like/this") is None and find("reward/") is None


def test_the_frozen_names_are_defined() -> None:
    frozen = (
        "reward/mean loss grad_norm time/step_s time/rollout_s time/train_s time/sync_s tokens/trained policy/ratio_min "
        "train/grpo_all_zero_group_count train/grpo_all_one_group_count"
    )
    assert all(find(name) for name in frozen.split())
