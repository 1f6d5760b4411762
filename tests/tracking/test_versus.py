"""Two settings against each other: at equal steps, tokens and seconds, with one sentence at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.cli.main import main
from posttrain.tracking.comparison import chosen_metric, compare_runs, find_runs
from posttrain.tracking.versus import against, points, verdict_of

Score = Callable[[int], float]


def made_run(
    root: Path, ahead: int, score: Score, *, seed: int = 0, steps: int = 20, seconds: float = 2.0, tokens: int = 100,
    held_out: Sequence[int] = (), **metrics: float,
) -> Path:  # fmt: skip
    """A run with `rollout.max_async_rollout=ahead` whose reward at a step is `score(step)`."""
    run = root / f"run-{ahead}-{seed}"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps({"name": run.name, "seed": seed, "rollout": {"max_async_rollout": ahead}}))
    (run / "origins.json").write_text(json.dumps({"rollout.max_async_rollout": "command line", "seed": "command line"}))
    rows: list[dict[str, Any]] = [
        {"step": n, "reward/mean": score(n), "time/step_s": seconds, "tokens/generated": tokens, **metrics}
        for n in range(1, steps + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = [{"step": n, "validation/reward/mean": score(n)} for n in held_out]
    (run / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in measured))
    return run


def noisy(seed: int, slope: float = 0.02, shift: float = 0.0) -> Score:
    noise = np.random.default_rng(seed).normal(scale=0.02, size=1000)
    return lambda n: 0.2 + slope * n + shift + float(noise[n])


def versus(root: Path, metric: str | None = None) -> Any:
    runs = find_runs([root])
    return verdict_of(runs, compare_runs(runs, metric or chosen_metric(runs)), asked=metric is not None)


def test_runs_with_equal_scores_are_not_distinguishable(tmp_path: Path) -> None:
    for ahead in (0, 1):
        made_run(tmp_path, ahead, noisy(7), seconds=2.0)
    found = versus(tmp_path)
    assert found.verdict == "not distinguishable" and [axis.winner for axis in found.axes] == [None] * 3
    assert found.names == ("0", "1") and [axis.name for axis in found.axes] == ["batch steps", "tokens", "seconds"]


def test_a_faster_run_is_better_at_equal_seconds_alone(tmp_path: Path) -> None:
    made_run(tmp_path, 0, noisy(1), seconds=2.0)
    made_run(tmp_path, 1, noisy(2), seconds=1.0)
    found = versus(tmp_path)
    by_axis = {axis.name: axis for axis in found.axes}
    assert [by_axis[name].winner for name in ("batch steps", "tokens", "seconds")] == [None, None, "B"]
    assert found.sentence.startswith("at equal batch steps not distinguishable: reward/mean of B − A is ")
    assert "; at equal seconds B better (+" in found.sentence and "95% interval over 20 points of the curves" in found.sentence
    assert found.totals["seconds"] == (40.0, 20.0) and found.totals["tokens"] == (2000.0, 2000.0)


@pytest.mark.parametrize(("shift", "wanted"), [(0.2, "B better"), (-0.2, "A better")])
def test_a_shift_is_told_with_its_size(tmp_path: Path, shift: float, wanted: str) -> None:
    made_run(tmp_path, 0, noisy(1))
    made_run(tmp_path, 1, noisy(2, shift=shift))
    found = versus(tmp_path)
    axis = found.axes[0]
    assert found.verdict == wanted and axis.b - axis.a == pytest.approx(shift, abs=0.03)
    assert axis.last_b - axis.last_a == pytest.approx(shift, abs=0.05) and axis.last_difference.points == 4
    assert "of 1 and 1 run(s)" in found.caveat


def test_eight_common_seeds_are_the_pairs(tmp_path: Path) -> None:
    for ahead in (0, 1):
        for seed in reversed(range(8)) if ahead else range(8):
            made_run(tmp_path, ahead, noisy(seed, shift=0.01 * ahead), seed=seed, steps=4)
    found = versus(tmp_path)
    assert found.pairs == "seeds" and found.axes[0].difference.points == 8 and found.caveat == ""
    assert found.axes[0].difference.mean == pytest.approx(0.01) and found.verdict == "B better"  # same noise by seed


def test_few_points_say_so(tmp_path: Path) -> None:
    for ahead in (0, 1):
        made_run(tmp_path, ahead, lambda n, ahead=ahead: float(ahead), steps=5)
    found = versus(tmp_path)
    assert found.verdict == "not distinguishable" and "over 5 points of the curves, fewer than the 8" in found.sentence


def test_held_out_scores_come_first_where_there_are_enough(tmp_path: Path) -> None:
    for ahead in (0, 1):
        made_run(tmp_path / "many", ahead, noisy(ahead), held_out=range(0, 20, 2))
        made_run(tmp_path / "few", ahead, noisy(ahead), held_out=(0, 10, 20))
    assert versus(tmp_path / "many").metric == "validation/reward/mean"
    assert versus(tmp_path / "few").metric == "reward/mean"
    assert versus(tmp_path / "few", "validation/reward/mean").metric == "validation/reward/mean"


def test_another_number_of_settings_has_no_verdict(tmp_path: Path) -> None:
    for ahead in (0, 1, 2):
        made_run(tmp_path / "three", ahead, noisy(ahead))
    made_run(tmp_path / "one", 0, noisy(1))
    assert versus(tmp_path / "three") is None and versus(tmp_path / "one") is None
    made_run(tmp_path / "apart", 0, noisy(1), held_out=(0, 1))
    made_run(tmp_path / "apart", 1, noisy(1), held_out=(2, 3))
    assert against(compare_runs(find_runs([tmp_path / "apart"]), "validation/reward/mean")) is None


def test_a_metric_that_is_no_reward_is_higher_not_better(tmp_path: Path) -> None:
    for ahead in (0, 1):
        made_run(tmp_path, ahead, noisy(1), loss=float(ahead))
    assert versus(tmp_path, "loss").verdict == "B higher"


def test_what_was_used_up_at_a_step(tmp_path: Path) -> None:
    run = made_run(tmp_path, 0, noisy(1), seconds=2.0)
    assert points([0, 1, 3], run, "seconds") == [0.0, 2.0, 6.0] and points([0, 4], run, "batch steps") == [0.0, 4.0]
    assert points([1], made_run(tmp_path, 1, noisy(1), tokens=0), "tokens") is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path, 0, noisy(1), **{"staleness/mean": 0.0, "staleness/max": 0.0, "policy/logprob_gap": 1e-6})
    made_run(tmp_path, 1, noisy(2), **{"staleness/mean": 1.0, "staleness/max": 2.0, "policy/logprob_gap": 0.25})
    assert main(["compare", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    cells = {" ".join(line.split()[:-2]): line.split()[-2:] for line in text.splitlines() if len(line.split()) > 2}
    assert cells["staleness/mean"] == ["0", "1"] and cells["staleness/max"] == ["0", "2"]
    assert cells["policy/logprob_gap"] == ["1e-06", "0.25"] and cells["seconds in all"] == ["40", "40"]
    assert "A: 0   B: 1   reward/mean" in text and "verdict: at equal batch steps not distinguishable" in text
    assert main(["compare", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["verdict"]
    assert found["verdict"] == "not distinguishable" and found["at_equal"]["seconds"]["difference"]["points"] == 20
    assert found["metrics"]["staleness/max"] == {"a": 0.0, "b": 2.0}
    (tmp_path / "run-1-0" / "metrics.jsonl").unlink()
    assert main(["compare", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] is None


def test_the_command_says_why_two_runs_have_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        made_run(tmp_path / "seeds", 0, noisy(1), seed=seed)
    assert main(["compare", str(tmp_path / "seeds")]) == 0
    assert "no verdict: the runs differ in nothing that somebody set, but the seed" in capsys.readouterr().out
    made_run(tmp_path / "apart", 0, noisy(1), held_out=(0, 1))
    made_run(tmp_path / "apart", 1, noisy(1), held_out=(2, 3))
    assert main(["compare", str(tmp_path / "apart"), "--metric", "validation/reward/mean"]) == 0
    assert "no verdict: the runs have no steps in common with validation/reward/mean" in capsys.readouterr().out


def test_seconds_are_those_of_the_wall_where_a_run_has_them(tmp_path: Path) -> None:
    """Steps of 2 s each, with a wait of 10 s for a validation after the second."""
    run = made_run(tmp_path, 0, noisy(1), steps=3)
    assert points([1, 2, 3], run, "seconds") == [2, 4, 6]
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines()
    rows = [json.loads(line) | {"time/wall_s": wall} for line, wall in zip(lines, (2, 4, 16), strict=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert points([1, 2, 3], run, "seconds") == [2, 4, 16]
