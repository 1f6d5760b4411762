"""What counts, what is told, and the files: a completion that failed is wrong and never left out."""

import json
from pathlib import Path

import pytest
from eval_toys import folder, result

from posttrain.errors import DataError
from posttrain.evals.result import Results, floor_of


def test_a_completion_without_a_reward_is_wrong_in_every_measure() -> None:
    found = result([[1, None, None, 0], [1, 1, 1, 1]])
    assert found.values("accuracy") == {"0": 0.25, "1": 1.0}
    assert found.values("reward") == {"0": 0.25, "1": 1.0}
    assert found.values("pass@2") == {"0": pytest.approx(0.5), "1": 1.0}
    assert found.values("pass^2") == {"0": 0.0, "1": 1.0}
    assert found.causes == {"raised": 2} and found.completions == 8
    assert found.metrics()["eval/toy/unscorable_count"] == 2 and found.metrics()["eval/toy/accuracy"] == 0.625


def test_a_missing_reward_never_raises_a_mean_below_zero() -> None:
    found = result([[-1.0, None, -0.5, -0.5]])
    assert floor_of([found]) == -1.0 and found.values("reward")["0"] == pytest.approx(-0.75)
    other = result([[-4.0, 0.0, 0.0, 0.0]])
    assert floor_of([found, other]) == -4.0 and found.values("reward", floor=-4.0)["0"] == pytest.approx(-1.5)
    assert floor_of([result([[2.0, 3.0, 1.0, None]])]) == 0.0


def test_measures_are_those_of_the_k_that_were_asked_for() -> None:
    assert result([[1, 0, 0, 0]], k=[1, 3]).measures == ["reward", "accuracy", "pass@1", "pass@3", "pass^3"]
    assert result([[1, 0, 0, 0]], k=[1]).values("pass@1") == {"0": pytest.approx(0.25)}
    assert result([[1.0]], k=[], samples=1).measures == ["reward", "accuracy"]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    files, first, later = Results(tmp_path / "evals"), result([[1, None, 0, 0]]), result([[1, 1, 0, 0]], step=20)
    for one in (later, first, result([[0, 0, 0, 0]], label="other")):
        files.write(one)
    assert folder(tmp_path) == ["evals/other/0.jsonl", "evals/summary.json", "evals/toy/0.jsonl", "evals/toy/20.jsonl"]
    assert [(one.label, one.step) for one in files.read()] == [("toy", 0), ("toy", 20), ("other", 0)]
    again = files.read()[0]
    assert again.rows == first.rows and again.settings == first.settings
    assert again.intervals["accuracy"] == first.intervals["accuracy"]
    assert files.has("toy", 20) and not files.has("toy", 10)
    summary = json.loads((tmp_path / "evals" / "summary.json").read_text())["evals"]
    assert next(one for one in summary if one["label"] == "toy" and one["step"] == 0)["unscorable"] == {"raised": 1}


def test_a_result_is_never_overwritten_and_the_newer_one_counts(tmp_path: Path) -> None:
    files = Results(tmp_path)
    files.write(result([[0, 0, 0, 0]]))
    files.write(result([[1, 1, 1, 1]]))
    assert [one.values("accuracy") for one in files.read()] == [{"0": 1.0}]
    assert "toy/0.jsonl.superseded" in folder(tmp_path)


def test_a_resume_puts_aside_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    files = Results(tmp_path)
    for step in (0, 10, 20):
        files.write(result([[1, 0, 0, 0]], step=step))
    (tmp_path / "toy" / "completions_000020.parquet").write_text("x")
    assert files.cut_after(10) == 1
    assert [one.step for one in files.read()] == [0, 10] and not files.has("toy", 20)
    assert {"toy/20.jsonl.superseded", "toy/completions_000020.parquet.superseded"} <= set(folder(tmp_path))
    assert Results(tmp_path / "nothing").cut_after(3) == 0 and Results(tmp_path / "nothing").read() == []


def test_a_damaged_summary_is_told(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(DataError, match=r"summary\.json cannot be read"):
        Results(tmp_path).read()
