"""Parts of rewards with bounds, a good end and a weight: declared by an environment, shown wherever the parts are."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from posttrain.data.environment import Environment
from posttrain.data.reward_range import Range, by_metric
from posttrain.errors import ConfigError
from posttrain.testing.letters import Letters
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.testing.tiny_run import TinyRun
from posttrain.tracking.comparison import compare_runs
from posttrain.tracking.display import Progress, panel
from posttrain.tracking.plot import plot
from posttrain.tracking.ranges import FILE, read_ranges, write_ranges
from posttrain.tracking.show import show
from posttrain.tracking.versus import against
from posttrain.types import Reward


class Measured(Letters):
    """Letters, with how long an answer is beside it."""

    metrics = {"letter": Range(0, 1, weight=1.0), "length": Range(min=0, better="lower")}  # noqa: RUF012

    def compute_reward(self, state: Any) -> Reward:
        right = super().compute_reward(state).total
        return Reward(right, {"letter": float(right or 0), "length": float(len(state.completion))})


def test_a_range_says_what_it_is() -> None:
    assert [one.mark for one in (Range(0, 1), Range(-1, 0.5, "lower"), Range(min=0), Range(max=3), Range())] == [
        "↑ 0–1", "↓ -1–0.5", "↑ ≥0", "↑ ≤3", "↑"]  # fmt: skip
    assert Range(0, 1, weight=0.2).plain() == {"min": 0, "max": 1, "better": "higher", "weight": 0.2}
    nan: Any = float("nan")
    for options in ({"min": 1, "max": 1}, {"min": nan}, {"max": "much"}, {"better": "up"}, {"weight": True}):
        with pytest.raises(ConfigError):
            Range(**options)


def test_a_part_of_several_environments_has_a_range_where_they_agree() -> None:
    one, other = Range(0, 1), Range(0, 1, "lower")
    assert by_metric({"a": {"x": one, "y": one}, "b": {"x": one, "y": other}}) == {
        "reward/a/x": one, "reward/a/y": one, "reward/b/x": one, "reward/b/y": other, "reward/x": one}  # fmt: skip
    assert by_metric({"a": {}}) == {} and Environment.metrics == {}


def test_a_file_that_cannot_be_read_is_no_ranges(tmp_path: Path) -> None:
    ranges = {"reward/x": Range(0, 2, "lower", 0.5), "reward/y": Range()}
    write_ranges(tmp_path, ranges)
    assert read_ranges(tmp_path) == ranges and read_ranges(tmp_path / "absent") == {}
    for text in ("", "[]", '{"reward/x": {"colour": "red"}}', '{"reward/x": {"min": 2, "max": 1}}'):
        (tmp_path / FILE).write_text(text)
        assert read_ranges(tmp_path) == {}
    write_ranges(tmp_path / "absent", {})


def printed(thing: Any) -> str:
    out = Console(file=io.StringIO(), width=120, force_terminal=False)
    thing(out)
    return out.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_run_shows_the_parts_that_its_environment_declares(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    result = TinyRun(tmp_path / "model", tmp_path)(["rl.steps=1", "environments.0.label=mine"], env=Measured)
    ranges = read_ranges(result.run)
    assert ranges == by_metric({"mine": dict(Measured.metrics)}) and set(ranges) <= set(result.metrics()[-1])

    shown = printed(lambda out: show(result.run, console=out))
    assert "(letter 0 ↑ 0–1, length " in shown and " ↓ ≥0)" in shown
    progress = Progress(1, metrics=result.metrics()[-1], rewards=[0.5], ranges=ranges)
    drawn = printed(lambda out: out.print(panel(progress)))
    assert "letter 0" in drawn and "↑ 0–1" in drawn and "length" in drawn and "mine/" not in drawn
    plot(result.run, tmp_path / "parts.svg")
    svg = (tmp_path / "parts.svg").read_text()
    assert "letter ↑ 0–1 · weight 1" in svg and "length ↓ ≥0" in svg


@pytest.mark.parametrize(("better", "verdict"), [("lower", "A better"), ("higher", "B better")])
def test_a_comparison_knows_which_end_is_the_good_one(tmp_path: Path, better: Any, verdict: str) -> None:
    for ahead in (0, 1):
        run = tmp_path / f"run-{ahead}"
        run.mkdir()
        config = {"name": run.name, "seed": 0, "rollout": {"max_async_rollout": ahead}}
        (run / "config.yaml").write_text(json.dumps(config))
        (run / "origins.json").write_text(json.dumps({"rollout.max_async_rollout": "command line"}))
        rows = [{"step": n, "reward/words": 5 + ahead + 0.01 * n, "tokens/generated": 1, "time/step_s": 1} for n in range(1, 21)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_ranges(run, {"reward/words": Range(better=better)})
    found = against(compare_runs([tmp_path / "run-0", tmp_path / "run-1"], "reward/words"))
    assert found is not None and found.verdict == verdict
