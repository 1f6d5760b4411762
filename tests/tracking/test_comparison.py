"""Runs side by side: grouped by what was set, seeds together, with the curve of a metric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import main
from posttrain.errors import ConfigError
from posttrain.tracking.comparison import chosen_metric, compare_runs, find_runs
from posttrain.tracking.plot import plot_comparison


def made_run(root: Path, name: str, config: dict[str, Any], origins: dict[str, str] | None, scores: dict[int, float]) -> Path:
    run = root / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps({"name": name, **config}))
    if origins is not None:
        (run / "origins.json").write_text(json.dumps(origins))
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "reward/mean": v}) + "\n" for s, v in scores.items()))
    rows = ({"step": s, "validation/reward/mean": v} for s, v in scores.items())
    (run / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two objectives, two seeds each. The clip that follows from the objective differs, too."""
    typed = {"rl.objective.name": "command line", "seed": "command line", "rl.steps": "experiment toy"}
    for number, (name, seed) in enumerate([("grpo", 1), ("grpo", 2), ("cispo", 1), ("cispo", 2)]):
        config = {"seed": seed, "rl": {"steps": 2, "objective": {"name": name, "clip_low": 0.2 if name == "grpo" else 1.0}}}
        scores = {0: 0.25, 1: 0.5, 2: 0.5 + seed / 8 + (name == "cispo") / 16}
        made_run(tmp_path / "sweep" / str(number), f"toy-{number}", config, typed, scores)
    return tmp_path / "sweep"


def test_seeds_of_one_setting_are_one_row_and_values_that_follow_are_no_label(sweep: Path) -> None:
    found = compare_runs(find_runs([sweep]))
    assert found.keys == ("seed", "rl.objective.name")
    assert [(row.name, row.seeds) for row in found.rows] == [("grpo", (1, 2)), ("cispo", (1, 2))]
    first = found.rows[0]
    assert first.curve == ((0, (0.25, 0.25)), (1, (0.5, 0.5)), (2, (0.625, 0.75)))
    assert first.before == (0.25, 0.25) and first.after == (0.625, 0.75)
    assert first.mean == pytest.approx((0.25 + 0.5 + 0.6875) / 3)


def test_without_origins_everything_that_differs_is_a_label(sweep: Path) -> None:
    for path in sweep.rglob("origins.json"):
        path.unlink()
    runs = sorted(path.parent for path in sweep.rglob("config.yaml"))
    assert compare_runs(runs).keys == ("seed", "rl.objective.name", "rl.objective.clip_low")


def test_only_steps_that_all_seeds_have_count_and_a_run_without_any_is_kept(sweep: Path) -> None:
    runs = find_runs([sweep])
    (runs[1] / "validation.jsonl").write_text(json.dumps({"step": 1, "validation/reward/mean": 0.75}) + "\n")
    for run in runs[2:]:
        (run / "validation.jsonl").unlink()
    first, second = compare_runs(runs).rows
    assert first.curve == ((1, (0.5, 0.75)),) and second.curve == () and second.mean is None


def test_runs_are_found_in_folders_in_the_order_of_their_start_and_once(sweep: Path) -> None:
    runs = find_runs([sweep, sweep / "0" / "toy-0"])
    assert [run.name for run in runs] == ["toy-0", "toy-1", "toy-2", "toy-3"]
    with pytest.raises(ConfigError, match="there is no run at"):
        find_runs([sweep.parent / "nowhere"])


def test_a_metric_that_no_run_has(sweep: Path) -> None:
    assert compare_runs(find_runs([sweep]), "reward/mean").rows[0].before == (0.25, 0.25)
    with pytest.raises(ConfigError, match="none of the 4 runs has reward/max"):
        compare_runs(find_runs([sweep]), "reward/max")


def test_without_a_held_out_score_the_one_in_training_is_compared(sweep: Path) -> None:
    runs = find_runs([sweep])
    assert chosen_metric(runs) == "validation/reward/mean"
    for path in sweep.rglob("validation.jsonl"):
        path.unlink()
    assert chosen_metric(runs) == "reward/mean"
    (runs[1] / "metrics.jsonl").write_text(json.dumps({"step": 1, "dpo/margin": 0.5}) + "\n")
    assert chosen_metric(runs[1:2]) == "dpo/margin"
    assert chosen_metric([]) == "validation/reward/mean"


def test_the_command_prints_a_row_for_each_setting(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "validation/reward/mean"
    assert lines[2].split()[:9] == ["grpo", "2", "0.250", "±", "0.000", "0.688", "±", "0.088", "0.479"]
    assert lines[2].endswith("toy-0 and 1 more")
    assert main(["compare", str(sweep), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[1]["label"] == {"rl.objective.name": "cispo"} and rows[1]["values"][2] == [0.6875, 0.8125]


def test_the_drawing_has_a_panel_for_each_row(sweep: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["compare", str(sweep), "--plot", str(tmp_path / "out.png"), "--title", "Two"]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    comparison = compare_runs(find_runs([sweep / "0"]))
    plot_comparison(comparison, tmp_path / "one.png")
    assert (tmp_path / "one.png").exists()


def test_a_seed_that_crashed_hides_no_other_and_is_told(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = find_runs([sweep])
    (runs[0] / "validation.jsonl").unlink()
    with (runs[1] / "validation.jsonl").open("a") as file:
        file.write('{"step": 3, "validation/reward/mean": NaN}\n')
    row = compare_runs(runs).rows[0]
    assert row.seeds == (2,) and row.without == (runs[0],) and row.curve == ((0, (0.25,)), (1, (0.5,)), (2, (0.75,)))
    assert main(["compare", str(sweep)]) == 0
    assert "1 of 2 runs of grpo has no validation/reward/mean" in capsys.readouterr().out


@pytest.mark.parametrize(("out", "cause"), [("out.xyz", "suffix 'xyz'"), ("out", "no suffix"), ("absent/out.png", "no folder")])
def test_a_drawing_that_cannot_be_written_is_refused_before_the_work(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, cause: str
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["compare", str(sweep), "--plot", str(tmp_path / out)]) == 2
    said = capsys.readouterr()
    assert "cannot draw into" in said.err and cause in said.err and not said.out
